"""deep_ep.Config of v1.2.1: sizes worked out by hand, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from moe_dispatch_testing.emulation import emulated_deep_ep

deep_ep: Any = emulated_deep_ep("v1.2.1")


def test_nvlink_size_hint_within_a_node() -> None:
    """10 channels x 8 ranks x 256 rows of a row with source, 128 ids, weights and scales, and 5 flags per queue."""
    config = deep_ep.Config(20, 6, 256, 6, 128)
    by_hand = 80 * 5 * 4 + 80 * 256 * (14336 + 8 + 128 * 8 + 128 * 4 + 128 * 4)
    assert config.get_nvl_buffer_size_hint(14336, 8) == -(-by_hand // 128) * 128
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0


def test_size_hints_across_nodes() -> None:
    """16 ranks are 2 nodes; the RDMA queue length is rounded up to a multiple of what is sent at once: 128 to 140."""
    config = deep_ep.Config(20, 36, 288, 20, 128)
    nvl = 80 * 7 * 4 + 80 * 288 * (14336 + 8 + 128 * 12 + 128 * 4)
    assert config.get_nvl_buffer_size_hint(14336, 16) == -(-nvl // 128) * 128
    rdma = 20 * 18 * 2 * 4 + 20 * 140 * 2 * (14336 + 8 + 128 * 12 + 128 * 4 + 16)
    assert config.get_rdma_buffer_size_hint(14336, 16) == -(-rdma // 128) * 128


def test_size_hints_take_no_keywords() -> None:
    with pytest.raises(TypeError, match="positional-only"):
        deep_ep.Config().get_nvl_buffer_size_hint(hidden_bytes=14336, num_ranks=8)


@pytest.mark.parametrize("num_ranks", [1, 3, 6, 48])
def test_recommended_configs_exist_for_some_numbers_of_ranks(num_ranks: int) -> None:
    with pytest.raises(AssertionError, match=f"Unsupported number of EP ranks: {num_ranks}"):
        deep_ep.Buffer.get_dispatch_config(num_ranks)
    with pytest.raises(AssertionError, match=f"Unsupported number of EP ranks: {num_ranks}"):
        deep_ep.Buffer.get_combine_config(num_ranks)
