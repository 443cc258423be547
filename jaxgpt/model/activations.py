"""The activation of each kind of MLP; of gated ones, what is applied to the gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,  # of the gate
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),  # of the gate; tanh form, as Gemma's
}
