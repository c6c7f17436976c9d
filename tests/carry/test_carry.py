"""Integers that travel with rows arrive beside them: on every backend and in every mode, and refused on all ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import BSHD, THD, Dispatched, Dispatcher, DispatcherConfig, Masked, Routing, build_dispatcher
from moe_dispatch.backends import Backend, BackendContext, BackendOptions, Constraints, MoEShape, registry
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.errors import InputError, MoEDispatchError, StateError
from moe_dispatch.layouts import Layout
from moe_dispatch.recompute import keep_routes
from moe_dispatch.types import Capacity
from moe_dispatch_testing.counting import count_collectives
from moe_dispatch_testing.host_syncs import allow_host_syncs, refuse_host_syncs
from tests.conformance.backends import more_backends
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25
from tests.dispatchers.layer import (
    Group,
    on_ranks,
    outcomes_on,
    raises_everywhere,
    rank_of,
)

E, K, D = 16, 3, 256
COUNTS = (5, 0, 9, 3)
EXPANDED: dict[str, Any] = {**V25, "expand": True}
EVERY_COPY = {"name": "exact", "min_rows": 0}
EXACT, BY_NODE = {"name": "alltoall", "reduction": "exact"}, {"name": "alltoall_by_node", "ranks_per_node": 2}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
Batch = tuple[Tensor, Routing, dict[str, Tensor]]


def config(backend: Any, **fields: Any) -> DispatcherConfig:
    return DispatcherConfig(backend=backend, **({"num_experts": E, "top_k": K, "hidden_size": D} | fields))


def batch(rank: int, counts: tuple[int, ...] = COUNTS, seed: int = 0) -> Batch:
    """Rows whose first numbers say which token of which rank they are, and what such a token carries."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = torch.arange(counts[rank])
    x = torch.zeros(counts[rank], D)
    x[:, 0], x[:, 1] = rank + 1, tokens + 1
    ids = torch.rand(counts[rank], E, generator=generator).topk(K).indices
    ids[::3, 1] = -1
    carry = {"token": numbers(x), "adapter": (tokens % 3).int()}
    return x.bfloat16().requires_grad_(), Routing(ids, torch.rand(ids.shape, generator=generator) + 0.1), carry


def numbers(rows: Tensor) -> Tensor:
    """What a row carries as "token": more than 32 bits, and -1 where a row is padding."""
    found = (rows[:, 0].long() << 40) + rows[:, 1].long()
    return torch.where(rows[:, 0] == 0, -1, found)


def check(sent: Dispatched) -> None:
    """Each row carries what its own numbers say, and -1 where the counts say that it is padding."""
    assert sent.carried is not None
    assert {name: values.dtype for name, values in sent.carried.items()} == {
        "token": torch.int64,
        "adapter": torch.int32,
    }
    token, adapter, rows = sent.carried["token"], sent.carried["adapter"], sent.rows.detach()
    assert token.shape == adapter.shape == rows.shape[:1]
    is_real, start = torch.zeros(len(rows), dtype=torch.bool), 0
    for padded, real in zip(sent.tokens_per_expert.tolist(), sent.real_tokens_per_expert.tolist(), strict=True):
        is_real[start : start + real] = True
        start += padded
    assert torch.equal(token[is_real], numbers(rows[is_real]))
    assert torch.equal(adapter[is_real], ((rows[is_real][:, 1] - 1) % 3).int())
    assert (token[~is_real] == -1).all()
    assert (adapter[~is_real] == -1).all()


