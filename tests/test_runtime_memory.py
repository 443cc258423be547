"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path

from jaxgpt.runtime.memory import give_back, pause_collector, resume_collector

BYTES, PIECE = 64 * 2**20, 64 * 2**10  # pieces that malloc keeps for later


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024


def test_what_was_freed_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE) for _ in range(BYTES // PIECE)]
    last = libc.malloc(PIECE)  # stays, so that free cannot shrink the heap by itself
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces:
        libc.free(piece)
    before = resident()
    give_back()
    after = resident()
    libc.free(last)
    assert before - after > BYTES // 2


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    give_back()


def test_the_collector_is_on_again_after_a_pause():
    pause_collector()
    assert not gc.isenabled()
    resume_collector()
    assert gc.isenabled()


def test_a_collector_that_others_have_turned_off_stays_off():
    gc.disable()
    try:
        pause_collector()
        resume_collector()
        assert not gc.isenabled()
    finally:
        gc.enable()
