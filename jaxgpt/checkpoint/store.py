"""Saving and restoring a run: durable, verified, or not at all.

`save` returns once the values are off the device; a thread of this room writes them, makes every
file durable, hashes it and only then publishes the commit record. `restore_latest` believes nothing
that it has not checked: record, digests, shapes, files, and in the end the fingerprints of the very
arrays it returns. All processes call every method in the same order; names and deletions are the
first one's (`keeping`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jaxgpt.checkpoint import arrays, commit, describe, fingerprint, keeping, lock, processes
from jaxgpt.checkpoint.faults import fault
from jaxgpt.checkpoint.load import find_tokenizer, load_params
from jaxgpt.checkpoint.record import Damaged, Record
from jaxgpt.checkpoint.verify import Wanted, print_line, read_record, restore_state
from jaxgpt.durable import storage_errors, storage_reason
from jaxgpt.errors import ConfigError, NothingRestorable, StorageError

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

__all__ = ["Checkpointer", "Restored", "find_tokenizer", "load_params"]


@dataclass(frozen=True)
class Restored:
    """A verified state and the record it was verified against."""

    state: Any
    record: Record


class Checkpointer:
    """The checkpoints of one run in one folder: a resource, to be closed on every path.

    The `keep` newest finite steps and all multiples of `keep_every` (0: none) survive. `identity`
    holds named digests (model, tokenizer, data, ...) that must agree on resume; `config_dict` is
    saved with every step. No wait is longer than `timeout` seconds. Raises ConfigError if the
    folder cannot be used or another job writes to it.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        identity: dict[str, str],
        config_dict: dict[str, Any],
        log: Callable[[str], None] = print_line,
        timeout: float = 1200.0,
    ) -> None:
        self.root = Path(directory).absolute()
        self.durable_step: int | None = None  # newest step published or restored by this process
        self._keep, self._keep_every = keep, keep_every
        self._identity, self._config = dict(identity), config_dict
        self._log, self._timeout = log, timeout
        self._last: int | None = None  # the step restored, or the last one whose save began
        self._finite: dict[int, bool] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._lock: IO[str] | None = None
        if processes.is_first():
            self._lock = keeping.open_folder(self.root, log)
        processes.barrier("folder", timeout)
        processes.check_shared(self.root / lock.NAME)

    @functools.cached_property
    def _writer(self) -> ocp.AsyncCheckpointer:
        """Opened by the first save: Orbax is 0.3 s of a core, which a start lacks for compiling."""
        return arrays.open_writer(self._timeout)

    def steps(self) -> list[int]:
        """Return the published steps, ascending."""
        return commit.list_steps(self.root)

    # Saving.

    def save(self, step: int, state: Any, *, position: int, meta: dict[str, Any]) -> None:
        """Begin to save `state`; on return its buffers may be donated.

        `step` counts updates, `position` samples. Waits for a save that is still running. A step
        that is saved with the same values is left alone; steps newer than the one resumed from are
        set aside. Raises StorageError (also that of the previous save), ConfigError if other values
        are in the way, ValueError or TypeError for a `meta` that is not plain JSON.
        """
        if self._thread is not None and self._thread.is_alive():
            self._log(f"checkpoint step {step}: waiting for step {self._last}, still being written")
        self.wait()
        if self._last is not None and step < self._last:
            raise ValueError(f"step {step} is saved after step {self._last}")
        numbers = fingerprint.hold(state)
        draft = describe.draft(
            state,
            step=int(step),
            position=int(position),
            identity=self._identity,
            meta=meta,
            config=self._config,
        )
        if self._is_saved(draft, numbers):
            self._log(f"checkpoint step {step}: is saved already")
            return
        superseded = [old for old in self.steps() if self._last is None or old > self._last]
        if superseded and self._last is None:
            raise ConfigError(
                f"{self.root}: holds step {superseded[-1]}, but this run did not resume from it; "
                "resume, set run.overwrite=true, or use another run.dir"
            )
        self._last = draft.step
        self._start(draft, state, numbers, superseded)

    def _start(
        self, draft: Record, state: Any, numbers: dict[str, Any], superseded: list[int]
    ) -> None:
        began, directory = time.monotonic(), self.root / str(draft.step)
        try:
            with storage_errors(f"{directory}: not saved"):
                processes.together(
                    lambda: keeping.make_room(self.root, draft.step, superseded, self._log)
                )
                with processes.alone():
                    fault("save.begin")
                    arrays.start_write(self._writer, directory, state)
                    fault("save.copied")
        except processes.Alone:
            raise
        except Exception:
            with contextlib.suppress(Exception):
                self._writer.wait_until_finished()
            keeping.discard(self.root, draft.step, self._log)
            raise
        self._thread = threading.Thread(
            target=self._complete, args=(draft, numbers, began), name=f"checkpoint-{draft.step}"
        )
        self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong in the background since the last call: StorageError, or a bug."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last save is durable; raises like `poll`.

        Raises StorageError after `timeout` seconds, by default those of the constructor.
        """
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while self._thread is not None:
            self._thread.join(min(0.2, max(0.0, deadline - time.monotonic())))
            if not self._thread.is_alive():
                self._thread = None
            elif time.monotonic() >= deadline:
                raise StorageError(f"{self.root / str(self._last)}: not saved after {limit:.0f} s")
        self.poll()

    def close(self) -> None:
        """Wait for the last save and give the folder back; raises like `wait`; may be repeated."""
        try:
            self.wait()
        finally:
            if self._thread is None and "_writer" in vars(self):
                self._writer.close()
                del self._writer
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _is_saved(self, draft: Record, numbers: dict[str, Any]) -> bool:
        if draft.step != self._last or draft.step not in self.steps():
            return False
        saved = read_record(self.root, draft.step)
        same = describe.with_fingerprints(draft, numbers)
        if (saved.leaves, saved.position) != (same.leaves, same.position):
            raise ConfigError(
                f"{self.root / str(draft.step)}: this step is saved with other values; "
                "resume from it, set run.overwrite=true, or use another run.dir"
            )
        return True

    def _complete(self, draft: Record, numbers: dict[str, Any], began: float) -> None:
        """The background thread: from the end of the copy to the end of retention."""
        step, directory = draft.step, self.root / str(draft.step)

        def write_out() -> None:
            with storage_errors(f"{directory}: not saved"):
                self._write_out(draft, numbers, began)

        try:
            with storage_errors(f"{directory}: not saved"):
                processes.together(write_out, "published", self._timeout, processes.FAILED)
                if not processes.appears(self.root / f"{step}{commit.SUFFIX}"):
                    raise StorageError(f"{directory}: the first process did not publish it")
                self.durable_step = step
                keeping.retain(self.root, self._keep, self._keep_every, self._finite, self._log)
        except BaseException as error:  # nobody is above a thread: poll() raises it
            self._failure = error
            keeping.discard(self.root, step, self._log)
            if not threading.main_thread().is_alive():
                self._log(f"WARNING: {error}; the process ended without close()")

    def _write_out(self, draft: Record, numbers: dict[str, Any], began: float) -> None:
        """Wait until the arrays are written, then publish the step."""
        directory = self.root / str(draft.step)
        try:
            if processes.is_first():  # while the arrays are being written
                draft = describe.with_fingerprints(draft, numbers)
        finally:
            try:
                self._writer.wait_until_finished()
            except Exception as error:  # Orbax reports failing storage in many types
                raise StorageError(f"{directory}: not saved: {storage_reason(error)}") from error
        fault("save.written")
        if not processes.is_first():
            return
        files = commit.seal(directory)
        record = replace(draft, files=files)
        commit.publish(self.root, record)
        self._finite[record.step] = record.finite
        size, seconds = sum(file.size for file in files) / 1e6, time.monotonic() - began
        self._log(f"checkpoint step {record.step}: saved, {size:.1f} MB in {seconds:.1f} s")
        if not record.finite:
            self._log(
                f"WARNING: checkpoint step {record.step}: holds NaN or infinity; not resumable"
            )

    # Restoring.

    def restore_latest(
        self, abstract_state: Any, *, allow: Collection[str] = (), verify_files: bool = False
    ) -> Restored | None:
        """Return the newest step that passes every check; None in a folder where nothing was saved.

        `abstract_state` holds `jax.ShapeDtypeStruct`s with shardings; the layout of its parameters
        may differ from the saved one. A damaged step is moved to quarantine/ and the one before it
        tried. `allow` names the digests that may differ; `verify_files` hashes all files, not only
        small ones. Raises ConfigError if the newest step is another run's, NothingRestorable if
        none is left, StorageError.
        """
        self.wait()
        wanted = Wanted(abstract_state, self._identity, self._config, allow, verify_files)
        tried: list[str] = []
        bound: int | None = None
        while (bound := self._newest_below(bound)) is not None:
            try:
                record = processes.together(lambda step=bound: read_record(self.root, step))
                if record.finite:
                    return self._restored(record, wanted)
                tried.append(f"step {bound} holds NaN or infinity")
                self._log(f"WARNING: checkpoint {tried[-1]}; trying the one before it")
            except Damaged as damage:
                tried.append(str(damage))
                keeping.set_aside(self.root, bound, damage, self._log)
                processes.barrier(f"quarantined-{bound}", self._timeout)
        if remains := tried or keeping.remains(self.root):
            raise NothingRestorable(
                f"{self.root}: no checkpoint can be restored ({'; '.join(remains)}); put a copy "
                "back, or start again with run.overwrite=true or another run.dir"
            )
        return None

    def restore(
        self,
        step: int,
        abstract_state: Any,
        *,
        allow: Collection[str] = (),
        verify_files: bool = False,
    ) -> Restored:
        """Return exactly `step`: absent or damaged, it raises NothingRestorable."""
        self.wait()
        if step not in self.steps():
            raise NothingRestorable(f"{self.root}: no step {step}; there are {self.steps()}")
        wanted = Wanted(abstract_state, self._identity, self._config, allow, verify_files)
        return self._restored(processes.together(lambda: read_record(self.root, step)), wanted)

    def _restored(self, record: Record, wanted: Wanted) -> Restored:
        state = restore_state(self.root / str(record.step), record, wanted, self._log)
        self._last = self.durable_step = record.step
        return Restored(state, record)

    def _newest_below(self, bound: int | None) -> int | None:
        steps = [step for step in self.steps() if bound is None or step < bound]
        newest = processes.from_first(steps[-1] if steps else -1)
        return None if newest < 0 else newest
