"""The thread that runs a batch reader ahead of its consumer on tf.data, and always lets go.

The graph is range -> map(stateless Python reader) -> prefetch. What goes wrong around it shapes
this file: a live tf.data iterator over Python code keeps the interpreter from exiting, an exception
crosses TensorFlow as flat text, and a main thread inside tf.data cannot be interrupted. So a feeder
thread owns the iterator, errors travel beside it, and the consumer waits on a queue with time-outs.
TensorFlow's import takes 2 s of a core: the first batches are read without it, and it begins when
the third is asked for, which is when the first step has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from jaxgpt.data.packing import Batch, split
from jaxgpt.errors import JaxgptError

# Small batches are read in groups, at most so large: a handover by tf.data takes about 0.5 ms, and
# in groups of 16 batches of 65 KB took half the time that they took in groups of 4.
GROUP, GROUP_BYTES = 16, 1 << 21
IMPORT_AT = 3  # the batch that is asked for when TensorFlow's import begins
POLL = 0.1  # seconds between looks at the stop flag
KERAS = "keras.src.optimizers"  # what TensorFlow imports of it as the last thing of its own import
Arrays = tuple[np.ndarray, ...]


def import_tensorflow() -> ModuleType:
    """Import TensorFlow for input pipelines only: quietly, and with every accelerator hidden."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # announces itself on stderr otherwise
    # It loads all of Keras (0.4 of 2.2 s of a core) so that its optimisers are registered; where
    # that fails it goes on without. Whoever wants tf.keras still gets it.
    keras = sys.modules.setdefault(KERAS, None)
    try:
        import tensorflow as tf
    finally:
        if keras is None:
            sys.modules.pop(KERAS, None)

    for kind in ("GPU", "TPU"):
        if tf.config.get_visible_devices(kind):  # by default TensorFlow takes all of its memory
            tf.config.set_visible_devices([], kind)
    return tf


