"""``alltoall`` with ``levels=2``: bytes between nodes, bits, nodes, and the refusals of its options."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.backends.alltoall.two_level import Nodes
from moe_dispatch.communication import Communicator, Work
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


def two_levels(ranks_per_node: int, **options: Any) -> dict[str, Any]:
    return {"name": "alltoall", "levels": 2, "ranks_per_node": ranks_per_node, **options}


def routing(rank: int) -> Routing:
    way = random_routing(ROWS, seed=rank, num_experts=EXPERTS, top_k=SLOTS)
    way.topk_ids[::6, :3] = -1
    way.topk_ids[::7] = -1
    way.topk_ids[3] = EXPERTS // 2 + torch.arange(SLOTS)  # one node in the grids of two nodes
    return way


def owners(rank: int, size: int) -> list[set[int]]:
    """The ranks that each row of a rank goes to, or -1 among them."""
    owner = routing(rank).topk_ids.div(EXPERTS // size, rounding_mode="floor")
    return [set(row) for row in owner.tolist()]


def pairs_between_nodes(size: int, per_node: int) -> Counter[tuple[int, int]]:
    """Distinct (row, other node) pairs, by sender and relay."""
    return Counter(
        (rank, node * per_node + rank % per_node)
        for rank in range(size)
        for row in owners(rank, size)
        for node in {owner // per_node for owner in row if owner >= 0} - {rank // per_node}
    )


def pairs_within_nodes(size: int, per_node: int) -> Counter[tuple[int, int]]:
    """Rows that a relay sends to another rank of its node, by both ranks."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        for row in owners(rank, size):
            relayed = [(owner // per_node * per_node + rank % per_node, owner) for owner in row if owner >= 0]
            found.update(pair for pair in relayed if pair[0] != pair[1])
    return found


def slots_between_nodes(size: int, per_node: int) -> Counter[tuple[int, int]]:
    """Slots whose expert is on another node, by sender and relay."""
    return Counter(
        (rank, expert // local // per_node * per_node + rank % per_node)
        for local in [EXPERTS // size]
        for rank in range(size)
        for expert in routing(rank).topk_ids.flatten().tolist()
        if expert >= 0 and expert // local // per_node != rank // per_node
    )


Bytes = dict[str, Counter[tuple[int, int]]]  # by label, of each sender and receiver
Send = Callable[..., Bytes]


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Send:
    """Run a forward and its backward, and return the bytes that each rank sent to each other one."""
    seen: Bytes = {}
    original, lock = Communicator.all_to_all, threading.Lock()

    def all_to_all(
        comm: Communicator, out: Tensor, inp: Tensor, rows_in: Sequence[int], rows_out: Sequence[int], *, label: str
    ) -> Work | None:
        with lock:
            for other, rows in enumerate(rows_out):
                if other != comm.rank and rows:
                    seen.setdefault(label, Counter())[comm.rank, other] += rows * inp.nbytes // len(inp)
        return original(comm, out, inp, rows_in, rows_out, label=label)

    def run(size: int, backend: dict[str, Any], hidden: int = HIDDEN, **fields: Any) -> Bytes:
        shape = {"num_experts": EXPERTS, "top_k": SLOTS, "hidden_size": hidden}

        def body(group: Group) -> None:
            dispatcher = build_dispatcher(small_config(backend, **shape, **fields), group)
            way, x = routing(group.rank()), random_rows(ROWS, hidden, dtype=torch.bfloat16).requires_grad_()
            sent = dispatcher.dispatch(x, Routing(way.topk_ids, way.topk_weights.requires_grad_()))
            dispatcher.combine(sent.rows, sent).sum().backward()

        on_ranks(body, size)
        return seen

    monkeypatch.setattr(Communicator, "all_to_all", all_to_all)
    return run


def times(pairs: Counter[tuple[int, int]], nbytes: int, *, back: bool = False) -> Counter[tuple[int, int]]:
    return Counter({(pair[::-1] if back else pair): number * nbytes for pair, number in pairs.items()})


# wire dtype, hidden size; bytes of a row there and back
WIRES = [(None, 64, 128, 128), ("bfloat16", 64, 128, 128), ("float8_e4m3fn", 128, 132, 256)]


@pytest.mark.parametrize(
    ("size", "per_node", "wire", "hidden", "row", "row_back"),
    [(4, 2, *WIRES[1]), (8, 2, *WIRES[2]), (8, 4, *WIRES[0])],
)
def test_bytes_between_nodes_are_those_of_distinct_pairs_of_a_row_and_a_node(
    size: int, per_node: int, wire: str | None, hidden: int, row: int, row_back: int, send: Send
) -> None:
    seen = send(size, two_levels(per_node), hidden, wire_dtype=wire)
    packet = row + 4 * SLOTS + 2 * SLOTS  # weights and ids
    for pairs, suffix in (
        (pairs_between_nodes(size, per_node), ""),
        (pairs_within_nodes(size, per_node), ".within_node"),
    ):
        assert sum(pairs.values()) > 100
        assert seen[f"dispatch{suffix}"] == times(pairs, packet)
        assert seen[f"combine{suffix}"] == times(pairs, row_back, back=True)
        assert seen[f"combine.backward{suffix}"] == times(pairs, row_back)
        assert seen[f"dispatch.backward{suffix}"] == times(pairs, row_back + 4 * SLOTS, back=True)
    for rank in range(size):
        counts = sum(number for (sender, _), number in seen["counts"].items() if sender == rank)
        assert counts == (size - 1) * 8 * (1 + EXPERTS // size + 1 + per_node)


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (8, 4)])
def test_exact_brings_every_slot_back_once(size: int, per_node: int, send: Send) -> None:
    seen = send(size, two_levels(per_node, reduction="exact"))
    assert seen["dispatch"] == times(pairs_between_nodes(size, per_node), 2 * HIDDEN + 6 * SLOTS)
    slots = slots_between_nodes(size, per_node)
    assert seen["combine"] == times(slots, 2 * HIDDEN, back=True)
    assert seen["dispatch.backward"] == times(slots, 2 * HIDDEN + 4, back=True)


def test_one_level_sends_a_row_to_a_node_more_than_once(send: Send) -> None:
    """The control: the routing of these tests has rows with two ranks on one node."""
    seen = send(8, {"name": "alltoall"})
    between = sum(number for (one, other), number in seen["dispatch"].items() if one // 4 != other // 4)
    once = sum(pairs_between_nodes(8, 4).values()) * (2 * HIDDEN + 6 * SLOTS)
    assert between > 1.5 * once


@pytest.mark.parametrize(
    ("hosts", "options", "told"),
    [
        ("aabb", {}, "levels=2, ranks per node: 2 (detected), nodes: 2."),
        ("aabbbb", {}, "levels=2, ranks per node: 2 (detected), nodes: 3."),
        ("aaaa", {}, "levels=2, ranks per node: 4 (detected), ranks: 4, so it works as levels=1."),
        ("aaab", {}, "levels=2, ranks per node: 1 (detected), ranks: 4, so it works as levels=1."),
        ("aaaa", {"ranks_per_node": 2}, "levels=2, ranks per node: 2 (configured), nodes: 2."),
        ("abab", {}, "levels=2, ranks per node: 1 (detected), ranks: 4, so it works as levels=1."),
        ("aaaabb", {}, "levels=2, ranks per node: 2 (detected), nodes: 3."),
        ("aa", {"ranks_per_node": 8}, "levels=2, ranks per node: 2 (configured), ranks: 2, so it works as levels=1."),
    ],
)
def test_nodes_are_detected_by_host_name_or_configured(
    hosts: str, options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[int(threading.current_thread().name.split("-")[1])])

    def body(group: Group) -> bool:
        sizes = {"num_experts": 12, "top_k": 2, "hidden_size": 16}
        dispatcher = build_dispatcher(small_config({"name": "alltoall", "levels": 2, **options}, **sizes), group)
        identity_round(dispatcher)
        return any("within_node" in label for label in dispatcher.metrics().collectives)

    with caplog.at_level(logging.INFO, "moe_dispatch"):
        used = on_ranks(body, len(hosts))
    assert [record.message for record in caplog.records if "levels=2" in record.message] == [
        f"backend 'alltoall': {told}"
    ]
    assert used == ["levels=1" not in told] * len(hosts)


def test_rows_of_an_expert_are_in_the_order_of_their_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> Tensor:
        dispatcher = build_dispatcher(small_config(two_levels(2), top_k=1), group)
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
        config = small_config(two_levels(2, reduction=reduction), pad_multiple=pad_multiple)
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
