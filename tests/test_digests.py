"""``python -m tests.digests`` prints the same digest again, and another one where one bit differs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_dispatch.permutation import TorchPermutation
from moe_dispatch_testing.kit import backend_cases
from moe_dispatch_testing.ranks import Ranks
from tests.digests import digest


def test_a_digest_depends_on_bits_and_on_nothing_else() -> None:
    ranks, case = Ranks(), next(case for case in backend_cases("alltoall", (2,)) if not case.scenario.graph_safe)
    sum_bags = TorchPermutation.sum_bags

    def other(self: Any, rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        sum_bags(self, rows, members_N, cu_S, weights_N, out)
        out *= 1 + torch.finfo(out.dtype).eps  # within the tolerance of the kit

    first = digest("alltoall", case, ranks)
    assert len(first) == 16
    assert digest("alltoall", case, ranks) == first
    with patch.object(TorchPermutation, "sum_bags", other):
        found = digest("alltoall", case, ranks)
    assert len(found) == 16
    assert found != first
