"""``moe-dispatch plan --balance``: what placements with copies of experts would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch.backends import MoEShape
from moe_dispatch.cli.plan.balance import PlacementPlan, placement_plans
from tests.cli.conftest import Command
from tests.cli.plan.test_models import QWEN3, written

SHAPE = MoEShape(num_experts=8, top_k=2, hidden_size=16, ep_size=4, pad_multiple=1, ranks_per_node=4)


def plans(experts_CPE: torch.Tensor) -> dict[tuple[str, int], PlacementPlan]:
    return {(one.planner, one.spare): one for one in placement_plans(experts_CPE, SHAPE, 1000)}


def test_rows_by_hand() -> None:
    """Each rank has 36 rows for expert 0 and 4 for the others: a copy of expert 0 on each rank takes 36."""
    counts_PE = torch.tensor([36, 4, 4, 4, 4, 4, 4, 4]).expand(4, 8)
    found = plans(torch.stack([counts_PE] * 3))
    none, every = found["none", 0], found["eplb", 1]
    mean = 4 * (36 + 7 * 4) / 4
    assert (none.peak_rows, none.copied_experts, none.copied_bytes) == (160, 0, 0)
    assert none.imbalance == pytest.approx(160 / mean)
    assert every.imbalance < 1.2
    assert every.copied_bytes == every.copied_experts * 1000
    assert found["least_loaded", 2].copied_experts <= every.copied_experts


def test_eplb_places_once_and_least_loaded_for_each_dispatch() -> None:
    """Two dispatches with different busy experts: one placement for both balances neither."""
    first, second = torch.ones(4, 8), torch.ones(4, 8)
    first[:, 0], second[:, 7] = 20, 20
    found = plans(torch.stack([first, second]))
    assert found["least_loaded", 1].worst_imbalance < found["eplb", 1].worst_imbalance
    assert found["eplb", 1].worst_imbalance < found["none", 0].worst_imbalance


def test_command(command: Command, tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256, "moe_intermediate_size": 64}
    model = str(written(tmp_path, {**QWEN3, **sizes}))
    arguments = ["plan", model, "--ep", "4", "--tokens", "512", "--routing", "zipf", "-b", "alltoall"]
    shown = command(*arguments, "--balance")
    assert shown.status == 0, shown.error
    assert "copied experts" in shown.out
    assert "copied experts" not in command(*arguments).out
    told: Any = json.loads(command(*arguments, "--balance", "--json").out)["placements"]
    none, _, least, _ = told
    assert least["imbalance"] < none["imbalance"]
    assert least["copied_bytes"] == least["copied_experts"] * 3 * 256 * 64 * 2


def test_the_width_of_an_expert_may_be_unknown(command: Command, tmp_path: Path) -> None:
    model = tmp_path / "dispatcher.json"
    model.write_text(json.dumps({"num_experts": 16, "top_k": 4, "hidden_size": 256}))
    shown = command("plan", str(model), "--ep", "4", "--tokens", "64", "-b", "alltoall", "--balance")
    assert shown.status == 0, shown.error
    assert "unknown" in shown.out
