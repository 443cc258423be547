"""A folder that is written beside its place: whole or not at all, and by one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxgpt.checkpoint import lock
from jaxgpt.errors import ConfigError, StorageError
from jaxgpt.interop.new_folder import appearing, check_free


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_it_appears_when_all_is_written_and_holds_that_alone(tmp_path, there):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with appearing(out, "export") as unfinished:
        (unfinished / "a").write_text("x")
        assert not out.exists() or names(out) == []
    assert names(tmp_path) == ["out"] and names(out) == ["a"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), appearing(tmp_path / "out", "export") as unfinished:
        (unfinished / "a").mkdir()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / "out.exporting"
    (left / "folder" / "deep").mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    with appearing(tmp_path / "out", "export") as unfinished:
        assert names(unfinished) == [lock.NAME]
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == []


def test_a_second_writer_is_refused_and_the_first_not_disturbed(tmp_path):
    out = tmp_path / "out"
    with appearing(out, "import") as unfinished:
        (unfinished / "a").write_text("x")
        with pytest.raises(ConfigError, match="in use by .*pid"), appearing(out, "import"):
            pass
    assert names(out) == ["a"]


def test_what_another_process_has_finished_meanwhile_is_left_alone(tmp_path):
    out = tmp_path / "out"
    check_free(out)
    out.mkdir()
    (out / "a").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"), appearing(out, "import"):
        pass
    assert names(tmp_path) == ["out"] and names(out) == ["a"]


def test_a_file_a_folder_with_content_and_a_link_are_not_free(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full" / "folder").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    check_free(tmp_path / "empty")
    check_free(tmp_path / "none")
    for name, match in {
        "file": "not empty", "full": "not empty", "link": "is a symbolic link",
        "dangling": "is a symbolic link",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            check_free(tmp_path / name)


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StorageError, match="Not a directory"),
        appearing(tmp_path / "file" / "out", "export"),
    ):
        pass
