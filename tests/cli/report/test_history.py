"""What a report counts is what runs measure: rows and padding, bytes by rank pair, and what a capacity drops."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.layouts import Layout
from moe_dispatch_testing import count_collectives
from moe_dispatch_tools.report.history import (
    History,
    history_of,
    needed_factor,
    other_shares,
    overflows,
    recorded_share,
)
from moe_dispatch_tools.traces import Trace
from tests.dispatchers.layer import Group, on_ranks, random_rows, small_config

STEPS = 3
DATA = ("alltoall_base", "allgather_base", "reduce_scatter_base")


@dataclass
class Measured:
    """What one rank saw: bytes of every collective of data, by receiver, and the group's metrics."""

    nbytes: int = 0
    to_rank: Counter[int] = field(default_factory=Counter)
    metrics: Metrics | None = None


def routing(step: int, rank: int, config: DispatcherConfig) -> tuple[Tensor, Routing, Layout]:
    """Uneven in everything: ranks, experts, tokens; the last two rows are no tokens. Rank 1 has none in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 0 if (step, rank) == (1, 1) else 11 + 2 * step + 3 * rank
    popular = torch.arange(config.num_experts) / 3
    ids = (torch.randn(rows, config.num_experts, generator=generator) - popular).topk(config.top_k).indices
    ids[::4, 1] = -1
    ids[1::4, 1] = ids[1::4, 0]
    layout = Rows(num_real=max(rows - 2, 0))
    dtype = torch.float32 if config.wire_dtype is None else torch.bfloat16
    x = random_rows(rows, config.hidden_size, seed=rank, dtype=dtype)
    return x, Routing(ids, torch.rand(rows, config.top_k, generator=generator)), layout


def run(config: DispatcherConfig, path: Path, size: int) -> list[Measured]:
    """Dispatch, combine and their backwards, recorded and measured."""

    def body(group: Group) -> Measured:
        rank = 0 if group is None else group.rank()
        dispatcher, seen = build_dispatcher(config, group), Measured()
        with Trace.record(dispatcher, path):
            for step in range(STEPS):
                x, way, layout = routing(step, rank, config)
                way = Routing(way.topk_ids, way.topk_weights.requires_grad_())
                with count_collectives() as found:
                    sent = dispatcher.dispatch(x.requires_grad_(), way, layout)
                    dispatcher.combine(sent.rows, sent).sum().backward()
                seen.nbytes += sum(call.nbytes for call in found.calls if call.op in DATA)
        seen.metrics = dispatcher.metrics(gather=True)
        return seen

    return on_ranks(body, size)


@pytest.fixture
def to_ranks(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Bytes of ``alltoall``, by sender and receiver, as its collectives split them."""
    seen: Counter[tuple[int, int]] = Counter()
    plain = Communicator.all_to_all

    def counted(self: Communicator, out: Tensor, inp: Tensor, out_splits: Any, in_splits: Any, *, label: str) -> Any:
        width = inp.nbytes // max(len(inp), 1)
        for receiver, rows in enumerate(in_splits):
            if receiver != self.rank:
                seen[self.rank, receiver] += rows * width
        return plain(self, out, inp, out_splits, in_splits, label=label)

    monkeypatch.setattr(Communicator, "all_to_all", counted)
    return seen


