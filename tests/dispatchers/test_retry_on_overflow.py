"""A step that is run again until it fits gives the bits of one that had room from the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch_testing import run_processes
from tests.dispatchers.dropping import apply_poisoned, safe_config
from tests.dispatchers.layer import Group, expert_weights, local_part, on_ranks, random_rows

TOKENS = 8
SEED = 3


class Model:
    """Two layers with dropout between them; the second sends what the first gave rows that are not 0, to two experts.

    So it needs little while the first drops, and twice as much as the first once that drops nothing.
    """

    def __init__(self, configs: Sequence[DispatcherConfig], group: Group, *, dropout: float) -> None:
        rank = 0 if group is None else group.rank()
        self.dropout = dropout
        self.layers = [build_dispatcher(config, group) for config in configs]
        self.experts = [local_part(expert_weights(seed=seed), group) for seed in (1, 2)]
        self.x = random_rows(TOKENS, seed=rank).requires_grad_()
        self.weights = torch.linspace(0.1, 0.9, TOKENS * 2).view(TOKENS, 2).requires_grad_()
        self.runs = 0

    def step(self) -> Tensor:
        """Forward and backward, from scratch each time."""
        self.runs += 1
        for leaf in self.leaves:
            leaf.grad = None
        ids = torch.arange(TOKENS).unsqueeze(1) + torch.tensor([0, 4])
        y = self.layer(0, self.x, torch.where(torch.tensor([True, False]), ids, -1))
        arrived = (y.detach() != 0).any(1, keepdim=True)
        y = torch.nn.functional.dropout(y, self.dropout)
        y = self.layer(1, y, torch.where(arrived, ids % 8, -1))
        y.square().sum().backward()
        return y.detach()

    def layer(self, at: int, x: Tensor, ids: Tensor) -> Tensor:
        sent = self.layers[at].dispatch(x, Routing(ids, self.weights))
        return self.layers[at].combine(apply_poisoned(sent, self.experts[at]), sent)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *self.experts]

    def outcome(self, run: Callable[[], Tensor]) -> list[Tensor]:
        """y, the gradients, and where there is dropout the state of the generator afterwards."""
        if self.dropout:  # it belongs to the process, which ranks that are threads share
            torch.manual_seed(SEED)
        y = run()
        grads = [torch.empty(0) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        return [y, *grads, *([torch.get_rng_state()] if self.dropout else [])]


def retried(config: DispatcherConfig, group: Group, *, headroom: float, dropout: float, apart: bool = False) -> int:
    """Run a model of small room, compare it in every bit with one of enough, and say how often the step ran."""
    configs = [config, config.replace(pad_multiple=4) if apart else config]
    worst = [with_worst_room(config) for config in configs]
    model, roomy = (Model(which, group, dropout=dropout) for which in (configs, worst))
    retry = model.outcome(lambda: model.layers[0].retry_on_overflow(model.step, model.layers[1], headroom=headroom))
    assert not any(layer.check().overflowed for layer in model.layers)
    again = model.outcome(model.step)  # with the room that it has now from the start
    for mine, same, theirs in zip(retry, again, roomy.outcome(roomy.step), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, same)
    return model.runs - 1


def with_worst_room(config: DispatcherConfig) -> DispatcherConfig:
    return config.replace(backend=config.backend_name, capacity_factor="worst", on_overflow=None)


def config_of(backend: str, size: int, *, rows: int = 1, on_overflow: str = "drop") -> DispatcherConfig:
    pair_rows = {"pair_rows": 1} if backend == "alltoall" and rows == 1 else {}
    return safe_config(backend, size=size, rows=rows, on_overflow=on_overflow, **pair_rows)


# The first run shows what the first layer needs, 8 rows; the second what the second layer needs, 16.
AS_NEEDED, TWICE, FIRST_FITS, ALL_FIT = (1, 1.0, 3), (1, 2.0, 2), (8, 1.0, 2), (16, 1.0, 1)


@pytest.mark.parametrize(
    ("backend", "size", "rows", "headroom", "runs", "on_overflow"),
    [
        ("local", 1, *AS_NEEDED, "raise"),
        ("local", 1, *ALL_FIT, "drop"),
        ("allgather", 1, *TWICE, "drop"),
        ("alltoall", 1, *FIRST_FITS, "raise"),
        ("allgather", 4, *AS_NEEDED, "drop"),
        ("alltoall", 4, *AS_NEEDED, "raise"),
        ("alltoall", 4, *TWICE, "drop"),
    ],
)
def test_a_retried_step_has_the_bits_of_one_that_fits(
    backend: str, size: int, rows: int, headroom: float, runs: int, on_overflow: str
) -> None:
    config = config_of(backend, size, rows=rows, on_overflow=on_overflow)
    dropout = 0.3 if size == 1 else 0.0
    assert on_ranks(lambda group: retried(config, group, headroom=headroom, dropout=dropout), size) == [runs] * size


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("allgather", 4), ("alltoall", 4)])
def test_channels_that_a_step_uses(backend: str, size: int) -> None:
    config = config_of(backend, size)
    assert on_ranks(lambda group: retried(config, group, headroom=1, dropout=0, apart=True), size) == [3] * size


def test_a_channel_that_is_not_named_still_drops() -> None:
    """The control of the test before: the second layer's channel overflows, and the result shows it."""
    config = config_of("local", 1)
    model = Model([config, config.replace(pad_multiple=4)], None, dropout=0)
    model.layers[0].retry_on_overflow(model.step)
    assert model.layers[1].check().overflowed


def test_without_putting_the_generator_back_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    with pytest.raises(AssertionError):
        retried(config_of("local", 1), None, headroom=1, dropout=0.3)


def test_an_error_of_the_step_comes_through() -> None:
    dispatcher = build_dispatcher(config_of("local", 1))
    with pytest.raises(ZeroDivisionError):
        dispatcher.retry_on_overflow(lambda: 1 / 0)


def retried_in_a_process(rank: int) -> int:
    group = torch.distributed.group.WORLD
    return retried(config_of("alltoall", 2), group, headroom=1, dropout=0.3)


@pytest.mark.slow
def test_dropout_on_two_ranks() -> None:
    """Each rank is a process, with a generator of its own."""
    assert run_processes(retried_in_a_process, 2) == [3, 3]
