"""One rank's layout on every rank, ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, LayoutError
from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, Rows, Shard, broadcast_layout
from moe_dispatch.layouts.encoding import encode
from moe_dispatch_testing.ranks import run_ranks

LAYOUTS = [
    BSHD(),
    BSHD(torch.tensor([3, 0, 2], dtype=torch.int32)),
    SBHD([4, 1]),
    THD([0, 3, 8]),
    THD(torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 4, 12], dtype=torch.int32), 5),
    THD([0], max_seqlen=0),
    Rows(),
    Rows(7),
    Masked(torch.tensor([True, False, True])),
    THD([0, 3, 8], [0, 4, 12], max_seqlen=5).shard(1, 2, "zigzag").shard(0, 3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout}-{len(encode(layout))}")
@pytest.mark.parametrize("src", [0, 2])
def test_every_rank_gets_the_layout(layout: Layout, src: int) -> None:
    def body(group: dist.ProcessGroup) -> Layout:
        return broadcast_layout(layout if group.rank() == src else None, group, src)

    for received in run_ranks(body, 3):
        assert type(received) is type(layout)
        assert fields(received) == fields(layout)


def fields(layout: Any) -> list[Any]:
    """What a layout holds, written out by hand so that a field lost in transit shows."""
    match layout:
        case THD():
            held = [layout.cu_seqlens, layout.cu_seqlens_padded, layout.max_seqlen, layout.num_rows()]
        case Shard():
            return [fields(layout.base), layout.index, layout.size, layout.kind]
        case Rows():
            held = [layout.count]
        case Masked():
            held = [layout.valid]
        case _:
            held = [layout.lengths]
    return [(item.tolist(), item.dtype) if isinstance(item, Tensor) else item for item in held]


def test_first_middle_and_last_stage_with_two_tensor_ranks_each() -> None:
    """Megatron-LM#4150: a tensor-parallel group per stage, and each must end with the metadata and max_seqlen."""
    strided = torch.tensor([[0, 0], [3, 4], [8, 12]], dtype=torch.int32)

    def body(group: dist.ProcessGroup) -> tuple[list[int], list[int], int | None, bool]:
        mine = THD(strided[:, 0], strided[:, 1], max_seqlen=5) if group.rank() == 0 else None
        layout = broadcast_layout(mine, group)
        assert isinstance(layout, THD)
        assert layout.num_rows() == 12
        return layout.real.tolist(), layout.owned.tolist(), layout.max_seqlen, layout.shard(0, 2).num_real(6) == 5

    assert not strided[:, 0].is_contiguous()
    assert run_ranks(body, 6) == [([0, 3, 8], [0, 4, 12], 5, True)] * 6


def test_one_rank() -> None:
    assert run_ranks(lambda group: fields(broadcast_layout(Rows(2), group)), 1) == [[2]]


def test_a_layout_in_the_wrong_place_is_refused_on_every_rank() -> None:
    refusals = {
        "absent": r"exactly rank 1 \(src\) must give a layout, got one from ranks \[\]",
        "elsewhere": r"exactly rank 1 \(src\) must give a layout, got one from ranks \[2\]",
        "twice": r"exactly rank 1 \(src\) must give a layout, got one from ranks \[1, 2\]",
    }
    givers = {"absent": [], "elsewhere": [2], "twice": [1, 2]}
    for case, text in refusals.items():

        def body(group: dist.ProcessGroup, case: str = case, text: str = text) -> bool:
            with pytest.raises(LayoutError, match=text):
                broadcast_layout(Rows(1) if group.rank() in givers[case] else None, group, 1)
            return True

        assert run_ranks(body, 3) == [True] * 3


FOREIGN: Any = type("Foreign", (Layout,), dict.fromkeys(Layout.__abstractmethods__))()


def test_a_foreign_layout_is_refused_on_every_rank() -> None:
    def body(group: dist.ProcessGroup) -> bool:
        with pytest.raises(
            LayoutError, match="must be BSHD, SBHD, THD, Rows, Masked or a Shard of one, got another class on rank 0"
        ):
            broadcast_layout(FOREIGN if group.rank() == 0 else None, group)
        return True

    assert run_ranks(body, 2) == [True] * 2


def test_a_rank_outside_the_group_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> bool:
        with pytest.raises(ConfigError, match=r"src must lie in 0..1, got 2"):
            broadcast_layout(None, group, 2)
        return True

    assert run_ranks(body, 2) == [True] * 2


def test_a_layout_that_arrives_changed_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = Communicator.broadcast

    def corrupting(communicator: Communicator, *args: Any, **kwargs: Any) -> Tensor:
        tensor = broadcast(communicator, *args, **kwargs)
        if communicator.rank in (1, 3):
            tensor[-1] += 1
        return tensor

    monkeypatch.setattr(Communicator, "broadcast", corrupting)

    def body(group: dist.ProcessGroup) -> bool:
        with pytest.raises(LayoutError, match=r"must hold the layout of rank 0, got another one on ranks \[1, 3\]"):
            broadcast_layout(THD([0, 3], max_seqlen=3) if group.rank() == 0 else None, group)
        return True

    assert run_ranks(body, 4) == [True] * 4