def in_dense_order(size: int, rank: int, pad_multiple: int, counts: tuple[int, ...] = COUNTS) -> list[int]:
    """The tokens of a rank's experts by the definition: by expert, source rank and token, then padding."""
    batches, found = [batch(peer, counts) for peer in range(size)], list[int]()
    for expert in range(rank * E // size, (rank + 1) * E // size):
        chosen = [
            token
            for _, routing, carry in batches
            for token, ids in zip(carry["token"].tolist(), routing.topk_ids.tolist(), strict=True)
            if expert in ids
        ]
        found += chosen + [-1] * (-len(chosen) % pad_multiple)
    return found


BACKENDS: list[Any] = ["local", "allgather", "alltoall", EXACT, BY_NODE, V1, V2, V25, EXPANDED, HYBRID, RAGGED]


@pytest.mark.parametrize("pad_multiple", [1, 8])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_each_row_carries_the_number_of_its_token(backend: Any, fields: dict[str, Any], pad_multiple: int) -> None:
    if fields and backend in (EXACT, BY_NODE, EXPANDED):
        pytest.skip("not graph-safe")
    size = 1 if backend == "local" else 4

    def body(group: Group) -> None:
        dispatcher, rank = build_dispatcher(config(backend, pad_multiple=pad_multiple, **fields), group), rank_of(group)
        x, routing, carry = batch(rank)
        sent = dispatcher.dispatch(x, routing, carry=carry)
        check(sent)
        assert sent.carried is not None
        wanted = in_dense_order(size, rank, pad_multiple)
        assert sent.carried["token"].tolist() == wanted + [-1] * (len(sent.rows) - len(wanted))
        again = dispatcher.dispatch(x.detach() + 0, again=sent)
        check(again)
        y = dispatcher.combine(sent.rows, sent)
        y.float().sum().backward()
        assert x.grad is not None
        plain = dispatcher.dispatch(x, routing)
        assert plain.carried is None
        assert torch.equal(plain.rows[: len(wanted)], sent.rows[: len(wanted)]), "the rows are those of a plain call"
        dispatcher.close()

    on_ranks(body, size)


@pytest.mark.parametrize("backend", ["strict", {"name": "strict", "inner": "allgather"}, "ring"], ids=str)
def test_backends_of_others(backend: Any) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend, pad_multiple=4), group)
        x, routing, carry = batch(rank_of(group), (5, 3))
        check(dispatcher.dispatch(x, routing, carry=carry))

    with more_backends():
        on_ranks(body, 2)


LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "BSHD": (BSHD([1, 3]), (2, 3)),
    "THD": (THD([0, 2, 6]), (6,)),
    "mask": (Masked(torch.tensor([True, False, True, True, False, True])), (6,)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("planned", [False, True], ids=["no plan", "plan"])
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("backend", ["allgather", "alltoall", V25, HYBRID], ids=str)
def test_layouts(backend: Any, fields: dict[str, Any], planned: bool, name: str) -> None:
    layout, shape = LAYOUTS[name]

    def body(group: Group) -> None:
        dispatcher, rank = build_dispatcher(config(backend, pad_multiple=4, **fields), group), rank_of(group)
        x, routing, carry = batch(rank, (6, 6))
        x, carry = x.detach().view(*shape, D), {name: values.view(shape) for name, values in carry.items()}
        plan = dispatcher.plan(layout, like=x) if planned else layout
        check(dispatcher.dispatch(x, routing, plan, carry=carry))
        travelling = dispatcher.dispatch(x, routing, plan, carry=carry, async_op=True)
        dispatcher.dispatch(x, routing, plan)
        check(travelling.wait())
        dispatcher.close()

    on_ranks(body, 2)


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("backend", ["allgather", "alltoall", BY_NODE, V25, RAGGED], ids=str)
def test_copies_of_experts(backend: Any, fields: dict[str, Any]) -> None:
    if fields and backend == BY_NODE:
        pytest.skip("not graph-safe")

    def body(group: Group) -> None:
        given = config(backend, balance=EVERY_COPY, **fields)
        dispatcher = build_dispatcher(given, group)
        x, routing, carry = batch(rank_of(group))
        skewed = Routing(torch.where(routing.topk_ids < 0, -1, routing.topk_ids % 5), routing.topk_weights)
        sent = dispatcher.dispatch(x, skewed, carry=carry)
        assert sent.placement is not None
        check(sent)
        dispatcher.close()

    on_ranks(body, 4)


def test_parts_of_a_dispatch_have_what_their_rows_carry() -> None:
    def body(group: Group) -> list[int]:
        dispatcher, rank, parts = build_dispatcher(config("alltoall", balance=EVERY_COPY), group), rank_of(group), []

        def experts(part: Dispatched, weights: Tensor) -> Tensor:
            check(part)
            parts.append(len(part.rows))
            return part.grouped_mm(part.rows, weights)

        x, routing, carry = batch(rank)
        skewed = Routing(torch.where(routing.topk_ids < 0, -1, routing.topk_ids % 5), routing.topk_weights)
        sent = dispatcher.dispatch(x, skewed, carry=carry)
        SlotWeights(dispatcher).run(sent, experts, torch.ones(E // 4, D, D, dtype=torch.bfloat16))
        dispatcher.close()
        return parts

    assert any(len(parts) == 2 and min(parts) > 0 for parts in on_ranks(body, 4)), "own experts, and copies"


@pytest.mark.parametrize(
    "other",
    [{"token": torch.zeros(2, dtype=torch.int64)}, {"adapter": torch.zeros(9, dtype=torch.int64)}, None],
    ids=["shape", "name", "nothing"],
)
def test_recomputation_that_carries_something_else_on_one_rank_is_refused_on_all(other: Any) -> None:
    def body(group: Group) -> None:
        dispatcher, rank, calls = build_dispatcher(config("alltoall"), group), rank_of(group), []
        x, routing, carry = batch(rank, (9, 9))
        carry = {"token": carry["token"]}

        def function(x: Tensor) -> Tensor:
            calls.append(x)
            sent = dispatcher.dispatch(x, routing, carry=other if rank == 1 and len(calls) == 2 else carry)
            return dispatcher.combine(sent.rows.square(), sent)

        checkpoint(function, x, use_reentrant=False, context_fn=keep_routes).sum().backward()

    outcomes = outcomes_on(body, 2)
    assert all(isinstance(outcome, MoEDispatchError) for outcome in outcomes), outcomes
    assert re.search("carry", str(outcomes[1]))


@pytest.mark.parametrize("backend", ["alltoall", V25, {**HYBRID}], ids=str)
@pytest.mark.parametrize("wire", ["bfloat16", "mxfp8", {"dtype": "mxfp8", "deliver": "quantised"}], ids=str)
def test_wire_formats(backend: Any, wire: Any) -> None:
    if backend == HYBRID and wire != "bfloat16":
        wire = {**(wire if isinstance(wire, dict) else {"dtype": wire}), "gradients": True}

    def body(group: Group) -> None:
        given = config(backend, wire=wire, pad_multiple=32, hidden_size=512)
        dispatcher, rank = build_dispatcher(given, group), rank_of(group)
        x, routing, carry = batch(rank)
        sent = dispatcher.dispatch(torch.nn.functional.pad(x, (0, 512 - D)), routing, carry=carry)
        assert sent.carried is not None
        assert sent.carried["token"].tolist() == in_dense_order(2, rank, 32)
        dispatcher.close()

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", ["allgather", "alltoall"], ids=str)
def test_rows_that_find_no_room_carry_nothing(backend: Any) -> None:
    def body(group: Group) -> int:
        room = {"capacity_factor": 1.0, "on_overflow": "drop"}
        dispatcher = build_dispatcher(config(backend, graph_safe=room, max_tokens_per_rank=9), group)
        x, routing, carry = batch(rank_of(group), (9, 9))
        crowded = Routing(torch.where(routing.topk_ids < 0, -1, routing.topk_ids % 8), routing.topk_weights)
        sent = dispatcher.dispatch(x, crowded, carry=carry)
        check(sent)
        assert dispatcher.check().overflowed
        dispatcher.close()
        return int(sent.real_tokens_per_expert.sum())

    assert on_ranks(body, 2) == [27, 0]


def layer(dispatcher: Dispatcher, x: Tensor, routing: Routing, carry: Mapping[str, Tensor] | None) -> Tensor:
    sent = dispatcher.dispatch(x, routing, carry=carry)
    check(sent)
    assert sent.carried is not None
    factors = sent.carried["adapter"].clamp(min=0) + 1
    return dispatcher.combine(sent.rows * factors.unsqueeze(1).to(sent.rows.dtype), sent)


@pytest.mark.parametrize("how", [{}, {"context_fn": keep_routes}], ids=["anew", "kept"])
@pytest.mark.parametrize("backend", ["allgather", "alltoall", V25, HYBRID], ids=str)
def test_recomputations(backend: Any, how: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend, pad_multiple=4), group)
        x, routing, carry = batch(rank_of(group))
        layer(dispatcher, x, routing, carry).float().sum().backward()
        assert x.grad is not None
        wanted = x.grad.clone()
        x.grad.zero_()
        checkpoint(layer, dispatcher, x, routing, carry, use_reentrant=False, **how).float().sum().backward()
        assert torch.equal(x.grad, wanted)
        dispatcher.close()

    on_ranks(body, 2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["allgather", "alltoall", V25], ids=str)
def test_chunks(backend: Any, recompute: bool) -> None:
    def experts(sent: Dispatched) -> Tensor:
        check(sent)
        assert sent.carried is not None
        return sent.rows * (sent.carried["adapter"].clamp(min=0) + 1).unsqueeze(1).to(sent.rows.dtype)

    def body(group: Group) -> None:
        whole = build_dispatcher(config(backend), group)
        parts = build_dispatcher(config(backend, chunks={"tokens": 4, "recompute": recompute}), group)
        x, routing, carry = batch(rank_of(group))
        y = run_in_chunks(parts, experts, x, routing, carry=carry)
        y.float().sum().backward()
        torch.testing.assert_close(y, layer(whole, x, routing, carry))
        whole.close()
        parts.close()

    on_ranks(body, 4)


class Scaled(Dispatcher):
    def run_experts(self, sent: Dispatched) -> Tensor:
        check(sent)
        return sent.rows


@pytest.mark.parametrize("fields", [{}, {"chunks": 4}], ids=["whole", "chunks"])
def test_a_subclass_that_is_called(fields: dict[str, Any]) -> None:
    x, routing, carry = batch(0)
    y = Scaled(config("local", **fields))(x, routing, carry=carry)
    assert y.shape == x.shape


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("backend", ["allgather", "alltoall", EXACT, BY_NODE], ids=str)
def test_packets_bring_it_without_another_collective(backend: Any, fields: dict[str, Any]) -> None:
    """The metrics count its bytes: a packet of 530 bytes has 544, and with 36 more 576."""
    if fields and backend in (EXACT, BY_NODE):
        pytest.skip("not graph-safe")

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend, **fields), group)
        x, routing, carry = batch(rank_of(group))
        carry |= {f"column {number}": carry["token"] for number in range(3)}
        seen, sent = [], []
        for given in (None, carry):
            before = dispatcher.metrics().bytes_sent.get("dispatch", 0)
            with count_collectives() as counted:
                dispatcher.dispatch(x, routing, carry=given)
            seen.append(dict(counted.counts))
            sent.append(dispatcher.metrics().bytes_sent.get("dispatch", 0) - before)
        assert seen[0] == seen[1]
        assert sent[1] * 544 == sent[0] * 576
        dispatcher.close()

    on_ranks(body, 4)


