"""The process around a run: environment before JAX starts, compile cache, signals, watchdog, exit.

Nothing here knows about models or data. JAX is imported only inside `start_jax`, because the
environment it reads (allocator, log levels) must be settled first, by `prepare_environment`.
Every write to stderr from here is bounded in time: a full pipe or a stopped terminal must not keep
a process alive that has decided to go. Durations come from monotonic clocks.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import hashlib
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from jaxgpt.config import Config
from jaxgpt.errors import ConfigError, HangError

# Only our own lines are printed: TensorFlow and the XLA runtime announce themselves at "info", and
# TensorFlow's oneDNN notice ignores the level (it runs no arithmetic here, so oneDNN is no loss).
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "GRPC_VERBOSITY": "ERROR"}
HUGE_PAGES = "glibc.malloc.hugetlb"
REEXEC_GUARD = "JAXGPT_REEXEC"
SHOW_CURSOR = "\x1b[?25h"


def prepare_environment(argv: Sequence[str] | None = None) -> None:
    """Settle what must stand in the environment before JAX starts; call it first in the command.

    Log levels are set unless the user set them. On Linux the same command is then executed once
    more with `glibc.malloc.hugetlb=1`: XLA:CPU takes its work buffers afresh from malloc at each
    step, and 2 MiB pages make that 4 to 6 times cheaper. `JAXGPT_NO_REEXEC=1` prevents it, and so
    does being called from Python (JAX already there, or `argv` not the process's own arguments).
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    called_from_python = "jax" in sys.modules or sys.gettrace() is not None
    not_the_command = argv is not None and list(argv) != sys.argv[1:]
    not_repeatable = sys.argv[0] in ("", "-", "-c")
    if called_from_python or not_the_command or not_repeatable or not _huge_pages_would_help():
        return
    tunables = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), f"{HUGE_PAGES}=1"]))
    environment = os.environ | {"GLIBC_TUNABLES": tunables, REEXEC_GUARD: "1"}
    with contextlib.suppress(OSError):  # then it runs as it is, only slower
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _huge_pages_would_help() -> bool:
    """Tell whether setting the tunable changes anything: glibc >= 2.35 and pages on request."""
    declined = os.environ.get("JAXGPT_NO_REEXEC", "0") not in ("", "0")
    settled = HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", "") or REEXEC_GUARD in os.environ
    if sys.platform != "linux" or declined or settled:
        return False
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except (OSError, ValueError):
        return False
    # With [always] the kernel gives them without being asked, with [never] not even then.
    return name == "glibc" and numbers >= (2, 35) and "[madvise]" in pages


def _cpu_info() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Return the processor's model name as the system gives it."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_key() -> str:
    """Return 16 hex digits that tell processor types apart: model and instruction sets.

    Compiled CPU code of another microarchitecture is accepted by XLA with only a warning and may
    crash, so caches on a shared home directory are kept apart by this key.
    """
    info = _cpu_info()
    flags = sorted((info.get("flags") or info.get("Features") or "").split())
    identity = (platform.machine(), cpu_name(), info.get("CPU part"), flags)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def has_native_bf16() -> bool:
    """Tell whether matmuls in bfloat16 are done in hardware (x86: AVX512-BF16 or AMX-BF16)."""
    flags = _cpu_info().get("flags")
    return flags is None or bool({"avx512_bf16", "amx_bf16"} & set(flags.split()))


def num_cores() -> int:
    """Return the cores this process may use (its affinity mask, which XLA obeys too)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder(*names: str) -> tuple[Path | None, str]:
    """Return (folder, "") below the user's cache, owner-only; or (None, why it cannot be used).

    Compiled programs are executed, so a folder that belongs to someone else is refused.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base.mkdir(parents=True, exist_ok=True)
        folder = base
        for name in ("jaxgpt", *names):
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid():
                return None, f"{folder} belongs to user {status.st_uid}, not to {os.getuid()}"
            if status.st_mode & 0o077:
                folder.chmod(0o700)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        return None, str(error)
    return folder, ""


@dataclasses.dataclass(frozen=True)
class Platform:
    """What JAX runs on; `lines` is the summary to print, advice included."""

    backend: str
    device_kind: str
    num_devices: int
    num_processes: int
    lines: tuple[str, ...]


