"""The background reader: hands over what was read, and lets go on every path, in every process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxgpt.data import feeder
from jaxgpt.data.feeder import BatchStream
from jaxgpt.data.packing import Batch
from jaxgpt.errors import StorageError

# Streams for programs of their own; a read that hangs is a sleep of ten minutes.
STREAM = """
import signal, threading, time
import numpy as np
from jaxgpt.data.feeder import BatchStream
from jaxgpt.data.packing import Batch

reading = threading.Event()

def batches_from(first, count):
    return (np.arange(first, first + count, dtype=np.int32).repeat(2).reshape(count, 1, 2),)

def hang(first, count):
    reading.set()
    time.sleep(600)

def fail(first, count):
    raise OSError("disk on fire")

def open_stream(read):
    finish = lambda arrays: Batch(arrays[0], arrays[0], arrays[0])
    where = lambda number: f"batch {number}"
    layout = [(np.int32, (1, 2))]
    return BatchStream(read, finish, where, layout=layout, num_batches=9, prefetch=2)

def leave():
    print(time.time(), flush=True)
"""
PROGRAMS = {
    "by an error of a reader, beside streams that ended or were left in the middle": (
        """
ended, middle = open_stream(batches_from), open_stream(batches_from)
failing = open_stream(fail)
for _ in ended: pass
next(middle)
leave()
next(failing)
""",
        1,
    ),
    "normally, beside reads that hang, one closed and one not": (
        """
closed, forgotten = open_stream(hang), open_stream(hang)
reading.wait()
start = time.monotonic()
closed.close()
closed.close()
assert time.monotonic() - start < 20
leave()
""",
        0,
    ),
    "by Ctrl-C while it waits for a read that hangs": (
        """
from jaxgpt.data.feeder import import_tensorflow
import_tensorflow()  # or the interpreter waits for it, and forgets why it ends: exit code 1
with open_stream(hang) as stream:
    reading.wait()
    threading.Timer(0.5, lambda: (leave(), signal.raise_signal(signal.SIGINT))).start()
    next(stream)
""",
        -signal.SIGINT,
    ),
}


@pytest.fixture(scope="module")
def exits() -> Iterator[dict[str, subprocess.Popen]]:
    """Start all programs at once: each spends seconds on imports."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", STREAM + program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (program, _) in PROGRAMS.items()
    }
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_is_gone_within_seconds_of_leaving(exits, name):
    process = exits[name]
    left = float(process.stdout.readline() or "nan")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == PROGRAMS[name][1], errors
    assert time.time() - left < 60  # a hanging read sleeps for 600; loaded machines take a while
    if process.returncode == 1:
        assert errors.endswith("OSError: disk on fire\nbatch 0\n")


def make(read, num_batches: int = 5, prefetch: int = 2, size: int = 2) -> BatchStream:
    """Return the stream of the batches that `read` makes one by one."""

    def read_group(first: int, count: int) -> tuple[np.ndarray, ...]:
        batches = [read(number) for number in range(first, first + count)]
        return tuple(map(np.stack, zip(*batches, strict=True)))

    return BatchStream(
        read_group,
        lambda arrays: Batch(arrays[0], arrays[0], arrays[0]),
        lambda number: f"batch {number}",
        layout=[(np.int32, (1, size))],
        num_batches=num_batches,
        prefetch=prefetch,
    )


def batch_of(number: int, size: int = 2) -> tuple[np.ndarray]:
    return (np.full((1, size), number, np.int32),)


def test_batches_come_in_order_whatever_the_readers_take(monkeypatch):
    rng = np.random.default_rng(0)
    delays = rng.uniform(0, 0.02, 40)

    def slow(number: int) -> tuple[np.ndarray]:
        time.sleep(delays[number])
        return batch_of(number)

    with make(slow, num_batches=40) as stream:
        assert [int(batch.tokens[0, 0]) for batch in stream] == list(range(40))
        assert list(stream) == []  # the end stays the end


@pytest.mark.parametrize("prefetch", [1, 2, 8, 64])
def test_batches_are_read_in_groups_that_follow_each_other_after_a_first_one(prefetch):
    groups = []

    def read(first: int, count: int) -> tuple[np.ndarray]:
        groups.append((first, count))
        return (np.arange(first, first + count).astype(np.int32).reshape(count, 1, 1),)

    for num_batches in (0, 1, 2, 33):
        groups.clear()
        with BatchStream(
            read,
            lambda arrays: Batch(arrays[0], arrays[0], arrays[0]),
            str,
            layout=[(np.int32, (1, 1))],
            num_batches=num_batches,
            prefetch=prefetch,
        ) as stream:
            got = [batch.tokens.tolist() for batch in stream]
        assert got == [[[number]] for number in range(num_batches)]
        assert [n for first, count in groups for n in range(first, first + count)] == list(
            range(num_batches)
        )
        assert groups[:1] == [(0, 1)][:num_batches]
        assert max((count for _, count in groups), default=0) <= min(16, 2 * prefetch)


def test_an_error_keeps_its_type_and_text_and_says_where(monkeypatch):
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def read(number: int) -> tuple[np.ndarray]:
        if number == 3:
            raise Odd(1, 2)
        return batch_of(number)

    seen = []
    with make(read) as stream:
        with pytest.raises(Odd, match="1 and 2") as caught:
            for batch in stream:
                seen.append(int(batch.tokens[0, 0]))
    assert seen == [0, 1, 2]
    assert caught.value.__notes__ == ["batch 3"]


