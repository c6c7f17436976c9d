"""The kernels of index tables against operators of torch, in Triton's interpreter.

``test_permutation_triton.py`` starts a process for them: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends.alltoall.backend import rank_members
from moe_dispatch.backends.alltoall.fixed import SendTable, send_table
from moe_dispatch.backends.wire import packet_format, row_format
from moe_dispatch.permutation import SlotIndex, TorchPermutation, choose_permutation, triton_tables
from moe_dispatch.permutation.triton_rows import TritonPermutation
from tests.backends.permutations import INTERPRETED

tables = TorchPermutation()
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_permutation_triton.py runs these in the interpreter")

# Rows, slots of a row, keys. More slots than a program handles; no rows at all; one key.
SHAPES = [(0, 2, 3), (1, 1, 1), (7, 3, 5), (40, 8, 16), (700, 2, 9)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    found = choose_permutation("triton", "cpu")
    assert found.group_slots is not tables.group_slots
    return found


def keys_of(rows: int, top_k: int, num_keys: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Keys of which some are no key."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-2, num_keys + 2, (rows, top_k), generator=generator).to(dtype)


def expect_equal(found: SlotIndex, expected: SlotIndex) -> None:
    for field in dataclasses.fields(SlotIndex):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("real_L", "padded_L") and theirs is None:
            continue
        if isinstance(theirs, Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


@pytest.mark.parametrize(
    ("shape", "pad_multiple", "dtype", "entries"),
    [
        *((shape, multiple, torch.int64, 1) for shape in SHAPES for multiple in (1, 16)),
        (SHAPES[2], 2, torch.int64, 1),
        (SHAPES[3], 4, torch.int16, 1),
        (SHAPES[3], 4, torch.int32, 3),
        (SHAPES[4], 1, torch.int32, 3),
    ],
    ids=str,
)
def test_groups_slots_as_torch_does(
    shape: tuple[int, int, int], pad_multiple: int, dtype: torch.dtype, entries: int, kernels: Any
) -> None:
    """Keys may be narrow and strided, and a key may have several entries."""
    rows, top_k, num_keys = shape
    entry_SK = keys_of(rows, 2 * top_k, num_keys * entries, dtype)[:, ::2]
    keys_SK = entry_SK.div(entries, rounding_mode="floor")
    counts = [int((keys_SK == key).sum()) for key in range(num_keys)]
    expected, found = (
        each.group_slots(entry_SK, counts, pad_multiple, entries_per_key=entries) for each in (tables, kernels)
    )
    expect_equal(found, expected)
    mine, theirs = (index.tokens_per_key(keys_SK.device) for index in (found, expected))
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert mine[2] == theirs[2]


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize(
    ("shape", "pad_multiple"),
    [(SHAPES[1], 16), (SHAPES[2], 1), (SHAPES[2], 2), (SHAPES[3], 2), (SHAPES[3], 16), (SHAPES[4], 1), (SHAPES[4], 16)],
    ids=str,
)
def test_groups_statically_as_torch_does(
    shape: tuple[int, int, int], pad_multiple: int, dropping: bool, kernels: Any
) -> None:
    keys_SK, num_keys = keys_of(*shape), shape[2]
    rows = max(keys_SK.numel() // (2 if dropping else 1), 1)
    sizes = {"rows": rows, "buffer_rows": rows + num_keys * pad_multiple + 3, "pad_multiple": pad_multiple}
    weights_SK = torch.rand(keys_SK.shape, generator=torch.Generator().manual_seed(1)) if dropping else None
    expected, found = (
        each.group_statically(keys_SK, num_keys, weights_SK=weights_SK, **sizes) for each in (tables, kernels)
    )
    expect_equal(found, expected)


# Two blocks of slots, at the largest number of blocks of which each program adds up the counts, and above it. From 1024
# keys on, slots are sorted.
@pytest.mark.parametrize("most_blocks", [1, 2])
@pytest.mark.parametrize("num_keys", [64, 256, 1000, 1023, 1024])
def test_groups_many_slots_and_keys_as_torch_does(
    num_keys: int, most_blocks: int, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third key has no slot."""
    monkeypatch.setattr(triton_tables, "_MOST_BLOCKS", most_blocks)
    keys_SK = keys_of(130, 8, num_keys)
    keys_SK = torch.where(keys_SK % 3 == 1, -1, keys_SK)
    counts = torch.bincount(keys_SK[(keys_SK >= 0) & (keys_SK < num_keys)], minlength=num_keys).tolist()
    rows = keys_SK.numel()
    sizes = {"rows": rows, "buffer_rows": rows + 4 * num_keys, "pad_multiple": 4, "weights_SK": None}
    expect_equal(
        kernels.group_statically(keys_SK, num_keys, **sizes), tables.group_statically(keys_SK, num_keys, **sizes)
    )
    expect_equal(kernels.group_slots(keys_SK, counts, 4), tables.group_slots(keys_SK, counts, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 2, 3), (7, 3, 2), (600, 8, 4)], ids=str)
