"""Checks of a configuration that need more than one value: ranges, divisibility, combinations.

Everything here is arithmetic on the configuration alone, so that it is refused before data is read
or anything compiles; checks that need the tokenizer or devices stand where those are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxgpt import ramp

if TYPE_CHECKING:
    from jaxgpt.config import Config

# Lower bounds by section: values below are refused.
AT_LEAST = {
    "tokenizer": {"vocab_size": 1, "train_bytes": 1},
    "data": {"partition_bytes": 1, "prefetch": 1, "min_bytes": 0, "max_bytes": 0, "max_epochs": 0},
    "model": {
        "num_layers": 1, "embed_dim": 1, "num_heads": 1, "num_kv_heads": 0, "head_dim": 0,
        "mlp_dim": 0, "vocab_size": 0, "seq_len": 2, "sliding_window": 0, "attn_softcap": 0,
        "logit_softcap": 0, "init_std": 0, "rope_original_len": 0, "rope_local_base": 0,
        "global_every": 0, "attn_scale": 0, "num_experts": 0, "experts_per_token": 1,
        "expert_dim": 0, "shared_dim": 0, "capacity_factor": 0,
    },
    "optim": {
        "lr": 0, "warmup_steps": 0, "warmup_tokens": 0, "decay_steps": 0, "weight_decay": 0,
        "clip_norm": 0, "spike_sigma": 0,
    },
    "train": {
        "num_steps": 0, "num_tokens": 0, "global_batch": 1, "micro_batch": 0, "z_loss": 0,
        "balance_loss": 0, "router_z_loss": 0, "router_bias_rate": 0, "max_nonfinite": 1,
    },
    "checkpoint": {"every": 0, "keep": 1, "keep_every": 0},
    "eval": {"every": 0, "max_rows": 0, "batch": 0},
    "log": {"every": 1},
    "run": {"seed": 0},
    "mesh": {"rounds": 1},
}  # fmt: skip
# Values that must lie in [0, 1), [0, 1] or above 0.
SHARES = {
    "optim": {"beta1", "beta2", "ema_decay"},
    "model": {"dropout"},
    "data": {"valid_share"},
    "train": {"label_smoothing"},
}
POSITIVE = {"model": {"norm_eps", "rope_base", "rope_factor"}, "optim": {"eps"}}
MAX_SEQ_LEN = 1 << 24
MAX_ROWS = (1 << 31) - 1  # rows of an update are numbered in int32
MAX_SEED = (1 << 32) - 1  # JAX keys take 32 bits: seed 2**32 would silently be seed 0
# Fields that are the decay of a stored moment, by optimiser; 8 bits of bfloat16 hold a change of
# 2^-8 or more.
MOMENTS: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2"), "muon": ("beta1", "beta2"), "lion": ("beta2",), "sgd": ("beta1",),
    "adafactor": (),
}  # fmt: skip
BF16_RESOLUTION = 2**-8
# Fields of the model that mean nothing without experts.
EXPERT_FIELDS = (
    "experts_per_token", "expert_dim", "shared_dim", "router", "router_norm", "router_bias",
    "capacity_factor",
)  # fmt: skip
GROUP_KEYS = ("lr", "weight_decay")
MESH_AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
# Tensors of a block that recomputation may spare, see `model.remat`.
SAVED = ("q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")
CHANGEABLE = ("data", "mixture", "tokenizer", "seed", "optim")


def problems_of(cfg: Config) -> list[str]:
    """Return one line for each value or combination that cannot work."""
    model = [*_model(cfg), *_experts(cfg), *_aux_losses(cfg)]
    return [
        *_ranges(cfg),
        *model,
        *_data(cfg),
        *_training(cfg),
        *_optim(cfg),
        *_remat(cfg),
        *_mesh(cfg),
        *_rest(cfg),
    ]


def _ranges(cfg: Config) -> Iterator[str]:
    for section, bounds in AT_LEAST.items():
        for key, bound in bounds.items():
            if (value := getattr(getattr(cfg, section), key)) < bound:
                yield f"{section}.{key} = {value}: must be at least {bound}"
    for section, keys in SHARES.items():
        for key in sorted(keys):
            if not 0 <= (value := getattr(getattr(cfg, section), key)) < 1:
                yield f"{section}.{key} = {value}: must lie in [0, 1)"
    for section, keys in POSITIVE.items():
        for key in sorted(keys):
            if not (value := getattr(getattr(cfg, section), key)) > 0:
                yield f"{section}.{key} = {value}: must be above 0"
    if cfg.run.seed > MAX_SEED:
        yield f"run.seed = {cfg.run.seed}: must be at most {MAX_SEED}"
    if not 0 <= cfg.optim.end_lr_ratio <= 1:
        yield f"optim.end_lr_ratio = {cfg.optim.end_lr_ratio}: must lie in [0, 1]"


def _model(cfg: Config) -> Iterator[str]:
    m = cfg.model
    if m.num_heads < 1 or m.embed_dim < 1:
        return  # already reported; the divisions below would fail
    if not m.head_dim and m.embed_dim % m.num_heads:
        yield (
            f"model.embed_dim = {m.embed_dim} is not divisible by model.num_heads = {m.num_heads}; "
            "set model.head_dim, or choose sizes that divide"
        )
    if m.kv_heads > 0 and m.num_heads % m.kv_heads:
        yield (
            f"model.num_heads = {m.num_heads} is not a multiple of "
            f"model.num_kv_heads = {m.kv_heads}"
        )
    if m.positions == "rope" and m.head_width % 2:
        yield f"RoPE rotates pairs of features: head width {m.head_width} must be even"
    if m.positions == "sinusoidal" and m.embed_dim % 2:
        yield f"sinusoidal positions come in pairs: model.embed_dim = {m.embed_dim} must be even"
    if m.seq_len > MAX_SEQ_LEN:
        yield f"model.seq_len = {m.seq_len}: at most {MAX_SEQ_LEN} tokens"
    if m.rope_scaling != "none" and m.positions != "rope":
        yield f'model.rope_scaling = "{m.rope_scaling}" needs model.positions = "rope"'
    if m.rope_scaling != "none" and m.rope_factor < 1:
        yield f"model.rope_factor = {m.rope_factor}: a context extension factor is at least 1"
    if m.rope_scaling != "none" and m.rope_high <= m.rope_low_freq:
        yield (
            f"model.rope_high_freq = {m.rope_high} must be above "
            f"model.rope_low_freq = {m.rope_low_freq}"
        )
    if m.rope_local_base and not (m.positions == "rope" and m.sliding_window):
        yield (
            f'model.rope_local_base = {m.rope_local_base}: needs model.positions = "rope" and '
            "model.sliding_window"
        )
    if m.global_every and not m.sliding_window:
        yield f"model.global_every = {m.global_every}: needs model.sliding_window"
    if m.norm_plus_one and m.norm != "rmsnorm":
        yield 'model.norm_plus_one needs model.norm = "rmsnorm"'
    outside = [layer for layer in m.aux_layers if not 1 <= layer < m.num_layers]
    if outside or len(set(m.aux_layers)) < len(m.aux_layers):
        yield (
            f"model.aux_layers = {list(m.aux_layers)}: distinct blocks from 1 to "
            f"{m.num_layers - 1} (the last block has the main loss)"
        )


def _experts(cfg: Config) -> Iterator[str]:
    m, t = cfg.model, cfg.train
    if 0 < m.num_experts < m.experts_per_token:
        yield (
            f"model.experts_per_token = {m.experts_per_token} is more than "
            f"model.num_experts = {m.num_experts}"
        )
    if m.num_experts and m.mlp_bias:
        yield "model.mlp_bias: experts have no biases; set it to false"
    if not m.num_experts:
        for key in EXPERT_FIELDS:
            if (value := getattr(m, key)) != getattr(type(m), key):
                yield f"model.{key} = {json.dumps(value)}: needs model.num_experts"
    trains = t.num_steps or t.num_tokens or cfg.data.max_epochs  # such a model may be imported
    if trains and m.num_experts > 1 and m.experts_per_token == 1 and m.router_norm:
        yield (
            "model.router_norm = true with model.experts_per_token = 1: a score divided by itself "
            "is 1, so that the router would learn nothing of the text; set it to false"
        )


def _aux_losses(cfg: Config) -> Iterator[str]:
    layers, weights = cfg.model.aux_layers, cfg.train.aux_loss_weights
    if layers and len(weights) not in (1, len(layers)):
        yield (
            f"train.aux_loss_weights = {list(weights)}: one for all, or one for each "
            f"of the {len(layers)} model.aux_layers"
        )
    if any(weight < 0 for weight in weights):
        yield f"train.aux_loss_weights = {list(weights)}: must be at least 0"


def _data(cfg: Config) -> Iterator[str]:
    d = cfg.data
    tables = {"data.store": d.store} if isinstance(d.store, dict) else {}
    tables |= {f"data.stages[{start!r}]": table for start, table in d.stages.items()}
    for where, table in tables.items():
        for name, weight in table.items():
            if not weight > 0:
                yield f"{where}[{name!r}] = {weight}: must be above 0 (or leave it out)"
        if not table and where != "data.store":
            yield f"{where} is empty: name the stores from that row on, with their weights"
    for start in d.stages:
        if not re.fullmatch("[1-9][0-9_]{0,17}", start, re.ASCII):
            yield f"data.stages[{start!r}]: a stage begins at a row, a whole number of at least 1"
    if 0 < d.max_bytes < d.min_bytes:
        yield f"data.max_bytes = {d.max_bytes} is below data.min_bytes = {d.min_bytes}"


def _training(cfg: Config) -> Iterator[str]:
    t = cfg.train
    for rows, key in ramp.batch_sizes(t).items():
        if t.micro_batch > 0 and rows % t.micro_batch:
            yield f"{key} = {rows} is not a multiple of train.micro_batch = {t.micro_batch}"
        if rows > MAX_ROWS:
            yield f"{key} = {rows}: must be at most {MAX_ROWS}"
    wrong = list(_batch_ramp(cfg))
    yield from wrong
    if wrong or t.global_batch < 1 or cfg.model.seq_len < 1:
        return  # already reported; steps cannot be counted
    if (steps := num_steps(cfg)) > 0:
        tokens = f"train.num_tokens = {t.num_tokens} ({steps} steps)"
        yield from schedule_problems(
            cfg, steps, f"train.num_steps = {steps}" if t.num_steps else tokens
        )


def schedule_problems(cfg: Config, steps: int, length: str) -> Iterator[str]:
    """Yield what of the schedule does not fit in a run of so many steps; `length`: what says so."""
    o, warmup = cfg.optim, warmup_steps(cfg)
    asked = f"optim.warmup_steps = {warmup}"
    if o.warmup_tokens and not o.warmup_steps:
        asked = f"optim.warmup_tokens = {o.warmup_tokens} ({warmup} steps)"
    if warmup > steps:
        yield f"{asked} is longer than the run, {length}"
    if o.schedule == "wsd" and warmup + o.decay_steps > steps:
        yield f"{asked} and optim.decay_steps = {o.decay_steps} do not fit in {length}"


def _optim(cfg: Config) -> Iterator[str]:
    o = cfg.optim
    if o.schedule != "wsd":
        for key, usual in (("decay_steps", 0), ("decay_shape", "linear")):
            if (value := getattr(o, key)) != usual:
                yield f'optim.{key} = {value}: needs optim.schedule = "wsd"'
    if o.moment_dtype == "bfloat16":
        if o.name == "adafactor":
            yield (
                'optim.moment_dtype = "bfloat16": Adafactor\'s moments change by ever smaller '
                "shares, which bfloat16 would round away; use float32 (they are small)"
            )
        for key in MOMENTS[o.name]:
            if (left := 1 - getattr(o, key)) <= BF16_RESOLUTION:
                yield (
                    f"optim.{key} = {getattr(o, key)}: a moment in bfloat16 would not move by a "
                    f"share of {left:.3g}; use at most {1 - 2 * BF16_RESOLUTION:.4g}, or "
                    'optim.moment_dtype = "float32"'
                )
    for pattern, group in o.groups.items():
        key = f"optim.groups[{pattern!r}]"
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"{key}: not a regular expression: {error}"
        if not group:
            yield f"{key} is empty: give it lr or weight_decay"
        for name, value in group.items():
            if name not in GROUP_KEYS:
                yield f"{key} has {name!r}: choose from {', '.join(GROUP_KEYS)}"
            elif not 0 <= value < float("inf"):
                yield f"{key}.{name} = {value}: must be at least 0 and finite"


def _batch_ramp(cfg: Config) -> Iterator[str]:
    before = 0
    for tokens, rows in cfg.train.batch_ramp.items():
        key = f"train.batch_ramp[{tokens!r}]"
        if len(tokens) > 18 or not re.fullmatch("[1-9][0-9]*(_[0-9]+)*", tokens, re.ASCII):
            yield f"{key}: a batch holds until a number of tokens, a whole number of at least 1"
        elif int(tokens) <= before:
            yield f"{key}: must come after {before:_} tokens, in the order of the run"
        else:
            before = int(tokens)
        if rows < 1:
            yield f"{key} = {rows}: must be at least 1"


def _remat(cfg: Config) -> Iterator[str]:
    for key, names in (("remat_save", SAVED), ("remat_offload", ("block_in", *SAVED))):
        value = getattr(cfg.model, key)
        if value and cfg.model.remat == "none":
            yield f'model.{key} = {list(value)}: needs model.remat = "full"'
        if unknown := [name for name in value if name not in names]:
            yield f"model.{key} = {unknown}: choose from {', '.join(names)}"
    if both := sorted({*cfg.model.remat_save} & {*cfg.model.remat_offload}):
        yield f"model.remat_save and model.remat_offload both have {', '.join(both)}"


def _mesh(cfg: Config) -> Iterator[str]:
    sizes = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES}
    for axis, size in sizes.items():
        if size == 0 or size < -1:
            yield f"mesh.{axis} = {size}: a number of devices, or -1 for the rest"
    rest = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        yield f"{' = '.join(rest)} = -1: only one axis can take the rest; set {rest[0]} = 1"
    if cfg.mesh.rounds > 1 and cfg.mesh.stage == 1:
        yield f"mesh.rounds = {cfg.mesh.rounds}: needs mesh.stage > 1"
    for axis, parts in cfg.mesh.slow.items():
        if axis not in MESH_AXES:
            yield f"mesh.slow has {axis!r}: choose from {', '.join(MESH_AXES)}"
        elif parts < 1 or sizes[axis] > 0 and sizes[axis] % parts:
            yield f"mesh.slow.{axis} = {parts}: must divide mesh.{axis} = {sizes[axis]}"


def _rest(cfg: Config) -> Iterator[str]:
    unknown = [name for name in cfg.checkpoint.allow_change if name not in CHANGEABLE]
    if unknown:
        yield f"checkpoint.allow_change = {unknown}: choose from {', '.join(CHANGEABLE)}"
    if not cfg.run.dir.strip() or "\0" in cfg.run.dir:
        yield f"run.dir = {cfg.run.dir!r}: a folder name is needed"


def num_steps(cfg: Config, done: int = 0, position: int = 0) -> int:
    """Return the updates of the run: train.num_steps, or train.num_tokens in whole steps.

    The first `done` updates have consumed `position` rows, perhaps in other batches than now.
    """
    if cfg.train.num_steps or not cfg.train.num_tokens:
        return cfg.train.num_steps
    end = -(-cfg.train.num_tokens // cfg.model.seq_len)
    return ramp.steps_until(ramp.spans(cfg, done, position), end)


def warmup_steps(cfg: Config) -> int:
    """Return the updates of the warm-up: optim.warmup_steps, or warmup_tokens in whole steps."""
    if cfg.optim.warmup_steps or not cfg.optim.warmup_tokens:
        return cfg.optim.warmup_steps
    return ramp.steps_until(ramp.spans(cfg), -(-cfg.optim.warmup_tokens // cfg.model.seq_len))
