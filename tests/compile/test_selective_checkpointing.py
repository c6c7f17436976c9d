"""Selective activation checkpointing keeps what operators returned: no collective is repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_dispatch_testing import count_collectives
from tests.compile.layer import Layer, dispatcher_for, step, tensors
from tests.ranks import run_ranks

ONCE = {"counts": 1, "dispatch": 1, "combine": 1, "combine.backward": 1, "dispatch.backward": 1}
KEPT = {torch.ops.moe_dispatch.dispatch.default, torch.ops.moe_dispatch.combine.default}


def _policy(kept: set[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(layer: Layer, kept: set[Any]) -> Callable[..., Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    return lambda *args: checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kept", "forwards"), [(KEPT, 1), (set(), 2)])
def test_collectives_of_kept_operators_are_not_repeated(kept: set[Any], forwards: int, compiled: bool) -> None:
    # A channel of its own for each case: its metrics are counted.
    dispatcher = dispatcher_for("alltoall", max_tokens_per_rank=50 + forwards + 2 * compiled)
    layer, inputs = Layer(dispatcher, torch.float32), tensors(10, 0, torch.float32)
    wanted, before = step(layer, layer, inputs), Counter(dispatcher.metrics().collectives)
    run = checkpointed(layer, kept)
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = step(run, layer, inputs)
    assert all(map(torch.equal, got, wanted))
    counted = Counter(dispatcher.metrics().collectives) - before
    assert counted == {**ONCE, "counts": forwards, "dispatch": forwards, "combine": counted["combine"]}
    # Nothing asks for what combine returned a second time, which a compiler sees and eager mode does not.
    assert counted["combine"] == (1 if compiled else forwards)


def _collectives(group: dist.ProcessGroup) -> list[dict[str, int]]:
    dispatcher = dispatcher_for("alltoall", group)
    layer = Layer(dispatcher, torch.float32, rank=group.rank(), size=2)
    inputs, found = tensors(10, group.rank(), torch.float32), []
    for run in (layer, checkpointed(layer, KEPT), checkpointed(layer, set())):
        with count_collectives() as seen:
            step(run, layer, inputs)
        found.append(dict(seen.counts))
    return found


def test_on_ranks_in_eager_mode() -> None:
    for plain, kept, repeated in run_ranks(_collectives, 2):
        assert plain == kept == {"alltoall_base": 5}
        assert repeated == {"alltoall_base": 8}


def test_other_modes_see_the_collectives_of_eager_mode() -> None:
    """Operators are used for what torch traces or keeps, not for whoever watches."""
    layer, calls = Layer(dispatcher_for("local"), torch.float32), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        layer(*tensors(10, 0, torch.float32))
    assert calls
    assert "moe_dispatch" not in calls
