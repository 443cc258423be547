"""Evaluation against arithmetic, against plain NumPy, and against itself in other batches."""

from __future__ import annotations

import math
import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.data.shard import encoded_document, write_shard
from jaxgpt.data.store import Store, open_store, write_manifest
from jaxgpt.errors import DataError, NumericsError
from jaxgpt.evaluation.perplexity import (
    EvalResult,
    compressor_baselines,
    evaluate,
    evaluate_sets,
    evaluate_text,
    report_table,
    store_bytes,
    store_tokenizer,
    summarize,
    target_bytes,
)
from jaxgpt.model import gpt
from jaxgpt.model.params import Params, specs
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import tree_shardings
from jaxgpt.tokenization import tokenizer
from jaxgpt.tokenization.frame import with_frame
from jaxgpt.tokenization.tokenizer import Tokenizer

T = 16
TRAINING = ["the king went to the sea", "a", "émigré 🚀 went", "sea " * 30, "to be or not to be"]
TEXTS = [*TRAINING, "Zyx Wvu! " * 8]  # the last is made of single letters and bytes


def write_store(folder: Path, tok: Tokenizer, texts: list[str]) -> Store:
    """Two shards, the second with the last text only."""
    folder.mkdir(parents=True)
    shutil.copy(tok.path, folder / "tokenizer.model")
    common = {
        "tokenizer_digest": tok.digest,
        "vocab_size": tok.vocab_size,
        "eos_id": tok.eos_id,
    }
    shards = []
    for number, part in enumerate([texts[:-1], texts[-1:]]):
        documents = [encoded_document(np.array(tok.encode(t), np.int32), t, "x") for t in part]
        shards.append(write_shard(folder / f"{number}.bin", documents, **common))
    write_manifest(folder, shards, policies={}, report={}, **common)
    return open_store(folder)


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tok") / "tokenizer.model"
    return tokenizer.train(TRAINING * 3, path, vocab_size=300)


@pytest.fixture(scope="module")
def store(tok: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("data") / "valid", tok, TEXTS)


@pytest.fixture(scope="module")
def cfg(tok: Tokenizer) -> Config:
    model = ModelConfig(
        num_layers=2, embed_dim=32, num_heads=4, vocab_size=tok.vocab_size, seq_len=T, init_std=0.3
    )
    return Config(model=model, train=TrainConfig(global_batch=4, compute_dtype="float32"))


@pytest.fixture(scope="module")
def params(cfg: Config) -> Params:
    return gpt.init(cfg.model, jax.random.key(0))


def by_hand(
    cfg: Config, params: Params, tok: Tokenizer, max_rows: int = 10**9
) -> tuple[float, int]:
    """Loss sum (float64) and tokens of TEXTS, row by row, from logits and a plain log-softmax."""
    apply = jax.jit(gpt.apply, static_argnums=0)
    stream = [token for text in TEXTS for token in (tok.eos_id, *tok.encode(text))] + [tok.eos_id]
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, T)[:max_rows]:
        inputs, targets = stream[start : start + T], stream[start + 1 : start + T + 1]
        inputs = inputs[: len(targets)]
        padded = np.array([inputs + [0] * (T - len(inputs))])
        segments = np.cumsum(padded == tok.eos_id, axis=1) if cfg.data.document_mask else None
        logits = np.asarray(apply(cfg.model, params, padded, segment_ids=segments)[0], np.float64)
        for line, target in zip(logits, targets, strict=False):
            total += math.log(np.exp(line).sum()) - line[target]
            count += 1
    return total, count


def test_perplexity_is_the_exponential_of_the_mean_over_tokens_not_over_windows():
    # Windows of 4, 4 and 2 tokens with mean losses 2, 2, 5: exp(26 / 10), not exp(3) = 20.0855.
    result = summarize(np.array([8.0, 8.0, 10.0]), np.array([4.0, 4.0, 2.0]), num_bytes=10)
    assert result.perplexity == pytest.approx(13.4637, abs=1e-4)


def test_four_tokens_of_loss_ln_4_over_eight_bytes_are_one_bit_per_byte():
    result = summarize(np.array([4 * math.log(4)]), np.array([4.0]), num_bytes=8)
    assert (result.perplexity, result.bits_per_byte) == pytest.approx((4.0, 1.0), abs=1e-12)


