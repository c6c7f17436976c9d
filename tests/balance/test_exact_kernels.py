"""The Triton kernels of exact plans against operators of torch, in Triton's interpreter.

``test_permutation_triton.py`` starts a process for them: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from moe_dispatch.capabilities.balance.exact import ExactPlan, ExactPlanner
from tests.backends.permutations import INTERPRETED
from tests.balance.test_exact import draw

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_permutation_triton.py runs these in the interpreter")

# Ranks, experts of a rank, spare slots, ranks of a node. One rank; fewer slots than experts; nodes of one and of two;
# more ranks and more experts than a warp has threads; few slots for small experts.
SHAPES = [
    (1, 2, 2, 1),
    (2, 1, 1, 2),
    (3, 3, 3, 3),
    (4, 2, 2, 2),
    (4, 3, 1, 1),
    (6, 3, 2, 3),
    (34, 1, 1, 17),
    (2, 130, 3, 2),
    (3, 8, 1, 3),
]


def expect_equal(found: ExactPlan, expected: ExactPlan) -> None:
    assert found.ends_EP is not None
    assert expected.ends_EP is not None
    assert torch.equal(found.placement.copies_PS, expected.placement.copies_PS)
    assert torch.equal(found.ends_EP, expected.ends_EP)
    assert torch.equal(found.slots_EP, expected.slots_EP)
    assert torch.equal(found.experts_L, expected.experts_L)
    assert torch.equal(torch.as_tensor(found.num_copies), torch.as_tensor(expected.num_copies))


@pytest.mark.parametrize("pad_multiple", [1, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_and_slots_are_those_of_torch(shape: tuple[int, int, int, int], pad_multiple: int) -> None:
    from moe_dispatch.capabilities.balance import triton_plan

    ranks, per_rank, spare, per_node = shape
    generator = torch.Generator().manual_seed(ranks)
    for rows in (400,) if ranks * per_rank > 30 else (0, 3, 400):
        for skew, bound in ((0.1, 1.0), (3.0, 1.0), (30.0, 1.05)):
            rank = random.Random(rows).randrange(ranks)
            fields: dict[str, Any] = {"spare": spare, "pad_multiple": pad_multiple, "bound": bound}
            sizes = (ranks * per_rank, ranks, rank)
            torch_s = ExactPlanner(*sizes, **fields, ranks_per_node=per_node)
            kernels = ExactPlanner(*sizes, **fields, ranks_per_node=per_node, kernels=triton_plan)
            counts = draw(generator, ranks, per_rank, rows, skew)
            ids = torch.randint(-1, ranks * per_rank, (rows // 20, 2), generator=generator)
            mine, turns = kernels.counts_and_turns(ids)
            theirs, _ = torch_s.counts_and_turns(ids)
            assert torch.equal(mine, theirs)
            counts[rank] = mine
            found, expected = kernels(counts), torch_s(counts)
            expect_equal(found, expected)
            assert torch.equal(found.slots_of(ids, turns), expected.slots_of(ids))


def test_more_experts_than_fit_are_planned_by_torch() -> None:
    from moe_dispatch.capabilities.balance import triton_plan

    counts = torch.ones(1, triton_plan.LARGEST + 1, dtype=torch.int64)
    assert ExactPlanner(counts.shape[1], 1, 0, spare=1, kernels=triton_plan)(counts).kernels is None
