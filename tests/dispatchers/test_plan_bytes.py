"""Sizes of graph-safe buffers: enough for any routing and not a row more; ``Plan.bytes`` says what is allocated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends import MoEShape
from moe_dispatch.backends.capacity import balanced_pair_rows, balanced_rows, capacity_of, grown, sized, worst_rows
from moe_dispatch.errors import StateError
from moe_dispatch.permutation import round_up
from moe_dispatch.permutation import rows as torch_rows
from tests.dispatchers.layer import small_config
from tests.ranks import run_ranks

EXPERTS, TOP_K, HIDDEN, MAXIMUM = 8, 3, 32, 40
# What a route holds for its way back; the rest of it is the context, which outlives the call.
TABLES = ("index", "leg")


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def allocated(*values: Any) -> int:
    """Bytes of the memory behind all tensors in these values, each once."""
    storages = [tensor.untyped_storage() for value in values for tensor in tensors(value)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Wires(TorchDispatchMode):
    """Bytes of what each collective sends and receives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.nbytes.append(sum(tensor.nbytes for tensor in args if isinstance(tensor, Tensor)))
        return func(*args, **(kwargs or {}))


class Held(TorchDispatchMode):
    """The most bytes, at one time, of the storages that operators have made and something still refers to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._live = {at: each for at, each in self._live.items() if not each[0].expired()}
        for storage in (each.untyped_storage() for each in tree_leaves(result) if isinstance(each, Tensor)):
            if storage._cdata not in given:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return result


def config(backend: str, **changes: Any) -> DispatcherConfig:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens_per_rank": MAXIMUM}
    return small_config(backend, **{**sizes, "graph_safe": True, **changes})


@pytest.mark.parametrize(
    ("backend", "size", "pad_multiple", "capacity", "dtype"),
    [
        ("local", 1, 1, "worst", torch.float32),
        ("local", 1, 16, 1.25, torch.bfloat16),
        ("alltoall", 1, 16, "worst", torch.float64),
        ("alltoall", 2, 1, 1.25, torch.bfloat16),
        ("alltoall", 2, 16, "worst", torch.float32),
        ("allgather", 2, 16, 1.25, torch.bfloat16),
        ("allgather", 2, 1, "worst", torch.float64),
    ],
)
def test_bytes_are_those_allocated(
    backend: str, size: int, pad_multiple: int, capacity: Any, dtype: torch.dtype
) -> None:
    def body(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int], list[int]]:
        drops = None if capacity == "worst" else "drop"
        given = config(
            backend, pad_multiple=pad_multiple, graph_safe={"capacity_factor": capacity, "on_overflow": drops}
        )
        dispatcher = build_dispatcher(given, group)
        x = torch.randn(17 + group.rank(), HIDDEN).to(dtype)
        ids = torch.randint(0, EXPERTS, (len(x), TOP_K))
        plan = dispatcher.plan(like=x)
        told = plan.bytes(dtype)
        with Wires() as wires:
            sent = dispatcher.dispatch(x, Routing(ids, torch.rand(len(x), TOP_K)), plan)
        route = sent.state.route
        tables = [getattr(route, name) for name in TABLES if hasattr(route, name)]
        found = {"rows": allocated(sent.rows), "weights": allocated(sent.weights), "index": allocated(*tables)}
        return told, found, wires.nbytes

    told, found, wires = run_ranks(body, size)[0]
    found |= {"wire": wires[0]} if wires else {}
    assert {purpose: told.get(purpose) for purpose in found} == found
    assert bool(wires) == (backend != "local")


@pytest.mark.parametrize("carry", [None, {"adapter": torch.int64, "domain": torch.int32}])
@pytest.mark.parametrize("fields", [{}, {"weights": "experts"}, {"balance": "exact"}])
@pytest.mark.parametrize("backend", ["local", "alltoall", "allgather"])
def test_verbs_hold_at_most_the_bytes_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, backend: str, fields: dict[str, Any], carry: Any
) -> None:
    """With small blocks, because operators of torch need up to three of them beside what the plan says."""
    monkeypatch.setattr(torch_rows, "CPU_BLOCK_BYTES", 1 << 14)
    hidden = 1024

    def body(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int]]:
        dispatcher = build_dispatcher(config(backend, hidden_size=hidden, **fields), group)
        x = torch.randn(MAXIMUM, hidden, requires_grad=True)
        ids, weights = torch.rand(MAXIMUM, EXPERTS).topk(TOP_K).indices, torch.rand(MAXIMUM, TOP_K).requires_grad_()
        plan, upstream, found = dispatcher.plan(like=x), torch.ones_like(x), dict[str, int]()

        def held(verb: str, action: Any) -> Any:
            with Held() as held:
                result = action()
            found[verb] = held.most
            return result

        columns = None if carry is None else {name: torch.zeros(MAXIMUM, dtype=dtype) for name, dtype in carry.items()}
        sent = held("dispatch", lambda: dispatcher.dispatch(x, Routing(ids, weights), plan, carry=columns))
        outputs = sent.rows.detach().requires_grad_()
        y = held("combine", lambda: dispatcher.combine(outputs, sent))
        inputs = (outputs, sent.weights)
        grads = held("combine.backward", lambda: torch.autograd.grad(y, inputs, upstream, allow_unused=True))
        grads = [torch.zeros_like(each) if grad is None else grad for each, grad in zip(inputs, grads, strict=True)]
        held("dispatch.backward", lambda: torch.autograd.grad((sent.rows, sent.weights), (x, weights), grads))
        told = plan.bytes(x.dtype, carry)
        of_dispatch = sum(told.get(purpose, 0) for purpose in ("rows", "weights", "index", "wire", "carried"))
        return found, {"dispatch": of_dispatch, **{verb: told[verb] for verb in found if verb != "dispatch"}}

    found, told = run_ranks(body, 1 if backend == "local" else 2)[0]
    rows, scratch = MAXIMUM * (4 * hidden + 64), 3 << 14
    # Operators of torch pack before they gather; and gloo may hold what was sent for a moment longer.
    more = {"dispatch": rows, "combine.backward": 2 * rows}
    for verb, nbytes in found.items():
        assert 0.9 * told[verb] <= nbytes <= 1.02 * told[verb] + more.get(verb, 0) + scratch, (verb, told)


@pytest.mark.parametrize("pad_multiple", [1, 16])
def test_bytes_of_an_exact_plan(pad_multiple: int) -> None:
    """Room for Tmax * K rows and padding on two ranks, where the worst routing would need twice as many."""

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(config("alltoall", pad_multiple=pad_multiple, balance="exact"), group)
        x = torch.randn(17, HIDDEN)
        plan = dispatcher.plan(like=x)
        sent = dispatcher.dispatch(x, Routing(torch.zeros(17, TOP_K).long(), torch.rand(17, TOP_K)), plan)
        told = plan.bytes(x.dtype)
        assert told["rows"] == allocated(sent.rows)
        assert told["weights"] == allocated(sent.weights)
        blocks = (2 * MAXIMUM * TOP_K + EXPERTS * (pad_multiple - 1)) // pad_multiple
        assert len(sent.rows) == -(-blocks // 2) * pad_multiple

    run_ranks(body, 2)


def test_bytes_of_an_eager_plan() -> None:
    dispatcher = build_dispatcher(config("local", graph_safe=False))
    with pytest.raises(StateError, match=r"Plan.bytes: without graph_safe, sizes follow"):
        dispatcher.plan(like=torch.empty(3, HIDDEN)).bytes(torch.float32)


def shape(experts: int, ranks: int, top_k: int, tokens: int, pad_multiple: int = 1, factor: float = 0) -> MoEShape:
    return MoEShape(
        num_experts=experts,
        top_k=top_k,
        hidden_size=8,
        ep_size=ranks,
        pad_multiple=pad_multiple,
        max_tokens_per_rank=tokens,
        graph_safe=True,
        capacity_factor=factor or "worst",
    )


@pytest.mark.parametrize("pad_multiple", [1, 2, 3, 4])
@pytest.mark.parametrize("local", [1, 2, 3])
def test_buffer_rows_are_enough_and_tight(local: int, pad_multiple: int) -> None:
    """Every way to put up to so many rows into L groups, each padded; the largest fills the buffer."""
    for rows in range(1, 8):
        ways = (counts for counts in itertools.product(range(rows + 1), repeat=local) if sum(counts) <= rows)
        most = max(sum(round_up(count, pad_multiple) for count in counts) for counts in ways)
        assert sized(shape(local, 1, 1, 8, pad_multiple), rows, None).buffer_rows == most


SMALL = [(4, 2, 1), (4, 2, 2), (4, 2, 3), (4, 4, 2), (6, 2, 4), (6, 3, 2), (5, 1, 2), (8, 2, 3)]


@pytest.mark.parametrize(("experts", "ranks", "top_k"), SMALL)
def test_balanced_numbers_by_enumeration(experts: int, ranks: int, top_k: int) -> None:
    """All choices of K experts alike: rows that a pair exchanges, and rows that a rank's experts take."""
    local, tokens = experts // ranks, 7
    choices = list(itertools.combinations(range(experts), top_k))
    here = [sum(expert < local for expert in chosen) for chosen in choices]
    mine = shape(experts, ranks, top_k, tokens)
    assert balanced_pair_rows(mine) == pytest.approx(tokens * sum(map(bool, here)) / len(choices))
    assert balanced_rows(mine) == pytest.approx(ranks * tokens * sum(here) / len(choices))


