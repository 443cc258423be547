"""What processes agree on around a checkpoint, with the others replaced."""

from __future__ import annotations

import socket
import threading
import zlib

import pytest

from jaxgpt.checkpoint import processes
from jaxgpt.errors import ConfigError, StorageError
from jaxgpt.runtime import store


def test_one_process_sees_what_it_wrote(tmp_path):
    (tmp_path / "lock").write_text("mine")
    processes.check_shared(tmp_path / "lock")


@pytest.mark.parametrize("found", [None, "of an earlier run, on a disk of this host"])
def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path, monkeypatch, found):
    if found:
        (tmp_path / "lock").write_text(found)
    monkeypatch.setattr(processes, "from_first", lambda value: zlib.crc32(b"of process 0"))
    with pytest.raises(ConfigError, match="on a file system that all hosts share"):
        processes.check_shared(tmp_path / "lock", patience=0.0)


def others_see(monkeypatch, *newest: int) -> None:
    """Let this be the last process; the ones before it see these steps as the newest."""
    monkeypatch.setattr(store, "process_index", lambda: len(newest))
    monkeypatch.setattr(
        store,
        "decide",
        lambda name, value, rule, timeout: rule([[s, -i] for i, s in enumerate(newest)] + [value]),
    )


def test_the_newest_step_is_the_newest_that_any_process_sees(tmp_path, monkeypatch):
    others_see(monkeypatch, 4, 6)
    (tmp_path / "6.ok.json").touch()
    assert processes.agree_on_newest(tmp_path, 5) == 6
    assert processes.agree_on_newest(tmp_path, 8) == 8


def test_a_step_that_is_seen_a_little_later_is_waited_for(tmp_path, monkeypatch):
    others_see(monkeypatch, 6)
    late = threading.Timer(0.3, (tmp_path / "6.ok.json").touch)
    late.start()
    assert processes.agree_on_newest(tmp_path, -1, patience=30.0) == 6
    late.join()


def test_a_host_that_does_not_see_the_newest_step_is_named_with_who_sees_it(tmp_path, monkeypatch):
    others_see(monkeypatch, 4, 6)
    with pytest.raises(ConfigError) as error:
        processes.agree_on_newest(tmp_path, 5, patience=0.0)
    assert f"{tmp_path}/6.ok.json: process 2 ({socket.gethostname()}) does not see" in str(
        error.value
    )
    assert "what process 1 sees; run.dir must be one folder" in str(error.value)


def test_files_that_only_the_first_process_sees_are_no_damage(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.touch()
    monkeypatch.setattr(store, "num_processes", lambda: 2)
    monkeypatch.setattr(processes, "from_first", lambda value: 1)
    processes.check_visible([here])
    with pytest.raises(StorageError, match="there: process .* does not see what process 0 sees"):
        processes.check_visible([here, there], patience=0.0)
    monkeypatch.setattr(processes, "from_first", lambda value: 0)  # missing there as well
    processes.check_visible([here, there], patience=0.0)


def test_a_process_that_fails_where_others_cannot_hear_of_it_ends_alone(monkeypatch):
    waited: list[float] = []

    def nobody(name: str, value: object, rule: object, timeout: float) -> None:
        waited.append(timeout)
        raise TimeoutError("published: nothing from process 0")

    def fail() -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(store, "num_processes", lambda: 2)
    monkeypatch.setattr(store, "decide", nobody)
    with pytest.raises(processes.Alone, match="disk full"):
        processes.together(fail, "published", 1200.0, 20.0)
    with pytest.raises(StorageError, match="nothing from process 0") as error:
        processes.together(lambda: 0, "published", 1200.0, 20.0)
    assert not isinstance(error.value, processes.Alone)
    assert waited == [20.0, 1200.0]


def test_storage_that_fails_in_a_library_is_borne_by_one_process_only(monkeypatch):
    for count, kind in ((1, OSError), (2, processes.Alone)):
        monkeypatch.setattr(store, "num_processes", lambda count=count: count)
        with pytest.raises(kind), processes.alone():
            raise OSError(28, "No space left on device")
