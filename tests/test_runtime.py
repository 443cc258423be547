"""Start of the process, caches, signals, watchdog and exit; mostly in processes of their own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxgpt import config, runtime
from jaxgpt.runtime import Stop, Watchdog

ROOT = Path(__file__).parent.parent
# Locking a plain mutex twice blocks in C for ever, and no signal interrupts it.
STUCK_IN_C = """
import ctypes
def stuck_in_c(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    library.pthread_mutex_lock(mutex)
"""


def python(code: str, *args: str, env: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """Start a program, given as code or as the path of a file."""
    unset = ("GLIBC_TUNABLES", "JAXGPT_REEXEC", "JAX_COMPILATION_CACHE_DIR", "PYTHONUNBUFFERED")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"PYTHONPATH": str(ROOT)} | (env or {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    source = [code] if code.endswith(".py") else ["-c", code]
    return subprocess.Popen([sys.executable, *source, *args], env=environment, **options)


def outcome(process: subprocess.Popen, timeout: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture
def program(tmp_path) -> str:
    """A program that says each time it starts, then settles its environment."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys\n"
        "print('start', flush=True)\n"
        "from jaxgpt import runtime\n"
        "runtime.prepare_environment(sys.argv[1:])\n"
        "print(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:], sys.stdin.read())\n"
    )
    return str(path)


def test_the_command_runs_again_once_with_huge_pages_and_keeps_its_arguments_and_input(
    program, monkeypatch
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)  # the test command itself may set it
    process = python(program, "train", "a b", stdin=subprocess.PIPE)
    out, err = process.communicate("text", timeout=30)
    # Where the kernel or the C library has no use for the setting, there is no second start.
    helps = runtime._huge_pages_would_help()
    starts, tunables = ("start\nstart\n", "glibc.malloc.hugetlb=1") if helps else ("start\n", None)
    assert out == f"{starts}{tunables} ['train', 'a b'] text\n"
    assert err == ""


