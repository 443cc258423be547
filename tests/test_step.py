"""One update: what it computes and leaves alone; mesh and micro-batches must not be visible."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stores import E, random_documents, write_store
from tiny import TINY, VARIETY, random_params

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.data.packing import Batch
from jaxgpt.data.pipeline import batches
from jaxgpt.data.stream import open_data
from jaxgpt.errors import ConfigError
from jaxgpt.evaluation.generate import generate
from jaxgpt.model import gpt
from jaxgpt.model.params import Params, abstract, specs
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import to_global
from jaxgpt.parallel.xla_options import of_dtype
from jaxgpt.training.audit import rows_digest
from jaxgpt.training.optimizer import build
from jaxgpt.training.state import TrainState, abstract_state, state_shardings
from jaxgpt.training.step import (
    gradients,
    make_train_step,
    train_step,
)

ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
MESHES = [
    {"data": 8},
    {"data": 1, "fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 1, "fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def config(model: ModelConfig = ONE_LAYER, mesh: dict[str, int] | None = None, **train: Any):
    train = {"global_batch": 8, "num_steps": 60, "compute_dtype": "float32"} | train
    return Config(
        model=model,
        mesh=MeshConfig(**mesh or {}),
        train=TrainConfig(**train),
        # A large eps, or Adam would blow rounding up where a gradient is nearly 0.
        optim=OptimConfig(lr=1e-2, warmup_steps=5, eps=1e-3),
    )


def optimizer(cfg: Config):
    return build(cfg, cfg.train.num_steps, abstract(specs(cfg.model), cfg.train.param_dtype))


def initial(cfg: Config) -> TrainState:
    """Return a state with random parameters, made without compiling."""
    params, zero = random_params(cfg.model), np.int32(0)
    like = abstract_state(cfg, optimizer(cfg)).opt_state
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    return jax.tree.map(jnp.asarray, TrainState(zero, params, moments, zero, zero, np.uint32(0)))


def logged_sums(cfg: Config, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return (sum of cross-entropy in nats, weight) that a step would log for a batch."""
    _, sums = gradients(cfg, params, batch, jnp.int32(0))
    return sums["loss_sum"], sums["weight"]


def rows(cfg: Config, seed: int = 0) -> Batch:
    """Return 8 rows: row r has 2 r + 1 loss tokens, the last two are filler without any."""
    rng = np.random.default_rng(seed)
    shape = (cfg.train.accum_steps, cfg.train.micro_rows, cfg.model.seq_len)
    tokens, targets = rng.integers(0, cfg.model.vocab_size, (2, *shape)).astype(np.int32)
    length = np.array([1, 3, 5, 7, 9, 11, 0, 0]).reshape(shape[:2])
    return Batch(tokens, targets, (np.arange(shape[2]) < length[..., None]).astype(np.float32))


def run(cfg: Config, steps: int, devices: int) -> tuple[TrainState, list[dict[str, float]]]:
    """Return the state and the metrics of a few steps of the compiled, donated program."""
    mesh, tx = make_mesh(cfg.mesh, jax.devices()[:devices]), optimizer(cfg)
    placed = state_shardings(mesh, cfg, tx)
    step = make_train_step(cfg, tx, mesh, placed)
    state, history = jax.device_put(initial(cfg), placed), []
    for number in range(steps):
        state, metrics = step(state, to_global(mesh, rows(cfg, number)))
        history.append(jax.device_get(metrics))
    return jax.device_get(state), history


@functools.cache
def on_one_device(model: ModelConfig = ONE_LAYER) -> tuple[TrainState, list[dict[str, float]]]:
    return run(config(model), 3, 1)


