"""Checkpoints in checkpoints, of which some keep routes: which log, and which of torch's records, belongs to which."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.capabilities.recompute import routes
from tests.dispatchers.layer import Group, on_ranks
from tests.recompute.layer import Layer, assert_equal, called, gradients, layer_config, tokens

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
Nesting = Callable[[Layer, Tensor, bool], Tensor]


def plainly(reentrant: bool, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A checkpoint without ``keep_routes``."""
    y: Tensor = checkpoint(function, x, use_reentrant=reentrant)
    return y


def inside(layer: Layer, x: Tensor, reentrant: bool) -> Tensor:
    return called("kept", lambda x: plainly(reentrant, lambda x: layer(layer(x)), layer(x)), x)


def two_deep(layer: Layer, x: Tensor, reentrant: bool) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return plainly(reentrant, layer, layer(x)).tanh()

    return called("kept", lambda x: layer(plainly(False, inner, layer(x))), x)


def between(layer: Layer, x: Tensor, reentrant: bool) -> Tensor:
    """A kept one in a plain one in a kept one, with a plain one in the innermost."""

    def innermost(x: Tensor) -> Tensor:
        return plainly(reentrant, lambda x: layer(layer(x)), layer(x)).tanh()

    def inner(x: Tensor) -> Tensor:
        return called("kept", innermost, layer(x)).tanh()

    return called("kept", lambda x: plainly(False, inner, x).tanh(), x)


def in_reentrant(layer: Layer, x: Tensor, reentrant: bool) -> Tensor:
    return called("reentrant", lambda x: plainly(reentrant, lambda x: layer(layer(x)), layer(x)).tanh(), x)


def with_a_reentrant_one_between(layer: Layer, x: Tensor, reentrant: bool) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return called("reentrant", lambda x: plainly(reentrant, layer, layer(x)), layer(x)).tanh()

    return called("kept", lambda x: plainly(False, inner, x).tanh(), x)


NESTINGS = [inside, two_deep, between, in_reentrant, with_a_reentrant_one_between]


@pytest.mark.parametrize("fields", [{}, SAFE, {"backend": "allgather"}], ids=["eager", "graph-safe", "allgather"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant one in a reentrant one
def test_a_plain_checkpoint_inside_takes_the_route_of_the_forward(
    nesting: Nesting, reentrant: bool, fields: dict[str, Any]
) -> None:
    """Its router gets the ids of the forward, and nothing but rows is exchanged again."""

    def body(group: Group, noise: float, forwards: int) -> tuple[list[Tensor], int, int]:
        layer, x = Layer(layer_config(**fields), group), tokens(group)
        layer.noise, layer.quiet, layer.gives_ids = noise, forwards, True
        y = nesting(layer, x, reentrant) if forwards else without_checkpoints(nesting, layer, x)
        calls = layer.calls
        y.square().sum().backward()
        if "graph_safe" in fields:
            layer.dispatcher.check()
        collectives = layer.dispatcher.metrics().collectives
        agreed = collectives.get("counts", 0) + collectives.get("sizes", 0)
        layer.dispatcher.close()
        return [y.detach(), *gradients(x, layer)], calls, agreed

    plain = on_ranks(partial(body, noise=0.0, forwards=0), 2)
    quiet, noisy = (on_ranks(partial(body, noise=noise, forwards=plain[0][1]), 2) for noise in (0.0, 3.0))
    assert_equal([grads for grads, *_ in noisy], [grads for grads, *_ in quiet])
    for (grads, *agreed), (wanted, *its) in zip(noisy, plain, strict=True):
        assert agreed == its
        torch.testing.assert_close(grads, wanted)  # nested reentrant checkpoints add gradients up in another order


def without_checkpoints(nesting: Nesting, layer: Layer, x: Tensor) -> Tensor:
    """Run a nesting with plain calls in place of its checkpoints."""
    names = {
        "called": lambda how, function, x: function(x),
        "plainly": lambda reentrant, function, x: function(x),
    }
    assert isinstance(nesting, FunctionType)
    y: Tensor = FunctionType(nesting.__code__, {**globals(), **names})(layer, x, False)
    return y


@pytest.mark.parametrize("on_device", [False, True], ids=["on cpu", "on device"])
@pytest.mark.parametrize("inner", ["kept", "anew"])
def test_records_of_two_checkpoints_are_told_apart(
    inner: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a call stops at its last combine follows from what its own record has saved by then.

    The combine is in an inner checkpoint. Behind it, the outer one saves more tensors from case to case, so in one case
    as many as the inner one has saved. Two such calls are live at once, and their recomputations alternate.
    """
    if on_device:
        monkeypatch.setattr(routes, "control_device", lambda group: torch.device("meta"))

    def body(group: Group, how: str, saved: int) -> list[Tensor]:
        layer, other, x = Layer(layer_config(), group), Layer(layer_config(), group), tokens(group)

        def function(layer: Layer, x: Tensor) -> Tensor:
            y = called("plain" if how == "plain" else inner, layer, x)
            for _ in range(saved):
                y = y.tanh()  # saves its result
            return y

        losses = [called(how, partial(function, each), x).square().sum() for each in (layer, other)]
        for loss in (*losses, *reversed(losses)):
            loss.backward(retain_graph=True)
        for each in (layer, other):
            each.dispatcher.close()
        return [*gradients(x, layer), *gradients(x, other)]

    for saved in range(1, 25):
        wanted, found = (on_ranks(partial(body, how=how, saved=saved), 2) for how in ("plain", "kept"))
        assert_equal(found, wanted)
