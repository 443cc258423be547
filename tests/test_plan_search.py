"""The search: legal meshes only, the fastest first, fixes that do what they say, a preset back."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import pytest
from tiny import LLAMA

from jaxgpt import config
from jaxgpt.config import Config
from jaxgpt.errors import ConfigError
from jaxgpt.planning import search
from jaxgpt.planning.hardware import parse
from jaxgpt.planning.layout import state_sizes
from jaxgpt.validation import problems_of

LLAMA_8B = config.load("configs/llama3_8b.toml")
MIXTRAL = config.load("configs/mixtral_8x7b.toml")


@pytest.fixture(scope="module")
def found() -> list[search.Candidate]:
    return search.search(LLAMA_8B, parse("h100x64"))


def test_candidates_fit_are_valid_and_come_fastest_first(found):
    assert len(found) == 10
    assert all(c.fits and not problems_of(c.cfg) for c in found)
    seconds = [c.bound.seconds for c in found]
    assert seconds == sorted(seconds)


def test_the_best_is_no_slower_than_the_preset(found):
    assert found[0].bound.seconds <= search.evaluate(LLAMA_8B, parse("h100x64")).bound.seconds


def test_no_mesh_beats_the_best(found):
    target, known, tried = parse("h100x64"), state_sizes(LLAMA_8B), 0
    for mesh in search.meshes(LLAMA_8B, target):
        cfg = config.with_values(LLAMA_8B, "test", mesh=mesh, train={"micro_batch": 64})
        with contextlib.suppress(ConfigError):
            other = search.evaluate(cfg, target, known)
            tried += 1
            assert not other.fits or other.bound.seconds >= found[0].bound.seconds
    assert tried > 20


def test_meshes_use_all_devices_and_divide_what_they_split():
    seen = list(search.meshes(MIXTRAL, parse("v5p-128")))
    assert len({tuple(mesh.values()) for mesh in seen}) == len(seen) > 20
    for mesh in seen:
        product = 1
        for size in mesh.values():
            product *= size
        assert product == 64
        assert 8 % mesh["expert"] == 0 and 8 % mesh["tensor"] == 0 and 32 % mesh["stage"] == 0
        assert 128 % (mesh["data"] * mesh["fsdp"] * mesh["expert"]) == 0
    assert {mesh["expert"] for mesh in seen} == {1, 2, 4, 8}


def test_a_dense_unstacked_model_has_neither_experts_nor_stages():
    cfg = config.load("configs/gpt2_124m.toml")
    assert {(m["expert"], m["stage"]) for m in search.meshes(cfg, parse("h100x64"))} == {(1, 1)}


def test_slices_are_laid_over_every_axis_that_they_divide():
    mesh = {"data": 2, "stage": 1, "fsdp": 8, "tensor": 1, "context": 1, "expert": 1}
    # fsdp = 8 alone is what an empty mesh.slow means, as no other axis holds eight slices.
    ways = search.slow_parts(mesh, 8)
    assert ways == [{"data": 2, "fsdp": 4}, {}]
    assert search.slow_parts(mesh, 1) == [{}]
    assert search.slow_parts({**mesh, "fsdp": 2}, 8) == []


def test_replicas_across_slices_are_found():
    # Over a slow network replicas meet once a step; weights would cross it in every micro-batch.
    chip = dataclasses.replace(parse("v5e-8").chip, network=1e8)
    target = dataclasses.replace(parse("2*v5e-8"), chip=chip)
    best = search.search(config.load("configs/llama3_1b.toml"), target)[0]
    assert best.layout.sizes["data"] % 2 == 0 and best.layout.slow["data"] == 2


def test_rounds_are_proposed_only_with_a_micro_batch_for_each_stage():
    sizes = {"num_layers": 16, "stacked": True}
    cfg = config.with_values(Config(model=LLAMA), "test", model=sizes, train={"global_batch": 64})
    mesh = {"data": 2, "fsdp": 1, "stage": 4, "tensor": 1, "context": 1, "expert": 1}
    found = [*search._layouts(cfg, parse("h100x8"), state_sizes(cfg), mesh)]
    assert [at.cfg.mesh.rounds for at in found] == [1, 2, 4]
    for at in found:
        best = search._best_micro(at)
        assert best.cfg.mesh.rounds == 1 or best.cfg.train.accum_steps >= 4
        assert not problems_of(best.cfg)


def test_a_mesh_that_splits_a_torus_of_three_rings_is_ranked_above_one_that_gathers_over_it():
    # Over all of 4x8x8 chips libtpu gathers by sums, which nothing hides.
    cfg, target = config.load("configs/llama3_70b.toml"), parse("v5p-512")
    best = search.search(cfg, target, limit=2)
    assert all(c.layout.sizes["fsdp"] < 256 and c.bound.exposed == 0 for c in best)
    # Even if all rows were one micro-batch, which exchanges weights least often.
    mesh, train = {"data": 1, "context": 1, "fsdp": 256}, {"micro_batch": 512}
    whole = config.with_values(best[0].cfg, "test", mesh=mesh, train=train)
    assert search.evaluate(whole, target).bound.seconds > 1.05 * best[0].bound.seconds


def test_1024_devices_take_seconds():
    start = time.process_time()
    found = search.search(config.load("configs/llama3_405b.toml"), parse("v5p-2048"))
    assert found and time.process_time() - start < 20


def test_what_cannot_fit_finds_nothing():
    assert search.search(config.load("configs/llama3_405b.toml"), parse("v5e-8")) == []


def test_what_the_command_line_says_is_kept():
    words = ["mesh.tensor=2", "mesh.fsdp=-1", "train.micro_batch=128", "model.remat_save=[]"]
    found = search.search(config.load("configs/llama3_8b.toml", words), parse("h100x64"))
    assert found and {(c.cfg.mesh.tensor, c.cfg.train.micro_batch, c.cfg.model.remat_save)
                      for c in found} == {(2, 128, ())}  # fmt: skip
    assert len({c.cfg.mesh.fsdp for c in found}) > 1  # of the rest nothing is said


def test_what_was_found_is_a_preset_that_loads_and_plans_alike(tmp_path, found):
    path = tmp_path / "best.toml"
    search.write_preset(path, found[0].cfg, "configs/llama3_8b.toml", "found by a test")
    assert 'base = "' in path.read_text()
    again = config.load(path)
    assert again == found[0].cfg
    assert search.evaluate(again, parse("h100x64")).bound.seconds == found[0].bound.seconds


def test_a_preset_of_a_preset_is_written_on_their_common_base(tmp_path):
    cfg = config.with_values(
        config.load("configs/llama3_70b.toml"), "test", mesh={"fsdp": 32, "tensor": 8}
    )
    path = tmp_path / "best.toml"
    search.write_preset(path, cfg, "configs/llama3_70b.toml", "found by a test")
    assert "llama3_8b.toml" in path.read_text() and config.load(path) == cfg


def test_without_a_preset_all_that_is_no_default_is_written(tmp_path):
    path = tmp_path / "best.toml"
    cfg = config.with_values(Config(model=LLAMA), "test", mesh={"data": 1, "fsdp": 8})
    search.write_preset(path, cfg, None, "found by a test")
    assert config.load(path) == cfg and "base" not in path.read_text()
