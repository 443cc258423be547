"""The whole configuration: every field, its type, default, unit and meaning, as frozen dataclasses.

A configuration is built from four layers, later ones winning: the defaults below, the preset named
by `base`, the preset itself, and `section.field=value` overrides. `load` reports all problems at
once and records which layer set each value. Numbers that can be computed are properties, never
fields. Only the standard library is imported: a bad configuration is refused before JAX starts.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxgpt.errors import ConfigError
from jaxgpt.toml_values import convert, dump, line_of, read_toml, suggestion
from jaxgpt.validation import problems_of


def opt(default: Any, meaning: str, unit: str = "") -> Any:
    """Return a dataclass field with its one-line meaning (and unit) attached for `--help`."""
    metadata = {"meaning": meaning, "unit": unit}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and the seed that all of its randomness is derived from."""

    dir: str = opt("runs/default", "folder of the run; it can be moved or copied freely")
    seed: int = opt(0, "seed of initialisation, data order and dropout")
    overwrite: bool = opt(
        False, "start again in a folder that holds a run; the old one is renamed, not deleted"
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """How `jaxgpt tokenizer train` makes the subword vocabulary."""

    path: str = opt(
        "",
        "SentencePiece model, Hugging Face tokenizer.json or tiktoken rank file; empty: "
        "tokenizer.model in data.store",
    )
    kind: Literal["bpe", "unigram"] = opt("bpe", "subword algorithm")
    vocab_size: int = opt(8192, "number of ids, specials and the 256 byte pieces included", "ids")
    user_symbols: tuple[str, ...] = opt(
        (), "extra special ids (never produced from text), e.g. <|user|>"
    )
    train_bytes: int = opt(
        200_000_000, "at most this much text, sampled by seed, is used for training", "bytes"
    )


@dataclass(frozen=True)
class DataConfig:
    """What is prepared, where the prepared tokens lie, and how they are laid out in rows."""

    sources: tuple[str, ...] = opt(
        (),
        "inputs of `prepare`: files, folders, globs (also gs:// and s3://), saved Hugging Face "
        "datasets, `stdlib`, or `tfds:NAME/SPLIT`",
    )
    text_field: str = opt("text", "field that holds the text in JSONL, Arrow and TFDS records")
    data_dir: str = opt("", "folder of prepared TFDS builders")
    bad_text: Literal["error", "replace", "skip"] = opt(
        "error",
        "undecodable or malformed records: refuse, put U+FFFD where that mends them, or leave them "
        "out (also files that cannot be read; never most of many records)",
    )
    min_bytes: int = opt(
        0,
        "shorter documents are left out and counted; empty ones always are, white space is kept",
        "UTF-8 bytes",
    )
    max_bytes: int = opt(0, "longer documents are left out and counted; 0: none", "UTF-8 bytes")
    dedup: bool = opt(False, "of documents that are equal byte for byte only the first is kept")
    valid_share: float = opt(
        0.02, "share of documents held out, chosen by content hash", "fraction"
    )
    partition_bytes: int = opt(
        64_000_000, "raw bytes per partition, the unit of work and restart", "bytes"
    )
    store: str | dict[str, float] = opt("", "prepared store, or a table of store = weight")
    stages: dict[str, dict[str, float]] = opt(
        {}, "later weights: the first row they hold for = table of store = weight", "rows"
    )
    max_epochs: float = opt(0.0, "passes over each store, after which it has run out; 0: no limit")
    run_out: Literal["stop", "drop"] = opt(
        "stop", "when a store has run out: end the run, or go on with the weights of the others"
    )
    order: Literal["global", "block", "sequential"] = opt(
        "global",
        "rows in random order, in random order within stretches that lie together on disk (for "
        "slow storage), or as stored",
    )
    packing: Literal["concat", "best_fit", "best_fit_whole"] = opt(
        "concat",
        "how documents fill rows: end to end; each whole where it fits best, longer ones in pieces "
        "of a row; or the same with longer ones cut off (counted), never continued",
    )
    document_mask: bool = opt(
        False, "true: attention and positions restart at each document; false: plain causal"
    )
    prefetch: int = opt(
        8, "batches made ahead of the training step; changes nothing else", "batches"
    )


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. A size of 0 is derived from the others, and the derived value is printed."""

    num_layers: int = opt(6, "transformer blocks", "layers")
    embed_dim: int = opt(384, "model width D", "features")
    num_heads: int = opt(6, "query heads N", "heads")
    num_kv_heads: int = opt(0, "key/value heads K; 0: as many as num_heads", "heads")
    head_dim: int = opt(0, "width H of a head; 0: embed_dim / num_heads", "features")
    mlp_dim: int = opt(0, "MLP width F; 0: 4 * embed_dim", "features")
    vocab_size: int = opt(0, "ids V; 0: that of the tokenizer of data.store", "ids")
    seq_len: int = opt(
        256, "context length T; the longest position the model is trained for", "tokens"
    )
    positions: Literal["learned", "sinusoidal", "rope", "none"] = opt(
        "learned", "position information"
    )
    rope_base: float = opt(10_000.0, "RoPE base frequency")
    rope_scaling: Literal["none", "llama3", "yarn"] = opt(
        "none", "RoPE frequency scaling for longer contexts"
    )
    rope_factor: float = opt(1.0, "context extension factor of rope_scaling")
    rope_original_len: int = opt(0, "context before extension; 0: seq_len / rope_factor", "tokens")
    rope_low_freq: float = opt(1.0, "llama3: low_freq_factor; YaRN: beta_slow")
    rope_high_freq: float = opt(
        0.0, "llama3: high_freq_factor; YaRN: beta_fast; 0: the usual 4 and 32"
    )
    norm: Literal["layernorm", "rmsnorm"] = opt("layernorm", "normalisation")
    norm_eps: float = opt(1e-5, "epsilon inside the square root")
    norm_bias: bool = opt(True, "LayerNorm has a bias")
    norm_placement: Literal["pre", "post", "sandwich"] = opt(
        "pre", "before, after, or around each sub-layer"
    )
    mlp: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu"] = opt(
        "gelu_tanh", "MLP activation"
    )
    attn_bias: bool = opt(False, "query, key and value projections have biases")
    out_bias: bool = opt(False, "the attention output projection has a bias")
    mlp_bias: bool = opt(False, "MLP projections have biases")
    qk_norm: bool = opt(False, "RMSNorm queries and keys per head before positions are applied")
    sliding_window: int = opt(
        0, "a token sees itself and the window-1 tokens before it; 0: all", "tokens"
    )
    attn_softcap: float = opt(0.0, "cap * tanh(scores / cap) on attention scores; 0: off")
    logit_softcap: float = opt(0.0, "cap * tanh(logits / cap) on the logits; 0: off")
    tie_embeddings: bool = opt(True, "the LM head is the transposed token embedding")
    embed_scale: bool = opt(False, "multiply token embeddings by sqrt(embed_dim)")
    dropout: float = opt(
        0.0, "dropout on embeddings, attention weights and sub-layer outputs", "probability"
    )
    init: Literal["normal", "xavier", "kaiming"] = opt("normal", "initialiser of weight matrices")
    init_std: float = opt(0.02, "standard deviation of `normal` and of the embeddings")
    init_depth_scale: bool = opt(True, "divide residual output projections by sqrt(2 * num_layers)")
    stacked: bool = opt(
        False, "one leaf for all layers and a scan (big models); false: a leaf per layer, unrolled"
    )
    remat: Literal["none", "full"] = opt("none", "recompute each block in the backward pass")
    aux_layers: tuple[int, ...] = opt(
        (), "blocks (from 1) whose output also predicts the next token"
    )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def mlp_width(self) -> int:
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def rope_high(self) -> float:
        return self.rope_high_freq or (32.0 if self.rope_scaling == "yarn" else 4.0)

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedules. Steps count optimiser updates from 0."""

    name: Literal["adamw"] = opt("adamw", "optimiser")
    lr: float = opt(1e-3, "peak learning rate")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = opt("cosine", "shape after warm-up")
    warmup_steps: int = opt(0, "linear ramp from 0 to lr", "steps")
    decay_steps: int = opt(0, "wsd: length of the final decay; 0: a fifth of the run", "steps")
    end_lr_ratio: float = opt(0.1, "final learning rate as a share of lr", "fraction")
    weight_decay: float = opt(0.1, "decoupled weight decay (matrices only)")
    beta1: float = opt(0.9, "decay of the first moment")
    beta2: float = opt(0.95, "decay of the second moment")
    eps: float = opt(1e-8, "added to the root of the second moment")
    clip_norm: float = opt(1.0, "global gradient norm is clipped to this; 0: off")


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and in which number formats."""

    num_steps: int = opt(0, "optimiser updates; 0: from num_tokens", "steps")
    num_tokens: int = opt(
        0, "token budget, rounded up to whole steps; used when num_steps is 0", "tokens"
    )
    global_batch: int = opt(16, "rows per optimiser update, over all devices and hosts", "rows")
    micro_batch: int = opt(0, "rows computed at once, over all devices; 0: global_batch", "rows")
    compute_dtype: Literal["float32", "bfloat16"] = opt(
        "bfloat16", "matmul inputs; norms, softmax, loss stay float32"
    )
    param_dtype: Literal["float32", "bfloat16"] = opt("float32", "master weights and gradients")
    z_loss: float = opt(0.0, "weight of the squared log-partition penalty")
    aux_loss_weight: float = opt(0.3, "weight of each loss of model.aux_layers")
    max_nonfinite: int = opt(20, "stop after this many non-finite steps in a row", "steps")

    @property
    def micro_rows(self) -> int:
        return self.micro_batch or self.global_batch

    @property
    def accum_steps(self) -> int:
        return self.global_batch // self.micro_rows


@dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis; -1 on one axis takes all that remain."""

    data: int = opt(-1, "replicas of the parameters", "devices")
    fsdp: int = opt(1, "parameters, gradients and moments are split, batch too", "devices")
    tensor: int = opt(1, "heads, MLP width and vocabulary are split", "devices")
    context: int = opt(1, "sequence length is split (1 only in this version)", "devices")
    expert: int = opt(1, "experts are split (1 only in this version)", "devices")
    stage: int = opt(1, "layers are split (1 only in this version)", "devices")


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved and what is kept. The last step is always saved."""

    every: int = opt(500, "save after each this many steps; 0: only at the end", "steps")
    keep: int = opt(2, "newest verified checkpoints kept", "checkpoints")
    keep_every: int = opt(
        0, "also keep every checkpoint whose step is a multiple; 0: none", "steps"
    )
    allow_change: tuple[str, ...] = opt(
        (),
        "what may differ on resume: mixture (stores, what was added to them, weights), data (the "
        "mixture, and packing, order and mask), tokenizer, seed, optim",
    )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out stores, during training and by `jaxgpt eval`."""

    every: int = opt(0, "evaluate after each this many steps; 0: only at the end", "steps")
    store: str | dict[str, str] = opt(
        "", "store, or a table of name = store; empty: the held-out part of data.store"
    )
    max_rows: int = opt(0, "rows per set during training; 0: all", "rows")
    batch: int = opt(0, "rows at once (never changes the result); 0: train.micro_batch", "rows")


@dataclass(frozen=True)
class LogConfig:
    """What is written while training."""

    every: int = opt(10, "steps between lines of metrics.jsonl", "steps")
    tensorboard: bool = opt(True, "also write TensorBoard files")


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run; `origins` says which layer set each non-default value."""

    run: RunConfig = field(default_factory=RunConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    origins: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


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
    origin = f"override {text!r}"
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
    if typing.get_origin(hint) is tuple and isinstance(value, str):
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
    """Return the Config of a nested dict as made by `to_dict`; raises ConfigError like `load`."""
    problems: list[str] = []
    settings = [
        (section, key, value, "saved configuration")
        for section, table in tree.items()
        for key, value in (table.items() if isinstance(table, dict) else ())
    ]
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
