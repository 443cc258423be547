"""Filters against the logits processors of transformers; needs torch and transformers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxgpt.evaluation.sampling import candidates, penalize


def random_logits(vocab_size: int = 200) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, vocab_size)).astype(np.float32) * 3


def theirs(logits: np.ndarray, *processors) -> list[set[int]]:
    scores = torch.tensor(logits)
    for processor in processors:
        scores = processor(None, scores)
    return [set(torch.nonzero(row > -torch.inf)[:, 0].tolist()) for row in scores]


def ours(logits: np.ndarray, **rules: float) -> list[set[int]]:
    rules = {"temperature": 1.0} | rules
    scaled, ids = (np.asarray(x) for x in candidates(jnp.asarray(logits), **rules))
    return [set(row[keep].tolist()) for row, keep in zip(ids, np.isfinite(scaled), strict=True)]


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.95, 0.999])
def test_top_p_keeps_what_transformers_keeps(top_p):
    logits = random_logits()
    assert ours(logits, top_p=top_p) == theirs(logits, transformers.TopPLogitsWarper(top_p))


@pytest.mark.parametrize("top_k", [1, 7, 200, 500])
def test_top_k_keeps_what_transformers_keeps(top_k):
    logits = random_logits()
    assert ours(logits, top_k=top_k) == theirs(logits, transformers.TopKLogitsWarper(top_k))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    logits = random_logits()
    assert ours(logits, min_p=min_p) == theirs(logits, transformers.MinPLogitsWarper(min_p))


def test_all_rules_in_order_keep_what_transformers_keeps():
    logits = random_logits()
    chain = (
        transformers.TemperatureLogitsWarper(1.7),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.05),
    )
    mine = ours(logits, temperature=1.7, top_k=40, top_p=0.9, min_p=0.05)
    assert mine == theirs(logits, *chain)
    assert all(1 < len(row) < 40 for row in mine)  # every rule had something to take


def test_repetition_penalty_equals_transformers():
    logits = random_logits(50)
    ids = np.random.default_rng(1).integers(0, 50, (8, 12))
    seen = np.zeros((8, 50), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    right = penalty(torch.tensor(ids), torch.tensor(logits))
    mine = penalize(jnp.asarray(logits), jnp.asarray(seen), 1.3)
    np.testing.assert_allclose(mine, right.numpy(), rtol=1e-6)
