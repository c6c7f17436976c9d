"""The counters see every collective and every host read, with the right bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch_testing import count_collectives, count_host_syncs, run_processes, run_ranks
from moe_dispatch_testing.ranks import thread_group


def all_to_all(group: dist.ProcessGroup) -> None:
    # Rank r sends r + 1 rows to everyone, so rank 1 of 2 sends 2 rows of 3 float32 to rank 0, and keeps 2.
    mine, size = group.rank() + 1, group.size()
    received = torch.empty(sum(range(1, size + 1)), 3)
    group.alltoall_base(received, torch.ones(mine * size, 3), list(range(1, size + 1)), [mine] * size).wait()


def evenly(group: dist.ProcessGroup) -> None:
    group.alltoall_base(torch.empty(4, 3), torch.ones(4, 3), [], []).wait()


def all_gather(group: dist.ProcessGroup) -> None:
    group._allgather_base(torch.empty(2 * group.size(), 3), torch.ones(2, 3)).wait()


def reduce_scatter(group: dist.ProcessGroup) -> None:
    options = dist.ReduceScatterOptions()
    group._reduce_scatter_base(torch.empty(2, 3), torch.ones(2 * group.size(), 3), options).wait()


def all_reduce(group: dist.ProcessGroup) -> None:
    group.allreduce([torch.ones(5)]).wait()


def broadcast(group: dist.ProcessGroup) -> None:
    group.broadcast([torch.ones(5)], dist.BroadcastOptions()).wait()


def gather(group: dist.ProcessGroup) -> None:
    outputs = [] if group.rank() else [[torch.empty(5) for _ in range(group.size())]]
    group.gather(outputs, [torch.ones(5)], dist.GatherOptions()).wait()


@pytest.mark.parametrize(
    ("start", "op", "nbytes"),
    [
        (all_to_all, "alltoall_base", 2 * 3 * 4),
        (evenly, "alltoall_base", 2 * 3 * 4),
        (all_gather, "allgather_base", 2 * 3 * 4),
        (reduce_scatter, "reduce_scatter_base", 2 * 3 * 4),
        (all_reduce, "allreduce", 5 * 4),
        (broadcast, "broadcast", 5 * 4),
        (gather, "gather", 5 * 4),
    ],
)
def test_bytes_to_others(start: Callable[[dist.ProcessGroup], None], op: str, nbytes: int) -> None:
    def body(group: dist.ProcessGroup) -> tuple[dict[str, int], int]:
        with count_collectives() as seen:
            start(group)
        return dict(seen.counts), seen.nbytes

    assert run_ranks(body, 2)[1] == ({op: 1}, nbytes)


def test_the_backward_is_seen_too() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            all_reduce(group)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            all_gather(ctx.group)
            return grad * 2, None

    def body(group: dist.ProcessGroup) -> list[str]:
        with count_collectives() as seen:
            y: Tensor = Both.apply(torch.ones(2, requires_grad=True), group)  # type: ignore[no-untyped-call]
            y.sum().backward()
        return [call.op for call in seen.calls]

    assert run_ranks(body, 2) == [["allreduce", "allgather_base"]] * 2


def test_another_group_of_the_same_ranks_is_not_counted_where_one_is_named() -> None:
    store = HashStore()

    def body(group: dist.ProcessGroup) -> list[int]:
        other = thread_group(store, group.rank(), group.size())
        with count_collectives() as all_of_them, count_collectives(group) as seen, count_collectives(other) as none:
            all_reduce(group)
        with count_collectives(group) as unseen:
            all_reduce(other)
        return [len(found.calls) for found in (all_of_them, seen, none, unseen)]

    assert run_ranks(body, 2) == [[1, 1, 0, 0]] * 2


def functional(rank: int) -> list[tuple[str, int]]:
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed._functional_collectives import wait_tensor as wait

    world = dist.group.WORLD
    assert world is not None
    with count_collectives() as seen:
        wait(collectives.all_to_all_single(torch.ones(3, 2), [1 + rank, 1 + rank], [1, 2], world))
        wait(collectives.all_gather_tensor(torch.ones(3, 2), 0, world))
        wait(collectives.reduce_scatter_tensor(torch.ones(4, 2), "sum", 0, world))
        wait(collectives.all_reduce(torch.ones(3, 2), "sum", world))
        dist.barrier()
    return [(call.op, call.nbytes) for call in seen.calls]


def test_functional_collectives_of_other_libraries() -> None:
    # Rank 0 keeps 1 of its 3 rows of 8 bytes, rank 1 keeps 2.
    sizes = [("all_gather_into_tensor", 24), ("reduce_scatter_tensor", 16), ("all_reduce", 24), ("barrier", 0)]
    first, second = run_processes(functional, 2)
    assert first == [("all_to_all_single", 16), *sizes]
    assert second == [("all_to_all_single", 8), *sizes]


@pytest.mark.parametrize(
    ("read", "method"),
    [
        (lambda t: t.item(), "item"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.cpu(), "cpu"),
        (lambda t: t.to("cpu"), "to"),
        (lambda t: t.numpy(), "numpy"),
        (complex, "__complex__"),
        (bool, "__bool__"),
        (int, "__int__"),
        (float, "__float__"),
        (lambda t: [10, 11][t], "__index__"),
    ],
)
def test_host_reads(read: Callable[[Tensor], object], method: str) -> None:
    value, plain = torch.tensor(1), getattr(Tensor, method)
    with count_host_syncs() as reads:
        read(value)
        value + 1
    assert [(found.method, found.thread) for found in reads] == [(method, "MainThread")]
    assert reads[0].place.startswith(__file__)
    assert getattr(Tensor, method) == plain
    read(value)
    assert len(reads) == 1


def test_host_reads_of_every_thread() -> None:
    with count_host_syncs() as reads:
        run_ranks(lambda group: torch.tensor([group.rank()]).tolist(), 2)
    assert sorted(found.thread for found in reads) == ["rank-0", "rank-1"]


def test_only_one_counter_of_host_reads_at_a_time() -> None:
    with count_host_syncs(), pytest.raises(RuntimeError, match="only one may be open at a time"), count_host_syncs():
        pass
