"""One of several processes of a pretended run, without a model; it ends as `peers` lets it.

    peers_child.py PORT PROCESS PROCESSES FAULT

A step is a meeting of all processes in the key-value store, as training is in collectives, and a
process may be one step ahead of it. FAULT is what goes wrong in step 20 of process 1: none, data
(it waits there), lock (it keeps the interpreter lock), error (it raises), short (all have a limit
for waiting that is shorter than process 1's for data), late (before the first step), slow (each
of its steps takes longer) or linger (it takes a while to clean up). Prints a line when step 10 is
reached and, at an ordinary end, an object with what stopped it, where, and which steps it saved.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import jax

from jaxgpt.errors import JaxgptError, StorageError
from jaxgpt.runtime import leaving, store
from jaxgpt.runtime.peers import Peers, Times
from jaxgpt.runtime.signals import Stop
from jaxgpt.runtime.stopping import SharedStop
from jaxgpt.runtime.watchdog import LIMITS, Watchdog

SILENT = 4.0  # seconds
STEPS = 100_000


def go_wrong(fault: str, dog: Watchdog) -> None:
    if fault in ("data", "short"):
        with dog.phase("data"):
            time.sleep(60)
    if fault == "lock":
        with dog.phase("data"):
            time.sleep(3 * Times(SILENT).beat)
            ctypes.PyDLL(None).sleep(60)
    if fault == "error":
        with dog.phase("save"):
            raise StorageError("disk full")


def take_part(step: int, wait_for: int) -> None:
    """Take part in a step, and wait until all have done so in that one or the one before."""
    store.put(f"at/{store.process_index()}", step)
    while True:
        others = store.read("at").values()
        if len(others) == store.num_processes() and min(others) >= wait_for:
            return
        time.sleep(0.002)


def main(port: str, process: int, processes: int, fault: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", processes, process)
    limits = LIMITS | {"short": {"wait": 1.0}, "data": {"data": 1.0}}.get(fault, {})
    here, saved, done = process == 1, [], 0
    steps = 40 if fault in ("linger", "slow") else STEPS
    with (
        Stop() as signals,
        Watchdog(limits, tick=0.1) as dog,
        Peers(dog, timing=Times(SILENT)) as peers,
        SharedStop(signals, dog) as stop,
        peers.telling(),
    ):
        if fault == "late":
            print("ready", flush=True)
            with dog.phase("compile"):
                time.sleep(3.0)
        while done < steps and not stop.reached(done):
            dog.begin(done + 1)
            if here and done + 1 == 20:
                go_wrong(fault, dog)
            with dog.phase("data"):
                time.sleep(0.2 if here and fault == "slow" else 0.01)
            done += 1
            with dog.phase("wait"):
                take_part(done, wait_for=done - process % 2)
            if done == 10:
                time.sleep(3 * Times(SILENT).beat)  # so that all have heard of each other
                print("ready", flush=True)
            if stop.save_due(done):
                saved.append(done)
        if here and fault == "linger":
            time.sleep(1.25 * SILENT)
        reason = stop.reason
    print(json.dumps({"step": done, "reason": reason, "saved": saved}), flush=True)


if __name__ == "__main__":
    code = 0
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    except JaxgptError as error:
        print(leaving.error_line(str(error)), file=sys.stderr)
        code = error.exit_code
    leaving.hard_exit(code)
