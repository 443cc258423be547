"""The watchdog, in processes that it ends."""

from __future__ import annotations

import signal
import time

from programs import STUCK_IN_C, outcome, python

from jaxgpt.runtime.watchdog import LIMITS, Watchdog


def test_a_stuck_phase_ends_the_process_with_76_its_name_and_the_stacks():
    code = """
import threading, time
from jaxgpt.runtime.watchdog import LIMITS, Watchdog
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
from jaxgpt.runtime.watchdog import LIMITS, Watchdog
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
from jaxgpt.runtime.watchdog import LIMITS, Watchdog
with Watchdog(tick=0.02) as dog, dog.phase("eval", 0.3):
    with dog.phase("save", 30): pass
    time.sleep(60)
"""
    code, _, err = outcome(python(code))
    assert code == 76 and "phase eval" in err


def test_a_process_that_never_releases_the_interpreter_lock_is_ended_with_its_stacks():
    code = f"""{STUCK_IN_C}
import time
from jaxgpt.runtime.watchdog import LIMITS, Watchdog
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
from jaxgpt.runtime.watchdog import LIMITS, Watchdog
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
    phases = {"open", "compile", "data", "step", "wait", "save", "eval", "stop"}
    assert set(Watchdog().limits) == phases


def test_a_stuck_step_is_known_by_the_steps_before_it_long_before_the_limit():
    code = """
import time
from jaxgpt.runtime import watchdog
watchdog.AT_LEAST = 0.3
with watchdog.Watchdog(tick=0.02) as dog:
    for _ in range(watchdog.ENOUGH):
        with dog.phase("step"): pass
    with dog.phase("step"): time.sleep(60)
"""
    code, _, err = outcome(python(code))
    assert code == 76 and "phase step has taken" in err and "limit 0.3 s" in err


def test_the_limit_is_learned_from_the_longest_of_enough_steps_of_the_same_program():
    dog = Watchdog()
    assert limit_of(dog, "step") == LIMITS["step"]
    for seconds in (7.0, 8.0) * 10:
        dog._learn("step", seconds)
    assert limit_of(dog, "step") == 20 * 8.0
    assert limit_of(dog, "wait") == LIMITS["wait"]
    dog._learn("step", 1000.0)
    assert limit_of(dog, "step") == LIMITS["step"]
    dog._learn("compile", 60.0)
    assert limit_of(dog, "step") == LIMITS["step"]
    for _ in range(20):
        dog._learn("step", 0.01)
    assert limit_of(dog, "step") == 120.0


def limit_of(dog: Watchdog, name: str) -> float:
    with dog.phase(name):
        return dog._phases[-1].limit


def test_time_for_which_the_process_was_suspended_does_not_count():
    code = """
import time
from jaxgpt.runtime import watchdog
watchdog.SUSPENDED = 0.5
with watchdog.Watchdog(tick=0.05) as dog, dog.phase("step", 2.5):
    print("started", flush=True)
    for _ in range(10): time.sleep(0.1)
print("done")
"""
    process = python(code)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    assert outcome(process) == (0, "done\n", "")


def test_a_phase_counts_without_the_phases_inside_it():
    dog = Watchdog()
    with dog.phase("step"):
        with dog.phase("data"):
            time.sleep(0.2)
            assert dog.current()[0] == "data" and 0.2 <= dog.current()[1] < 10
        assert dog.current()[0] == "step"
    dog.begin(7)
    step, clock, spent = dog.mark
    assert dog.current() == ("", 0.0) and step == 7 and clock <= time.monotonic()
    assert spent["data"] >= 0.2 > spent["step"]