@pytest.mark.parametrize("backend", [V1, V2, V25, EXPANDED, HYBRID, RAGGED], ids=str)
def test_vendors_bring_it_by_one_all_gather(backend: Any) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend), group)
        x, routing, carry = batch(rank_of(group), (4, 4))
        dispatcher.dispatch(x, routing, carry=carry)
        calls = dispatcher.metrics().collectives
        assert calls["carry"] == (2 if backend == V1 else 1)
        dispatcher.close()

    on_ranks(body, 2)


@pytest.mark.parametrize("backend", ["allgather", "alltoall", V25, HYBRID], ids=str)
def test_graph_safe_calls_neither_wait_nor_change_shape(backend: Any) -> None:
    def body(group: Group) -> set[int]:
        with allow_host_syncs():
            dispatcher = build_dispatcher(config(backend, row_counts="static", **SAFE), group)
            batches = [batch(rank_of(group), (12, 12), seed) for seed in range(3)]
        shapes = set()
        for x, routing, carry in batches:
            carried = dispatcher.dispatch(x, routing, carry=carry).carried
            assert carried is not None
            shapes.add(len(carried["token"]))
        with allow_host_syncs():
            dispatcher.close()
        return shapes

    with refuse_host_syncs():
        found = on_ranks(body, 2)
    assert all(len(shapes) == 1 for shapes in found)


BAD: dict[str, tuple[Any, str]] = {
    "a shape": ({"adapter": torch.zeros(3, dtype=torch.int64)}, r"carry['adapter'] must be int32 or int64 (5,) on cpu"),
    "a dtype": ({"adapter": torch.zeros(5)}, "one number for each token of x, got float32 (5,) on cpu"),
    "short integers": ({"adapter": torch.zeros(5, dtype=torch.int16)}, "got int16 (5,) on cpu"),
    "no tensor": ({"adapter": [0] * 5}, "carry['adapter'] must be a Tensor, got list"),
    "no name": ({3: torch.zeros(5, dtype=torch.int64)}, "names in carry must be text, got 3"),
    "nothing": ({}, "carry must be a dict of tensors by name"),
    "no dict": (torch.zeros(5, dtype=torch.int64), "got Tensor"),
    "another name": (
        {"domain": torch.zeros(5, dtype=torch.int64)},
        "Ranks disagree on carry: rank 0 has 'adapter (int64)', rank 1 has 'domain (int64)'",
    ),
    "another width": (
        {"adapter": torch.zeros(5, dtype=torch.int32)},
        "Ranks disagree on carry: rank 0 has 'adapter (int64)', rank 1 has 'adapter (int32)'",
    ),
    "another number": (
        {"adapter": torch.zeros(5, dtype=torch.int64), "domain": torch.zeros(5, dtype=torch.int64)},
        "Ranks disagree on carry: rank 0 has 'adapter (int64)', rank 1 has 'adapter (int64), domain (int64)'",
    ),
    "none at all": (None, "Ranks disagree on carry: rank 0 has 'adapter (int64)', rank 1 has nothing"),
}


