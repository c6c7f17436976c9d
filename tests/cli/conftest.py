"""Commands in this process: what they print is caught, and the ranks that they start are threads."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import moe_dispatch_testing.ranks as threads
from moe_dispatch.backends import registry
from moe_dispatch_tools.app import app
from moe_dispatch_tools.compare import command as compare
from moe_dispatch_tools.compare import measurement
from moe_dispatch_tools.doctor import self_tests
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Body


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
        return threads.run_ranks(rank, size)[0]
    except ArithmeticError as error:
        raise threads.RankFailed(f"a rank of {size}: {error}") from error


def peak_of_threads(call: Callable[[], object], device: torch.device) -> int:
    """1 MB as the memory of every contender: of several threads only one can be watched by a profile."""
    call()
    return 1_000_000


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Ranks of a command silence their process's log; here they are threads of the tests' own."""
    logger = logging.getLogger("moe_dispatch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run ``moe-dispatch`` with some arguments."""
    monkeypatch.setattr(registry, "_REGISTERED", {**registry._REGISTERED})
    for module in (compare, self_tests):
        monkeypatch.setattr(module, "on_ranks", on_threads)
    monkeypatch.setattr(measurement, "peak_bytes", peak_of_threads)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> Answer:
        result = CliRunner().invoke(app, arguments, prog_name="moe-dispatch")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run
