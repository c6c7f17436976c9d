"""Hosts on one machine: each has its own name, network and processes, and a link with a rate, a delay and a loss.

    with make_hosts(2, Link(delay_ms=20)) as hosts:
        results = Job(hosts, ["torchrun", ...], tmp_path).results(seconds=60)

A host is a set of Linux namespaces. They have no names and exist as long as a process that reads a pipe from this one.
So nothing of a host is left when this process ends, even if it is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

_RELAY = Path(__file__).with_name("relay.py")
# Ends with its standard input. As process 1 of its host it takes all other processes with it. No host asks for names
# on the network.
_BOOT = """
echo "$1" >/proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf &&
ip link set lo up && echo && exec cat
"""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link of each host to all others.

    Attributes:
        megabits: Rate in Mbit/s in each direction, or 0 for no limit.
        delay_ms: Delay of a packet from one host to another, in ms.
        loss: Probability that a packet is lost, from 0 to 1.
    """

    megabits: float = 0.0
    delay_ms: float = 0.0
    loss: float = 0.0


@final
class Host:
    """One host. Its interface is ``eth0``, and ``/etc/hosts`` has the names of all hosts."""

    def __init__(self, name: str, address: str, names: Path) -> None:
        self.name, self.address = name, address
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.started: list[subprocess.Popen[bytes]] = []
        self.process = _start(["unshare", *namespaces, "sh", "-c", _BOOT, "sh", name, str(names)])

    def command(self, *words: str) -> list[str]:
        """The command line that runs a command on this host."""
        own = f"/proc/{self.process.pid}/ns"
        namespaces = [f"--net={own}/net", f"--uts={own}/uts", f"--mount={own}/mnt", f"--pid={own}/pid_for_children"]
        return ["nsenter", *namespaces, *words]

    def call(self, *words: str) -> None:
        """Run a short command on this host."""
        subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=30)

    def cut(self) -> None:
        """Cut the link of this host. Packets on their way are lost, and nobody is told."""
        self.call("ip", "link", "set", "eth0", "down")

    def end(self) -> None:
        """Kill all processes of this host, the first one too, so that nothing is left of it."""
        _end(self.process)
        for process in self.started:
            process.wait()

    def kill_all(self) -> None:
        """Kill all commands of this host."""
        self.call("sh", "-c", "kill -9 -1")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a command did on one host.

    Attributes:
        host: Name of the host.
        status: Exit status, or None if it ran until the time limit and was killed.
        output: Its standard output and errors.
        seconds: How long it ran.
    """

    host: str
    status: int | None
    output: str
    seconds: float


@final
class Job:
    """One command that runs on all hosts at once.

    Args:
        hosts: The hosts.
        command: The command and its arguments.
        directory: Gets a folder for each host: ``directory/NAME`` is the working directory there.
        environment: Further environment variables. ``NODE_RANK`` is the number of the host, counted from 0.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts, self._directory = hosts, directory
        self._begin = time.monotonic()
        self._processes = []
        for number, host in enumerate(hosts):
            (directory / host.name).mkdir(parents=True, exist_ok=True)
            words = host.command("env", f"--chdir={directory / host.name}", *command)
            with self._file(host).open("w") as output:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "NODE_RANK": str(number), **(environment or {})},
                )
            host.started.append(process)
            self._processes.append(process)

    def _file(self, host: Host) -> Path:
        return self._directory / f"{host.name}.log"

    def output(self, host: Host) -> str:
        """What the command has written on a host so far."""
        return self._file(host).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, host: Host, seconds: float) -> None:
        """Wait until the command has written a text on a host."""
        deadline = time.monotonic() + seconds
        while text not in self.output(host):
            assert time.monotonic() < deadline, f"{text!r} is not in the output of {host.name}:\n{self.output(host)}"
            assert any(process.poll() is None for process in self._processes), self.output(host)
            time.sleep(0.02)

    def results(self, seconds: float) -> list[Result]:
        """Wait until the command has ended on all hosts, and kill it where it runs longer than a time limit."""
        deadline = time.monotonic() + seconds
        ended: dict[str, float] = {}
        while len(ended) < len(self._hosts) and time.monotonic() < deadline:
            for host, process in zip(self._hosts, self._processes, strict=True):
                if process.poll() is not None:
                    ended.setdefault(host.name, time.monotonic() - self._begin)
            time.sleep(0.02)
        for host, process in zip(self._hosts, self._processes, strict=True):
            if host.name not in ended:
                host.kill_all()
                process.wait()
        return [
            Result(
                host=host.name,
                status=process.returncode if host.name in ended else None,
                output=self.output(host),
                seconds=ended.get(host.name, time.monotonic() - self._begin),
            )
            for host, process in zip(self._hosts, self._processes, strict=True)
        ]


@contextmanager
def make_hosts(count: int, link: Link | None = None, *, own_address: str | None = None) -> Iterator[list[Host]]:
    """Make hosts ``host0``, ``host1`` and so on, with the addresses 10.77.0.1, 10.77.0.2 and so on.

    Args:
        count: Number of hosts, at most 250.
        link: Their links; by default without limit, delay and loss.
        own_address: Address of each host's own name in its own ``/etc/hosts``; by default that of ``eth0``.
    """
    link = link or Link()
    addresses = {f"host{index}": f"10.77.0.{index + 1}" for index in range(count)}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        hosts = []
        for name, address in addresses.items():
            names = Path(folder) / name
            table = {"localhost": "127.0.0.1", **addresses, name: own_address or address}
            names.write_text("".join(f"{number} {known}\n" for known, number in table.items()))
            host = Host(name, address, names)
            stack.callback(host.end)
            hosts.append(host)
        for host in hosts:
            _await_start(host.process)
        numbers = [link.megabits * 1e6, link.delay_ms / 1e3, link.loss]
        relay = _start([sys.executable, "-S", "-E", str(_RELAY), *map(str, numbers), *_pids(hosts)])
        stack.callback(_end, relay)
        _await_start(relay)
        for host in hosts:
            host.call("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.call("ip", "link", "set", "eth0", "up")
        yield hosts


@cache
def missing() -> str:
    """Why hosts cannot be made on this machine, or an empty text."""
    if sys.platform != "linux":
        return "hosts need Linux"
    if os.geteuid() != 0:
        return "hosts need root"
    if absent := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"hosts need the commands {', '.join(absent)}"
    try:
        with make_hosts(1):
            return ""
    except (RuntimeError, subprocess.SubprocessError) as error:
        return f"hosts cannot be made here: {error}"


def _pids(hosts: Sequence[Host]) -> list[str]:
    return [f"{host.address}={host.process.pid}" for host in hosts]


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _await_start(process: subprocess.Popen[str]) -> None:
    """Wait for the first line of a process.

    Raises:
        RuntimeError: it ended without one; with its errors.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    if not process.stdout.readline():
        raise RuntimeError(process.stderr.read().strip())


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
