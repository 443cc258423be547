"""The watchdog, in processes that it ends."""

from __future__ import annotations

from programs import STUCK_IN_C, outcome, python

from jaxgpt.runtime.watchdog import Watchdog


def test_a_stuck_phase_ends_the_process_with_76_its_name_and_the_stacks():
    code = """
import threading, time
from jaxgpt.runtime.watchdog import Watchdog
def wait_for_data(): time.sleep(60)
def other_thread(): time.sleep(60)
threading.Thread(target=other_thread).start()
with Watchdog(tick=0.05) as dog, dog.phase("data", 0.2, lambda: "reading x"): wait_for_data()
"""
    code, _, err = outcome(python(code))
    assert code == 76
    assert "in wait_for_data" in err and "in other_thread" in err
    assert "phase data (reading x) has taken" in err.splitlines()[-1] and "limit 0.2 s" in err


def test_phases_within_their_limits_are_left_alone_and_an_inner_one_suspends_the_outer():
    code = """
import time
from jaxgpt.runtime.watchdog import Watchdog
with Watchdog(tick=0.02) as dog:
    with dog.phase("step", 0.5):
        with dog.phase("save", 30): time.sleep(1)
        time.sleep(0.2)
    with dog.phase("step", 0.5): pass
    time.sleep(0.7)
print("done")
"""
    assert outcome(python(code)) == (0, "done\n", "")


def test_an_outer_phase_is_still_watched_after_an_inner_one():
    code = """
import time
from jaxgpt.runtime.watchdog import Watchdog
with Watchdog(tick=0.02) as dog, dog.phase("eval", 0.3):
    with dog.phase("save", 30): pass
    time.sleep(60)
"""
    code, _, err = outcome(python(code))
    assert code == 76 and "phase eval" in err


def test_a_process_that_never_releases_the_interpreter_lock_is_ended_with_its_stacks():
    code = f"""{STUCK_IN_C}
import time
from jaxgpt.runtime.watchdog import Watchdog
with Watchdog(tick=0.05, lock_margin=0.5) as dog, dog.phase("step", 1.0):
    time.sleep(0.3)  # so that the thread has armed the second line
    stuck_in_c(ctypes.PyDLL(None))
"""
    code, _, err = outcome(python(code))
    assert code == 1
    assert "in stuck_in_c" in err


def test_the_watchdog_is_not_held_up_by_a_full_pipe():
    code = """
import os, time
from jaxgpt.runtime.watchdog import Watchdog
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
with Watchdog(tick=0.05) as dog, dog.phase("data", 0.1): time.sleep(60)
"""
    process = python(code)
    assert process.wait(timeout=20) == 76
    process.communicate()


def test_every_phase_of_a_run_has_a_limit():
    assert set(Watchdog().limits) == {"open", "compile", "data", "step", "save", "eval"}
