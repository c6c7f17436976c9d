"""Row counts that change from step to step compile no kernel anew."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.capabilities.balance import triton_plan
from moe_dispatch.capabilities.quantised import triton_codes
from moe_dispatch.permutation import triton_kernels, triton_tables
from moe_dispatch.permutation.triton_launch import Kernel
from tests.simulated_cuda.ranks import NcclRanks

FIRST, MOST_ROWS, EXPERTS, TOP_K, HIDDEN = 5, 300, 8, 2, 32
FEW_ROWS = 40  # of the first steps: one block of each kernel, so that later steps have other numbers of blocks
KERNELS = [
    kernel
    for module in (triton_kernels, triton_tables, triton_codes, triton_plan)
    for kernel in vars(module).values()
    if isinstance(kernel, Kernel) and kernel.fn.__name__.endswith("_kernel")
]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": MOST_ROWS}
QUANTISED: dict[str, Any] = {"wire": {"dtype": "mxfp8", "gradients": True}}


def compilations() -> list[str]:
    """Return what the kernels of this package were compiled for so far, with their names, on device 0."""
    return [f"{kernel.fn.__name__} {key}" for kernel in KERNELS for key in kernel.device_caches[0][0]]


def run(count: int, group: dist.ProcessGroup, config: DispatcherConfig) -> Iterator[None]:
    """Run forward and backward of a layer, each time with another number of rows."""
    rank = group.rank()
    dispatcher, random, device = build_dispatcher(config, group), Random(rank), torch.device("cuda", rank)
    for step in range(count):
        rows = random.randrange((FEW_ROWS if step < FIRST else MOST_ROWS) + 1)
        ids = torch.rand(rows, EXPERTS).argsort(1)[:, :TOP_K].to(device)
        x = torch.ones(rows, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
        sent = dispatcher.dispatch(x, Routing(ids, torch.ones(rows, TOP_K, device=device, requires_grad=True)))
        dispatcher.combine(sent.rows, sent).sum().backward()
        yield
    dispatcher.close()


@pytest.mark.parametrize(
    ("fields", "steps"),
    [({}, 60), (SAFE, 40), (QUANTISED, 40), ({**SAFE, "balance": "exact"}, 60)],
    ids=["eager", "graph-safe", "quantised", "balanced"],
)
def test_no_kernel_is_compiled_after_the_first_steps(fields: dict[str, Any], steps: int) -> None:
    torch.use_deterministic_algorithms(False)  # which fills memory; conftest.py restores it
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "pad_multiple": 4}
    config, seen = DispatcherConfig(backend="alltoall", **sizes, **fields), list[list[str]]()

    def on_rank(group: dist.ProcessGroup) -> None:
        for _ in run(steps, group, config):
            if group.rank() == 0:
                seen.append(compilations())

    for kernel in KERNELS:
        kernel.device_caches.clear()
        kernel._known.clear()
    NcclRanks().run(on_rank, 2)
    assert len(seen) == steps
    sends = {"quantise_kernel", "expand_kernel"} if "wire" in fields else {"scatter_kernel"}
    assert {each.split()[0] for each in seen[FIRST - 1]} > {*sends, "place_kernel", "sum_bags_kernel"}
    assert set(seen[-1]) == set(seen[FIRST - 1])


def test_a_planted_specialisation_is_compiled_anew() -> None:
    planted = Kernel(triton_tables.valid_kernel.fn)  # without its ``do_not_specialize``
    for rows in (16, 17):
        ids = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
        planted[(1,)](ids, None, torch.empty_like(ids), ids[0, 0], rows, 4, 1, marks=False, block=32)
    assert len(planted.device_caches[0][0]) == 2
