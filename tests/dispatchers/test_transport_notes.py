"""What the error of a transport says without a watchdog: which exchange, on which layer, and how to learn more."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from moe_dispatch import Dispatcher, build_dispatcher
from moe_dispatch_testing import run_ranks
from tests.dispatchers.layer import caught, random_routing, random_rows, small_config

SHORT = datetime.timedelta(seconds=1)
Layers = tuple[Dispatcher, Dispatcher]


def forward(layer: Dispatcher) -> Any:
    sent = layer.dispatch(random_rows(4).requires_grad_(), random_routing(4))
    return layer.combine(sent.rows, sent).sum()


def skipped_layer(layers: Layers, rank: int) -> None:
    for layer in layers[: 2 - rank]:
        forward(layer)


def one_call_more(layers: Layers, rank: int) -> None:
    for layer in layers if rank else (*layers, layers[0]):
        forward(layer)


def missing_backward(layers: Layers, rank: int) -> None:
    y = forward(layers[1])
    if not rank:
        y.backward()


def missing_check(layers: Layers, rank: int) -> None:
    if not rank:
        layers[0].check()


CASES: dict[str, tuple[Callable[[Layers, int], None], str, str]] = {
    "skipped layer": (skipped_layer, r"counts|sizes|dispatch", "layers.1"),
    "one call more": (one_call_more, r"counts|sizes|dispatch", "layers.0"),
    "missing backward": (missing_backward, r"combine.backward", "layers.1"),
}


def notes_of(body: Callable[[Layers, int], None], **fields: Any) -> list[str]:
    """The error and the notes of rank 0, in which rank 1 does something else."""

    def run(group: dist.ProcessGroup) -> str:
        layers = build_dispatcher(small_config(**fields), group, name="layers.0"), None
        pair = layers[0], build_dispatcher(small_config(**fields), group, name="layers.1")
        error = caught(lambda: body(pair, group.rank()))
        return "" if error is None else "\n".join([str(error), *getattr(error, "__notes__", [])])

    return run_ranks(run, 2, timeout=SHORT)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
@pytest.mark.parametrize("case", CASES)
def test_a_time_out_names_the_exchange_and_the_way_to_the_rank(case: str, backend: str) -> None:
    body, label, layer = CASES[case]
    told = notes_of(body, backend=backend)[0]
    pattern = rf"moe_dispatch: the exchange '({label})' failed on rank 0 of 2, which has started \d+ of this kind\."
    assert re.search(pattern, told), told
    assert "Set MOE_DISPATCH_WATCHDOG=60 on every rank" in told
    assert "docs/troubleshooting.md" in told
    assert re.search(rf"In the dispatcher '{layer}'\.", told), told
    assert told.count("moe_dispatch: the exchange") == 1


def test_exchanges_outside_of_a_call_are_named_too() -> None:
    told = notes_of(missing_check, graph_safe=True, max_tokens_per_rank=4)[0]
    assert re.search(r"the exchange '\w+' failed on rank 0 of 2", told), told


def test_the_watchdog_replaces_the_note() -> None:
    told = notes_of(CASES["missing backward"][0], watchdog=1.0)[0]
    assert told.startswith("Watchdog: combine.backward of 'layers.1'")
    assert "moe_dispatch: the exchange" not in told
    assert "It is the first 'combine.backward' on this group: before it, a rank may compile" in told
