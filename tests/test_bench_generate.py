"""`bench generate`: its figures are those of the calls it made, and of the bytes they read."""

from __future__ import annotations

from typing import Any

import pytest

from jaxgpt import config
from jaxgpt.bench import generate as bench
from jaxgpt.bench import shapes
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.evaluation.generate import Generation
from jaxgpt.model import params as parameters

L, D, N, K, V, T = 2, 32, 4, 2, 64, 64
SIZES = [
    f"model.num_layers={L}", f"model.embed_dim={D}", f"model.num_heads={N}", "model.mlp=swiglu",
    f"model.num_kv_heads={K}", f"model.vocab_size={V}", f"model.seq_len={T}", "model.mlp_dim=48",
    "model.norm=rmsnorm",
]  # fmt: skip


def tiny(*more: str) -> Config:
    return config.load(overrides=[*SIZES, *more])


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    options = {"batch": 3, "prompt": 5, "new": 7, "repeats": 2}
    cfg = tiny("train.compute_dtype=bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "STREAMED_BYTES", 1 << 20)
        return bench.measure(cfg, **options, say=lambda line: None)


def test_the_shape_of_gpt2_has_the_parameters_that_transformers_counts():
    cfg = shapes.load("gpt2", "f32", bench.overrides("gpt2"))
    assert parameters.count(parameters.specs(cfg.model)) == 124_439_808


def test_the_rate_is_that_of_all_new_ids_over_the_whole_call(measured):
    rate = measured["tokens_per_sec_median"]
    assert rate * measured["seconds_median"] == pytest.approx(3 * 7, rel=1e-2)
    assert measured["repeats"] == 2 and measured["new_tokens"] == 7


def test_prefill_and_decoding_share_the_time_of_a_call(measured):
    prefill, step = measured["prefill_seconds"], measured["milliseconds_per_token"] / 1000
    assert 0 < prefill < prefill + 6 * step < 1.5 * measured["seconds_median"]
    assert measured["prefill_tokens_per_sec"] * prefill == pytest.approx(3 * 5, rel=1e-2)
    assert measured["decode_tokens_per_sec"] * step == pytest.approx(3, rel=1e-2)


def test_a_step_reads_every_weight_but_the_positions_once(measured):
    H, F = D // N, 48
    block = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F + 2 * D
    assert measured["weights_read_bytes"] == 2 * (V * D + L * block + D)


def test_an_untied_embedding_is_only_looked_up():
    cfg = tiny("model.tie_embeddings=false")
    tied, untied = (
        bench.weights_read(c.model, parameters.abstract(parameters.specs(c.model)))
        for c in (tiny(), cfg)
    )
    assert tied == untied


def test_a_step_reads_keys_and_values_of_all_slots(measured):
    slots = 32  # 5 + 7 ids, and a cache has no fewer
    assert measured["cache_read_bytes"] == 2 * 2 * L * 3 * slots * K * (D // N)


def test_the_rate_of_reading_is_that_of_weights_and_cache_per_step(measured):
    read = measured["weights_read_bytes"] + measured["cache_read_bytes"]
    step = measured["milliseconds_per_token"] / 1000
    assert measured["read_bytes_per_sec"] * step == pytest.approx(read, rel=1e-2)


def test_the_rate_of_memory_is_the_bytes_of_a_sum_over_its_best_time(monkeypatch):
    monkeypatch.setattr(bench, "STREAMED_BYTES", 1 << 12)
    monkeypatch.setattr("jaxgpt.bench.timing.repeat", lambda call, times: [0.5, 0.25, 1.0])
    assert bench.memory_rate() == (1 << 12) / 0.25


def test_a_row_that_ends_early_is_no_measurement(monkeypatch):
    short = [Generation("", (1, 2), "eos", (0.0, 0.0))]
    monkeypatch.setattr(bench.generation, "generate", lambda *args, **options: short)
    with pytest.raises(RuntimeError, match="asked for 3 ids"):
        bench.call(tiny().model, None, ["1"], 3, "float32")


@pytest.mark.parametrize(("prompt", "new"), [(60, 5), (5, 1)])
def test_what_the_context_or_decoding_cannot_hold_is_refused(prompt, new):
    with pytest.raises(ConfigError, match=str(new)):
        bench.measure(tiny(), batch=1, prompt=prompt, new=new, repeats=1, say=lambda line: None)


def test_texts_of_ids_come_back_as_they_went_in():
    ids = bench.Ids(V)
    assert ids.decode(ids.encode("3 1 60")) == "3 1 60"