@pytest.mark.parametrize(("experts", "ranks", "top_k"), SMALL)
def test_the_worst_case_is_reached_and_never_exceeded(experts: int, ranks: int, top_k: int) -> None:
    """One token a rank; each may choose up to K experts, all ranks alike at worst."""
    local = experts // ranks
    choices = [chosen for size in range(top_k + 1) for chosen in itertools.combinations(range(experts), size)]
    most = max(ranks * sum(expert < local for expert in chosen) for chosen in choices)
    mine = shape(experts, ranks, top_k, 1)
    assert worst_rows(mine) == most
    assert capacity_of(mine).rows == most
    assert capacity_of(mine, pair_factor="worst").pair_rows == 1
    assert capacity_of(mine).pair_rows is None


@pytest.mark.parametrize(
    ("factor", "rows"), [(1, 20), (1.01, 21), (1.25, 25), (0.01, 1), (1e-9, 1), (3.99, 40), (4, 40), (1024, 40)]
)
def test_capacity_factor_is_over_the_balanced_load(factor: float, rows: int) -> None:
    """Tmax 10, K 2: 20 rows balanced, 40 at worst on two ranks."""
    assert capacity_of(shape(8, 2, 2, 10, factor=factor)).rows == rows


@pytest.mark.parametrize(("factor", "rows"), [(1, 8), (1.2, 10), (1.27, 10), (0.5, 4), (1e-9, 1), (1024, 10)])
def test_pair_rows_are_over_the_expected_distinct_rows(factor: float, rows: int) -> None:
    """8 experts, 4 here, K 2: of 28 pairs 6 lie elsewhere, so 10 * 22/28 = 7.86 of 10 rows are expected.

    Two ranks can then send two slots of each.
    """
    capacity = capacity_of(shape(8, 2, 2, 10), pair_factor=factor)
    assert (capacity.pair_rows, capacity.rows) == (rows, 2 * 2 * rows)


