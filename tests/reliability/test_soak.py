"""A short soak, and the leaks that it must see. `make soak` runs for minutes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import Dispatched
from moe_dispatch_testing import run_processes
from tests.reliability.soak import Count, Leak, growth, soak

KEPT: list[Any] = []


def leak_everything(all_sent: list[Dispatched]) -> None:
    KEPT.extend((all_sent[0].rows, torch.ones(2**19)))  # of 2 MiB
    KEPT.append(Path("/proc/self/statm").open())  # noqa: SIM115
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def grown(leak: Leak) -> list[str]:
    counts: list[list[Count]] = run_processes(soak, 2, 0.0, 512, leak)
    return [sentence for of_rank in counts for sentence in growth(of_rank)]


@pytest.mark.slow
def test_nothing_grows() -> None:
    assert grown(len) == []


@pytest.mark.slow
def test_leaks_are_seen() -> None:
    told = grown(leak_everything)
    for name in ("memory_mib", "tensors", "threads", "files"):
        assert any(sentence.startswith(f"{name} grew from") for sentence in told)
