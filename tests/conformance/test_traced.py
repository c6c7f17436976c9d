"""Graph-safe layers traced without values: dispatch, a grouped product, combine, and all of their backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.permutation import Permutation, SlotIndex, group_statically
from moe_dispatch_testing import HostSyncError, trace_static
from tests.dispatchers.layer import HIDDEN, Group, expert_weights, random_routing, random_rows, small_config

BACKENDS = ("local", "allgather", "alltoall")
DEVICES = (None, "meta")
ROOM: dict[str, dict[str, Any]] = {
    "worst": {},
    "finite": {"graph_safe": {"capacity_factor": 1.25, "on_overflow": "drop"}},
    "weights by experts": {"weights": "experts", "pad_multiple": 1},
    "duplicates": {"top_k": 3},
}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 8}
T = 5


def layer_of(backend: str, group: Group = None, **fields: Any) -> Callable[..., Tensor]:
    """Return a layer with a dispatcher of its own: after a trace the dispatcher's counters have no values."""
    dispatcher = build_dispatcher(
        small_config(backend, **{"pad_multiple": 16, "permutation": "torch", **fields}), group
    )

    def layer(x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        rows = torch._grouped_mm(sent.rows, experts, offs=sent.offs)
        if dispatcher.config.weights == "experts":
            rows = rows * sent.weights.unsqueeze(1).to(rows.dtype)
        return dispatcher.combine(rows, sent)

    return layer


def arguments(top_k: int = 2, size: int = 1) -> list[Tensor]:
    routing, experts = random_routing(T, top_k=top_k), expert_weights(dtype=torch.bfloat16)[: 8 // size]
    x = random_rows(T, dtype=torch.bfloat16)
    return [x.requires_grad_(), routing.topk_ids, routing.topk_weights.requires_grad_(), experts.requires_grad_()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_depends_on_values(backend: str, room: str, device: str | None) -> None:
    fields = ROOM[room]
    y = trace_static(layer_of(backend, **{**SAFE, **fields}), *arguments(fields.get("top_k", 2)), device=device)
    assert (y.shape, y.dtype, y.device.type) == ((T, HIDDEN), torch.bfloat16, device or "cpu")


@pytest.fixture
def _fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_fake_group")
@pytest.mark.parametrize("backend", ["allgather", "alltoall"])
def test_one_rank_of_four(backend: str) -> None:
    """Trace rank 1 of a fake group, whose collectives deliver nothing."""
    layer = layer_of(backend, dist.group.WORLD, **{**SAFE, **ROOM["finite"]})
    assert trace_static(layer, *arguments(size=4)).shape == (T, HIDDEN)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_eager_dispatcher_is_caught(backend: str, device: str | None) -> None:
    """The control. With top_k=1, nothing looks for duplicates, so the first sync is a read of counts or ids."""
    with pytest.raises(HostSyncError, match=r"(aten::equal at .*index|(aten::_to_copy|item) at .*communication)\.py"):
        trace_static(layer_of(backend, top_k=1), *arguments(1), device=device)


READS: dict[str, Callable[[SlotIndex], Any]] = {
    "a count": lambda index: int(index.tokens_per_key(index.cu_S.device)[0].sum()),
    "a shape": lambda index: index.source_R[index.source_R >= 0],
    "an upload": lambda index: torch.arange(4).to(index.cu_S.device),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_planted_read_is_caught(backend: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*args: Any, **options: Any) -> SlotIndex:
        index = group_statically(*args, **options)
        READS[read](index)
        return index

    monkeypatch.setattr(Permutation, "group_statically", staticmethod(reading))
    with pytest.raises(HostSyncError):
        trace_static(layer_of(backend, **SAFE), *arguments(), device="meta")
