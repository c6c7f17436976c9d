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
from tests.multihost.hosts import missing

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


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
