"""A pipeline of stages: who computes what when, and the values of one device at every schedule."""

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
from stores import random_documents, write_store
from tiny import TINY, VARIETY, random_params

from jaxgpt.checkpoint.store import Checkpointer
from jaxgpt.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.data.packing import Batch
from jaxgpt.data.store import open_store
from jaxgpt.evaluation.perplexity import evaluate
from jaxgpt.model import staging
from jaxgpt.model.params import abstract, specs
from jaxgpt.model.positions import restart
from jaxgpt.model.turns import describe, plan, tap
from jaxgpt.parallel.mesh import AXES, make_mesh
from jaxgpt.parallel.sharding import Placement, to_global, tree_shardings
from jaxgpt.planning.collectives import collectives
from jaxgpt.training.optimizer import build
from jaxgpt.training.state import TrainState, abstract_state, state_shardings
from jaxgpt.training.step import gradients, make_train_step

ROWS, LENGTH = 24, 8
# Half the time of a compilation goes into optimising what here takes a millisecond.
QUICK = {"xla_cpu_experimental_onednn_custom_call": False, "xla_backend_optimization_level": 0}


def small(model: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(
        model, num_layers=4, embed_dim=16, vocab_size=32, seq_len=LENGTH, stacked=True, **changes
    )


MODELS = {
    # Without an epsilon the norm of zeros, which stages without work compute, is not a number.
    "gated": small(VARIETY["llama"], norm_eps=0.0),
    "dropout": small(TINY, dropout=0.3, out_bias=True, mlp_bias=True),
    "windows": small(VARIETY["gemma3"], tie_embeddings=False),
    "experts": small(VARIETY["experts"], router_bias=False),
    "taps": dataclasses.replace(
        small(VARIETY["llama"], norm_eps=0.0, aux_layers=(4, 2), remat_save=("attn", "up")),
        num_layers=6,
    ),
}
DOCUMENTS = {"gated", "windows"}


def config(name: str, mesh: dict[str, int], micro_batches: int = 1, **model: Any) -> Config:
    return Config(
        model=dataclasses.replace(MODELS[name], **model),
        mesh=MeshConfig(**{"data": 1} | mesh),
        train=TrainConfig(
            global_batch=ROWS,
            micro_batch=ROWS // micro_batches,
            num_steps=60,
            compute_dtype="float32",
            z_loss=0.01,
            balance_loss=0.1,
            aux_loss_weights=(0.5, 0.2) if name == "taps" else (0.3,),
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=5, eps=1e-3),
    )


def batch_of(cfg: Config, documents: bool, seed: int = 0) -> Batch:
    """Return rows of random tokens, a fifth of them without a loss, perhaps of documents."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, cfg.model.vocab_size, (2, ROWS, LENGTH)).astype(np.int32)
    weights = np.float32(rng.random((ROWS, LENGTH)) < 0.8)
    segments = positions = None
    if documents:
        segments = np.sort(rng.integers(1, 4, (ROWS, LENGTH)), axis=1).astype(np.int32)
        positions = np.asarray(restart(segments))
    batch = Batch(tokens, targets, weights, segments, positions)
    return jax.tree.map(lambda x: x.reshape(cfg.train.accum_steps, -1, LENGTH), batch)


def devices(cfg: Config) -> Any:
    count = int(np.prod([getattr(cfg.mesh, axis) for axis in AXES]))
    return make_mesh(cfg.mesh, jax.devices()[:count])


@functools.cache
def computed(
    name: str,
    mesh: tuple[tuple[str, int], ...] = (),
    micro_batches: int = 1,
    remat: str = "none",
) -> tuple[Any, dict[str, float], str]:
    """Return the gradients, the sums and the compiled text of a batch."""
    cfg = config(name, dict(mesh), micro_batches, remat=remat)
    where = devices(cfg)
    params = jax.device_put(random_params(cfg.model), tree_shardings(where, specs(cfg.model)))
    batch = to_global(where, batch_of(cfg, name in DOCUMENTS))
    compute = jax.jit(functools.partial(gradients, cfg, mesh=where), compiler_options=QUICK)
    program = compute.lower(params, batch, jnp.int32(0)).compile()
    grads, sums = jax.device_get(program(params, batch, jnp.int32(0)))
    return grads, sums, program.as_text()


# The plan.

OF_MICRO_BATCHES = pytest.mark.parametrize("micro_batches", range(1, 12))
STAGES_AND_ROUNDS = [(S, R) for S in (2, 3, 4) for R in (1, 2, 3)]


@OF_MICRO_BATCHES
@pytest.mark.parametrize("stages, rounds", STAGES_AND_ROUNDS)
def test_every_micro_batch_passes_all_parts_in_order_and_ends_on_the_belt(
    micro_batches, stages, rounds
):
    # What `pipeline.forward` does with activations, done with lists of the parts passed.
    p = plan(micro_batches, stages, rounds)
    belt = [[(m, []) for m in places] for places in p.before]
    held: list[Any] = [None] * stages
    waiting: list[Any] = [None] * p.wait
    for turn in range(len(p.micro) + 1):
        arrived = [held[-1], *held[:-1]]
        column = [places[p.column[turn]] for places in belt]
        entering = arrived[0]
        if turn < len(p.micro):
            if p.wait:
                entering = waiting[turn % p.wait] if p.late[turn] else entering
                waiting[turn % p.wait] = arrived[0]
            entering = column[0] if p.fresh[turn] else entering
            held = [entering, *arrived[1:]]
            for stage in range(stages):
                if (m := p.micro[turn, stage]) < 0:
                    held[stage] = None
                    continue
                number, passed = held[stage]
                assert number == m
                held[stage] = number, [*passed, p.round[turn, stage] * stages + stage]
        if p.fresh[turn] or p.done[turn]:
            column[0] = arrived[0] if p.done[turn] else column[0]
            for places, entry in zip(belt, [*column[1:], column[0]], strict=True):
                places[p.column[turn]] = entry
    ended = {
        m: belt[s][c][1] for (s, c), m in np.ndenumerate(p.after) if m >= 0 and belt[s][c][0] == m
    }
    assert ended == {m: list(range(stages * rounds)) for m in range(micro_batches)}


@OF_MICRO_BATCHES
@pytest.mark.parametrize("stages, rounds", STAGES_AND_ROUNDS)
def test_only_filling_and_draining_leave_stages_without_work(micro_batches, stages, rounds):
    p, least = plan(micro_batches, stages, rounds), micro_batches * rounds + stages - 1
    if micro_batches >= stages or rounds == 1:
        assert len(p.micro) == least
        assert p.bubble == pytest.approx((stages - 1) / least)
    assert p.wait == (0 if rounds == 1 or micro_batches < stages else micro_batches % stages)


@OF_MICRO_BATCHES
@pytest.mark.parametrize("stages, rounds", STAGES_AND_ROUNDS)
def test_every_part_can_be_tapped_and_loses_no_micro_batch(micro_batches, stages, rounds):
    # As `pipeline.forward` does with activations, with what each stage holds after each turn.
    p = plan(micro_batches, stages, rounds)
    for part in range(stages * rounds):
        t = tap(micro_batches, stages, rounds, part)
        belt = np.full_like(t.after, -1)
        for turn in np.flatnonzero(t.taken):
            assert p.round[turn, t.stage] * stages + t.stage == part
            column = belt[:, t.column[turn]].copy()
            column[t.stage] = p.micro[turn, t.stage]
            belt[:, t.column[turn]] = np.roll(column, -1)
        assert sorted(belt[belt >= 0]) == list(range(micro_batches))
        np.testing.assert_array_equal(belt, t.after)


def test_what_a_pipeline_loses_is_said():
    # 4 stages wait 3 of 32 + 3 turns, or, with two rounds, of 64 + 3.
    said = "micro-batches pass 4 stages in {} turns; stages have nothing to do for {} of an update"
    assert describe(32, 4, 1) == "pipeline: 32 " + said.format(35, "9%")
    assert describe(32, 4, 2) == "pipeline: 32 " + said.format(67, "4%")


@pytest.mark.parametrize("stages, rounds", [(2, 2), (4, 2), (2, 4), (4, 6)])
def test_parts_of_the_layers_change_places_and_come_back(stages, rounds):
    cfg = dataclasses.replace(MODELS["gated"], num_layers=2 * stages * rounds)
    shards = Placement(make_mesh(MeshConfig(data=1, stage=stages, fsdp=8 // stages)))

    def numbered(spec: Any) -> np.ndarray:
        number = np.arange(cfg.num_layers).reshape(-1, *(1,) * (len(spec.shape) - 1))
        return np.broadcast_to(number, spec.shape)

    layers = jax.tree.map(numbered, specs(cfg).layers)
    right = np.arange(cfg.num_layers).reshape(rounds, stages, 2).swapaxes(0, 1)

    @jax.jit
    def there_and_back(layers: Any) -> Any:
        placed = staging.place(cfg, layers, rounds, shards)
        return placed, staging.unplace(cfg, placed, rounds, shards)

    placed, back = there_and_back(layers)
    for name in ("attn_norm", "wq", "w_up"):
        found = np.asarray(getattr(placed, name))
        shape = (*right.shape, *(1,) * (found.ndim - 3))
        np.testing.assert_array_equal(found, np.broadcast_to(right.reshape(shape), found.shape))
        np.testing.assert_array_equal(getattr(back, name), getattr(layers, name))


# Values.

CASES = [
    # model, mesh, micro-batches, remat
    ("gated", {"stage": 2}, 1, "none"),
    ("gated", {"stage": 2, "rounds": 2}, 3, "full"),
    ("gated", {"stage": 4}, 6, "full"),
    ("gated", {"stage": 2, "data": 2, "fsdp": 2, "rounds": 2}, 2, "none"),
    ("gated", {"stage": 2, "fsdp": 2, "tensor": 2}, 4, "full"),
    ("dropout", {"stage": 4, "data": 2}, 3, "full"),
    ("windows", {"stage": 2, "context": 2}, 4, "full"),
    ("experts", {"stage": 2, "expert": 2, "data": 2}, 3, "full"),
    ("taps", {"stage": 2, "data": 2}, 2, "full"),  # one block inside a stage, one in a first layer
    ("taps", {"stage": 2, "rounds": 3, "fsdp": 2}, 3, "full"),
]


def key(mesh: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(mesh.items())


@pytest.mark.parametrize("name, mesh, micro_batches, remat", CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_device(name, mesh, micro_batches, remat):
    grads, sums, _ = computed(name, key(mesh), micro_batches, remat)
    right_grads, right_sums, _ = computed(name)
    assert sums.keys() == right_sums.keys()
    for which, right in right_sums.items():
        np.testing.assert_allclose(sums[which], right, rtol=1e-5)
    for (path, mine), right in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(right_grads), strict=True
    ):
        error = np.linalg.norm(mine - right) / np.linalg.norm(right)
        assert error < 1e-4, jax.tree_util.keystr(path)
        assert mine.dtype == np.float32


# What devices exchange and keep.

ROUNDS = ("gated", {"stage": 2, "data": 2, "fsdp": 2, "rounds": 2}, 2, "none")


def exchanges(name: str, mesh: dict[str, int], micro_batches: int, remat: str) -> list[Any]:
    """Return the exchanges of a compiled program between stages."""
    _, _, text = computed(name, key(mesh), micro_batches, remat)
    sizes = devices(config(name, mesh)).shape
    return [one for one in collectives(text, sizes) if "stage" in one.axes]


def test_activations_move_by_permutations_and_no_stage_gets_the_layers_of_another():
    found = exchanges("gated", {"stage": 2, "fsdp": 2, "tensor": 2}, 4, "full")
    turns = [one for one in found if one.runs > 1]
    # Forward and backward, what is computed and the belt; 5 turns.
    assert [one.kind for one in turns] == ["collective-permute"] * 4
    assert {(one.runs, one.shape[-2:]) for one in turns} == {(5, (LENGTH, 16))}
    once = {one.kind for one in found if one.runs == 1}
    # Once: the belt after the last turn, and gradients of embedding, head and norm.
    assert once == {"collective-permute", "all-reduce"}
    vocab = MODELS["gated"].vocab_size * 16
    assert all(np.prod(one.shape) <= vocab for one in found if one.kind == "all-reduce")


def test_with_more_rounds_the_weights_change_places_once():
    found = exchanges(*ROUNDS)
    assert {one.kind for one in found} == {"collective-permute", "all-reduce"}
    weights = [one for one in found if one.shape[-2:] in {(16, 64), (8, 64)}]  # w_up, w_gate
    assert weights and {one.runs for one in weights} == {1}
    turns = {one.shape[-2:] for one in found if one.runs > 1}
    assert turns == {(LENGTH, 16)}


@pytest.mark.parametrize("remat, named", [("none", ()), ("full", ()), ("full", ("up",))])
def test_no_turn_keeps_the_weights_it_used_and_with_remat_only_its_input(remat, named):
    name, mesh, micro_batches, _ = ROUNDS
    cfg = config(name, mesh | {"data": 1}, micro_batches, remat=remat, remat_save=named)
    where, batch = devices(cfg), batch_of(cfg, True)
    program = jax.make_jaxpr(functools.partial(gradients, cfg, mesh=where))
    text = str(program(random_params(cfg.model), batch, jnp.int32(0)))
    turns, rows = len(plan(micro_batches, 2, 2).micro), ROWS // micro_batches
    # Of all turns; then come the stages. Masks, too: one as large as the input is not needed.
    found = re.findall(rf"(?:f32|bool)\[{turns},([\d,]+)\]", text)
    kept = {tuple(map(int, shape.split(","))) for shape in found} - {(2,)}
    layer = {spec.shape[1:] for spec in jax.tree.leaves(specs(cfg.model).layers)}
    matrices = {math.prod(shape) for shape in layer if len(shape) > 1}
    if remat == "full":
        up = {(1, 2, rows, LENGTH, cfg.model.mlp_width)} if named else set()  # by layer, by stage
        assert kept == {(2, rows, LENGTH, 16)} | up
    else:
        assert len(kept) > 5 and not {math.prod(shape) // 2 for shape in kept} & matrices
    assert rows * LENGTH * 16 not in matrices  # or they could not be told apart


# Runs.


def placed_state(cfg: Config) -> tuple[Any, Any, TrainState]:
    """Return the mesh, the shardings and a state with random parameters."""
    mesh = devices(cfg)
    tx = build(cfg, 60, abstract(specs(cfg.model), cfg.train.param_dtype))
    like = abstract_state(cfg, tx).opt_state
    moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    zero = np.int32(0)
    state = TrainState(zero, random_params(cfg.model), moments, zero, zero, np.uint32(0))
    shardings = state_shardings(mesh, cfg, tx)
    step = make_train_step(cfg, tx, mesh, shardings)
    return mesh, step, jax.device_put(jax.tree.map(jnp.asarray, state), shardings)


@functools.cache
def trained(mesh: tuple[tuple[str, int], ...], micro_batches: int) -> tuple[Config, TrainState]:
    cfg = config("gated", dict(mesh), micro_batches)
    where, step, state = placed_state(cfg)
    for number in range(3):
        state, metrics = step(state, to_global(where, batch_of(cfg, True, seed=number)))
        assert int(metrics["applied"]) == 1
    return cfg, state


STAGED = (key({"stage": 2, "rounds": 2, "fsdp": 2}), 3)


def test_three_updates_equal_those_of_one_device():
    (_, mine), (_, right) = trained(*STAGED), trained((), 1)
    assert "stage" in str(mine.params.layers.wq.sharding.spec)
    for a, b in zip(*map(jax.tree.leaves, (mine, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_stages_is_restored_on_one_device(tmp_path):
    cfg, state = trained(*STAGED)
    one, _, target = placed_state(config("gated", {}))
    common = {"identity": {}, "config_dict": {}, "log": lambda line: None}
    saved = Checkpointer(tmp_path / "ckpt", **common)
    saved.save(3, state, position=72, meta={})
    saved.close()
    reader = Checkpointer(tmp_path / "ckpt", **common)
    restored = reader.restore_latest(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
    )
    reader.close()
    for a, b in zip(*map(jax.tree.leaves, (restored.state, state)), strict=True):
        assert a.sharding.device_set == set(one.devices.flat)
        np.testing.assert_array_equal(a, b)


def test_text_is_evaluated_by_stages_as_by_one_device(tmp_path):
    write_store(tmp_path, [random_documents([9, 3, 20, 40] * 9, vocab_size=32)], vocab_size=32)
    results = []
    for mesh, rows in (({}, 8), ({"stage": 2, "rounds": 2, "data": 2}, 12)):
        cfg = config("gated", mesh, 6)
        where = devices(cfg)
        params = jax.device_put(random_params(cfg.model), tree_shardings(where, specs(cfg.model)))
        results.append(evaluate(cfg, params, open_store(tmp_path), batch=rows))
    one, many = results
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.loss_stderr == pytest.approx(one.loss_stderr, rel=1e-5)  # by row, in its order
    assert (many.tokens, many.bytes, many.rows) == (one.tokens, one.bytes, one.rows)