@pytest.mark.parametrize("backend", ["allgather", "alltoall", V25, RAGGED], ids=str)
@pytest.mark.parametrize("chunks", [None, 2], ids=["whole", "in chunks"])
@pytest.mark.parametrize("case", BAD)
def test_what_one_rank_does_otherwise_raises_on_all(case: str, chunks: int | None, backend: Any) -> None:
    other, text = BAD[case]
    good = {"adapter": torch.zeros(5, dtype=torch.int64)}

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(backend, chunks=chunks), group)
        x, routing, _ = batch(0)
        carry = other if rank_of(group) == 1 else good
        run_in_chunks(dispatcher, lambda sent: sent.rows, x, routing, carry=carry)

    raises_everywhere(outcomes_on(body, 2), MoEDispatchError, text)


def test_the_order_of_the_dict_does_not_matter() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config("alltoall"), group)
        x, routing, carry = batch(rank_of(group))
        check(dispatcher.dispatch(x, routing, carry=dict(sorted(carry.items(), reverse=rank_of(group) == 1))))

    on_ranks(body, 2)


def test_rows_in_no_fixed_order_carry_nothing() -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config({**V25, "deterministic": False}), group)
        x, routing, carry = batch(rank_of(group))
        dispatcher.dispatch(x, routing, carry=carry)

    text = "backend 'deepep' delivers rows in no fixed order with its options, so it cannot carry data"
    raises_everywhere(outcomes_on(body, 2), InputError, text)


class OfAnotherPackage(BackendOptions):
    """A backend that exchanges counts, and does not say in what order its rows are."""

    name = "of_another_package"

    def constraints(self, shape: MoEShape) -> Constraints:
        return dataclasses.replace(AllToAllOptions().constraints(shape), carries=Constraints().carries)

    def capacity(self, shape: MoEShape) -> Capacity:
        return AllToAllOptions().capacity(shape)

    def open(self, context: BackendContext) -> Backend:
        return AllToAllOptions().open(context)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "delivers rows in no fixed order"),
        (
            {**SAFE, "graph_safe": {"capacity_factor": 1.0, "on_overflow": "drop"}},
            "drops the rows of the smallest weights",
        ),
    ],
    ids=["counts", "drops"],
)
def test_backends_whose_rows_cannot_be_known_carry_nothing(
    fields: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._REGISTERED, OfAnotherPackage.name, OfAnotherPackage)

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(OfAnotherPackage.name, **fields), group)
        x, routing, carry = batch(rank_of(group))
        # In graph-safe mode nothing is exchanged that could tell a peer.
        dispatcher.dispatch(x, routing, carry=carry if fields or rank_of(group) == 1 else None)

    outcomes = outcomes_on(body, 2)
    assert all(isinstance(outcome, MoEDispatchError) for outcome in outcomes)
    assert text in str(outcomes[1])


def test_again_compiled_regions_and_join_are_refused() -> None:
    dispatcher = build_dispatcher(config("local"))
    x, routing, carry = batch(0)
    sent = dispatcher.dispatch(x, routing)
    with pytest.raises(InputError, match=r"again=sent brings what its dispatch carried, as carried. Leave carry out"):
        dispatcher.dispatch(x, again=sent, carry=carry)
    assert dispatcher.dispatch(x, again=sent).carried is None
    sent = dispatcher.dispatch(x, routing, carry=carry)
    for other in (carry, {"other": carry["adapter"]}, {}):
        with pytest.raises(InputError, match="Leave carry out"):
            dispatcher.dispatch(x, again=sent, carry=other)
    check(dispatcher.dispatch(x, again=sent))
    compiled = torch.compile(lambda x: dispatcher.dispatch(x, routing, carry=carry).rows, backend="eager")
    with pytest.raises(StateError, match=r"carry works neither in a compiled region nor"):
        compiled(x)


def test_numbers_below_zero_are_carried() -> None:
    dispatcher = build_dispatcher(config("local"))
    x, routing, _ = batch(0)
    values = torch.tensor([-1, -(2**60), 2**60, 0, 7])
    to_expert_3 = Routing(torch.tensor([[3, -1, -1]] * 5), routing.topk_weights)
    sent = dispatcher.dispatch(x, to_expert_3, carry={"any": values})
    assert sent.carried is not None
    assert torch.equal(sent.carried["any"], values)
