"""When a run saves, and what it does about a save that failed; the checkpointer knows neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxgpt.checkpoint.processes import Alone
from jaxgpt.checkpoint.store import Checkpointer, print_line
from jaxgpt.errors import StorageError
from jaxgpt.runtime.leaving import error_line


@dataclass
class Saver:
    """Decides when to save, and what a failure means: one more try at the next step."""

    ckpt: Checkpointer
    every: int
    last: int  # newest step handed to the checkpointer, -1: none
    start_save: Callable[[], None]
    failures: int = 0  # since the last save that became durable
    retry: int | None = None  # the step of the second try
    asked: bool = False  # poll has asked for it

    def due(self, done: int) -> bool:
        return self.every > 0 and done % self.every == 0

    def poll(self) -> bool:
        """Learn how the saves in the background went; return, once, whether one is tried again.

        A second failure in a row is raised. Processes may learn of the same one at different steps,
        so it is not for each of them to say when the second try is.
        """
        self._tolerate_one(self.ckpt.poll)
        if self.retry is not None and self._durable() >= self.retry:
            self.failures, self.retry = 0, None
        again = self.failures > 0 and self.retry is None and not self.asked
        self.asked = self.asked or again
        return again

    def save(self, done: int) -> None:
        """Begin to save the state after `done` steps, unless that was done."""
        if done > self.last or self.failures:
            self.retry, self.asked = (done if self.failures else None), False
            self._tolerate_one(self.start_save)
            self.last = done

    def finish(self, done: int) -> None:
        """Return when the last step is durable; a failure is tried once more, then raised."""
        self._tolerate_one(self.ckpt.wait)
        if self._durable() < done:
            self.start_save()
            self.ckpt.wait()

    def _durable(self) -> int:
        return -1 if self.ckpt.durable_step is None else self.ckpt.durable_step

    def _tolerate_one(self, action: Callable[[], None]) -> None:
        try:
            action()
        except StorageError as error:
            self.failures += 1
            if self.failures > 1 or isinstance(error, Alone):
                raise
            print_line(error_line(f"{error}; trying again soon"))
