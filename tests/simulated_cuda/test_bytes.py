"""No verb reads and writes more bytes than its budget allows, and the counts are right."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from moe_dispatch.capabilities.quantised import triton_codes
from moe_dispatch.capabilities.quantised.formats import Quantised
from moe_dispatch.permutation import choose_permutation, triton_kernels, triton_tables
from moe_dispatch.permutation.triton_rows import TritonPermutation
from tests.simulated_cuda import budget, triton_values
from tests.simulated_cuda.bytes import MANY_RANKS, SETTINGS, measure, measure_tables, read
from tests.simulated_cuda.traffic import Touched, traffic


@pytest.fixture(autouse=True)
def no_fills() -> None:
    """Deterministic mode fills memory by operators; conftest.py restores it."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key", list(SETTINGS), ids=" ".join)
def test_no_verb_exceeds_its_budget_of_bytes(key: tuple[str, str]) -> None:
    allowed = read()[" ".join(key)]
    found = {verb: each.multiple for verb, each in measure(SETTINGS[key]).items()}
    excess = {verb: multiple for verb, multiple in found.items() if multiple > allowed[verb]}
    assert not excess, f"{excess} of the floor exceeds {allowed}"


@pytest.mark.parametrize("key", list(MANY_RANKS), ids=" ".join)
def test_tables_of_many_ranks_do_not_exceed_their_budget_of_bytes(key: tuple[str, str]) -> None:
    assert measure_tables(MANY_RANKS[key]).multiple <= read()[" ".join(key)]["dispatch"]


def test_a_planted_sum_over_all_blocks_exceeds_the_budget() -> None:
    with patch.object(triton_tables, "_MOST_BLOCKS", 1 << 20):  # each program adds up the counts of all blocks
        assert measure_tables(256).multiple > read()["alltoall 256-ranks"]["dispatch"]


def test_every_setting_has_a_budget_of_bytes() -> None:
    assert list(read()) == [" ".join(key) for key in (*SETTINGS, *MANY_RANKS)]


def test_no_verb_is_below_its_floor() -> None:
    assert all(multiple >= 1 for multiples in read().values() for multiple in multiples.values())


def test_a_planted_pass_over_rows_exceeds_the_budget() -> None:
    expand = TritonPermutation.expand
    with patch.object(TritonPermutation, "expand", lambda *args: expand(*args).clone()):
        found = measure(SETTINGS["alltoall", "eager"])
    exceeds = {verb: each.multiple > read()["alltoall eager"][verb] for verb, each in found.items()}
    assert exceeds == {"dispatch": True, "combine": False, "combine.backward": False, "dispatch.backward": False}


def test_a_planted_pass_over_quantised_rows_exceeds_the_budget() -> None:
    def widens_first(rows: Quantised, permutation: Any, index: Any, dtype: torch.dtype, *, as_sent: bool) -> Any:
        return permutation.expand(rows.decoded(dtype), index, dtype)

    with patch.object(Quantised, "expand", widens_first):
        found = measure(SETTINGS["alltoall", "mxfp8"])
    assert found["dispatch"].multiple > read()["alltoall mxfp8"]["dispatch"]


