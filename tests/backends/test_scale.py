"""Growth with the number of ranks: work on the host and metadata per rank, at ep 1024 and on pure functions at 4096."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import build_dispatcher
from moe_dispatch.communication import Communicator, Work
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.types import Sizes

LOCAL, SLOTS, HIDDEN, ROWS = 2, 4, 16, 32


@dataclass
class Cost:
    """Bytecodes of the library's Python, operators of torch, and bytes of the integers and booleans they made."""

    bytecodes: int = 0
    operators: int = 0
    metadata: int = 0


class _Operators(TorchDispatchMode):
    def __init__(self, cost: Cost) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.cost.operators += 1
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor) and not made.is_floating_point() and made.dtype != torch.uint8:
                self.cost.metadata += made.nbytes
        return out


@contextmanager
def counted() -> Iterator[Cost]:
    """Count inside the block. Python 3.13 counts the bytecodes of a function from its second traced call on."""
    cost = Cost()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "moe_dispatch" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        cost.bytecodes += event == "opcode"
        return trace

    before = sys.gettrace()
    with _Operators(cost):
        sys.settrace(trace)
        try:
            yield cost
        finally:
            sys.settrace(before)


def _ids(ep_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, ep_size * LOCAL, generator=generator).topk(SLOTS).indices


def _linear(small: Cost, large: Cost, *, times: int) -> None:
    assert large.operators == small.operators, "an operator for each rank"
    assert large.bytecodes <= times * small.bytecodes
    assert large.metadata <= times * small.metadata
    assert large.bytecodes > 0
    assert large.metadata > 0


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
        with counted() as cost:
            channel.backend.start(torch.zeros(ROWS, HIDDEN), ids_TK, torch.ones(ROWS, SLOTS), Sizes())
        sent = sum(len(set(row) - {0}) for row in (ids_TK // LOCAL).tolist())
        assert channel.communicator.bytes_sent["dispatch"] == sent * (4 * HIDDEN + 6 * SLOTS)
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
    _send(64)  # traces every function once, as `counted` needs it
    _linear(_send(256), _send(1024), times=4)
