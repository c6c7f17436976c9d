"""Host syncs are refused wherever they are planted: in a registered operator, in its backward, in plain code."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import build_dispatcher
from moe_dispatch_testing import HostSyncError, allow_host_syncs, count_collectives, refuse_host_syncs, run_ranks
from tests.conformance.planted import NAMES, PLACES, PLANTS, groups, operator, planted, program
from tests.dispatchers.layer import Group, on_ranks, random_routing, random_rows, small_config

pytestmark = pytest.mark.usefixtures("nothing_planted")
SECONDS = datetime.timedelta(seconds=1)


def _refused(body: Callable[[], object]) -> None:
    with refuse_host_syncs():
        body()


def test_a_program_without_a_sync_passes() -> None:
    with refuse_host_syncs() as found:
        program()
    assert found == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", PLANTS)
def test_nine_plants(kind: str, place: str) -> None:
    planted[place] = PLANTS[kind]
    with pytest.raises(HostSyncError, match=rf"got:\n  {NAMES[kind]}.* at .*planted.py:\d+, in thread Main"):
        _refused(program)


@pytest.mark.parametrize("place", PLACES)
def test_a_swallowed_error_comes_back(place: str) -> None:
    def swallow(x: Tensor) -> None:
        with suppress(Exception):
            x.detach().unique()

    planted[place] = swallow
    with pytest.raises(HostSyncError, match="aten::_unique2"), refuse_host_syncs():
        program()


def test_a_sync_that_became_another_error() -> None:
    def wrap() -> None:
        try:
            program()
        except AssertionError:
            raise ValueError("wrapped") from None

    planted["plain"] = PLANTS["value"]
    with pytest.raises(HostSyncError, match="tolist") as caught, refuse_host_syncs():
        wrap()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="mine"), refuse_host_syncs():
        raise ValueError("mine")


def test_collectives_inside_an_operator_are_counted() -> None:
    def body(group: dist.ProcessGroup) -> list[str]:
        groups[group.rank()] = group
        with count_collectives() as seen:
            program(group.rank())
        return [call.op for call in seen.calls]

    assert run_ranks(body, 2) == [["alltoall_base"] * 2] * 2


def _ranks(body: Callable[[int], None]) -> None:
    def enter(group: dist.ProcessGroup) -> None:
        groups[group.rank()] = group
        body(group.rank())

    run_ranks(enter, 2, timeout=SECONDS)


def test_ranks_without_a_sync_pass() -> None:
    with refuse_host_syncs():
        _ranks(program)


@pytest.mark.parametrize(("kind", "place"), list(zip(PLANTS, PLACES, strict=True)))
def test_a_sync_of_one_rank(kind: str, place: str) -> None:
    def plant(x: Tensor) -> None:
        if threading.current_thread().name == "rank-1":
            PLANTS[kind](x)

    planted[place] = plant
    with pytest.raises(HostSyncError, match=rf"{NAMES[kind]}.* at .*planted.py:\d+, in thread rank-1"):
        _refused(lambda: _ranks(program))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_reads_nothing_and_hides_nothing(use_reentrant: bool) -> None:
    def layer(x: Tensor) -> Tensor:
        y: Tensor = operator(x, -1)
        return y.cos()

    x = torch.ones(4, 3, requires_grad=True)
    with refuse_host_syncs():
        checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    y = checkpoint(layer, x, use_reentrant=use_reentrant).sum()
    planted["operator"] = PLANTS["value"]
    with pytest.raises(HostSyncError, match="tolist"), refuse_host_syncs():
        y.backward()


def eager(backend: str, group: Group = None) -> Callable[[], None]:
    """Return a call of a dispatcher that reads its counts on the host."""
    dispatcher = build_dispatcher(small_config(backend, top_k=1), group)

    def call() -> None:
        sent = dispatcher.dispatch(random_rows(5), random_routing(5, top_k=1))
        dispatcher.combine(sent.rows, sent)

    return call


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("alltoall", 1), ("alltoall", 2)])
def test_eager_dispatchers_are_caught(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        with allow_host_syncs():
            call = eager(backend, group)
        call()

    with pytest.raises(HostSyncError, match=r"aten::equal at .*moe_dispatch/permutation/index\.py"):
        _refused(lambda: on_ranks(body, size))


HIDDEN: dict[str, Callable[[], Callable[[], object]]] = {
    "aten::equal at": lambda: eager("local"),
    "aten::nonzero at": lambda: torch.ones(2).nonzero,
}


@pytest.mark.parametrize("found", HIDDEN)
def test_one_opaque_operator_around_everything_is_caught(found: str) -> None:
    call = HIDDEN[found]()
    with torch.library._scoped_library("moe_dispatch", "FRAGMENT") as library:
        library.define("everything(Tensor x) -> Tensor")
        library.impl("everything", lambda x: (call(), x.clone())[1], "CPU")
        with pytest.raises(HostSyncError, match=found):
            _refused(lambda: torch.ops.moe_dispatch.everything(torch.ones(1)))