def test_other_tunables_are_kept(program, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(runtime, "_huge_pages_would_help", lambda: True)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=3")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(sys, "argv", ["jaxgpt", "train"])
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    runtime.prepare_environment(["train"])
    tunables = calls[0][2]["GLIBC_TUNABLES"]
    assert tunables == "glibc.malloc.tcache_count=3:glibc.malloc.hugetlb=1"


def test_an_explicit_choice_of_the_user_is_left_alone(program):
    out = outcome(python(program, env={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}))[1]
    assert out.startswith("start\nglibc.malloc.hugetlb=0")


def test_a_variable_prevents_the_second_start(program):
    assert outcome(python(program, env={"JAXGPT_NO_REEXEC": "1"}))[1].count("start") == 1


def test_a_stripped_environment_does_not_start_again_for_ever(program):
    assert outcome(python(program, env={"JAXGPT_REEXEC": "1"}))[1].count("start") == 1


def test_code_given_on_the_command_line_is_not_run_again():
    code = "print('start', flush=True); from jaxgpt import runtime; runtime.prepare_environment()"
    assert outcome(python(code))[1] == "start\n"


def test_a_call_from_python_never_replaces_the_process(monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("replaced the caller's process"))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("JAXGPT_REEXEC", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    runtime.prepare_environment(["train", "config.toml"])


def test_log_levels_set_by_the_user_win(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    runtime.prepare_environment(["not", "this", "process"])
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert os.environ.pop("TF_ENABLE_ONEDNN_OPTS") == "0"


def test_the_processor_key_tells_instruction_sets_apart(monkeypatch):
    keys = set()
    for flags in ("avx2", "avx2 avx512_bf16", "avx512_bf16 avx2"):
        monkeypatch.setattr(runtime, "_cpu_info", lambda f=flags: {"model name": "X", "flags": f})
        keys.add(runtime.cpu_key())
    assert len(keys) == 2  # the order of flags does not matter


@pytest.mark.parametrize(
    ("info", "native"),
    [
        ({"flags": "avx2 avx512f"}, False),
        ({"flags": "avx2 avx512_bf16"}, True),
        ({"flags": "avx2 amx_bf16"}, True),
        ({}, True),  # not x86: no claim, no advice
    ],
)
def test_native_bfloat16_is_read_from_the_flags(monkeypatch, info, native):
    monkeypatch.setattr(runtime, "_cpu_info", lambda: info)
    assert runtime.has_native_bf16() is native


def test_cache_folders_are_open_to_their_owner_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jaxgpt").mkdir(mode=0o777)
    (tmp_path / "jaxgpt").chmod(0o777)  # whatever the umask
    folder, problem = runtime.cache_folder("xla", "key")
    assert problem == "" and folder == tmp_path / "jaxgpt" / "xla" / "key"
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_cache_folder_of_someone_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.cache_folder("xla")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder, problem = runtime.cache_folder("xla")
    assert folder is None
    assert f"belongs to user {owner}, not to {owner + 1}" in problem


def test_a_cache_that_cannot_be_made_is_named_not_raised(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder, problem = runtime.cache_folder("xla")
    assert folder is None and "file" in problem


START = """
import jax
from jaxgpt import config, errors, runtime
try:
    print(*runtime.start_jax(config.load()).lines, sep="\\n")
    print(jax.config.jax_compilation_cache_dir)
except errors.ConfigError as error:
    print(error)
"""


def test_jax_starts_with_a_compile_cache_of_this_processor_and_names_the_device(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_NUM_CPU_DEVICES": "2"}
    line, folder = outcome(python(START, env=env))[1].splitlines()
    assert folder.startswith(f"{tmp_path}/jaxgpt/xla/{runtime.cpu_key()}-")
    assert "on cpu" in line and "2 device(s)" in line and folder in line


def test_a_missing_device_is_a_refused_configuration_not_a_traceback(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cuda"}
    status, out, _ = outcome(python(START, env=env))
    assert status == 0
    assert out.startswith("JAX_PLATFORMS=cuda: no usable device") and out.count("\n") == 1


def test_a_chosen_compile_cache_wins(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/chosen")
    monkeypatch.setattr(runtime, "cache_folder", lambda *_: pytest.fail("made another"))
    assert "compile cache /chosen" in runtime.start_jax(config.Config()).lines[0]


def test_emulated_bfloat16_is_advised_against(monkeypatch):
    monkeypatch.setattr(runtime, "has_native_bf16", lambda: False)
    assert "train.compute_dtype=float32" in runtime.start_jax(config.Config()).lines[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_asks_for_a_stop_by_name_and_the_old_handler_comes_back(number):
    outside = signal.signal(number, signal.default_int_handler)  # nohup ignores SIGHUP
    before = signal.getsignal(number)
    said: list[str] = []
    with Stop(notify=said.append) as stop:
        assert stop.reason == ""
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
        assert not stop.save_now
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert signal.getsignal(number) is before
    signal.signal(number, outside)
    assert len(said) == 1 and said[0].startswith(number.name)


def test_the_first_signal_gives_the_reason():
    with Stop(notify=lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "SIGTERM"


def test_sigusr1_asks_for_a_save_and_not_for_a_stop():
    with Stop(notify=lambda text: pytest.fail(text)) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.save_now
        assert stop.reason == ""


def test_a_signal_ignored_on_entry_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone():
    before, during = signal.getsignal(signal.SIGTERM), []

    def enter():
        with Stop():
            during.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert during == [before]


def test_ctrl_c_twice_ends_a_process_stuck_in_c_within_two_seconds():
    code = (
        f"{STUCK_IN_C}\nfrom jaxgpt.runtime import Stop\nwith Stop(): stuck_in_c(ctypes.CDLL(None))"
    )
    process = python(code)
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    assert "SIGINT: finishing the step" in process.stderr.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert outcome(process)[0] == 130
    assert time.monotonic() - began < 2.0


def test_ctrl_c_twice_ends_a_process_whose_output_nobody_reads():
    code = """
import os, time
from jaxgpt.runtime import Stop
with Stop():
    os.set_blocking(2, False)
    try:
        while True: os.write(2, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)
    print("full", flush=True)
    while True: time.sleep(1)
"""
    process = python(code)
    assert process.stdout.readline() == "full\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # two signals at once would be one
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    process.communicate()


def test_a_stuck_phase_ends_the_process_with_76_its_name_and_the_stacks():
    code = """
import threading, time
from jaxgpt.runtime import Watchdog
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
from jaxgpt.runtime import Watchdog
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
from jaxgpt.runtime import Watchdog
with Watchdog(tick=0.02) as dog, dog.phase("eval", 0.3):
    with dog.phase("save", 30): pass
    time.sleep(60)
"""
    code, _, err = outcome(python(code))
    assert code == 76 and "phase eval" in err


def test_a_process_that_never_releases_the_interpreter_lock_is_ended_with_its_stacks():
    code = f"""{STUCK_IN_C}
import time
from jaxgpt.runtime import Watchdog
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
from jaxgpt.runtime import Watchdog
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


def test_leaving_runs_exit_handlers_flushes_and_keeps_the_code():
    code = """
import atexit, sys
from jaxgpt.runtime import hard_exit
atexit.register(lambda: sys.stdout.write("handler "))
sys.stdout.write("text ")
hard_exit(75)
"""
    assert outcome(python(code)) == (75, "text handler ", "")


def test_leaving_does_not_wait_for_threads_that_never_end():
    code = """
import threading, time
from jaxgpt.runtime import hard_exit
threading.Thread(target=time.sleep, args=(60,)).start()
hard_exit(0)
"""
    began = time.monotonic()
    assert outcome(python(code))[0] == 0
    assert time.monotonic() - began < 10.0


def test_a_stuck_exit_handler_is_given_up_in_time():
    code = f"""{STUCK_IN_C}
import atexit
from jaxgpt.runtime import hard_exit
atexit.register(stuck_in_c, ctypes.CDLL(None))
hard_exit(75, after=0.3)
"""
    began = time.monotonic()
    assert outcome(python(code))[0] == 75
    assert time.monotonic() - began < 10.0


def test_a_reader_that_has_gone_does_not_change_the_exit_code():
    code = "import sys; from jaxgpt.runtime import hard_exit; sys.stdout.write('x'); hard_exit(0)"
    reader, writer = os.pipe()
    os.close(reader)
    process = python(code, stdout=writer)
    os.close(writer)
    assert process.wait(timeout=20) == 0
    process.communicate()
