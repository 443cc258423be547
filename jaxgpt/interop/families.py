"""Model families: transformers' config.json to `ModelConfig` and back.

A field that changes what the model computes is expressed exactly or refused by name and value; one
that is absent has transformers' own default. Both spellings are read and written, that of
transformers 4 and that of 5. Code that a config.json names is never run.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import ConfigError, DataError
from jaxgpt.interop.facts import ALIASES, DEFAULTS, INERT, SAID_ELSEWHERE, type_name
from jaxgpt.interop.facts import FAMILIES as FAMILIES
from jaxgpt.interop.fields import Fields
from jaxgpt.interop.reading import read_gpt2, read_rotary
from jaxgpt.interop.writing import write
from jaxgpt.model.canonical import canonical, computed
from jaxgpt.validation import problems_of


class Source(NamedTuple):
    """What a config.json says."""

    family: str
    model: ModelConfig
    dtype: str | None  # of the weights, as it says; the files decide
    ignored: tuple[str, ...]  # fields that nothing here knows, and code that is not run


def read_config(config: dict[str, Any], where: str) -> Source:
    """Return the family and model of a config.json; `where` begins every refusal.

    Sizes that ModelConfig could derive are written out. Raises DataError, one line, with all fields
    that are wrong, or that change the model in a way jaxgpt cannot express.
    """
    family = _family(config, where)
    f = _fields(family, config)
    for key in ("quantization_config", "per_layer_config"):
        f.only(key)
    if not config.get("is_causal", True):
        f.refuse("is_causal", config["is_causal"], "no model of jaxgpt looks ahead")
    values = read_gpt2(f) if family == "gpt2" else read_rotary(family, f)
    if not f.problems:
        model = canonical(ModelConfig(**values))
        f.problems.extend(problems_of(Config(model=model)))
    if f.problems:
        more = f"; and {len(f.problems) - 8} more" if len(f.problems) > 8 else ""
        raise DataError(f"{where}: {'; '.join(f.problems[:8])}{more}")
    dtype = config.get("dtype") or config.get("torch_dtype")
    dtype = dtype.removeprefix("torch.") if type(dtype) is str else None
    return Source(family, model, dtype, tuple(_ignored(f)))


def _family(config: dict[str, Any], where: str) -> str:
    kind = config.get("model_type")
    if kind == "gemma3_text":
        return "gemma3"
    if kind == "gemma3":
        raise DataError(
            f'{where}: model_type = "gemma3" is a model of images and text; only "gemma3_text" can '
            "be read: save its language model alone"
        )
    if type(kind) is not str or kind not in FAMILIES:
        known = ", ".join(FAMILIES).replace("gemma3", "gemma3_text")
        raise DataError(f"{where}: model_type = {json.dumps(kind)[:80]}: must be one of {known}")
    return kind


def _fields(family: str, config: dict[str, Any]) -> Fields:
    """Return the fields of a family under their own names; two that disagree are a problem."""
    aliases = {alias: key for alias, key in ALIASES.get(family, {}).items() if alias in config}
    plain = {key: value for key, value in config.items() if key not in aliases}
    f = Fields({key: config[alias] for alias, key in aliases.items()} | plain, DEFAULTS[family])
    for alias, key in aliases.items():
        if f.config[key] != config[alias]:
            f.refuse(alias, config[alias], f"not what {key} says, another name of the same")
    return f


def _ignored(f: Fields) -> list[str]:
    code = ["auto_map (code is never run)"] if f.config.get("auto_map") else []
    unknown = [
        key
        for key, value in f.config.items()
        if key not in f.defaults
        and key not in INERT
        and not key.startswith(SAID_ELSEWHERE)
        and key not in ("auto_map", "layer_types")
        and value is not None
        and not (key == "hidden_act" and value == f.config.get("hidden_activation", value))
    ]
    rates = {key: f.value(key) for key in f.defaults if "drop" in key}
    carried = len(rates) > 1 and len(set(rates.values())) == 1  # one rate for all, as ours
    dropout = [key for key, rate in rates.items() if rate and not carried]
    return code + sorted(unknown) + dropout


def write_config(
    family: str, cfg: ModelConfig, dtype: str, base: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json that transformers loads to this very model.

    `base` is the config.json that the model came from: it stays as it is where it still says the
    same, and else gives the fields that are none of the model's. Without one the special ids are
    null; the caller knows the tokenizer. Raises ConfigError if the family cannot express the model.
    """
    if obstacles := _obstacles(family, cfg):
        raise ConfigError(f"{family} cannot express this model: {'; '.join(obstacles)}")
    base = {key: v for key, v in (base or {}).items() if key != "auto_map"}
    if base.get("model_type") == type_name(family):
        if _says(base, cfg):
            names = [key for key in ("dtype", "torch_dtype") if key in base] or ["dtype"]
            return base | {name: dtype for name in names}
    else:
        base = {}
    written = write(family, cfg) | {"dtype": dtype, "torch_dtype": dtype}
    special = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = base.get(key)
        ids = ids if type(ids) is list else [ids]
        inside = all(type(i) is int and 0 <= i < cfg.vocab_size for i in ids)
        special[key] = base[key] if inside else None
    # Spellings of the same that the file may hold besides ours.
    stale = {"_sliding_window_pattern", "partial_rotary_factor", "rope_local_base_freq"}
    kept = {key: value for key, value in base.items() if key not in stale}
    if family == "qwen3_moe" and "intermediate_size" in kept:
        del written["intermediate_size"]  # of dense layers, which there are none of
    return kept | written | special


def family_of(cfg: ModelConfig) -> str:
    """Return the family of transformers that expresses this model exactly.

    Raises ConfigError with what stands in the way of the one that comes nearest.
    """
    obstacles = {family: _obstacles(family, cfg) for family in FAMILIES}
    family = min(obstacles, key=lambda name: len(obstacles[name]))  # the first of equals
    if obstacles[family]:
        raise ConfigError(
            f"no family of transformers expresses this model; the nearest is {family}, but for "
            f"{'; '.join(obstacles[family])}"
        )
    return family


def _obstacles(family: str, cfg: ModelConfig) -> list[str]:
    """Return the fields that would come back different from the family's config.json."""
    wanted = computed(cfg)
    try:
        found = computed(read_config(write(family, cfg), family).model)
    except DataError as error:
        return str(error).removeprefix(f"{family}: ").split("; ")
    return [
        f"model.{field.name} = {json.dumps(getattr(wanted, field.name))} "
        f"({family} has {json.dumps(getattr(found, field.name))})"
        for field in dataclasses.fields(ModelConfig)
        if getattr(wanted, field.name) != getattr(found, field.name)
    ]


def _says(config: dict[str, Any], cfg: ModelConfig) -> bool:
    try:
        return computed(read_config(config, "config.json").model) == computed(cfg)
    except DataError:
        return False
