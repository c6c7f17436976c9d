"""``alltoall_by_node`` on CUDA tensors: its experts get the rows that they get with ``alltoall``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Routing
from tests.simulated_cuda.layer import EXPERTS, HIDDEN, TOP_K, dispatcher_of
from tests.simulated_cuda.ranks import NcclRanks

TOKENS = 24


def test_experts_get_the_rows_of_one_level() -> None:
    def body(group: dist.ProcessGroup) -> None:
        device = torch.device("cuda", group.rank())
        generator = torch.Generator(device).manual_seed(group.rank())
        x = torch.randn(TOKENS, HIDDEN, generator=generator, device=device)
        weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator, device=device).topk(TOP_K)

        def layer(backend: Any) -> tuple[Tensor, ...]:
            dispatcher = dispatcher_of(backend, group)
            sent = dispatcher.dispatch(x, Routing(ids, weights))
            y = dispatcher.combine(sent.rows, sent)
            dispatcher.close()
            return sent.tokens_per_expert, sent.rows, sent.weights, y

        one = layer("alltoall")
        two = layer({"name": "alltoall_by_node", "ranks_per_node": 2})
        for found, expected in zip(two[:-1], one[:-1], strict=True):
            assert torch.equal(found, expected)
        torch.testing.assert_close(two[-1], one[-1])  # sums of another order

    NcclRanks().run(body, 4)
