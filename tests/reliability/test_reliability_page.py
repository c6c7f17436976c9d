"""The page docs/reliability.md: its code runs, and its error is the one that the watchdog writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch.watchdog import RankNote, WatchedCall, watch_group, watch_of
from moe_dispatch_testing import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_code_of_the_page() -> None:
    def body(group: dist.ProcessGroup) -> float | None:
        names: dict[str, Any] = {
            "DispatcherConfig": DispatcherConfig,
            "build_dispatcher": build_dispatcher,
            "group": group,
        }
        exec(block("python"), names)
        watch = watch_of(group)
        return None if watch is None else watch.seconds

    assert run_ranks(body, 2) == [60, 60]


def note(number: int, phase: str, *, alive: bool = True) -> RankNote:
    return RankNote(
        "vm", 9, False, number, phase.split()[0], "in", phase, 2.0, 19, "combine of 'layers.0' (call 19)", alive
    )


def test_the_error_of_the_page() -> None:
    (group,) = run_ranks(lambda group: group, 1)
    watch = watch_group(group, 2)
    watch.layer = "layers.1"
    here, lost = note(20, "counts of 'layers.1' (call 20)"), note(12, "combine of 'layers.0' (call 12)", alive=False)
    told = watch._text(WatchedCall(watch, 20, "counts", 72), [here, lost, here, here])
    assert told == block("text").strip()
