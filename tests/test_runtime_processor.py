"""The processor's name and key, and folders for caches."""

from __future__ import annotations

import os
import platform
import stat

import pytest

from jaxgpt.runtime import processor


def test_the_processor_key_tells_instruction_sets_apart(monkeypatch):
    keys = set()
    for flags in ("avx2", "avx2 avx512_bf16", "avx512_bf16 avx2"):
        monkeypatch.setattr(processor, "_cpu_info", lambda f=flags: {"model name": "X", "flags": f})
        keys.add(processor.cpu_key())
    assert len(keys) == 2  # the order of flags does not matter


@pytest.mark.parametrize(
    ("info", "native"),
    [
        ({"flags": "avx2 avx512f"}, False),
        ({"flags": "avx2 avx512_bf16"}, True),
        ({"flags": "avx2 amx_bf16"}, True),
        ({}, True),  # not x86: no claim, no advice
    ],
)
def test_native_bfloat16_is_read_from_the_flags(monkeypatch, info, native):
    monkeypatch.setattr(processor, "_cpu_info", lambda: info)
    assert processor.has_native_bf16() is native


def test_cache_folders_are_open_to_their_owner_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jaxgpt").mkdir(mode=0o777)
    (tmp_path / "jaxgpt").chmod(0o777)  # whatever the umask
    folder, problem = processor.cache_folder("xla", "key")
    assert problem == "" and folder == tmp_path / "jaxgpt" / "xla" / "key"
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_cache_folder_of_someone_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    processor.cache_folder("xla")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder, problem = processor.cache_folder("xla")
    assert folder is None
    assert f"belongs to user {owner}, not to {owner + 1}" in problem


def test_a_cache_that_cannot_be_made_is_named_not_raised(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder, problem = processor.cache_folder("xla")
    assert folder is None and "file" in problem


def test_processes_with_the_same_cores_of_a_machine_have_one_key_whatever_its_name(monkeypatch):
    key = processor.cores_key()
    monkeypatch.setattr(platform, "node", lambda: "a-container")
    assert processor.cores_key() == key
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {70, 71}, raising=False)
    assert processor.cores_key() != key
