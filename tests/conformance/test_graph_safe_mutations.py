"""Bugs planted in graph-safe code: a graph-safe scenario must fail for each, with the error named here."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends.alltoall import fixed
from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.alltoall.fixed import FixedAllToAll, SendTable
from moe_dispatch.backends.base import Arrived
from moe_dispatch.backends.rank_major import RankMajorRoute
from moe_dispatch.permutation import Permutation, SlotIndex, TorchPermutation, group_statically, merge_slots
from moe_dispatch_testing import SCENARIOS, ConformanceError, HostSyncError, Ranks
from moe_dispatch_testing.kit import fitted, scenario_cases
from tests.conformance.test_mutations import (
    Patch,
    arriving,
    counts_without_padding,
    duplicates_not_merged,
    padding_not_cleared,
    run_all,
)


def _indexing(patch: Patch, change: Callable[[SlotIndex], dict[str, Any]]) -> None:
    def changed(*args: Any, **options: Any) -> SlotIndex:
        index = group_statically(*args, **options)
        return dataclasses.replace(index, **change(index))

    patch.setattr(Permutation, "group_statically", staticmethod(changed))


def slack_of_outputs_read(patch: Patch) -> None:
    original = TorchPermutation.reduce

    def reading(
        self: TorchPermutation, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor
    ) -> None:
        original(self, rows_RD, index, weights_R, out)
        if weights_R is not None:  # combine, not the gradients that dispatch receives
            out.add_(0 * rows_RD[-1])

    patch.setattr(TorchPermutation, "reduce", reading)


def slack_of_gradients_read(patch: Patch) -> None:
    backward = RankMajorRoute.dispatch_backward

    def reading(route: RankMajorRoute, grad_RD: Tensor, grad_R: Tensor | None) -> Any:
        return backward(route, grad_RD + 0 * grad_RD[-1], grad_R)

    patch.setattr(RankMajorRoute, "dispatch_backward", reading)


def slack_of_gradients_of_weights_read(patch: Patch) -> None:
    to_slots = SlotIndex.to_slots
    patch.setattr(SlotIndex, "to_slots", lambda index, values_R: to_slots(index, values_R) + 0 * values_R[-1])


def place_off_by_one(patch: Patch) -> None:
    def later(index: SlotIndex) -> dict[str, Any]:
        assert index.position_N is not None
        return {"position_N": (index.position_N + 1).clamp(max=index.num_grouped)}

    _indexing(patch, later)


def source_off_by_one(patch: Patch) -> None:
    _indexing(patch, lambda index: {"source_R": index.source_R.roll(1)})


def real_counts_with_padding(patch: Patch) -> None:
    _indexing(patch, lambda index: {"real_L": index.padded_L})


def padding_forgotten(patch: Patch) -> None:
    _indexing(patch, lambda index: {"padding": None})


def empty_places_sent(patch: Patch) -> None:
    """Empty places of the send buffer keep the ids of row 0."""
    send_table = fixed.send_table

    def unmarked(*args: Any, **named: Any) -> SendTable:
        table = send_table(*args, **named)
        return dataclasses.replace(table, is_empty_S=torch.zeros_like(table.is_empty_S))

    patch.setattr(fixed, "send_table", unmarked)


def overflow_told_where_there_is_none(patch: Patch) -> None:
    arriving(patch, lambda arrived: {"demand": torch.full((2,), 1 << 20)})


# Host syncs. Megatron-LM #4071 reports one like the first.


def padded_on_the_host(patch: Patch) -> None:
    def again(arrived: Arrived) -> dict[str, Any]:
        counts = arrived.tokens_per_expert.tolist()
        parts = arrived.rows.split([*counts, len(arrived.rows) - sum(counts)])
        return {"rows": torch.cat([torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 16)) for part in parts])}

    arriving(patch, again)


def padded_on_the_host_in_the_backward(patch: Patch) -> None:
    backward = RankMajorRoute.combine_backward

    def reading(route: RankMajorRoute, *args: Any) -> Any:
        assert route.index.padded_L is not None
        int(route.index.padded_L.sum())
        return backward(route, *args)

    patch.setattr(RankMajorRoute, "combine_backward", reading)


def looks_for_duplicates(patch: Patch) -> None:
    def asks(ids_TK: Tensor, weights_TK: Tensor, **_: bool) -> tuple[Tensor, Tensor]:
        return merge_slots(ids_TK, weights_TK, asks=True)

    patch.setattr(Permutation, "merge_slots", staticmethod(asks))


def slack_cut_off(patch: Patch) -> None:
    """Return only the real rows, so that the shape depends on the routing."""
    arriving(patch, lambda arrived: {"rows": arrived.rows[arrived.rows.detach().ne(0).any(1)]})


def eager_dispatch(patch: Patch) -> None:
    """Run the eager dispatch, which reads counts, instead of the graph-safe one."""
    patch.setattr(FixedAllToAll, "start", lambda self, *args: AllToAll(self.context).start(*args))


WRONG, SYNC = ConformanceError, HostSyncError

# The bug, the backend it is planted in, the scenario that must fail, and the type and text of its error.
MUTATIONS: list[tuple[Callable[[Patch], None], str, str, type[Exception], str]] = [
    *((slack_of_outputs_read, name, "balanced", WRONG, "^y: entry") for name in ("local", "allgather", "alltoall")),
    *((slack_of_gradients_read, name, "balanced", WRONG, "gradient of x: ") for name in ("local", "allgather")),
    (slack_of_gradients_read, "alltoall", "balanced", WRONG, "gradient of x: "),
    (slack_of_gradients_of_weights_read, "alltoall", "float32_experts", WRONG, "gradient of topk_weights: "),
    (counts_without_padding, "alltoall", "pad_16", WRONG, "tokens_per_expert: expected"),
    (padding_not_cleared, "alltoall", "pad_16", WRONG, "^rows: entry .* must be 0 within 0"),
    (padding_not_cleared, "local", "pad_16_unpoisoned", WRONG, "^rows: entry .* must be 0 within 0"),
    (padding_forgotten, "allgather", "pad_16", WRONG, "^rows: entry .* must be 0 within 0"),
    (real_counts_with_padding, "alltoall", "pad_16", WRONG, "real_tokens_per_expert: expected"),
    (place_off_by_one, "alltoall", "balanced", WRONG, "^weights: entry"),
    (place_off_by_one, "local", "pad_16", WRONG, "^weights: entry"),
    (source_off_by_one, "allgather", "balanced", WRONG, "^rows: entry"),
    (empty_places_sent, "alltoall", "balanced", WRONG, "real_tokens_per_expert: expected"),
    (duplicates_not_merged, "alltoall", "duplicates", WRONG, "real_tokens_per_expert: expected"),
    (overflow_told_where_there_is_none, "alltoall", "balanced", WRONG, "overflow of the worst case"),
    (padded_on_the_host, "alltoall", "pad_16", SYNC, r"tolist at .*test_graph_safe_mutations.py"),
    (padded_on_the_host_in_the_backward, "alltoall", "pad_16", SYNC, r"__int__ at .*test_graph_safe_mutations.py"),
    (looks_for_duplicates, "alltoall", "balanced", SYNC, r"__int__ at .*index.py"),
    (slack_cut_off, "alltoall", "balanced", SYNC, r"aten::index.Tensor at .*test_graph_safe_mutations.py"),
    (eager_dispatch, "alltoall", "balanced", SYNC, r"aten::bincount at .*index.py"),
]


def _named(value: Any) -> str | None:
    return value.__name__ if callable(value) and not isinstance(value, type) else None


@pytest.mark.parametrize(("plant", "backend", "name", "kind", "text"), MUTATIONS, ids=_named)
def test_kit_sees(
    plant: Callable[[Patch], None], backend: str, name: str, kind: type[Exception], text: str, monkeypatch: Patch
) -> None:
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == f"{name}_graph_safe")
    ep_size = 1 if backend == "local" else 2
    plant(monkeypatch)
    with pytest.raises(kind, match=text):
        run_all(
            backend,
            scenario_cases(fitted(backend, scenario, ep_size), ep_size),
            Ranks(timeout=datetime.timedelta(seconds=1)),
        )
