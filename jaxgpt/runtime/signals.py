"""Signals: what they ask a run for, and the way out when it cannot answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from jaxgpt.runtime.leaving import cursor, say


class Stop:
    """What signals have asked for, inside `with Stop() as stop:` on the main thread.

    `reason` is the name of the first SIGTERM, SIGHUP or SIGINT ("" while there was none): finish
    the step, save, exit 75. `save_now` is set by SIGUSR1, and cleared by whoever saves. A second
    SIGINT ends the process with 130 at once. Elsewhere than on the main thread it does nothing.

    The handlers run only when the main thread is back in Python, which it may never be; therefore
    SIGINT is also counted by a thread, fed by the interpreter's C-level handler through a pipe.
    """

    def __init__(self, notify: Callable[[str], None] | None = None):
        self.reason = ""
        self.save_now = False
        self._notify = notify or (lambda text: say(f"{text}\n"))
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
            # Ignored on entry means nohup, or a background job of a script: it stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="signals").start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()
            os.close(self._writer)  # ends the thread

    def _handle(self, number: int, frame: object) -> None:
        if number == signal.SIGUSR1:
            self.save_now = True
        else:
            self.reason = self.reason or signal.Signals(number).name

    def _watch(self, reader: int) -> None:
        interrupts = 0
        announced = False
        while numbers := os.read(reader, 64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts >= 2:
                say(f"{cursor()}\ninterrupted twice: exit without saving\n")
                os._exit(130)
            stopping = [number for number in numbers if number != signal.SIGUSR1]
            if stopping and not announced:
                announced = True
                # Other hosts are not to wait until the main thread is back in Python.
                self.reason = self.reason or signal.Signals(stopping[0]).name
                self._notify(
                    f"{signal.Signals(stopping[0]).name}: finishing the step and saving"
                    + ("; press Ctrl-C again to quit without" if interrupts else "")
                )
        os.close(reader)
