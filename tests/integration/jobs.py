"""Many checks in one set of processes: importing a framework and meeting takes longer than most of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, final

import pytest

from moe_dispatch_testing import run_processes

# Ranks import the framework before they meet, on machines that others use too.
TIMEOUT = timedelta(seconds=180)

Check = Callable[[int], Any]  # of a rank; what it returns is the result
Within = Callable[[int], AbstractContextManager[None]]  # in which the checks run; it is given the number of ranks


@final
class Raised(str):
    """A traceback in the place of a result. Later checks do not run: ranks may stand in different collectives."""


def run_checks(checks: Mapping[str, Check], ranks: int, within: Within | None = None) -> dict[str, list[Any]]:
    """The results by name, each by rank."""
    by_rank = run_processes(_on_rank, ranks, checks, ranks, within, timeout=TIMEOUT)
    return {name: [found[name] for found in by_rank] for name in checks}


def require(results: list[Any]) -> list[Any]:
    """The results; fails with the first traceback that is not another rank's fault."""
    raised = [result for result in results if isinstance(result, Raised)]
    if raised:
        own = [text for text in raised if "Connection closed by peer" not in text and "not reached" not in text]
        pytest.fail((own or raised)[0], pytrace=False)
    return results


def _on_rank(rank: int, checks: Mapping[str, Check], ranks: int, within: Within | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    failed = ""
    with within(ranks) if within else nullcontext():
        for name, check in checks.items():
            if failed:
                results[name] = Raised(f"not reached, because {failed!r} failed")
                continue
            try:
                results[name] = check(rank)
            except Exception:
                failed, results[name] = name, Raised(traceback.format_exc())
    return results
