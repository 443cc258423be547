"""The folder of a run: what goes along with the weights that a run starts from."""

from __future__ import annotations

from jaxgpt.run_folder import KEPT, copy_kept


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