def test_standard_error_of_equal_rows_is_that_of_their_mean():
    # Rows of 10 tokens with mean losses 1, 2, 3: sample deviation 1, so 1 / sqrt(3).
    result = summarize(np.array([10.0, 20.0, 30.0]), np.array([10.0, 10.0, 10.0]), num_bytes=1)
    assert result.loss_stderr == pytest.approx(1 / math.sqrt(3))
    assert summarize(np.array([10.0]), np.array([10.0]), num_bytes=1).loss_stderr is None


def test_a_result_is_json_even_when_the_perplexity_overflows():
    assert math.isfinite(summarize(np.array([1e4]), np.array([1.0]), num_bytes=1).perplexity)


def test_a_model_that_knows_nothing_has_the_loss_of_the_vocabulary(cfg, params, store, tok):
    blank = params.replace(embed=params.embed * 0)
    result = evaluate(cfg, blank, store)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    # Each document's ids and its closing end-of-text id, which has no bytes.
    tokens = sum(len(tok.encode(text)) + 1 for text in TEXTS)
    assert (result.tokens, result.bytes) == (tokens, num_bytes)
    assert result.rows == math.ceil(tokens / T)
    assert result.loss == pytest.approx(math.log(tok.vocab_size), rel=1e-6)
    assert result.perplexity == pytest.approx(tok.vocab_size, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(
        tokens * math.log2(tok.vocab_size) / num_bytes, rel=1e-6
    )


@pytest.mark.parametrize("document_mask", [False, True])
def test_loss_equals_a_plain_loop_over_the_rows(cfg, params, store, tok, document_mask):
    cfg = replace(cfg, data=DataConfig(document_mask=document_mask))
    total, tokens = by_hand(cfg, params, tok)
    result = evaluate(cfg, params, store)
    assert result.tokens == tokens
    assert result.loss == pytest.approx(total / tokens, rel=2e-6)


def test_logit_softcap_is_part_of_the_loss(cfg, params, store, tok):
    cfg = replace(cfg, model=replace(cfg.model, logit_softcap=2.0))
    total, tokens = by_hand(cfg, params, tok)
    assert evaluate(cfg, params, store).loss == pytest.approx(total / tokens, rel=2e-6)


def test_the_number_of_rows_at_once_does_not_change_the_result(cfg, params, store):
    results = [evaluate(cfg, params, store, batch=batch) for batch in (1, 2, 8)]
    assert results[0].rows % 2 == 1 and results[0].rows > 8  # so each size above 1 pads its last
    for other in results[1:]:
        assert other.perplexity == pytest.approx(results[0].perplexity, rel=1e-6)
        assert (other.tokens, other.bytes) == (results[0].tokens, results[0].bytes)


def test_evaluation_on_a_mesh_equals_one_device(cfg, params, store):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, tree_shardings(mesh, specs(cfg.model)))
    # Three rows at once do not divide over four devices: four are taken.
    there, here = evaluate(cfg, placed, store, batch=3), evaluate(cfg, params, store)
    assert there.loss == pytest.approx(here.loss, rel=1e-6)
    assert (there.tokens, there.bytes, there.rows) == (here.tokens, here.bytes, here.rows)


def test_bfloat16_agrees_with_float32_within_its_rounding(cfg, params, store):
    half = replace(cfg, train=replace(cfg.train, compute_dtype="bfloat16"))
    assert evaluate(half, params, store).loss == pytest.approx(
        evaluate(cfg, params, store).loss, rel=0.01
    )


def test_max_rows_counts_the_tokens_and_bytes_of_those_rows_only(cfg, params, store, tok):
    result = evaluate(cfg, params, store, max_rows=3)
    total, tokens = by_hand(cfg, params, tok, max_rows=3)
    assert (result.rows, result.tokens) == (3, tokens) == (3, 3 * T)
    assert result.loss == pytest.approx(total / tokens, rel=2e-6)
    text = tok.decode_bytes(store.read(1, 3 * T + 1))
    assert result.bytes == len(text)


def test_target_bytes_are_those_of_the_decoded_targets_at_every_end(store, tok):
    text = "".join(TEXTS).encode()
    for end in range(1, store.stream_len + 1):
        covered = tok.decode_bytes(store.read(1, end + 1))
        assert target_bytes(store, end) == len(covered) and text.startswith(covered)


def test_named_sets_are_evaluated_each_on_its_own(cfg, params, store, tok, tmp_path):
    other = write_store(tmp_path / "other", tok, ["sea", "king"])
    results = evaluate_sets(cfg, params, {"valid": store, "other": other}, max_rows=1)
    assert list(results) == ["valid", "other"]
    assert results["other"] == evaluate(cfg, params, other, max_rows=1)
    assert results["valid"].tokens == T


