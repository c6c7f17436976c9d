"""What tests of split backwards share: a block, its passes for inputs and weights, and the memory that is live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_dispatch.recompute import checkpoint
from tests.dispatchers.layer import Group, rank_of
from tests.recompute.layer import D, Layer, layer_config

Function = Callable[..., Tensor]
Way = Callable[..., Tensor]


def plain(function: Function, *arguments: Any, **keywords: Any) -> Tensor:
    for option in ("context_fn", "early_stop"):
        keywords.pop(option, None)
    return function(*arguments, **keywords)


WAYS: dict[str, Way] = {
    "plain": plain,
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "once": checkpoint,
}


class Block(nn.Module):
    """A dense layer with dropout, an MoE layer and another dense layer, of five weights in all.

    Attributes:
        dropout: Rate of the dropout. Ranks that are threads have one generator, so it must be 0 on several ranks.
        runs: How often it has run.
    """

    def __init__(self, group: Group, dropout: float = 0.0, **fields: Any) -> None:
        super().__init__()
        self.dropout = dropout
        self.layer, self.rank, self.runs = Layer(layer_config(**fields), group), rank_of(group), 0
        self.before = nn.Parameter(torch.eye(D) + 0.1)
        self.behind = nn.Parameter(torch.eye(D) - 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))

    def first(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layer(functional.dropout(torch.relu(x @ self.before), self.dropout))

    def last(self, y: Tensor) -> Tensor:
        return torch.tanh(y @ self.behind)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = super().__call__(x)
        return y


class Passes:
    """The backward of a stage in two passes, as torch's pipeline schedules that split it."""

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self.module, self.x, self.y = module, x, y
        self.groups: list[dict[str, Any]] = []

    def inputs(self) -> None:
        weights = self.module.parameters()
        _, self.groups = stage_backward_input([self.y], [torch.cos(self.y.detach())], [self.x], weights)

    def weights(self) -> None:
        stage_backward_weight(self.module.parameters(), self.groups)

    def whole(self) -> None:
        self.y.backward(torch.cos(self.y.detach()))


class Live(TorchDispatchMode):
    """Bytes of the results of operators that are still in memory, and their peak; small numbers do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.numel() > 8 * D:
                self._live[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        self.peak = max(self.peak, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        self._live = {each: size for each, size in self._live.items() if not each.expired()}
        return sum(self._live.values())


@contextmanager
def counted(block: Block) -> Iterator[Counter[str]]:
    """Count what the dispatcher of a block exchanges, by collective."""
    found = Counter[str]()
    before = block.layer.dispatcher.metrics().collectives
    yield found
    found.update(Counter(block.layer.dispatcher.metrics().collectives) - Counter(before))