def same(mine: tuple, right: tuple, error: float = 1e-5) -> None:
    """Assert that losses, norms and the state after some updates agree."""
    for a, b in zip(mine[1], right[1], strict=True):
        assert a["weight"] == b["weight"]
        for key in ("loss_sum", "grad_norm", "lr"):
            np.testing.assert_allclose(a[key], b[key], rtol=error)
    for a, b in zip(*map(jax.tree.leaves, (mine[0], right[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=error, atol=error)


def close(mine: Any, right: Any, share: float) -> None:
    """Assert that each leaf differs by at most a share of its norm."""
    for a, b in zip(*map(jax.tree.leaves, (mine, right)), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) <= share * np.linalg.norm(b)


# Mesh and micro-batches.


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_three_steps_on_a_mesh_equal_those_of_one_device(mesh):
    same(run(config(mesh=mesh), 3, 8), on_one_device())


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_micro_batches_of_unequal_token_counts_equal_the_whole_batch(micro_batch):
    # 1, 3, ..., 11, 0 and 0 tokens: six real rows and two of filling, in 8 parts or 4
    same(run(config(micro_batch=micro_batch), 3, 1), on_one_device(), 1e-6)


def test_micro_batches_on_a_mesh_equal_the_whole_batch_on_one_device():
    same(run(config(mesh={"data": 2, "fsdp": 2}, micro_batch=4), 3, 4), on_one_device())


def test_stacked_layers_on_a_mesh_equal_those_of_one_device():
    stacked = dataclasses.replace(TINY, stacked=True, remat="full")
    same(run(config(stacked, {"data": 2, "fsdp": 4}), 3, 8), on_one_device(stacked))


def test_two_micro_batches_weigh_by_their_tokens():
    # 10 tokens of mean 2.0 and 100 of mean 4.0: 420 / 110 = 3.818182, not 3.0. With logits
    # (x, 0) and target 1 the loss is log(1 + e^x). Blocks of zeros add nothing to the embeddings,
    # unit vectors, which choose one x each.
    model = ModelConfig(
        num_layers=1, embed_dim=2, num_heads=1, vocab_size=2, seq_len=100, positions="none",
        norm="rmsnorm", norm_eps=1e-12, tie_embeddings=False,
    )  # fmt: skip
    cfg = config(model, global_batch=2, micro_batch=1)
    params = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), specs(model))
    x = np.log(np.expm1([2.0, 4.0]))
    params = params.replace(
        embed=np.sqrt(0.5) * np.eye(2, dtype=np.float32),  # RMSNorm makes these rows sqrt(2) long
        final_norm=np.full(2, np.sqrt(0.5), np.float32),
        lm_head=np.array([x, [0, 0]], np.float32),
    )
    tokens = np.array([[[0] * 100], [[1] * 100]], np.int32)
    weights = np.zeros((2, 1, 100), np.float32)
    weights[0, 0, :10], weights[1, 0] = 1, 1
    _, sums = gradients(cfg, params, Batch(tokens, np.ones_like(tokens), weights), 0)
    assert float(sums["loss_sum"] / sums["weight"]) == pytest.approx(3.818182, abs=1e-5)


def test_rows_that_do_not_divide_over_the_mesh_are_refused_before_compiling():
    cfg = config(mesh={"data": 8}, global_batch=12)
    mesh, tx = make_mesh(cfg.mesh), optimizer(cfg)
    with pytest.raises(ConfigError, match="12 rows.*8 devices.*nearest: 8 or 16"):
        make_train_step(cfg, tx, mesh, state_shardings(mesh, cfg, tx))


# Steps that must change nothing.


@pytest.fixture(scope="module")
def step_of_one_layer():
    cfg = config()
    return cfg, jax.jit(functools.partial(train_step, cfg, optimizer(cfg)))


@pytest.mark.parametrize("weight, finite, in_row", [(np.inf, 0, 1), (0.0, 1, 0)])
def test_a_step_that_is_not_finite_or_has_no_loss_token_changes_only_counters(
    step_of_one_layer, weight, finite, in_row
):
    cfg, step = step_of_one_layer
    before, _ = step(initial(cfg), rows(cfg))  # moments are no longer zero
    batch = rows(cfg)
    batch = batch.replace(weights=np.full_like(batch.weights, weight))
    after, metrics = step(before, batch)
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    assert [int(x) for x in (after.step, after.skipped, after.skipped_in_row)] == [2, 1, in_row]
    names = ("finite", "applied", "skipped", "skipped_in_row")
    assert [int(metrics[k]) for k in names] == [finite, 0, 1, in_row]


def test_a_step_that_changes_nothing_has_consumed_its_rows(step_of_one_layer):
    cfg, step = step_of_one_layer
    bad = rows(cfg)
    bad = bad.replace(weights=np.full_like(bad.weights, np.inf))
    after, metrics = step(initial(cfg), bad)
    assert int(metrics["finite"]) == 0
    assert int(after.rows_digest) == int(metrics["rows_digest"]) == int(rows_digest(bad))


def test_a_good_step_after_bad_ones_trains_and_resets_the_row(step_of_one_layer):
    cfg, step = step_of_one_layer
    state, bad = initial(cfg), rows(cfg)
    bad = bad.replace(weights=np.full_like(bad.weights, np.inf))
    for expected in (1, 2):
        state, metrics = step(state, bad)
        assert int(metrics["skipped_in_row"]) == expected
    after, metrics = step(state, rows(cfg))
    assert [int(x) for x in (after.step, after.skipped, after.skipped_in_row)] == [3, 2, 0]
    assert not np.array_equal(after.params.embed, state.params.embed)
    assert int(after.opt_state.count) == 1  # bias correction counts applied updates


def test_a_gradient_that_is_not_finite_is_caught_though_the_loss_is(step_of_one_layer):
    cfg, step = step_of_one_layer
    state = initial(cfg)
    # Rows of equal features times 1e30: the normalised value is 0, its gradient overflows.
    huge = np.full_like(state.params.embed, 1e30)
    state = state.replace(params=state.params.replace(embed=huge))
    after, metrics = step(state, rows(cfg))
    assert int(metrics["finite"]) == 0
    np.testing.assert_array_equal(after.params.embed, huge)


@functools.cache
def guarded() -> tuple[Config, Any, TrainState]:
    """Return a configuration with all that a state can hold, its step on a mesh, and a state.

    Token 63 is never drawn by `rows_below_63`, so that its embedding can be made NaN unseen.
    """
    model = dataclasses.replace(ONE_LAYER, tie_embeddings=False)
    cfg = config(
        model, {"data": 2, "fsdp": 2}, micro_batch=4, global_batch=16, param_dtype="bfloat16"
    )
    optim = dataclasses.replace(cfg.optim, name="muon", ema_decay=0.9, spike_sigma=6.0)
    cfg = dataclasses.replace(cfg, optim=optim)
    mesh, tx = make_mesh(cfg.mesh, jax.devices()[:4]), optimizer(cfg)
    placed = state_shardings(mesh, cfg, tx)
    step = make_train_step(cfg, tx, mesh, placed)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_params(model))
    params = params.replace(embed=params.embed.at[63].set(jnp.nan))
    zero = np.int32(0)
    state = jax.device_get(TrainState(zero, params, tx.init(params), zero, zero, np.uint32(0)))

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        return jax.device_get(step(jax.device_put(state, placed), to_global(mesh, batch)))

    return cfg, run, state