def test_an_expected_error_says_where_in_its_one_line():
    def read(number: int) -> tuple[np.ndarray]:
        raise StorageError("/data/x.shard: Input/output error")

    with make(read) as stream:
        with pytest.raises(StorageError) as caught:
            next(stream)
    assert str(caught.value) == "/data/x.shard: Input/output error (batch 0)"


def test_a_batch_of_another_shape_is_an_error():
    with make(lambda number: (np.zeros((1, 3), np.int32),)) as stream:
        with pytest.raises(Exception, match="shape"):
            next(stream)


def test_a_closed_stream_says_so_and_closes_twice():
    stream = make(batch_of)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_no_more_batches_are_read_ahead_than_asked_for():
    read = []

    def note(number: int) -> tuple[np.ndarray]:
        read.append(number)
        return batch_of(number, size)

    size = feeder.GROUP_BYTES // 8  # in int32, half of what may be read at once
    with make(note, num_batches=1000, prefetch=2, size=size) as stream:
        feeder.import_tensorflow()
        next(stream)
        time.sleep(0.5)
        ahead = len(read)
    # In pairs: 1 taken, 1 in the queue, 1 in the hand of the feeder, 1 prefetched, 1 in the map.
    assert 1 <= ahead <= 9


def test_waiting_costs_no_processor_time():
    feeder.import_tensorflow()

    def slow(number: int) -> tuple[np.ndarray]:
        time.sleep(0.5)
        return batch_of(number)

    with make(batch_of, num_batches=1000) as full, make(slow) as empty:
        next(full)
        next(empty)
        began = time.process_time()
        next(empty)  # meanwhile `full` has no room
        assert time.process_time() - began < 0.2  # of at least 0.4 s


def alive() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("batch-")]


def soon(condition: Callable[[], bool]) -> bool:
    """Tell whether something is true within 5 s."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_nothing_is_left_of_a_closed_stream(taken):
    with make(batch_of) as stream:
        for _ in range(taken):
            next(stream)
        assert alive()
    assert soon(lambda: alive() == [])


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
def test_nothing_is_left_of_a_stream_that_failed_and_was_not_closed(error):
    def read(number: int) -> tuple[np.ndarray]:
        if number == 2:
            raise error("on fire")
        return batch_of(number)

    stream = make(read)
    with pytest.raises(error):
        list(stream)
    assert soon(lambda: alive() == [])
    stream.close()
    with pytest.raises(error):  # closing does not hide why it ended
        next(stream)


def test_batches_do_not_wait_for_tensorflow(monkeypatch):
    imports, may_end = feeder.import_tensorflow, threading.Event()
    monkeypatch.setattr(feeder, "import_tensorflow", lambda: may_end.wait(60) and imports())
    monkeypatch.setattr(feeder, "GROUP", 2)  # groups of 1, 2, 2, ...
    with make(batch_of, num_batches=40) as stream:
        assert [int(next(stream).tokens[0, 0]) for _ in range(8)] == list(range(8))
        assert not may_end.is_set()
        may_end.set()
        assert [int(batch.tokens[0, 0]) for batch in stream] == list(range(8, 40))


def test_closing_does_not_wait_for_tensorflow(monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(feeder, "import_tensorflow", lambda: may_end.wait(60))
    try:
        with make(batch_of) as stream:
            for _ in range(3):
                next(stream)
        assert soon(lambda: alive() == [])
        assert not may_end.is_set()
    finally:
        may_end.set()


def test_an_import_of_tensorflow_that_fails_is_raised_after_the_first_batches(monkeypatch):
    def fail() -> None:
        raise ImportError("libtensorflow is gone")

    monkeypatch.setattr(feeder, "import_tensorflow", fail)
    with make(batch_of, num_batches=10_000) as stream:
        next(stream), next(stream)
        with pytest.raises(ImportError, match="is gone"):
            list(stream)


def test_tensorflow_is_not_imported_beside_the_first_step(monkeypatch):
    """In `train` the second batch is asked for while the first step runs, the third after it."""
    begun = threading.Event()
    monkeypatch.setattr(feeder, "import_tensorflow", begun.set)
    with make(batch_of, num_batches=10_000) as stream:
        next(stream), next(stream)
        assert not begun.wait(0.5)
        next(stream)
        assert begun.wait(60)


def test_tensorflow_comes_without_keras_which_can_still_be_had():
    code = (
        "import sys; from jaxgpt.data.feeder import KERAS, import_tensorflow;"
        "tf = import_tensorflow(); assert 'keras' not in sys.modules and KERAS not in sys.modules;"
        "assert tf.keras.optimizers.SGD and 'keras' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_tensorflow_is_kept_from_accelerators(monkeypatch):
    from jaxgpt.data.feeder import import_tensorflow

    tf = import_tensorflow()
    hidden = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [f"a {kind}"])
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda devices, kind: hidden.append((kind, devices))
    )
    import_tensorflow()
    assert dict(hidden) == {"GPU": [], "TPU": []}


def test_tensorflow_sees_no_accelerator():
    from jaxgpt.data.feeder import import_tensorflow

    tf = import_tensorflow()
    assert {device.device_type for device in tf.config.get_visible_devices()} == {"CPU"}
