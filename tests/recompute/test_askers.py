"""Ids belong to a router and its call. A recomputation that asks otherwise than its forward is told to all ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_dispatch import Routing
from moe_dispatch.capabilities.recompute import contexts, routes
from moe_dispatch.capabilities.recompute.modules import KeepingRouter
from moe_dispatch.errors import InputError, MoEDispatchError, PeerError
from moe_dispatch.recompute import keep_ids, keep_routes
from tests.dispatchers.layer import Group, caught, on_ranks, outcomes, raises_everywhere, rank_of
from tests.recompute.layer import E, K, Layer, assert_equal, called, gradients, layer_config, step, tokens

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}


def is_recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


class Keeper(nn.Module):
    """A router that keeps the ids that it gets."""

    def forward(self, ids: Tensor) -> Tensor:
        return keep_ids(ids)


class Other(Keeper):
    pass


class Asking(nn.Module):
    """A layer behind calls of ``keep_ids``, which differ in recomputations on some ranks.

    Attributes:
        asks: The calls: called with two modules that keep, and the ids.
        asks_again: The calls in recomputations.
    """

    def __init__(self, layer: Layer, asks: Callable[..., Any], asks_again: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.asks, self.asks_again = layer, asks, asks_again
        self.one, self.other = Keeper(), Other()

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(6).view(3, 2)
        (self.asks_again if is_recomputing() else self.asks)(self.one, self.other, ids)
        y: Tensor = self.layer(x)
        return y.tanh()


def both(one: Any, other: Any, ids: Tensor) -> None:
    one(ids)
    other(ids)


# By name, what a recomputation asks in the place of ``both``, and the text of the error.
OTHERWISE: dict[str, tuple[Callable[..., Any], str]] = {
    "more": (
        lambda one, other, ids: [each(ids) for each in (one, other, one)],
        "call 3 in a recomputation must follow 2 at",
    ),
    "fewer": (lambda one, other, ids: one(ids), "a recomputation must make all 2 calls of its forward, got 1"),
    "none": (lambda one, other, ids: None, "a recomputation must make all 2 calls of its forward, got 0"),
    "another router": (
        lambda one, other, ids: (one(ids), one(ids)),
        "call 2 in a recomputation must be that of its forward, int64 (3, 2) of Other, got int64 (3, 2) of Keeper",
    ),
    "another order": (
        lambda one, other, ids: both(other, one, ids),
        "must be that of its forward, int64 (3, 2) of Keeper, got int64 (3, 2) of Other",
    ),
    "no router": (lambda one, other, ids: (one(ids), keep_ids(ids)), "of Other, got int64 (3, 2) of Asking"),
    "shape": (lambda one, other, ids: both(one, other, ids.T), "int64 (3, 2) of Keeper, got int64 (2, 3) of Keeper"),
    "dtype": (lambda one, other, ids: both(one, other, ids.int()), "got int32 (3, 2) of Keeper"),
}


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize("fields", [{}, SAFE, {"backend": "allgather"}], ids=["eager", "graph-safe", "allgather"])
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_a_recomputation_that_asks_otherwise(otherwise: str, fields: dict[str, Any], how: str) -> None:
    """Rank 1 does. Two layers are in the checkpoint, and two micro-batches are live."""
    asks_again, text = OTHERWISE[otherwise]

    def body(group: Group) -> None:
        layer = Layer(layer_config(**fields), group)
        asking = Asking(layer, both, asks_again if group.rank() == 1 else both)
        try:
            losses = [called(how, lambda x: asking(layer(x)), tokens(group, seed=seed)).sum() for seed in range(2)]
            for loss in losses:
                loss.backward()
            assert fields is SAFE
            layer.dispatcher.check()
        finally:
            layer.dispatcher.close()

    # A recomputation stops early where nothing more is needed, so it may never make calls that the forward has made.
    with set_checkpoint_early_stop(False):
        raised = outcomes(body, 2, seconds=10)
    raises_everywhere(raised, MoEDispatchError, "keep_ids: ", text, "Checkpoint a function that does the same each")
    if fields is not SAFE:
        assert isinstance(raised[0], PeerError)
        assert isinstance(raised[1], InputError)


def test_where_no_dispatch_can_tell_the_others() -> None:
    """The router alone is checkpointed, so its rank raises."""
    keeper = Keeper()

    def function(x: Tensor, *, again: Callable[..., Any]) -> Tensor:
        ids = x.topk(K).indices
        ids = again(ids) if is_recomputing() else keeper(ids)
        return x.gather(1, ids).tanh()

    for again, text in ((keep_ids, "of Keeper, got int64 (3, 2)"), (lambda ids: ids, "must make all 1 calls")):
        x = torch.randn(3, E, requires_grad=True)
        with pytest.raises(InputError, match="keep_ids: ") as raised, set_checkpoint_early_stop(False):
            checkpoint(partial(function, again=again), x, use_reentrant=False, context_fn=keep_routes).sum().backward()
        assert text in str(raised.value)


def test_what_requires_grad_is_refused() -> None:
    x = torch.randn(3, E, requires_grad=True)
    with pytest.raises(InputError, match="keep_ids: what is kept must not require grad, got a tensor that does"):
        called("kept", lambda x: keep_ids(x).tanh(), x)


class Choosing(nn.Module):
    """A router with several calls of ``topk`` of the same shape, of which some are made only with gradients.

    Attributes:
        first: Whether the auxiliary loss comes before the choice.
        strange: Whether recomputations choose once more, whatever the forward was.
    """

    def __init__(self, gate: Tensor, *, first: bool = False, strange: bool = False) -> None:
        super().__init__()
        self.gate, self.first, self.strange = gate, first, strange
        self.noise = 0.0

    def forward(self, x: Tensor) -> tuple[Routing, Tensor]:
        scores = (x @ self.gate).softmax(1)
        loss, with_gradients = scores.new_zeros(()), torch.is_grad_enabled()
        if with_gradients and self.first:
            loss = self.loss(scores)
        # A bias of the experts moves between a forward and its recomputation.
        ids = torch.topk(scores + self.noise * torch.arange(E), K).indices
        if with_gradients and not self.first:
            loss = self.loss(scores)
        if self.strange and is_recomputing():
            with torch.no_grad():
                scores.topk(K)
        return Routing(ids, scores.gather(1, ids)), loss

    def loss(self, scores: Tensor) -> Tensor:
        """A loss of other experts than the chosen ones: those of the lowest scores."""
        loss = scores.topk(K, largest=False).values.square().sum()
        return loss - loss.detach()  # it has a gradient, and changes no output


class Block(nn.Module):
    """Layers whose routers choose, and add a loss to what they return."""

    def __init__(self, group: Group, number: int = 2, **router: Any) -> None:
        super().__init__()
        layers = [Layer(layer_config(), group, name=f"layers.{each}") for each in range(number)]
        self.routers: Any = nn.ModuleList(Choosing(layer.gate, **router) for layer in layers)
        self.layers: Any = nn.ModuleList(layers)
        for each in self.routers:
            each.forward = KeepingRouter(each.forward)

    def forward(self, x: Tensor) -> Tensor:
        for layer, router in zip(self.layers, self.routers, strict=True):
            routing, loss = router(x)
            sent = layer.dispatcher.dispatch(x, routing)
            rows = sent.grouped_mm(torch.tanh(sent.grouped_mm(sent.rows, layer.first)), layer.second)
            x = x + layer.dispatcher.combine(rows, sent) + loss
        return x


def step_of_block(group: Group, how: str, **router: Any) -> list[Tensor]:
    """Three live micro-batches, of which one never gets a backward; before the others, the bias moves."""
    block = Block(group, **router)
    batches = [tokens(group, seed=seed) for seed in range(3)]
    losses = [called(how, block, batch).square().sum() for batch in batches]
    for each in block.routers:
        each.noise = 0.5
    del losses[1]
    for loss in reversed(losses):
        loss.backward()
    for layer in block.layers:
        layer.dispatcher.close()
    return [*gradients(batches[0], block), *(batch.grad for batch in batches if batch.grad is not None)]


@pytest.mark.parametrize("how", ["kept", "reentrant", "kept, only added", "reentrant, only added"])
@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
def test_a_router_that_chooses_again_for_a_loss(first: bool, how: str) -> None:
    """In a reentrant forward it does not. Its ids are not taken for those of the loss, nor for those of a layer."""
    wanted, found = (on_ranks(partial(step_of_block, how=each, first=first), 2) for each in ("plain", how))
    assert len(wanted[0]) == 9
    if "reentrant" in how:  # torch adds the gradients of the routers in another order
        torch.testing.assert_close(found, wanted)
    else:
        assert_equal(found, wanted)


def test_a_router_that_chooses_once_more_where_gradients_were_recorded() -> None:
    raised = outcomes(partial(step_of_block, how="kept", strange=True), 2)
    raises_everywhere(raised, InputError, "keep_ids: call 3 in a recomputation must be that of its forward")
    raises_everywhere(raised, InputError, "got int64", "of Choosing, topk in forward")


def test_a_router_in_code_that_a_plain_checkpoint_runs() -> None:
    """Inside of a module's forward. The recomputation of the inner one does not run in that module."""

    class Model(nn.Module):
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                scores = (x @ self.layer.gate).softmax(1)
                ids = keep_ids((scores + 0.5 * is_recomputing() * torch.arange(E)).topk(K).indices)
                sent = self.layer.dispatcher.dispatch(x, Routing(ids, scores.gather(1, ids)))
                rows = torch.tanh(sent.grouped_mm(sent.grouped_mm(sent.rows, self.layer.first), self.layer.second))
                return x + self.layer.dispatcher.combine(rows, sent)

            y: Tensor = checkpoint(inner, x, use_reentrant=False)
            return y.tanh()

    def body(group: Group, how: str) -> list[Tensor]:
        model, x = Model(Layer(layer_config(), group)), tokens(group)
        called(how, model, x).square().sum().backward()
        model.layer.dispatcher.close()
        return gradients(x, model)

    def without(group: Group) -> list[Tensor]:
        layer, x = Layer(layer_config(), group), tokens(group)
        scores = (x @ layer.gate).softmax(1)
        ids = scores.topk(K).indices
        sent = layer.dispatcher.dispatch(x, Routing(ids, scores.gather(1, ids)))
        rows = torch.tanh(sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second))
        (x + layer.dispatcher.combine(rows, sent)).tanh().square().sum().backward()
        layer.dispatcher.close()
        return gradients(x, layer)

    for how in ("kept", "reentrant"):
        assert_equal(on_ranks(partial(body, how=how), 2), on_ranks(without, 2))


