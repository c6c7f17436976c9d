"""Which ranks share a host."""

from __future__ import annotations

import pytest

from moe_dispatch import build_dispatcher
from moe_dispatch.dispatchers.opening import ranks_per_node
from tests.dispatchers.layer import Group, on_ranks, small_config


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("a", 1), ("aaaa", 4), ("aabb", 2), ("aaaabbbbcccc", 4), ("abab", 1), ("aaab", 1), ("aaaabb", 2)],
)
def test_consecutive_ranks_of_a_host(hosts: str, expected: int) -> None:
    assert ranks_per_node(hosts) == expected


def test_threads_of_this_process_share_a_host() -> None:
    def body(group: Group) -> int | None:
        return build_dispatcher(small_config(), group)._channel.shape.ranks_per_node

    assert on_ranks(body, 4) == [4] * 4
