"""What `bench checkpoint` reports: bytes by arithmetic, real files on both sides, nothing left."""

from __future__ import annotations

import pytest

from jaxgpt.bench import checkpoint as bench
from jaxgpt.bench import shapes
from jaxgpt.model import params

SIZES = (
    "model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "model.vocab_size=512",
    "model.seq_len=16", "train.global_batch=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    said = []
    cfg = shapes.load("small", "f32", SIZES)
    result = bench.measure(cfg, folder=str(folder), repeats=2, say=said.append)
    assert list(folder.iterdir()) == []
    assert len(said) == 3  # one turn more than are counted
    return cfg, result


def test_a_state_is_three_float32_per_parameter_and_a_few_counters(found):
    cfg, result = found
    weights = params.count(params.specs(cfg.model))
    assert 12 * weights < result["state_bytes"] <= 12 * weights + 64
    assert result["checkpoint_bytes"] >= result["state_bytes"]
    assert result["files"] >= 2


def test_rates_are_bytes_over_seconds_and_ratios_those_of_seconds(found):
    _, result = found
    for name in ("save", "restore", "plain_write", "plain_read"):
        rate = result["checkpoint_bytes"] / result[f"{name}_seconds_median"]
        assert result[f"{name}_bytes_per_sec_median"] == pytest.approx(rate, rel=0.05)
    assert 0 < result["blocked_share_median"] < 1
    assert result["blocked_seconds_median"] < result["save_seconds_median"]
    assert result["save_ratio_median"] > 0 and result["restore_ratio_median"] > 0
    assert result["save_seconds_first"] > 0 and result["repeats"] == 2


def test_plain_files_have_the_sizes_asked_for_and_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PIECE", 1000)
    sizes = [0, 1, 999, 1000, 2500]
    assert bench._write(tmp_path, sizes) > 0
    assert bench._sizes(tmp_path) == sizes
    content = (tmp_path / "000004").read_bytes()
    assert len(set(content[:1000])) > 200 and content[:500] == content[2000:]
    assert bench._read(tmp_path, sizes) > 0
    bench._write(tmp_path, [7])
    assert bench._sizes(tmp_path) == [7]
