"""Layer calls in chunks: the bits of one dispatch, equal collectives on all ranks, a bound on rows, and refusals."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_dispatch import BSHD, THD, Dispatched, Dispatcher, Masked, Routing, Rows, build_dispatcher
from moe_dispatch.dispatchers import SlotWeights, agreement, run_in_chunks
from moe_dispatch.errors import InputError, LayoutError, LostPeerError, PeerError, StateError
from moe_dispatch.layouts import Layout
from tests.dispatchers.layer import (
    Group,
    by_operators,
    identity_round,
    on_ranks,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    refused,
    small_config,
)

ROWS = (0, 1, 200, 17)
MANY_ROWS = (0, 1, 400, 17)  # so many that what is not of a chunk does not count
HIDDEN = 512
CHUNK, CHUNKS = 16, 13  # ceil(200 / 16)
Experts = Callable[[Dispatched], Tensor]


def experts_of(scales_L2: Tensor) -> Experts:
    """Return experts whose result for a row has the same bits in whatever company the row arrives."""

    def run(sent: Dispatched) -> Tensor:
        experts_R = torch.searchsorted(sent.offs, torch.arange(len(sent.rows)), right=True)
        scale_R2 = scales_L2[experts_R.clamp(max=len(scales_L2) - 1)]
        return sent.rows * scale_R2[:, :1] + sent.rows * sent.rows * scale_R2[:, 1:]

    return run


def scales_of(rank: int, ep_size: int = 4) -> Tensor:
    return torch.randn(8 // ep_size, 2, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def step(group: Group, backend: Any, layout: Layout | None = None, **fields: Any) -> dict[str, Any]:
    """Run a layer forward and backward on one of four ranks with ``ROWS`` rows, or with those of a layout."""
    rank = group.rank()
    dispatcher = build_dispatcher(small_config(backend, **fields), group)
    count = ROWS[rank] if layout is None else layout.num_rows() or 0
    hidden = dispatcher.config.hidden_size
    x, routing = random_rows(count, hidden, rank).requires_grad_(), random_routing(count, rank)
    weights, scales = routing.topk_weights.clone().requires_grad_(), scales_of(rank)
    y = run_in_chunks(dispatcher, experts_of(scales), x, Routing(routing.topk_ids, weights), layout)
    y.backward(random_rows(count, hidden, 100 + rank))
    calls = dict(dispatcher.metrics().collectives)
    dispatcher.close()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "experts": scales.grad, "calls": calls}


def compare(whole: list[dict[str, Any]], parts: list[dict[str, Any]], *, bits: bool = True) -> None:
    for rank, (expected, got) in enumerate(zip(whole, parts, strict=True)):
        for name in ("y", "x", "weights"):
            if bits:
                assert torch.equal(got[name], expected[name]), f"{name} of rank {rank}"
            torch.testing.assert_close(got[name], expected[name])
        torch.testing.assert_close(got["experts"], expected["experts"], rtol=1e-4, atol=1e-3)
    assert all(part["calls"] == parts[0]["calls"] for part in parts)


@pytest.mark.parametrize(
    ("backend", "fields", "recompute"),
    [
        ("alltoall", {}, False),
        ("alltoall", {}, True),
        ({"name": "alltoall", "reduction": "exact"}, {}, True),
        ({"name": "alltoall_by_node", "ranks_per_node": 2}, {}, False),
        ("alltoall", {"graph_safe": True, "max_tokens_per_rank": 200}, True),
        ("alltoall", {"pad_multiple": 16}, False),
        ("allgather", {}, False),
        ("allgather", {"row_counts": "static", "max_tokens_per_rank": 201}, True),
    ],
    ids=str,
)
def test_chunks_have_the_bits_of_one_dispatch(backend: Any, fields: dict[str, Any], recompute: bool) -> None:
    whole = on_ranks(lambda group: step(group, backend, **fields), 4)
    parts = on_ranks(lambda group: step(group, backend, chunks={"tokens": CHUNK, "recompute": recompute}, **fields), 4)
    compare(whole, parts, bits=backend != "allgather")  # a reduce-scatter adds in an order of its own
    calls, times = parts[0]["calls"], 2 if recompute else 1
    assert calls["dispatch"] == times * CHUNKS
    assert calls["combine"] == CHUNKS  # a recomputation leaves it out
    assert calls["combine.backward"] == CHUNKS
    assert calls.get("sizes", 0) == (0 if "max_tokens_per_rank" in fields else 1)


def layouts(rank: int) -> list[Layout]:
    """Return a mask, and packed sequences with gaps: with 0, 1, 40 and 17 tokens among many more rows."""
    real = (0, 1, 40, 17)[rank]
    valid = torch.zeros(200, dtype=torch.bool)
    valid[3 : 3 + 4 * real : 4] = True
    first = real // 2
    packed = THD(torch.tensor([0, first, real]), torch.tensor([0, 100, 200]))
    return [Masked(valid), packed]


@pytest.mark.parametrize("kind", [0, 1], ids=["mask", "thd_with_gaps"])
@pytest.mark.parametrize("graph_safe", [False, True], ids=["eager", "graph_safe"])
def test_padding_takes_no_chunk(kind: int, graph_safe: bool) -> None:
    fields = {"graph_safe": True, "max_tokens_per_rank": 200} if graph_safe else {}
    recompute = graph_safe == (kind == 0)

    def run(**more: Any) -> list[dict[str, Any]]:
        return on_ranks(lambda group: step(group, "alltoall", layouts(group.rank())[kind], **fields, **more), 4)

    whole, parts = run(), run(chunks={"tokens": CHUNK, "recompute": recompute})
    compare(whole, parts)
    # 40 real rows; with graph_safe rows are masked, not cut, so the number of chunks is that of 200.
    assert parts[0]["calls"]["combine.backward"] == (13 if graph_safe else 3)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_result_is_changed_in_place_and_has_two_backwards(recompute: bool) -> None:
    def body(group: Group, **fields: Any) -> list[Any]:
        x, routing = random_rows(11).requires_grad_(), random_routing(11)
        weights, scales = routing.topk_weights.clone().requires_grad_(), scales_of(group.rank(), 2)
        dispatcher = build_dispatcher(small_config(**fields), group)
        y = x + run_in_chunks(dispatcher, experts_of(scales), x, Routing(routing.topk_ids, weights)).add_(1).mul_(2)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [y.detach(), x.grad, weights.grad, scales.grad]

    whole = on_ranks(body, 2)
    torch.testing.assert_close(
        on_ranks(lambda group: body(group, chunks={"tokens": 4, "recompute": recompute}), 2), whole
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_experts_that_fail_on_all_ranks_leave_a_usable_dispatcher(recompute: bool) -> None:
    """Also if the next chunk is on its way."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(chunks={"tokens": 4, "recompute": recompute}), group)

        def fail(sent: Dispatched) -> Tensor:
            raise ValueError("no experts today")

        with pytest.raises(ValueError, match="no experts today"):
            run_in_chunks(dispatcher, fail, random_rows(9).requires_grad_(), random_routing(9))
        identity_round(dispatcher)

    on_ranks(body, 2)


