"""Parameters across layouts, and out of a run for evaluation: equal, verified, read-only."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_child import abstract
from flax import struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt import config
from jaxgpt.checkpoint.load import averaged, find_step
from jaxgpt.checkpoint.store import Checkpointer, find_tokenizer, load_params
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import ConfigError, DataError, NothingRestorable
from jaxgpt.model import params
from jaxgpt.model.params import Params, restack

MODEL = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}


@struct.dataclass
class State:
    step: Any
    params: Params
    opt_state: Any


def make_config(stacked: bool) -> Config:
    return Config(model=ModelConfig(**MODEL, stacked=stacked))


def make_params(stacked: bool, seed: int = 0) -> Params:
    """The same values in both layouts, drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    layers = params.specs(make_config(False).model)
    drawn = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), layers)
    if stacked:
        drawn = drawn.replace(layers=jax.tree.map(lambda *one: np.stack(one), *drawn.layers))
    return jax.tree.map(jnp.asarray, drawn)


def make_state(stacked: bool, mesh: jax.sharding.Mesh) -> State:
    """Parameters and two moments, each weight matrix split over its last axis."""

    def put(leaf: jax.Array) -> jax.Array:
        axis = leaf.ndim - 1
        split = axis > int(stacked) and leaf.shape[axis] % mesh.size == 0
        spec = P(*[None] * axis, "x") if split else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    state = State(
        step=jnp.int32(4),
        params=make_params(stacked, 0),
        opt_state=(make_params(stacked, 1), (make_params(stacked, 2), jnp.float32(0.5))),
    )
    return jax.tree.map(put, state)


def make_mesh(kind: AxisType, devices: int = 4) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def save_run(folder: Path, stacked: bool, *steps: int, **identity: str) -> None:
    """A run whose parameters at each step are those of the seed of that number."""
    cfg = config.to_dict(make_config(stacked))
    checkpointer = Checkpointer(folder / "ckpt", keep=9, identity=identity, config_dict=cfg)
    for step in steps:
        state = State(jnp.int32(step), make_params(stacked, step), (make_params(stacked, 99),))
        checkpointer.save(step, state, position=0, meta={})
    checkpointer.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "run"
    save_run(folder, False, 1, 2)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


# Layouts.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_run_continues_in_the_other_layout_with_equal_values(tmp_path, stacked, kind):
    mesh = make_mesh(kind)
    one, other = make_state(stacked, mesh), make_state(not stacked, mesh)
    settings = {"identity": {}, "config_dict": {}, "log": lambda line: None}
    checkpointer = Checkpointer(tmp_path, **settings)
    checkpointer.save(4, one, position=0, meta={})
    restored = checkpointer.restore_latest(abstract(other))
    checkpointer.close()
    assert restored.record.layout == ("stacked" if stacked else "per-layer")
    assert equal(restored.state, other)
    places = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (restored.state, other)]
    assert places[0] == places[1]


def test_the_other_layout_is_saved_as_such(tmp_path):
    mesh = make_mesh(AxisType.Auto)
    target = abstract(make_state(True, mesh))
    checkpointer = Checkpointer(tmp_path, identity={}, config_dict={}, log=lambda line: None)
    checkpointer.save(4, make_state(False, mesh), position=0, meta={})
    state = checkpointer.restore_latest(target).state
    checkpointer.save(5, state, position=0, meta={})
    again = checkpointer.restore_latest(target)
    checkpointer.close()
    assert again.record.step == 5 and again.record.layout == "stacked"
    assert equal(again.state, state)


# Parameters alone.


@pytest.mark.parametrize("inside", [".", "ckpt", "ckpt/2"])
def test_parameters_come_with_their_configuration_from_any_of_its_folders(saved, inside):
    cfg, loaded = load_params(saved / inside)
    assert cfg == make_config(False)
    assert equal(loaded, make_params(False, 2))


def test_stacked_parameters_come_back_stacked(tmp_path):
    save_run(tmp_path, True, 1)
    cfg, loaded = load_params(tmp_path)
    assert cfg.model.stacked and equal(loaded, make_params(True, 1))
    assert equal(restack(loaded, False), make_params(False, 1))


def test_a_step_can_be_named(saved):
    assert equal(load_params(saved, step=1)[1], make_params(False, 1))
    assert equal(load_params(saved / "ckpt/1")[1], make_params(False, 1))


def test_parameters_are_cast_when_asked(saved):
    loaded = load_params(saved, dtype=jnp.bfloat16)[1]
    expected = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), make_params(False, 2))
    assert equal(loaded, expected)


def save_average(folder: Path, average: Params | None) -> None:
    cfg = config.to_dict(make_config(False))
    checkpointer = Checkpointer(folder / "ckpt", keep=9, identity={}, config_dict=cfg)
    opt_state = {"mu": make_params(False, 98), "ema": average}
    state = State(jnp.int32(3), make_params(False, 3), opt_state)
    checkpointer.save(3, state, position=0, meta={})
    checkpointer.close()


