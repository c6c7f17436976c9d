"""The page on traces: its code runs, and it says what the file and the values really hold."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch
from safetensors import safe_open

from moe_dispatch_tools.traces import RunLog, Trace
from tests.pages import run_page

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_code_of_the_page_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = PAGE.read_text(encoding="utf-8")
    with contextlib.chdir(tmp_path):
        namespace = run_page("traces.md")
    assert namespace["trace"].steps == 3  # the blocks ran to the end
    with safe_open(tmp_path / "out" / "run.safetensors", framework="pt") as file:
        for name in [*file.metadata(), *(key.replace("rank0", "rank{r}") for key in file.keys())]:  # noqa: SIM118
            assert f"`{name}`" in text, name
    for item in dataclasses.fields(Trace):
        assert f"`{item.name}`" in text or item.name == "ranks", item.name
    assert "trace.ranks" in text
    for item in dataclasses.fields(RunLog):
        assert f"`{item.name}`" in text, item.name
    assert namespace["run"].steps == 3
