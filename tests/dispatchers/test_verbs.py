"""What the verbs promise beside the way rows travel: weights, sending again, overlap, dtypes and odd tensors."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch import BSHD, Dispatched, Dispatcher, Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch.types import InFlight
from tests.dispatchers.layer import (
    BACKENDS,
    HIDDEN,
    NUM_EXPERTS,
    Group,
    apply_experts,
    expert_weights,
    local_part,
    on_ranks,
    random_routing,
    random_rows,
    rank_of,
    small_config,
)
from tests.ranks import run_ranks

ROWS = 7

Grads = list[Tensor]


def _grads(*tensors: Tensor) -> Grads:
    found = [tensor.grad for tensor in tensors]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_sending_again_exchanges_rows_and_no_counts(backend: str, size: int) -> None:
    def body(group: Group) -> dict[str, int]:
        dispatcher = build_dispatcher(small_config(backend, pad_multiple=4), group)
        sent = dispatcher.dispatch(random_rows(ROWS), random_routing(ROWS, seed=rank_of(group)), Rows(5))
        before = dispatcher.metrics().collectives
        again = dispatcher.dispatch(random_rows(ROWS, seed=1), again=sent)
        assert again.tokens_per_expert_list == sent.tokens_per_expert_list
        after = dispatcher.metrics().collectives
        return {name: count - before[name] for name, count in after.items() if count != before[name]}

    assert on_ranks(body, size) == [{} if backend == "local" else {"dispatch": 1}] * size


def test_what_dispatch_returns_has_a_type_and_a_short_repr() -> None:
    dispatcher = build_dispatcher(small_config("local", pad_multiple=4))
    flight = dispatcher.dispatch(random_rows(3), Routing(torch.tensor([[0, 7]] * 3), torch.ones(3, 2)), async_op=True)
    assert_type(flight, InFlight)
    with pytest.raises(AttributeError, match=r"no attribute 'rows'\. Call wait\(\)"):
        getattr(flight, "rows")  # noqa: B009 - a type checker refuses flight.rows
    assert not hasattr(flight, "row")
    sent = flight.wait()
    assert sent.wait() is sent
    assert repr(sent).startswith("Dispatched(rows=float32 (8, 16) on cpu, ")


@pytest.mark.parametrize("backend", ["local", "alltoall", "allgather"])
def test_a_flight_that_has_arrived_keeps_nothing_of_what_was_sent(backend: str) -> None:
    dispatcher, x = build_dispatcher(small_config(backend)), random_rows(ROWS)
    flight, sent_x = dispatcher.dispatch(x, random_routing(ROWS), async_op=True), weakref.ref(x)
    del x
    assert len(flight.wait().rows)
    assert sent_x() is None


@pytest.mark.parametrize(
    ("backend", "size", "around_dispatch"), [("local", 1, False), ("alltoall", 2, True), ("allgather", 2, False)]
)
def test_autocast(backend: str, size: int, around_dispatch: bool) -> None:
    """Experts in bfloat16 around a float32 model: gradients in the dtypes of their tensors, and right."""

    def layer(enabled: bool) -> list[Grads]:
        def body(group: Group) -> Grads:
            dispatcher = build_dispatcher(small_config(backend, pad_multiple=4), group)
            x, way = random_rows(ROWS).requires_grad_(), random_routing(ROWS, seed=rank_of(group))
            topk_weights, mine = way.topk_weights.clone().requires_grad_(), local_part(expert_weights(), group)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled and around_dispatch):
                sent = dispatcher.dispatch(x, Routing(way.topk_ids, topk_weights))
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    outputs = apply_experts(sent, mine)
                assert outputs.dtype == (torch.bfloat16 if enabled else torch.float32)
                y = dispatcher.combine(outputs, sent)
                assert (sent.rows.dtype, sent.weights.dtype, y.dtype) == (x.dtype, torch.float32, x.dtype)
                y.float().square().sum().backward()
            return [y.detach().float(), *_grads(x, topk_weights, mine)]

        return on_ranks(body, size)

    for cast, plain in zip(layer(enabled=True), layer(enabled=False), strict=True):
        assert len(cast) == len(plain) == 4
        for a, b in zip(cast, plain, strict=True):
            assert a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=0.1, atol=0.06)


def test_offs_and_their_twin_with_a_leading_zero() -> None:
    dispatcher = build_dispatcher(small_config("local", pad_multiple=4))
    ids = torch.tensor([[0, 2], [2, 7], [2, 0], [2, 1], [2, -1]])
    sent = dispatcher.dispatch(random_rows(5), Routing(ids, torch.ones(5, 2)))
    assert sent.tokens_per_expert.tolist() == [4, 4, 8, 0, 0, 0, 0, 4]
    assert sent.real_tokens_per_expert.tolist() == [2, 1, 5, 0, 0, 0, 0, 1]
    assert sent.offs.tolist() == [4, 8, 16, 16, 16, 16, 16, 20]
    assert sent.cu_tokens_per_expert.tolist() == [0, *sent.offs.tolist()]
    assert sent.offs.dtype == sent.cu_tokens_per_expert.dtype == torch.int32
    with pytest.raises(InputError, match="must have at most 2147483647 rows, because offs is int32, got 2147483648"):
        _ = dataclasses.replace(sent, host_counts=(2**31, *[0] * 7)).offs
    assert (sent.tokens_per_expert_list, sent.pad_multiple) == ((4, 4, 8, 0, 0, 0, 0, 4), 4)


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_training_between_evaluations(backend: str, size: int) -> None:
    """Buffers and counters made in inference mode are written in training, and the other way round."""
    rows = 600  # of 4 KiB, more than what the workspace finds worth keeping

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend, hidden_size=1024), group)
        x, way = random_rows(rows, 1024), random_routing(rows)
        for training in (False, True, False):
            x.requires_grad_(training)
            with torch.inference_mode(not training):
                sent = dispatcher.dispatch(x, way)
                y = dispatcher.combine(sent.rows, sent)
            torch.testing.assert_close(y.detach(), x.detach() * way.topk_weights.sum(1, keepdim=True))
            if training:
                y.sum().backward()
        assert int(dispatcher.metrics(gather=True).real_tokens_per_expert.sum()) == 3 * 2 * rows * size

    on_ranks(body, size)


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_another_default_device(backend: str, size: int) -> None:
    """Nothing is made on torch's default device by accident."""
    x, way = random_rows(600, 1024), random_routing(600)

    def body(group: Group) -> None:
        with torch.device("meta"):
            dispatcher = build_dispatcher(small_config(backend, hidden_size=1024, pad_multiple=16, debug=True), group)
            mine = x.clone().requires_grad_()
            sent = dispatcher.dispatch(mine.view(2, 300, 1024), way, BSHD(lengths=[100, 300]))
            dispatcher.combine(sent.rows, sent).sum().backward()
            dispatcher.self_test()
            metrics = dispatcher.metrics(gather=True)
            dispatcher.close()
        assert metrics.real_tokens_per_expert.device.type == "cpu"
        assert mine.grad is not None
        assert mine.grad.device.type == "cpu"

    on_ranks(body, size)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("which", ["x", "x, again", "weights"])
