"""``now - before``: what was counted between two reads of the metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.dispatchers import Metrics
from moe_dispatch.errors import InputError
from tests.dispatchers.layer import small_config
from tests.ranks import run_ranks


def read_twice(group: Any, **fields: Any) -> tuple[Metrics, Metrics, Metrics, Metrics]:
    """Reads after an uneven and after an even step: first, second, their difference, and of a dispatcher of its own."""
    config = small_config(pad_multiple=4, **fields)
    uneven, even = torch.zeros(8, 2, dtype=torch.int64), torch.arange(16).view(8, 2) % config.num_experts
    uneven[:, 1] = 1
    reads = []
    for steps in ((uneven, even), (even,)):
        dispatcher = build_dispatcher(config, group, name="layers.0")
        for ids in steps:
            x = torch.ones(8, config.hidden_size)
            sent = dispatcher.dispatch(x, Routing(ids, torch.ones(8, 2)))
            dispatcher.combine(sent.rows, sent)
            reads.append(dispatcher.metrics(gather=True))
        dispatcher.close()
    first, second, alone = reads
    return first, second, second - first, alone


@pytest.mark.parametrize("size", [1, 2])
def test_difference_of_two_reads_is_the_read_of_the_step(size: int) -> None:
    def rank(group: Any) -> Any:
        return read_twice(group, backend="alltoall")

    for first, second, step, alone in run_ranks(rank, size):
        assert first.imbalance > 2
        assert second.imbalance > 1.1
        assert step.imbalance == alone.imbalance == 1.0
        assert step.rank_imbalance == alone.rank_imbalance == 1.0
        for field in ("real_tokens_per_expert", "real_tokens_per_rank"):
            assert torch.equal(getattr(step, field), getattr(alone, field))
        assert torch.equal(step.tokens_by_layer["layers.0"], alone.tokens_by_layer["layers.0"])
        for field in ("dispatches", "rows_padded", "rows_skipped", "expert_copies"):
            assert getattr(step, field) == getattr(alone, field), field
        for name in step.bytes_sent.keys() - {"build", "metrics"}:
            assert step.bytes_sent[name] == alone.bytes_sent[name], name


def test_reads_that_do_not_fit_are_refused() -> None:
    dispatcher = build_dispatcher(small_config())
    before = dispatcher.metrics()
    x = torch.ones(2, dispatcher.config.hidden_size)
    dispatcher.dispatch(x, Routing(torch.tensor([[0, 1]] * 2), torch.ones(2, 2)))
    assert (dispatcher.metrics(gather=True) - before).rank_imbalance is None, "alike on one rank"
    with pytest.raises(InputError, match=r"subtract an earlier read .*, got 1 dispatches to subtract from 0\."):
        _ = before - dispatcher.metrics()

    def rank(group: Any) -> None:
        several = build_dispatcher(small_config(backend="alltoall"), group)
        with pytest.raises(InputError, match=r"Metrics: both must be read with gather=True, or both without"):
            _ = several.metrics(gather=True) - several.metrics()

    run_ranks(rank, 2)
