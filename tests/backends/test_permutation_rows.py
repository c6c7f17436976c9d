"""Passes over rows of the one-rank reorder, also in buffers of fixed size, each against the same plain computation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch import build_dispatcher
from moe_dispatch.capabilities.compiling.routes import index_tensors
from moe_dispatch.permutation import Permutation, SlotIndex, TorchPermutation, accumulation_dtype, group_slots, round_up
from moe_dispatch.permutation import rows as bags
from moe_dispatch.permutation.rows import as_words, bag, in_bfloat16_parts, sum_by_columns
from moe_dispatch_testing.rank_context import padding_rows
from tests.backends.permutations import INTERPRETED, implementations
from tests.backends.tables import EXAMPLE, FLOATS, Table, many_slots, reduced, rows_of, static_index, tables
from tests.dispatchers.layer import random_routing, random_rows, small_config

# No tokens at all, and tokens that go nowhere.
NO_TOKENS, NOWHERE = Table([], 2, 2, 1), Table([[-1, -1]] * 3, 2, 2, 4)
NAN, INF = float("nan"), float("inf")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
FIXED = settings(max_examples=20, deadline=None, derandomize=True)
DTYPE = st.sampled_from(list(TOLERANCE))
TORCH = TorchPermutation()

every = pytest.mark.parametrize("permutation", implementations().values(), ids=implementations())
# Those of graph-safe mode, whose buffers have rows behind those of the table.
STATIC: dict[str, Permutation] = {"torch, fixed size": TorchPermutation(fixed_size=True)}
if INTERPRETED:
    STATIC["triton, fixed size"] = implementations()["triton"]
SLACK = 3
with_static = pytest.mark.parametrize(
    ("permutation", "slack"),
    [*((one, None) for one in implementations().values()), *((one, SLACK) for one in STATIC.values())],
    ids=[*implementations(), *STATIC],
)


def index_of(table: Table, slack: int | None) -> SlotIndex:
    assume(table.keys or slack is None)
    return table.index if slack is None else static_index(table, slack)


def poisoned(table: Table, values_R: Tensor) -> Tensor:
    """Values with NaN in padding and slack."""
    is_real = [pair is not None for pair in table.grouped()]
    is_padding = ~torch.tensor(is_real + [False] * (len(values_R) - len(is_real)), dtype=torch.bool)
    return values_R.masked_fill(is_padding.view(-1, *[1] * (values_R.dim() - 1)), NAN)


@with_static
@FIXED
@given(tables())
@example(NO_TOKENS)
@example(NOWHERE)
def test_expand_copies_rows_and_clears_padding(permutation: Permutation, slack: int | None, table: Table) -> None:
    rows_SD, grouped = rows_of(len(table.keys)), table.grouped()
    index = index_of(table, slack)
    out = permutation.expand(rows_SD, index, torch.float32)
    assert out.shape == (index.num_grouped, 6)
    assert out[: len(grouped)].tolist() == [
        [0.0] * 6 if pair is None else rows_SD[pair[0]].tolist() for pair in grouped
    ]


@with_static
@FIXED
@given(tables(), DTYPE, st.booleans())
@example(NO_TOKENS, torch.float32, True)
@example(NOWHERE, torch.float32, True)
def test_reduce_sums_and_never_reads_padding(
    permutation: Permutation, slack: int | None, table: Table, dtype: torch.dtype, weighted: bool
) -> None:
    index = index_of(table, slack)
    num_grouped = index.num_grouped
    rows_RD = poisoned(table, rows_of(num_grouped, dtype=dtype))
    weights_R = poisoned(table, rows_of(num_grouped, 1, dtype, seed=1)).squeeze(1)
    expected = torch.zeros(len(table.keys), 6, dtype=torch.float64)
    for at, pair in enumerate(table.grouped()):
        if pair is not None:
            expected[pair[0]] += rows_RD[at].double() * (weights_R[at].double() if weighted else 1)
    out = reduced(permutation, rows_RD, index, weights_R if weighted else None)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every
def test_reduce_adds_in_slot_order(permutation: Permutation) -> None:
    """In float32 3e7 + 1 is 3e7. The slots' experts are such that no order but the slots' own gives these sums."""
    index = group_slots(torch.tensor([[2, 0, 1]]), [1, 1, 1])
    for order in itertools.permutations([3e7, 1.0, -3e7]):
        rows_RD = index.to_grouped(torch.tensor([order])).unsqueeze(1)
        first, second, third = torch.tensor(order)
        assert reduced(permutation, rows_RD, index, None).item() == (first + second) + third


@with_static
@pytest.mark.parametrize("deterministic", [True, False])
@FIXED
@given(tables(), DTYPE, st.booleans())
@example(NO_TOKENS, torch.float32, True)
@example(NOWHERE, torch.float32, True)
def test_expand_weighted_is_the_backward_of_reduce(
    permutation: Permutation, slack: int | None, deterministic: bool, table: Table, dtype: torch.dtype, wants_dots: bool
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    index = index_of(table, slack)
    num_grouped = index.num_grouped
    grad_SD = rows_of(len(table.keys), dtype=dtype)
    partners_RD = poisoned(table, rows_of(num_grouped, dtype=dtype, seed=1))
    weights_R = poisoned(table, rows_of(num_grouped, 1, dtype, seed=2)).squeeze(1)
    partners = partners_RD if wants_dots else None
    grad_RD, dots_R = permutation.expand_weighted(grad_SD, index, weights_R, partners, dtype)
    for at, pair in enumerate(table.grouped()):
        if pair is None:
            assert not grad_RD[at].any()
            assert dots_R is None or dots_R[at] == 0
            continue
        assert torch.equal(grad_RD[at], grad_SD[pair[0]] * weights_R[at])
        if dots_R is not None:
            dot = grad_SD[pair[0]] @ partners_RD[at]
            torch.testing.assert_close(dots_R[at], dot, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert grad_RD.shape == (num_grouped, 6)
    assert (None if dots_R is None else dots_R.shape) == ((num_grouped,) if wants_dots else None)


@every
def test_expand_weighted_without_weights_is_expand(permutation: Permutation) -> None:
    grad_SD = rows_of(4)
    grad_RD, dots_R = permutation.expand_weighted(grad_SD, EXAMPLE.index, None, None, torch.bfloat16)
    assert torch.equal(grad_RD, permutation.expand(grad_SD, EXAMPLE.index, torch.bfloat16))
    assert dots_R is None


@every
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 33, 2049])
def test_weigh_multiplies_real_rows_and_reads_no_others(
    permutation: Permutation, dtype: torch.dtype, width: int
) -> None:
    """Products have the bits of torch, whatever stands in the padding; rows of experts may be strided."""
    is_real_R = torch.tensor([True, True, False, True, False])
    weights_R = torch.where(is_real_R, rows_of(5, 1, seed=2).squeeze(1), 0).to(accumulation_dtype(dtype))
    padded_RD = rows_of(5, width, dtype).masked_fill(~is_real_R.unsqueeze(1), NAN)
    expected = padded_RD.to(weights_R.dtype) * weights_R.unsqueeze(1)
    for rows_RD in (padded_RD, padded_RD.t().contiguous().t()):
        for out in (torch.bfloat16, dtype):
            products, none = permutation.weigh(rows_RD, weights_R, lambda: is_real_R, out)
            assert none is None
            assert torch.equal(products[is_real_R], expected[is_real_R].to(out))
            cleared, _ = permutation.weigh(rows_RD, weights_R, lambda: is_real_R, out, clears=True)
            assert torch.equal(cleared, torch.where(is_real_R.unsqueeze(1), expected, 0).to(out))


@every
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 33, 2049])
def test_weigh_with_partners_is_its_backward(permutation: Permutation, dtype: torch.dtype, width: int) -> None:
    is_real_R = torch.tensor([True, True, False, True, False])
    accumulate = accumulation_dtype(dtype)
    weights_R = torch.where(is_real_R, rows_of(5, 1, seed=2).squeeze(1), 0).to(accumulate)
    grad_RD = rows_of(5, width, dtype).masked_fill(~is_real_R.unsqueeze(1), 0)
    rows_RD = rows_of(5, width, dtype, seed=1).masked_fill(~is_real_R.unsqueeze(1), NAN)
    products, dots_R = permutation.weigh(grad_RD, weights_R, lambda: is_real_R, dtype, partners_RD=rows_RD, clears=True)
    assert torch.equal(products, (grad_RD.to(accumulate) * weights_R.unsqueeze(1)).to(dtype))
    assert dots_R is not None
    assert dots_R.dtype == accumulate
    dots = torch.linalg.vecdot(grad_RD.double(), rows_RD.nan_to_num(0).double())
    torch.testing.assert_close(dots_R.double(), dots, rtol=1e-4, atol=1e-4)
    assert not dots_R[~is_real_R].any()


@every
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_are_rounded_once(permutation: Permutation, dtype: torch.dtype, weighted: bool) -> None:
    """Within half a unit in the last place of the exact sum, and a hair for float32 accumulation."""
    index = many_slots()
    rows_RD = rows_of(index.num_grouped, dtype=dtype)
    weights_R = rows_of(index.num_grouped, 1, seed=1).squeeze(1).abs().to(accumulation_dtype(dtype))
    out = reduced(permutation, rows_RD, index, weights_R if weighted else None)
    terms_RD = rows_RD.double() * (weights_R.double().unsqueeze(1) if weighted else 1)
    exact, magnitude = torch.zeros(2, 40, 6, dtype=torch.float64)
    assert index.position_N is not None
    exact.index_add_(0, index.source_R[index.position_N], terms_RD[index.position_N])
    magnitude.index_add_(0, index.source_R[index.position_N], terms_RD[index.position_N].abs())
    half_ulp = torch.finfo(dtype).eps / 2 * exact.abs()
    accumulation = 16 * torch.finfo(accumulation_dtype(dtype)).eps * magnitude
    # A sum may round into the next binade, where the unit doubles.
    assert ((out.double() - exact).abs() <= half_ulp * 1.01 + accumulation).all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_into_a_wider_dtype_are_not_rounded(permutation: Permutation, dtype: torch.dtype) -> None:
    index = EXAMPLE.index
    rows_RD = rows_of(index.num_grouped, dtype=dtype)
    for weights_R in (None, torch.rand(index.num_grouped, generator=torch.Generator().manual_seed(1))):
        out = torch.empty(4, 6)
        permutation.reduce(rows_RD, index, weights_R, out)
        torch.testing.assert_close(out, reduced(TORCH, rows_RD.float(), index, weights_R), rtol=1e-6, atol=1e-6)


@every
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 33, 2049])
def test_same_bits_as_torch_where_the_arithmetic_is_the_same(
    permutation: Permutation, dtype: torch.dtype, width: int
) -> None:
    """Copies, gradients of rows and unweighted sums; widths of one column, an odd one, and one beyond a block.

    Rows of another dtype, as they come over the wire, are converted once.
    """
    torch.use_deterministic_algorithms(False)
    index = EXAMPLE.index
    rows_RD = rows_of(index.num_grouped, width, dtype, seed=1)
    for wire in (dtype, torch.bfloat16, torch.float64):
        rows_SD, weights_R = rows_of(4, width, wire), torch.rand(index.num_grouped).to(accumulation_dtype(dtype))
        assert torch.equal(permutation.expand(rows_SD, index, dtype), TORCH.expand(rows_SD.to(dtype), index, dtype))
        mine, theirs = (p.expand_weighted(rows_SD, index, weights_R, rows_RD, dtype) for p in (permutation, TORCH))
        assert torch.equal(mine[0], theirs[0])
        assert mine[1] is not None
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-4)
    if permutation.name != "torch":  # whose CPU kernel for bfloat16 rounds ties away from zero
        wide_RD = rows_RD.float() if dtype == torch.bfloat16 else rows_RD
        expected = reduced(TORCH, wide_RD, index, None).to(dtype)
        assert torch.equal(reduced(permutation, rows_RD, index, None), expected)


@every
def test_strided_rows(permutation: Permutation) -> None:
    """As they lie in packets, behind each row its slots; and every second column, which no kernel can read in one."""
    index = EXAMPLE.index
    packets = rows_of(4, 9, torch.bfloat16)
    whole = permutation.expand(packets[:, :6].contiguous(), index, torch.float32)
    assert torch.equal(permutation.expand(packets[:, :6], index, torch.float32), whole)
    sparse = rows_of(index.num_grouped, 12, seed=1)[:, ::2]
    wide = torch.full((4, 9), 7.0, dtype=torch.bfloat16)
    permutation.reduce(sparse, index, None, wide[:, :6])
    assert torch.equal(wide[:, :6], reduced(permutation, sparse.contiguous(), index, None).bfloat16())
    assert (wide[:, 6:] == 7).all()
    weights_R = torch.rand(index.num_grouped, 2)[:, 0]
    mine = permutation.expand_weighted(packets[:, :6], index, weights_R, sparse, torch.float32)
    theirs = TORCH.expand_weighted(packets[:, :6].contiguous(), index, weights_R, sparse, torch.float32)
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1])


@every
@pytest.mark.parametrize("dtype", FLOATS)
def test_bags_of_wider_rows_by_strided_tables(permutation: Permutation, dtype: torch.dtype) -> None:
    """Columns behind a row are not read; members, edges and weights are columns of tables."""
    rows_SD, out = rows_of(4, 9, dtype), torch.empty(2, 6, dtype=dtype)
    rows_SD[:, 6:] = NAN
    table = torch.tensor([[3, 0], [0, 2], [1, 3]])  # members, edges
    weights = torch.tensor([[1.0, 9], [2, 9], [0.5, 9]], dtype=accumulation_dtype(dtype))
    permutation.sum_bags(rows_SD, table[:, 0], table[:, 1], weights[:, 0], out)
    torch.testing.assert_close(out, torch.stack((rows_SD[3, :6] + 2 * rows_SD[0, :6], rows_SD[1, :6] / 2)))
    for to in (dtype, torch.bfloat16):
        taken = torch.empty(2, 6, dtype=to)
        permutation.gather(rows_SD[:, :6], table[:2, 1], taken)
        assert torch.equal(taken, rows_SD[[0, 2], :6].to(to))


@every
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, under Triton's interpreter
def test_infinities_come_out_as_arithmetic_gives_them(permutation: Permutation, dtype: torch.dtype) -> None:
    index = group_slots(torch.tensor([[0, 1]] * 5), [5, 5])
    slots_SK = torch.tensor([[INF, 1], [-INF, 1], [INF, -INF], [NAN, 1], [3, 1]])
    rows_RD = index.to_grouped(slots_SK).to(dtype).unsqueeze(1)
    weights_R = torch.full((10,), 0.5, dtype=accumulation_dtype(dtype))  # a weight whose other parts are 0
    for weights, last in ((weights_R, 2.0), (None, 4.0)):
        expected = torch.tensor([INF, -INF, NAN, NAN, last], dtype=dtype)
        out = reduced(permutation, rows_RD, index, weights).squeeze(1)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@every
@pytest.mark.parametrize("width", [1, 2, 4, 6, 8, 24, 23])
def test_gather_of_packets(permutation: Permutation, width: int) -> None:
    """Bytes, in whatever words their width, stride and place allow."""
    flat, source = torch.arange(8 + 5 * 32, dtype=torch.uint8), torch.tensor([4, 0, 0, 3])
    for gap, offset in [(0, 0), (0, 8), (1, 0), (2, 2), (4, 1), (8, 2), (8, 8)]:
        packets = flat.as_strided((5, width), (width + gap, 1), offset)
        out, wide = torch.zeros(4, width, dtype=torch.uint8), torch.full((4, width + 8), 255, dtype=torch.uint8)
        permutation.gather(packets, source, out)
        permutation.gather(packets, source, wide[:, :width])
        assert torch.equal(out, packets[source])
        assert torch.equal(wide[:, :width], packets[source])
        assert (wide[:, width:] == 255).all()


def passes(dtype: torch.dtype) -> list[Tensor]:
    index = EXAMPLE.index
    rows_RD, weights_R, grad_SD = rows_of(index.num_grouped, dtype=dtype), torch.rand(index.num_grouped), rows_of(4)
    grad_RD, dots_R = TORCH.expand_weighted(grad_SD, index, weights_R, rows_RD, dtype)
    assert dots_R is not None
    sums = [reduced(TORCH, rows_RD, index, weights) for weights in (None, weights_R)]
    return [*sums, grad_RD, dots_R, TORCH.expand(grad_SD, index, dtype)]


@pytest.fixture
def block_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the size of the blocks in which the CPU works, which real rows fill and those of tests do not."""
    return lambda nbytes: monkeypatch.setattr(bags, "CPU_BLOCK_BYTES", nbytes)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows_per_block", [1, 3])
