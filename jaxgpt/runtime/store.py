"""Words that the processes of a run leave for each other, in the coordinator's key-value store.

The store is part of JAX's coordination service, which process 0 runs; it needs no device and no
collective, so it works between processes that disagree, compute, or are stuck. Keys begin with the
number of the `meeting`, so nothing of an earlier run in the same processes is read. With one
process there is no store. This is the only module that uses JAX's client.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE = 5.0  # seconds
SHOWN = 8  # processes that are named one by one

_meetings = itertools.count(1)
_used: dict[str, int] = {}  # how often a name was used in this meeting
_meeting = "jaxgpt/0"
_hosts: dict[str, str] = {}  # names by process
_kept: Any = None  # the client of a process that has left without a goodbye


def num_processes() -> int:
    """Return how many processes share the store; 1 where there is none."""
    return _state().num_processes if _client() is not None else 1


def process_index() -> int:
    """Return the number of this process, from 0; unlike jax.process_index, it starts no device."""
    return _state().process_id if _client() is not None else 0


def know(names: Sequence[str]) -> None:
    """Remember on which hosts the processes run, in their order."""
    _hosts.update((str(number), name) for number, name in enumerate(names))


def host(number: str) -> str:
    """Return the name of the host of a process, as far as this one knows it."""
    return _hosts.get(number, "host unknown")


def meet() -> None:
    """Begin with an empty store; all processes call it alike, at the start of a run."""
    global _meeting
    _meeting = f"jaxgpt/{next(_meetings)}"
    _used.clear()
    if num_processes() > 1:
        put(f"hosts/{process_index()}", socket.gethostname())


def put(key: str, value: Any, *, replace: bool = True) -> bool:
    """Store a JSON value; without `replace`, return False if the key has one already.

    Raises ConnectionError if the store cannot be reached. While process 0 is frozen, this and the
    other functions may not return at all.
    """
    try:
        _client().key_value_set(f"{_meeting}/{key}", json.dumps(value), allow_overwrite=replace)
        return True
    except RuntimeError as error:  # JaxRuntimeError, told apart by its first word
        if str(error).startswith("ALREADY_EXISTS"):
            return False
        raise ConnectionError(str(error)) from None


def read(folder: str) -> dict[str, Any]:
    """Return the values of all keys below `folder/`, by what follows it; raises ConnectionError."""
    prefix = f"{_meeting}/{folder}/"
    try:
        pairs = _client().key_value_dir_get(prefix)
    except RuntimeError as error:
        raise ConnectionError(str(error)) from None
    return {key.removeprefix(prefix): json.loads(value) for key, value in pairs}


def decide(name: str, value: Any, rule: Callable[[list[Any]], Any], timeout: float) -> Any:
    """Return, on every process, what process 0's `rule` makes of the values of all, in order.

    All processes call it equally often with a `name`. Raises TimeoutError, which names the missing,
    if some do not within `timeout` seconds, and ConnectionError.
    """
    if num_processes() == 1:
        return rule([value])
    key, previous = _once(name)
    put(f"{key}/{process_index()}", value)
    if process_index() == 0:
        numbers = [str(number) for number in range(num_processes())]
        found = _wait_for(key, set(numbers), timeout)
        missing = [number for number in numbers if number not in found]
        answer = {"missing": missing} if missing else {"is": rule([found[n] for n in numbers])}
        put(f"{key}/answer/0", answer)
        _remove(previous)  # all that came here have read it
    else:  # a little longer, so that it is process 0 that says who is missing
        answer = _wait_for(f"{key}/answer", {"0"}, timeout + PATIENCE).get("0", {"missing": ["0"]})
    if "missing" in answer:
        names = describe([int(number) for number in answer["missing"]])
        raise TimeoutError(f"{name}: nothing from {names} after {timeout:.0f} s")
    return answer["is"]


def from_first(name: str, value: Any, timeout: float) -> Any:
    """Return process 0's JSON `value`, without waiting for the others; raises like `decide`."""
    if num_processes() == 1:
        return value
    key, _ = _once(name)
    if process_index() == 0:
        put(f"{key}/0", value)
        return value
    found = _wait_for(key, {"0"}, timeout)
    if "0" not in found:
        raise TimeoutError(f"{name}: nothing from {describe([0])} after {timeout:.0f} s")
    return found["0"]


def describe(numbers: list[int]) -> str:
    """Return processes with the names of their hosts, at most 8 of them."""
    _hosts.update(read("hosts"))
    names = [f"process {n} ({host(str(n))})" for n in numbers[:SHOWN]]
    more = len(numbers) - SHOWN
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _once(name: str) -> tuple[str, str]:
    """Return the keys of this use of `name`, and of the one before it, on all processes alike."""
    times = _used[name] = _used.get(name, 0) + 1
    return f"{name}/{times}", f"{name}/{times - 1}"


def _wait_for(folder: str, names: set[str], timeout: float) -> dict[str, Any]:
    """Return what is below `folder/` as soon as all `names` are there, or after `timeout`."""
    deadline, pause = time.monotonic() + timeout, 0.005
    while True:
        found = read(folder)
        if names <= found.keys() or time.monotonic() >= deadline:
            return found
        time.sleep(pause)
        pause = min(2 * pause, 0.5)  # by then it is the other side that takes its time


def _remove(folder: str) -> None:
    with contextlib.suppress(RuntimeError):
        _client().key_value_delete(f"{_meeting}/{folder}/")


def is_served(seconds: float = 1.0) -> bool:
    """Return False if nobody listens at the coordinator's address, whose process then is gone.

    True in every other case: a frozen process still listens, a cut network says nothing.
    """
    host, _, port = (_state().coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError):
        pass
    return True


def leave() -> None:
    """Make exit handlers wait for no other process: JAX's would, for some that never come."""
    global _kept
    state = _state()
    if state.client is not None:
        # Held on to, as the last reference to go would wait for the others as well.
        _kept = state.client, state.service, state.preemption_sync_manager
        state.client = state.service = state.preemption_sync_manager = None


def _client() -> Any:
    return _state().client or (_kept and _kept[0])


def _state() -> Any:
    from jax._src import distributed

    return distributed.global_state
