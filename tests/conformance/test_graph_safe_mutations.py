"""Bugs planted in graph-safe code: a graph-safe scenario must fail for each, with the error named here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends.alltoall import fixed
from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.alltoall.fixed import FixedAllToAll
from moe_dispatch.backends.base import Arrived
from moe_dispatch.backends.rank_major import RankMajorRoute
from moe_dispatch.permutation import Permutation, SlotIndex, TorchPermutation, group_statically, merge_slots
from moe_dispatch_testing import ConformanceError, HostSyncError
from tests.conformance.test_mutations import (
    Patch,
    around,
    arriving,
    counts_without_padding,
    duplicates_not_merged,
    padding_not_cleared,
    run_scenario,
)


def _indexing(patch: Patch, change: Callable[[SlotIndex], dict[str, Any]]) -> None:
    def changed(*args: Any, **options: Any) -> SlotIndex:
        index = group_statically(*args, **options)
        return dataclasses.replace(index, **change(index))

    patch.setattr(Permutation, "group_statically", staticmethod(changed))


def slack_of_outputs_read(patch: Patch) -> None:
    def reading(
        reduce: Any, permutation: Any, rows_RD: Tensor, index: Any, weights_R: Any, out: Tensor, *values: Any
    ) -> None:
        reduce(permutation, rows_RD, index, weights_R, out, *values)
        if weights_R is not None:  # combine, not the gradients that dispatch receives
            out.add_(0 * rows_RD[-1])

    around(patch, "reduce", reading, TorchPermutation)


def slack_of_gradients_read(patch: Patch) -> None:
    def reading(backward: Any, route: Any, grad_RD: Tensor, grad_R: Tensor | None) -> Any:
        return backward(route, grad_RD + 0 * grad_RD[-1], grad_R)

    around(patch, "dispatch_backward", reading, RankMajorRoute)


def slack_of_gradients_of_weights_read(patch: Patch) -> None:
    around(patch, "to_slots", lambda plain, index, values_R: plain(index, values_R) + 0 * values_R[-1], SlotIndex)


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

    def unmarked(send_table: Any, *args: Any, **named: Any) -> Any:
        table = send_table(*args, **named)
        return table._replace(source_B=table.source_B.clamp(min=0))

    around(patch, "send_table", unmarked, fixed)


def overflow_told_where_there_is_none(patch: Patch) -> None:
    arriving(patch, lambda arrived: {"demand": torch.full((2,), 1 << 20)})


# Host syncs. Megatron-LM #4071 reports one like the first.


def padded_on_the_host(patch: Patch) -> None:
    def again(arrived: Arrived) -> dict[str, Any]:
        counts = arrived.tokens_per_expert.tolist()
        assert isinstance(arrived.rows, Tensor)
        parts = arrived.rows.split([*counts, len(arrived.rows) - sum(counts)])
        return {"rows": torch.cat([torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 16)) for part in parts])}

    arriving(patch, again)


def padded_on_the_host_in_the_backward(patch: Patch) -> None:
    def reading(backward: Any, route: RankMajorRoute, *args: Any) -> Any:
        assert route.index.padded_L is not None
        int(route.index.padded_L.sum())
        return backward(route, *args)

    around(patch, "combine_backward", reading, RankMajorRoute)


def looks_for_duplicates(patch: Patch) -> None:
    asking = staticmethod(lambda ids_TK, weights_TK, **_: merge_slots(ids_TK, weights_TK, asks=True))
    patch.setattr(Permutation, "merge_slots", asking)


def slack_cut_off(patch: Patch) -> None:
    """Return only the real rows, so that the shape depends on the routing."""

    def cut(arrived: Arrived) -> dict[str, Any]:
        assert isinstance(arrived.rows, Tensor)
        return {"rows": arrived.rows[arrived.rows.detach().ne(0).any(1)]}

    arriving(patch, cut)


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
    plant(monkeypatch)
    with pytest.raises(kind, match=text):
        run_scenario(backend, f"{name}_graph_safe")
