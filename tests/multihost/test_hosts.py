"""The hosts themselves: their names, their links, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.processes import hearing_interrupts
from tests.multihost.hosts import Job, Link, make_hosts, missing

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


# host1 asks host0 for a byte, and tells how many ms that takes.
PING = """
import socket, time
if socket.gethostname() == "host0":
    connection, _ = socket.create_server(("host0", 5000)).accept()
    connection.sendall(connection.recv(1))
else:
    for attempt in range(100):
        try:
            connection = socket.create_connection(("host0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    begin = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    print(1e3 * (time.perf_counter() - begin))
"""


def test_link_has_the_delay(tmp_path: Path) -> None:
    with make_hosts(2, Link(delay_ms=20)) as hosts:
        first, second = Job(hosts, [sys.executable, "-c", PING], tmp_path).results(30)
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert 40 <= float(second.output) < 80


def processes_in(namespaces: set[str]) -> list[str]:
    """Processes in any of these network namespaces."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.readlink(process / "ns" / "net") in namespaces:
                found.append(process.name)
    return found


def wait_until_left(namespaces: set[str], expected: list[str]) -> None:
    """Wait until only some processes are left: the kernel ends the others a moment after they are killed."""
    deadline = time.monotonic() + 10
    while (left := processes_in(namespaces)) != expected:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def network_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def test_time_limit_ends_what_a_command_started(tmp_path: Path) -> None:
    with make_hosts(1) as hosts:
        namespace = {network_of(hosts[0].process.pid)}
        idle = processes_in(namespace)
        (result,) = Job(hosts, ["sh", "-c", "setsid sleep 100 & echo begun; sleep 100"], tmp_path).results(2)
        assert (result.status, result.output) == (None, "begun\n")
        assert 2 <= result.seconds < 10
        wait_until_left(namespace, idle)


ABANDON = """
import sys, time
from pathlib import Path
from tests.cli.processes import hearing_interrupts
from tests.multihost.hosts import Job, make_hosts
with make_hosts(2) as hosts:
    job = Job(hosts, ["sh", "-c", "setsid sleep 1000 & sleep 1000"], Path(sys.argv[1]))
    time.sleep(0.5)
    print(*(host.process.pid for host in hosts), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after(number: signal.Signals, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", ABANDON, str(tmp_path)]
    with hearing_interrupts():
        program = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root, start_new_session=True
        )
    try:
        assert program.stdout is not None
        holders = program.stdout.readline().split()
        namespaces = {network_of(pid) for pid in holders}
        assert len(namespaces) == 2
        program.send_signal(number)
        program.wait(30)
        wait_until_left(namespaces, [])
    finally:
        program.kill()
        program.communicate()
