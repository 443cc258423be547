"""The folder of a run: what goes along with the weights that a run starts from."""

from __future__ import annotations

import pytest

from jaxgpt import config
from jaxgpt.checkpoint import lock
from jaxgpt.errors import ConfigError
from jaxgpt.run_folder import KEPT, claim_folder, copy_kept


def test_overwriting_sets_a_run_aside_but_not_one_that_still_goes_on(tmp_path):
    cfg = config.load(None, ["run.overwrite=true"])
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    with lock.claim(tmp_path / "ckpt"), pytest.raises(ConfigError, match="in use by a job"):
        claim_folder(tmp_path, cfg, print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "metrics.jsonl"]
    said: list[str] = []
    claim_folder(tmp_path, cfg, said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["previous-1"]
    assert {path.name for path in (tmp_path / "previous-1").iterdir()} == {"ckpt", "metrics.jsonl"}
    assert said == [f"{tmp_path}: the earlier run was moved to {tmp_path}/previous-1"]


def test_what_an_import_left_for_an_export_goes_along_and_is_never_replaced(tmp_path):
    source, heir = tmp_path / "source", tmp_path / "heir"
    (source / KEPT).mkdir(parents=True)
    (source / KEPT / "config.json").write_text("{}")
    heir.mkdir()
    copy_kept(source, heir)
    (source / KEPT / "config.json").write_text("changed")
    copy_kept(source, heir)
    assert (heir / KEPT / "config.json").read_text() == "{}"


def test_a_run_that_was_not_imported_leaves_nothing(tmp_path):
    (tmp_path / "heir").mkdir()
    copy_kept(tmp_path, tmp_path / "heir")
    assert list((tmp_path / "heir").iterdir()) == []
