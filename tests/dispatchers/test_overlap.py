"""What ``alltoall`` does while a collective is under way: all that needs no answer of another rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import build_dispatcher
from moe_dispatch.communication import Communicator, Work
from tests.dispatchers.layer import Group, on_ranks, random_routing, random_rows, small_config

ROWS = 6
original = Communicator.all_to_all


@final
class _Awaited:
    """Work that tells when it is waited for."""

    def __init__(self, work: Work, done: list[str]) -> None:
        self._work, self._done = work, done

    def wait(self) -> None:
        self._work.wait()
        self._done.append("await")


@final
class _Log(TorchDispatchMode):
    """Operators in order, and the collectives between them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done.append(func._opname)
        return func(*args, **(kwargs or {}))

    def meanwhile(self, label: str) -> list[str]:
        """Operators between the start of a collective and the wait for it."""
        start = self.done.index(label)
        return self.done[start + 1 : self.done.index("await", start)]


@pytest.fixture(params=["fast", "exact"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Log:
    """Of a dispatch and a combine on rank 0 of two."""
    config = small_config({"name": "alltoall", "reduction": request.param})
    logs: dict[int, _Log] = {}

    def all_to_all(
        comm: Communicator, out: Tensor, inp: Tensor, outs: Sequence[int], ins: Sequence[int], *, label: str
    ) -> _Awaited:
        work, done = original(comm, out, inp, outs, ins, label=label), logs[comm.rank].done
        assert work is not None
        done.append(label)
        return _Awaited(work, done)

    def body(group: Group) -> None:
        dispatcher, x = build_dispatcher(config, group), random_rows(ROWS)
        with _Log() as logs[group.rank()]:
            sent = dispatcher.dispatch(x, random_routing(ROWS))
            dispatcher.combine(sent.rows, sent)

    monkeypatch.setattr(Communicator, "all_to_all", all_to_all)
    on_ranks(body, 2)
    return logs[0]


def test_what_needs_no_answer_is_done_while_collectives_are_under_way(log: _Log) -> None:
    """Rows, weights and ids are packed and put in order beside the counts; the way home is sorted beside the rows."""
    meanwhile = log.meanwhile("counts")
    assert (meanwhile.count("copy_"), meanwhile[-1]) == (3, "index_select")
    assert {"sort", "searchsorted"} <= set(log.meanwhile("dispatch"))
