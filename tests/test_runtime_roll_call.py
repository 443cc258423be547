"""The roll call, over loopback: who is there, who is missing, and who should not be."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxgpt.errors import ConfigError, HangError
from jaxgpt.runtime import caller, roll_call
from jaxgpt.runtime.caller import MAGIC

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(caller, "LINGER", 0.3)
    monkeypatch.setattr(caller, "GRACE", 1.0)
    monkeypatch.setattr(roll_call, "PAUSE", 0.02)


@pytest.fixture
def address() -> str:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return f"localhost:{server.getsockname()[1]}"


def call(address: str, *numbers: tuple[int, int], timeout: float = 10.0, pause: float = 0.0):
    """Return what each of some processes, given as (process, processes), is told."""
    told: list[object] = [None] * len(numbers)

    def one(at: int, process: int, processes: int) -> None:
        try:
            told[at] = roll_call.roll_call(address, process, processes, timeout)
        except (ConfigError, HangError) as error:
            told[at] = error

    threads = []
    for at, (process, processes) in enumerate(numbers):
        threads.append(threading.Thread(target=one, args=(at, process, processes)))
        threads[-1].start()
        time.sleep(pause)
    for thread in threads:
        thread.join(30.0)
    return told


@pytest.fixture
def listener() -> Iterator[str]:
    """A server of something else at an address: it says so to whoever connects."""
    with socket.create_server(("localhost", 0)) as server:
        stop = threading.Event()

        def serve() -> None:
            server.settimeout(0.05)
            while not stop.is_set():
                try:
                    connection = server.accept()[0]
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00")  # as HTTP/2 does
                    connection.recv(1024)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"localhost:{server.getsockname()[1]}"
        stop.set()
        thread.join()


def test_all_are_told_the_hosts_in_order_whoever_comes_first(address):
    told = call(address, (2, 3), (0, 3), (1, 3), pause=0.1)
    assert told == [(HERE,) * 3] * 3


def test_the_port_is_free_afterwards(address):
    call(address, (0, 2), (1, 2))
    with socket.create_server(("localhost", int(address.rpartition(":")[2]))):
        pass


def test_missing_processes_are_named_to_those_present(address):
    told = call(address, (0, 4), (2, 4), timeout=0.5)
    assert [type(error) for error in told] == [HangError] * 2
    assert str(told[0]) == str(told[1])
    assert f"2 of 4 processes have started after 0 s: present 0 ({HERE}), 2 ({HERE}); " in str(
        told[0]
    )
    assert str(told[0]).endswith("missing 1, 3")


def test_thousands_of_missing_processes_are_counted_not_listed(address):
    (told,) = call(address, (0, 5000), timeout=0.1)
    assert str(told).endswith("missing 1, 2, 3, 4, 5, 6, 7, 8 and 4991 more")


def test_a_number_given_twice_is_refused_on_all(address):
    told = call(address, (0, 3), (1, 3), (1, 3))
    assert [type(error) for error in told] == [ConfigError] * 3
    assert all(f"process 1 was started twice: on {HERE} (pid" in str(error) for error in told)


def test_a_process_too_many_is_refused_on_all(address):
    told = call(address, (0, 2), (2, 3))
    assert [type(error) for error in told] == [ConfigError] * 2
    assert f"process 2 ({HERE}) was started as one of 3, process 0 as one of 2" in str(told[0])


def test_those_who_come_a_little_later_are_told_what_is_wrong(address, monkeypatch):
    monkeypatch.setattr(caller, "LINGER", 1.0)
    told = call(address, (0, 3), (1, 3), (1, 3), (2, 3), pause=0.2)
    assert [type(error) for error in told] == [ConfigError] * 4


def test_a_process_that_finds_nobody_says_where_it_looked(address):
    (told,) = call(address, (1, 2), timeout=0.2)
    assert isinstance(told, HangError)
    assert f"process 1 ({HERE}) found no process 0 at {address} for 0 s (" in str(told)


def test_a_name_without_an_address_is_waited_for_and_then_named():
    (told,) = call("nosuchhost.invalid:2000", (1, 2), timeout=0.2)
    assert isinstance(told, HangError)
    assert "nosuchhost.invalid:2000" in str(told)


def test_process_0_finds_out_that_the_address_leads_elsewhere(listener, monkeypatch):
    monkeypatch.setattr(caller, "listen", lambda port: socket.create_server(("localhost", 0)))
    (told,) = call(listener, (0, 2), timeout=0.2)
    assert isinstance(told, ConfigError)
    assert f"coordinator {listener} has not led to process 0 ({HERE})" in str(told)


def test_a_port_that_is_taken_is_refused_at_once(listener):
    (told,) = call(listener, (0, 2))
    assert isinstance(told, ConfigError)
    port = listener.rpartition(":")[2]
    assert str(told).startswith(f"coordinator port {port} on {HERE}: Address already in use; ")


def test_a_run_that_has_begun_is_not_joined(listener):
    (told,) = call(listener, (1, 2), timeout=0.3)
    assert isinstance(told, HangError)
    assert "another program, or a run that has begun already" in str(told)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"roll": "other", "process": 1, "processes": 2, "host": "x", "pid": 1}\n',
        b'{"process": 1}\n',
        json.dumps({"roll": MAGIC, "process": True, "processes": 2, "host": "x"}).encode() + b"\n",
        b"[" * 4000 + b"\n",
        b"x" * 100_000,
    ],
)
def test_strangers_do_not_disturb(address, noise):
    def disturb() -> None:
        host, _, port = address.rpartition(":")
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), timeout=1.0) as connection:
                    connection.sendall(noise)
                    return
            except OSError:
                time.sleep(0.01)

    stranger = threading.Thread(target=disturb)
    stranger.start()
    assert call(address, (0, 2), (1, 2), pause=0.3) == [(HERE, HERE)] * 2
    stranger.join()


def test_a_process_that_left_and_came_again_counts_once(address):
    server = threading.Thread(target=lambda: told.extend(call(address, (0, 2))))
    told: list[object] = []
    server.start()
    host, _, port = address.rpartition(":")
    said = {"roll": MAGIC, "process": 1, "processes": 2, "host": "x", "pid": 1}
    time.sleep(0.2)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(json.dumps(said).encode()[:10])  # it dies in the middle of a word
    assert call(address, (1, 2)) == [(HERE, HERE)]
    server.join()
    assert told == [(HERE, HERE)]


def test_what_is_waited_for_is_said(address, monkeypatch):
    monkeypatch.setattr(caller, "PATIENCE", 0.1)
    said: list[str] = []
    with pytest.raises(HangError):
        roll_call.roll_call(address, 0, 2, 0.8, said.append)
    assert said and said[0].endswith("missing 1")


def come(address: str, process: int, processes: int) -> socket.socket:
    """Return the connection of a process that has said who it is, and then does nothing."""
    host, _, port = address.rpartition(":")
    said = {"roll": MAGIC, "process": process, "processes": processes, "host": "far", "pid": 7}
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            connection.sendall(json.dumps(said).encode() + b"\n")
            return connection


def test_a_process_that_came_and_ended_is_named_to_the_others(address, monkeypatch):
    monkeypatch.setattr(caller, "GONE", 0.5)
    leaver = threading.Thread(target=lambda: come(address, 1, 3).close())
    leaver.start()
    began = time.monotonic()
    told = call(address, (0, 3), timeout=30.0)
    leaver.join()
    assert isinstance(told[0], HangError) and time.monotonic() - began < 15
    assert "process 1 (far, pid 7) came and ended before the others were there" in str(told[0])


def test_a_process_that_came_ended_and_was_started_again_is_there(address):
    leaver = threading.Thread(target=lambda: come(address, 1, 3).close())
    leaver.start()
    told = call(address, (0, 3), (2, 3), (1, 3), pause=0.4)
    leaver.join()
    assert told == [(HERE, HERE, HERE)] * 3


def test_a_process_that_takes_no_answer_is_named_as_frozen(address):
    held: list[socket.socket] = []
    frozen = threading.Thread(target=lambda: held.append(come(address, 1, 2)))
    frozen.start()
    (told,) = call(address, (0, 2))
    frozen.join()
    held[0].close()
    assert isinstance(told, HangError)
    assert "process 1 (far, pid 7) gave no answer: frozen" in str(told)


@pytest.mark.parametrize("how", ["ended", "frozen"])
def test_a_process_0_that_was_there_and_gives_no_sign_of_life_is_found_gone(monkeypatch, how):
    monkeypatch.setattr(caller, "GONE", 0.5)
    with socket.create_server(("localhost", 0)) as server:

        def serve() -> None:
            connection = server.accept()[0]
            connection.recv(1024)
            connection.sendall(b" ")
            if how == "ended":
                server.close()
                connection.close()
            else:
                connection.recv(1024)  # until the other leaves

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"localhost:{server.getsockname()[1]}"
        began = time.monotonic()
        (told,) = call(address, (1, 2), timeout=30.0)
        thread.join()
    assert isinstance(told, HangError) and time.monotonic() - began < 15
    assert f"process 0 at {address} waited for the others and then gave no sign of" in str(told)
