"""Which ranks share a host."""

from __future__ import annotations

import pytest

from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers.topology import detect_ranks_per_node, ranks_per_node
from moe_dispatch.testing.ranks import run_ranks


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", 1),
        ("aaaa", 4),
        ("aabb", 2),
        ("aaaabbbbcccc", 4),
        ("abab", 1),
        ("aaab", 1),
        ("aaaabb", 2),
    ],
)
def test_consecutive_ranks_of_a_host(hosts: str, expected: int) -> None:
    assert ranks_per_node(hosts) == expected


def test_threads_of_this_process_share_a_host() -> None:
    assert run_ranks(lambda group: detect_ranks_per_node(Communicator(group)), 4) == [4] * 4
