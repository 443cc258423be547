"""What an MLP does between its products; of a gated one the activation is that of the gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,  # of the gate
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),  # of the gate; tanh form, as Gemma's
}


def activated(kind: str, up: Array, gate: Array | None, dtype: DTypeLike) -> Array:
    """Return act(up), or of a gated MLP act(gate) * up, computed in float32, in `dtype`."""
    up, activation = up.astype(jnp.float32), ACTIVATIONS[kind]
    if gate is None:
        return activation(up).astype(dtype)
    return (activation(gate.astype(jnp.float32)) * up).astype(dtype)
