"""The code of docs/tuning.md is true: its code runs, TensorBoard has what it writes, Prometheus could read its text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.integration.needs import needs
from tests.pages import run_page

SAMPLE = re.compile(r'moe_dispatch_(\w+)_total\{rank="0",\w+="\w[\w.]*",backend="alltoall"\} (\d+)')

pytestmark = needs("tensorboard")


def test_code_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = run_page("tuning.md")
    metrics = namespace["dispatcher"].metrics()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert events.Scalars("moe/imbalance")[0].value == pytest.approx(metrics.imbalance)
    assert events.Tags()["histograms"] == ["moe/tokens_per_expert"]
    lines = namespace["prometheus_text"](metrics, rank=0).splitlines()
    found = [match for line in lines if (match := SAMPLE.fullmatch(line))]
    assert len(found) == len(lines)
    tokens = sum(int(match[2]) for match in found if match[1] == "tokens")
    assert tokens == int(metrics.real_tokens_per_expert.sum()) == 80 - repeated(namespace["topk_ids"])


def repeated(ids_TK: torch.Tensor) -> int:
    """Rows that name one expert in both slots, which are merged."""
    return int((ids_TK[:, 0] == ids_TK[:, 1]).sum())
