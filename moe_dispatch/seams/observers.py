"""The seam for observers of calls, which ``Channel.observers`` lists. A call that nobody observes runs nothing of it.

Those of this package are in ``moe_dispatch.capabilities.observers``. They are imported when a config, a block or a
wrapper of torch asks for them. Everything else works without them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moe_dispatch.seams.plug_ins import has_code, load_plug_in

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig
    from moe_dispatch.dispatchers.channel import Channel, Lease
    from moe_dispatch.layouts import Layout
    from moe_dispatch.types import Routing


class Observer:
    """Hears of the calls on a channel. A subclass defines the methods that it needs; the others do nothing.

    Attributes:
        by_position: Whether it needs to know the sequence and the position of each row.
    """

    by_position = False

    def asked(self, x: Tensor, layout: Layout) -> None:
        """Hear that a dispatch begins. An exception refuses it, and peers are told where they can be."""

    def traced(self) -> None:
        """Hear that an operator makes a dispatch, in compiled code or selective checkpointing. It may raise."""

    def started(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> None:
        """Hear of a dispatch that no rank has refused, so all ranks hear of it."""

    def whole(self, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> AbstractContextManager[None]:
        """Hear of one dispatch at the end of the block, in place of those in the block, which send parts of it."""
        return nullcontext()

    def combined(self, lease: Lease, rows: Tensor) -> None:
        """Hear of the rows that a combine brings back."""

    def totals(self) -> Mapping[str, Mapping[str, int]]:
        """Return what it adds to ``Metrics``: for each field, numbers by name of the dispatcher. May be a host sync."""
        return {}


def observe_groups(config: DispatcherConfig, groups: Iterable[dist.ProcessGroup], name: str) -> dict[str, float]:
    """Attach what the config asks for to the groups of the dispatcher ``name``.

    Returns:
        What must be equal on all ranks, by field of the config.

    Raises:
        ConfigError: An observer cannot be attached.
    """
    if "torch.distributed.pipelining.stage" in sys.modules and has_code("moe_dispatch.capabilities.pipelining"):
        import_module("moe_dispatch.capabilities.pipelining.stages")
    if config.watchdog is None:
        return {}
    watchdog = load_plug_in("moe_dispatch.capabilities.observers.watchdog", "watchdog needs it. Leave that out")
    watchdog.watch_groups(config.watchdog, groups, name)
    return {"watchdog": config.watchdog}


def tell_started(channel: Channel, lease: Lease, x: Tensor, routing: Routing, layout: Layout) -> None:
    """Tell the observers of a channel about a dispatch. If its routing was replayed, one that counts is attached."""
    if routing.drift is not None:
        drift = load_plug_in("moe_dispatch.capabilities.replay.drift", "Routing.drift needs it. Leave that out")
        _attach(channel, drift.DriftObserver)
    for observer in channel.observers:
        observer.started(lease, x, routing, layout)


_plain: weakref.WeakKeyDictionary[Lease, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()


def is_plain(lease: Lease) -> bool:
    """Whether FullyShardedDataParallel was found to have no parameter of the experts, and has taken none since."""
    used = [reference() for reference in _plain.get(lease, ())]
    return lease in _plain and all(one is not None and not hasattr(one, "_fsdp_flattened") for one in used)


def may_be_wrapped(lease: Lease, rows: Tensor) -> bool:
    """Whether torch may have wrapped the model: in the forward of DistributedDataParallel, and after fully_shard.

    FullyShardedDataParallel leaves no record. If it is loaded, the first rows of each dispatcher that have a graph show
    whether the experts are views of its flat parameters. It frees or marks the parameters that it takes later.
    """
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        return True
    if "torch.distributed.fsdp._flat_param" in sys.modules and rows.grad_fn is not None and not is_plain(lease):
        used = parameters_behind(rows)
        if any(hasattr(parameter, "_is_flat_param") for parameter in used):
            return True
        _plain[lease] = [weakref.ref(parameter) for parameter in used]
    return bool(getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None))


def parameters_behind(rows: Tensor) -> list[Tensor]:
    """Return the parameters that rows of experts were computed with."""
    seen, used, nodes = set[Any](), list[Tensor](), [rows.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or getattr(getattr(node, "_forward_cls", None), "is_dispatch", False):
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node of a leaf
        if variable is not None:
            used.append(variable)
        nodes.extend(following for following, _ in node.next_functions)
    return used


def tell_combined(channel: Channel, lease: Lease, rows: Tensor) -> None:
    """Tell the observers of a channel about a combine. If the model may be wrapped, one looks at the wrapper."""
    if may_be_wrapped(lease, rows) and has_code("moe_dispatch.capabilities.observers"):
        wrappers = import_module("moe_dispatch.capabilities.observers.wrappers")
        _attach(channel, wrappers.WrapperObserver)
    for observer in channel.observers:
        observer.combined(lease, rows)


def _attach(channel: Channel, kind: Callable[[Channel], Observer]) -> None:
    """Attach an observer to a channel, unless one of its class is attached."""
    if not any(type(observer) is kind for observer in channel.observers):
        channel.observers.append(kind(channel))
