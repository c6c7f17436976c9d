"""``group``, ``ep_size``, ``ep_rank`` and ``num_local_experts`` of a Dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch import build_dispatcher
from moe_dispatch.errors import StateError
from tests.dispatchers.layer import small_config
from tests.ranks import run_ranks


def place(group: Any, **fields: Any) -> tuple[Any, ...]:
    dispatcher = build_dispatcher(small_config(**fields), group)
    return dispatcher.group, dispatcher.ep_size, dispatcher.ep_rank, dispatcher.num_local_experts


def test_place_on_one_rank() -> None:
    experts = small_config().num_experts
    assert place(None) == (None, 1, 0, experts)
    dispatcher = build_dispatcher(small_config())
    dispatcher.close()
    with pytest.raises(StateError, match="must be open, got a closed one"):
        _ = dispatcher.ep_size


@pytest.mark.parametrize("balance", [None, "exact"])
def test_place_on_ranks_is_that_of_the_group(balance: str | None) -> None:
    def rank(group: dist.ProcessGroup) -> tuple[bool, tuple[int, ...], int]:
        found, *numbers = place(group, backend="alltoall", balance=balance)
        return found is group, tuple(numbers), group.rank()

    own = small_config().num_experts // 2
    for is_group, numbers, number in run_ranks(rank, 2):
        assert is_group
        assert numbers == (2, number, own)


def test_group_of_a_mesh(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        found, *numbers = place(mesh, backend="alltoall")
        assert found is mesh.get_group()
        assert numbers[:2] == [1, 0]
    finally:
        dist.destroy_process_group()