def test_one_plan_serves_several_layers_and_drift_counts_once() -> None:
    def body(group: Group) -> tuple[dict[str, int], dict[str, int]]:
        dispatcher = build_dispatcher(small_config(chunks=4), group, name="layer")
        count = (11, 0)[group.rank()]
        x, routing = random_rows(count), random_routing(count)
        plan = dispatcher.plan(Rows(), like=x)
        assert plan.num_chunks == 3
        drift = torch.tensor([2, 2 * count])
        for _ in range(2):
            given = Routing(routing.topk_ids, routing.topk_weights, drift)
            y = run_in_chunks(dispatcher, lambda sent: sent.rows, x, given, plan)
            torch.testing.assert_close(y, x * routing.topk_weights.sum(1, keepdim=True))
        metrics = dispatcher.metrics()
        return metrics.collectives, metrics.slots_replayed

    (calls, replayed), (others, _) = on_ranks(body, 2)
    assert calls == others
    assert (calls["sizes"], calls["dispatch"], replayed) == (1, 6, {"layer": 44})


@final
class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that exist, except those that are given."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self._now, self.most = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (made.untyped_storage() for made in tree_leaves(out) if isinstance(made, Tensor)):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._let_go, storage._cdata)
        return out

    def _let_go(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "without gradients"])
