"""Backwards in two passes, as zero-bubble schedules make them: no exchange and no product is made twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.capabilities.lean import last
from moe_dispatch.capabilities.lean.packets import Copies
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.lean import first_mm, last_mm, swiglu
from tests.dispatchers.layer import Group, on_ranks
from tests.lean.layer import HIDDEN, NUM_EXPERTS, TOP_K, whole_layer
from tests.lean.test_lean_experts import lean_config

CUT = [3, 0, 8, 2]


class Layer(nn.Module):
    """A router, lean experts and a residual, with its parts of a whole layer."""

    def __init__(
        self, group: Group, *, deliver: str, frozen: bool = False, is_lean: bool = True, **fields: Any
    ) -> None:
        super().__init__()
        self.is_lean = is_lean
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        whole = whole_layer(1, seed=3)
        gate, up, down, *_, bias = (matrix.chunk(size)[rank].float() for matrix in whole.matrices)
        self.router = nn.Parameter(torch.linspace(-1, 1, HIDDEN * NUM_EXPERTS).view(HIDDEN, NUM_EXPERTS).sin())
        self.gate, self.up, self.down = (nn.Parameter(matrix.clone()) for matrix in (gate, up, down))
        self.bias = nn.Parameter(bias.clone())
        self.down.requires_grad_(not frozen)
        backend = "local" if group is None else "alltoall"
        self.dispatcher = build_dispatcher(lean_config(backend, deliver=deliver, **fields), group)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(1).topk(TOP_K)
        sent = self.dispatcher.dispatch(x, Routing(ids, weights))
        if not self.is_lean:
            gate, up = (sent.grouped_mm(sent.rows, matrix) for matrix in (self.gate, self.up))
            return x + self.dispatcher.combine(sent.grouped_mm(swiglu(gate, up), self.down), sent)
        out = last_mm(sent, first_mm(sent, self.gate, self.up), self.down, self.bias, activation=swiglu)
        return x + self.dispatcher.combine(out, sent)


class Counted(threading.local):
    """Exchanges and grouped products of each thread, by pass."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self.phase = "other"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = "other"

    def of(self, phase: str) -> dict[str, int]:
        return {what: count for (when, what), count in self.counts.items() if when == phase}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Count on one rank: the body of rank 0 is the only one that changes the phase."""
    found = Counted()

    def watch(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def run(*arguments: Any, **options: Any) -> Any:
            if found.phase != "other":
                found.counts[found.phase, what] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, run)

    watch(Communicator, "all_to_all", "exchanges")
    watch(F, "grouped_mm", "products")
    watch(torch, "mm", "products of one expert")
    return found


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply the copies of all experts at once, as on a GPU."""
    monkeypatch.setattr(Copies, "by_expert", lambda self, arrived: None)


def two_passes(
    deliver: str,
    counted: Counted,
    *,
    by_torch: bool,
    frozen: bool = False,
    is_lean: bool = True,
    alike: bool = True,
    **fields: Any,
) -> dict[str, dict[str, int]]:
    """Compare the gradients of one backward and of two passes. Return what each pass of every rank did."""
    whole = whole_layer(sum(CUT), seed=3)

    def body(group: Group) -> dict[str, dict[str, int]]:
        rank = group.rank()
        found = []
        for split in (False, True):
            layer = Layer(group, deliver=deliver, frozen=frozen, is_lean=is_lean, **fields)
            x = whole.x.float().split(CUT)[rank].clone().requires_grad_()
            upstream = whole.upstream.float().split(CUT)[rank]
            z = x * 1.5
            parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            parameters = [each for each in parameters if is_lean or each is not layer.bias]
            y = layer(z)

            if not split:
                y.backward(upstream)
            elif by_torch:
                with counted.during("inputs"):
                    _, groups = stage_backward_input([y], [upstream], [x], iter(parameters))
                with counted.during("weights"):
                    stage_backward_weight(iter(parameters), groups)
            else:
                with counted.during("inputs"):
                    (x.grad,) = torch.autograd.grad(y, [x], upstream, retain_graph=True)
                with counted.during("weights"):
                    of_parameters = torch.autograd.grad(y, parameters, upstream)
                for parameter, grad in zip(parameters, of_parameters, strict=True):
                    parameter.grad = grad
            assert x.grad is not None
            grads = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
            found.append({"x": x.grad, **grads})
            layer.dispatcher.close()
        its, mine = found
        assert mine.keys() == its.keys()
        for name, grad in mine.items():
            assert grad.equal(its[name]), name
        return {phase: counted.of(phase) for phase in ("inputs", "weights")}

    counts = on_ranks(body, len(CUT))
    assert not alike or all(each == counts[0] for each in counts)
    return counts[0]


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "padded": {"pad_multiple": 8},
    "graph-safe": {"graph_safe": True, "max_tokens_per_rank": 8},
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deliver", ["rows", "packets"])
def test_the_passes_of_torch_make_nothing_twice(deliver: str, mode: str, counted: Counted) -> None:
    """Of 3 products with matrices, each has one product for its rows and one for its matrix; a bias has two more."""
    found = two_passes(deliver, counted, by_torch=True, **MODES[mode])
    assert found == {"inputs": {"exchanges": 2, "products": 3 + 1}, "weights": {"products": 3 + 1}}


