"""RoPE fields of config.json: `rope_theta` and `rope_scaling` of transformers 4, and the
`rope_parameters` of transformers 5, which Gemma 3 keeps one of for each type of layer.

Both are read; both are written. The two halves of a head are rotated against each other in these
files and in jaxgpt alike, so no weight is permuted for it.
"""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.config import ModelConfig
from jaxgpt.interop.fields import Fields

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
GLOBAL, LOCAL = "full_attention", "sliding_attention"
LENGTH = "original_max_position_embeddings"
# What may be said of each type, besides its name and base.
KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", LENGTH},
    "yarn": {
        "factor", "beta_slow", "beta_fast", LENGTH, "attention_factor", "mscale", "mscale_all_dim",
        "truncate",
    },
}  # fmt: skip
EVERYWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read(f: Fields, seq_len: int, *, by_layer_type: bool) -> dict[str, Any]:
    """Return the RoPE fields of ModelConfig; `by_layer_type`: as Gemma 3 writes them."""
    old, new = f.table("rope_scaling"), f.table("rope_parameters")
    f.only("partial_rotary_factor", 1, 1.0)
    local: dict[str, Any] = {}
    if by_layer_type:
        if unknown := sorted(set(new) - {GLOBAL, LOCAL}):
            f.refuse(f"rope_parameters.{unknown[0]}", new[unknown[0]], "not a type of layer")
        parts = {kind: new.get(kind) or {} for kind in (GLOBAL, LOCAL)}
        for kind, part in parts.items():
            if type(part) is not dict:
                f.refuse(f"rope_parameters.{kind}", part, "must be an object")
                return {}
        new, local = parts[GLOBAL], parts[LOCAL]
        _type_of(f, local, f"rope_parameters.{LOCAL}", ("default",))
    name = "rope_scaling" if old else f"rope_parameters.{GLOBAL}" if by_layer_type else KEYS[2]
    _check_agreement(f, old, new)
    given = old or new
    theta = given.get("rope_theta", new.get("rope_theta", f.value("rope_theta")))
    values = {"rope_base": f.positive("rope_theta", theta)}
    if by_layer_type:
        theta = local.get("rope_theta", f.value("rope_local_base_freq"))
        values["rope_local_base"] = f.positive("rope_local_base_freq", theta)
    kind = _type_of(f, given, name, tuple(KNOWN))
    return values if kind == "default" else values | _scaling(f, kind, given, name, seq_len)


def _check_agreement(f: Fields, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse a file that says two things: transformers 4 and 5 would compute different models."""
    for key in sorted(set(old) & set(new)):
        if old[key] != new[key]:
            f.refuse(f"rope_scaling.{key}", old[key], f"rope_parameters says {new[key]!r}")
    theta, top = new.get("rope_theta"), f.config.get("rope_theta")
    if None not in (theta, top) and theta != top:
        f.refuse("rope_theta", top, f"rope_parameters says {theta!r}")


def _type_of(f: Fields, given: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    kind = given.get("rope_type", given.get("type", "default"))
    if type(kind) is not str or kind not in allowed:
        f.refuse(f"{name}.rope_type", kind, f"must be one of {', '.join(allowed)}")
        return "default"
    known = EVERYWHERE | set().union(*KNOWN.values())
    for key in sorted(set(given) - known):
        if given[key] is not None:
            f.refuse(f"{name}.{key}", given[key], "not a RoPE field that jaxgpt knows")
    if given.get("partial_rotary_factor", 1) not in (1, 1.0):
        part = given["partial_rotary_factor"]
        f.refuse(f"{name}.partial_rotary_factor", part, "only whole heads are rotated")
    return kind


def _scaling(
    f: Fields, kind: str, given: dict[str, Any], name: str, seq_len: int
) -> dict[str, Any]:
    def positive(key: str, default: Any = None) -> float:
        value = given.get(key)
        return f.positive(f"{name}.{key}", default if value is None else value)

    if kind == "linear":
        return {"rope_scaling": kind, "rope_factor": positive("factor")}
    length = positive(LENGTH, seq_len)
    if length != int(length):
        f.refuse(f"{name}.{LENGTH}", length, "must be a whole number of tokens")
    if (top := f.config.get(LENGTH)) is not None and top != length:
        f.refuse(
            LENGTH, top, f"{name} means {length:g}; transformers 4 and 5 differ on which counts"
        )
    values = {"rope_scaling": kind, "rope_original_len": int(length)}
    if kind == "llama3":
        low, high = positive("low_freq_factor"), positive("high_freq_factor")
        return values | {
            "rope_factor": positive("factor"), "rope_low_freq": low, "rope_high_freq": high
        }  # fmt: skip
    factor = positive("factor", seq_len / length)
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    attention = given.get("attention_factor")
    if attention is not None:
        if not math.isclose(positive("attention_factor"), usual, rel_tol=1e-6):
            f.refuse(f"{name}.attention_factor", attention, f"jaxgpt computes {usual:.6g}")
    elif given.get("mscale") and given.get("mscale_all_dim"):  # one alone has no meaning
        f.refuse(f"{name}.mscale", given["mscale"], "only the usual attention factor is computed")
    if given.get("truncate", True) is not True:
        f.refuse(f"{name}.truncate", given["truncate"], "jaxgpt rounds the range to whole features")
    # A 0 means the usual value here, as in transformers.
    low, high = given.get("beta_slow") or 1, given.get("beta_fast") or 32
    return values | {
        "rope_factor": factor,
        "rope_low_freq": f.positive(f"{name}.beta_slow", low),
        "rope_high_freq": f.positive(f"{name}.beta_fast", high),
    }


def write(cfg: ModelConfig, *, by_layer_type: bool) -> dict[str, Any]:
    """Return the RoPE fields of config.json, in both spellings."""
    scaling: dict[str, Any] = {"rope_type": cfg.rope_scaling, "factor": float(cfg.rope_factor)}
    if cfg.rope_scaling == "none":
        scaling = {"rope_type": "default"}
    elif cfg.rope_scaling != "linear":
        low, high = ("low_freq_factor", "high_freq_factor")
        if cfg.rope_scaling == "yarn":
            low, high = ("beta_slow", "beta_fast")
        length = cfg.rope_original_len or int(cfg.seq_len / cfg.rope_factor)
        scaling |= {low: cfg.rope_low_freq, high: cfg.rope_high, LENGTH: length}
    theta = float(cfg.rope_base)
    old = {
        "rope_theta": theta,
        "rope_scaling": None if cfg.rope_scaling == "none" else scaling,
    }
    if not by_layer_type:
        return {**old, "rope_parameters": {**scaling, "rope_theta": theta}}
    local = float(cfg.rope_local_base or cfg.rope_base)
    parts = {
        GLOBAL: {**scaling, "rope_theta": theta},
        LOCAL: {"rope_type": "default", "rope_theta": local},
    }
    return {**old, "rope_local_base_freq": local, "rope_parameters": parts}
