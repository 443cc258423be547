"""Integer fingerprints of a state: one number per leaf that moves with every bit and every swap.

The fingerprint of a leaf is the sum over its elements of mix(bits) * (2 * index + 1) modulo 2**32:
`bits` are the element's bits as an unsigned integer, `index` its row-major position, and `mix` a
bijection of 32-bit words. Integer sums have no rounding, so the number depends neither on the mesh,
nor on the placement, nor on the order of the reduction. It is computed where the values are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.training.audit import mix

Array = jax.Array


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by path, such as `params.layers.0.wq`, in tree order.

    Raises ValueError when two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(f"two leaves are called {name!r}; rename a key that holds a dot")
        leaves[name] = leaf
    return leaves


def tree_fingerprints(tree: Any) -> dict[str, int]:
    """Return the fingerprint of every leaf by path, each in [0, 2**32).

    Leaves are arrays of at most 4 bytes per element (floats, integers, bool) or typed PRNG keys;
    raises TypeError for anything else. Blocks until the numbers are here.
    """
    return collect(dispatch(tree))[0]


class Held(NamedTuple):
    """The values of a leaf on one CPU device, which stay as they are, and where they lie."""

    values: np.ndarray
    sharding: jax.sharding.Sharding


Started = dict[str, tuple[Array, Array] | Held]


def dispatch(tree: Any) -> Started:
    """Start the computation of (fingerprint, all finite) of every leaf and return at once.

    The values may be donated or deleted right after. One compilation serves all leaves of the same
    shape, dtype and placement: for the 288 leaves of a 12-layer model and its moments 0.9 s on two
    cores, against 3.4 s for one function over the whole tree.
    """
    return {name: _measure(_storable(name, leaf)) for name, leaf in named_leaves(tree).items()}


def hold(tree: Any) -> Started:
    """Do what `dispatch` does, but leave the work for one CPU device to `collect`.

    There a program runs in the thread that calls it, which took half of the time that a save kept
    the training loop waiting. A view of the values keeps them as they are, as it does for Orbax
    until they are written, and costs no copy.
    """

    def start(leaf: Any) -> tuple[Array, Array] | Held:
        if isinstance(leaf, jax.Array) and leaf.size:
            devices = leaf.sharding.device_set
            if len(devices) == 1 and next(iter(devices)).platform == "cpu":
                return Held(np.asarray(leaf), leaf.sharding)
        return _measure(leaf)

    return {name: start(_storable(name, leaf)) for name, leaf in named_leaves(tree).items()}


def collect(started: Started) -> tuple[dict[str, int], bool]:
    """Wait for `dispatch` or `hold`; return fingerprints by path, and whether all is finite."""
    numbers = jax.device_get({name: _finish(each) for name, each in started.items()})
    fingerprints = {name: int(number) for name, (number, _) in numbers.items()}
    return fingerprints, all(bool(finite) for _, finite in numbers.values())


def _finish(started: tuple[Array, Array] | Held) -> tuple[Array, Array]:
    if isinstance(started, Held):
        return _measure(jax.device_put(started.values, started.sharding))
    return started


def _storable(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"leaf {name!r} is a {type(leaf).__name__}, not an array")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if leaf.dtype.itemsize > 4:
        raise TypeError(f"leaf {name!r} is {leaf.dtype}; an element may take 4 bytes at most")
    return leaf


@jax.jit
def _measure(x: Array) -> tuple[Array, Array]:
    """Return the fingerprint of `x` (uint32) and whether it is free of NaN and infinity (bool)."""
    broken = jnp.zeros(x.shape, bool)
    if jnp.issubdtype(x.dtype, jnp.floating):
        broken = ~jnp.isfinite(x)
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    words = mix(bits.astype(jnp.uint32)) * (2 * _index(x.shape) + 1)
    # One reduction of both: XLA:CPU passes over memory once, 5 times faster than in two.
    total, broken = jax.lax.reduce(
        (words, broken),
        (np.uint32(0), np.False_),
        lambda left, right: (left[0] + right[0], left[1] | right[1]),
        tuple(range(x.ndim)),
    )
    return total, ~broken


def _index(shape: tuple[int, ...]) -> Array:
    """Return the row-major position of each element modulo 2**32.

    Built from one iota per axis, without a reshape, so that a sharded array stays where it is. In a
    leaf of more than 2**31 elements factors repeat: two elements exactly 2**31 apart could trade
    places unnoticed; every change of a value is still seen.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return index
