"""The parameters: one tree of `ParamSpec` from which everything about them is derived.

Initial values, abstract shapes, counts and tables come from `specs(cfg)`; so do, in other rooms,
placement, decay masks and checkpoint targets. The tree has two layouts: `stacked` (every leaf of
`layers` has a leading axis L) and unrolled (`layers` is a tuple of L structs). Both hold the same
values for the same key. Nothing here knows how the parameters are used.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from jaxgpt.config import ModelConfig
from jaxgpt.errors import ConfigError

Array = jax.Array


@struct.dataclass
class LayerParams:
    """One block; in the stacked layout every leaf has a leading axis L. Absent weights are None."""

    wq: Array  # [D, N, H]
    wk: Array  # [D, K, H]
    wv: Array  # [D, K, H]
    wo: Array  # [N, H, D]
    w_up: Array  # [D, F]; of experts [E, D, F]
    w_down: Array  # [F, D]; of experts [E, F, D]
    attn_norm: Array  # [D]
    mlp_norm: Array  # [D]
    w_gate: Array | None = None  # [D, F], gated MLPs; of experts [E, D, F]
    router: Array | None = None  # [D, E], experts
    router_bias: Array | None = None  # [E], moved by the load of experts, not by a gradient
    shared_gate: Array | None = None  # [D, F], MLP that every token passes besides its experts
    shared_up: Array | None = None  # [D, F]
    shared_down: Array | None = None  # [F, D]
    attn_norm_bias: Array | None = None  # [D], LayerNorm with bias
    mlp_norm_bias: Array | None = None  # [D]
    attn_post_norm: Array | None = None  # [D], sandwich placement
    attn_post_norm_bias: Array | None = None  # [D]
    mlp_post_norm: Array | None = None  # [D]
    mlp_post_norm_bias: Array | None = None  # [D]
    q_norm: Array | None = None  # [H], qk_norm
    k_norm: Array | None = None  # [H]
    bq: Array | None = None  # [N, H], attn_bias
    bk: Array | None = None  # [K, H]
    bv: Array | None = None  # [K, H]
    bo: Array | None = None  # [D], out_bias
    b_gate: Array | None = None  # [F], mlp_bias
    b_up: Array | None = None  # [F]
    b_down: Array | None = None  # [D]


@struct.dataclass
class Params:
    """The whole model. The same fields hold specs, gradients, moments or shardings."""

    embed: Array  # [V, D]
    layers: LayerParams | tuple[LayerParams, ...]
    pos_embed: Array | None = None  # [T, D], learned positions
    final_norm: Array | None = None  # [D]; post-norm blocks end in a norm and need none
    final_norm_bias: Array | None = None  # [D]
    lm_head: Array | None = None  # [V, D]; None: tied to embed


@dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axis names and initial distribution of one parameter.

    `init` is ("normal", deviation), ("uniform", b) for [-b, b], or ("constant", value).
    Axis names: vocab, embed, heads, kv_heads, head_dim, mlp, experts, layers; norm for a vector
    along D, H or E that is never worth splitting; None for the table of positions and for the
    router's experts.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: tuple[Literal["normal", "uniform", "constant"], float]


class Row(NamedTuple):
    """One line of `table`: the weight of a name in all the layers that have it."""

    name: str
    shape: tuple[int, ...]  # of one layer
    axes: tuple[str | None, ...]
    repeats: int  # layers
    count: int  # parameters in all of them


def specs(cfg: ModelConfig) -> Params:
    """Return the parameters of `cfg` as a `Params` tree of `ParamSpec`, in the layout of `cfg`.

    Raises ConfigError when the vocabulary size is still unknown.
    """
    if cfg.vocab_size < 1:
        raise ConfigError(
            f"model.vocab_size = {cfg.vocab_size}: must be known before parameters are made; "
            "set it, or take it from the tokenizer"
        )
    V, D = cfg.vocab_size, cfg.embed_dim
    final_norm, final_norm_bias = (None, None) if cfg.norm_placement == "post" else _norm(cfg)
    layer = _layer(cfg)
    return Params(
        embed=ParamSpec((V, D), ("vocab", "embed"), ("normal", cfg.init_std)),
        pos_embed=ParamSpec((cfg.seq_len, D), (None, "embed"), ("normal", cfg.init_std))
        if cfg.positions == "learned"
        else None,
        layers=jax.tree.map(lambda spec: _stack_spec(spec, cfg.num_layers), layer)
        if cfg.stacked
        else (layer,) * cfg.num_layers,
        final_norm=final_norm,
        final_norm_bias=final_norm_bias,
        lm_head=None
        if cfg.tie_embeddings
        else ParamSpec((V, D), ("vocab", "embed"), _matrix(cfg, fan_in=D, fan_out=V)),
    )


def _layer(cfg: ModelConfig) -> LayerParams:
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.kv_heads, cfg.head_width, cfg.mlp_width
    # Residual outputs add up over 2L sub-layers (GPT-2): their scale keeps the sum's variance flat.
    depth = 1 / math.sqrt(2 * cfg.num_layers) if cfg.init_depth_scale else 1.0
    zeros, sandwich = ("constant", 0.0), cfg.norm_placement == "sandwich"
    attn_norm, attn_norm_bias = _norm(cfg)
    head_scale = ParamSpec((H,), ("norm",), _unit_scale(cfg)) if cfg.qk_norm else None
    E, Fe, Fs = cfg.num_experts, cfg.expert_width, cfg.shared_dim

    def mlp(F: int, experts: int = 0) -> tuple[ParamSpec, ParamSpec]:
        """Return the specs of the matrices into and out of an MLP, or of those of all experts."""
        lead, axes = ((experts,), ("experts",)) if experts else ((), ())
        return (
            ParamSpec((*lead, D, F), (*axes, "embed", "mlp"), _matrix(cfg, D, F)),
            ParamSpec((*lead, F, D), (*axes, "mlp", "embed"), _matrix(cfg, F, D, depth)),
        )

    up, down = mlp(Fe if E else F, E)
    shared_up, shared_down = mlp(Fs) if Fs else (None, None)
    router = ParamSpec((D, E), ("embed", None), _matrix(cfg, D, E)) if E else None

    def bias(present: bool, shape: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec | None:
        return ParamSpec(shape, axes, zeros) if present else None

    return LayerParams(
        attn_norm=attn_norm,
        attn_norm_bias=attn_norm_bias,
        wq=ParamSpec((D, N, H), ("embed", "heads", "head_dim"), _matrix(cfg, D, N * H)),
        wk=ParamSpec((D, K, H), ("embed", "kv_heads", "head_dim"), _matrix(cfg, D, K * H)),
        wv=ParamSpec((D, K, H), ("embed", "kv_heads", "head_dim"), _matrix(cfg, D, K * H)),
        wo=ParamSpec((N, H, D), ("heads", "head_dim", "embed"), _matrix(cfg, N * H, D, depth)),
        bq=bias(cfg.attn_bias, (N, H), ("heads", "head_dim")),
        bk=bias(cfg.attn_bias, (K, H), ("kv_heads", "head_dim")),
        bv=bias(cfg.attn_bias, (K, H), ("kv_heads", "head_dim")),
        bo=bias(cfg.out_bias, (D,), ("norm",)),
        q_norm=head_scale,
        k_norm=head_scale,
        attn_post_norm=attn_norm if sandwich else None,
        attn_post_norm_bias=attn_norm_bias if sandwich else None,
        mlp_norm=attn_norm,
        mlp_norm_bias=attn_norm_bias,
        w_gate=up if cfg.gated else None,
        w_up=up,
        w_down=down,
        router=router,
        router_bias=bias(cfg.router_bias and E > 0, (E,), ("norm",)),
        shared_gate=shared_up if cfg.gated else None,
        shared_up=shared_up,
        shared_down=shared_down,
        b_gate=bias(cfg.mlp_bias and cfg.gated, (F,), ("mlp",)),
        b_up=bias(cfg.mlp_bias, (F,), ("mlp",)),
        b_down=bias(cfg.mlp_bias, (D,), ("norm",)),
        mlp_post_norm=attn_norm if sandwich else None,
        mlp_post_norm_bias=attn_norm_bias if sandwich else None,
    )


def _norm(cfg: ModelConfig) -> tuple[ParamSpec, ParamSpec | None]:
    """Return scale and bias; RMSNorm never has a bias, whatever `norm_bias` says."""
    scale = ParamSpec((cfg.embed_dim,), ("norm",), _unit_scale(cfg))
    if cfg.norm != "layernorm" or not cfg.norm_bias:
        return scale, None
    return scale, ParamSpec((cfg.embed_dim,), ("norm",), ("constant", 0.0))


def _unit_scale(cfg: ModelConfig) -> tuple[Literal["constant"], float]:
    return "constant", 0.0 if cfg.norm_plus_one else 1.0


def _matrix(
    cfg: ModelConfig, fan_in: int, fan_out: int, scale: float = 1.0
) -> tuple[Literal["normal", "uniform"], float]:
    """Return a weight matrix's distribution: normal; Glorot 2010 eq. 16; He 2015 eq. 10."""
    if cfg.init == "xavier":
        return "uniform", scale * math.sqrt(6 / (fan_in + fan_out))
    return "normal", scale * (cfg.init_std if cfg.init == "normal" else math.sqrt(2 / fan_in))