def start_jax(cfg: Config) -> Platform:
    """Start JAX with a compile cache and describe the devices; raises ConfigError without any.

    `JAX_COMPILATION_CACHE_DIR` wins over ~/.cache/jaxgpt/xla/<processor>-<jaxlib version>.
    """
    import jax
    import jaxlib

    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    note = f"compile cache {cache}" if cache else "no compile cache"
    if cache is None:
        folder, problem = cache_folder("xla", f"{cpu_key()}-{jaxlib.__version__}")
        note = f"compile cache {folder}" if folder else f"no compile cache: {problem}"
        if folder:
            jax.config.update("jax_compilation_cache_dir", str(folder))
    # XLA:CPU cannot write down a program that calls oneDNN; it is compiled anew each time.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter: a platform not installed
        reason = (str(error) or "not installed").splitlines()[0]
        raise ConfigError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: no usable device ({reason}); "
            "unset it, or install the extra for this hardware (jaxgpt[cuda], jaxgpt[tpu])"
        ) from None
    kind, backend, processes = devices[0].device_kind, devices[0].platform, jax.process_count()
    hardware = f"{cpu_name()}, {num_cores()} cores" if backend == "cpu" else kind
    where = f" in {processes} processes" if processes > 1 else ""
    lines = [
        f"jax {jax.__version__} on {backend} ({hardware}), {len(devices)} device(s){where}; {note}"
    ]
    if backend == "cpu" and cfg.train.compute_dtype == "bfloat16" and not has_native_bf16():
        lines.append(
            "this CPU has no bfloat16 arithmetic (AVX512-BF16 or AMX); "
            "train.compute_dtype=float32 will be faster"
        )
    return Platform(backend, kind, len(devices), processes, tuple(lines))


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
        self._notify = notify or (lambda text: _say(f"{text}\n"))
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
                _say(f"{_cursor()}\ninterrupted twice: exit without saving\n")
                os._exit(130)
            stopping = [number for number in numbers if number != signal.SIGUSR1]
            if stopping and not announced:
                announced = True
                self._notify(
                    f"{signal.Signals(stopping[0]).name}: finishing the step and saving"
                    + ("; press Ctrl-C again to quit without" if interrupts else "")
                )
        os.close(reader)


# Seconds that a phase may take before the run counts as stuck: about ten times what the slowest
# healthy case needs (a 70B compile, a checkpoint to slow storage, a long evaluation). To open data
# may mean to pack it first: 2.5 h for 15 T tokens on one core.
LIMITS = {
    "open": 86400.0,
    "compile": 7200.0,
    "data": 900.0,
    "step": 1800.0,
    "save": 3600.0,
    "eval": 14400.0,
}


class Watchdog:
    """Ends a stuck process: stacks of all threads and one line on stderr, then exit 76.

    `with Watchdog() as dog:` and, on one thread, `with dog.phase("step"):` around what may hang.
    An inner phase suspends the clock of the outer one. If the interpreter lock itself is never
    released, so that no Python thread can run, faulthandler's C thread prints the stacks and ends
    the process `lock_margin` seconds later, with exit code 1.
    """

    def __init__(
        self,
        limits: Mapping[str, float] = LIMITS,
        tick: float = 0.5,
        lock_margin: float = 60.0,
    ):
        self.limits = dict(limits)
        self._tick = tick
        self._lock_margin = lock_margin
        # Name, limit, began, deadline, and what tells more of a phase that is stuck.
        self._phases: list[tuple[str, float, float, float, Callable[[], str] | None]] = []
        self._done = threading.Event()

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()  # it disarms faulthandler on its way out

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        limit: float | None = None,
        detail: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        """Watch the enclosed work; `limit` in seconds, by default that of `limits[name]`.

        `detail` is asked what was waited for when the work is found stuck.
        """
        seconds = self.limits[name] if limit is None else limit
        began = time.monotonic()
        outer = self._phases
        self._phases = [*outer, (name, seconds, began, began + seconds, detail)]
        try:
            yield
        finally:
            spent = time.monotonic() - began
            # A new list each time: the thread always sees a whole one, without a lock.
            self._phases = [(n, lim, start, end + spent, d) for n, lim, start, end, d in outer]

    def _watch(self) -> None:
        armed: object = None
        while not self._done.wait(self._tick):
            phases, now = self._phases, time.monotonic()
            if phases and now > phases[-1][3]:
                self._end(phases[-1], now)
            if phases is not armed:  # at most once a tick: it costs 0.2 ms
                armed = phases
                faulthandler.cancel_dump_traceback_later()
                if phases:
                    left = phases[-1][3] - now + self._lock_margin
                    faulthandler.dump_traceback_later(left, exit=True, file=2)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, phase: tuple, now: float) -> NoReturn:
        name, limit, began, _, detail = phase
        if detail:
            name = f"{name} ({detail()})"
        _say(
            f"{_cursor()}{_stacks()}jaxgpt: phase {name} has taken {now - began:.1f} s, limit "
            f"{limit:g} s: stuck; stacks of all threads above; exit {HangError.exit_code}\n",
            seconds=5.0,
        )
        os._exit(HangError.exit_code)


def _stacks() -> str:
    """Return the Python stacks of all threads; by way of a file, as faulthandler wants one."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(no stacks: {error})\n"


def hard_exit(code: int, after: float = 10.0) -> NoReturn:
    """Run exit handlers, flush, and leave with `code`; at the latest `after` seconds from now.

    The interpreter's own shutdown is not entered: it can wait for ever for a thread of a library
    (a live tf.data iterator over a Python function hung it in 12 of 12 trials).
    """
    timer = threading.Timer(after, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(after + 1.0, exit=True, file=2)  # if C holds the lock
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _cursor() -> str:
    """Return what shows the terminal's cursor again, which a progress bar hides."""
    return SHOW_CURSOR if os.isatty(2) else ""


def _say(text: str, seconds: float = 1.0) -> None:
    """Write to stderr, but wait no longer than `seconds` for whoever reads it."""

    def write() -> None:
        data = text.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(seconds)
