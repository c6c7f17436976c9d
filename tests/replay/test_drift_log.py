"""The drift of replayed routing in the log of a run, and in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.replay import replayed
from moe_dispatch_tools.report.sections import run_content
from moe_dispatch_tools.traces import RunLog
from tests.dispatchers.layer import HIDDEN, small_config
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, four steps, two layers. The first layer drifts in ``step`` of 10 rows. The last step has no replay."""
    directory = tmp_path_factory.mktemp("logged") / "run"

    def body(group: Any) -> None:
        layers = [build_dispatcher(small_config(), group, name=name) for name in ("layers.0", "")]
        scores, own = torch.arange(8).expand(10, 8) / 10, torch.tensor([[7, 6]]).expand(10, 2)
        with RunLog.record(layers[0], directory) as log:
            for step in range(4):
                ids = own.clone()
                ids[:step, 0] = 1
                for layer, given in zip(layers, (ids, own), strict=True):
                    routing = replayed(given, scores, normalize=True) if step < 3 else Routing(own, torch.rand(10, 2))
                    sent = layer.dispatch(torch.zeros(10, HIDDEN), routing)
                    layer.combine(sent.rows, sent)
                log.step()

    run_ranks(body, 2)
    return directory


def test_log_has_the_slots_of_each_step(logged: Path) -> None:
    run = RunLog.load(logged)
    assert {name: counts.tolist() for name, counts in run.slots_replayed.items()} == {
        "layers.0": [[20, 20], [20, 20], [20, 20], [0, 0]],
        "": [[20, 20], [20, 20], [20, 20], [0, 0]],
    }
    assert run.slots_drifted["layers.0"].tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]
    assert not run.slots_drifted[""].any()


def test_report_shows_the_drift(logged: Path) -> None:
    section = run_content("run", RunLog.load(logged))["sections"][-1]
    assert section["heading"] == "Routing replay"
    (table,) = section["tables"]
    assert table["rows"] == [("layers.0", 120, 6, 5, 10), ("without a name", 120, 0, 0, 0)]
    assert "at most 10" in section["pictures"][-1]
