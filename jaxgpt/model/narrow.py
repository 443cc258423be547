"""Stacked layers that are cast one at a time, and whose gradients stay as narrow as their products.

The gradient of a matrix is the result of one product in the compute dtype, widened to the weight's
own only because JAX wants it so: of Llama-2 7B over 4 devices 3.1 GiB each, without one bit of
information. Here it flows to a sink in the compute dtype instead. The cast stays where the layer is
used: else XLA casts all layers before the loop over them, and holds another 3.0 GiB. Gradients of
several micro-batches are widened where they are added up, which is in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.model import params as parameters
from jaxgpt.model.kernels import LANES
from jaxgpt.model.params import LayerParams
from jaxgpt.model.shards import Names, Shards
from jaxgpt.model.staging import CAST

Array = jax.Array
EXPERTS = {"w_gate", "w_up", "w_down"}  # if there are experts: sums of several products


@struct.dataclass
class Stacked:
    """Stacked layers as `model.gpt` takes them in place of bare ones; leaves [L, ...]."""

    weights: LayerParams  # get no gradient
    sink: LayerParams  # gets it; its values do not matter


def names(cfg: ModelConfig) -> set[str]:
    """Return the weights of a layer whose gradients are as narrow as what multiplies."""
    return CAST - EXPERTS if cfg.num_experts else CAST


def sink(cfg: ModelConfig, layers: LayerParams, dtype: DTypeLike) -> LayerParams:
    """Return zeros like the layers, [L, ...]: in `dtype` where a block uses nothing else."""
    narrowed = names(cfg)

    def leaf(path: tuple, w: Array) -> Array:
        return jnp.zeros(w.shape, dtype if path[-1].name in narrowed else w.dtype)

    return jax.tree.map_with_path(leaf, layers)


def used(cfg: ModelConfig, shards: Shards, layer: Stacked) -> LayerParams:
    """Return one layer's weights in the dtypes of the sink, to which their gradients flow."""

    def leaf(spec: parameters.ParamSpec, w: Array, sink: Array) -> Array:
        return _used(shards, spec.axes[1:], w, sink)

    return jax.tree.map(leaf, parameters.specs(cfg).layers, layer.weights, layer.sink)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _used(shards: Shards, names: Names, w: Array, sink: Array) -> Array:
    if w.dtype == sink.dtype:
        return w
    # The same rounding as the cast, which XLA does not move out of the loop.
    kind = jnp.finfo(sink.dtype)
    w = jax.lax.reduce_precision(w, kind.nexp, kind.nmant).astype(sink.dtype)
    if shards.platform == "tpu":
        # As the state lies, else XLA turns all layers' float32 queries, keys and values to the
        # layout that the product likes, before the loop: another 1.5 GiB. Rows shorter than a
        # tile's width lie across, or all layers are padded to it: of Llama-2 7B over 256 devices,
        # which hold 16 of D, another 236 MiB.
        order = [*range(w.ndim)]
        if w.shape[-1] // shards.split(names[-1]) < LANES:
            order[-2:] = order[-1], order[-2]
        w = with_layout_constraint(w, Layout(tuple(order)))
    return w


def _used_forward(shards: Shards, names: Names, w: Array, sink: Array) -> tuple[Array, None]:
    return _used(shards, names, w, sink), None


def _used_backward(shards: Shards, names: Names, saved: None, grad: Array) -> tuple[None, Array]:
    return None, shards.constrain(grad, names)


_used.defvjp(_used_forward, _used_backward)