def same_bits(mine: Any, right: Any) -> None:
    """Assert that two trees are equal, NaN included."""
    for a, b in zip(*map(jax.tree.leaves, (mine, right)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def rows_below_63(cfg: Config, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    shape = (cfg.train.accum_steps, cfg.train.micro_rows, cfg.model.seq_len)
    tokens, targets = rng.integers(0, 63, (2, *shape)).astype(np.int32)
    return Batch(tokens, targets, np.ones(shape, np.float32))


@pytest.mark.parametrize("micro", range(4))
def test_one_micro_batch_that_is_not_a_number_skips_the_whole_update_once(micro):
    cfg, run, state = guarded()
    before, metrics = run(state, rows_below_63(cfg, 0))
    assert [int(metrics[k]) for k in ("finite", "applied", "skipped")] == [1, 1, 0]
    assert int(before.opt_state.count) == int(before.opt_state.spikes.seen) == 1
    batch = rows_below_63(cfg, 1)
    batch.tokens[micro, 1, 3] = 63
    after, metrics = run(before, batch)
    same_bits((after.params, after.opt_state), (before.params, before.opt_state))
    assert [int(x) for x in (after.step, after.skipped, after.skipped_in_row)] == [2, 1, 1]
    assert [int(metrics[k]) for k in ("finite", "skipped", "spikes")] == [0, 1, 0]
    digests = [int(rows_digest(rows_below_63(cfg, 0))), int(rows_digest(batch))]
    assert int(after.rows_digest) == sum(digests) % 2**32


def test_a_spike_is_counted_as_skipped_and_not_as_one_that_is_not_finite():
    cfg, run, state = guarded()
    state, _ = run(state, rows_below_63(cfg, 0))
    window = state.opt_state.spikes
    calm = np.full_like(window.losses, 1e-3)  # of 32 updates: any real loss is far above
    calm = window.replace(losses=calm, norms=calm, seen=np.int32(32))
    before = state.replace(opt_state=state.opt_state.replace(spikes=calm))
    after, metrics = run(before, rows_below_63(cfg, 1))
    same_bits(after.params, before.params)
    names = ("finite", "applied", "skipped", "skipped_in_row", "spikes")
    assert [int(metrics[k]) for k in names] == [1, 0, 1, 0, 1]
    assert int(after.opt_state.spikes.seen) == 33
    loss = metrics["loss_sum"] / metrics["weight"]
    assert after.opt_state.spikes.losses[32] == pytest.approx(loss, rel=1e-6)
    assert after.opt_state.spikes.norms[32] == pytest.approx(metrics["grad_norm"], rel=1e-6)


def test_router_biases_move_by_the_load_of_a_step_and_count_in_no_norm():
    model = dataclasses.replace(VARIETY["experts"], num_layers=1)
    cfg = config(model, router_bias_rate=0.01)
    state, batch = initial(cfg), rows(cfg)
    after, metrics = jax.jit(functools.partial(train_step, cfg, optimizer(cfg)))(state, batch)
    grads, sums = jax.jit(functools.partial(gradients, cfg))(state.params, batch, 0)
    load = np.asarray(sums["router_load"][0])
    moved = after.params.layers[0].router_bias - state.params.layers[0].router_bias
    np.testing.assert_allclose(moved, -0.01 * np.sign(load - load.mean()), atol=1e-7)
    assert np.abs(moved).max() > 0
    layers = tuple(p.replace(router_bias=None) for p in grads.layers)
    squares = [(np.float64(g) ** 2).sum() for g in jax.tree.leaves(grads.replace(layers=layers))]
    norm = math.sqrt(sum(squares)) / batch.weights.sum()
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


# What is computed.


def cross_entropy(model: ModelConfig, params: Params, batch: Batch) -> float:
    """Return the weighted sum of -log softmax(logits)[target] in float64."""
    logits = np.asarray(jax.jit(functools.partial(gpt.apply, model))(params, batch.tokens[0]))
    logits = logits.astype(np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, batch.targets[0][..., None], -1
    )[..., 0]  # fmt: skip
    return float((nll * batch.weights[0]).sum())


def test_the_logged_loss_is_the_cross_entropy(step_of_one_layer):
    cfg, step = step_of_one_layer
    state, batch = initial(cfg), rows(cfg)
    right = cross_entropy(cfg.model, state.params, batch)
    metrics = step(state, batch)[1]
    assert float(metrics["loss_sum"]) == pytest.approx(right, rel=1e-5)
    assert float(metrics["weight"]) == batch.weights.sum()  # padding is not counted
    loss, weight = jax.jit(functools.partial(logged_sums, cfg))(state.params, batch)
    assert float(loss) == pytest.approx(right, rel=1e-5)
    assert float(weight) == batch.weights.sum()


def test_the_logged_sums_add_micro_batches(step_of_one_layer):
    cfg, _ = step_of_one_layer
    params, batch = random_params(cfg.model), rows(cfg)
    evaluate = jax.jit(functools.partial(logged_sums, cfg))
    split = jax.tree.map(lambda x: x.reshape(4, 2, -1), batch)
    np.testing.assert_allclose(evaluate(params, split), evaluate(params, batch), rtol=1e-6)


def test_an_untrained_model_has_the_loss_of_a_guess():
    cfg = config(dataclasses.replace(ONE_LAYER, num_heads=1, mlp_dim=32, positions="none"))
    params = jax.jit(functools.partial(gpt.init, cfg.model))(jax.random.key(0))
    loss, weight = jax.jit(functools.partial(logged_sums, cfg))(params, rows(cfg))
    assert float(loss / weight) == pytest.approx(math.log(64), abs=0.05)  # 4.159


def test_the_rate_of_update_k_is_the_schedules_also_after_a_restart(step_of_one_layer):
    cfg, step = step_of_one_layer
    state, logged = initial(cfg), []
    for number in range(12):
        if number == 8:  # a new process: the same state from host memory
            state = jax.tree.map(jnp.asarray, jax.device_get(state))
        state, metrics = step(state, rows(cfg, number))
        logged.append(float(metrics["lr"]))
    ramp = [2e-3, 4e-3, 6e-3, 8e-3, 1e-2]
    cosine = [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * k / 55)) for k in range(1, 8)]
    assert logged == pytest.approx(ramp + cosine, rel=1e-5)


TAPPED = dataclasses.replace(TINY, num_layers=3, aux_layers=(2, 1))


@functools.cache
def losses_by_hand() -> Any:
    """Compile what all losses of `TAPPED` are, from whole logits, by automatic differentiation."""
    batch = rows(config(TAPPED))

    def terms(x, head):
        logits = x @ head.T
        lse = jax.nn.logsumexp(logits, -1)
        nll = lse - logits[np.arange(8)[:, None], np.arange(16), batch.targets[0]]
        smoothing = 0.2 * (lse - logits.mean(-1) - nll)
        return [(x * batch.weights[0]).sum() for x in (nll, 0.1 * lse**2, smoothing)]

    def total(params, weights):  # of the first and the second block
        tops, taps, _ = gpt.forward(TAPPED, params, batch.tokens[0])
        main = terms(tops, params.embed)
        extra = sum(weights[n - 1] * sum(terms(taps[n], params.embed)) for n in (1, 2))
        return sum(main) + extra, [*main, extra]

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@pytest.mark.parametrize(
    "weights, of_blocks",  # the second one counts with the first weight: aux_layers are (2, 1)
    [((0.5,), (0.5, 0.5)), ((0.25, 2.0), (2.0, 0.25))],
)
def test_auxiliary_and_other_losses_add_to_the_gradient_by_their_weights(weights, of_blocks):
    cfg = config(TAPPED, aux_loss_weights=weights, z_loss=0.1, label_smoothing=0.2)
    params, batch = random_params(TAPPED), rows(cfg)
    grads, sums = jax.jit(functools.partial(gradients, cfg, step=0))(params, batch)
    (total, right), right_grads = losses_by_hand()(params, np.float32(of_blocks))
    close(grads, right_grads, 1e-5)
    names = ("loss_sum", "z_loss_sum", "label_smoothing_sum", "aux_loss_sum")
    for key, value in zip(names, right, strict=True):
        assert float(sums[key]) == pytest.approx(float(value), rel=1e-4)
    assert float(sums["total"]) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("logits_dtype, name", [("compute", "bf16"), ("float32", "f32")])
def test_the_product_with_the_head_gives_the_dtype_asked_for(logits_dtype, name):
    cfg = config(compute_dtype="bfloat16", logits_dtype=logits_dtype)
    program = jax.make_jaxpr(functools.partial(logged_sums, cfg))
    text = str(program(random_params(cfg.model), rows(cfg)))
    found = re.findall(r":(\w+)\[1,1,128,64\] = dot_general", text)  # 8 x 16 tokens, 64 ids
    assert found == [name]


def test_documents_in_a_row_are_passed_on_to_the_model(step_of_one_layer):
    cfg, _ = step_of_one_layer
    params, batch = random_params(cfg.model), rows(cfg)
    segments = np.broadcast_to(np.repeat([1, 2], 8), batch.tokens.shape).astype(np.int32)
    positions = np.broadcast_to(np.tile(np.arange(8), 2), batch.tokens.shape).astype(np.int32)
    packed = batch.replace(segment_ids=segments, positions=positions)
    alone = jax.tree.map(lambda x: x.reshape(1, 16, 8), batch)
    evaluate = jax.jit(functools.partial(logged_sums, cfg))
    np.testing.assert_allclose(evaluate(params, packed), evaluate(params, alone), rtol=1e-5)
    assert abs(evaluate(params, packed)[0] - evaluate(params, batch)[0]) > 1


def test_the_number_of_documents_in_a_row_is_not_part_of_the_program(step_of_one_layer):
    cfg, _ = step_of_one_layer
    step = jax.jit(functools.partial(train_step, cfg, optimizer(cfg)))
    state, batch, index = initial(cfg), rows(cfg), np.arange(16)
    for length in (16, 2, 1):  # one document, 8 of one token and its end, 16
        segments = np.broadcast_to(index // length + 1, batch.tokens.shape).astype(np.int32)
        positions = np.broadcast_to(index % length, batch.tokens.shape).astype(np.int32)
        state, metrics = step(state, batch.replace(segment_ids=segments, positions=positions))
        assert int(metrics["finite"]) == 1
    assert step._cache_size() == 1


def test_a_document_mask_that_is_off_costs_nothing(tmp_path, step_of_one_layer):
    cfg, step = step_of_one_layer
    write_store(tmp_path, [random_documents([9, 3, 20, 40] * 9)])
    programs = {}
    for mask in (False, True):
        data = open_data(DataConfig(store=str(tmp_path), document_mask=mask), seq_len=16, seed=0)
        with batches(data, position=0, global_batch=8, num_batches=1) as source:
            batch = next(source)
        programs[mask] = step.lower(initial(cfg), batch).as_text()
    whole = batch.tokens, batch.targets, batch.weights
    assert programs[False] == step.lower(initial(cfg), Batch(*whole)).as_text()  # plain causal
    operations = {mask: text.count("stablehlo.") for mask, text in programs.items()}
    inputs = {mask: text.count("%arg") - text.count("= %arg") for mask, text in programs.items()}
    assert operations[False] < operations[True] and inputs[False] < inputs[True]
    # Comparing the documents of two tokens is what the mask is.
    assert [len(re.findall("compare *EQ.*8x16x16xi1", programs[mask])) > 0 for mask in (0, 1)] == [
        False,
        True,
    ]


def test_training_on_successors_learns_to_predict_the_next_token_not_the_one_after(
    step_of_one_layer,
):
    cfg, step = step_of_one_layer
    start = np.random.default_rng(0).integers(0, 64, (1, 8, 1))
    tokens = ((start + np.arange(16)) % 64).astype(np.int32)
    batch = Batch(tokens, (tokens + 1) % 64, np.ones(tokens.shape, np.float32))
    state = initial(cfg)
    for _ in range(60):
        state, metrics = step(state, batch)
    assert float(metrics["loss_sum"] / metrics["weight"]) < 0.1
    logits = gpt.apply(cfg.model, state.params, tokens[0])
    assert (np.argmax(logits, -1) == (tokens[0] + 1) % 64).mean() > 0.98


class Numerals:
    """A tokenizer of numbers between spaces, as far as generation needs one."""

    vocab_size, eos_id, start_id, stop_ids = 64, E, E, (E,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], *, continues: bool = False) -> str:
        return " ".join(map(str, ids))


def test_a_model_trained_on_counting_in_a_store_counts_on(tmp_path, step_of_one_layer):
    # Labels shifted twice on the way from the store to the loss would give 7, 9, 11, none 5, 5, 5.
    cfg, step = step_of_one_layer
    write_store(tmp_path, [[list(range(3, 64))] * 9])
    data = open_data(DataConfig(store=str(tmp_path)), seq_len=16, seed=0)
    state = initial(cfg)
    with batches(data, position=0, global_batch=8, num_batches=100) as source:
        for batch in source:
            state, metrics = step(state, batch)
    assert float(metrics["loss_sum"] / metrics["weight"]) < 0.1
    (row,) = generate(cfg.model, state.params, Numerals(), ["3 4 5"], max_new_tokens=8)
    assert row.text == "6 7 8 9 10 11 12 13"


def test_a_copy_in_the_same_row_is_learnt_without_the_document_mask_and_never_with_it(
    step_of_one_layer,
):
    # Each row is a fresh random document of 8 tokens, twice: only by looking back into the first
    # can the second be predicted better than by guessing, which costs ln 64 = 4.159.
    cfg, step = step_of_one_layer
    rng, shape, last = np.random.default_rng(0), (1, 8, 16), {}
    weights = np.zeros(shape, np.float32)
    weights[..., 8:15] = 1
    segments = np.broadcast_to(np.repeat([1, 2], 8), shape).astype(np.int32)
    for name, documents in {"with": segments, "without": None}.items():
        state, losses = initial(cfg), []
        for _ in range(260):
            tokens = np.tile(rng.integers(0, 64, (1, 8, 8)), 2).astype(np.int32)
            batch = Batch(tokens, np.roll(tokens, -1, axis=-1), weights, documents, None)
            state, metrics = step(state, batch)
            losses.append(metrics["loss_sum"] / metrics["weight"])
        last[name] = np.mean(losses[-50:])
    assert last["with"] > math.log(64) - 0.05
    assert last["without"] < 2.5


# Randomness.


DROPOUT = config(dataclasses.replace(ONE_LAYER, dropout=0.5))


def dropped(cfg: Config, mesh_sizes: dict[str, int] | None = None) -> Any:
    """Return the function of the step that gives gradients with dropout of the same rows."""
    mesh = make_mesh(MeshConfig(**mesh_sizes)) if mesh_sizes else None
    compute = jax.jit(functools.partial(gradients, cfg, mesh=mesh))
    params, batch = random_params(cfg.model), rows(cfg)
    return lambda step: jax.device_get(compute(params, batch, jnp.int32(step)))


@pytest.fixture(scope="module")
def dropped_on_one_device():
    return dropped(DROPOUT)


def test_dropout_recomputed_on_8_devices_draws_the_masks_of_one(dropped_on_one_device):
    remat = dataclasses.replace(DROPOUT, model=dataclasses.replace(DROPOUT.model, remat="full"))
    close(dropped(remat, {"data": 8})(0), dropped_on_one_device(0), 1e-6)


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 4}])
def test_dropout_does_not_depend_on_micro_batches_or_the_mesh(dropped_on_one_device, mesh):
    split = dataclasses.replace(DROPOUT, train=dataclasses.replace(DROPOUT.train, micro_batch=4))
    close(dropped(split, mesh)(0), dropped_on_one_device(0), 1e-5)


