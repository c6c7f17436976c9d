"""Recomputed layers on the simulated devices, whose backwards run in autograd's own threads."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Routing
from tests.recompute.layer import called
from tests.simulated_cuda.budget import SAFE
from tests.simulated_cuda.layer import BATCH, EXPERTS, HIDDEN, LENGTH, TOP_K, Recorder, dispatcher_of
from tests.simulated_cuda.ranks import NcclRanks

LAYERS = 3


def steps(group: dist.ProcessGroup, recorder: Recorder, backend: str, fields: dict[str, Any]) -> dict[str, Any]:
    """By the way of a step: the gradient of x, and the host syncs of the backward on rank 0."""
    rank, device = group.rank(), torch.device("cuda", group.rank())
    dispatcher, found = dispatcher_of(backend, group, **fields), dict[str, Any]()
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(BATCH * LENGTH, HIDDEN, generator=generator, device=device).bfloat16().requires_grad_()
    gate = torch.randn(HIDDEN, EXPERTS, generator=generator, device=device).bfloat16()

    def layer(x: Tensor) -> Tensor:
        weights, ids = (x @ gate).float().softmax(1).topk(TOP_K)
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        return x + dispatcher.combine(sent.rows.tanh(), sent)

    for how in ("plain", "plain", "anew", "kept", "kept, only added"):
        x.grad, y = None, x
        for _ in range(LAYERS):
            y = called(how, layer, y)
        records = recorder(rank, partial(torch.autograd.backward, y.float().square().sum()))
        syncs = [record.detail for record in records if record.kind == "sync"]
        assert x.grad is not None
        found[how] = x.grad.cpu(), syncs, Counter(dispatcher.metrics().collectives)
    dispatcher.close()
    return found


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_host_syncs_and_exchanges_of_a_backward(backend: str, fields: dict[str, Any]) -> None:
    """On NCCL alone: one sync fewer for each dispatch, and one more of the backward at its start and at its end."""
    recorder = Recorder(2)
    by_rank = NcclRanks().run(lambda group: steps(group, recorder, backend, fields), 2)
    for found in by_rank:
        assert torch.equal(found["kept"][0], found["plain"][0])
        plain, anew, kept = (found[how][2] for how in ("plain", "anew", "kept"))
        plain = Counter({label: count // 2 for label, count in plain.items()})
        assert (anew - plain - plain)["combine"] == 2 * LAYERS
        assert (kept - anew)["combine"] == (2 if fields else 1) * LAYERS
        assert (kept - anew)["recompute"] == (0 if fields else 2)
        assert (kept - anew)["counts"] == (0 if fields or backend != "alltoall" else LAYERS)
        grad, _, only_added = found["kept, only added"]
        assert torch.equal(grad, found["plain"][0])
        assert (only_added - kept)["combine"] == LAYERS
        assert (only_added - kept)["recompute"] == (0 if fields else 1)
    syncs = {how: details for how, (_, details, _) in by_rank[0].items()}
    asks = ["cudaStreamSynchronize"]
    assert syncs["plain"] == []
    assert syncs["anew"] == ([] if fields else LAYERS * asks)
    # The numbers of other ids are read when all of them have been copied.
    assert syncs["kept"] == ([] if fields else [*asks, *LAYERS * ["cudaEventSynchronize"], *asks])
    assert syncs["kept, only added"] == syncs["kept"][1:], "nothing is asked at the start"
