"""Greedy generation with random weights: prompts of random ids at once, then id by id.

It is the very `generate` of `jaxgpt generate`, with its cache, its reading of each id by the host
and its streaming; only the tokenizer is replaced. Each decode step reads all weights and the whole
cache, so what bounds it is memory: the rate of those bytes stands beside a measured one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.bench import timing
from jaxgpt.bench.step import memory
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import ConfigError
from jaxgpt.evaluation import generate as generation
from jaxgpt.model import params as parameters
from jaxgpt.model.params import Params

# GPT-2 as transformers has it, beside the biases that `shapes` leaves out.
LIKE_TRANSFORMERS = (
    "model.norm_bias=true",
    "model.attn_bias=true",
    "model.out_bias=true",
    "model.mlp_bias=true",
)
SIZES = {"small": ("model.seq_len=1024",), "gpt2": ("model.seq_len=1024", "model.vocab_size=50257")}
STREAMED_BYTES = 1 << 28  # 8 times a last-level cache of 32 MiB
STREAMED_TIMES = 9


class Ids(NamedTuple):
    """What `generate` asks of a tokenizer, for texts that are ids; no id ends a text."""

    vocab_size: int
    start_id: int = 0
    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the ids that a text names."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], *, continues: bool = False) -> str:
        """Return the text that names ids."""
        return " ".join(map(str, ids))

    def stream_decoder(self, *, continues: bool = False) -> Ids:
        """Return what decodes one row id by id: nothing is ever held back."""
        return self

    def feed(self, token: int) -> str:
        """Return the text of one more id."""
        return f"{token} "

    def flush(self) -> str:
        """Return what was held back."""
        return ""


def overrides(shape: str) -> tuple[str, ...]:
    """Return what makes a shape of `shapes.SIZES` the model that transformers has."""
    return (*LIKE_TRANSFORMERS, *SIZES[shape])


def measure(
    cfg: Config, *, batch: int, prompt: int, new: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the rates of whole calls, of prefill and of decoding, and what memory has to do.

    A call continues `batch` prompts of `prompt` ids, the start id included, by `new` ids. Prefill
    lasts until the host has the first id of each row; the other `new` - 1 steps are decoding.
    `weights_read_bytes` and `cache_read_bytes` are those of a step, which makes an id for each row.
    Raises ConfigError where prompt and new ids do not fit the context.
    """
    if new < 2:
        raise ConfigError(f"bench generate: --new {new}: decoding begins with the second id: 2")
    model, dtype = cfg.model, cfg.train.compute_dtype
    params = generation.prepare(random_weights(cfg), dtype)
    rng = np.random.default_rng(cfg.run.seed)
    ids = rng.integers(1, model.vocab_size, (batch, prompt - 1))
    prompts = [" ".join(map(str, row)) for row in ids.tolist()]
    calls = [call(model, params, prompts, new, dtype) for _ in range(1 + repeats)]
    first, timed = calls[0], calls[1:]
    whole = [seconds for seconds, _, _ in timed]
    say(f"first call {first[0]:.2f} s, then {statistics.median(whole):.2f} s")
    prefill = statistics.median(seconds for _, seconds, _ in timed)
    step = statistics.median(seconds for _, _, seconds in timed) / (new - 1)
    weights = weights_read(model, params)
    cache = cache_read(model, batch, prompt + new, dtype)
    streamed = memory_rate()
    return {
        **timing.rates(batch * new, whole),
        "prefill_tokens_per_sec": round(batch * prompt / prefill, 1),
        "prefill_seconds": prefill,
        "decode_tokens_per_sec": round(batch / step, 1),
        "milliseconds_per_token": round(1000 * step, 3),
        "weights_read_bytes": weights,
        "cache_read_bytes": cache,
        "read_bytes_per_sec": round((weights + cache) / step),
        "memory_bytes_per_sec": round(streamed),
        "share_of_memory_rate": round((weights + cache) / step / streamed, 3),
        "batch": batch,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "parameters": parameters.count(parameters.specs(model)),
        "compile_seconds": round(max(0.0, first[0] - statistics.median(whole)), 2),
        **memory(jax.devices()[0]),
    }


def call(
    model: ModelConfig, params: Params, prompts: list[str], new: int, dtype: str
) -> tuple[float, float, float]:
    """Return the seconds of one call, those until its first ids, and those from there to its last.

    Raises RuntimeError for a row that is not as long as asked.
    """
    stamps: list[float] = []
    began = time.perf_counter()
    rows = generation.generate(
        model, params, Ids(model.vocab_size), prompts, max_new_tokens=new, stop_at_eos=False,
        on_text=lambda row, piece: stamps.append(time.perf_counter()), dtype=dtype,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if any(len(row.ids) != new for row in rows) or len(stamps) != new * len(prompts):
        raise RuntimeError(f"asked for {new} ids per row: {[len(row.ids) for row in rows]}")
    # The rows of a step are read together, one after the other.
    to_first, to_last = stamps[len(prompts) - 1] - began, stamps[-1] - began
    return seconds, to_first, to_last - to_first


def random_weights(cfg: Config) -> Params:
    """Return initial parameters in the dtype that products are computed in."""
    specs = parameters.specs(cfg.model)
    key = jax.random.key(cfg.run.seed)
    return jax.jit(lambda key: parameters.init(specs, key, cfg.train.compute_dtype))(key)


def weights_read(model: ModelConfig, params: Params) -> int:
    """Return the bytes of the weights that a step reads: all but what rows are looked up in."""
    looked_up = [params.pos_embed, None if model.tie_embeddings else params.embed]
    return tree_bytes(params) - tree_bytes(looked_up)


def cache_read(model: ModelConfig, batch: int, length: int, dtype: str) -> int:
    """Return the bytes of keys and values that a step reads: all slots, seen or not."""
    slots = generation.cache_slots(model, length)
    width = model.kv_heads * model.head_width
    return 2 * model.num_layers * batch * slots * width * jnp.dtype(dtype).itemsize


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_rate() -> float:
    """Return the bytes per second at which the first device reads memory: the best of some sums."""
    values = jnp.ones((64, STREAMED_BYTES // 4 // 64), jnp.float32)
    total = jax.jit(lambda values: values.sum(-1))
    seconds = timing.repeat(lambda: total(values).block_until_ready(), STREAMED_TIMES)
    return values.nbytes / min(seconds)
