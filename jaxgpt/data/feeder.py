"""The thread that runs a batch reader ahead of its consumer on tf.data, and always lets go.

The graph is range -> map(stateless Python reader) -> prefetch. What goes wrong around it shapes
this file: a live tf.data iterator over Python code keeps the interpreter from exiting, an exception
crosses TensorFlow as flat text, and a main thread inside tf.data cannot be interrupted. So a feeder
thread owns the iterator, errors travel beside it, and the consumer waits on a queue with time-outs.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from jaxgpt.data.packing import Batch
from jaxgpt.errors import JaxgptError

GROUP_BYTES = 1 << 21  # small batches go through tf.data in groups: a handover takes about 0.5 ms
POLL = 0.1  # seconds between looks at the stop flag
Arrays = tuple[np.ndarray, ...]


def import_tensorflow() -> ModuleType:
    """Import TensorFlow for input pipelines only: quietly, and with every accelerator hidden."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # announces itself on stderr otherwise
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        if tf.config.get_visible_devices(kind):  # by default TensorFlow takes all of its memory
            tf.config.set_visible_devices([], kind)
    return tf


class BatchStream:
    """An iterator of batches read ahead in the background; a context manager, closed on every path.

    `read(number)` reads batch `number` as arrays of the dtypes and shapes in `layout`; it must be
    pure. `finish` makes the Batch of them. `where(number)` words a batch's place for errors. `next`
    raises what `read` raised, each time it is called. `prefetch` batches are made ahead.
    """

    def __init__(
        self,
        read: Callable[[int], Arrays],
        finish: Callable[[Arrays], Batch],
        where: Callable[[int], str],
        *,
        layout: list[tuple[type[np.generic], tuple[int, ...]]],
        num_batches: int,
        prefetch: int,
    ):
        self._read, self._finish, self._where, self._layout = read, finish, where, layout
        size = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout)
        self._group = max(1, min(prefetch // 2, GROUP_BYTES // max(1, size)))
        self._num_batches, self._prefetch = num_batches, max(1, prefetch // self._group)
        self._stop = threading.Event()
        self._errors: dict[int, BaseException] = {}  # by batch number
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=self._group)
        self._outcome: BaseException | None = None  # why the iteration is over
        self._jobs: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._tf = import_tensorflow()  # not in the thread: it may still run when the process exits
        atexit.register(self.close)
        # One reader: rows of a batch are fetched together by the system, and with two the
        # interpreter's lock made all of it 1.5 times slower.
        threading.Thread(target=self._work, name="batch-reader", daemon=True).start()
        self._feeder = threading.Thread(target=self._feed, name="batch-feeder", daemon=True)
        self._feeder.start()

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        if self._outcome is None:
            item = self._take()
            if isinstance(item, Batch):
                return item
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

    def _take(self) -> Batch | BaseException:
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
        """Move batches from tf.data to the queue; return what ended it."""
        number, width = 0, len(self._layout)
        for count, *arrays in self._dataset().as_numpy_iterator():
            for index in range(count):
                batch = tuple(arrays[index * width : (index + 1) * width])
                self._put(self._finish(batch))
            number += count
            if count < self._group and number < self._num_batches:
                return self._failure(number)
        return StopIteration()

    def _put(self, item: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=POLL)
            except queue.Full:
                pass

    def _failure(self, number: int) -> BaseException:
        error = self._errors.get(number, ValueError("the batch stream is closed"))
        if isinstance(error, JaxgptError):
            located = type(error)(f"{error} ({self._where(number)})")
            located.__cause__ = error
            return located
        error.add_note(self._where(number))
        return error

    def _dataset(self) -> Any:
        tf = self._tf

        def read(first: Any) -> tuple:
            types = [tf.int64, *(tf.as_dtype(dtype) for dtype, _ in self._layout * self._group)]
            count, *arrays = tf.numpy_function(self._guarded, [first], types, stateful=False)
            shapes = [shape for _, shape in self._layout * self._group]
            return count, *map(tf.ensure_shape, arrays, shapes)

        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1  # leaves XLA's threads alone
        return (
            tf.data.Dataset.range(0, self._num_batches, self._group)
            .map(tf.autograph.experimental.do_not_convert(read))
            .prefetch(self._prefetch)
            .with_options(options)
        )

    def _guarded(self, first: np.int64) -> tuple:
        """Have a worker read a group of batches; return (how many are good, arrays), never raise.

        The worker is a daemon thread, so a read that hangs is left behind when the stream closes.
        """
        numbers = range(int(first), min(int(first) + self._group, self._num_batches))
        arrays: list[np.ndarray] = []
        done = threading.Event()
        self._jobs.put((numbers, arrays, done))
        while not done.wait(POLL) and not self._stop.is_set():
            pass
        width = len(self._layout)
        good = len(arrays) // width if done.is_set() else 0
        filling = [np.zeros(shape, dtype) for dtype, shape in self._layout] * (self._group - good)
        return good, *arrays[: good * width], *filling

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            numbers, arrays, done = job
            for number in numbers:
                try:
                    arrays += self._read(number)
                except BaseException as error:
                    self._errors[number] = error
                    break
            done.set()
            del job, arrays  # an idle worker keeps no batch alive
