"""What processes agree on around a checkpoint, with the others replaced."""

from __future__ import annotations

import zlib

import pytest

from jaxgpt.checkpoint import processes
from jaxgpt.errors import ConfigError


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
