"""``moe-dispatch plan --balance``: what placements with copies of experts would save."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch.backends import MoEShape
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch_tools.loads import count_loads
from moe_dispatch_tools.placements import (
    CHOICES,
    Choice,
    ExpertCost,
    PlacementPlan,
    in_slots,
    placement_plans,
    rows_of_experts,
)
from moe_dispatch_tools.plan import routing
from tests.cli.conftest import Command
from tests.cli.plan.planned import config, mixed_ids
from tests.cli.plan.test_models import QWEN3, written

SHAPE = MoEShape(num_experts=8, top_k=2, hidden_size=16, ep_size=4, pad_multiple=1, ranks_per_node=4)
COST = ExpertCost(itemsize=2, nbytes=1000, flop_per_byte=600)


@pytest.fixture(autouse=True)
def few_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_MOST_DISPATCHES", 8)


def plans(experts_CPE: torch.Tensor) -> dict[tuple[str, int], PlacementPlan]:
    return {(one.planner, one.spare): one for one in placement_plans(experts_CPE, SHAPE, CHOICES, COST)}


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


def test_break_even_by_hand() -> None:
    """Rank 1 gets a copy of the only busy expert. That saves rank 0 half of its rows: one for each token per expert."""
    shape = dataclasses.replace(SHAPE, num_experts=2, ep_size=2, ranks_per_node=2)
    counts_CPE = torch.tensor([[[10, 0], [10, 0]]])
    none, least = placement_plans(counts_CPE, shape, (Choice(), Choice("least_loaded", 1)), COST)
    assert (none.imbalance, least.imbalance, least.copied_experts) == (2, 1, 1)
    # A row takes 6 FLOP for each weight. A weight and its gradient are 2 times 2 bytes, the time of 2400 FLOP.
    assert (none.break_even, least.break_even) == (None, 2400 / 6)
    assert (none.slot_bytes, least.slot_bytes) == (1000, 2000)


def test_rows_of_copies_are_rows_of_their_expert() -> None:
    """The counts of a dispatch by expert are the same with and without copies."""
    dispatches = [mixed_ids(4), mixed_ids(4, seed=1)]
    plain = count_loads(dispatches, shape_of(config(), 4)).experts_CPE
    for fields in ({}, {"balance": "least_loaded"}):
        given = config(spare_experts_per_rank=2, **fields)
        used: list[ExpertPlacement] = []
        shape = shape_of(given, 4)
        loads = count_loads(in_slots(dispatches, given, shape, used), shape)
        assert rows_of_experts(loads.experts_CPE, used).equal(plain)
        assert any(len(slots) > 1 for slots in used[0].slots_of_expert) == bool(fields)


def test_command(command: Command, tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256, "moe_intermediate_size": 64}
    model = str(written(tmp_path, {**QWEN3, **sizes}))
    arguments = ["plan", model, "--ep", "4", "--tokens", "512", "--routing", "zipf", "-b", "alltoall"]
    shown = command(*arguments, "--balance")
    assert shown.status == 0, shown.error
    assert "least_loaded" in shown.out
    assert "least_loaded" not in command(*arguments).out
    assert "break-" in command(*arguments, "--balance", "--flop-per-byte", "500").out
    assert "break-" not in shown.out
    told: Any = json.loads(command(*arguments, "--balance", "--json").out)["placements"]
    none, _, least, _ = told
    assert least["imbalance"] < none["imbalance"]
    assert least["copied_bytes"] == least["copied_experts"] * 3 * 256 * 64 * 2


def test_the_placement_of_the_config_is_planned(command: Command, tmp_path: Path) -> None:
    model = tmp_path / "dispatcher.json"
    model.write_text(json.dumps({"num_experts": 16, "top_k": 4, "hidden_size": 256, "spare_experts_per_rank": 2}))
    arguments = ["plan", str(model), "--ep", "4", "--tokens", "512", "--routing", "zipf", "-b", "alltoall"]
    empty = command(*arguments)
    assert "a rank has 6 expert slots, 2 of them spare, which stay empty" in empty.out
    balanced = [*arguments, "--set", "balance=least_loaded"]
    shown = command(*balanced)
    assert "2 of them spare, filled by least_loaded in each dispatch" in shown.out
    assert "capacity" not in shown.out
    without, found = (json.loads(command(*asked, "--json").out) for asked in (arguments, balanced))
    assert [(one["planner"], one["spare"]) for one in found["placements"]] == [("none", 0), ("least_loaded", 2)]
    assert found["busiest_rank"]["expected"] == pytest.approx(
        found["placements"][1]["imbalance"] * found["received"]["expected"], rel=0.01
    )
    assert found["busiest_rank"]["expected"] < 0.8 * without["busiest_rank"]["expected"]
    assert found["busiest_expert"] == without["busiest_expert"]
    assert found["backends"][0]["sent"]["balance"]["expected"] == 8 * 17 * 3


def test_the_width_of_an_expert_may_be_unknown(command: Command, tmp_path: Path) -> None:
    model = tmp_path / "dispatcher.json"
    model.write_text(json.dumps({"num_experts": 16, "top_k": 4, "hidden_size": 256}))
    shown = command("plan", str(model), "--ep", "4", "--tokens", "64", "-b", "alltoall", "--balance")
    assert shown.status == 0, shown.error
    assert "unknown" in shown.out