class BatchStream:
    """An iterator of batches read ahead in the background; a context manager, closed on every path.

    `read(first, count)` reads so many batches from number `first` on, as arrays of the dtypes and
    shapes in `layout` with an axis of `count` before them; it must be pure. `finish` makes one
    Batch of them, with that axis. `where(number)` words a batch's place for errors. `next` raises
    what `read` raised of that batch, each time it is called. `prefetch` batches are made ahead,
    and more where they are small: they are read in groups of up to twice as many.
    """

    def __init__(
        self,
        read: Callable[[int, int], Arrays],
        finish: Callable[[Arrays], Batch],
        where: Callable[[int], str],
        *,
        layout: list[tuple[type[np.generic], tuple[int, ...]]],
        num_batches: int,
        prefetch: int,
    ):
        self._read, self._finish, self._where, self._layout = read, finish, where, layout
        size = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout)
        self._group = max(1, min(2 * prefetch, GROUP, GROUP_BYTES // max(1, size)))
        self._num_batches, self._prefetch = num_batches, max(1, prefetch // self._group)
        self._stop = threading.Event()
        self._errors: dict[int, BaseException] = {}  # by batch number
        self._ready: deque[Batch] = deque()  # the rest of a group
        self._queue: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=1)
        self._outcome: BaseException | None = None  # why the iteration is over
        self._jobs: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._asked, self._imported = 0, threading.Event()
        # Not in the feeder, which is a daemon: an interpreter that ends waits for the import.
        self._import = threading.Thread(target=self._import_ahead, name="tensorflow-import")
        atexit.register(self.close)
        # One reader: rows of a batch are fetched together by the system, and with two the
        # interpreter's lock made all of it 1.5 times slower.
        threading.Thread(target=self._work, name="batch-reader", daemon=True).start()
        self._feeder = threading.Thread(target=self._feed, name="batch-feeder", daemon=True)
        self._feeder.start()

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        self._asked += 1
        while self._outcome is None:
            if self._ready:
                return self._ready.popleft()
            item = self._take()
            if isinstance(item, list):
                self._ready.extend(item)
            else:
                self._outcome = item
                self.close()
        raise self._outcome

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop and release everything, within 5 s even while a read hangs; safe to call twice."""
        self._stop.set()
        self._outcome = self._outcome or ValueError("the batch stream is closed")
        self._jobs.put(None)
        self._feeder.join(timeout=5)
        atexit.unregister(self.close)

    def _take(self) -> list[Batch] | BaseException:
        while not self._stop.is_set():
            try:
                return self._queue.get(timeout=POLL)  # short waits: Ctrl-C acts at once
            except queue.Empty:
                if not self._feeder.is_alive() and self._queue.empty():
                    return RuntimeError("the batch feeder ended without a result")
        return ValueError("the batch stream is closed")

    # What follows runs in the feeder thread, or in threads of TensorFlow.

    def _feed(self) -> None:
        try:
            outcome = self._pump()
        except BaseException as error:
            outcome = error.with_traceback(None)  # its frames would keep the iterator alive
        self._put(outcome)

    def _pump(self) -> BaseException:
        """Move batches to the queue; return what ended it."""
        number = 0
        for whole, *arrays in self._groups():
            count = len(arrays[0])
            if count:
                self._put(split(self._finish(tuple(arrays))))
            number += count
            if not whole:
                return self._failure(number)
        return StopIteration()

    def _put(self, item: list[Batch] | BaseException) -> None:
        while not self._stop.is_set():
            # Here, for it holds the interpreter's lock for 0.4 s, when `next` has returned.
            if self._asked >= IMPORT_AT and self._import.ident is None:
                with contextlib.suppress(RuntimeError):  # an interpreter that ends starts none
                    self._import.start()
            try:
                return self._queue.put(item, timeout=POLL)
            except queue.Full:
                pass

    def _import_ahead(self) -> None:
        with contextlib.suppress(Exception):  # the feeder imports it again, and hands the error on
            import_tensorflow()
        self._imported.set()

    def _failure(self, number: int) -> BaseException:
        error = self._errors.get(number, ValueError("the batch stream is closed"))
        if isinstance(error, JaxgptError):
            located = type(error)(f"{error} ({self._where(number)})")
            located.__cause__ = error
            return located
        error.add_note(self._where(number))
        return error

    def _groups(self) -> Iterator[tuple]:
        """Yield what `_guarded` returns of each group, called by tf.data as soon as it is there.

        The first group is one batch: at the start each row brings in a block of 256 KiB.
        """
        groups = 1 - (1 - self._num_batches) // self._group if self._num_batches else 0
        number = 0
        while number < groups and not (number and self._imported.is_set()):
            yield self._guarded(np.int64(number))
            number += 1
        if number < groups and not self._stop.is_set():
            yield from self._dataset(number, groups).as_numpy_iterator()

    def _dataset(self, first: int, groups: int) -> Any:
        tf = import_tensorflow()  # is there, or raises again what went wrong

        def read(group: Any) -> tuple:
            types = [tf.bool, *(tf.as_dtype(dtype) for dtype, _ in self._layout)]
            whole, *arrays = tf.numpy_function(self._guarded, [group], types, stateful=False)
            shapes = [(None, *shape) for _, shape in self._layout]
            return whole, *map(tf.ensure_shape, arrays, shapes)

        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1  # leaves XLA's threads alone
        return (
            tf.data.Dataset.range(first, groups)
            .map(tf.autograph.experimental.do_not_convert(read))
            .prefetch(self._prefetch)
            .with_options(options)
        )

    def _guarded(self, group: np.int64) -> tuple:
        """Have a worker read a group of batches; return (whether all are good, arrays of those that
        are), never raise.

        The worker is a daemon thread, so a read that hangs is left behind when the stream closes.
        """
        first = 1 + (int(group) - 1) * self._group if group else 0
        last = min(1 + int(group) * self._group, self._num_batches)
        arrays: list[np.ndarray] = []
        done = threading.Event()
        self._jobs.put((first, last, arrays, done))
        while not done.wait(POLL) and not self._stop.is_set():
            pass
        if not done.is_set() or not arrays:
            return False, *(np.empty((0, *shape), dtype) for dtype, shape in self._layout)
        return len(arrays[0]) == last - first, *arrays

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            first, last, arrays, done = job
            arrays += self._try(first, last)
            done.set()
            del job, arrays  # an idle worker keeps no batch alive

    def _try(self, first: int, last: int) -> Arrays:
        """Return the batches before the first that cannot be read, whose error is kept.

        One by one: where a disk fails for good, those that were read before it count.
        """
        found: list[Arrays] = []
        for number in range(first, last):
            try:
                found.append(self._fitting(number, self._read(number, 1)))
            except BaseException as error:
                self._errors[number] = error
                break
        return tuple(map(np.concatenate, zip(*found, strict=True)))

    def _fitting(self, number: int, arrays: Arrays) -> Arrays:
        """Return the arrays of one batch, if they are what the layout says."""
        found = [(array.dtype, array.shape) for array in arrays]
        wanted = [(np.dtype(dtype), (1, *shape)) for dtype, shape in self._layout]
        if found != wanted:
            raise ValueError(f"batch {number} has dtypes and shapes {found} in place of {wanted}")
        return arrays
