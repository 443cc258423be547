"""Text from a model: prompts of unequal length at once, an id per row and step, streamed.

Every prompt is preceded by the start id of its tokenizer: E, the end-of-text id that opens each
document in training, or the begin-of-text symbol of an imported model that had one. A row stops at
the next E, or at another id that ends texts. Prompts are padded on the right and each row has its
own positions, so a pad is neither seen nor counted. Randomness is counted, not carried: the key of
a draw comes from the seed, the row's own sample index and how many ids it has drawn, so rows do not
depend on their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxgpt.config import ModelConfig
from jaxgpt.errors import ConfigError, DataError, NumericsError
from jaxgpt.evaluation.sampling import Sampling, mask_ids, penalize, sample
from jaxgpt.model import gpt
from jaxgpt.model.cache import KVCache, init_cache
from jaxgpt.model.params import Params, restack

if TYPE_CHECKING:
    from jaxgpt.tokenization.tokenizer import Tokenizer

MIN_BUCKET = 32  # lengths are padded to powers of two from here on: few shapes, few compilations
CHUNK = 512  # ids of a prompt that are computed at once
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Generation:
    """What one row produced.

    `ids` are the new ids, the closing E included where the row ended with one; `text` is what they
    say, without E. `logprobs` are the natural logarithms of the probabilities that the model itself
    gave to `ids`, before penalty, temperature and filters. `finished_reason` is "eos", also for
    another id that ends texts, or "length" after max_new_tokens.
    """

    text: str
    ids: tuple[int, ...]
    finished_reason: Literal["eos", "length"]
    logprobs: tuple[float, ...]


@dataclass
class Row:
    """A row while it grows: start id, prompt, new ids; those before `start` are out of context."""

    ids: list[int]
    prompt_len: int
    start: int = 0
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False  # at E or another id that ends texts
    done: bool = False

    @property
    def context(self) -> int:
        """The number of ids that the next one is predicted from."""
        return len(self.ids) - self.start

    @property
    def has_text(self) -> bool:
        """Whether new ids continue a text: there is a prompt."""
        return self.prompt_len > 1


def generate(
    cfg: ModelConfig,
    params: Params,
    tok: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling = GREEDY,
    *,
    max_new_tokens: int = 128,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    stop_at_eos: bool = True,
    on_text: Callable[[int, str], None] | None = None,
    use_cache: bool = True,
    window: bool = False,
    dtype: Any = jnp.float32,
    cache_dtype: Any = None,
) -> list[Generation]:
    """Continue each prompt; returns one Generation per prompt, in order. "" starts a new document.

    `indices` are the sample indices of the rows (default 0, 1, ...): with `seed` they decide the
    draws. `on_text(row, piece)` receives text as soon as it is certain; the pieces of a row add up
    to its text. `dtype` is that of the computation, `cache_dtype` (default: the same) that of the
    stored keys and values. Without `use_cache` each step computes the whole context again.

    The context holds `cfg.seq_len` ids, the one in front included. ConfigError names the numbers
    when prompt and new ids do not fit; with `window`, a row whose context is full goes on from its
    last `seq_len // 2` ids, at positions from 0. Raises DataError for ids that the model does not
    have, and NumericsError for logits that are not finite.
    """
    if not prompts:
        return []
    dtype = jnp.dtype(dtype)
    rows = _open_rows(cfg, tok, prompts, max_new_tokens, window)
    decoders = [tok.stream_decoder(continues=row.has_text) for row in rows] if on_text else []
    indices = list(range(len(rows)) if indices is None else indices)
    if len(rows) == 1 and dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # XLA:CPU multiplies one bf16 row 8 times slower than two (124M: 165 and 21 ms per id).
        rows, indices = [*rows, Row([tok.start_id], 1, done=True)], [*indices, 0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(indices))
    seen = _seen(cfg, rows) if sampling.repetition_penalty != 1 else None
    params = prepare(params, dtype)
    longest = max(row.context for row in rows) + max_new_tokens
    cache_len = cache_slots(cfg, longest) if use_cache else 0
    fill = partial(_fill, cfg, params, rows, cache_len, cache_dtype or dtype, dtype)

    logits, cache = fill()
    for step in range(max_new_tokens):
        ids, logprobs, seen = _choose(logits, keys, step, seen, sampling, tok.vocab_size)
        final = step + 1 == max_new_tokens
        room = all(row.done or row.context < cfg.seq_len for row in rows)
        ahead = use_cache and room and not final
        if ahead:  # begun before the ids are read: device and host work side by side
            positions = np.array([[row.context] for row in rows], np.int32)  # [B, 1]
            at = np.zeros(len(rows), np.int32)
            logits, cache = _advance(cfg, params, ids[:, None], positions, at, cache, dtype)
        drawn = zip(*(x.tolist() for x in jax.device_get((ids, logprobs))), strict=True)
        for index, (row, (new_id, logprob)) in enumerate(zip(rows, drawn, strict=True)):
            if row.done:
                continue
            if new_id < 0:
                raise NumericsError(
                    f"generate: logits of prompt {index} at position {row.context - 1} are not "
                    f"finite in {dtype}; look for NaN in the checkpoint, or use float32"
                )
            row.ids.append(new_id)
            row.logprobs.append(logprob)
            row.stopped = stop_at_eos and new_id in tok.stop_ids
            row.done = row.stopped or final
            if on_text:
                piece = "" if row.stopped else decoders[index].feed(new_id)
                piece += decoders[index].flush() if row.done else ""
                if piece:
                    on_text(index, piece)
        if all(row.done for row in rows):
            break
        if not ahead:
            logits, cache = fill()
    return [_close(tok, row) for row in rows[: len(prompts)]]


def _open_rows(
    cfg: ModelConfig, tok: Tokenizer, prompts: Sequence[str], max_new_tokens: int, window: bool
) -> list[Row]:
    """Encode prompts behind the start id; refuse what vocabulary or context cannot hold."""
    if max_new_tokens < 1:
        raise ConfigError(f"generate: max_new_tokens = {max_new_tokens}: must be at least 1")
    if tok.vocab_size > cfg.vocab_size:
        raise DataError(
            f"generate: the tokenizer has {tok.vocab_size} ids but the model only "
            f"{cfg.vocab_size}; use the tokenizer that the model was trained with"
        )
    rows = []
    for index, prompt in enumerate(prompts):
        ids = [tok.start_id, *tok.encode(prompt)]
        if not all(0 <= token < cfg.vocab_size for token in ids):
            bad = next(token for token in ids if not 0 <= token < cfg.vocab_size)
            raise DataError(
                f"generate: prompt {index} has id {bad}: must be in [0, {cfg.vocab_size})"
            )
        if len(ids) + max_new_tokens > cfg.seq_len and not window:
            fits = cfg.seq_len - len(ids)
            advice = f"at most {fits} new" if fits > 0 else "a shorter prompt"
            raise ConfigError(
                f"generate: prompt {index} has {len(ids)} tokens (the one in front included), "
                f"and max_new_tokens = {max_new_tokens} makes {len(ids) + max_new_tokens}, but "
                f"model.seq_len = {cfg.seq_len}: ask for {advice}, or set window"
            )
        rows.append(Row(ids, len(ids)))
    return rows


def _seen(cfg: ModelConfig, rows: list[Row]) -> Array:
    """Return which ids each prompt holds, bool [B, V]; the id in front is not counted."""
    seen = np.zeros((len(rows), cfg.vocab_size), bool)
    for mark, row in zip(seen, rows, strict=True):
        mark[row.ids[1:]] = True
    return jnp.asarray(seen)


def prepare(params: Params, dtype: Any) -> Params:
    """Cast the matrices to the compute dtype and unstack the layers, once instead of every step.

    A step reads each weight once, so casting or slicing it out of a stack would double its cost.
    Norms, biases and positions stay as they are: the model uses them in float32. What is prepared
    already comes back as it is, so that who calls `generate` often does this before.
    """

    def cast(path: tuple, leaf: Array) -> Array:
        name = path[-1].name
        matrix = name.startswith("w") or name in ("embed", "lm_head")
        return leaf.astype(dtype) if matrix and leaf.dtype != dtype else leaf

    return restack(jax.tree.map_with_path(cast, params), stacked=False)


def cache_slots(cfg: ModelConfig, length: int) -> int:
    """Return the slots of a cache for rows of `length` ids, prompt and new ones together."""
    return _bucket(min(length, cfg.seq_len), cfg.seq_len)


def _bucket(length: int, limit: int) -> int:
    """Return the next power of two, at least MIN_BUCKET, at most `limit` (>= length)."""
    return min(limit, max(MIN_BUCKET, 1 << (length - 1).bit_length()))


def _fill(
    cfg: ModelConfig,
    params: Params,
    rows: list[Row],
    cache_len: int,
    cache_dtype: Any,
    dtype: Any,
) -> tuple[Array, KVCache | None]:
    """Compute all rows from their first visible id; returns logits [B, V] after the last, a cache.

    A row longer than the context loses its front first. With a cache the rows go in by CHUNK ids,
    so that attention over a long prompt holds CHUNK x S scores and not S x S.
    """
    for row in rows:
        if row.context > cfg.seq_len:
            row.start = len(row.ids) - max(1, cfg.seq_len // 2)
    B, width = len(rows), _bucket(max(row.context for row in rows), cfg.seq_len)
    tokens = np.zeros((B, width), np.int32)
    for line, row in zip(tokens, rows, strict=True):
        line[: row.context] = row.ids[row.start :]
    last = np.array([row.context - 1 for row in rows], np.int32)  # [B]
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), (B, width))
    if not cache_len:
        return _advance(cfg, params, tokens, positions, last, None, dtype)
    cache, logits = init_cache(cfg, B, cache_len, cache_dtype), None
    for start in range(0, width, CHUNK):
        part = slice(start, start + CHUNK)
        at = np.clip(last - start, 0, tokens[:, part].shape[1] - 1)
        here, cache = _advance(cfg, params, tokens[:, part], positions[:, part], at, cache, dtype)
        begun = (last >= start)[:, None]  # rows whose last id lies in this chunk or later
        logits = here if logits is None else jnp.where(begun, here, logits)
    return logits, cache


@partial(jax.jit, static_argnames=("cfg", "dtype"), donate_argnames=("cache",))
def _advance(
    cfg: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    at: Array,
    cache: KVCache | None,
    dtype: Any,
) -> tuple[Array, KVCache | None]:
    """Return float32 logits [B, V] after tokens [B, T] at index `at` [B], and the longer cache."""
    if cache is None:
        out = gpt.hidden(cfg, params, tokens, dtype=dtype)
    else:
        out, cache = gpt.hidden(cfg, params, tokens, positions=positions, cache=cache, dtype=dtype)
    out = jnp.take_along_axis(out, at[:, None, None], axis=1)[:, 0]  # [B, D]
    return gpt.logits(cfg, params, out), cache


@partial(jax.jit, static_argnames=("sampling", "num_ids"))
def _choose(
    logits: Array, keys: Array, step: int, seen: Array | None, sampling: Sampling, num_ids: int
) -> tuple[Array, Array, Array | None]:
    """Return ids [B] (-1 where logits are not finite), their log-probabilities [B], and `seen`."""
    finite = jnp.isfinite(logits).all(axis=-1)
    logits = mask_ids(logits, num_ids)
    scores = logits if seen is None else penalize(logits, seen, sampling.repetition_penalty)
    ids = sample(
        scores,
        jax.vmap(jax.random.fold_in, (0, None))(keys, step),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    if seen is not None:
        seen = seen.at[jnp.arange(len(ids)), ids].set(True)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)  # no array of all log-probabilities
    return jnp.where(finite, ids, -1), logprobs, seen


def _close(tok: Tokenizer, row: Row) -> Generation:
    new = row.ids[row.prompt_len :]
    text = tok.decode(new[:-1] if row.stopped else new, continues=row.has_text)
    return Generation(text, tuple(new), "eos" if row.stopped else "length", tuple(row.logprobs))
