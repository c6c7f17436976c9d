"""The maps of a handle, against loops over tokens, ranks and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_dispatch_testing.emulation.hybrid.maps import Topology, chunk_layout, expert_rows, row_ids, scan

ROWS, LOCAL = 5, 2
PLACES = [
    Topology(rank=rank, ranks_per_node=ranks_per_node, nodes=nodes)
    for ranks_per_node, nodes in ((1, 1), (3, 1), (2, 2), (1, 3))
    for rank in range(ranks_per_node * nodes)
]


def a_map(place: Topology) -> Tensor:
    ranks = place.ranks_per_node * place.nodes
    return torch.rand(ranks * ROWS, ranks * LOCAL, generator=torch.Generator().manual_seed(3)) < 0.3


@pytest.mark.parametrize("place", PLACES)
def test_sparse_to_dense_counts_the_rows_that_each_rank_of_the_node_receives(place: Topology) -> None:
    routing = a_map(place)
    ranks = place.ranks_per_node * place.nodes
    found = scan(routing, place).sparse_to_dense_map
    for column, target in enumerate(place.peers):
        position = 0
        for token in range(ranks * ROWS):
            goes = bool(routing[token, target * LOCAL : (target + 1) * LOCAL].any())
            source, index = divmod(token, ROWS)
            if source % place.ranks_per_node == place.local_rank:
                node = source // place.ranks_per_node
                assert found[node * ROWS + index, column] == (position if goes else -1)
            position += goes
    assert found.dtype == torch.int32


@pytest.mark.parametrize("place", PLACES)
def test_maps_between_nodes(place: Topology) -> None:
    routing = a_map(place)
    scanned = scan(routing, place)
    width = place.ranks_per_node * LOCAL
    others = [node for node in range(place.nodes) if node != place.node]
    own = routing[place.rank * ROWS : (place.rank + 1) * ROWS]
    for column, node in enumerate(others):
        wanted = own[:, node * width : (node + 1) * width].any(1)
        assert torch.equal(scanned.attn_to_rdma_map[:, column], wanted)
    by_node = scanned.rdma_to_attn_map.flatten().view(place.nodes, 16)
    for node, rank in enumerate(place.counterparts):
        rows = routing[rank * ROWS : (rank + 1) * ROWS]
        assert torch.equal(by_node[node, :ROWS], rows[:, place.node * width : (place.node + 1) * width].any(1))
    assert scanned.rdma_to_attn_map.shape == (16, place.nodes)


def test_chunk_layout_ends_with_the_rows_received() -> None:
    place = PLACES[2]
    scanned = scan(a_map(place), place)
    layout = chunk_layout(scanned, ranks=3, chunk=2)
    assert layout.shape == (9,)
    received = scanned.received_PT.view(3, ROWS)
    assert layout.tolist() == [
        int(received[:rank].sum() + received[rank, : 2 * (chunk + 1)].sum()) for rank in range(3) for chunk in range(3)
    ]
    assert layout[-1] == scanned.num_dispatched


MAP = torch.tensor([[True, False], [True, True], [False, True], [True, False]])


def test_expert_rows_are_padded_between_experts() -> None:
    found = expert_rows(MAP, pad_multiple=4, limit=None)
    assert found.dense_to_expert_RL.tolist() == [[0, -1], [1, 4], [-1, 5], [2, -1]]
    assert found.tokens_per_expert.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("limit", "kept", "counts", "overflowed"),
    [
        (8, [4, 5], [3, 2], False),
        (6, [4, 5], [3, 2], False),
        (5, [4, -1], [3, 1], True),
        (4, [-1, -1], [3, 0], True),
        (0, [-1, -1], [0, 0], True),
    ],
)
def test_rows_past_the_limit_are_dropped(limit: int, kept: list[int], counts: list[int], overflowed: bool) -> None:
    found = expert_rows(MAP, pad_multiple=4, limit=limit)
    assert found.dense_to_expert_RL[1:3, 1].tolist() == kept
    assert found.tokens_per_expert.tolist() == counts
    assert found.overflowed is overflowed


def test_row_ids_name_padding_after_the_rows() -> None:
    ids, counts, overflowed = row_ids(MAP, pad_multiple=4, limit=None, capacity=6)
    assert ids[:4].tolist() == [[1, 0], [2, 5], [0, 6], [3, 0]]
    assert ids[4:8].tolist() == [[-4, -7], [0, -8], [0, 0], [0, 0]]
    assert ids.shape == (10, 2)
    assert (ids[8:] == torch.iinfo(torch.int32).min).all()
    assert counts.tolist() == [4, 4]
    assert not overflowed


def test_a_padding_row_past_the_limit_overflows_in_the_release_that_counts_it() -> None:
    ids, counts, overflowed = row_ids(MAP, pad_multiple=4, limit=7, capacity=6)
    assert ids[4:8].tolist() == [[-4, -7], [0, 0], [0, 0], [0, 0]]
    assert counts.tolist() == [4, 3]
    assert overflowed
