"""Every configuration field: its type, default, unit and meaning, as frozen dataclasses.

Numbers that can be computed are properties, never fields. Only the standard library is imported,
and nothing here reads files or checks values: `config` loads, `validation` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


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
    init_from: str = opt(
        "", "run folder or checkpoint whose weights a new run starts from; empty: random ones"
    )
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
    rope_local_base: float = opt(
        0.0, "RoPE base of blocks with a window, never scaled; 0: as in the others"
    )
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = opt(
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
    norm_plus_one: bool = opt(False, "norm scales are stored minus one and start at 0, as Gemma's")
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
    global_every: int = opt(
        0,
        "every so many blocks one without the window (the 6th, 12th, ... for 6); 0: none",
        "layers",
    )
    attn_scale: float = opt(0.0, "factor on attention scores; 0: 1 / sqrt(head width)")
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
    num_experts: int = opt(0, "expert MLPs E per block; 0: one dense MLP", "experts")
    experts_per_token: int = opt(2, "experts that a token is sent to", "experts")
    expert_dim: int = opt(0, "MLP width of an expert; 0: mlp_dim", "features")
    shared_dim: int = opt(0, "MLP width that every token passes besides its experts", "features")
    router: Literal["softmax", "sigmoid"] = opt("softmax", "from router logits to scores")
    router_norm: bool = opt(True, "scores of a token's experts are divided by their sum")
    router_bias: bool = opt(
        False, "experts are chosen by score + bias; train.router_bias_rate balances their load"
    )
    capacity_factor: float = opt(
        0.0,
        "in training an expert takes this share of a row's fair load, and what comes later skips "
        "it; 0: all",
    )
    stacked: bool = opt(
        False, "one leaf for all layers and a scan (big models); false: a leaf per layer, unrolled"
    )
    remat: Literal["none", "full"] = opt("none", "recompute each block in the backward pass")
    remat_save: tuple[str, ...] = opt(
        (), "tensors of a block that remat keeps: q, k, v, attn, attn_out, gate, up, mlp_out"
    )
    remat_offload: tuple[str, ...] = opt(
        (), "tensors of a block that remat keeps in the host's memory; also block_in"
    )
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
    def expert_width(self) -> int:
        return self.expert_dim or self.mlp_width

    def window(self, layer: int) -> int:
        """Return the sliding window of the block numbered `layer` (from 0); 0: none."""
        sees_all = self.global_every and (layer + 1) % self.global_every == 0
        return 0 if sees_all else self.sliding_window

    @property
    def rope_high(self) -> float:
        return self.rope_high_freq or (32.0 if self.rope_scaling == "yarn" else 4.0)

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedules. A step is one update."""

    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = opt(
        "adamw", "optimiser; muon moves matrices, and AdamW the rest"
    )
    lr: float = opt(1e-3, "peak learning rate; adafactor: relative to the weights' size")
    schedule: Literal["cosine", "wsd", "linear", "inverse_sqrt", "constant"] = opt(
        "cosine", "shape after warm-up"
    )
    warmup_steps: int = opt(0, "linear ramp from 0 to lr", "steps")
    warmup_tokens: int = opt(0, "the same in tokens, used when warmup_steps is 0", "tokens")
    decay_steps: int = opt(0, "wsd: length of the final decay; 0: a fifth of the run", "steps")
    decay_shape: Literal["linear", "sqrt", "cosine"] = opt("linear", "wsd: shape of the decay")
    end_lr_ratio: float = opt(0.1, "final learning rate as a share of lr", "fraction")
    weight_decay: float = opt(0.1, "decoupled weight decay (matrices and embeddings only)")
    beta1: float = opt(0.9, "decay of the first moment; muon, sgd: momentum; adafactor: unused")
    beta2: float = opt(0.95, "decay of the second moment")
    eps: float = opt(1e-8, "added to the root of the second moment")
    clip_norm: float = opt(1.0, "global gradient norm is clipped to this; 0: off")
    moment_dtype: Literal["float32", "bfloat16"] = opt("float32", "how moments are stored")
    groups: dict[str, dict[str, float]] = opt(
        {},
        "exceptions: pattern of weight names = {lr = factor, weight_decay = value}; the first "
        "pattern that matches counts",
    )
    ema_decay: float = opt(
        0.0, "keep an exponential moving average of the weights, and evaluate it; 0: none"
    )
    spike_sigma: float = opt(
        0.0, "skip an update whose loss or gradient norm is so many deviations too high; 0: never"
    )


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
    batch_ramp: dict[str, int] = opt(
        {}, "smaller batches at first: until this many tokens = rows per update", "tokens = rows"
    )
    param_dtype: Literal["float32", "bfloat16"] = opt(
        "float32", "parameters and gradients of a micro-batch; bfloat16 keeps float32 masters, too"
    )
    logits_dtype: Literal["compute", "float32"] = opt(
        "compute", "what the product with the head gives; softmax and sums are float32 either way"
    )
    label_smoothing: float = opt(
        0.0, "share of the target's probability that goes to all ids alike", "fraction"
    )
    z_loss: float = opt(0.0, "weight of the squared log-partition penalty")
    aux_loss_weights: tuple[float, ...] = opt(
        (0.3,), "weights of the losses of model.aux_layers: one for all, or one for each"
    )
    balance_loss: float = opt(
        0.01, "weight of the load balancing loss of experts, also with router biases; 0: off"
    )
    router_z_loss: float = opt(0.0, "weight of the squared log-partition penalty of routers")
    router_bias_rate: float = opt(1e-3, "how far an update moves each entry of a router bias")
    attention: Literal["auto", "blocks", "dot_product", "cudnn", "splash", "reference"] = opt(
        "auto", "how attention is computed; auto: the fastest of the platform, which is printed"
    )
    xla_options: dict[str, bool | int | float | str] = opt(
        {}, "XLA compiler options of the step, over the preset of the platform"
    )
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
    context: int = opt(1, "sequences are split; attention passes keys around a ring", "devices")
    expert: int = opt(1, "experts are split, and all else as by fsdp", "devices")
    stage: int = opt(1, "layers are split; micro-batches pass through as a pipeline", "devices")
    rounds: int = opt(1, "times a micro-batch passes all stages (circular pipeline)", "rounds")
    slow: dict[str, int] = opt(
        {},
        "parts of an axis that lie in different TPU slices or NVLink domains: axis = parts; empty: "
        "all of them on data, stage or fsdp, the first that divides",
    )


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
