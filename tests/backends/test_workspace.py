"""Reused buffers: never lent twice, reused when given back, and fresh where that is as good."""

from __future__ import annotations

import threading

import pytest
import torch

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends.workspace import Workspace

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def _address(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


def test_a_buffer_given_back_is_used_again() -> None:
    space = Workspace()
    first = space.take(2 * MEGABYTE, CPU)
    address = _address(first)
    space.give(first.view(-1, 16))
    again = space.take(2 * MEGABYTE - 16, CPU)
    assert (_address(again), again.numel(), again.dtype) == (address, 2 * MEGABYTE - 16, torch.uint8)


def test_two_buffers_in_use_are_two() -> None:
    space = Workspace()
    with space.lease(MEGABYTE, CPU) as one, space.lease(MEGABYTE, CPU) as two:
        assert _address(one) != _address(two)


def test_the_smallest_that_fits_is_taken() -> None:
    space = Workspace()
    large, small = space.take(8 * MEGABYTE, CPU), space.take(2 * MEGABYTE, CPU)
    addresses = {"large": _address(large), "small": _address(small)}
    space.give(large)
    space.give(small)
    assert _address(space.take(MEGABYTE, CPU)) == addresses["small"]
    assert _address(space.take(MEGABYTE, CPU)) == addresses["large"]


def test_growing_sizes_do_not_pile_up_buffers() -> None:
    space = Workspace()
    for megabytes in range(1, 40):
        with space.lease(megabytes * MEGABYTE, CPU):
            pass
    assert len(space._free) == 1
    assert space._free[0].nbytes() < 50 * MEGABYTE


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3), (4, 2)])
def test_the_largest_is_replaced_where_none_of_several_fits(sizes: tuple[int, int]) -> None:
    space = Workspace()
    for buffer in [space.take(size * MEGABYTE, CPU) for size in sizes]:
        space.give(buffer)
    with space.lease(9 * MEGABYTE, CPU) as buffer:
        assert buffer.numel() == 9 * MEGABYTE
    assert sorted(free.nbytes() // MEGABYTE for free in space._free) == [min(sizes), 10]


def test_small_buffers_are_left_to_the_allocator() -> None:
    space = Workspace()
    with space.lease(MEGABYTE - 1, CPU) as buffer:
        assert buffer.numel() == MEGABYTE - 1
    with space.lease(0, CPU) as nothing:
        assert nothing.numel() == 0
    assert not space._free


def test_a_lease_gives_back_where_the_block_raises() -> None:
    space = Workspace()
    with pytest.raises(RuntimeError, match="on purpose"), space.lease(MEGABYTE, CPU):
        raise RuntimeError("on purpose")
    assert len(space._free) == 1


def test_threads_never_share_a_buffer() -> None:
    space, clashes = Workspace(), []

    def work(mark: int) -> None:
        for _ in range(50):
            with space.lease(MEGABYTE, CPU) as buffer:
                buffer[:64] = mark
                if not (buffer[:64] == mark).all():
                    clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes


def test_evaluation_and_training_share_buffers() -> None:
    """Under inference_mode views know no base, and tensors made there cannot be written elsewhere."""
    config = DispatcherConfig(backend="alltoall", num_experts=4, top_k=2, hidden_size=256)
    dispatcher = build_dispatcher(config)
    ids = torch.tensor([[0, 1], [2, 3]]).repeat(1024, 1)

    def layer(rows: int) -> torch.Tensor:
        x = torch.ones(rows, 256, requires_grad=not torch.is_inference_mode_enabled())
        sent = dispatcher.dispatch(x, Routing(ids[:rows], torch.ones(rows, 2)))
        return dispatcher.combine(sent.rows, sent)

    for rows in (2048, 1500):
        with torch.inference_mode():
            assert torch.equal(layer(rows), torch.full((rows, 256), 2.0))
        y = layer(rows)
        y.sum().backward()
        assert torch.equal(y, torch.full((rows, 256), 2.0))
    dispatcher.close()
