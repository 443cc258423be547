"""Fingerprints: one number per leaf, whatever the mesh, moved by every bit and every swap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.checkpoint.fingerprint import collect, dispatch, hold, named_leaves, tree_fingerprints

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "int16", "bool"]


def reference(array: np.ndarray) -> int:
    """The definition with Python integers: sum of mix(bits) * (2 * index + 1) modulo 2**32."""
    array = np.ascontiguousarray(array)
    bits = array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    total = 0
    for index, word in enumerate(int(x) for x in bits):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = ((word ^ (word >> shift)) * factor) % 2**32
        total += (word ^ (word >> 16)) * (2 * index + 1)
    return total % 2**32


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 256, size=(*shape, 4), dtype=np.uint8)
    if dtype == "bool":
        return bits[..., 0] > 127
    size = jnp.dtype(dtype).itemsize
    return np.ascontiguousarray(bits[..., :size]).view(jnp.dtype(dtype))[..., 0]


def fingerprint(array: object) -> int:
    return tree_fingerprints({"x": array})["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_is_that_of_the_definition(dtype):
    array = values(dtype, (3, 5, 7))
    assert fingerprint(jnp.asarray(array)) == reference(array)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 0, 2), (1, 9, 1)])
def test_scalars_and_empty_leaves_have_the_number_of_the_definition(shape):
    array = values("float32", shape)
    assert fingerprint(jnp.asarray(array)) == reference(array)


def test_random_keys_have_the_number_of_their_data():
    keys = jax.random.split(jax.random.key(3), 4)
    assert fingerprint(keys) == reference(np.asarray(jax.random.key_data(keys)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_number_does_not_depend_on_the_placement(axis_type):
    array = values("float32", (16, 8, 4))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    specs = [P(), P("a"), P("a", "b"), P("b", None, "a"), P(("a", "b")), P(None, ("b", "a"))]
    for spec in specs:
        placed = jax.device_put(array, NamedSharding(mesh, spec))
        assert fingerprint(placed) == reference(array), spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_single_bit_flip_is_seen(dtype):
    array = values(dtype, (6, 5))
    width = 8 * array.dtype.itemsize
    words = array.reshape(-1).view(f"uint{width}")
    flips = np.tile(words, (words.size * width, 1))
    bit = np.arange(len(flips))
    one = np.left_shift(np.ones_like(bit), bit % width).astype(words.dtype)
    flips[bit, bit // width] ^= one
    numbers = jax.vmap(lambda x: dispatch({"x": x})["x"][0])(jnp.asarray(flips.view(array.dtype)))
    assert len(flips) == 30 * width
    assert not np.any(np.asarray(numbers) == reference(array))


def test_two_elements_that_trade_places_are_seen():
    array = values("float32", (64,))
    number = fingerprint(array)
    for i, j in [(0, 1), (0, 32), (5, 37), (0, 63), (8, 24)]:
        swapped = array.copy()
        swapped[[i, j]] = array[[j, i]]
        assert fingerprint(swapped) != number


def test_x_and_minus_x_that_trade_places_are_seen():
    # Their bits differ by 2**31: times any even difference of factors that is 0 modulo 2**32.
    assert fingerprint(np.float32([1.5, -1.5])) != fingerprint(np.float32([-1.5, 1.5]))


def test_rows_of_short_mantissas_that_trade_places_are_seen():
    # Bits differ by multiples of 2**16, factors by 2 * 2**15: 0 modulo 2**32 without a mixer.
    rows = values("bfloat16", (2, 2**15)).astype(np.float32)
    rows[~np.isfinite(rows)] = 1.0
    assert fingerprint(rows) != fingerprint(rows[::-1].copy())


def test_a_non_finite_float_is_reported():
    fine = {"x": jnp.ones(3), "n": jnp.int32(2**31 - 1)}
    assert collect(dispatch(fine))[1]
    for bad in (np.nan, np.inf, -np.inf):
        assert not collect(dispatch({**fine, "y": jnp.bfloat16([0, bad])}))[1]


def test_values_may_be_donated_once_the_computation_has_started():
    x = jnp.arange(1000.0)
    number = reference(np.arange(1000, dtype=np.float32))
    started = dispatch({"x": x})
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    assert collect(started)[0] == {"x": number}


def test_values_that_are_held_may_be_donated():
    mesh = jax.make_mesh((8,), ("a",))
    x, y = jnp.arange(1000.0), jax.device_put(jnp.arange(8), NamedSharding(mesh, P("a")))
    number = reference(np.arange(1000, dtype=np.float32))
    right = {"x": number, "y": reference(np.arange(8, dtype=np.int32))}
    started = hold({"x": x, "y": y, "empty": jnp.zeros(0)})
    later = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(later))
    del x
    numbers, finite = collect(started)
    assert numbers == right | {"empty": 0} and finite
    assert not collect(hold({"x": jnp.array([1.0, np.inf])}))[1]


def test_leaves_are_named_by_their_path():
    @struct.dataclass
    class Node:
        layers: tuple
        scale: object = None

    tree = {"params": Node(layers=(jnp.ones(1), {"w": jnp.ones(2)}))}
    assert list(named_leaves(tree)) == ["params.layers.0", "params.layers.1.w"]


def test_two_leaves_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match=r"'a\.b'"):
        named_leaves({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


@pytest.mark.parametrize("leaf", [1, 1.0, "text", np.float64(1), np.zeros(2, np.complex64)])
def test_what_has_no_exact_fingerprint_is_refused_by_name(leaf):
    with pytest.raises(TypeError, match="'x'"):
        tree_fingerprints({"x": leaf})
