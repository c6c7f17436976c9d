"""The strict backend refuses input that breaks its constraints, and the dispatcher never passes such input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends import Arrived, Backend, BackendContext, MoEShape, Sizes
from moe_dispatch.communication import Communicator
from moe_dispatch.errors import ConfigError, InputError
from moe_dispatch_testing.strict import StrictError, StrictOptions
from tests.ranks import run_ranks


def strict(group: dist.ProcessGroup | None, hidden: int = 32) -> Backend:
    ep_size = 1 if group is None else group.size()
    shape = MoEShape(num_experts=4, top_k=2, hidden_size=hidden, ep_size=ep_size, pad_multiple=1)
    return StrictOptions(max_rows=128).open(BackendContext(shape=shape, communicator=Communicator(group)))


def send(backend: Backend, rows: int, *, hidden: int = 32, ids: Any = None, agreed: int | None = None) -> Arrived:
    ids = torch.arange(2).repeat(rows, 1) if ids is None else ids
    return backend.dispatch(torch.ones(rows, hidden), ids, torch.ones(rows, 2), Sizes(padded_rows=agreed or rows))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 63}, "rows must be a multiple of 64, at most 128, got 63"),
        ({"rows": 192}, "rows must be a multiple of 64, at most 128, got 192"),
        ({"rows": 64, "hidden": 40}, "hidden must be a multiple of 16, got 40"),
        ({"rows": 64, "ids": torch.zeros(64, 2, dtype=torch.int64)}, "no row may name an expert twice"),
        ({"rows": 64, "ids": torch.zeros(63, 2, dtype=torch.int64)}, "ids and weights must have 64 rows, got 63"),
        ({"rows": 64, "agreed": 128}, "number of rows must be 128, as all ranks agreed, got 64"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictError, match=message):
        send(strict(None), **arguments)


def test_refuses_rows_in_strided_memory() -> None:
    route = send(strict(None), 64).route
    with pytest.raises(StrictError, match="must be contiguous"):
        route.send(torch.ones(32, 64).t())


def test_every_rank_refuses_unequal_rows() -> None:
    def body(group: dist.ProcessGroup) -> str:
        with pytest.raises(StrictError) as caught:
            send(strict(group), 64 * (1 + group.rank()))
        return str(caught.value)

    assert run_ranks(body, 2) == ["strict: rows must be equal on all ranks, got 64 to 128"] * 2


def config(**changes: Any) -> DispatcherConfig:
    fields: dict[str, Any] = {"backend": "strict", "num_experts": 4, "top_k": 2, "hidden_size": 32}
    return DispatcherConfig(**{**fields, **changes})


def test_a_hidden_size_that_does_not_fit_is_refused_when_built() -> None:
    with pytest.raises(ConfigError, match="hidden_size must be a multiple of 16, got 40"):
        build_dispatcher(config(hidden_size=40))


def test_too_many_rows_are_refused_by_the_dispatcher() -> None:
    dispatcher = build_dispatcher(config())
    ids = torch.arange(2).repeat(257, 1)
    with pytest.raises(InputError, match="at most 256 rows per rank"):
        dispatcher.dispatch(torch.ones(257, 32), Routing(ids, torch.ones(257, 2)))


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 256])
def test_any_count_becomes_a_multiple(tokens: int) -> None:
    dispatcher = build_dispatcher(config())
    x, ids = torch.randn(tokens, 32), torch.arange(2).repeat(tokens, 1)
    sent = dispatcher.dispatch(x, Routing(ids, torch.full((tokens, 2), 0.5)))
    torch.testing.assert_close(dispatcher.combine(sent.rows, sent), x)
    assert dispatcher.metrics().rows_padded["rank"] == -tokens % 64
