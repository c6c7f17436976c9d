"""The simulation reports what it is for: a host sync, memory used on two streams without an order, a bad capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_dispatch.permutation import choose_permutation
from tests.simulated_cuda.budget import counted
from tests.simulated_cuda.device import recorded
from tests.simulated_cuda.layer import dispatcher_of, inputs

SIZE = 1 << 10
SIDE = 1 << 12  # of a matrix for which the allocator has no other free memory, whatever has run before


@pytest.fixture
def side() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    yield stream
    torch.cuda.synchronize()


def test_values_are_those_of_the_cpu() -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert (x @ x.t()).tolist() == [[5, 14], [14, 50]]


def test_a_planted_host_sync_is_reported_with_its_line() -> None:
    dispatcher, (x, routing) = dispatcher_of("local", None), inputs()
    permutation = choose_permutation("auto", "cuda")
    merge_slots = permutation.merge_slots

    def asks_the_device(ids: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        int(ids.max())
        merged: tuple[Tensor, Tensor] = merge_slots(ids, weights, **options)
        return merged

    dispatcher.dispatch(x, routing)
    with recorded() as usual:
        dispatcher.dispatch(x, routing)
    with patch.object(permutation, "merge_slots", asks_the_device), recorded() as planted:
        dispatcher.dispatch(x, routing)
    assert counted(planted)["syncs"] == counted(usual)["syncs"] + 1
    assert any(each.kind == "sync" and "dispatchers/" in each.place for each in planted)


@pytest.mark.expects_races
def test_a_read_that_does_not_wait_for_the_write_is_reported(side: torch.cuda.Stream) -> None:
    with recorded() as found:
        x = torch.ones(SIZE, device="cuda")
        with torch.cuda.stream(side):
            x + 1
    assert [each.kind for each in found].count("race") == 1


@pytest.mark.expects_races
def test_memory_that_goes_back_while_another_stream_reads_it_is_reported(side: torch.cuda.Stream) -> None:
    with recorded() as found:
        x = torch.ones(SIDE, SIDE, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        del x  # without record_stream, the next tensor of this size gets its memory
        torch.ones(SIDE, SIDE, device="cuda")
    assert "race" in [each.kind for each in found]


@pytest.mark.expects_races
def test_a_product_of_matrices_is_no_part_of_the_operation_before_it(side: torch.cuda.Stream) -> None:
    """The stub of cuBLAS launches nothing."""
    with recorded() as found:
        x = torch.ones(8, 8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        y = x @ x
        with torch.cuda.stream(side):
            y + 1
    assert [each.kind for each in found].count("race") == 1


def test_a_product_of_matrices_in_memory_that_another_stream_gave_back(side: torch.cuda.Stream) -> None:
    x, y = torch.ones(SIDE, 1, device="cuda"), torch.ones(SIDE, SIDE, device="cuda")
    address = y.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y + 1
    y.record_stream(side)
    del y  # the allocator asks for the event of the side stream when it gives the memory to the product
    assert (x @ x.t()).data_ptr() == address


def test_streams_that_wait_are_not_reported(side: torch.cuda.Stream) -> None:
    x = torch.ones(SIZE, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    assert (y + x).sum().item() == 3 * SIZE


def test_a_sync_in_a_capture_is_refused() -> None:
    x = torch.ones(SIZE, device="cuda")
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x.sum().item()


def test_a_stream_that_does_not_join_its_capture_is_refused(side: torch.cuda.Stream) -> None:
    x = torch.ones(SIZE, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined work"):
        capture()
