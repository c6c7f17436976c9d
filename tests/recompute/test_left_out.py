"""``only_added``: recomputations leave the last combine out, and tell all ranks if something saves its result."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_dispatch.errors import InputError, MoEDispatchError, PeerError
from tests.dispatchers.layer import Group, caught, on_ranks, outcomes, raises_everywhere, rank_of
from tests.recompute.layer import D, Layer, assert_equal, called, gradients, layer_config, step, tokens
from tests.recompute.test_kept_routes import SAFE, SETTINGS, collectives_of, names, on_device

__all__ = ["on_device"]  # a fixture
HOWS = ["kept, only added", "reentrant, only added"]
EACH_MODE = pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])


class Block(nn.Module):
    """A layer, and what a checkpointed call does behind it."""

    def __init__(self, group: Group, behind: Callable[[Block, Tensor, Tensor], Tensor], **fields: Any) -> None:
        super().__init__()
        self.layer, self.behind, self.rank = Layer(layer_config(**fields), group), behind, rank_of(group)
        self.shared = nn.Parameter(torch.eye(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self, self.layer(x) - x, x)

    def step(self, x: Tensor, how: str) -> list[Tensor]:
        y = x
        for _ in range(2):
            y = called(how, self, y)
        y.square().sum().backward()
        if self.layer.dispatcher.config.graph_safe:
            self.layer.dispatcher.check()
        return [y.detach(), *gradients(x, self)]


def shared_expert(block: Block, y: Tensor, x: Tensor) -> Tensor:
    hidden = x @ block.shared
    return x + y + functional.silu(hidden) * hidden


def in_place(block: Block, y: Tensor, x: Tensor) -> Tensor:
    y += (x @ block.shared).tanh()
    return y.add_(x)


def reshaped(block: Block, y: Tensor, x: Tensor) -> Tensor:
    rows = torch.cat([y.reshape(-1, D // 2), (x @ block.shared).exp().view(-1, D // 2)])
    return 0.5 * rows.view(2, -1, D).sum(0)


def other_on_each_rank(block: Block, y: Tensor, x: Tensor) -> Tensor:
    return shared_expert(block, y, x) if block.rank % 2 else y + x * block.shared.sum()


@pytest.mark.parametrize("behind", [shared_expert, in_place, reshaped, other_on_each_rank])
@pytest.mark.parametrize("how", HOWS)
@EACH_MODE
def test_what_is_added_behind_a_combine(
    fields: dict[str, Any], how: str, behind: Callable[[Block, Tensor, Tensor], Tensor]
) -> None:
    def body(group: Group, how: str) -> tuple[list[Tensor], Counter[str]]:
        block = Block(group, behind, **fields)
        found = block.step(tokens(group), how)
        collectives = block.layer.dispatcher.metrics().collectives
        block.layer.dispatcher.close()
        return found, Counter(collectives)

    wanted, found = (on_ranks(partial(body, how=each), 4) for each in ("plain", how))
    assert_equal([grads for grads, _ in found], [grads for grads, _ in wanted])
    for (_, mine), (_, its) in zip(found, wanted, strict=True):
        assert {label: count for label, count in (mine - its).items() if label != "recompute"} == {"dispatch": 2}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("backend", "fields"), SETTINGS, ids=names)
def test_results_have_the_bits_of_a_run_without_checkpoints(backend: Any, fields: dict[str, Any], how: str) -> None:
    config = layer_config(backend, **fields)

    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(config, group)
        found = step(layer, tokens(group, config.hidden_size), how)
        layer.dispatcher.close()
        return found

    size = 1 if backend == "local" else 2
    assert_equal(on_ranks(partial(body, how=how), size), on_ranks(partial(body, how="plain"), size))


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return grad * y


SAVES: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "a result": lambda _, y: y.tanh(),
    "an input": lambda block, y: y @ block.shared,
    "a norm": lambda _, y: functional.rms_norm(y, (D,)),
    "later": lambda block, y: torch.cat([y + block.shared[:1], y]).exp()[: len(y)],
    "a function of the caller": lambda _, y: _Saves.apply(y),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("how", HOWS)
@EACH_MODE
def test_a_result_that_is_saved(fields: dict[str, Any], how: str, on: tuple[int, ...], saves: str) -> None:
    """Every rank hears of it: in eager mode at the end of the backward, and in graph-safe mode in ``check``."""

    def behind(block: Block, y: Tensor, x: Tensor) -> Tensor:
        return shared_expert(block, SAVES[saves](block, y) if block.rank in on else y, x)

    def body(group: Group) -> Any:
        block = Block(group, behind, **fields)
        found = caught(block.step, tokens(group), how)
        block.layer.dispatcher.close()
        return found

    found = on_ranks(body, 2)
    raises_everywhere(found, MoEDispatchError, "of 'layers.1' must only be added to other tensors", "only_added out")
    if not fields:
        assert [type(error) for error in found] == [InputError if rank in on else PeerError for rank in range(2)]


@EACH_MODE
def test_a_call_that_only_combines(fields: dict[str, Any]) -> None:
    def body(group: Group) -> Any:
        layer, x = Layer(layer_config(**fields), group), tokens(group)
        sent = layer.dispatcher.dispatch(x, layer.route(x))

        def behind(rows: Tensor) -> Tensor:
            y = layer.dispatcher.combine(rows, sent)
            return y.tanh() if group.rank() == 1 else y

        def run() -> None:
            called(HOWS[0], behind, sent.rows).sum().backward()
            layer.dispatcher.check()

        found = caught(run)
        layer.dispatcher.close()
        return found

    raises_everywhere(on_ranks(body, 2), MoEDispatchError, "must only be added to other tensors", "only_added out")


@EACH_MODE
def test_a_reentrant_checkpoint_inside_whose_result_is_saved(fields: dict[str, Any]) -> None:
    """Without gradients nobody can see what is saved, so the forward of the inner one combines."""

    def body(group: Group, outer: str, inner: str) -> list[Tensor]:
        layer, x = Layer(layer_config(**fields), group), tokens(group)
        called(outer, lambda x: called(inner, layer, x).tanh(), x).sum().backward()
        layer.dispatcher.close()
        return gradients(x, layer)

    wanted = on_ranks(partial(body, outer="plain", inner="plain"), 2)
    assert_equal(on_ranks(partial(body, outer=HOWS[0], inner="reentrant, anew"), 2), wanted)


def test_frozen_experts_on_one_rank() -> None:
    layer, norm = Layer(layer_config("local"), None).requires_grad_(requires_grad=False), torch.ones(D)
    found = []
    for how in ("plain", HOWS[0]):
        weight = norm.clone().requires_grad_()
        y = called(how, lambda x, weight: functional.rms_norm(layer(x), (D,), weight), tokens(None).detach(), weight)
        y.square().sum().backward()
        assert weight.grad is not None
        found.append([weight.grad])
    assert_equal(found[1:], found[:1])


@pytest.mark.parametrize("case", ["alltoall", "alltoall, on device", "allgather, on device", "graph-safe"])
@pytest.mark.parametrize("how", HOWS)
def test_exchanges_of_a_recomputed_dispatch(case: str, how: str, request: pytest.FixtureRequest) -> None:
    """One exchange of rows. If the control group is on the device, a backward asks at its end only."""
    backend, _, on_a_device = case.partition(", ")
    if on_a_device:
        request.getfixturevalue("on_device")
    config = layer_config(**SAFE) if backend == "graph-safe" else layer_config(backend)
    of_backward = {"alltoall": 4, "alltoall, on device": 1, "allgather, on device": 1, "graph-safe": 0}[case]
    body = partial(collectives_of, config, partial(step, calls=3), ways=(how,))
    for found in on_ranks(lambda group: body(group=group), 2):
        assert found[how] == +Counter({"dispatch": 3, "recompute": of_backward})


@pytest.mark.parametrize("outer", ["plain", "kept"])
@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_ranks_that_differ(backend: str, outer: str) -> None:
    def body(group: Group) -> None:
        layer, how = Layer(layer_config(backend), group), "kept" if group.rank() == 0 else HOWS[0]
        found = caught(called, outer, lambda x: called(how, layer, x).tanh(), tokens(group))
        layer.dispatcher.close()
        if isinstance(found, Exception):
            raise found

    raises_everywhere(outcomes(body, 2), MoEDispatchError, "grad mode", "without its last combine")


@pytest.mark.parametrize("inner", ["anew", "kept", *HOWS])
@pytest.mark.parametrize("outer", ["kept", *HOWS])
@EACH_MODE
def test_nested_checkpoints(fields: dict[str, Any], outer: str, inner: str) -> None:
    def body(group: Group, outer: str, inner: str) -> list[Tensor]:
        block = Block(group, shared_expert, **fields)
        x = tokens(group)
        y = called(outer, lambda x: called(inner, block, block.layer(x)) + x, x)
        y.square().sum().backward()
        block.layer.dispatcher.close()
        return [y.detach(), *gradients(x, block)]

    if outer == inner == HOWS[1]:
        pytest.skip("torch has no gradients in a reentrant checkpoint inside of another one")
    wanted = on_ranks(partial(body, outer="plain", inner="plain"), 2)
    assert_equal(on_ranks(partial(body, outer=outer, inner=inner), 2), wanted)


def test_a_saved_tensor_that_is_changed_in_place() -> None:
    """In a reentrant recomputation it is refused as without hooks, and elsewhere torch allows it."""

    def behind(block: Block, y: Tensor, x: Tensor) -> Tensor:
        shared = (x @ block.shared).exp()
        return y + shared.mul_(2)

    for how in ("plain", HOWS[1]):
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            Block(None, behind, backend="local").step(tokens(None), how)


@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_left_behind(how: str) -> None:
    block, x = Block(None, shared_expert, backend="local"), tokens(None)
    counts = []
    gc.collect()
    gc.disable()  # graphs must not wait for the garbage collector
    try:
        for _ in range(4):
            block.step(x, how)
            counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[1] == counts[-1]