def test_memory_is_that_of_a_chunk_beside_the_output_and_the_gradient_of_x(recompute: bool) -> None:
    """All rows go to rank 2, which gets as many of a chunk as a rank can, ``N * P * min(K, L)``, and sends most."""

    def body(group: Group, rows: tuple[int, ...] = MANY_ROWS) -> tuple[int, int]:
        config = small_config(chunks={"tokens": CHUNK, "recompute": recompute}, hidden_size=HIDDEN)
        dispatcher, count = build_dispatcher(config, group), rows[group.rank()]
        x, upstream = random_rows(count, HIDDEN).requires_grad_(recompute), random_rows(count, HIDDEN)
        routing = Routing(torch.tensor([[4, 5]]).expand(count, 2), torch.ones(count, 2))
        with Memory(x, upstream) as memory, torch.set_grad_enabled(recompute):
            y = run_in_chunks(dispatcher, lambda sent: sent.rows.tanh(), x, routing)
            forward = memory.most
            if recompute:
                y.backward(upstream)
        return forward, memory.most

    one, (forward, whole) = on_ranks(lambda group: body(group, (CHUNK,) * 4), 4)[2], on_ranks(body, 4)[2]
    size = 1.1 * MANY_ROWS[2] * HIDDEN * 4  # of y or the gradient of x, and of tables of integers
    assert size < forward < size + (1 if recompute else 2) * one[0]
    assert whole < 2 * size + one[1]


def test_experts_placed_anew_for_each_chunk() -> None:
    def body(group: Group, **fields: Any) -> tuple[list[Any], int]:
        dispatcher = build_dispatcher(small_config(**fields), group)
        slots, scales, most = SlotWeights(dispatcher), scales_of(group.rank(), 2), 0

        def run(sent: Dispatched) -> Tensor:
            nonlocal most
            most = max(most, len(sent.rows))
            return slots.run(sent, lambda part, scale: experts_of(scale)(part), scales)[1]

        x = random_rows(20, seed=group.rank()).requires_grad_()
        y = run_in_chunks(dispatcher, run, x, Routing(torch.tensor([[0, 1]]).expand(20, 2), torch.ones(20, 2)))
        y.sum().backward()
        return [y.detach(), x.grad, scales.grad], most

    balanced: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}, "chunks": 8}
    plain, in_chunks = on_ranks(body, 2), on_ranks(lambda group: body(group, **balanced), 2)
    for (expected, _), (got, most) in zip(plain, in_chunks, strict=True):
        torch.testing.assert_close(got, expected)
        assert most <= 8 * 2  # N * K


class Layer(Dispatcher):
    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.rows


@pytest.mark.parametrize(("backend", "policy"), [("allgather", "agree"), ("alltoall", "assume")])
def test_a_called_dispatcher_runs_in_chunks_and_tests_itself(backend: str, policy: str) -> None:
    """Without an agreement on their number, the ranks must have equal numbers of rows."""

    def body(group: Group) -> None:
        layer = Layer(small_config(backend, chunks=4, row_counts=policy), group)
        x, routing = random_rows(9).view(3, 3, -1), random_routing(9)
        torch.testing.assert_close(layer(x, routing), x * routing.topk_weights.sum(1).view(3, 3, 1))
        metrics = layer.metrics()
        assert (metrics.dispatches, metrics.collectives.get("sizes", 0)) == (3, int(policy == "agree"))
        layer.self_test()

    on_ranks(body, 2)