class Noisy(Layer):
    """A layer whose router has noise from a generator that no checkpoint restores.

    Attributes:
        where: Where the noise goes: to the "choice", or with the choice to the weights by "logits" or input "jitter".
        scale: Scale of the noise in recomputations, as a part of that in the forward.
        keeps: Whether the noise is kept.
    """

    def __init__(self, config: Any, group: Group, where: str, *, scale: float = 1.0, keeps: bool = False) -> None:
        super().__init__(config, group)
        self.where, self.scale, self.keeps = where, scale, keeps
        self.generator = torch.Generator().manual_seed(7 + rank_of(group))

    def draw(self, like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=self.generator)
        noise = noise * (self.scale if is_recomputing() else 1.0)
        return keep_ids(noise) if self.keeps else noise

    def route(self, x: Tensor) -> Routing:
        logits = (x * (1 + 0.3 * self.draw(x)) if self.where == "jitter" else x) @ self.gate
        noisy = logits if self.where == "jitter" else logits + self.draw(logits)
        scores = (logits if self.where == "choice" else noisy).softmax(1)
        ids = keep_ids(noisy.topk(K).indices)
        return Routing(ids, scores.gather(1, ids))


@pytest.mark.parametrize("how", ["kept", "reentrant", "kept, only added"])
@pytest.mark.parametrize("fields", [{}, SAFE, {"debug": True}], ids=["eager", "graph-safe", "debug"])
@pytest.mark.parametrize("where", ["choice", "logits", "jitter"])
def test_noise_that_is_kept(where: str, fields: dict[str, Any], how: str) -> None:
    """The forward is the same without a checkpoint, so the gradients are too."""

    def body(group: Group, how: str) -> list[Tensor]:
        layer, x = Noisy(layer_config(**fields), group, where, keeps=where != "choice"), tokens(group)
        found = step(layer, x, how)
        if fields is SAFE:
            layer.dispatcher.check()
        layer.dispatcher.close()
        return found

    wanted, found = (on_ranks(partial(body, how=each), 2) for each in ("plain", how))
    assert_equal(found, wanted)


