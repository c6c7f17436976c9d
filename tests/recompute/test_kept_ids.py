"""A recomputation that is not that of its forward: every rank hears of it, and ``keep_ids`` makes it equal."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from moe_dispatch import BSHD, SBHD, Routing
from moe_dispatch.capabilities.recompute import routes
from moe_dispatch.errors import InputError, LostPeerError, MoEDispatchError, PeerError
from moe_dispatch.recompute import keep_ids, keep_routes_in
from tests.deep_ep_backends.vendors import HYBRID, V25
from tests.dispatchers.layer import Group, caught, on_ranks, outcomes, raises_everywhere
from tests.recompute.layer import D, K, Layer, assert_equal, called, gradients, layer_config, step, tokens

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
OTHER_IDS = (
    "the router of 'layers.1' must choose the experts of its forward",
    "moe_dispatch.recompute.keep_ids",
)


def noisy_step(config: Any, group: Group, how: str, *, gives_ids: bool, on: tuple[int, ...] = (0, 1)) -> Any:
    """A step whose router has noise in recomputations, on some ranks. Returns what it returned, or raised."""
    layer = Layer(config, group)
    layer.noise = 3.0 if how != "plain" and (0 if group is None else group.rank()) in on else 0.0
    layer.quiet, layer.gives_ids = 2, gives_ids
    found = caught(step, layer, tokens(group, config.hidden_size), how)
    reported = caught(layer.dispatcher.check) if config.graph_safe else None
    if config.graph_safe and isinstance(reported, Exception):
        layer.dispatcher.check()  # it is reported once
    layer.dispatcher.close()
    return found, reported


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize(
    ("backend", "fields"),
    [("alltoall", {}), ("allgather", {}), ("alltoall", SAFE), (V25, {}), (HYBRID, {})],
    ids=["alltoall", "allgather", "graph-safe", "deepep", "hybridep"],
)
def test_a_router_that_is_given_its_ids(backend: Any, fields: dict[str, Any], how: str) -> None:
    config = layer_config(backend, **fields)
    wanted, found = (on_ranks(partial(noisy_step, config, how=each, gives_ids=True), 2) for each in ("plain", how))
    assert_equal([grads for grads, _ in found], [grads for grads, _ in wanted])
    assert not any(isinstance(reported, Exception) for _, reported in found)


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("backend", ["alltoall", "allgather", V25, HYBRID], ids=str)
def test_eager_mode_raises_on_every_rank(backend: Any, on: tuple[int, ...], how: str) -> None:
    config = layer_config(backend)

    def body(group: Group) -> Any:
        return noisy_step(config, group, how, gives_ids=False, on=on)[0]

    found = on_ranks(body, 2)
    raises_everywhere(found, MoEDispatchError, *OTHER_IDS)
    for rank, error in enumerate(found):
        assert isinstance(error, InputError if rank in on else PeerError)


def test_one_rank() -> None:
    found, _ = noisy_step(layer_config("local"), None, "kept", gives_ids=False)
    raises_everywhere([found], InputError, *OTHER_IDS)
    assert "got 23 other ids." in str(found)


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_graph_safe_mode_reports_it_in_check(on: tuple[int, ...]) -> None:
    def body(group: Group, how: str) -> Any:
        return noisy_step(layer_config(**SAFE), group, how, gives_ids=False, on=on)

    found = on_ranks(partial(body, how="kept"), 2)
    assert not any(isinstance(grads, Exception) for grads, _ in found)
    reports = [reported for _, reported in found]
    raises_everywhere(reports, InputError, *OTHER_IDS, "on rank 1.")
    assert str(reports[0]) == str(reports[1])
    # Dispatching anew, nobody hears of it, and gradients are wrong.
    anew, wanted = on_ranks(partial(body, how="anew"), 2), on_ranks(partial(body, how="plain"), 2)
    assert not any(isinstance(each, Exception) for pair in anew for each in pair)
    assert any(not torch.equal(*pair) for pair in zip(anew[1][0], wanted[1][0], strict=True))


def test_retry_on_overflow_reports_it() -> None:
    layer = Layer(layer_config("local", **SAFE), None)
    layer.noise, layer.quiet = 3.0, 2
    with pytest.raises(
        InputError, match=r"Dispatcher\.retry_on_overflow: in a recomputation, the router of 'layers.1'"
    ):
        layer.dispatcher.retry_on_overflow(lambda: step(layer, tokens(None), "kept"))


def test_an_error_leaves_nothing_behind() -> None:
    """A backward that fails after a difference was found does not report it later."""
    layer = Layer(layer_config("local"), None)
    layer.noise, layer.quiet = 3.0, 1

    def function(x: Tensor) -> Tensor:
        y = layer(x)
        if torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return y.square()

    with pytest.raises(ZeroDivisionError):
        called("kept", function, tokens(None)).sum().backward()
    layer.noise = 0.0
    step(layer, tokens(None), "kept")


class Changing:
    """What a recomputation on rank 1 gets that is not what the forward got."""

    def __init__(self, group: Group, change: Callable[[Tensor], tuple[Tensor, Any]], **fields: Any) -> None:
        self.layer, self.change, self.rank, self.calls = Layer(layer_config(**fields), group), change, group.rank(), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        plan: Any = BSHD([3, 2])
        given = x
        if self.calls > 1 and self.rank == 1:
            given, plan = self.change(x)
        flat = given.float().reshape(-1, D)
        sent = self.layer.dispatcher.dispatch(given, Routing(*reversed((flat @ self.layer.gate).topk(2))), plan)
        return self.layer.dispatcher.combine(sent.rows.tanh(), sent)


CHANGES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Any]], str]] = {
    "more tokens": (lambda x: (torch.cat([x, x], 1), BSHD([3, 2])), "got torch.float32 (2, 6, 16) in BSHD"),
    "dtype": (lambda x: (x.double(), BSHD([3, 2])), "got torch.float64 (2, 3, 16) in BSHD"),
    "lengths": (lambda x: (x, BSHD([2, 3])), "got torch.float32 (2, 3, 16) in BSHD"),
    "kind of layout": (lambda x: (x, SBHD([1, 2, 2])), "got torch.float32 (2, 3, 16) in SBHD"),
    "shape": (lambda x: (x.flatten(0, 1), None), "got torch.float32 (6, 16) in Rows"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["kept", "reentrant"])
def test_another_x_is_refused_on_every_rank(change: str, how: str) -> None:
    changes, text = CHANGES[change]

    def body(group: Group) -> None:
        changing = Changing(group, changes)
        x = torch.randn(2, 3, D).requires_grad_()
        try:
            called(how, changing, x).sum().backward()
        finally:
            changing.layer.dispatcher.close()

    raised = outcomes(body, 2)
    raises_everywhere(raised, MoEDispatchError, "recomputation of 'layers.1'", "torch.float32 (2, 3, 16) in BSHD", text)
    assert isinstance(raised[0], PeerError)
    assert isinstance(raised[1], InputError)


@pytest.mark.parametrize("how", ["kept", "reentrant"])
@pytest.mark.parametrize("on_device", [False, True], ids=["graph-safe", "on device"])
def test_another_layout_is_heard_of_where_ranks_do_not_ask(
    on_device: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 goes on with the layout of its forward, and all ranks raise behind the backward or in ``check``."""
    if on_device:
        monkeypatch.setattr(routes, "control_device", lambda group: torch.device("meta"))

    def body(group: Group) -> None:
        changing = Changing(group, CHANGES["lengths"][0], **({} if on_device else {**SAFE, "infer_layout": False}))
        x = torch.randn(2, 3, D).requires_grad_()
        try:
            called(how, changing, x).sum().backward()
            assert not on_device
            changing.layer.dispatcher.check()
        finally:
            changing.layer.dispatcher.close()

    raised = outcomes(body, 2)
    raises_everywhere(raised, MoEDispatchError, "recomputation of 'layers.1'", "in BSHD", CHANGES["lengths"][1])