def test_blocks_change_no_bit(dtype: torch.dtype, rows_per_block: int, block_bytes: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    whole = passes(dtype)
    block_bytes(4 * 6 * rows_per_block)
    torch.manual_seed(0)
    assert all(map(torch.equal, passes(dtype), whole))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("weighted", "columns"), [(True, 1), (True, 4), (False, 4), (False, 100)])
def test_sums_by_columns_are_those_by_rows(
    dtype: torch.dtype, weighted: bool, columns: int, block_bytes: Callable[[int], None]
) -> None:
    """What a GPU does, run here: weighted bfloat16 is widened there instead of written in three parts."""
    index = many_slots()
    members_N, num_members = index.byrow_N, index.byrow_N.shape[0]
    packets = rows_of(index.num_grouped, 9, dtype)
    weights_N = torch.rand(num_members, generator=torch.Generator().manual_seed(1)) if weighted else None
    by_rows = torch.empty(40, 6, dtype=dtype)
    TORCH.sum_bags(packets, members_N, index.cu_S, weights_N, by_rows)
    block_bytes(4 * num_members * columns)
    for rows in (packets[:, :6], packets):
        by_columns = torch.empty(40, 6, dtype=dtype)
        sum_by_columns(rows, members_N, index.cu_S, weights_N, by_columns)
        torch.testing.assert_close(by_columns, by_rows, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "stride", "offset", "expected"),
    [
        (16, 16, 0, torch.int64),
        (16, 24, 8, torch.int64),
        (12, 16, 0, torch.int32),
        (16, 20, 0, torch.int32),
        (16, 16, 2, torch.int16),
        (15, 16, 0, torch.uint8),
    ],
)
def test_bytes_are_copied_in_the_widest_words(width: int, stride: int, offset: int, expected: torch.dtype) -> None:
    packets = torch.zeros(200, dtype=torch.uint8).as_strided((4, width), (stride, 1), offset)
    out = torch.empty(4, width, dtype=torch.uint8)
    assert [words.dtype for words in as_words(packets, out)] == [expected] * 2