@pytest.mark.parametrize(
    ("before", "rows", "pair_rows", "headroom", "wanted"),
    [
        ((4, 2), 4, 2, 8, (4, 2)),  # nothing was short
        ((4, 2), 5, 2, 1, (5, 2)),
        ((4, 2), 5, 3, 1.5, (8, 5)),
        ((4, 2), 5, 3, 100, (40, 10)),  # never beyond the worst case
        ((4, 2), 1, 3, 1, (4, 3)),  # never less
        ((4, None), 5, 0, 1, (5, None)),
        ((12, 3), 20, 5, 1, (20, 5)),  # only pairs bounded the rows: 2 * 2 of each, and so they do afterwards
        ((12, 3), 12, 3, 1, (12, 3)),
        ((11, 3), 20, 5, 1, (20, 5)),  # rows had a bound of their own, and grow by what was needed
        ((11, 3), 14, 4, 1, (14, 4)),
    ],
)
def test_grown(
    before: tuple[int, int | None], rows: int, pair_rows: int, headroom: float, wanted: tuple[int, int | None]
) -> None:
    mine = shape(8, 2, 2, 10)
    after = grown(mine, sized(mine, *before), rows=rows, pair_rows=pair_rows, headroom=headroom)
    assert (after.rows, after.pair_rows) == wanted
