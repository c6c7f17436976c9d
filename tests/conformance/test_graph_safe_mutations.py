"""Bugs planted in the paths of fixed size: the axis ``graph_safe`` must see each, and for the right reason."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends import base, rank_major
from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.alltoall.fixed import Lanes
from moe_dispatch.backends.base import Arrived
from moe_dispatch.dispatchers import eager
from moe_dispatch.dispatchers.rows import merge_duplicates
from moe_dispatch.permutation import StaticIndex, StaticTorchPermutation, group_statically
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.testing import SCENARIOS, ConformanceError, HostSyncError, Ranks
from moe_dispatch.testing.kit import fitted, scenario_cases
from tests.conformance.test_mutations import Patch, arriving, counts_without_padding, padding_not_cleared, run_all


def _indexing(patch: Patch, change: Callable[[StaticIndex], dict[str, Any]]) -> None:
    def changed(*args: Any, **options: Any) -> StaticIndex:
        index = group_statically(*args, **options)
        return dataclasses.replace(index, **change(index))

    patch.setattr(base, "group_statically", changed)


def slack_of_outputs_read(patch: Patch) -> None:
    original = StaticTorchPermutation.reduce

    def reading(rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        original(rows_RD, index, weights_R, out)
        if weights_R is not None:  # combine, not the gradients that dispatch receives
            out.add_(0 * rows_RD[-1])

    patch.setattr(StaticTorchPermutation, "reduce", staticmethod(reading))


def slack_of_gradients_read(patch: Patch) -> None:
    backward = rank_major._Dispatch.backward

    def reading(ctx: Any, grad_rows_RD: Tensor, grad_weights_R: Tensor) -> Any:
        return backward(ctx, grad_rows_RD + 0 * grad_rows_RD[-1], grad_weights_R)

    patch.setattr(rank_major._Dispatch, "backward", staticmethod(reading))


def slack_of_gradients_of_weights_read(patch: Patch) -> None:
    to_slots = StaticIndex.to_slots
    patch.setattr(StaticIndex, "to_slots", lambda index, values_R: to_slots(index, values_R) + 0 * values_R[-1])


def place_off_by_one(patch: Patch) -> None:
    def later(index: StaticIndex) -> dict[str, Any]:
        assert index.place_N is not None
        return {"place_N": (index.place_N + 1).clamp(max=index.num_grouped)}

    _indexing(patch, later)


def source_off_by_one(patch: Patch) -> None:
    _indexing(patch, lambda index: {"source_R": index.source_R.roll(1)})


def real_counts_with_padding(patch: Patch) -> None:
    _indexing(patch, lambda index: {"real_L": index.padded_L})


def padding_forgotten(patch: Patch) -> None:
    _indexing(patch, lambda index: {"padding": None})


def unused_places_sent(patch: Patch) -> None:
    """Places of ``alltoall`` that no row took keep the ids of row 0."""
    fill = Lanes.fill

    def unmarked(self: Lanes, *args: Any) -> None:
        fill(dataclasses.replace(self, is_used_S=torch.ones_like(self.is_used_S)), *args)

    patch.setattr(Lanes, "fill", unmarked)


def duplicates_not_merged(patch: Patch) -> None:
    patch.setattr(eager, "merge_duplicates", lambda ids_TK, weights_TK, **_: (ids_TK, weights_TK))


def overflow_told_where_there_is_none(patch: Patch) -> None:
    arriving(patch, lambda arrived: {"demand": torch.full((2,), 1 << 20)})


# What Megatron-LM #4071 is about, and other ways to the host.


def padded_on_the_host(patch: Patch) -> None:
    def again(arrived: Arrived) -> dict[str, Any]:
        counts = arrived.tokens_per_expert.tolist()
        parts = arrived.rows.split([*counts, len(arrived.rows) - sum(counts)])
        return {"rows": torch.cat([torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 16)) for part in parts])}

    arriving(patch, again)


def padded_on_the_host_in_the_backward(patch: Patch) -> None:
    backward = rank_major._Combine.backward

    def reading(ctx: Any, grad_TD: Tensor) -> Any:
        int(ctx.route.index.padded_L.sum())
        return backward(ctx, grad_TD)

    patch.setattr(rank_major._Combine, "backward", staticmethod(reading))


def looks_for_duplicates(patch: Patch) -> None:
    patch.setattr(eager, "merge_duplicates", lambda ids_TK, weights_TK, **_: merge_duplicates(ids_TK, weights_TK))


def slack_cut_off(patch: Patch) -> None:
    """Rows as many as the routing says: a shape that depends on data."""
    arriving(patch, lambda arrived: {"rows": arrived.rows[arrived.rows.detach().ne(0).any(1)]})


def eager_dispatch(patch: Patch) -> None:
    """The static path is not taken at all."""
    dispatch = AllToAll.dispatch_async

    def eager(self: AllToAll, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Any) -> Any:
        return dispatch(self, rows_TD, ids_TK, weights_TK, dataclasses.replace(sizes, capacity=None))

    patch.setattr(AllToAll, "dispatch_async", eager)


WRONG, SYNC = ConformanceError, HostSyncError

# The bug, the backend it is planted in, the scenario that must see it, and what is said.
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
    (unused_places_sent, "alltoall", "balanced", WRONG, "real_tokens_per_expert: expected"),
    (duplicates_not_merged, "alltoall", "duplicates", WRONG, "real_tokens_per_expert: expected"),
    (overflow_told_where_there_is_none, "alltoall", "balanced", WRONG, "overflow of the worst case"),
    (padded_on_the_host, "alltoall", "pad_16", SYNC, r"tolist at .*test_graph_safe_mutations.py"),
    (padded_on_the_host_in_the_backward, "alltoall", "pad_16", SYNC, r"__int__ at .*test_graph_safe_mutations.py"),
    (looks_for_duplicates, "alltoall", "balanced", SYNC, r"__int__ at .*rows.py"),
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
