"""Ways out of a process, with what could hold it up."""

from __future__ import annotations

import os
import time

from programs import STUCK_IN_C, outcome, python


def test_leaving_runs_exit_handlers_flushes_and_keeps_the_code():
    code = """
import atexit, sys
from jaxgpt.runtime.leaving import hard_exit
atexit.register(lambda: sys.stdout.write("handler "))
sys.stdout.write("text ")
hard_exit(75)
"""
    assert outcome(python(code)) == (75, "text handler ", "")


def test_leaving_does_not_wait_for_threads_that_never_end():
    code = """
import threading, time
from jaxgpt.runtime.leaving import hard_exit
threading.Thread(target=time.sleep, args=(60,)).start()
hard_exit(0)
"""
    began = time.monotonic()
    assert outcome(python(code))[0] == 0
    assert time.monotonic() - began < 10.0


def test_a_stuck_exit_handler_is_given_up_in_time():
    code = f"""{STUCK_IN_C}
import atexit
from jaxgpt.runtime.leaving import hard_exit
atexit.register(stuck_in_c, ctypes.CDLL(None))
hard_exit(75, after=0.3)
"""
    began = time.monotonic()
    assert outcome(python(code))[0] == 75
    assert time.monotonic() - began < 10.0


def test_a_reader_that_has_gone_does_not_change_the_exit_code():
    code = """
import sys
from jaxgpt.runtime.leaving import hard_exit
sys.stdout.write("x")
hard_exit(0)
"""
    reader, writer = os.pipe()
    os.close(reader)
    process = python(code, stdout=writer)
    os.close(writer)
    assert process.wait(timeout=20) == 0
    process.communicate()