EMULATED = {"name": "hybridep", "emulate": True}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 30}
CONFIGS: dict[str, DispatcherConfig] = {
    "alltoall": small_config(pad_multiple=4),
    "alltoall wide": small_config(num_experts=32, top_k=4, hidden_size=128, wire_dtype="float8_e4m3fn"),
    "alltoall exact": small_config({"name": "alltoall", "reduction": "exact"}, pad_multiple=16),
    "alltoall two levels": small_config({"name": "alltoall", "levels": 2}),
    "alltoall two levels exact": small_config({"name": "alltoall", "levels": 2, "reduction": "exact"}),
    "alltoall graph-safe": small_config(pad_multiple=4, **SAFE),
    "allgather": small_config("allgather", pad_multiple=4),
    "allgather static": small_config("allgather", row_counts="static", max_tokens_per_rank=30),
    "allgather graph-safe": small_config("allgather", **SAFE),
    "hybridep": small_config(EMULATED, hidden_size=512, pad_multiple=16, wire_dtype="bfloat16"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_and_bytes_are_those_measured(
    name: str, size: int, tmp_path: Path, to_ranks: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS[name]
    if "two levels" in name:  # ranks 0 and 1 are on one host, ranks 2 and 3 on another
        monkeypatch.setattr(socket, "gethostname", lambda: f"host{int(threading.current_thread().name[-1]) // 2}")
    measured = run(config, tmp_path / "run.safetensors", size)
    history = history_of(Trace.load(tmp_path / "run.safetensors"))
    share, metrics = recorded_share(history), measured[0].metrics
    assert metrics is not None
    assert torch.equal(history.loads.tokens_CE.sum(0), metrics.real_tokens_per_expert)
    assert torch.equal(history.loads.received_CP, history.loads.tokens_CE.view(STEPS, size, -1).sum(2))
    assert metrics.rows_padded == {"rank": share.rank_padding, "expert": share.expert_padding}
    assert metrics.rows_skipped == {"cut": int(history.cut_CP.sum()), "masked": int(history.masked_CP.sum())}
    if name == "hybridep":
        assert share.payload_only
        return
    assert share.sent == {label: metrics.bytes_sent[label] for label in share.sent}
    assert share.bytes_PP is not None
    assert share.bytes_PP.sum(1).tolist() == [rank.nbytes for rank in measured] != [0] * size
    if config.backend_name == "alltoall":
        found = [[float(to_ranks[source, target]) for target in range(size)] for source in range(size)]
        assert share.bytes_PP.tolist() == found


def test_another_backend_is_foretold(tmp_path: Path) -> None:
    """What allgather would make of a trace of alltoall is what it does make of it."""
    run(small_config(pad_multiple=4), tmp_path / "a.safetensors", 2)
    foretold = {share.name: share for share in other_shares(history_of(Trace.load(tmp_path / "a.safetensors")))}
    assert set(foretold) == {"allgather", "deepep", "hybridep", "local"}
    assert "ep_size must be one of 1, got 2" in foretold["local"].refused
    run(small_config("allgather", pad_multiple=4), tmp_path / "b.safetensors", 2)
    done = recorded_share(history_of(Trace.load(tmp_path / "b.safetensors")))
    told = foretold["allgather"]
    assert (told.rank_padding, told.expert_padding, told.sent) == (done.rank_padding, done.expert_padding, done.sent)
    assert done.rank_padding > 0 < done.expert_padding


def test_overflow_is_what_graph_safe_runs_drop(tmp_path: Path) -> None:
    run(small_config(), tmp_path / "run.safetensors", 2)
    history = history_of(Trace.load(tmp_path / "run.safetensors"))
    most, rows = history.trace.max_rows, int(history.loads.received_CP.sum())
    enough = needed_factor(history)
    factors = [0.3, 0.5, 0.7, 1.0, enough]
    foretold = overflows(history, [*factors, "worst"])
    assert [found.steps for found in foretold[-2:]] == [found.dropped for found in foretold[-2:]] == [0, 0]
    assert len({found.dropped for found in foretold}) >= 4, "the factors tell cases apart"
    for factor, found in zip(factors, foretold, strict=False):
        dropped = dropped_rows(factor, most, history)
        assert found.dropped == pytest.approx(sum(dropped) / rows)
        assert found.steps == sum(count > 0 for count in dropped) / STEPS


def dropped_rows(factor: float, most: int, history: History) -> list[int]:
    """Of both ranks, by step, in a run with this capacity."""
    config = small_config(graph_safe=True, max_tokens_per_rank=most, capacity_factor=factor, on_overflow="drop")

    def body(group: Group) -> list[int]:
        assert group is not None
        dispatcher = build_dispatcher(config, group)
        return [
            int(dispatcher.dispatch(*routing(step, group.rank(), config)).real_tokens_per_expert.sum())
            for step in range(STEPS)
        ]

    arrived = on_ranks(body, 2)
    return [int(history.loads.received_CP[step].sum()) - sum(of[step] for of in arrived) for step in range(STEPS)]


def test_imbalance(tmp_path: Path) -> None:
    run(small_config(), tmp_path / "run.safetensors", 2)
    history = history_of(Trace.load(tmp_path / "run.safetensors"))
    tokens = history.loads.tokens_CE[0].double()
    assert float(history.timeline.imbalance_C[0]) == pytest.approx(float(tokens.max() / tokens.mean()))
    ranks = tokens.view(2, -1).sum(1)
    assert float(history.timeline.rank_imbalance_C[0]) == pytest.approx(float(ranks.max() / ranks.mean()))
    assert history.timeline.imbalance_C.min() > history.timeline.rank_imbalance_C.max() > 1


def test_padding_of_experts_for_other_multiples(tmp_path: Path) -> None:
    run(small_config(), tmp_path / "run.safetensors", 2)
    history = history_of(Trace.load(tmp_path / "run.safetensors"))
    tokens = history.loads.tokens_CE.flatten().tolist()
    assert int(history.loads.expert_padding_CP(1).sum()) == 0
    assert int(history.loads.expert_padding_CP(8).sum()) == sum(-count % 8 for count in tokens) > 0
