"""Integers that travel with rows of ``alltoall`` and ``allgather`` on CUDA, by the kernels that write packets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import Routing
from tests.simulated_cuda.layer import EXPERTS, HIDDEN, TOP_K, dispatcher_of
from tests.simulated_cuda.ranks import NcclRanks

TOKENS = 24


@pytest.mark.parametrize("fields", [{}, {"graph_safe": True, "max_tokens_per_rank": TOKENS}], ids=["eager", "safe"])
@pytest.mark.parametrize("backend", ["alltoall", "allgather", {"name": "alltoall_by_node", "ranks_per_node": 2}])
def test_each_row_carries_the_number_of_its_token(backend: Any, fields: dict[str, Any]) -> None:
    if fields and isinstance(backend, dict):
        pytest.skip("not graph-safe")

    def body(group: dist.ProcessGroup) -> None:
        device, rank = torch.device("cuda", group.rank()), group.rank()
        generator = torch.Generator(device).manual_seed(rank)
        token = 100 * rank + torch.arange(TOKENS, device=device)
        x = (token + 1).unsqueeze(1).expand(-1, HIDDEN).to(torch.float32).contiguous()
        weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator, device=device).topk(TOP_K)
        dispatcher = dispatcher_of(backend, group, **fields)
        sent = dispatcher.dispatch(x, Routing(ids, weights), carry={"token": token, "narrow": token.int()})
        assert sent.carried is not None
        real = sent.carried["token"] >= 0
        assert int(real.sum()) == int(sent.real_tokens_per_expert.sum())
        assert torch.equal(sent.carried["token"][real], sent.rows[real][:, 0].long() - 1)
        assert torch.equal(sent.carried["narrow"].long(), sent.carried["token"])
        dispatcher.close()

    NcclRanks().run(body, 4)
