"""A step written part by part: checked like any other, and not there before its record."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny import TINY, random_params

from jaxgpt import config
from jaxgpt.checkpoint import commit, parts
from jaxgpt.checkpoint.arrays import part_of
from jaxgpt.checkpoint.fingerprint import named_leaves, tree_fingerprints
from jaxgpt.checkpoint.load import load_params
from jaxgpt.config import Config
from jaxgpt.errors import StorageError

CONFIG = config.to_dict(Config(model=TINY))
PARAMS = random_params(TINY)
SHAPES = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), PARAMS)


def in_parts() -> dict[str, dict[str, np.ndarray]]:
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in named_leaves({"params": PARAMS}).items():
        groups.setdefault(part_of(name), {})[name] = leaf
    return groups


def save(root, given):
    return parts.save(root / "ckpt", SHAPES, given, identity={}, meta={"a": 1}, config=CONFIG)


def test_a_layer_is_a_part_and_so_is_each_leaf_outside_of_layers():
    assert part_of("params.layers.11.wq") == "layers.11"
    assert part_of("params.embed") == "embed"
    assert set(in_parts()) == {
        "embed", "layers.0", "layers.1", "pos_embed", "final_norm", "final_norm_bias"
    }  # fmt: skip


def test_what_is_written_in_parts_is_a_step_like_any_other(tmp_path):
    record = save(tmp_path, in_parts().values())
    assert commit.list_steps(tmp_path / "ckpt") == [0]
    assert commit.read_record(tmp_path / "ckpt", 0) == record
    assert record.finite and record.layout == "per-layer" and record.meta == {"a": 1}
    saved = {leaf.path: leaf.fingerprint for leaf in record.leaves}
    assert saved == tree_fingerprints({"params": PARAMS})
    cfg, loaded = load_params(tmp_path)
    assert cfg.model == TINY
    jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)


def test_a_value_that_is_not_finite_is_on_record(tmp_path):
    given = in_parts()
    given["final_norm"] = {"params.final_norm": np.full(32, np.nan, np.float32)}
    assert not save(tmp_path, given.values()).finite


def test_a_part_of_another_shape_and_one_that_never_comes_are_refused(tmp_path):
    given = in_parts()
    wrong = given | {"embed": {"params.embed": np.zeros((3, 3), np.float32)}}
    with pytest.raises(ValueError, match="params.embed is float32"):
        save(tmp_path / "a", wrong.values())
    del given["layers.1"]
    with pytest.raises(ValueError, match="never written: .*params.layers.1"):
        save(tmp_path / "b", given.values())
    assert commit.list_steps(tmp_path / "a/ckpt") == commit.list_steps(tmp_path / "b/ckpt") == []


def test_a_full_disk_leaves_no_step_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_FAULT", "publish.temporary:1:enospc")
    monkeypatch.setattr("jaxgpt.checkpoint.faults._reached", {})
    with pytest.raises(StorageError, match="ckpt/0: not saved: .*ENOSPC"):
        save(tmp_path, in_parts().values())
    assert commit.list_steps(tmp_path / "ckpt") == []


def test_a_disk_that_is_full_while_arrays_are_written_is_one_line(tmp_path, monkeypatch):
    def fail(*args, **kwargs):  # as TensorStore does
        raise ValueError("RESOURCE_EXHAUSTED: Error writing\nmore [os_error_code='28']")

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with pytest.raises(StorageError, match="ckpt/0: not saved: No space left on device") as error:
        save(tmp_path, in_parts().values())
    assert "\n" not in str(error.value)
