"""The page docs/reliability.md: its code runs, and its error is the one that the watchdog writes."""

from __future__ import annotations

import torch.distributed as dist

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch.watchdog import RankNote, WatchedCall, watch_group, watch_of
from tests.pages import blocks, run_page
from tests.ranks import run_ranks


def test_the_code_of_the_page() -> None:
    def body(group: dist.ProcessGroup) -> float | None:
        run_page("reliability.md", DispatcherConfig=DispatcherConfig, build_dispatcher=build_dispatcher, group=group)
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
    assert told == blocks("docs/reliability.md", "text")[0].strip()