def bags_of(counts: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Members and edges of bags, with members behind the last that belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.tensor([0, *counts]).cumsum(0)
    return torch.randint(0, 9, (int(edges[-1]) + 4,), generator=generator), edges


# bfloat16 has float32's range, but behind the least of its numbers it has no bits for a second and third part.
NUMBERS = st.floats(-(2.0**66), 2.0**66, width=32).filter(lambda value: value == 0 or abs(value) > 1e-20)


@FIXED
@given(st.lists(NUMBERS, min_size=1, max_size=12))
def test_three_parts_are_the_weight_exactly(weights: list[float]) -> None:
    weights_N, members_N = torch.tensor(weights), torch.arange(len(weights))
    members, edges, parts = in_bfloat16_parts(members_N, torch.arange(len(weights) + 1), weights_N)
    sums = [parts[begin:end].double().sum().item() for begin, end in itertools.pairwise(edges)]
    assert sums == weights_N.double().tolist()
    counts = edges.diff()
    assert members[: int(edges[-1])].tolist() == members_N.repeat_interleave(counts).tolist()
    assert counts.min() >= 1
    assert counts.max() <= 3


def test_sums_of_parts_are_the_exact_sum_rounded() -> None:
    """To a bfloat16 or its neighbour where the exact sum lies in the middle of two, up to the float32 of the sums."""
    counts = torch.randint(0, 5, (240,), generator=torch.Generator().manual_seed(0)).tolist()
    members_N, cu_S = bags_of(counts, 0)
    rows, weights_N = rows_of(9, dtype=torch.bfloat16), rows_of(len(members_N), 1, seed=1).squeeze(1)
    got = torch.empty(240, 6, dtype=torch.bfloat16)
    bag(rows, *in_bfloat16_parts(members_N, cu_S, weights_N), got)
    terms = rows.double().index_select(0, members_N) * weights_N.double().unsqueeze(1)
    exact = torch.stack([terms[begin:end].sum(0) for begin, end in itertools.pairwise(cu_S)])
    wrong = got != exact.bfloat16()
    near = torch.stack([(exact * (1 + sign * 1e-6)).bfloat16() for sign in (-1, 1)])
    assert (~wrong | (got == near).any(0)).all()
    assert wrong.double().mean() < 0.01


WEIGHTS = [1.0, 0.5, 1 + 2**-12, -0.3, 1e-6, 0.0, INF, NAN]


@pytest.mark.parametrize("value", [INF, -INF, NAN, 3e38, 1.5])
def test_what_is_infinite_stays_so(value: float) -> None:
    """As the eager sums have it: parts that are 0 must not make NaN of an infinite row."""
    table = Table([[0, 1]], 2, 2, 1)
    rows = torch.tensor([[value] * 6, [1.0] * 6], dtype=torch.bfloat16)
    for weight in WEIGHTS:
        weights = torch.tensor([weight, 0.25])
        wanted = reduced(TORCH, rows, table.index, weights)
        got = reduced(STATIC["torch, fixed size"], rows, static_index(table), weights)
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("name", ["torch", "triton"] if INTERPRETED else ["torch"])
@pytest.mark.parametrize("backend", ["local", "alltoall"])
def test_a_graph_safe_dispatcher_with_this_permutation(name: str, backend: str) -> None:
    routing = random_routing(6)
    config = small_config(backend, graph_safe=True, max_tokens_per_rank=9, pad_multiple=4, permutation=name)
    x = random_rows(6).requires_grad_()
    dispatcher = build_dispatcher(config)
    sent = dispatcher.dispatch(x, routing)
    rows = sent.rows.masked_fill(padding_rows(sent).unsqueeze(1), NAN)
    y = dispatcher.combine(rows, sent)
    scale = routing.topk_weights.sum(1, keepdim=True)
    torch.testing.assert_close(y, x * scale)
    y.sum().backward()
    torch.testing.assert_close(x.grad, scale.expand_as(x))


CPU = torch.device("cpu")


@pytest.mark.parametrize("slack", [None, 0, 5])
@FIXED
@given(tables())
def test_values_to_grouped_and_back(slack: int | None, table: Table) -> None:
    """By the index whose size follows the keys, and by one of fixed size with slack behind the rows."""
    assume(table.keys or slack is None)
    index = table.index if slack is None else static_index(table, slack)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in index_tensors(index) if tensor.numel()]
    assert len({*addresses}) == len(addresses), "an operator must not return the same memory twice"
    grouped: list[tuple[int, int] | None] = table.grouped()
    grouped += [None] * (index.num_grouped - len(grouped))
    values_SK = torch.arange(1.0, table.tensor.numel() + 1).view(-1, table.top_k)
    values_SK = torch.where(table.has_no_key, NAN, values_SK)  # pairs without a key must not be read
    values_R = index.to_grouped(values_SK)
    assert values_R.tolist() == [0 if pair is None else float(values_SK[pair]) for pair in grouped]
    poisoned_R = torch.tensor([NAN if pair is None else float(v) for pair, v in zip(grouped, values_R, strict=True)])
    assert torch.equal(index.to_slots(poisoned_R), torch.where(table.has_no_key, 0, values_SK))
    if slack is None:
        assert torch.equal(index.in_row_order(values_SK), values_SK[~table.has_no_key])