def test_what_needs_a_gradient_on_one_rank_only(backend: str, which: str) -> None:
    """Every rank takes part in the backward of every verb, in the same form, whatever requires grad there."""

    def body(group: Any) -> list[Tensor | None]:
        dispatcher, first = build_dispatcher(small_config(backend), group), group.rank() == 0
        routing = random_routing(ROWS)
        x = random_rows(ROWS).requires_grad_(first or which == "weights")
        weights = routing.topk_weights.requires_grad_(first and which == "weights")
        sent = dispatcher.dispatch(x.detach() if which == "x, again" else x, Routing(routing.topk_ids, weights))
        if which == "x, again":
            sent = dispatcher.dispatch(x, again=sent)
        outputs = sent.rows if first or which == "weights" else sent.rows.detach()
        dispatcher.combine(outputs, sent).sum().backward()
        return [x.grad, weights.grad]

    (grad_x, grad_weights), (grad_x_of_other, grad_weights_of_other) = run_ranks(body, 2)
    assert grad_x is not None
    assert bool(grad_x.any())
    assert (grad_weights is not None) == (which == "weights")
    assert (grad_x_of_other is not None) == (which == "weights")
    assert grad_weights_of_other is None


@pytest.mark.parametrize(("backend", "size"), BACKENDS)
def test_rows_dispatched_without_gradients_combine_with_them(backend: str, size: int) -> None:
    def body(group: Group) -> None:
        dispatcher, mine = build_dispatcher(small_config(backend), group), local_part(expert_weights(), group)
        with torch.no_grad():
            sent = dispatcher.dispatch(random_rows(ROWS), random_routing(ROWS))
        # Only the first rank's experts learn; the others take part in the backward of its combine.
        outputs = apply_experts(sent, mine if rank_of(group) == 0 else mine.detach())
        dispatcher.combine(outputs, sent).sum().backward()
        assert (mine.grad is not None) == (rank_of(group) == 0)

    on_ranks(body, size)