OTHER_WEIGHTS = (
    "the router of 'layers.1' must give the weights of its forward",
    "moe_dispatch.recompute.keep_ids too",
)


@pytest.mark.parametrize("how", ["kept", "reentrant", "kept, only added"])
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("fields", [{}, SAFE, {"backend": "allgather"}], ids=["eager", "graph-safe", "allgather"])
@pytest.mark.parametrize("where", ["logits", "jitter"])
def test_other_weights_are_reported_on_every_rank(
    where: str, fields: dict[str, Any], on: tuple[int, ...], how: str
) -> None:
    def body(group: Group) -> None:
        mine = where if group.rank() in on else "choice"
        layer = Noisy(layer_config(**fields), group, mine)
        try:
            losses = [called(how, layer, tokens(group, seed=seed)).square().sum() for seed in range(2)]
            for loss in losses:
                loss.backward()
            assert fields is SAFE
            layer.dispatcher.check()
        finally:
            layer.dispatcher.close()

    raised = outcomes(body, 2, seconds=10)
    raises_everywhere(raised, MoEDispatchError, *OTHER_WEIGHTS)
    for rank, error in enumerate(raised):
        assert isinstance(error, InputError if fields is SAFE or rank in on else PeerError)


def test_other_weights_on_one_rank() -> None:
    layer = Noisy(layer_config("local"), None, "logits")
    raised = caught(step, layer, tokens(None), "kept")
    raises_everywhere([raised], InputError, *OTHER_WEIGHTS, "got 28 other weights.")