def test_a_number_of_chunks_from_the_rows_of_each_rank_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of other implementations: a rank with few rows leaves, and the others wait for it."""
    monkeypatch.setattr(agreement, "agree_on_largest", lambda channel, count, *others, **more: (count, []))

    def body(group: Group) -> None:
        count = (17, 0)[group.rank()]
        layer = Layer(small_config(chunks={"tokens": 4, "recompute": True}, watchdog=0.3), group)
        layer(random_rows(count), random_routing(count))

    assert any(isinstance(result, LostPeerError) for result in outcomes(body, 2))


def test_more_rows_than_a_chunk_in_one_dispatch_are_refused_on_all_ranks() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(chunks=4), group)
        identity_round(dispatcher)
        dispatcher.dispatch(random_rows(5 * group.rank()), random_routing(5 * group.rank()))

    told = "a rank must pass at most chunks.tokens (4) rows, got more on some rank: they take 2 dispatches"
    refused(body, 2, InputError, told)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("planned", [False, True], ids=["unplanned", "planned"])
def test_a_refused_call_is_told_to_the_peers(backend: str, planned: bool) -> None:
    """Also an invalid id in a later chunk, but not one of a row without a token."""

    def body(group: Group) -> None:
        layer, rank = Layer(small_config(backend, chunks=4, debug=planned), group), group.rank()
        x = random_rows(9)
        plan = layer.plan(Rows(), like=x) if planned else None
        with pytest.raises(PeerError if rank else InputError, match="x has 9 tokens but routing has 8"):
            layer(x, random_routing(9 if rank else 8), plan)
        identity_round(layer)
        routing = random_routing(9)
        routing.topk_ids[6, 0] = 99 if rank else 0
        layer(x, routing, Masked(torch.arange(9) != 6))
        if not planned:
            with pytest.raises(InputError if rank else PeerError, match=r"topk_ids must lie in -1\.\.7, got 0\.\.99"):
                layer(x, routing)
        identity_round(layer)

    on_ranks(body, 2)


def test_operators_are_refused() -> None:
    layer, x, routing = Layer(small_config("local", chunks=4)), random_rows(4), random_routing(4)
    with pytest.raises(StateError, match=r"chunks do not work in torch\.compile and selective checkpointing"):
        by_operators(lambda x: layer.dispatch(x, routing).rows, random_rows(4).requires_grad_())
    with pytest.raises(Unsupported, match=r"chunks do not work in torch\.compile"):
        torch.compile(layer, backend="eager", fullgraph=True)(x, routing)
    with pytest.raises(StateError, match=r"chunks do not work in torch\.compile"):
        torch.compile(layer, backend="eager")(x, routing)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_too_many_rows_without_an_agreement_are_told_to_the_peers(recompute: bool) -> None:
    def body(group: Group) -> None:
        fields: dict[str, Any] = {"row_counts": "static", "max_tokens_per_rank": 8}
        layer = Layer(small_config(chunks={"tokens": 4, "recompute": recompute}, **fields), group)
        count = 8 + group.rank()
        layer(random_rows(count), random_routing(count))

    peer, own = outcomes(body, 2)
    raises_everywhere([own], InputError, "at most max_tokens_per_rank (8) rows per rank, got 9")
    raises_everywhere([peer], PeerError, "at most max_tokens_per_rank (8) rows per rank, got 9")


def test_a_finite_capacity_is_that_of_a_chunk() -> None:
    """All rows fit into one dispatch, but the first chunk names experts of rank 0 alone, and the second of rank 1."""

    def body(group: Group, **fields: Any) -> int:
        room: dict[str, Any] = {"max_tokens_per_rank": 8, "graph_safe": {"capacity_factor": 1.0, "on_overflow": "drop"}}
        layer = Layer(small_config(**room, **fields), group)
        ids = torch.tensor([[0, 1]] * 4 + [[4, 5]] * 4)
        return int((layer(torch.ones(8, 16), Routing(ids, torch.ones(8, 2))) == 0).all(1).sum())

    assert on_ranks(body, 2) == [0, 0]
    assert sum(on_ranks(lambda group: body(group, chunks=4), 2)) > 0


def test_debug_checks_a_layout_again_that_changed_after_the_plan() -> None:
    lengths = torch.tensor([3, 2])
    dispatcher = build_dispatcher(small_config("local", chunks=2, debug=True))
    x, routing = random_rows(6).view(2, 3, -1), random_routing(6)
    plan = dispatcher.plan(BSHD(lengths=lengths), like=x)
    lengths[1] = 4
    with pytest.raises(LayoutError, match="lengths"):
        run_in_chunks(dispatcher, lambda sent: sent.rows, x, routing, plan)
