"""Two numbers that stand for a gradient in the golden files."""

from __future__ import annotations

import numpy as np


def digest(gradient: np.ndarray) -> np.ndarray:
    """Return the norm, and a sum that changes when two entries are exchanged, float64 [2]."""
    flat = np.float64(gradient).ravel()
    return np.array([np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))])
