"""How results are written: tables for people, plain values for JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from moe_dispatch.cli.bench.case import Case, CaseResult, Measured
from moe_dispatch.cli.bench.overhead import Overhead
from moe_dispatch.cli.bench.timing import Timing

_PACKAGES = ("torch", "torchtitan", "transformers")
_ALLOCATOR_VARIABLES = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES")


def machine() -> dict[str, str]:
    """Where and with what the numbers came about."""
    model = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": model[0].partition(": ")[2] if model else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "allocator": _allocator(),
    }


def _allocator() -> str:
    changed = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ALLOCATOR_VARIABLES)]
    pages = " ".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled"))
    return f"{', '.join(changed) or 'defaults of ' + ' '.join(platform.libc_ver())}; huge pages: {pages or 'unknown'}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def describe(case: Case) -> str:
    """A case in a few words."""
    shape = case.shape
    return (
        f"{_short(case.dtype)}, {case.skew}: {shape.tokens} tokens a rank, hidden {shape.hidden}, "
        f"{shape.experts} experts, top-{shape.top_k}"
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def case_table(result: CaseResult) -> str:
    """Times in seconds, bytes in MB of 10^6, one row per contender."""
    (_, ours), *_ = result.contenders.items()
    header = (
        *("", "dispatch", "combine", "backward", "total", "min..max", "cold", "cpu", "x ours", "cold x"),
        *("MB out", "x floor", "MB all", "x floor", "peak MB", "error"),
    )
    rows = [_case_row(name, measured, ours, result.floor_bytes) for name, measured in result.contenders.items()]
    return table([header, *rows])


def _case_row(name: str, measured: Measured, ours: Measured, floor: float) -> tuple[str, ...]:
    warm, cold, (low, high) = measured.timing.warm, measured.timing.cold, measured.timing.spread
    out, everything = measured.bytes_sent["dispatch"], sum(measured.bytes_sent.values())
    seconds = (warm.dispatch, warm.combine, warm.backward, warm.total)
    return (
        name,
        *(f"{value:.3f}" for value in seconds),
        f"{low:.3f}..{high:.3f}",
        f"{cold.total:.3f}",
        f"{warm.processor:.3f}",
        f"{warm.total / ours.timing.warm.total:.2f}",
        f"{cold.total / ours.timing.cold.total:.2f}",
        *(f"{out / 1e6:.2f}", _ratio(out, floor), f"{everything / 1e6:.2f}", _ratio(everything, 4 * floor)),
        f"{measured.peak_bytes / 1e6:.0f}",
        f"{measured.error:.1e}",
    )


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base else "-"


def overhead_table(overheads: Mapping[str, Overhead]) -> str:
    """Milliseconds, one row per contender."""
    rows = [(name, *("-" if ms is None else f"{ms:.3f}" for ms in astuple(cost))) for name, cost in overheads.items()]
    return table([("", "median ms", "fastest ms", "cpu ms", "in place: median ms", "fastest ms"), *rows])


def growth_header(names: Sequence[str]) -> tuple[str, ...]:
    """Columns of the growth table."""
    return ("", "value", *(f"{name} ms" for name in names), *(f"{name} x ours" for name in names[1:]))


def growth_row(axis: str, value: int, timings: Mapping[str, Timing]) -> tuple[str, ...]:
    """One point: medians of the total, and the peers' over ours."""
    ours, *peers = totals = [timing.warm.total for timing in timings.values()]
    return (axis, str(value), *(f"{1e3 * total:.1f}" for total in totals), *(f"{peer / ours:.2f}" for peer in peers))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def plain(case: Case, result: CaseResult) -> dict[str, Any]:
    """What JSON can hold of a case and its result."""
    return {"shape": asdict(case.shape), "dtype": _short(case.dtype), "routing": case.skew, **asdict(result)}
