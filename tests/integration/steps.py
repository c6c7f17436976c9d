"""Steps of training on ranks, with any framework: gradients, losses, how far they are apart, and planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch.capabilities.balance.movement import Movement

FAULTS = {"lost": 0, "twice": 2}  # how often each gradient of a copy of an expert counts that comes home


def accumulate(model: nn.Module, losses: Sequence[Callable[[], Tensor]], *, together: bool = False) -> Counter[str]:
    """Accumulate gradients of micro-batches, and count the calls of the hook of each parameter.

    ``together``: all forwards run before one backward, so each layer is used more than once in one graph.
    """
    fired: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    if together:
        torch.stack([loss() for loss in losses]).sum().backward()
    else:
        for loss in losses:
            loss().backward()
    return fired


def train(
    optimizer: torch.optim.Optimizer, steps: int, loss_of: Callable[[int], Tensor], scale: int = 1
) -> list[float]:
    """Take steps, and return their losses, summed over all ranks; ``scale``: by what frameworks divide gradients."""
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest, as a part of the largest number of its tensor. NaN where anything is not a number."""
    assert got.keys() == want.keys(), f"got {sorted(got)}, want {sorted(want)}"
    errors = [0.0]
    for name, expected in want.items():
        assert got[name].shape == expected.shape, f"{name}: got {got[name].shape}, want {expected.shape}"
        if expected.numel():
            error = (got[name].double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
            errors.append(error.item())
    return float(torch.tensor(errors).max())


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A block in which the fault is there. Comparisons must see it."""
    collect = Movement.collect

    def wrong(self: Movement, own: Any, home_NW: Tensor) -> Any:
        return collect(self, own, home_NW * FAULTS[fault])

    with mock.patch.object(Movement, "collect", wrong):
        yield