def test_text_in_memory_equals_the_store_of_the_same_documents(cfg, params, store, tok):
    masked = replace(cfg, data=DataConfig(document_mask=True))
    for variant in (cfg, masked):
        assert evaluate_text(variant, params, tok, TEXTS) == evaluate(variant, params, store)


def test_one_string_is_one_document(cfg, params, tok):
    result = evaluate_text(cfg, params, tok, "the king")
    assert (result.tokens, result.bytes) == (len(tok.encode("the king")) + 1, 8)


def test_texts_are_opened_by_the_begin_of_the_tokenizer_and_closed_by_its_end(cfg, params, tok):
    begin = with_frame(tok, tok.pad_id, ())
    ids = tok.encode("the king")
    logits = np.asarray(gpt.apply(cfg.model, params, np.array([[tok.pad_id, *ids]]))[0], np.float64)
    right = sum(
        math.log(np.exp(line).sum()) - line[target]
        for line, target in zip(logits, [*ids, tok.eos_id], strict=True)
    )
    result = evaluate_text(cfg, params, begin, "the king")
    assert result.loss * result.tokens == pytest.approx(right, rel=1e-5)
    assert result.loss != evaluate_text(cfg, params, tok, "the king").loss


def test_empty_text_is_refused(cfg, params, tok):
    with pytest.raises(DataError, match="no text"):
        evaluate_text(cfg, params, tok, "")


def test_a_store_with_more_ids_than_the_model_is_refused(cfg, params, store):
    small = replace(cfg, model=replace(cfg.model, vocab_size=100))
    with pytest.raises(DataError, match=r"299.*100"):
        evaluate(small, params, store)


def test_a_loss_that_is_not_finite_is_an_error(cfg, params, store):
    broken = params.replace(embed=params.embed.at[5, 0].set(jnp.nan))
    with pytest.raises(NumericsError, match="row 0"):
        evaluate(cfg, broken, store)


def test_a_tokenizer_that_was_swapped_is_refused(store, tok, tmp_path):
    copy = write_store(tmp_path / "copy", tok, TEXTS)
    tokenizer.train(TRAINING * 3, copy.tokenizer_path, vocab_size=290)
    with pytest.raises(DataError, match="put that tokenizer back"):
        store_tokenizer(copy)


def test_the_bytes_of_a_store_are_those_of_its_documents(store, tok):
    text = "".join(TEXTS).encode()
    assert store_bytes(store, tok) == text
    assert store_bytes(store, tok, limit=10) == text[:10]


def test_gzip_baseline_is_deflate_at_level_9_and_the_18_bytes_around_it():
    raw = "".join(random.Random(0).choices("abcdef ", k=5000)).encode()
    deflate = zlib.compressobj(9, wbits=-15)
    size = len(deflate.compress(raw) + deflate.flush()) + 18  # RFC 1952: header 10, trailer 8
    assert compressor_baselines(raw)["gzip -9"] == pytest.approx(8 * size / 5000)


def test_baselines_cannot_shrink_noise_and_nearly_erase_repetition():
    noise = compressor_baselines(random.Random(0).randbytes(100_000))
    assert all(8 < bits < 8.05 for bits in noise.values()) and len(noise) == 2
    assert all(bits < 0.02 for bits in compressor_baselines(b"sea " * 100_000).values())
    assert compressor_baselines(b"") == {}


def test_report_is_plain_text_with_a_line_per_set_when_it_is_not_a_terminal():
    result = EvalResult(2.6, 13.4637, 1.25, 10, 30, 3, 0.05)
    text = report_table(
        {"valid": result, "books": replace(result, loss=3.0, loss_stderr=None)},
        {"valid": {"gzip -9": 2.5, "xz -9": 2.25}},
        terminal=False,
    )
    header, valid, books = text.splitlines()
    assert text.isprintable() or "\x1b" not in text
    assert header.split("  ")[0] == "set" and "gzip -9" in header and "xz -9" in header
    assert valid.split() == [
        "valid", "2.6000", "0.0500", "13.46", "1.2500", "2.5000", "2.2500", "10", "30",
    ]  # fmt: skip
    assert books.split() == ["books", "3.0000", "13.46", "1.2500", "10", "30"]
