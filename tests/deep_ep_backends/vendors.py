"""What the tests of the vendor backends share: their releases, a small config, rows out and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends.deep_ep.buffers import LibraryBackend
from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.dispatchers.layer import Group, on_ranks, random_routing, rank_of

Result = TypeVar("Result")

V1: dict[str, Any] = {"name": "deepep", "emulate": "v1.2.1"}
V2: dict[str, Any] = {"name": "deepep", "emulate": "v2-2.1.0"}
V25: dict[str, Any] = {"name": "deepep", "emulate": "v2.5.0"}
HYBRID: dict[str, Any] = {"name": "hybridep", "emulate": "hybridep-94a9f8f"}
RAGGED: dict[str, Any] = {"name": "hybridep", "emulate": "hybridep-744"}
ALL = [V1, V2, V25, HYBRID, RAGGED]
names = [backend["emulate"] for backend in ALL]


def buffer_class(backend: dict[str, Any]) -> Any:
    """The class of the emulated library that the backend calls."""
    module = emulated_deep_ep(backend["emulate"])
    found = (getattr(module, name, None) for name in ("HybridEPBuffer", "EPBuffer", "ElasticBuffer", "Buffer"))
    return next(cls for cls in found if cls is not None)


def config(backend: dict[str, Any], **fields: Any) -> DispatcherConfig:
    sizes: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "wire": "bfloat16"}
    return DispatcherConfig(backend=backend, **{**sizes, **fields})


def identity(dispatcher: Dispatcher, rows: int) -> None:
    """Rows out and back; numbers that bfloat16 holds exactly."""
    routing = random_routing(rows)
    x = torch.arange(rows * 256).view(rows, 256).remainder(64).float()
    sent = dispatcher.dispatch(x, Routing(routing.topk_ids, torch.ones(rows, 2)))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), 2 * x)


def backend_of(dispatcher: Dispatcher) -> LibraryBackend:
    backend = dispatcher._channel.backend
    assert isinstance(backend, LibraryBackend)
    return backend


def on_dispatchers(body: Callable[[Dispatcher, int], Result], config: DispatcherConfig, size: int = 2) -> list[Result]:
    """What ``body`` returned for a dispatcher and its rank, by rank. The dispatchers are closed afterwards."""

    def on_rank(group: Group) -> Result:
        dispatcher = build_dispatcher(config, group)
        result = body(dispatcher, rank_of(group))
        dispatcher.close()
        return result

    return on_ranks(on_rank, size)


def identity_and_close(dispatcher: Dispatcher) -> None:
    identity(dispatcher, 3)
    dispatcher.close()
