"""Plan the set-up of a file by a step of one rank on torch's fake process group, on which no other rank runs."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch import Dispatcher
from moe_dispatch.capabilities.phases.release import dispatchers_in
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.prove import load_setup
from moe_dispatch_testing.prove.setup import Setup
from moe_dispatch_tools import console
from moe_dispatch_tools.console import size


def dry_run(file: Path, options: Mapping[str, Any] = MappingProxyType({}), *, rank: int = 0) -> dict[str, Any]:
    """Run a step of a rank on a fake group with as many ranks as the mesh of the file has.

    Args:
        file: A file as ``moe-dispatch prove`` takes it.
        options: Options of the command, none of which a set-up takes. Those that were left out are false.
        rank: Number of the rank.

    Returns:
        Plain data, as ``measure`` returns it.

    Raises:
        ConfigError: An option is given; the file is no set-up; or it builds dispatchers that cannot run alone.
    """
    if given := [f"--{name}" for name, value in options.items() if value]:
        raise ConfigError(
            f"plan: a set-up in Python says what it runs, got {', '.join(given)}. Change mesh, build and batches "
            f"in {file.name}."
        )
    setup = load_setup(file)
    dist.init_process_group("fake", rank=rank, world_size=setup.num_ranks)
    try:
        return measure(setup)
    finally:
        dist.destroy_process_group()


def measure(setup: Setup) -> dict[str, Any]:
    """Build a set-up, run one step on this rank of the default group, and return what it sends and keeps.

    Bytes of parameters are those of this rank, before the step. ``saved`` is the most that autograd keeps for the
    backward at a time, without parameters. Each channel has the names of its dispatchers, and the counts of the step.

    Raises:
        ConfigError: The model has no dispatcher.
    """
    torch.manual_seed(0)
    built = setup.build(setup.make_mesh())
    built = built if isinstance(built, tuple) else (built,)
    models = built[0] if isinstance(built[0], list | nn.ModuleList) else [built[0]]
    dispatchers = dispatchers_in(models, "plan")
    parameters = {id(each): _local(each) for model in models for each in model.parameters()}
    channels: dict[str, list[Dispatcher]] = {}
    for each in dispatchers:
        channels.setdefault(each._lease.channel.name, []).append(each)
    before = {name: members[0].metrics() for name, members in channels.items()}
    batch = setup.batches_of(0)[setup.batch_number(dist.get_rank())]
    saved = _Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, _Kept.unpack):
        setup.step(*built, batch)
    found = []
    for name, members in channels.items():
        first, counts = members[0], members[0].metrics() - before[name]
        found.append(
            {
                "names": [each.name for each in members],
                "backend": counts.backend,
                **{field: getattr(first.config, field) for field in ("num_experts", "top_k", "hidden_size")},
                "ep_size": first.ep_size,
                "dispatches": counts.dispatches,
                "rows_at_experts": int(counts.real_tokens_per_expert.sum()),
                "rows_of_busiest_expert": int(counts.real_tokens_per_expert.max()),
                "rows_padded": counts.rows_padded,
                "sent": counts.bytes_sent,
                "held": counts.memory_held,
            }
        )
    return {
        "mesh": dict(setup.mesh),
        "rank": dist.get_rank(),
        "parameters": sum(each.nbytes for each in parameters.values()),
        "saved": saved.most,
        "channels": found,
    }


def _local(parameter: Tensor) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)


@final
class _Saved:
    """Counts the bytes of storages that autograd keeps, each once."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._users: Counter[int] = Counter()

    def keep(self, tensor: Tensor) -> Any:
        """Count a tensor that autograd saves, unless it is a parameter or a view of one."""
        whole = tensor if tensor._base is None else tensor._base
        if whole.is_leaf and whole.requires_grad:
            return tensor
        return _Kept(tensor, self._changed)

    def _changed(self, place: int, nbytes: int, by: int) -> None:
        self._users[place] += by
        if self._users[place] == (by > 0):  # the first one came, or the last one went
            self._now += by * nbytes
            self.most = max(self.most, self._now)


@final
class _Kept:
    __slots__ = ("_changed", "_of", "_tensor")

    def __init__(self, tensor: Tensor, changed: Callable[[int, int, int], None]) -> None:
        storage, self._tensor, self._changed = None, tensor, changed
        with contextlib.suppress(NotImplementedError, RuntimeError):  # a DTensor, for example
            storage = tensor.untyped_storage()
        self._of = (id(tensor), tensor.nbytes) if storage is None else (storage.data_ptr(), storage.nbytes())
        changed(*self._of, 1)

    def __del__(self) -> None:
        self._changed(*self._of, -1)

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        tensor: Tensor = kept._tensor if isinstance(kept, _Kept) else kept
        return tensor


def show(file: Path, found: dict[str, Any]) -> None:
    """Print what ``dry_run`` returned."""
    mesh = " x ".join(f"{name} {length}" for name, length in found["mesh"].items())
    ranks = math.prod(found["mesh"].values())
    console.line(
        f"{file.name}: one step of rank {found['rank']} of {ranks}, mesh {mesh}, on torch's fake process group"
    )
    console.line("no other rank runs: all of them route as this one")
    rows = [
        [
            ", ".join(each["names"][:2]) + ", ..." * (len(each["names"]) > 2) or "unnamed",
            each["backend"],
            each["ep_size"],
            each["dispatches"],
            each["rows_at_experts"],
            each["rows_of_busiest_expert"],
            sum(each["rows_padded"].values()),
            size(sum(each["sent"].values())),
        ]
        for each in found["channels"]
    ]
    console.table(
        ["dispatchers", "backend", "ep", "calls", "rows at\nexperts", "busiest\nexpert", "padding", "sent"],
        rows,
        caption="Of the whole step: rows of all dispatches, and bytes of forward and backward.",
        text_columns=2,
    )
    held = sum(each["held"] for each in found["channels"])
    console.line(
        f"this rank has {size(found['parameters'])} of parameters; beside them, autograd keeps at most "
        f"{size(found['saved'])}, and backends keep {size(held)} between calls"
    )
