"""The most memory a contender holds at once, as torch's allocators tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes that ``call`` holds at once on a device, above what was held before it."""
    return _peak_on_cpu(call, lives=3) if device.type == "cpu" else _peak_on_gpu(call, device)


def _peak_on_gpu(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Callable[[], object], lives: int) -> int:
    """Largest sum of bytes allocated and not yet released during ``call``, which must release all it allocates.

    Covers what a contender keeps between its calls, such as reused buffers, if ``call`` opens and closes it. Only the
    calling thread is seen, which on a CPU runs the backward too. Now and then a thread of gloo is the last to hold a
    tensor; its release is then missed and everything after it counts as too high. So ``call`` runs ``lives`` times, and
    what was never released is taken off the life that left least: exact where one life left nothing, else too low.
    """
    left, peak = min(_left_and_peak(_memory_changes(call)) for _ in range(lives))
    return peak - left


def _memory_changes(call: Callable[[], object]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorded = profiler.profiler
    assert recorded is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _left_and_peak(changes: Iterable[int]) -> tuple[int, int]:
    """The last and the largest value of the running sum."""
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return level, peak
