"""Commands in this process: what they print is caught, and the ranks that they start are threads."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from moe_dispatch.backends import registry
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools import ranks
from moe_dispatch_tools.app import app
from moe_dispatch_tools.compare import command as compare
from moe_dispatch_tools.compare import measurement, peers
from moe_dispatch_tools.doctor import self_tests
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Body
from tests.ranks import run_ranks


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command came to."""

    status: int
    out: str
    error: str


Command = Callable[..., Answer]


def on_threads(body: Body, size: int, on_message: Callable[[Any], None]) -> Any:
    """``on_ranks``, as far as a body can tell."""

    def rank(group: dist.ProcessGroup) -> Any:
        place = Place(device=torch.device("cpu"), group=group)
        return body(place, on_message if place.rank == 0 else lambda message: None)

    try:
        return run_ranks(rank, size)[0]
    except ArithmeticError as error:
        raise RankFailed(f"a rank of {size}: {error}") from error


def peak_of_threads(call: Callable[[], object], device: torch.device) -> int:
    """1 MB as the memory of every contender: of several threads only one can be watched by a profile."""
    call()
    return 1_000_000


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command registers, and the log that its ranks silence: as they would end with its process."""
    monkeypatch.setattr(registry, "_REGISTERED", {**registry._REGISTERED})
    logger = logging.getLogger("moe_dispatch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run ``moe-dispatch`` with some arguments, and with further variables of the environment."""
    for module in (compare, self_tests):
        monkeypatch.setattr(module, "on_ranks", on_threads)
    monkeypatch.setattr(measurement, "peak_bytes", peak_of_threads)
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.0)  # nobody else is there whose error would be waited for
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> Answer:
        result = CliRunner().invoke(app, arguments, prog_name="moe-dispatch", env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package that ``compare`` compares with is installed."""
    monkeypatch.setattr(peers, "find_spec", lambda name: None)


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package says that it has the backend ``reef``, in a module that cannot be imported."""
    information = tmp_path / "third_party-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[moe_dispatch.backends]\nreef = a_module_that_is_not_there:Reef\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are on one host, ranks 2 and 3 on another."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{int(threading.current_thread().name[-1]) // 2}")