def test_a_planted_launch_exceeds_the_budget() -> None:
    permutation, row = choose_permutation("auto", "cuda"), ("local", "eager", "rows")
    merge_slots = permutation.merge_slots

    def adds(ids: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        merged: tuple[Tensor, Tensor] = merge_slots(ids + 0, weights, **options)
        return merged

    with patch.object(permutation, "merge_slots", adds):
        found = budget.counted(budget.measure(*row)["dispatch"])
    allowed = budget.read()["local eager rows dispatch"]
    assert {kind: found[kind] - allowed[kind] for kind in found if found[kind] != allowed[kind]} == {"launches": 1}


def test_operators_are_counted_by_the_memory_that_they_touch() -> None:
    x = torch.ones(4, 8, device="cuda")  # 128 bytes
    column, two = x[:, :1].expand(4, 8), torch.tensor([0, 2], device="cuda")
    with traffic() as found:
        x.t().contiguous()
        x.bfloat16()
        x.add_(1)
        x[1:3].zero_()
        x.copy_(column)
        torch.sum(x, 1, out=torch.empty(4, device="cuda"))
        x.index_select(0, two)
        x.index_copy_(0, two, torch.zeros_like(x)[:2])
        x.index_fill_(0, two, 1)
        torch.cat([x, x])
        x.nonzero()
    counted = [(each.name.removeprefix("aten::"), each.read, each.written) for each in found]
    assert counted == [
        ("clone", 128, 128),
        ("_to_copy", 128, 64),
        ("add_.Tensor", 128, 128),
        ("zero_", 0, 64),
        ("copy_", 16, 128),
        ("sum.IntList_out", 128, 16),
        ("index_select", 16 + 64, 64),
        ("zeros_like", 0, 128),
        ("index_copy_", 16 + 64, 64),
        ("index_fill_.int_Scalar", 16, 64),
        ("cat", 256, 256),
        ("nonzero", 128, 24 * 16),
    ]


def touched(
    name: str, *args: Any, grid: tuple[int, ...], module: Any = triton_kernels, **options: Any
) -> tuple[int, int]:
    """Return the bytes that a kernel touches in the interpreter, and assert that its formula says the same."""
    kernel, counts = getattr(module, name), triton_values._touched
    counts.read = counts.written = 0
    triton_values._interpret(kernel, grid, args, options)
    given = SimpleNamespace(**dict(zip(kernel.arg_names, args, strict=False)), **options)
    assert triton_values._IN_TORCH[name][1](given) == (counts.read, counts.written)
    return counts.read, counts.written


@pytest.mark.parametrize("width", [16, 40])
def test_formulas_of_kernels_count_what_the_interpreter_touches(width: int) -> None:
    """With a width that is no multiple of the block, and masked rows, which are not read."""
    rows, out = torch.ones(5, width, dtype=torch.bfloat16), torch.empty(4, width, dtype=torch.bfloat16)
    source, weights, block = torch.tensor([3, -1, 0, 3]), torch.ones(4), {"block": 16}
    blocks, strides = triton.cdiv(width, 16), rows.stride()
    arguments = (rows, source, out, width, *strides, *out.stride())
    assert touched("gather_kernel", *arguments, grid=(4, blocks), **block)[1] == out.nbytes
    float32: dict[str, Any] = {"accumulate": triton.language.float32, **block}
    for partners, clears in product((None, out), (False, True)):
        dots, of_partners = (None, (0, 0)) if partners is None else (torch.empty(4), partners.stride())
        arguments = (rows, source >= 0, weights, partners, out, dots, width, *strides, *of_partners, out.stride(0))
        touched("weigh_kernel", *arguments, grid=(4,), clears=clears, **float32)
    members, edges, cleared = torch.tensor([4, 0, 2]), torch.tensor([0, 2, 2, 3]), torch.ones(3, 4)[:, :3]
    for padding in (None, torch.tensor([3, 4])):
        places, grouped = members.clamp(max=2), out.contiguous()
        arguments = (rows[:3], places, edges, padding, grouped, 3, 4, width, *strides, *grouped.stride())
        touched("scatter_kernel", *arguments, grid=(3 + (padding is not None) * 2, blocks), **block)
        for partners in (None, grouped):
            dots, of_partners = (None, (0, 0)) if partners is None else (torch.empty(4), partners.stride())
            arguments = (rows[:3], places, edges, padding, weights, partners, grouped, dots, 3, 4, width)
            arguments = (*arguments, *strides, *of_partners, grouped.stride(0))
            touched("scatter_weighted_kernel", *arguments, grid=(3 + (padding is not None) * 2,), most=2, **float32)
    for given, of_rows, zeros in ((None, False, None), (torch.ones(3), False, None), (torch.ones(5), True, cleared)):
        arguments = (rows, members, edges, given, out[:3], zeros, width, *strides, *out.stride(), 4, 3)
        options = {"of_rows": of_rows, "cleared_block": 4, **float32}
        touched("sum_bags_kernel", *arguments, grid=(3, blocks), **options)


@pytest.mark.parametrize("powers", [False, True])
def test_formulas_of_quantised_rows_count_what_the_interpreter_touches(powers: bool) -> None:
    """With rows that go nowhere, and a block that the last program masks."""
    size, width = 16, 48
    rows, codes = torch.randn(4, width).bfloat16(), torch.zeros(6, width + 8, dtype=torch.uint8)
    scales = torch.zeros(6, width // size, dtype=torch.uint8 if powers else torch.float32)
    shapes: dict[str, Any] = {"powers": powers, "size": size, "count": 2, "module": triton_codes}
    places, edges = torch.tensor([5, 0, 2]), torch.tensor([0, 2, 2, 3, 3])
    strides = (width, *rows.stride(), codes.stride(0), scales.stride(0))
    for tables, count in (((None, None), 4), ((places, edges), 2)):
        read, _ = touched("quantise_kernel", rows, *tables, codes, scales, *strides, grid=(4, 2), **shapes)
        assert read >= count * rows[0].nbytes
    strides = (width, codes.stride(0), scales.stride(0))
    for out, padding in product((rows.clone(), codes[:4, :width].clone()), (None, torch.tensor([1, 4]))):
        of_out = scales[:4].clone() if out.dtype == torch.uint8 else None
        to = (out, of_out, 4, 4, *strides, out.stride(0), 0 if of_out is None else of_out.stride(0))
        grid = (4 + (padding is not None) * 2, 2)
        touched("expand_kernel", codes, scales, places.clamp(max=3), edges, padding, *to, grid=grid, **shapes)
    for partners in (None, rows):
        dots, of_partners = (None, (0, 0)) if partners is None else (torch.empty(4), rows.stride())
        last = (padding, torch.ones(4), partners, rows.clone(), dots, 4, 4, *strides, *of_partners, rows.stride(0))
        weighted = {**shapes, "most": 2, "accumulate": triton.language.float32, "block": 16}
        del weighted["count"]
        tables = (places.clamp(max=3), edges)
        touched("expand_weighted_kernel", codes, scales, *tables, *last, grid=(6,), **weighted)
    to = (rows, None, 4, 4, *strides, rows.stride(0), 0)
    touched("expand_kernel", codes, scales, None, None, None, *to, grid=(4, 2), **shapes)


def test_lanes_that_read_one_address_count_once() -> None:
    assert interpreter_builder.create_masked_load.__qualname__.startswith(Touched.__name__)
    ids = torch.zeros(8, 2, dtype=torch.int64)
    valid, tokens, outcome = torch.empty_like(ids), torch.ones(8, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    counts = triton_values._touched
    counts.read = counts.written = 0
    arguments = (ids, tokens, valid, outcome, 16, 4, 2)
    triton_values._interpret(triton_tables.valid_kernel, (1,), arguments, {"marks": False, "block": 32})
    assert (counts.read, counts.written) == (ids.nbytes + tokens.nbytes, valid.nbytes)
