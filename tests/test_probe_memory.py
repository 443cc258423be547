"""What the gradient check found is used again for the same program on the same machine only."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from jaxgpt import config, start
from jaxgpt.config import Config
from jaxgpt.errors import NumericsError
from jaxgpt.training import probe_memory
from jaxgpt.training.probe import Probe

CFG = config.load(overrides=["model.vocab_size=64", "train.compute_dtype=float32"])
FOUND = Probe("float32", {}, 0.0, "embed", 1e-6, 1e-3)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def changed(**train: object) -> Config:
    return dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, **train))


def test_what_was_found_is_recalled_for_the_same_program():
    probe_memory.remember(CFG, "amd", FOUND)
    assert probe_memory.recall(CFG, "amd") == FOUND


def test_a_longer_run_is_the_same_program():
    probe_memory.remember(CFG, "amd", FOUND)
    assert probe_memory.recall(changed(num_steps=12345), "amd") == FOUND


@pytest.mark.parametrize(
    "train",
    [{"compute_dtype": "bfloat16"}, {"xla_options": {"xla_cpu_enable_fast_math": True}}],
    ids=["dtype", "options"],
)
def test_another_program_is_checked_itself(train):
    probe_memory.remember(CFG, "amd", FOUND)
    assert probe_memory.recall(changed(**train), "amd") is None


def test_another_processor_is_checked_itself():
    probe_memory.remember(CFG, "amd", FOUND)
    assert probe_memory.recall(CFG, "intel") is None


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "ONEDNN_MAX_CPU_ISA"])
def test_other_flags_in_the_environment_are_checked_themselves(name, monkeypatch):
    probe_memory.remember(CFG, "amd", FOUND)
    monkeypatch.setenv(name, "--something=1")
    assert probe_memory.recall(CFG, "amd") is None


def test_a_damaged_file_is_as_none(empty_cache):
    probe_memory.remember(CFG, "amd", FOUND)
    (path,) = empty_cache.glob("jaxgpt-gradients-*.json")
    for text in ("", "{", "[]", json.dumps({"leaf": "embed"})):
        path.write_text(text)
        assert probe_memory.recall(CFG, "amd") is None


def test_without_a_compile_cache_nothing_is_kept():
    jax.config.update("jax_compilation_cache_dir", None)
    probe_memory.remember(CFG, "amd", FOUND)
    assert probe_memory.recall(CFG, "amd") is None


def test_a_start_says_what_an_earlier_one_found(monkeypatch):
    monkeypatch.setattr(probe_memory, "probe_gradients", lambda cfg: FOUND)
    first = start.check_gradients(CFG)
    monkeypatch.delattr(probe_memory, "probe_gradients")  # is not called again
    assert start.check_gradients(CFG) == f"{first} (found at an earlier start)"


def test_a_check_that_fails_fails_again(monkeypatch):
    def wrong(cfg: Config) -> Probe:
        raise NumericsError("wrong")

    monkeypatch.setattr(probe_memory, "probe_gradients", wrong)
    for _ in range(2):
        with pytest.raises(NumericsError, match="wrong"):
            start.check_gradients(CFG)