@pytest.mark.parametrize("change", ["more tokens", "dtype"])
def test_the_first_recomputation_of_a_backward_tells_all_ranks_of_another_x(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where asking is a host sync, ranks ask each other once a backward."""
    monkeypatch.setattr(routes, "control_device", lambda group: torch.device("meta"))
    test_another_x_is_refused_on_every_rank(change, "kept")


@pytest.mark.parametrize("change", ["more tokens", "dtype"])
@pytest.mark.parametrize("on_device", [False, True], ids=["graph-safe", "on device"])
def test_a_rank_that_cannot_tell_of_another_x_is_named_by_the_watchdog(
    on_device: bool, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 raises at once, and the watchdog of rank 0 shows its text. On a device, the first recomputation asks."""
    if on_device:
        monkeypatch.setattr(routes, "control_device", lambda group: torch.device("meta"))
    waited, changes = threading.Event(), CHANGES[change]

    def body(group: Group) -> None:
        fields = {"watchdog": 0.5, **({} if on_device else {**SAFE, "infer_layout": False})}
        changing = Changing(group, changes[0], **fields)
        same = Changing(group, lambda x: (x, BSHD([3, 2])), **fields)
        y = called("kept", same, called("kept", changing, torch.randn(2, 3, D).requires_grad_()))
        try:
            y.sum().backward()
        finally:
            if group.rank() == 0:
                waited.set()
            waited.wait(10)

    waiting, refusing = outcomes(body, 2)
    texts = "a recomputation of 'layers.1'", "torch.float32 (2, 3, 16) in BSHD", changes[1]
    raises_everywhere([refusing], InputError, *texts)
    assert "They wait until the watchdog" in refusing.__notes__[0]
    raises_everywhere([waiting], LostPeerError, "because of rank 1", f'and raised "{refusing}"', *texts)


def test_a_rank_without_a_watchdog_waits_for_the_timeout_of_the_group() -> None:
    def body(group: Group) -> None:
        changing = Changing(group, CHANGES["more tokens"][0], **SAFE, infer_layout=False)
        called("kept", changing, torch.randn(2, 3, D).requires_grad_()).sum().backward()

    waiting, refusing = outcomes(body, 2, seconds=1)
    raises_everywhere([refusing], InputError, "a recomputation of 'layers.1'")
    assert isinstance(waiting, RuntimeError)


def test_more_dispatches_than_in_the_forward_are_refused_on_every_rank() -> None:
    def body(group: Group) -> None:
        layer = Layer(layer_config(), group)

        def function(x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                x = layer(x)
            return layer(x).square()

        try:
            called("reentrant", function, tokens(group)).sum().backward()
        finally:
            layer.dispatcher.close()

    raises_everywhere(outcomes(body, 2), InputError, "must make the dispatches of its forward, got more than 1.")


def test_a_dispatch_that_has_not_arrived_is_refused() -> None:
    layer = Layer(layer_config("local"), None)
    x = tokens(None)
    coming: list[Any] = []

    def function(x: Tensor) -> Tensor:
        coming.append(layer.dispatcher.dispatch(x, layer.route(x), async_op=True))
        return (x * layer.gate.sum()).square()

    y = called("kept", function, x)
    with pytest.raises(InputError, match=r"Call wait\(\) in the checkpointed function"):
        y.sum().backward()


def test_ids_outside_of_a_checkpoint() -> None:
    ids = torch.tensor([[1, 2]])
    assert keep_ids(ids) is ids


def test_gradients_of_the_noise_are_wrong_without_ids() -> None:
    """The check is needed: on the route of the forward, outputs are right and gradients of the router are not."""
    layer, other = (Layer(layer_config("local", **SAFE), None) for _ in range(2))
    layer.noise, layer.quiet = 3.0, 2
    found, wanted = step(layer, tokens(None), "kept"), step(other, tokens(None), "plain")
    assert torch.equal(found[0], wanted[0])
    assert not torch.equal(found[2], wanted[2])
    assert len(gradients(tokens(None), layer)) == 3


class Router(nn.Module):
    """A router that a framework holds: its choice has noise in recomputations, or its weights are those of the top-k.

    Attributes:
        noise: Scale of the noise in recomputations.
    """

    def __init__(self, gate: nn.Parameter, noise: float) -> None:
        super().__init__()
        self.gate, self.noise = gate, noise

    def forward(self, x: Tensor) -> Routing:
        probs = (x @ self.gate).softmax(1)
        if not self.noise:
            weights, ids = torch.topk(probs, K, dim=1)
            return Routing(ids, weights)
        again = torch._C._current_graph_task_id() != -1
        ids = (probs + self.noise * again * torch.randn_like(probs)).topk(K).indices
        return Routing(ids, probs.gather(1, ids))


class Block(nn.Module):
    """A layer of a framework, which holds its router."""

    def __init__(self, config: Any, group: Group, noise: float) -> None:
        super().__init__()
        self.layer = Layer(config, group)
        self.router = Router(self.layer.gate, noise)

    def forward(self, x: Tensor) -> Tensor:
        dispatcher = self.layer.dispatcher
        sent = dispatcher.dispatch(x, self.router(x))
        return x + dispatcher.combine(
            sent.grouped_mm(sent.grouped_mm(sent.rows, self.layer.first), self.layer.second), sent
        )


@pytest.mark.parametrize("noise", [0.0, 3.0], ids=["weights of the top-k", "noise"])
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize("implementation", [*CheckpointImpl])
def test_routers_of_a_wrapped_model_get_their_ids(implementation: Any, copied: bool, noise: float) -> None:
    """One word is enough: ``keep_routes_in`` finds the routers too."""

    def body(group: Group, kept: bool) -> list[Tensor]:
        block = Block(layer_config(), group, noise)
        model: Any = nn.ModuleList([block])
        if kept:
            model[0] = checkpoint_wrapper(block, checkpoint_impl=implementation)
            keep_routes_in(model)
            keep_routes_in(model)
            if copied:
                model = copy.deepcopy(model)
                block.router.forward = None  # type: ignore[method-assign, assignment]
                block.layer.dispatcher.close()
        x = tokens(group)
        y: Tensor = model[0](x)
        y.square().sum().backward()
        found = [y.detach(), *gradients(x, model)]
        for each in model.modules():
            if isinstance(each, Layer):
                each.dispatcher.close()
        return found

    wanted, found = (on_ranks(partial(body, kept=kept), 2) for kept in (False, True))
    assert len(wanted[0]) == 5
    assert_equal(found, wanted)
