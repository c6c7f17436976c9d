"""``alltoall``: bytes between nodes, nodes and refusals of ``alltoall_by_node``, and what overlaps with collectives."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.backends.alltoall_by_node.backend import Nodes
from moe_dispatch.communication import Communicator
from moe_dispatch.permutation import round_up
from moe_dispatch.seams.group_observers import Work
from tests.dispatchers.layer import (
    Group,
    by_operators,
    identity_round,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)

EXPERTS, SLOTS, HIDDEN, ROWS = 16, 6, 64, 40


def by_node(ranks_per_node: int, **options: Any) -> dict[str, Any]:
    return {"name": "alltoall_by_node", "ranks_per_node": ranks_per_node, **options}


def routing(rank: int) -> Routing:
    way = random_routing(ROWS, seed=rank, num_experts=EXPERTS, top_k=SLOTS)
    way.topk_ids[::6, :3] = -1
    way.topk_ids[::7] = -1
    way.topk_ids[3] = EXPERTS // 2 + torch.arange(SLOTS)  # one node in the grids of two nodes
    return way


def sent_between_nodes(size: int, per_node: int) -> list[tuple[int, int]]:
    """Distinct (row, other node) pairs, each as its sender and the relay on the other node."""
    return [
        (rank, node * per_node + rank % per_node)
        for rank in range(size)
        for row in routing(rank).topk_ids.tolist()
        for node in {expert * size // EXPERTS // per_node for expert in row if expert >= 0} - {rank // per_node}
    ]


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (8, 2), (8, 4)])
def test_bytes_between_nodes_are_those_of_distinct_pairs_of_a_row_and_a_node(size: int, per_node: int) -> None:
    """Those within nodes, and of ``reduction="exact"``, are held against plans in ``tests/cli/plan``."""
    shape = {"num_experts": EXPERTS, "top_k": SLOTS, "hidden_size": HIDDEN}

    def body(group: Group) -> dict[str, int]:
        dispatcher = build_dispatcher(small_config(by_node(per_node), **shape), group)
        way, x = routing(group.rank()), random_rows(ROWS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        sent = dispatcher.dispatch(x, Routing(way.topk_ids, way.topk_weights.requires_grad_()))
        dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics().bytes_sent

    pairs, row = sent_between_nodes(size, per_node), 2 * HIDDEN
    assert len(pairs) > 100
    for rank, nbytes in enumerate(on_ranks(body, size)):
        there, back = (sum(pair[end] == rank for pair in pairs) for end in (0, 1))
        assert nbytes["dispatch"] == there * round_up(row + 6 * SLOTS, 32)  # with weights and ids
        assert nbytes["combine"] == back * row
        assert nbytes["combine.backward"] == there * row
        assert nbytes["dispatch.backward"] == back * round_up(row + 4 * SLOTS, 32)


@pytest.mark.parametrize(
    ("hosts", "options", "told"),
    [
        ("aabb", {}, "ranks per node: 2 (detected), nodes: 2."),
        ("aabbbb", {}, "ranks per node: 2 (detected), nodes: 3."),
        ("aaaa", {}, "ranks per node: 4 (detected), ranks: 4, so it works as 'alltoall'."),
        ("aaab", {}, "ranks per node: 1 (detected), ranks: 4, so it works as 'alltoall'."),
        ("aaaa", {"ranks_per_node": 2}, "ranks per node: 2 (configured), nodes: 2."),
        ("abab", {}, "ranks per node: 1 (detected), ranks: 4, so it works as 'alltoall'."),
        ("aaaabb", {}, "ranks per node: 2 (detected), nodes: 3."),
        ("aa", {"ranks_per_node": 8}, "ranks per node: 2 (configured), ranks: 2, so it works as 'alltoall'."),
    ],
)
def test_nodes_are_detected_by_host_name_or_configured(
    hosts: str, options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[int(threading.current_thread().name.split("-")[1])])

    def body(group: Group) -> bool:
        sizes = {"num_experts": 12, "top_k": 2, "hidden_size": 16}
        dispatcher = build_dispatcher(small_config({"name": "alltoall_by_node", **options}, **sizes), group)
        identity_round(dispatcher)
        return any("within_node" in label for label in dispatcher.metrics().collectives)

    with caplog.at_level(logging.INFO, "moe_dispatch"):
        used = on_ranks(body, len(hosts))
    assert [record.message for record in caplog.records if "ranks per node" in record.message] == [
        f"backend 'alltoall_by_node': {told}"
    ]
    assert used == ["works as" not in told] * len(hosts)


def test_rows_of_an_expert_are_in_the_order_of_their_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> Tensor:
        dispatcher = build_dispatcher(small_config(by_node(2), top_k=1), group)
        ids = torch.zeros(3, 1, dtype=torch.int64)
        x = torch.arange(3).view(3, 1).expand(3, 16) + 10.0 * group.rank()
        return dispatcher.dispatch(x, Routing(ids, torch.ones(3, 1))).rows[:, 0]

    ordered = [10.0 * rank + row for rank in range(4) for row in range(3)]
    assert on_ranks(body, 4)[0].tolist() == ordered
    # Planted: rows stay in the order in which their relays send them.
    monkeypatch.setattr(Nodes, "keys", lambda nodes, ids, rows_in: ids)
    assert on_ranks(body, 4)[0].tolist() == [*ordered[:3], *ordered[6:9], *ordered[3:6], *ordered[9:]]


@pytest.mark.parametrize(("reduction", "pad_multiple"), [("fast", 4), ("exact", 1)])
def test_operators_give_the_bits_of_eager_calls(reduction: str, pad_multiple: int) -> None:
    """They restore a route from its tensors, as compiled code does."""

    def body(group: Group) -> None:
        config = small_config(by_node(2, reduction=reduction), pad_multiple=pad_multiple)
        dispatcher, way = build_dispatcher(config, group), random_routing(6, seed=group.rank())
        found = []
        for call in (lambda layer, x: layer(x), by_operators):
            x, weights = random_rows(6).requires_grad_(), way.topk_weights.clone().requires_grad_()

            def layer(x: Tensor, weights: Tensor = weights) -> Tensor:
                sent = dispatcher.dispatch(x, Routing(way.topk_ids, weights))
                return dispatcher.combine(2 * sent.rows, sent)

            y = call(layer, x)
            y.backward(random_rows(6, seed=7))
            found.append([y.detach(), x.grad, weights.grad])
        for eager, restored in zip(*found, strict=True):
            assert eager is not None
            assert restored is not None
            assert torch.equal(eager, restored)

    on_ranks(body, 4)


all_to_all_of_ranks = Communicator.all_to_all


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
        work, done = all_to_all_of_ranks(comm, out, inp, outs, ins, label=label), logs[comm.rank].done
        assert work is not None
        done.append(label)
        return _Awaited(work, done)

    def body(group: Group) -> None:
        dispatcher, x = build_dispatcher(config, group), random_rows(6)
        with _Log() as logs[group.rank()]:
            sent = dispatcher.dispatch(x, random_routing(6))
            dispatcher.combine(sent.rows, sent)

    monkeypatch.setattr(Communicator, "all_to_all", all_to_all)
    on_ranks(body, 2)
    return logs[0]


def test_what_needs_no_answer_is_done_while_collectives_are_under_way(log: _Log) -> None:
    """Rows, weights and ids are packed and put in order beside the counts; the way home is sorted beside the rows."""
    meanwhile = log.meanwhile("counts")
    assert (meanwhile.count("copy_"), meanwhile[-1]) == (3, "index_select")
    assert {"sort", "searchsorted"} <= set(log.meanwhile("dispatch"))
