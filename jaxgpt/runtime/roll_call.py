"""The roll call: before JAX starts, all processes of a run meet at the coordinator's address.

JAX ends a process with SIGABRT, a page of stacks and no names when another is missing, was started
twice or is not expected, and a process that joins a running job by mistake ends all of it. So
process 0 first listens there itself, with a plain socket (`caller`); every process says who it is
and how many it thinks there are, and all are told the same: that everyone is there, or what is
wrong. A message is one line of JSON. What happens after the roll call is JAX's.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxgpt.errors import ConfigError, HangError
from jaxgpt.runtime import caller
from jaxgpt.runtime.caller import MAGIC, Present

MAX_ANSWER = 1 << 24  # bytes of the answer, about 20 for each process
PAUSE = 0.2  # seconds between attempts to reach the coordinator


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [IPv6]:PORT; raises ConfigError."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not port.isdecimal():
        raise ConfigError(f"coordinator {address}: must be HOST:PORT, as in node0:8476")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"coordinator {address}: the port must be 1 to 65535")
    return host.strip("[]"), int(port)


def roll_call(
    address: str,
    process: int,
    processes: int,
    timeout: float,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, ...]:
    """Return the host names of all processes, in order, as soon as all are there.

    Raises, on all that have come, ConfigError for a number that was given twice and for counts that
    differ, and HangError when processes are missing after `timeout` seconds; also ConfigError for a
    port that is taken, and HangError where nobody answers. `say` is told what is waited for.
    """
    port = split_address(address)[1]
    me = Present(process, processes, socket.gethostname(), os.getpid())
    if process != 0:
        return _attend(address, me, timeout, say)
    caller.allow_connections(processes)
    frozen: list[Present] = []
    with caller.listen(port) as server:
        calling = threading.Thread(
            target=caller.call, args=(server, processes, timeout, say, frozen), daemon=True
        )
        calling.start()
        try:  # through the network as everyone else: a wrong address is found out here as well
            names = _attend(address, me, timeout, lambda line: None)
        finally:
            calling.join(caller.LINGER + 2 * caller.GRACE)
    if frozen:
        those = caller.some(f"process {one.process} ({one.host}, pid {one.pid})" for one in frozen)
        raise HangError(f"all {processes} processes came, but {those} gave no answer: frozen")
    return names


def _attend(
    address: str, me: Present, timeout: float, say: Callable[[str], None]
) -> tuple[str, ...]:
    began = noted = time.monotonic()
    sign: float | None = None  # when process 0 was last heard of
    while True:
        answer, problem, latest = _ask(address, me, began + timeout + caller.GRACE)
        sign = latest or sign
        if answer.get("code") == 0:
            return tuple(map(str, answer["hosts"]))
        if answer:
            refused = ConfigError if answer["code"] == ConfigError.exit_code else HangError
            raise refused(str(answer["error"]))
        now = time.monotonic()
        if sign and now - sign > caller.GONE:
            raise HangError(
                f"process 0 at {address} waited for the others and then gave no sign of life for "
                f"{now - sign:.0f} s ({problem}): it has ended, or is frozen"
            )
        seconds = f"for {now - began:.0f} s ({problem})"
        text = f"process {me.process} ({me.host}) found no process 0 at {address} {seconds}"
        if now - began > timeout and me.process == 0:
            raise ConfigError(
                f"coordinator {address} has not led to process 0 ({me.host}) {seconds}; it must be "
                "an address of the host of process 0, and its port open"
            )
        if now - began > timeout:
            raise HangError(f"{text}; the coordinator is the host on which process 0 runs")
        if now - noted > caller.PATIENCE:
            noted = now
            say(text)
        time.sleep(PAUSE)


def _ask(address: str, me: Present, until: float) -> tuple[dict[str, Any], str, float | None]:
    """Say who this is; return the answer, or {} and why there is none, and process 0's last sign.

    A sign is anything in the form of the roll call, and the time is that of the monotonic clock.
    """
    line, sign = b"", None
    try:
        with socket.create_connection(split_address(address), timeout=caller.GRACE) as connection:
            connection.sendall(json.dumps({"roll": MAGIC, **me._asdict()}).encode() + b"\n")
            while len(line) < MAX_ANSWER:
                left = until - time.monotonic()
                connection.settimeout(max(1.0, min(caller.GONE, left) if sign else left))
                if not (data := connection.recv(1 << 16)):
                    break
                line = (line + data).lstrip(b" ")
                if not line.startswith(b'{"roll"'[: len(line)]):
                    break  # a server of JAX speaks at once, and of something else
                sign = time.monotonic()
    except OSError as error:
        return {}, str(error.strerror or error), sign
    problem = "what listens there is another program, or a run that has begun already"
    return caller.parse(line), "it closed the connection" if sign else problem, sign