def _stack_spec(spec: ParamSpec, num_layers: int) -> ParamSpec:
    return ParamSpec((num_layers, *spec.shape), ("layers", *spec.axes), spec.init)


def init(specs: Params, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Draw the initial values; may be traced, for values that are born sharded.

    The key of a leaf is derived from its name and layer alone, and every draw is exact to the last
    bit, so neither layout, nor mesh, nor device, nor the presence of other weights changes a value.
    """
    quantiles = _normal_quantiles()

    def draw(key: Array, shape: tuple[int, ...], init: tuple[str, float]) -> Array:
        kind, scale = init
        if kind == "normal":
            return quantiles[jax.random.bits(key, shape, jnp.uint16)] * jnp.float32(scale)
        if kind == "uniform":
            steps = jax.random.bits(key, shape).astype(jnp.int32) >> 8  # in [-2^23, 2^23)
            return steps.astype(jnp.float32) * jnp.float32(scale / 2**23)
        return jnp.full(shape, scale, jnp.float32)

    def leaf(path: Any, spec: ParamSpec) -> Array:
        key_of_name = jax.random.fold_in(key, zlib.crc32(weight_name(path)[0].encode()))
        if spec.axes[0] != "layers":
            return draw(key_of_name, spec.shape, spec.init).astype(dtype)
        num_layers, *shape = spec.shape
        keys = jax.vmap(lambda i: jax.random.fold_in(key_of_name, i))(jnp.arange(num_layers))
        return jax.vmap(lambda k: draw(k, tuple(shape), spec.init))(keys).astype(dtype)

    if not isinstance(specs.layers, tuple):
        return jax.tree.map_with_path(leaf, specs)
    # One draw per name instead of one per name and layer: less to compile when traced.
    layers = jax.tree.map(lambda spec: _stack_spec(spec, len(specs.layers)), specs.layers[0])
    return restack(jax.tree.map_with_path(leaf, specs.replace(layers=layers)), stacked=False)


def on_host(specs: Params, rng: np.random.Generator) -> Params:
    """Draw float32 NumPy values of the same distributions, other than those of `init`.

    Nothing is compiled for it: a small model's `init` takes XLA:CPU 0.7 s.
    """

    def draw(spec: ParamSpec) -> np.ndarray:
        kind, scale = spec.init
        if kind == "normal":
            return (rng.standard_normal(spec.shape) * scale).astype(np.float32)
        if kind == "uniform":
            return rng.uniform(-scale, scale, spec.shape).astype(np.float32)
        return np.full(spec.shape, scale, np.float32)

    return jax.tree.map(draw, specs)


def _normal_quantiles() -> Array:
    """Return 2^16 equally likely values of the standard normal distribution, up to ±4.3.

    A lookup and one product round the same everywhere. The usual inverse error function does not:
    compiled by XLA for other shapes or shards it gave other last bits in 1 of 2048 values.
    """
    inverse = NormalDist().inv_cdf
    return jnp.asarray([inverse((i + 0.5) / 2**16) for i in range(2**16)], jnp.float32)


def weight_name(path: Any) -> tuple[str, int]:
    """Return the name of a leaf, equal in both layouts, and its layer (0 outside of layers)."""
    parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    layer = next((int(part) for part in parts if part.isdigit()), 0)
    return "/".join(part for part in parts if not part.isdigit()), layer


def abstract(specs: Params, dtype: DTypeLike = jnp.float32) -> Params:
    """Return the parameters as `jax.ShapeDtypeStruct`, without values."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def count(specs: Any) -> int:
    """Return the number of parameters in a tree of specs; a tied head counts once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))


def table(specs: Params) -> list[Row]:
    """Return one `Row` for each weight name, the same rows for both layouts."""
    rows: dict[str, Row] = {}
    for path, spec in jax.tree.leaves_with_path(specs):
        name, _ = weight_name(path)
        stacked = spec.axes[0] == "layers"
        shape, axes = (spec.shape[1:], spec.axes[1:]) if stacked else (spec.shape, spec.axes)
        repeats = spec.shape[0] if stacked else rows[name].repeats + 1 if name in rows else 1
        rows[name] = Row(name, shape, axes, repeats, repeats * math.prod(shape))
    return list(rows.values())


def restack(params: Params, stacked: bool) -> Params:
    """Convert a tree of arrays between the layouts; values are moved, never changed."""
    layers = params.layers
    if stacked and isinstance(layers, tuple):
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    elif not stacked and not isinstance(layers, tuple):
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(num_layers))
    return params.replace(layers=layers)
