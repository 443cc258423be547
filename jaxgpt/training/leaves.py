"""What the name of a weight means to an optimiser: its decay and rate, and which matrix it is.

Names are those of `model.params.weight_name`, equal in both layouts of the layers. The same rules
hold for any tree with such names, be its leaves arrays, specs or shapes.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

from jaxgpt.config import OptimConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model.params import weight_name

BIASES = {"bq", "bk", "bv", "bo", "b_gate", "b_up", "b_down"}
# Weights that are matrices: how many of their last axes are inputs, and how many outputs. The
# first are those of blocks, whose inputs and outputs are both features.
HIDDEN = {
    "wq": (1, 2), "wk": (1, 2), "wv": (1, 2), "wo": (2, 1), "w_gate": (1, 1), "w_up": (1, 1),
    "w_down": (1, 1), "shared_gate": (1, 1), "shared_up": (1, 1), "shared_down": (1, 1),
}  # fmt: skip
TABLES = {"embed": (1, 1), "pos_embed": (1, 1), "lm_head": (1, 1), "router": (1, 1)}


class Axes(NamedTuple):
    """How the axes of a leaf are read, from the first on; a vector has neither input nor output."""

    batch: int  # layers, experts: matrices (or vectors) that have nothing to do with each other
    inputs: int
    outputs: int


def axes_of(path: Any, ndim: int) -> Axes:
    """Return how a leaf of `ndim` axes is read; one that is no matrix is a vector per layer."""
    name, _ = weight_name(path)
    last = _last(path)
    inputs, outputs = (HIDDEN | TABLES).get(last, (0, 0))
    if inputs:
        return Axes(ndim - inputs - outputs, inputs, outputs)
    stacked = name.startswith("layers/") and not any(
        isinstance(k, jax.tree_util.SequenceKey) for k in path
    )
    return Axes(int(stacked), 0, 0)


def hidden_matrices(params_like: Any) -> Any:
    """Return a tree of bool: the matrices of blocks, without routers."""
    return jax.tree.map_with_path(lambda path, _: _last(path) in HIDDEN, params_like)


def balanced(params_like: Any) -> Any:
    """Return a tree of bool: leaves that the load of experts moves, and no gradient."""
    return jax.tree.map_with_path(lambda path, _: _last(path) == "router_bias", params_like)


def decay_mask(params_like: Any) -> Any:
    """Return a tree of bool: weight decay acts on matrices and embeddings.

    By the leaf's name, as the layout adds axes: names that end in `norm`, `norm_bias` or begin
    with `b` and a projection (`bq`, `bk`, `bv`, `bo`, `b_gate`, `b_up`, `b_down`) do not decay.
    """

    def decays(path: Any, _: Any) -> bool:
        return not (_last(path).endswith(("norm", "bias")) or _last(path) in BIASES)

    return jax.tree.map_with_path(decays, params_like)


def rates_and_decays(cfg: OptimConfig, params_like: Any) -> tuple[Any, Any]:
    """Return two trees of float: the factor on the learning rate, and the weight decay.

    The first pattern of `cfg.groups` that `re.search` finds in a weight's name counts; its weight
    decay also holds for a weight that otherwise has none. Router biases are no part of this.
    Raises ConfigError for a pattern without a weight.
    """
    names = [weight_name(path)[0] for path, _ in jax.tree.leaves_with_path(params_like)]
    names = [name for name in dict.fromkeys(names) if not name.endswith("router_bias")]
    group_of = {
        name: next((pattern for pattern in cfg.groups if re.search(pattern, name)), None)
        for name in names
    }
    if problems := [
        f"optim.groups[{pattern!r}]: matches no weight"
        + (" that an earlier pattern leaves" if any(re.search(pattern, n) for n in names) else "")
        + f"; the names are {', '.join(names)}"
        for pattern in cfg.groups
        if pattern not in group_of.values()
    ]:
        raise ConfigError(*problems)

    def value(key: str, usual: float, path: Any) -> float:
        pattern = group_of.get(weight_name(path)[0])
        return usual if pattern is None else cfg.groups[pattern].get(key, usual)

    factors = jax.tree.map_with_path(lambda path, _: value("lr", 1.0, path), params_like)
    decays = jax.tree.map_with_path(
        lambda path, decays: value("weight_decay", cfg.weight_decay if decays else 0.0, path),
        decay_mask(params_like),
    )
    return factors, decays


def only(tree: Any, mask: Any) -> Any:
    """Return the tree with None in place of the leaves that the mask leaves out."""
    return jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree)


def _last(path: Any) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)