def test_merges_slots_as_torch_does(shape: tuple[int, int, int], dtype: torch.dtype, kernels: Any) -> None:
    ids_TK, generator = keys_of(*shape), torch.Generator().manual_seed(2)
    eighths = torch.randint(0, 64, ids_TK.shape, generator=generator).to(dtype) / 8  # their sums are exact
    upstream, results = torch.rand(ids_TK.shape, generator=generator, dtype=dtype), []
    for each in (tables, kernels):
        weights_TK = eighths.clone().requires_grad_()
        ids, merged = each.merge_slots(ids_TK, weights_TK, asks=False)
        results.append((ids, merged, *torch.autograd.grad(merged, weights_TK, upstream)))
    for theirs, mine in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("mark", [None, 17])
@pytest.mark.parametrize("num_experts", [3, 5, 9])
def test_finds_invalid_ids_as_torch_does(num_experts: int, mark: int | None, asks: bool, kernels: Any) -> None:
    ids_TK = keys_of(700, 2, 5)  # from -2 to 6
    valid_TK, too_low_TK = ids_TK.clamp(-1, num_experts - 1), ids_TK.clamp(max=num_experts - 1)
    is_token_T = torch.arange(len(ids_TK)) % 3 > 0
    for ids in (ids_TK, valid_TK, too_low_TK, ids_TK.clamp(min=-1), ids_TK[:0]):
        for valid_T in (None, is_token_T[: len(ids)], torch.zeros(len(ids), dtype=torch.bool)):
            fields = {"valid_T": valid_T, "asks": asks}
            expected, found = (each.valid_ids(ids, num_experts, mark, **fields) for each in (tables, kernels))
            assert torch.equal(found[0], expected[0])
            assert found[1].item() == expected[1].item()
            assert valid_T is None or (found[0][~valid_T] == -1).all()
            for copied in (found[0], expected[0]):  # a backend may keep them, and the router may reuse its memory
                assert copied.data_ptr() != ids.data_ptr() or not ids.numel()