def test_dropout_differs_by_step_and_is_repeatable(dropped_on_one_device):
    first, again, other = (dropped_on_one_device(step)[0].embed for step in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.linalg.norm(other - first) > 0.1 * np.linalg.norm(first)


# Memory and the compiler.

LONG = dataclasses.replace(ONE_LAYER, seq_len=128)


@functools.cache
def compiled(micro_batch: int) -> Any:
    cfg = config(LONG, micro_batch=micro_batch)
    mesh, tx = make_mesh(cfg.mesh, jax.devices()[:1]), optimizer(cfg)
    placed = state_shardings(mesh, cfg, tx)
    step = make_train_step(cfg, tx, mesh, placed)
    return step.lower(abstract_state(cfg, tx), rows(cfg)).compile().memory_analysis()


def test_eight_micro_batches_need_clearly_less_memory_than_one_batch():
    small, big = (compiled(micro_batch) for micro_batch in (1, 8))
    params = 4 * sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs(LONG)))
    activations = big.temp_size_in_bytes - params
    assert activations > 4 * params  # or else this would show nothing
    assert small.temp_size_in_bytes < 2 * params + activations / 4


def test_gradients_in_bfloat16_are_summed_over_micro_batches_in_float32():
    """64 times the same rows: float32 sums of one and the same gradient are 64 times that."""

    # Sizes at which XLA:CPU gives products to oneDNN.
    model = dataclasses.replace(ONE_LAYER, embed_dim=128, mlp_dim=512, seq_len=128)

    def of(times: int) -> Params:
        cfg = config(model, global_batch=2 * times, micro_batch=2, compute_dtype="bfloat16")
        once = rows_below_63(config(model, global_batch=2), seed=0)
        batch = jax.tree.map(lambda x: np.repeat(x, times, axis=0), once)
        options = of_dtype("bfloat16", "cpu")
        summed = jax.jit(functools.partial(gradients, cfg), compiler_options=options)
        return summed(random_params(cfg.model), batch, 0)[0]

    once, often = of(1), of(64)
    jax.tree.map(
        lambda one, sum_: np.testing.assert_allclose(
            sum_, 64 * np.asarray(one), atol=1e-5 * np.abs(one).max() * 64
        ),
        once,
        often,
    )


