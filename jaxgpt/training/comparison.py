"""What the checks of gradients and of meshes share: random documents, and how far off a leaf is.

Both compare trees of a small model, one computed as the run will and one that is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# A leaf that is nearly 0 by symmetry (a key bias shifts all scores of a query alike, so that its
# gradient is) is all rounding: errors count against at least this share of the norm of all leaves.
# All others of the twin for gradients have 2 % or more of it.
FLOOR = 0.01


def random_documents(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return segment ids and positions [..., T], int32, of rows with about four documents each."""
    T = shape[-1]
    opens = rng.random(shape) < 4 / T
    opens[..., 0] = True
    index = np.arange(T, dtype=np.int32)
    begins = np.maximum.accumulate(np.where(opens, index, 0), axis=-1)
    return np.cumsum(opens, axis=-1, dtype=np.int32), (index - begins).astype(np.int32)


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree in float64 by their paths, such as layers/wq; no scalars."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.ndim
    }


def leaf_errors(
    leaves: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return by name the norm of what each leaf is off by, as a share of its own; see `FLOOR`."""
    norms = {name: float(np.linalg.norm(leaf)) for name, leaf in right.items()}
    floor = FLOOR * float(np.linalg.norm(list(norms.values())))
    return {
        name: share(float(np.linalg.norm(leaves[name] - right[name])), max(norm, floor))
        for name, norm in norms.items()
    }


def share(error: float, of: float) -> float:
    """Return error / of; what is not finite is as wrong as can be."""
    part = error / of if of > 0 else (0.0 if error == 0 else float("inf"))
    return part if np.isfinite(part) else float("inf")