@FIXED
@given(tables())
def test_counts_of_keys(table: Table) -> None:
    padded = [round_up(count, table.multiple) for count in table.counts]
    for given_L in (None, torch.tensor(table.counts)):
        index = group_slots(table.tensor, table.counts, table.multiple, real_L=given_L)
        real_L, padded_L, on_the_host = index.tokens_per_key(CPU)
        assert (real_L.tolist(), padded_L.tolist(), on_the_host) == (table.counts, padded, tuple(padded))
        assert (padded_L is real_L) == (table.multiple == 1)
        assert given_L is None or real_L is given_L


@pytest.fixture
def another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_index_lies_where_its_keys_lie(another_default_device: None) -> None:
    keys_SK = torch.tensor(EXAMPLE.keys, device="cpu")
    index = group_slots(keys_SK, EXAMPLE.counts, EXAMPLE.multiple)
    assert index.position_N is not None
    assert {index.source_R.device.type, index.position_N.device.type, index.cu_S.device.type} == {"cpu"}
    assert index.slot_N.tolist() == [1, 0, 3, 7, 6]
    assert index.to_slots(index.to_grouped(keys_SK.double())).tolist() == [[1, 0], [0, 1], [0, 0], [2, 1]]


@pytest.mark.parametrize(("value", "multiple", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected
