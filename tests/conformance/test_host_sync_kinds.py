"""``refuse_host_syncs`` refuses every kind of host sync, in every thread, and only inside its block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch_testing import HostSyncError, allow_host_syncs, count_collectives, count_host_syncs, refuse_host_syncs
from moe_dispatch_testing.operators import OpaqueOperatorError

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
