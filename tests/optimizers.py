"""The optimisers in NumPy float64, one matrix at a time, as their papers write them."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxgpt.checkpoint.fingerprint import named_leaves
from jaxgpt.config import OptimConfig
from jaxgpt.model.params import LayerParams, Params

# A block of weights of two layers, as large as Adafactor needs to factor them: the shape of each
# leaf, and what it is as matrices (number, inputs, outputs) or vectors (number, entries).
LAYER = {
    "wq": ((128, 4, 40), (1, 128, 160)),
    "wo": ((4, 40, 128), (1, 160, 128)),
    "w_up": ((3, 128, 130), (3, 128, 130)),  # three experts
    "attn_norm": ((128,), (1, 128)),
    "bq": ((4, 40), (1, 160)),
    "router": ((128, 3), (1, 128, 3)),
}
SHAPES = LAYER | {"embed": ((140, 128), (1, 140, 128))}
HIDDEN = {"wq", "wo", "w_up"}
DECAYING = HIDDEN | {"router", "embed"}
ALL = ("adamw", "adafactor", "lion", "muon", "sgd")


def values(seed: int, scale: float = 1.0) -> Params:
    """Return float32 weights or gradients of `SHAPES`, unrolled; others of the model are None."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: np.float32(scale * rng.normal(size=shape))  # noqa: E731
    absent = dict.fromkeys(("wk", "wv", "w_down", "mlp_norm"))
    layers = tuple(
        LayerParams(**absent, **{name: draw(shape) for name, (shape, _) in LAYER.items()})
        for _ in range(2)
    )
    return Params(embed=draw(SHAPES["embed"][0]), layers=layers)


def stacked(tree: Params) -> Params:
    """Return the tree with one leaf for both layers."""
    return tree.replace(layers=jax.tree.map(lambda *leaves: np.stack(leaves), *tree.layers))


def flat(tree: Params) -> dict[str, np.ndarray]:
    """Return the leaves of an unrolled tree by path, such as layers.0.wq, in float64."""
    return {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(tree).items()}


def direction(
    cfg: OptimConfig, name: str, moments: dict[str, Any], g: np.ndarray, w: np.ndarray, t: int
) -> np.ndarray:
    """Return update t >= 1 of a leaf before rate and decay; `moments` are the leaf's own."""
    kind, views = cfg.name, SHAPES[name][1]
    if kind == "muon" and name not in HIDDEN:
        kind = "adamw"
    if kind in ("adamw", "lion", "sgd"):
        return ELEMENTWISE[kind](cfg, moments, g, t)
    of_matrix = {"adafactor": adafactor, "muon": muon}[kind]
    pairs = zip(g.reshape(views), w.reshape(views), strict=True)
    found = [of_matrix(cfg, moments.setdefault(i, {}), g, w, t) for i, (g, w) in enumerate(pairs)]
    return np.stack(found).reshape(g.shape)


def adamw(cfg: OptimConfig, s: dict, g: np.ndarray, t: int) -> np.ndarray:
    s["m"] = cfg.beta1 * s.get("m", 0) + (1 - cfg.beta1) * g
    s["v"] = cfg.beta2 * s.get("v", 0) + (1 - cfg.beta2) * g**2
    m, v = s["m"] / (1 - cfg.beta1**t), s["v"] / (1 - cfg.beta2**t)
    return m / (np.sqrt(v) + cfg.eps)


def lion(cfg: OptimConfig, s: dict, g: np.ndarray, t: int) -> np.ndarray:
    m = s.get("m", 0 * g)
    s["m"] = cfg.beta2 * m + (1 - cfg.beta2) * g
    return np.sign(cfg.beta1 * m + (1 - cfg.beta1) * g)


def sgd(cfg: OptimConfig, s: dict, g: np.ndarray, t: int) -> np.ndarray:
    s["m"] = cfg.beta1 * s.get("m", 0) + g
    return s["m"]


ELEMENTWISE = {"adamw": adamw, "lion": lion, "sgd": sgd}


def adafactor(cfg: OptimConfig, s: dict, g: np.ndarray, w: np.ndarray, t: int) -> np.ndarray:
    decay, square = 1 - t**-0.8, g**2 + 1e-30
    if g.ndim == 2 and min(g.shape) >= 128:
        s["r"] = decay * s.get("r", 0) + (1 - decay) * square.mean(1)
        s["c"] = decay * s.get("c", 0) + (1 - decay) * square.mean(0)
        v = np.outer(s["r"], s["c"]) / s["r"].mean()
    else:
        s["v"] = v = decay * s.get("v", 0) + (1 - decay) * square
    u = g / np.sqrt(v)
    rms = lambda x: math.sqrt((x**2).mean())  # noqa: E731
    return u / max(1, rms(u)) * max(1e-3, rms(w))


def muon(cfg: OptimConfig, s: dict, g: np.ndarray, w: np.ndarray, t: int) -> np.ndarray:
    b = cfg.beta1
    s["m"] = b * s.get("m", 0) + (1 - b) * g
    x = b * s["m"] / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)  # Nesterov
    x = x / np.linalg.norm(x)
    for _ in range(5):  # Newton-Schulz
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return 0.2 * math.sqrt(max(x.shape)) * x
