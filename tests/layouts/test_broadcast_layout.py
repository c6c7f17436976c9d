"""One rank's layout on every rank, ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.communication import Communicator
from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, Rows, broadcast_layout
from moe_dispatch.layouts.encoding import encode
from tests.ranks import run_ranks

STRIDED = torch.tensor([[0, 0], [3, 4], [8, 12]], dtype=torch.int32)
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
    THD(STRIDED[:, 0], STRIDED[:, 1], max_seqlen=5),  # Megatron-LM#4150
    THD([0, 3, 8], [0, 4, 12], max_seqlen=5).shard(1, 2, "zigzag").shard(0, 3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout}-{len(encode(layout))}")
@pytest.mark.parametrize("src", [0, 2])
def test_every_rank_gets_the_layout(layout: Layout, src: int) -> None:
    def body(group: dist.ProcessGroup) -> Layout:
        return broadcast_layout(layout if group.rank() == src else None, group, src)

    for received in run_ranks(body, 3):
        assert repr(received) == repr(layout)  # which shows every field, with values and dtypes of tensors
        assert received.num_rows() == layout.num_rows()


FOREIGN: Any = type("Foreign", (Layout,), dict.fromkeys(Layout.__abstractmethods__))()


@pytest.mark.parametrize(
    ("given", "src", "text"),
    [
        ({}, 1, r"exactly rank 1 \(src\) must give a layout, got one from ranks \[\]"),
        ({2: Rows(1)}, 1, r"exactly rank 1 \(src\) must give a layout, got one from ranks \[2\]"),
        ({1: Rows(1), 2: Rows(1)}, 1, r"exactly rank 1 \(src\) must give a layout, got one from ranks \[1, 2\]"),
        ({0: FOREIGN}, 0, "BSHD, SBHD, THD, Rows, Shard, Masked, got another class on rank 0"),
        ({}, 3, "src must lie in 0..2, got 3"),
    ],
)
def test_refused_on_every_rank(given: dict[int, Layout], src: int, text: str) -> None:
    def body(group: dist.ProcessGroup) -> bool:
        with pytest.raises(ValueError, match=text):
            broadcast_layout(given.get(group.rank()), group, src)
        return True

    assert run_ranks(body, 3) == [True] * 3


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
