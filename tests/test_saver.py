"""When a run saves and how it bears failures, with a checkpointer that fails on demand."""

from __future__ import annotations

import pytest

from jaxgpt.checkpoint.processes import Alone
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.errors import StorageError


class Recorder:
    """A checkpointer whose saves become durable at the next poll, but for `failing` steps."""

    def __init__(self, *failing: int):
        self.failing, self.saved, self.durable_step, self.pending = failing, [], None, None

    def start(self, step: int) -> None:
        self.wait()
        self.saved.append(step)
        self.pending = step

    def poll(self) -> None:
        step, self.pending = self.pending, None
        if step in self.failing:
            raise StorageError(f"step {step}: No space left on device")
        if step is not None:
            self.durable_step = step

    wait = poll


def run(recorder: Recorder, steps: int, every: int, last: int = -1) -> None:
    done = 0
    saver = Saver(recorder, every, last, lambda: recorder.start(done))
    while done < steps:
        done += 1
        again = saver.poll()
        if again or saver.due(done):
            saver.save(done)
    saver.finish(done)


def test_saves_at_the_interval_and_at_the_end():
    recorder = Recorder()
    run(recorder, 10, 4)
    assert recorder.saved == [4, 8, 10] and recorder.durable_step == 10


def test_without_an_interval_only_the_end_is_saved():
    recorder = Recorder()
    run(recorder, 3, 0)
    assert recorder.saved == [3]


def test_a_last_step_that_is_durable_is_not_saved_again():
    recorder = Recorder()
    run(recorder, 8, 4)
    assert recorder.saved == [4, 8]


def test_a_failed_save_is_tried_again_at_the_next_step_and_then_the_interval_goes_on():
    recorder = Recorder(4)
    run(recorder, 12, 4)
    assert recorder.saved == [4, 5, 8, 12] and recorder.durable_step == 12


def test_two_failures_in_a_row_end_the_run_and_two_apart_do_not():
    recorder = Recorder(4, 5)
    with pytest.raises(StorageError, match="step 5"):
        run(recorder, 12, 4)
    apart = Recorder(4, 8)
    run(apart, 12, 4)
    assert apart.saved == [4, 5, 8, 9, 12]


def test_a_last_save_that_fails_is_tried_once_more_and_then_raised():
    recorder = Recorder(10)
    with pytest.raises(StorageError, match="step 10"):
        run(recorder, 10, 10)
    assert recorder.saved == [10, 10]


def test_a_failure_that_others_may_not_share_is_not_borne():
    recorder = Recorder()

    def fail() -> None:
        raise Alone("process 1: No space left on device")

    saver = Saver(recorder, 4, -1, fail)
    with pytest.raises(Alone):
        saver.save(4)