@pytest.mark.parametrize("hidden", [HIDDEN, 1 << 16], ids=["fresh memory", "lent memory"])
@pytest.mark.parametrize(
    ("backend", "size", "graph_safe"),
    [("local", 1, True), ("alltoall", 2, False), ("alltoall", 2, True), ("allgather", 2, False)],
)
def test_results_may_be_written_to(backend: str, size: int, graph_safe: bool, hidden: int) -> None:
    """Models scale ``sent.rows`` and add a residual to y in place, which autograd forbids for views."""
    torch.use_deterministic_algorithms(False)  # under which no memory is lent
    room = {"graph_safe": True, "max_tokens_per_rank": ROWS + 1} if graph_safe else {}

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(backend, hidden_size=hidden, **room), group)
        rows = ROWS + rank_of(group)  # so that a backend that needs equal rows pads
        x = torch.randn(rows, hidden).requires_grad_()
        routing = random_routing(rows)
        sent = dispatcher.dispatch(x, routing)
        y = dispatcher.combine(sent.rows.mul_(2), sent)
        y += x
        y.sum().backward()
        expected = 1 + 2 * torch.where(routing.topk_ids < 0, 0, routing.topk_weights).sum(1, keepdim=True)
        torch.testing.assert_close(x.grad, expected.expand_as(x))

    on_ranks(body, size)


def test_a_residual_may_be_added_to_a_view_that_a_library_returns() -> None:
    backend = {"name": "hybridep", "emulate": True}  # its combine returns the first rows of a larger tensor
    dispatcher = build_dispatcher(small_config(backend))
    x = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    sent = dispatcher.dispatch(x, Routing(torch.arange(2).expand(ROWS, 2), torch.full((ROWS, 2), 0.5)))
    y = dispatcher.combine(sent.rows, sent)
    y += x
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))


def test_rows_of_experts_are_kept_only_for_a_gradient_of_the_weights() -> None:
    """A frozen router needs no dot products; on several ranks they were made, and the rows kept, all the same."""

    def body(group: Group) -> list[int]:
        dispatcher = build_dispatcher(small_config("alltoall"), group)
        found = []
        for frozen in (True, False):
            routing = random_routing(ROWS)
            routing.topk_weights.requires_grad_(not frozen)
            sent = dispatcher.dispatch(random_rows(ROWS).requires_grad_(), routing)
            saved: list[Tensor] = []

            def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = dispatcher.combine(sent.rows * 2, sent)
            y.sum().backward()
            found.append(sum(tensor.dim() == 2 for tensor in saved))
        return found

    assert on_ranks(body, 2) == [[0, 1]] * 2


class MoE(Dispatcher):
    def __init__(self) -> None:
        super().__init__(small_config("local"))
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_EXPERTS))

    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.per_expert(self.experts)


def test_experts_is_a_submodule_with_the_usual_keys() -> None:
    moe, other = MoE(), MoE()
    assert isinstance(moe.experts, nn.ModuleList)
    assert list(moe.state_dict())[:2] == ["experts.0.weight", "experts.0.bias"]
    other.load_state_dict(moe.state_dict())
    x, routing = random_rows(6), random_routing(6)
    for layer in (other, copy.deepcopy(moe)):
        assert torch.equal(layer(x, routing), moe(x, routing))
