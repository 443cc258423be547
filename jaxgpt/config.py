"""Configurations from files and command lines, and back: the fields themselves are in `schema`.

A configuration is built from four layers, later ones winning: the defaults, the preset named by
`base`, the preset itself, and `section.field=value` overrides. `load` reports all problems at once
and records which layer set each value. Only the standard library is imported: a bad configuration
is refused before JAX starts.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.schema import CheckpointConfig as CheckpointConfig
from jaxgpt.schema import Config as Config
from jaxgpt.schema import DataConfig as DataConfig
from jaxgpt.schema import EvalConfig as EvalConfig
from jaxgpt.schema import LogConfig as LogConfig
from jaxgpt.schema import MeshConfig as MeshConfig
from jaxgpt.schema import ModelConfig as ModelConfig
from jaxgpt.schema import OptimConfig as OptimConfig
from jaxgpt.schema import RunConfig as RunConfig
from jaxgpt.schema import TokenizerConfig as TokenizerConfig
from jaxgpt.schema import TrainConfig as TrainConfig
from jaxgpt.toml_values import convert, dump, line_of, read_toml, suggestion
from jaxgpt.validation import problems_of

OVERRIDE = "override"  # the origin of a value begins with it where a word of the command gave it
# Fields of saved configurations that have another name and form by now.
RENAMED = {("train", "aux_loss_weight"): ("aux_loss_weights", lambda weight: [weight])}
SECTIONS: dict[str, type] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if name != "origins"
}


def fields_of(section: str) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Yield (field, resolved type) of every field of a section, in order."""
    hints = typing.get_type_hints(SECTIONS[section])
    for f in dataclasses.fields(SECTIONS[section]):
        yield f, hints[f.name]


def _all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section in SECTIONS for f, _ in fields_of(section)]


def _hint_of(section: str, key: str) -> Any:
    """Return the type of a field, or None where there is no such field."""
    if section not in SECTIONS:
        return None
    return next((hint for f, hint in fields_of(section) if f.name == key), None)


def _file_settings(path: Path, problems: list[str]) -> list[tuple[str, str, Any, str]]:
    """Return (section, key, value, origin) of a preset and, before them, of its `base`."""
    parsed, text = read_toml(path)
    settings: list[tuple[str, str, Any, str]] = []
    base = parsed.pop("base", None)
    if isinstance(base, str):
        base_path = path.parent / base
        if "base" in read_toml(base_path)[0]:
            problems.append(f"{base_path}: a base has no base of its own (one level only)")
        else:
            settings += _file_settings(base_path, problems)
    elif base is not None:
        problems.append(f"{path}: base = {base!r} is not a string (the path of another preset)")
    for section, table in parsed.items():
        if not isinstance(table, dict):
            line = line_of(text, "", section)
            problems.append(
                f"{path}:{line}: unknown key {section}{suggestion(section, _all_keys())}"
            )
            continue
        for key, value in table.items():
            settings.append((section, key, value, f"{path}:{line_of(text, section, key)}"))
    return settings


def _override_setting(text: str, problems: list[str]) -> tuple[str, str, Any, str] | None:
    """Parse `section.field=value`; the value is TOML, a bare word is a string."""
    name, equals, raw = text.removeprefix("--").partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot:
        problems.append(f"{text!r} is not section.field=value{suggestion(name, _all_keys())}")
        return None
    origin = f"{OVERRIDE} {text!r}"
    hint = _hint_of(section, key) or str
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
        if hint is str and not isinstance(value, str):
            value = raw
    except tomllib.TOMLDecodeError:
        value = raw  # a bare word such as a path
        if typing.get_origin(hint) is tuple and ("," in raw or raw[:1] + raw[-1:] == "[]"):
            example = json.dumps([word.strip(" []'\"") for word in raw.split(",")])
            problems.append(f"{origin}: no list; write '{name}={example}', quotes and all")
            return None
    if typing.get_origin(hint) is tuple and not isinstance(value, list):
        value = [value]
    return section, key, value, origin


def _build(settings: list[tuple[str, str, Any, str]], problems: list[str]) -> Config:
    """Apply settings in order over the defaults; what cannot be applied becomes a problem."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for section, key, value, origin in settings:
        hint = _hint_of(section, key)
        if hint is None:
            did_you_mean = suggestion(f"{section}.{key}", _all_keys())
            problems.append(f"{origin}: unknown key {section}.{key}{did_you_mean}")
            continue
        try:
            values[section][key] = convert(value, hint)
            origins[f"{section}.{key}"] = origin
        except ValueError as error:
            problems.append(f"{origin}: {section}.{key} = {error}")
    return Config(**{name: SECTIONS[name](**values[name]) for name in SECTIONS}, origins=origins)


def load(path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Return the configuration of a preset with overrides applied, validated.

    Raises ConfigError with every problem found: unknown keys (with the nearest valid one), wrong
    types, values out of range and combinations that cannot work.
    """
    problems: list[str] = []
    settings = _file_settings(Path(path), problems) if path is not None else []
    settings += [s for text in overrides if (s := _override_setting(text, problems))]
    cfg = _build(settings, problems)
    problems += problems_of(cfg)
    if problems:
        raise ConfigError(*problems)
    return cfg


def from_dict(tree: dict[str, Any]) -> Config:
    """Return the Config of a nested dict as made by `to_dict`, also by an earlier version.

    Raises ConfigError for keys and types like `load`.
    """
    problems: list[str] = []
    settings = []
    for section, table in tree.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            name, form = RENAMED.get((section, key), (key, lambda value: value))
            settings.append((section, name, form(value), "saved configuration"))
    cfg = _build(settings, problems)
    if problems:
        raise ConfigError(*problems)
    return cfg


def to_dict(cfg: Config) -> dict[str, dict[str, Any]]:
    """Return the configuration as nested plain dicts (JSON and TOML types only)."""

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    return {
        name: {f.name: plain(getattr(getattr(cfg, name), f.name)) for f, _ in fields_of(name)}
        for name in SECTIONS
    }


def to_toml(cfg: Config) -> str:
    """Return every value as TOML, with the file and line or override that set it as a comment."""
    return dump(to_dict(cfg), cfg.origins)


def with_values(cfg: Config, origin: str, **sections: dict[str, Any]) -> Config:
    """Return `cfg` with values computed after loading, e.g. `model={"vocab_size": 8192}`."""
    changed = {
        name: dataclasses.replace(getattr(cfg, name), **values) for name, values in sections.items()
    }
    origins = {f"{name}.{key}": origin for name, values in sections.items() for key in values}
    return dataclasses.replace(cfg, **changed, origins={**cfg.origins, **origins})