@pytest.mark.parametrize("mode", ["eager", "padded"])
def test_products_of_one_expert_are_not_made_twice(mode: str, counted: Counted) -> None:
    """Every rank has two experts. One without rows has no product for its rows, and zeros for its matrix."""
    found = two_passes("packets", counted, by_torch=True, alike=False, **MODES[mode])
    assert found["weights"] == {"products of one expert": 2 * (3 + 1)}
    assert found["inputs"]["exchanges"] == 2
    assert "products" not in found["inputs"] or found["inputs"]["products"] == 2  # of first matrices, from the results


@pytest.mark.parametrize("mode", MODES)
def test_plain_products_are_not_made_twice(mode: str, counted: Counted) -> None:
    found = two_passes("rows", counted, by_torch=True, is_lean=False, **MODES[mode])
    assert found == {"inputs": {"exchanges": 2, "products": 3}, "weights": {"products": 3}}


@pytest.mark.usefixtures("at_once")
def test_the_pass_for_weights_from_the_output_exchanges_only_the_gradient(counted: Counted) -> None:
    """From the output, the gradient must reach the experts once more, but no row goes home."""
    found = two_passes("packets", counted, by_torch=False)
    assert found["inputs"] == {"exchanges": 2, "products": 3 + 1}
    # The router's weights are asked for too, and their gradient comes home with the rows.
    assert found["weights"]["exchanges"] == 2


@pytest.mark.usefixtures("at_once")
def test_frozen_matrices_have_no_product(counted: Counted) -> None:
    found = two_passes("packets", counted, by_torch=True, frozen=True)
    assert found["weights"] == {"products": 2 + 1}


@pytest.mark.usefixtures("at_once")
def test_a_second_exchange_is_noticed(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above must catch: a node that joins the exchange of combine with the last matrix."""
    backward = last._OfMatrix.backward

    def exchanging(ctx: Any, grad: Tensor) -> Any:
        route = ctx.given.copies.route
        route.spread_gradient(torch.zeros(route.leg.cu_T.shape[0] - 1, HIDDEN))
        return backward(ctx, grad)

    monkeypatch.setattr(last._OfMatrix, "backward", staticmethod(exchanging))
    found = two_passes("packets", counted, by_torch=True)
    assert found["weights"] == {"exchanges": 1, "products": 3 + 1}


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_slots_are_fetched_once_more_and_reduced_in_the_pass_for_weights(
    mode: str, counted: Counted
) -> None:
    """The pass for inputs brings the weights of copies back; that for weights only brings their gradients home."""
    whole, fields = whole_layer(sum(CUT), seed=3), MODES[mode]
    config = lean_config(balance="exact" if "graph_safe" in fields else {"name": "exact", "min_rows": 0}, **fields)
    copied = Counter[int]()

    def body(group: Group) -> dict[str, dict[str, int]]:
        rank = group.rank()
        found: list[list[Tensor]] = []
        for split in (False, True):
            dispatcher, slots = (dispatcher := build_dispatcher(config, group)), SlotWeights(dispatcher)
            matrices = [nn.Parameter(each.chunk(len(CUT))[rank].float().clone()) for each in whole.matrices[:3]]
            x = whole.x.float().split(CUT)[rank].clone().requires_grad_()
            routing = Routing(whole.ids.split(CUT)[rank] % 3, whole.weights.float().split(CUT)[rank])
            upstream = whole.upstream.float().split(CUT)[rank]

            def experts(part: Any, gate: Tensor, up: Tensor, down: Tensor) -> Any:
                copied[rank] += 1
                return last_mm(part, first_mm(part, gate, up), down, activation=swiglu)

            sent, outputs = slots.run(dispatcher.dispatch(x * 1.5, routing), experts, *matrices)
            y = dispatcher.combine(outputs, sent)
            if split:
                with counted.during("inputs"):
                    _, groups = stage_backward_input([y], [upstream], [x], iter(matrices))
                with counted.during("weights"):
                    stage_backward_weight(iter(matrices), groups)
            else:
                y.backward(upstream)
            grads = [x.grad, *(matrix.grad for matrix in matrices)]
            found.append([torch.zeros(0) if grad is None else grad for grad in grads])
            dispatcher.close()
        for its, mine in zip(*found, strict=True):
            torch.testing.assert_close(mine, its)
        return {phase: counted.of(phase) for phase in ("inputs", "weights")}

    counts = on_ranks(body, len(CUT))
    assert [each["inputs"].get("exchanges") for each in counts] == [3] * len(CUT)
    assert [each["weights"].get("exchanges") for each in counts] == [1] * len(CUT)
    assert "graph_safe" in fields or max(copied.values()) > 2  # a rank with copies calls its experts twice