def test_weights_without_gradients_may_differ() -> None:
    """A recomputation gives experts and ``combine`` the weights of the forward, so nothing depends on the others."""

    def body(how: str) -> list[Tensor]:
        layer = Noisy(layer_config("local"), None, "logits")
        layer.gate.requires_grad_(False)
        x = tokens(None)

        def function(x: Tensor) -> Tensor:
            sent = layer.dispatcher.dispatch(x, layer.route(x.detach()))
            return layer.dispatcher.combine(
                sent.grouped_mm(sent.grouped_mm(sent.rows, layer.first), layer.second), sent
            )

        called(how, function, x).square().sum().backward()
        return gradients(x, layer)

    wanted = body("plain")
    for how in ("kept", "reentrant"):
        assert_equal([body(how)], [wanted])


@pytest.mark.parametrize(
    ("dtype", "apart", "reported"),
    [
        (torch.float32, 1e-5, False),
        (torch.float32, 1e-2, True),
        (torch.bfloat16, 1e-2, False),
        (torch.bfloat16, 0.3, True),
        (torch.float64, 1e-10, False),
        (torch.float64, 1e-6, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_weights_may_differ_by_rounding(dtype: torch.dtype, apart: float, reported: bool, autocast: bool) -> None:
    """A library may add up in another order each time. Autocast rounds as its own dtype does."""
    if autocast and dtype == torch.float32 and reported:
        apart, reported = 1e-2, False
    elif autocast and dtype == torch.float64:
        reported = False
    layer = Layer(layer_config("local"), None)
    x = tokens(None).detach().to(dtype).requires_grad_()

    def function(x: Tensor) -> Tensor:
        scores = (x.float() @ layer.gate).softmax(1)
        weights, ids = scores.to(torch.promote_types(dtype, torch.float32)).topk(K)
        sent = layer.dispatcher.dispatch(x, Routing(ids, weights * (1 + apart * is_recomputing())))
        return layer.dispatcher.combine(sent.rows.tanh(), sent)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = called("kept", function, x)
    raised = caught(y.float().sum().backward)
    assert isinstance(raised, InputError) == reported, raised


def test_slots_and_rows_without_an_expert_may_have_any_weights() -> None:
    layer = Layer(layer_config("local"), None)
    x = tokens(None)

    def function(x: Tensor) -> Tensor:
        weights, ids = (x @ layer.gate).softmax(1).topk(K)
        ids = ids.masked_fill(torch.arange(K) == 1, -1)
        factors = torch.tensor([[1.0, 5.0 if is_recomputing() else 1.0]])
        sent = layer.dispatcher.dispatch(x, Routing(ids, weights * factors))
        return layer.dispatcher.combine(sent.rows.tanh(), sent)

    called("kept", function, x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("how", ["kept", "reentrant"])
def test_ids_of_forwards_without_a_backward_are_freed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, log = list[weakref.ref[Any]](), routes.Log

    def noted(**given: Any) -> routes.Log:
        made = log(**given)
        logs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(contexts, "Log", noted)
    layer = Layer(layer_config("local"), None)
    layer.gives_ids = True
    for number in range(3):
        with torch.set_grad_enabled(number > 0):
            y = called(how, layer, tokens(None))
        assert number == 0 or y.requires_grad
    assert any(each() is not None for each in logs)
    del y
    gc.collect()
    assert not any(each() is not None for each in logs)
    step(layer, tokens(None), how)