@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("rows", [0, 7, 700])
def test_counts_owners_as_torch_does(rows: int, width: int, kernels: Any) -> None:
    ids_TK, slots, ranks = keys_of(rows, 2, 4).clamp(-1, 5), 2, 3
    owners, counts = kernels.count_owners(ids_TK, slots, width, (1 + 2 * ranks) * width, graph_safe=False)
    assert torch.equal(owners, (ids_TK + slots).div(slots, rounding_mode="floor"))
    expected = torch.zeros(1 + 2 * ranks, width, dtype=torch.int64)
    for expert in range(slots * ranks):
        expected[1 + expert // slots, expert % slots] = (ids_TK == expert).sum()
    assert torch.equal(counts, expected.view(-1))


# Rows, slots of a row, experts of a rank, ranks, and places for a pair. No rows; one rank; more than a program; 128
# blocks, up to which each program adds up the counts of all of them, and 129; one block; more places than rows.
MANY = [
    (2047, 8, 2, 256, 2048),
    (2060, 8, 2, 256, 2060),
    (3, 2, 2, 256, 9),
    (600, 4, 1, 1000, 700),
    (60, 2, 1, 1500, 60),
]
PAIRS = [(0, 2, 3, 2, 1), (5, 3, 2, 1, 5), (7, 3, 4, 3, 9), (700, 2, 2, 4, 700), *MANY, (9, 8, 2, 64, 8192)]


@pytest.mark.parametrize("shape", PAIRS, ids=str)
def test_gives_rows_their_places_as_torch_does(shape: tuple[int, int, int, int, int], kernels: Any) -> None:
    rows, top_k, experts, size, pair_rows = shape
    ids_TK = torch.randint(-1, experts * size, (rows, top_k), generator=torch.Generator().manual_seed(rows))
    ids_TK[ids_TK // experts % 5 == 3] = -1  # ranks without rows
    owner_TK, counts = tables.count_owners(ids_TK, experts, experts, (1 + size) * experts, graph_safe=True)
    weights_TK = torch.ones(rows, top_k)
    if rows:
        expected = send_table(rank_members(owner_TK, size), owner_TK, weights_TK, pair_rows, may_overflow=False)
    else:
        places, none = torch.zeros(size * pair_rows, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        expected = SendTable(source_B=places - 1, member_N=none, cu_T=one, busiest=one[0])
    *found, slots_P = kernels.send_places(ids_TK, experts, size, pair_rows=pair_rows)
    found[1][int(found[2][-1]) :] = 0  # behind the last edge, entries may be anything
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert torch.equal(slots_P, counts.view(-1, experts)[1:].sum(1))


# Rows, slots of a row, experts of a rank, ranks, and the first expert. Ids before and behind those of the ranks.
@pytest.mark.parametrize(
    "shape",
    [(0, 2, 3, 2, 0), (5, 3, 2, 1, 4), (7, 3, 4, 3, 2), (700, 2, 2, 4, 1), *((*each[:4], 5) for each in MANY)],
    ids=str,
)
def test_gives_exactly_the_rows_their_places(shape: tuple[int, int, int, int, int], kernels: Any) -> None:
    rows, top_k, experts, size, first = shape
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randint(-1, first + experts * size + 3, (rows, top_k + 5), generator=generator).to(torch.int16)
    ids_TK = wide[:, :top_k]  # as in packets, with a stride
    source_B, member_B, cu_T = kernels.send_places(ids_TK, experts, size, first=first)
    owners = [[(int(expert) - first) // experts for expert in row] for row in ids_TK.tolist()]
    pairs = [(rank, row) for rank in range(size) for row in range(rows) if rank in owners[row]]
    by_row = sorted(range(len(pairs)), key=lambda at: pairs[at][1])
    assert source_B[: len(pairs)].tolist() == [row for _, row in pairs]
    assert member_B[: len(pairs)].tolist() == by_row
    assert cu_T.tolist() == [sum(row < end for _, row in pairs) for end in range(rows + 1)]


@pytest.mark.parametrize("id_dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("noted", [False, True])
def test_packets_hold_slots_of_their_rows(
    noted: bool, top_k: int, weight_dtype: torch.dtype, id_dtype: torch.dtype, kernels: Any
) -> None:
    row = row_format(torch.bfloat16, 5)
    form = packet_format(row, top_k, weight_dtype, id_dtype, note=noted)
    rows, weights = torch.randn(300, 5).bfloat16(), torch.rand(300, top_k, dtype=weight_dtype)
    ids, notes_P = torch.randint(-1, 40, (300, top_k)), torch.tensor([5, 6]) if noted else None
    source_B = torch.randint(-1, 300, (400,))
    by_row = source_B.sort(stable=True)
    edges = torch.searchsorted(by_row.values, torch.arange(301)) - (empty := int((source_B < 0).sum()))
    out = torch.full((400, form.stride), 99, dtype=torch.uint8)
    tables_B = source_B, by_row.indices[empty:], edges
    form.scatter(TritonPermutation(), rows, (weights, ids), tables_B, out, notes_P)
    used = source_B >= 0
    found_rows, found_weights, found_ids = form.unpack(out)
    assert isinstance(found_rows, Tensor)
    assert torch.equal(found_rows[used], rows[source_B[used]])
    assert torch.equal(found_weights[used], weights[source_B[used]])
    assert torch.equal(found_ids[used], ids[source_B[used]].to(id_dtype))
    assert (found_ids[~used] == -1).all()
    assert not noted or form.notes(out)[::200, 0].tolist() == [5, 6]
    assert (out[~used, : row.nbytes] == 99).all()  # places that stay empty are not written
