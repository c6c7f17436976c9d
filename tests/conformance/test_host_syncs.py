"""Host syncs of every kind are refused wherever they are planted: in operators, in their backward, in plain code."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import build_dispatcher
from moe_dispatch_testing import (
    HostSyncError,
    allow_host_syncs,
    count_collectives,
    count_host_syncs,
    refuse_host_syncs,
    run_ranks,
)
from moe_dispatch_testing.operators import OpaqueOperatorError
from tests.conformance.planted import NAMES, PLACES, PLANTS, groups, operator, planted, program
from tests.dispatchers.layer import Group, on_ranks, random_routing, random_rows, small_config

pytestmark = pytest.mark.usefixtures("nothing_planted")
SECONDS = datetime.timedelta(seconds=0.5)


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


X = torch.arange(4.0)
IDS = torch.tensor([1, 0, 1, 1])
N = torch.tensor(2)
START = threading.Thread.start
OTHERS: dict[str, Callable[[], object]] = {
    "item": lambda: N.item(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "to device=": lambda: X.to(device="cpu:0"),
    "numpy": lambda: X.numpy(),
    "__array__": lambda: X.__array__(),
    "bool": lambda: bool(N),
    "int": lambda: int(N),
    "float": lambda: float(N),
    "complex": lambda: complex(N),
    "range": lambda: range(N),
    "repr": lambda: repr(X),
    "format": lambda: f"{N}",
    "in": lambda: 2.0 in X,
    "tensor": lambda: torch.tensor([[0, N]]),
    "tensor of one entry": lambda: torch.tensor([N.bool().view(1)]),
    "as_tensor": lambda: torch.as_tensor([N.float()], dtype=torch.float64),
    "new_tensor": lambda: X.new_tensor([N]),
    "slice": lambda: X[:N],
    "split": lambda: X.split([N, N]),
    "size": lambda: X.expand(N, 4),  # type: ignore[call-overload]
    "is_nonzero": lambda: torch.is_nonzero(N),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: X.nonzero(),
    "argwhere": lambda: X.argwhere(),
    "where": lambda: torch.where(X > 1),
    "masked_select": lambda: X.masked_select(X > 1),
    "bytes as a mask": lambda: X[IDS.to(torch.uint8)],
    "index_put": lambda: X.clone().index_put_((X > 1,), N.float()),
    "assignment": lambda: X.clone().__setitem__(X > 1, X[:2]),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "bincount": lambda: torch.bincount(IDS),
    "repeats alone": lambda: torch.repeat_interleave(IDS),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_every_other_kind(kind: str, inference: bool) -> None:
    OTHERS[kind]()
    with pytest.raises(HostSyncError), refuse_host_syncs(), torch.inference_mode(inference), suppress(Exception):
        OTHERS[kind]()


def test_an_operator_without_a_python_body_is_refused() -> None:
    library = torch.library.Library("moe_dispatch", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", torch.ops.aten.alias.default, "Meta")
    with pytest.raises(HostSyncError, match="moe_dispatch::opaque, which has no Python body"), refuse_host_syncs():
        torch.ops.moe_dispatch.opaque(X)
    with pytest.raises(OpaqueOperatorError, match="got none for CPU or CompositeExplicitAutograd"), count_collectives():
        torch.ops.moe_dispatch.opaque(X)
    library._destroy()


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_bodies_are_found_however_they_are_registered(key: str) -> None:
    library = torch.library.Library("moe_dispatch", "FRAGMENT")
    library.define("hidden(Tensor x) -> Tensor")
    library.impl("hidden", lambda x: x[:, 0].nonzero(), key)
    with pytest.raises(HostSyncError, match="aten::nonzero"), refuse_host_syncs():
        torch.ops.moe_dispatch.hidden(torch.ones(2, 2))
    library._destroy()


def _swallow(read: Callable[[], object]) -> None:
    with suppress(Exception):
        read()


def test_threads_that_override_run() -> None:
    def start() -> None:
        timer = threading.Timer(0, _swallow, (X.nonzero,))
        with refuse_host_syncs():
            timer.start()
            timer.join()

    with pytest.raises(HostSyncError, match=r"aten::nonzero at .* in thread Thread-"):
        start()


def test_a_harness_may_read_for_itself_only() -> None:
    turns = threading.Barrier(2, timeout=5)

    def peer() -> None:
        turns.wait()
        _swallow(X.nonzero)
        turns.wait()

    def harness() -> None:
        with allow_host_syncs():
            turns.wait()
            assert X.tolist() == [0, 1, 2, 3]
            with allow_host_syncs():
                assert len(X.nonzero()) == 3
            assert len(X.nonzero()) == 3
            turns.wait()
            child = threading.Thread(target=_swallow, args=(X.nonzero,), name="child")
            child.start()
            child.join()
        _swallow(X.nonzero)

    def both() -> None:
        with refuse_host_syncs() as found:
            thread = threading.Thread(target=peer, name="peer")
            thread.start()
            harness()
            thread.join()
        assert found

    with pytest.raises(HostSyncError) as caught:
        both()
    assert [line.rpartition(" ")[2] for line in str(caught.value).splitlines()[1:-1]] == ["peer", "child", "MainThread"]


def test_nothing_is_left_behind() -> None:
    go = threading.Event()
    read: list[Any] = []

    def late() -> None:
        go.wait(5)
        read.append((X.nonzero(), X.tolist()))

    with refuse_host_syncs():
        thread = threading.Thread(target=late)
        thread.start()
    for name in ("item", "tolist", "cpu", "numpy", "to", "__bool__", "__index__"):
        assert getattr(Tensor, name) is getattr(torch._C.TensorBase, name)
    assert threading.Thread.start is START
    go.set()
    thread.join()
    assert len(read) == 1


@pytest.mark.parametrize("inner", [count_host_syncs, refuse_host_syncs])
def test_only_one_at_a_time(inner: Callable[[], Any]) -> None:
    with refuse_host_syncs(), pytest.raises(RuntimeError, match="only one may be open at a time"), inner():
        pass
