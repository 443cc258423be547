"""Experts split over devices against one device: values, gradients, counts, and what is sent."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import VARIETY, random_params

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.data.packing import Batch
from jaxgpt.errors import ConfigError
from jaxgpt.model import exchange, moe
from jaxgpt.model.params import LayerParams, restack, specs
from jaxgpt.model.shards import Shards, Whole
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import Placement, to_global, tree_shardings
from jaxgpt.training.routing import DROPPED, LOAD
from jaxgpt.training.step import gradients, make_train_step

# E = 8, k = 2, D = 32, F = 24; a router with biases, and shared experts.
MODEL = dataclasses.replace(VARIETY["experts"], num_layers=1, num_experts=8)
ROWS, T = 16, 16


# Whole models: the gradients of a step.


class Case(NamedTuple):
    """A mesh, and what differs from MODEL."""

    sizes: dict[str, int]
    micro_batches: int = 1
    model: dict[str, Any] = {}  # noqa: RUF012


SCANNED = {"num_layers": 2, "stacked": True, "remat": "full", "router": "sigmoid"}
LIMITED = {"capacity_factor": 1.0}
CASES = {
    "8 devices": Case({"expert": 8}),
    "context": Case({"expert": 4, "context": 2}),
    "scanned": Case({"data": 2, "fsdp": 2, "expert": 2}, 2, SCANNED),
    "not gated": Case(
        {"data": 2, "expert": 2, "tensor": 2}, 2, {"mlp": "relu2", "router_bias": False}
    ),
    "capacity": Case({"fsdp": 2, "expert": 2, "tensor": 2}, 1, LIMITED),
    "capacity and replicas": Case({"data": 2, "expert": 2, "context": 2}, 2, LIMITED),
}


def model_of(case: Case) -> ModelConfig:
    return dataclasses.replace(MODEL, **case.model)


def config(case: Case) -> Config:
    micro = ROWS // case.micro_batches
    train = TrainConfig(
        global_batch=ROWS, micro_batch=micro, compute_dtype="float32", balance_loss=0.1,
        router_z_loss=1e-2,
    )  # fmt: skip
    return Config(model=model_of(case), train=train, mesh=MeshConfig(**case.sizes))


def batch_of(case: Case) -> Batch:
    tokens = np.random.default_rng(3).integers(0, 64, (ROWS, T)).astype(np.int32)
    weights = np.ones((ROWS, T), np.float32)
    weights[::2, 11:] = 0
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), weights)
    return jax.tree.map(lambda x: x.reshape(case.micro_batches, -1, T), batch)


def parameters_of(model: ModelConfig) -> Any:
    return restack(random_params(model), stacked=model.stacked)


@functools.cache
def on_mesh(name: str) -> tuple[Any, str]:
    """Return the gradients and sums of a case, and the compiled program."""
    case = CASES[name]
    mesh = make_mesh(MeshConfig(**case.sizes))
    model = model_of(case)
    params = jax.device_put(parameters_of(model), tree_shardings(mesh, specs(model)))
    batch = to_global(mesh, batch_of(case))
    step = jax.jit(functools.partial(gradients, config(case), step=0, mesh=mesh))
    compiled = step.lower(params, batch).compile()
    return jax.device_get(compiled(params, batch)), compiled.as_text()


@functools.cache
def one_device(model: ModelConfig) -> Any:
    """Return the same without a mesh, of one micro-batch."""
    case = Case({}, 1, vars(model))
    step = jax.jit(functools.partial(gradients, config(case), step=0))
    return jax.device_get(step(parameters_of(model), batch_of(case)))


def on_one_device(name: str) -> Any:
    return one_device(model_of(CASES[name]))


def close(found: Any, right: Any, tolerance: float) -> None:
    """Compare all leaves by norm; what is 0 on one side is 0 on both."""
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(right), strict=True)
    for (path, a), b in pairs:
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), (path, a, b)


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_sums_are_those_of_one_device(name):
    (grads, sums), (right, right_sums) = on_mesh(name)[0], on_one_device(name)
    close(sums, right_sums, 1e-5)
    close(grads, right, 1e-4)


@pytest.mark.parametrize("name", ["capacity", "capacity and replicas"])
def test_the_same_slots_are_asked_and_dropped_as_on_one_device(name):
    (_, sums), (_, right) = on_mesh(name)[0], on_one_device(name)
    np.testing.assert_array_equal(sums[LOAD], right[LOAD])
    np.testing.assert_array_equal(sums[DROPPED], right[DROPPED])
    assert 0 < sums[DROPPED].sum() < sums[LOAD].sum()


def collectives(text: str, kind: str) -> list[int]:
    """Return the elements of the results of a kind of collective."""
    found = re.findall(rf"= (\([^)]*\)|\S+) {kind}(?:-start)?\(", text)
    sizes = [re.findall(r"\w+\[([\d,]*)\]", result) for result in found]
    return [sum(math.prod(map(int, filter(None, s.split(",")))) for s in one) for one in sizes]


@pytest.mark.parametrize("name, parts", [("scanned", 1), ("capacity", 2)])
def test_experts_are_gathered_over_fsdp_and_never_over_the_devices_that_share_them(name, parts):
    gathered = collectives(on_mesh(name)[1], "all-gather")
    own = 8 // 2 * 32 * 24 // parts  # half of the experts, all of D, the device's part of F
    assert own in gathered and max(gathered) == own


@pytest.mark.parametrize("name", ["capacity", "capacity and replicas"])
def test_places_go_to_their_experts_and_back_by_all_to_all(name):
    # Each of 8 experts has 4 places in a row, ceil(1.0 * 16 * 2 / 8), split over rows and context.
    # Forward two exchanges, backward two of their gradients.
    case = CASES[name]
    devices = math.prod(n for axis, n in case.sizes.items() if axis != "tensor")
    places = ROWS // case.micro_batches * 8 * 4 * 32 // devices
    assert collectives(on_mesh(name)[1], "all-to-all").count(places) == 4


def test_without_capacity_three_all_to_all_go_forth_and_two_back():
    # Forward: tokens and what experts return. Backward: tokens, its gradients, those of tokens.
    rows = exchange.slots_per_turn(ROWS // 8 * T, 2, 8, 8)
    assert collectives(on_mesh("8 devices")[1], "all-to-all").count(8 * rows * 32) == 5


def test_a_number_of_experts_that_does_not_divide_is_refused_with_the_numbers():
    case = Case({"data": 2, "expert": 4}, 1, {"num_experts": 6})
    with pytest.raises(ConfigError, match="num_experts = 6: must be a multiple of mesh.expert = 4"):
        make_train_step(config(case), None, make_mesh(MeshConfig(**case.sizes)), None)


# One layer: routers that choose unevenly.

H = np.random.default_rng(0).normal(size=(8, 12, 32)).astype(np.float32)
SLOPE = np.random.default_rng(1).normal(size=H.shape).astype(np.float32)
# 2 experts on each of 4 devices. What bias alone decides: -9 is never chosen, 9 always.
CHOICES = {
    "as it comes": np.zeros(8),
    "all choose one device": np.float32([0, 0, 9, 9, 0, 0, 0, 0]),
    "all choose one expert": np.float32([0, 0, 9, 0, 0, 0, 0, 0]),
    "one device gets nothing": np.float32([0, 0, 0, 0, -9, -9, 0, 0]),
    "three devices get nothing but one choice": np.float32([0, -9, -9, -9, -9, 9, -9, -9]),
}


@functools.cache
def four() -> Placement:
    return Placement(make_mesh(MeshConfig(data=1, expert=4), jax.devices()[:4]))


def layer(choice: str = "as it comes") -> LayerParams:
    return random_params(MODEL).layers[0].replace(router_bias=np.float32(CHOICES[choice]))


@functools.cache
def differentiated(shards: Shards, impl: str | None = None, dtype: str = "float32") -> Any:
    """Return a compiled function of (p, h): the output, and the gradients of SLOPE . output."""

    def total(p: LayerParams, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        options = {"weights": None, "segment_ids": None, "shards": shards, "impl": impl}
        out, _ = moe.mlp(MODEL, p, h.astype(dtype), **options)
        return (out.astype(jnp.float32) * SLOPE[: len(h)]).sum(), out.astype(jnp.float32)

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def compute(shards: Shards, p: LayerParams, h: np.ndarray = H, **options: Any) -> Any:
    (_, out), grads = differentiated(shards, **options)(p, jnp.asarray(h))
    return jax.device_get((out, grads))


@pytest.mark.parametrize("choice", CHOICES)
def test_every_slot_is_computed_however_uneven_the_choice(choice):
    close(compute(four(), layer(choice)), compute(Whole("cpu"), layer(choice)), 1e-6)


@pytest.mark.parametrize("impl", ["ragged", "dense"])
def test_every_impl_computes_every_slot(impl):
    p = layer("all choose one device")
    close(compute(four(), p, impl=impl), compute(Whole("cpu"), p), 1e-6)


def test_in_bfloat16_it_gives_what_float32_does_within_its_rounding():
    p = layer("all choose one expert")
    close(compute(four(), p, dtype="bfloat16"), compute(Whole("cpu"), p), 0.02)


def test_many_turns_give_what_one_does(monkeypatch):
    monkeypatch.setattr(exchange, "SLACK", 0.01)  # 8 slots a turn, of 24 tokens with 2 choices
    differentiated.cache_clear()
    found = compute(four(), layer("three devices get nothing but one choice"))
    differentiated.cache_clear()
    close(found, compute(Whole("cpu"), layer("three devices get nothing but one choice")), 1e-6)


def test_rows_that_the_devices_do_not_divide_are_computed_by_all():
    p, one = layer(), H[:1]
    close(compute(four(), p, one), compute(Whole("cpu"), p, one), 1e-6)


def test_a_token_that_is_not_finite_spoils_no_other():
    spoiled = H.copy()
    spoiled[3, 5] = np.nan
    (found, _), (right, _) = compute(four(), layer(), spoiled), compute(four(), layer())
    others = np.arange(12) != 5
    np.testing.assert_array_equal(found[3, others], right[3, others])
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(right, 3, 0))
    assert np.isnan(found[3, 5]).all()


@pytest.mark.parametrize("impl", [None, "ragged"])
def test_infinite_weights_of_an_expert_that_no_token_chose_reach_nothing(impl):
    p = layer("one device gets nothing")
    spoiled = {
        name: np.where(np.arange(8)[:, None, None] == 4, np.inf, getattr(p, name))
        for name in ("w_gate", "w_up", "w_down")
    }
    found = compute(four(), p.replace(**spoiled), impl=impl)
    jax.tree.map(np.testing.assert_array_equal, found, compute(four(), p, impl=impl))


# What it takes.


@pytest.mark.parametrize("tokens, k, experts, devices, slots", [
    (8192, 2, 8, 8, 3072),  # even: 2048
    (4096, 8, 128, 8, 6144),
    (16, 2, 8, 8, 8),
    (4, 2, 8, 8, 4),  # no token chooses the one expert of a device twice
    (16, 4, 8, 2, 48),
    (3, 4, 8, 2, 12),
])  # fmt: skip
def test_a_turn_takes_half_more_than_the_even_share(tokens, k, experts, devices, slots):
    assert exchange.slots_per_turn(tokens, k, experts, devices) == slots


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all arrays that a program makes."""
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars)
        for inner in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def test_no_device_holds_more_slots_than_half_more_than_the_even_choice():
    # Of 24 tokens on each device 48 slots; all 192 of the four could fall on one.
    traced = differentiated(four(), "ragged").trace(layer(), jnp.asarray(H))
    rows = {s[0] for s in shapes(traced.jaxpr.jaxpr) if len(s) == 2 and s[1] in (32, 24)}
    assert max(rows) == 4 * exchange.slots_per_turn(24, 2, 8, 4) == 4 * 24