def test_the_average_of_the_weights_is_loaded_by_name_or_as_the_best(tmp_path):
    save_average(tmp_path, make_params(False, 7))
    assert equal(load_params(tmp_path)[1], make_params(False, 3))
    assert equal(load_params(tmp_path, weights="last")[1], make_params(False, 3))
    for weights in ("ema", "best"):
        assert equal(load_params(tmp_path, weights=weights)[1], make_params(False, 7))
    assert averaged(find_step(tmp_path)[1])


def test_without_an_average_the_last_weights_are_the_best_and_asking_for_it_is_refused(tmp_path):
    save_average(tmp_path, None)
    assert equal(load_params(tmp_path, weights="best")[1], make_params(False, 3))
    with pytest.raises(ConfigError, match="ckpt/3: holds no moving average"):
        load_params(tmp_path, weights="ema")


def test_a_step_is_found_by_its_record_without_reading_arrays(run):
    assert find_step(run)[1].step == 2
    assert find_step(run / "ckpt/1")[0] == run / "ckpt/1"
    (run / "ckpt/2.ok.json").write_text("{}")
    assert find_step(run)[1].step == 1
    with pytest.raises(NothingRestorable, match="ckpt/2: no checkpoint can be used"):
        find_step(run / "ckpt/2")


def test_parameters_are_placed_when_asked(saved):
    sharding = NamedSharding(make_mesh(AxisType.Auto, 8), P())
    shapes = params.abstract(params.specs(make_config(False).model))
    loaded = load_params(saved, shardings=lambda cfg: jax.tree.map(lambda _: sharding, shapes))[1]
    assert loaded.embed.sharding == sharding and equal(loaded, make_params(False, 2))


def flip_a_value(run: Path, step: int) -> None:
    largest = max((run / f"ckpt/{step}").rglob("d/*"), key=os.path.getsize)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 1
    largest.write_bytes(content)


def test_a_damaged_step_is_passed_over_loudly_and_nothing_is_moved(run):
    flip_a_value(run, 2)
    said: list[str] = []
    before = sorted(run.rglob("*"))
    loaded = load_params(run, log=said.append)[1]
    assert equal(loaded, make_params(False, 1))
    assert len(said) == 1 and "WARNING" in said[0] and "ckpt/2" in said[0]
    assert sorted(run.rglob("*")) == before


def test_a_named_step_that_is_damaged_or_absent_is_an_error(run):
    flip_a_value(run, 2)
    for path, step in ((run, 2), (run / "ckpt/2", None), (run, 7)):
        with pytest.raises(NothingRestorable):
            load_params(path, step=step)


def test_when_all_steps_are_damaged_loading_fails_with_66(run):
    for step in (1, 2):
        flip_a_value(run, step)
    with pytest.raises(NothingRestorable) as refused:
        load_params(run, log=lambda line: None)
    assert refused.value.exit_code == 66 and "ckpt/1" in str(refused.value)


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_checkpoints_is_named(tmp_path, made):
    folder = tmp_path / "none"
    if made:
        (folder / "ckpt").mkdir(parents=True)
    with pytest.raises(NothingRestorable, match="none: no checkpoint here"):
        load_params(folder)


def test_a_configuration_that_does_not_describe_its_parameters_is_refused(tmp_path):
    cfg = config.to_dict(Config(model=ModelConfig(**{**MODEL, "vocab_size": 2**40})))
    checkpointer = Checkpointer(tmp_path / "ckpt", identity={}, config_dict=cfg)
    state = State(jnp.int32(1), make_params(False), ())
    checkpointer.save(1, state, position=0, meta={})
    checkpointer.close()
    with pytest.raises(NothingRestorable, match=r"params.embed is float32\[64, 32\]"):
        load_params(tmp_path, step=1)


def test_a_run_that_goes_on_is_read_without_disturbing_it(run):
    checkpointer = Checkpointer(run / "ckpt", identity={}, config_dict={}, log=lambda line: None)
    assert equal(load_params(run)[1], make_params(False, 2))
    checkpointer.close()


# The tokenizer.


def test_the_tokenizer_in_the_run_folder_is_found_from_any_of_its_folders(run):
    (run / "tokenizer.model").write_bytes(b"x")
    for inside in (".", "ckpt", "ckpt/1"):
        assert find_tokenizer(run / inside) == run / "tokenizer.model"


def test_only_the_tokenizer_that_the_run_was_trained_with_is_found(tmp_path):
    right, other = b"a model", b"b model"  # of the same size
    save_run(tmp_path, False, 1, tokenizer=hashlib.sha256(right).hexdigest())
    (tmp_path / "tokenizer.model").write_bytes(right)
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.model").write_bytes(other)
    with pytest.raises(DataError, match=r"SHA-256 [0-9a-f]{12}\) is in none of .*tokenizer.model"):
        find_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_an_error_that_says_where_it_belongs(run):
    with pytest.raises(DataError, match="run/tokenizer.model"):
        find_tokenizer(run)