def test_all_of_the_state_is_donated():
    state = sum(x.nbytes for x in jax.tree.leaves(initial(config(LONG, micro_batch=8))))
    assert compiled(8).alias_size_in_bytes == state


def test_bfloat16_compute_agrees_with_float32_within_its_rounding():
    right = on_one_device()[1][0]
    found = run(config(compute_dtype="bfloat16"), 1, 1)[1][0]
    assert found["loss_sum"] == pytest.approx(right["loss_sum"], rel=0.01)
    assert found["grad_norm"] == pytest.approx(right["grad_norm"], rel=0.03)


def test_bfloat16_parameters_train_through_their_masters():
    cfg = config(param_dtype="bfloat16", micro_batch=4)
    state = initial(cfg)
    start = state.params
    masters = jax.tree.map(jnp.copy, start)
    state = state.replace(
        params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), start),
        opt_state=state.opt_state.replace(master=masters),
    )
    after, metrics = jax.jit(functools.partial(train_step, cfg, optimizer(cfg)))(state, rows(cfg))
    assert after.params.embed.dtype == jnp.bfloat16 and int(metrics["finite"]) == 1
    moved = np.abs(after.opt_state.master.embed - np.asarray(start.embed)).max()
    assert 1e-3 < moved < 4e-3  # Adam's first step is about the rate, 2e-3
