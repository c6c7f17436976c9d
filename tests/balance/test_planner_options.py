"""Planners of other packages with options of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig
from moe_dispatch.balance import ExpertPlacement, PlannerOptions, eplb, least_loaded, run_planner
from moe_dispatch.errors import ConfigError

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 128}


def test_options_reach_the_planners_of_this_package() -> None:
    home, counts = ExpertPlacement.contiguous(8, 4, spare=1), torch.tensor([900, 40, 300, 60, 50, 80, 70, 100])
    loose = DispatcherConfig(**SIZES, balance={"name": "least_loaded", "bound": 3.0}).slot_options
    packed = DispatcherConfig(**SIZES, balance={"name": "eplb", "num_groups": 4}).slot_options
    assert isinstance(loose, PlannerOptions)
    assert isinstance(packed, PlannerOptions)
    placements = [run_planner(planner, counts, home, ranks_per_node=2) for planner in (loose, packed)]
    assert placements[0] == least_loaded(counts, home, ranks_per_node=2, bound=3.0)
    assert placements[0] != run_planner("least_loaded", counts, home, ranks_per_node=2)
    assert placements[1] == eplb(counts, home, ranks_per_node=2, num_groups=4)
    assert placements[1] != run_planner("eplb", counts, home, ranks_per_node=2)


class Reversed(PlannerOptions):
    """The options of a planner of another package: experts of the ranks in reverse order, ``turns`` times."""

    turns: int = 1

    def __call__(self, counts: Tensor, home: ExpertPlacement, *, ranks_per_node: int) -> ExpertPlacement:
        slots = home.slots[::-1] if self.turns % 2 else home.slots
        return ExpertPlacement(home.num_experts, slots)


def test_a_planner_of_another_package_brings_its_options(install_planner: Callable[[str], None]) -> None:
    install_planner(f"{__name__}:Reversed")
    config = DispatcherConfig(**SIZES, balance={"name": "other", "turns": 3, "spare_experts_per_rank": 2})
    assert config.slot_options == Reversed(name="other", turns=3, spare_experts_per_rank=2)
    assert DispatcherConfig(**SIZES, balance="other").canonical["balance"]["turns"] == 1
    with pytest.raises(ConfigError, match=r"balance\.turn: .* Did you mean 'turns'\?"):
        DispatcherConfig(**SIZES, balance={"name": "other", "turn": 3})
    home = ExpertPlacement.contiguous(8, 2, spare=1)
    assert isinstance(config.slot_options, PlannerOptions)
    for planner in ("other", config.slot_options):
        assert run_planner(planner, torch.ones(8), home, ranks_per_node=2).slots == home.slots[::-1]


class _NoOptions:
    pass


def test_a_planner_that_is_another_class_is_refused(install_planner: Callable[[str], None]) -> None:
    install_planner(f"{__name__}:_NoOptions")
    with pytest.raises(
        ConfigError, match=r"Planner 'other' must be a function of .* or a subclass of .*PlannerOptions, got"
    ):
        DispatcherConfig(**SIZES, balance="other")
