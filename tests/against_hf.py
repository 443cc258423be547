"""What jaxgpt computes for the arrays of `golden/make_hf.py`: shared by golden and live tests.

Programs are compiled once for each configuration, whichever test comes first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxgpt.config import Config, ModelConfig, TrainConfig
from jaxgpt.data.packing import Batch
from jaxgpt.evaluation.generate import generate
from jaxgpt.interop.tensors import table
from jaxgpt.model import gpt
from jaxgpt.model.params import Params, restack
from jaxgpt.training.step import gradients

Arrays = dict[str, np.ndarray]
QUICK = {"xla_backend_optimization_level": 0}  # halves compile time, and changes no value we know
apply = jax.jit(gpt.apply, static_argnums=0, compiler_options=QUICK)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference as a share of the largest value."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _training(model: ModelConfig, params: Params, batch: Batch) -> tuple[Params, Arrays]:
    train = TrainConfig(compute_dtype="float32", balance_loss=0.0)
    return gradients(Config(model=model, train=train), params, batch, 0)


def loss_and_gradients(
    cfg: ModelConfig, params: Params, ids: np.ndarray, *, stacked: bool, remat: str
) -> tuple[float, Params]:
    """Return loss and gradients, unrolled, of a training step on ids [B, T] that predict ids."""
    model = replace(cfg, stacked=stacked, remat=remat)
    weights = np.ones(ids.shape, np.float32)
    weights[:, -1] = 0  # what follows the last id is unknown
    rows = Batch(tokens=ids, targets=np.roll(ids, -1, axis=1), weights=weights)
    batch = jax.tree.map(lambda x: x[None], rows)
    grads, sums = _training(model, restack(params, stacked), batch)
    weight = float(sums["weight"])
    return float(sums["total"]) / weight, restack(
        jax.tree.map(lambda g: np.asarray(g) / weight, grads), stacked=False
    )


def by_tensor(family: str, cfg: ModelConfig, leaves: Arrays) -> Arrays:
    """Return leaves by path as the tensors of a Hugging Face file, by name."""
    tensors: Arrays = {}
    for entry in table(family, cfg):
        stored = entry.to_hf([np.asarray(leaves[leaf]) for leaf in entry.leaves])
        tensors |= dict(zip(entry.names, stored, strict=True))
    return tensors


@dataclass(frozen=True)
class Numbers:
    """A tokenizer for texts such as "7 12 3"; id 0 opens every text and ends none."""

    vocab_size: int
    eos_id: int = 0
    bos_id: int | None = None
    start_id: int = 0
    other_stops: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = (0,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], *, continues: bool = False) -> str:
        return " ".join(map(str, ids))


def prompts_and_texts(expected: Arrays) -> list[tuple[list[int], list[int]]]:
    """Return each prompt and the ids that transformers continued it with."""
    pairs = []
    for row, length in zip(expected["greedy"], expected["prompts"], strict=True):
        ids = [token for token in row.tolist() if token >= 0]
        pairs.append((ids[:length], ids[length:]))
    return pairs


def greedy(cfg: ModelConfig, params: Params, prompts: list[list[int]], count: int) -> list:
    """Return what the generator continues the prompts with, as one batch, with a KV cache."""
    rows = generate(
        cfg, params, Numbers(cfg.vocab_size), [" ".join(map(str, ids[1:])) for ids in prompts],
        max_new_tokens=count, stop_at_eos=False,
    )  # fmt: skip
    return [list(row.ids) for row in rows]


def most_likely(cfg: ModelConfig, params: Params, texts: list[list[int]], T: int) -> np.ndarray:
    """Return the id that has the largest logit after each id of each text, without a cache."""
    rows = np.array([text + [0] * (T - len(text)) for text in texts], np.int32)
    return np.asarray(apply(cfg, params, rows)).argmax(-1)
