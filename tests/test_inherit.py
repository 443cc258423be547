"""Starting from the weights of another run: what must agree, what may differ, what is taken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import LLAMA, TINY, VARIETY, random_params

from jaxgpt import config
from jaxgpt.checkpoint.inherit import find_source, start_state
from jaxgpt.checkpoint.store import Checkpointer
from jaxgpt.config import Config, MeshConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from jaxgpt.errors import ConfigError, DataError, NothingRestorable
from jaxgpt.model.params import Params, abstract, restack, specs
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.sharding import tree_shardings
from jaxgpt.training import optimizer
from jaxgpt.training import state as states

SMALL = dataclasses.replace(LLAMA, seq_len=32)
DIGEST = "a" * 64  # of a tokenizer


def save(
    folder: Path, model: ModelConfig, *steps: int, average: bool = False, **identity: str
) -> Path:
    """Save weights alone, those of each step 100 times its number larger; return the run folder.

    With `average`, half of them are saved as their moving average.
    """
    ckpt = Checkpointer(
        folder / "ckpt",
        keep=9,
        identity=identity,
        config_dict=config.to_dict(Config(model=model)),
        log=lambda line: None,
    )
    for step in steps:
        weights = jax.tree.map(
            lambda leaf, n=step: jnp.asarray(leaf * 100**n), random_params(model)
        )
        state = {"params": weights}
        if average:
            state["opt_state"] = {"ema": jax.tree.map(lambda leaf: leaf / 2, weights)}
        ckpt.save(step, state, position=0, meta={})
    ckpt.close()
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("source") / "run", SMALL, 0, 1, tokenizer=DIGEST)


def heir(source: Path | str, model: ModelConfig = SMALL, **sections: Any) -> Config:
    run = {"dir": "runs/heir", "init_from": str(source)} | sections.pop("run", {})
    return Config(run=RunConfig(**run), model=model, **sections)


def test_the_newest_step_is_taken_or_the_one_that_is_named(source):
    assert find_source(heir(source), DIGEST).record.step == 1
    assert find_source(heir(source / "ckpt/0"), DIGEST).record.step == 0
    assert find_source(heir(""), DIGEST) is None


def test_a_folder_without_weights_is_refused_by_key(tmp_path):
    with pytest.raises(NothingRestorable, match="run.init_from: .*no checkpoint here"):
        find_source(heir(tmp_path), DIGEST)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_layers": 3}, "model.num_layers = 2, this run 3"),
        ({"num_kv_heads": 4}, "model.num_kv_heads = 2, this run 4"),
        ({"mlp_dim": 64}, "model.mlp_dim = 128, this run 64"),
        ({"rope_base": 5e5}, "model.rope_base = 10000.0, this run 500000.0"),
        ({"norm_eps": 1e-6}, "model.norm_eps = 1e-05, this run 1e-06"),
        ({"mlp": "geglu"}, "model.mlp = 'swiglu', this run 'geglu'"),
        ({"tie_embeddings": True}, "model.tie_embeddings = False, this run True"),
        ({"sliding_window": 8}, "model.sliding_window = 0, this run 8"),
        ({"attn_scale": 0.5}, "model.attn_scale = 0.35355"),  # 1 / sqrt(8)
    ],
)
def test_another_model_is_refused_with_both_values(source, change, words):
    with pytest.raises(ConfigError) as refused:
        find_source(heir(source, dataclasses.replace(SMALL, **change)), DIGEST)
    (line,) = str(refused.value).splitlines()
    assert f"run.init_from = {source}" in line and words in line


def test_every_difference_is_named_at_once(source):
    with pytest.raises(ConfigError) as refused:
        find_source(heir(source, TINY), DIGEST)
    assert len(str(refused.value).splitlines()) == 6  # positions, K, norm, MLP, head and length


@pytest.mark.parametrize(
    "change",
    [
        {"stacked": True, "remat": "full", "dropout": 0.1, "init": "xavier"},
        {"seq_len": 64},  # RoPE has no table
        {"mlp_dim": 128, "head_dim": 8, "attn_scale": 8**-0.5},  # what 0 stands for
        {"aux_layers": (1,)},
    ],
)
def test_what_neither_shapes_weights_nor_changes_what_they_compute_may_differ(source, change):
    assert find_source(heir(source, dataclasses.replace(SMALL, **change)), DIGEST)


def test_a_longer_context_needs_other_weights_where_positions_are_learnt(tmp_path):
    folder = save(tmp_path, TINY, 0)
    with pytest.raises(ConfigError, match="model.seq_len = 16, this run 32"):
        find_source(heir(folder, dataclasses.replace(TINY, seq_len=32)), DIGEST)


@pytest.mark.parametrize("stacked", [False, True])
def test_another_vocabulary_is_refused_by_the_names_of_its_weights(source, stacked):
    other = dataclasses.replace(SMALL, vocab_size=80, stacked=stacked)
    with pytest.raises(ConfigError) as refused:
        find_source(heir(source, other), DIGEST)
    embed, head = sorted(str(refused.value).splitlines())
    assert "params.embed is [64, 32], in this run [80, 32]; set model.vocab_size = 64" in embed
    assert "params.lm_head is [64, 32]" in head


def test_the_same_weights_of_another_tokenizer_are_refused(source, tmp_path):
    with pytest.raises(DataError, match="tokenizer aaaaaaaaaaaa, .* bbbbbbbbbbbb;"):
        find_source(heir(source), "b" * 64)
    assert find_source(heir(save(tmp_path, SMALL, 0)), "b" * 64)  # of an unknown tokenizer


def test_weights_that_overwriting_sets_aside_are_refused(source):
    with pytest.raises(ConfigError, match="run.overwrite sets aside"):
        find_source(heir(source / "ckpt/1", run={"dir": str(source), "overwrite": True}), DIGEST)


def start(cfg: Config, sizes: dict[str, int]) -> tuple[Any, list[str]]:
    said: list[str] = []
    mesh = make_mesh(MeshConfig(**sizes))
    tx = optimizer.build(cfg, 10, abstract(specs(cfg.model), cfg.train.param_dtype))
    placed = states.state_shardings(mesh, cfg, tx)
    return start_state(cfg, tx, mesh, find_source(cfg, DIGEST), said.append, placed), said


def test_weights_lie_where_the_run_wants_them_and_all_else_is_new(source):
    sizes, optim = {"data": 1, "fsdp": 8}, OptimConfig(ema_decay=0.9)
    state, said = start(heir(source, optim=optim), sizes)
    right = jax.tree.map(lambda leaf: np.float32(leaf * 100), random_params(SMALL))
    jax.tree.map(np.testing.assert_array_equal, state.params, right)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.ema, right)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state.inner))
    assert [int(x) for x in (state.step, state.skipped, state.rows_digest)] == [0, 0, 0]
    placed = tree_shardings(make_mesh(MeshConfig(**sizes)), specs(SMALL))
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == placed
    assert said == [f"starting from the weights of {source}/ckpt/1, step 1 (run.init_from)"]


def test_the_last_weights_of_a_run_with_an_average_are_taken_and_called_so(tmp_path):
    folder = save(tmp_path, SMALL, 0, average=True)
    state, (line,) = start(heir(folder), {})
    jax.tree.map(np.testing.assert_array_equal, state.params, random_params(SMALL))
    assert line.startswith(f"starting from the last weights, not their average, of {folder}")


def test_damaged_weights_are_refused_by_key(tmp_path):
    folder = save(tmp_path, SMALL, 0)
    for file in (folder / "ckpt/0").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(NothingRestorable, match=rf"^run.init_from: {folder}"):
        start(heir(folder), {})


def test_another_layout_and_format_are_converted_and_a_rounding_is_said(source):
    stacked = dataclasses.replace(SMALL, stacked=True)
    state, (line,) = start(heir(source, stacked, train=TrainConfig(param_dtype="bfloat16")), {})
    assert line.endswith("(run.init_from), rounded from float32 to bfloat16")
    right = restack(jax.tree.map(lambda leaf: jnp.float32(leaf * 100), random_params(SMALL)), True)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), right)
    jax.tree.map(np.testing.assert_array_equal, state.params, rounded)
    assert isinstance(state.opt_state.master, Params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state.master)} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize("name", VARIETY)
def test_every_family_may_start_from_itself(tmp_path, name):
    model = VARIETY[name]
    assert find_source(heir(save(tmp_path, model, 0), model), DIGEST).record.step == 0
