"""The checkpoints of a run: durable, verified, or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_child as child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.checkpoint import arrays, commit, faults, verify
from jaxgpt.checkpoint.store import Checkpointer
from jaxgpt.errors import ConfigError, NothingRestorable, StorageError

IDENTITY = {"model": "m1", "tokenizer": "t1", "data": "d1"}
CONFIG = {"model": {"vocab_size": 64, "embed_dim": 8}, "run": {"dir": "here", "seed": 0}}


@struct.dataclass
class State:
    """As in training: a counter, parameters, moments, and a parameter without elements."""

    step: Any
    params: dict[str, Any]
    opt_state: tuple[Any, ...]


def make_mesh(devices: int = 8, kind: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])


def make_state(step: int, mesh: jax.sharding.Mesh | None = None, vocab: int = 64) -> State:
    """A state every value of which depends on the step, `embed` split over the mesh."""
    mesh = mesh or make_mesh()
    rng = np.random.default_rng(step)
    embed = rng.normal(size=(vocab, 64)).astype(np.float32)

    def put(value: Any, spec: P) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, spec))

    params = {
        "embed": put(embed, P("x")),
        "scale": put(rng.normal(size=8).astype(jnp.bfloat16), P()),
        "extra": put(np.zeros((0, 8), np.float32), P()),
    }
    moments = {
        name: put(np.asarray(value) + 1, value.sharding.spec) for name, value in params.items()
    }
    return State(put(np.int32(step), P()), params, (moments, put(np.int8(-3), P()), ()))


def abstract(state: Any) -> Any:
    return child.abstract(state)


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits under the same names."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


class Run:
    """A checkpoint folder whose Checkpointers are closed when the test ends."""

    def __init__(self, root: Path):
        self.root = root
        self.said: list[str] = []
        self.open: list[Checkpointer] = []

    def start(self, **options: Any) -> Checkpointer:
        """Close the previous Checkpointer, as a process that ends does, and open another."""
        self.close()
        settings = {"identity": IDENTITY, "config_dict": CONFIG, "log": self.said.append}
        self.open.append(Checkpointer(self.root, **{**settings, **options}))
        return self.open[-1]

    def close(self) -> None:
        while self.open:
            self.open.pop().close()

    def names(self, folder: str = ".") -> set[str]:
        return set(os.listdir(self.root / folder)) - {"lock"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "ckpt")
    yield made
    try:
        made.close()
    except Exception:  # a test that leaves a failed save behind has said what it claims
        made.open.clear()


def save(checkpointer: Checkpointer, *steps: int, wait: bool = True) -> None:
    for step in steps:
        checkpointer.save(step, make_state(step), position=step * 16, meta={"tokens": step})
    if wait:
        checkpointer.wait()


def inject(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("JAXGPT_FAULT", fault)
    monkeypatch.setattr(faults, "_reached", {})


# Saving and coming back.


def test_a_run_without_checkpoints_starts_from_nothing(run):
    assert run.start().restore_latest(abstract(make_state(0))) is None


def test_the_newest_step_comes_back_bit_for_bit_with_its_record(run):
    save(run.start(), 1, 2)
    restored = run.start().restore_latest(abstract(make_state(0)))
    assert same(restored.state, make_state(2))
    record = restored.record
    assert (record.step, record.position, record.meta) == (2, 32, {"tokens": 2})
    assert record.identity == IDENTITY and record.config == CONFIG
    assert record.mesh == {"x": 8, "processes": 1} and record.versions["jax"] == jax.__version__


def test_restored_arrays_are_placed_as_wanted(run):
    save(run.start(), 1)
    state = run.start().restore_latest(abstract(make_state(0))).state
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert placed == jax.tree.map(lambda leaf: leaf.sharding, make_state(0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_comes_back_on_other_meshes(run, kind):
    save(run.start(), 1)
    for devices in (4, 1, 2):
        target = make_state(0, make_mesh(devices, kind))
        restored = run.start().restore_latest(abstract(target))
        assert same(restored.state, make_state(1))
        assert len(restored.state.params["embed"].sharding.device_set) == devices


def test_a_position_beyond_32_and_40_bits_is_exact(run):
    run.start().save(1, make_state(1), position=2**41 + 1, meta={})
    assert run.start().restore_latest(abstract(make_state(0))).record.position == 2**41 + 1


def test_random_keys_come_back(run):
    state = {"key": jax.random.key(5), "raw": jax.random.PRNGKey(6)}
    run.start().save(1, state, position=0, meta={})
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    restored = run.start().restore_latest(target).state
    assert jnp.array_equal(jax.random.normal(restored["key"]), jax.random.normal(state["key"]))
    assert jnp.array_equal(restored["raw"], state["raw"])


def test_saving_each_step_of_a_donating_loop_keeps_the_values_of_each_step(run):
    mesh = make_mesh()
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + x.dtype.type(1), s), donate_argnums=0)
    state = {"w": jax.device_put(np.zeros((64, 512), np.float32), NamedSharding(mesh, P("x")))}
    target, checkpointer = abstract(state), run.start(keep=100)
    for number in range(1, 21):
        state = step(state)
        checkpointer.save(number, state, position=0, meta={})
    for number in range(1, 21):
        restored = checkpointer.restore(number, target).state
        assert np.all(np.asarray(restored["w"]) == number)


def test_a_save_does_not_wait_for_the_disk(run, monkeypatch):
    go, seal = threading.Event(), commit.seal

    def slow(directory: Path) -> Any:
        go.wait(30)
        return seal(directory)

    monkeypatch.setattr(commit, "seal", slow)
    checkpointer = run.start()
    save(checkpointer, 1, wait=False)
    assert checkpointer.steps() == [] and checkpointer.durable_step is None
    with pytest.raises(StorageError, match="not saved after 0 s"):
        checkpointer.wait(timeout=0.1)
    go.set()
    checkpointer.wait()
    assert checkpointer.steps() == [1] and checkpointer.durable_step == 1


def test_saves_never_overlap_and_a_slow_one_is_reported(run, monkeypatch):
    seal = commit.seal
    monkeypatch.setattr(commit, "seal", lambda directory: (time.sleep(0.3), seal(directory))[1])
    checkpointer = run.start()
    save(checkpointer, 1, 2)
    assert checkpointer.steps() == [1, 2]
    assert any("waiting for step 1" in line for line in run.said)


def test_only_the_newest_and_the_periodic_steps_are_kept(run):
    save(run.start(keep=2, keep_every=3), *range(1, 8))
    assert run.names() == {"3", "6", "7", "3.ok.json", "6.ok.json", "7.ok.json"}


def test_a_step_that_cannot_be_deleted_is_a_warning_and_goes_with_the_next_save(run, monkeypatch):
    checkpointer, rmtree = run.start(keep=1), shutil.rmtree

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "denied", str(path))

    save(checkpointer, 1)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(checkpointer, 2)
    assert checkpointer.steps() == [2] and (run.root / "1").exists()
    assert any("WARNING" in line and "EACCES" in line for line in run.said)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(checkpointer, 3)
    assert run.names() == {"3", "3.ok.json"}


@pytest.mark.parametrize("name", ["with space", "café", "trailing/"])
def test_any_folder_name_works(tmp_path, name):
    run = Run(tmp_path / name)
    save(run.start(), 1)
    assert same(run.start().restore_latest(abstract(make_state(0))).state, make_state(1))
    run.close()


def test_a_moved_run_folder_resumes(run):
    save(run.start(), 1)
    run.close()
    run.root = run.root.rename(run.root.with_name("elsewhere"))
    assert run.start().restore_latest(abstract(make_state(0))).record.step == 1


# What may stand in the way of a save.


def test_saving_the_same_state_again_does_nothing(run):
    save(run.start(), 1)
    before = (run.root / "1.ok.json").read_bytes()
    checkpointer = run.start()
    checkpointer.restore_latest(abstract(make_state(0)))
    save(checkpointer, 1)
    assert (run.root / "1.ok.json").read_bytes() == before


def test_other_values_at_a_saved_step_are_refused(run):
    save(run.start(), 1)
    checkpointer = run.start()
    checkpointer.restore_latest(abstract(make_state(0)))
    with pytest.raises(ConfigError, match="other values.*run.overwrite"):
        checkpointer.save(1, make_state(9), position=16, meta={})


def test_a_run_that_did_not_resume_cannot_save_over_one_that_was_saved(run):
    save(run.start(), 5)
    with pytest.raises(ConfigError, match="holds step 5.*run.overwrite"):
        save(run.start(), 6)


def test_steps_only_go_up(run):
    checkpointer = run.start()
    save(checkpointer, 5)
    with pytest.raises(ValueError, match="4"):
        save(checkpointer, 4)


def test_after_going_back_the_newer_steps_are_set_aside_and_saving_goes_on(run):
    save(run.start(keep=9), 1, 2, 3)
    checkpointer = run.start(keep=9)
    assert checkpointer.restore(1, abstract(make_state(0))).record.step == 1
    assert checkpointer.steps() == [1, 2, 3]  # looking changes nothing
    save(checkpointer, 2)
    assert checkpointer.steps() == [1, 2]
    assert run.names("quarantine") == {
        f"{step}-superseded-1{suffix}" for step in (2, 3) for suffix in ("", ".ok.json")
    }


def test_a_foreign_folder_in_the_place_of_a_step_is_moved_not_deleted(run):
    (run.root / "2").mkdir(parents=True)
    (run.root / "2/notes.txt").write_text("mine")
    save(run.start(), 2)
    assert (run.root / "quarantine/2-stranger-1/notes.txt").read_text() == "mine"


def test_a_second_job_is_refused_with_the_name_of_the_first(run):
    run.start()
    with pytest.raises(ConfigError, match=rf"\"pid\": {os.getpid()}.*run.dir"):
        Checkpointer(run.root, identity={}, config_dict={})


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(ConfigError, match="EEXIST.*run.dir"):
        Checkpointer(tmp_path / "ckpt", identity={}, config_dict={})


@pytest.mark.parametrize("meta", [{"a": float("inf")}, {"a": object()}, {"a": (1,)}])
def test_what_a_record_cannot_hold_is_refused_at_once(run, meta):
    with pytest.raises((ValueError, TypeError)):
        run.start().save(1, make_state(1), position=0, meta=meta)


# Saves that fail.


@pytest.mark.parametrize(
    "point", ["save.begin", "save.copied", "save.written", "publish.temporary"]
)
def test_a_full_disk_is_reported_leaves_old_steps_and_the_next_save_works(run, monkeypatch, point):
    checkpointer = run.start()
    save(checkpointer, 1)
    inject(monkeypatch, f"{point}:1:enospc")
    with pytest.raises(StorageError, match="2: not saved: No space left on device") as failure:
        save(checkpointer, 2)
    assert failure.value.exit_code == 74 and "\n" not in str(failure.value)
    assert run.names() == {"1", "1.ok.json"} and checkpointer.durable_step == 1
    save(checkpointer, 3)
    assert same(run.start().restore_latest(abstract(make_state(0))).state, make_state(3))


def test_the_write_error_of_a_real_disk_limit_is_reported_by_poll(run):
    checkpointer = run.start()
    save(checkpointer, 1)
    state = {"w": jnp.ones((256, 1024))}  # 1 MiB
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        checkpointer.save(2, state, position=0, meta={})
        deadline = time.monotonic() + 20
        with pytest.raises(StorageError, match=r"ckpt/2: not saved: File too large \(EFBIG\)"):
            while time.monotonic() < deadline:
                checkpointer.poll()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.wait()
    assert run.names() == {"1", "1.ok.json"}
    save(checkpointer, 2)
    assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_failing_file_system_is_named(run, monkeypatch, number):
    def refuse(directory: Path) -> None:
        raise OSError(number, os.strerror(number), str(directory))

    checkpointer = run.start()
    save(checkpointer, 1)
    monkeypatch.setattr(commit, "seal", refuse)
    save(checkpointer, 2, wait=False)
    with pytest.raises(StorageError, match=rf"{errno.errorcode[number]}.*ckpt/2"):
        checkpointer.wait()
    assert checkpointer.steps() == [1]


def test_closing_reports_a_last_save_that_failed(run, monkeypatch):
    inject(monkeypatch, "save.written:1:enospc")
    checkpointer = run.start()
    save(checkpointer, 1, wait=False)
    with pytest.raises(StorageError):
        checkpointer.close()
    checkpointer.close()


def test_a_bug_in_the_background_is_not_called_a_storage_error(run, monkeypatch):
    inject(monkeypatch, "save.written:1:raise")
    checkpointer = run.start()
    with pytest.raises(RuntimeError, match="injected"):
        save(checkpointer, 1)
    assert run.names() == set()


def test_a_failed_delete_after_publishing_does_not_unmake_the_step(run, monkeypatch):
    checkpointer = run.start(keep=1)
    save(checkpointer, 1)
    inject(monkeypatch, "retention.demoted:1:enospc")
    save(checkpointer, 2)
    assert checkpointer.steps() == [2]


def test_a_state_with_nan_is_kept_but_not_resumed_from_nor_counted(run):
    checkpointer = run.start(keep=1)
    save(checkpointer, 1)
    bad = make_state(2)
    bad.params["scale"] = jax.device_put(jnp.full(8, jnp.nan), bad.params["scale"].sharding)
    checkpointer.save(2, bad, position=0, meta={})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert run.start().restore_latest(abstract(make_state(0))).record.step == 1
    assert same(run.start().restore(2, abstract(bad)).state, bad)


# Death at any point.


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("crashed")
    command = [sys.executable, child.__file__, "crash", str(root), *CRASHES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [f"{crash} -9" for crash in CRASHES], done.stderr
    return root


# Steps 1..4 are saved keeping 2; the value is the step that survives when it is the n-th time.
CRASHES = {
    "save.begin:1": 0,
    "save.copied:1": 0,
    "save.written:1": 0,
    "publish.temporary:1": 0,
    "save.begin:3": 2,
    "save.copied:3": 2,
    "save.written:3": 2,
    "publish.temporary:3": 2,
    "publish.done:1": 1,
    "publish.done:3": 3,
    "retention.demoted:1": 3,
    "retention.done:1": 3,
}


@pytest.mark.parametrize("crash", CRASHES)
def test_a_run_killed_anywhere_in_a_save_goes_on_from_its_newest_verified_step(crashed, crash):
    root, survivor = crashed / crash, CRASHES[crash]
    target = child.place(child.host_state(0), make_mesh(kind=AxisType.Auto))
    checkpointer = Checkpointer(
        root, identity=child.IDENTITY, config_dict={}, log=lambda line: None
    )
    restored = checkpointer.restore_latest(abstract(target))
    if survivor == 0:
        assert restored is None
    else:
        assert restored.record.step == survivor
        assert same(restored.state, jax.tree.map(np.asarray, child.host_state(survivor)))
    checkpointer.close()
    child.saves(root, child.STEPS)
    left = set(os.listdir(root)) - {"lock"}
    assert left == {"3", "3.ok.json", "4", "4.ok.json"}  # nothing of the dead save remains


# Damage.


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(tmp_path_factory.mktemp("two") / "ckpt")
    save(run.start(), 1, 2)
    run.close()
    return run.root


def files_of_step_2(root: Path) -> list[str]:
    inside = [path for path in (root / "2").rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(root)) for path in [*inside, root / "2.ok.json"])


def flip(path: Path, index: int | None = None, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if index is None else index] ^= bit
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "delete": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_happens_to_any_file_the_step_before_is_used(two_steps, run, damage):
    for name in files_of_step_2(two_steps):
        if (damage, name) == ("delete", "2.ok.json"):
            continue  # a step without a record does not exist: no damage, tested below
        shutil.rmtree(run.root, ignore_errors=True)
        shutil.copytree(two_steps, run.root)
        DAMAGE[damage](run.root / name)
        restored = run.start().restore_latest(abstract(make_state(0)))
        assert restored.record.step == 1 and same(restored.state, make_state(1)), name
        loud = [line for line in run.said if "DAMAGED" in line]
        assert len(loud) == 1 and "quarantine/2-damaged-1" in loud[0] and "\n" not in loud[0]
        assert "2-damaged-1.ok.json" in run.names("quarantine")
        run.said.clear()


def test_flips_in_files_too_large_to_hash_never_give_wrong_values(two_steps, run, monkeypatch):
    monkeypatch.setattr(verify, "SMALL_FILE", 0)
    shutil.copytree(two_steps, run.root)
    largest = max((run.root / name for name in files_of_step_2(run.root)), key=os.path.getsize)
    original, rng, fell_back = largest.read_bytes(), np.random.default_rng(0), 0
    for index in rng.integers(0, len(original), size=16):
        flip(largest, int(index), 1 << int(index) % 8)
        restored = run.start().restore_latest(abstract(make_state(0)))
        assert same(restored.state, make_state(restored.record.step))
        if restored.record.step == 1:
            fell_back += 1
            for suffix in ("", ".ok.json"):
                (run.root / f"quarantine/2-damaged-1{suffix}").rename(run.root / f"2{suffix}")
        largest.write_bytes(original)
    assert fell_back >= 8  # most of the file is values


def test_values_that_changed_are_named(two_steps, run, monkeypatch):
    monkeypatch.setattr(verify, "SMALL_FILE", 0)
    shutil.copytree(two_steps, run.root)
    embed = np.asarray(make_state(2).params["embed"])[:8].tobytes()  # the shard of one device
    for path in (run.root / "2").rglob("d/*"):
        if (at := path.read_bytes().find(embed)) >= 0:
            flip(path, at + 10)
    run.start().restore_latest(abstract(make_state(0)))
    assert any("DAMAGED" in line and "params.embed" in line for line in run.said)


def test_all_files_are_hashed_when_asked(two_steps, run, monkeypatch):
    monkeypatch.setattr(verify, "SMALL_FILE", 0)
    shutil.copytree(two_steps, run.root)
    flip(run.root / "2/commit_success.txt")  # nothing reads it, so only its hash can tell
    target = abstract(make_state(0))
    assert run.start().restore_latest(target).record.step == 2
    assert run.start().restore_latest(target, verify_files=True).record.step == 1


def test_when_every_step_is_damaged_the_run_does_not_start_afresh(two_steps, run):
    shutil.copytree(two_steps, run.root)
    for step in (1, 2):
        flip(run.root / f"{step}/_METADATA")
    for _ in range(2):  # nor when it is started again
        with pytest.raises(NothingRestorable) as refused:
            run.start().restore_latest(abstract(make_state(0)))
        assert refused.value.exit_code == 66 and "\n" not in str(refused.value)
        assert "1" in str(refused.value) and "run.overwrite" in str(refused.value)


def test_arrays_without_any_record_are_not_a_fresh_start(two_steps, run):
    shutil.copytree(two_steps, run.root)
    for step in (1, 2):
        (run.root / f"{step}.ok.json").unlink()
    with pytest.raises(NothingRestorable, match="1 has no commit record; 2 has no"):
        run.start().restore_latest(abstract(make_state(0)))


def test_a_step_without_a_record_does_not_exist(two_steps, run):
    shutil.copytree(two_steps, run.root)
    (run.root / "2.ok.json").unlink()
    assert run.start().restore_latest(abstract(make_state(0))).record.step == 1


def test_empty_and_foreign_folders_named_like_steps_are_ignored_with_one_notice(run):
    for name in ("9", "11"):
        (run.root / name).mkdir(parents=True)
    (run.root / "11/notes.txt").write_text("")
    assert run.start().restore_latest(abstract(make_state(0))) is None
    assert len(run.said) == 1 and "9" in run.said[0] and "11" in run.said[0]
    assert run.names() == {"9", "11"}


def test_a_step_that_is_named_never_falls_back(two_steps, run):
    shutil.copytree(two_steps, run.root)
    flip(run.root / "2/_METADATA")
    checkpointer = run.start()
    with pytest.raises(NothingRestorable, match="ckpt/2"):
        checkpointer.restore(2, abstract(make_state(0)))
    with pytest.raises(NothingRestorable, match=r"no step 3; there are \[1, 2\]"):
        checkpointer.restore(3, abstract(make_state(0)))
    assert checkpointer.steps() == [1, 2]


def test_files_that_are_whole_but_cannot_be_read_are_not_called_damaged(
    two_steps, run, monkeypatch
):
    def fail(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    shutil.copytree(two_steps, run.root)
    monkeypatch.setattr(arrays, "read", fail)
    checkpointer = run.start()
    with pytest.raises(StorageError, match="RESOURCE_EXHAUSTED"):
        checkpointer.restore_latest(abstract(make_state(0)))
    assert checkpointer.steps() == [1, 2]


def test_a_record_that_promises_more_than_its_files_hold_is_refused_before_allocation(run):
    save(run.start(), 1)
    record = commit.read_record(run.root, 1)
    leaf = commit.read_record(run.root, 1).leaves[0]
    huge = type(leaf)("w", (2**46,), "float32", 0)
    commit.publish(run.root, type(record)(**{**vars(record), "leaves": (huge,)}))
    with pytest.raises(NothingRestorable, match="take 281474976710656 bytes"):
        run.start().restore_latest({"w": jax.ShapeDtypeStruct((2**46,), np.float32)})


# Another run.


@pytest.mark.parametrize("name", ["model", "tokenizer", "data"])
def test_another_identity_is_refused_by_name_and_left_in_place(two_steps, run, name):
    shutil.copytree(two_steps, run.root)
    checkpointer = run.start(identity={**IDENTITY, name: "other"})
    with pytest.raises(ConfigError) as refused:
        checkpointer.restore_latest(abstract(make_state(0)))
    assert f"{name} differs: saved with {IDENTITY[name]}, now other" in str(refused.value)
    assert ("checkpoint.allow_change" in str(refused.value)) == (name != "model")
    assert checkpointer.steps() == [1, 2]


def test_an_allowed_change_is_resumed_from_and_noted(two_steps, run):
    shutil.copytree(two_steps, run.root)
    checkpointer = run.start(identity={**IDENTITY, "data": "other"})
    assert checkpointer.restore_latest(abstract(make_state(0)), allow=["data"]).record.step == 2
    assert any("data has changed" in line for line in run.said)


def test_a_digest_that_is_new_or_gone_is_a_difference(two_steps, run):
    shutil.copytree(two_steps, run.root)
    for identity in ({**IDENTITY, "seed": "s"}, {"model": "m1", "data": "d1"}):
        with pytest.raises(ConfigError, match="none"):
            run.start(identity=identity).restore_latest(abstract(make_state(0)))


def test_another_vocabulary_is_refused_by_leaf_shapes_and_config_key(two_steps, run):
    shutil.copytree(two_steps, run.root)
    config = {**CONFIG, "model": {"vocab_size": 72, "embed_dim": 8}}
    checkpointer = run.start(config_dict=config)
    with pytest.raises(ConfigError) as refused:
        checkpointer.restore_latest(abstract(make_state(0, vocab=72)))
    text = str(refused.value)
    assert "params.embed is saved as float32[64, 64], wanted as float32[72, 64]" in text
    assert "model.vocab_size was 64, is 72" in text
    assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "float16"])
def test_another_dtype_is_refused_not_cast(two_steps, run, dtype):
    shutil.copytree(two_steps, run.root)
    target = abstract(make_state(0))
    leaf = target.params["embed"]
    target.params["embed"] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    with pytest.raises(ConfigError, match=rf"float32\[64, 64\], wanted as {dtype}\[64, 64\]"):
        run.start().restore_latest(target)


def test_missing_and_surplus_leaves_are_named(two_steps, run):
    shutil.copytree(two_steps, run.root)
    target = abstract(make_state(0))
    target.params["head"] = target.params.pop("scale")
    with pytest.raises(ConfigError) as refused:
        run.start().restore_latest(target)
    assert "params.head is wanted, but not saved" in str(refused.value)
    assert "params.scale is saved, but not wanted" in str(refused.value)


def test_an_optimiser_with_another_state_is_refused_with_the_way_out(two_steps, run):
    shutil.copytree(two_steps, run.root)
    target = abstract(make_state(0))
    target = target.replace(opt_state=target.opt_state[1:])
    with pytest.raises(ConfigError) as refused:
        run.start(identity=IDENTITY | {"optim": "o2"}).restore_latest(target)
    assert "allow_change" not in str(refused.value)  # no permission would help
    assert f"set run.init_from={run.root.parent} and another run.dir" in str(refused.value)


def test_another_model_is_not_called_another_optimiser_though_its_moments_differ(two_steps, run):
    shutil.copytree(two_steps, run.root)
    with pytest.raises(ConfigError) as refused:
        run.start(identity=IDENTITY | {"model": "m2"}).restore_latest(
            abstract(make_state(0, vocab=72))
        )
    assert "another model needs another run.dir" in str(refused.value)
    assert "init_from" not in str(refused.value)


# One key differs, one is new since the checkpoint with its default, and one is not.
OPTIM = {"name": "adamw", "lr": 0.1, "beta1": 0.9}


@pytest.mark.parametrize(
    "now, words",
    [
        (OPTIM | {"ema_decay": 0.0}, ""),
        (OPTIM | {"ema_decay": 0.9}, "optim differs: ema_decay was 0.0, is 0.9; to resume"),
        (OPTIM | {"lr": 0.2}, "optim differs: lr was 0.1, is 0.2; to resume"),
    ],
)
def test_of_tables_only_what_differs_from_value_or_default_is_told(run, now, words):
    save(run.start(identity={"optim": json.dumps(OPTIM)}), 1)
    checkpointer = run.start(identity={"optim": json.dumps(now)})
    if not words:
        assert checkpointer.restore_latest(abstract(make_state(0))).record.step == 1
        return
    with pytest.raises(ConfigError) as refused:
        checkpointer.restore_latest(abstract(make_state(0)))
    assert words in str(refused.value)


def test_what_has_changed_in_the_configuration_is_said_on_resume(two_steps, run):
    shutil.copytree(two_steps, run.root)
    now = CONFIG | {"run": {"dir": "there", "seed": 1}}
    for config in (CONFIG, now):
        run.start(config_dict=config).restore_latest(abstract(make_state(0)))
    said = [line for line in run.said if "configuration" in line]
    assert said == ["configuration since step 2: run.seed was 0, is 1"]


# Several processes.


def test_what_two_processes_save_one_process_restores(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, child.__file__, "together", str(tmp_path / "ckpt"), port]
    both = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    target = child.place(child.host_state(0), make_mesh(1, AxisType.Auto))
    with_one = Checkpointer(tmp_path / "ckpt", identity=child.IDENTITY, config_dict={})
    restored = with_one.restore_latest(abstract(target))
    with_one.close()
    assert same(restored.state, child.host_state(2))
    assert restored.record.mesh == {"data": 4, "processes": 2}
