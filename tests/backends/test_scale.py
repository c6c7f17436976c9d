"""Growth with the number of ranks: operators and metadata of a rank's dispatch, at ep 1024."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import build_dispatcher
from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.permutation import round_up
from moe_dispatch.seams.group_observers import Work
from moe_dispatch.types import Sizes

LOCAL, SLOTS, HIDDEN, ROWS = 2, 4, 16, 32


class Cost(TorchDispatchMode):
    """Counts operators of torch, and bytes of the integers and booleans that they make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.metadata = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor) and not made.is_floating_point() and made.dtype != torch.uint8:
                self.metadata += made.nbytes
        return out


def _ids(ep_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, ep_size * LOCAL, generator=generator).topk(SLOTS).indices


@contextmanager
def fake_group(ep_size: int) -> Iterator[dist.ProcessGroup]:
    """Rank 0 of a group whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ep_size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _send(ep_size: int) -> Cost:
    """Build, and send rows: all of a dispatch that depends on the number of ranks. Nothing comes back to unpack."""
    config = DispatcherConfig(backend="alltoall", num_experts=ep_size * LOCAL, top_k=SLOTS, hidden_size=HIDDEN)
    with fake_group(ep_size) as group:
        dispatcher = build_dispatcher(config, group)
        channel, ids_TK = dispatcher._channel, _ids(ep_size)
        cost = Cost()
        with cost:
            channel.backend.start(torch.zeros(ROWS, HIDDEN), ids_TK, torch.ones(ROWS, SLOTS), Sizes())
        sent = sum(len(set(row) - {0}) for row in (ids_TK // LOCAL).tolist())
        assert channel.communicator.bytes_sent["dispatch"] == sent * round_up(4 * HIDDEN + 6 * SLOTS, 64)
        dispatcher.close()
    return cost


@pytest.fixture
def _silent_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fake exchange of counts leaves in memory is not read: nobody sends to this rank."""
    original = Communicator.all_to_all

    def all_to_all(self: Communicator, out: Tensor, inp: Tensor, *splits: list[int], label: str) -> Work | None:
        work = original(self, out, inp, *splits, label=label)
        if label == "counts":
            out.zero_()
        return work

    monkeypatch.setattr(Communicator, "all_to_all", all_to_all)


@pytest.mark.usefixtures("_silent_peers")
def test_a_dispatch_grows_at_most_linearly_up_to_1024_ranks() -> None:
    small, large = _send(256), _send(1024)
    assert large.operators == small.operators, "an operator for each rank"
    assert 0 < large.metadata <= 4 * small.metadata
