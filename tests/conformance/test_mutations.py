"""Bugs planted one at a time: the kit must see each of them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends import rank_major
from moe_dispatch.backends.alltoall import backend as alltoall
from moe_dispatch.backends.alltoall.backend import AllToAll
from moe_dispatch.backends.base import Arrived
from moe_dispatch.backends.deep_ep import hybridep
from moe_dispatch.backends.deep_ep.deepep import DeepEP
from moe_dispatch.backends.deep_ep.hybrid import HybridTransport
from moe_dispatch.backends.deep_ep.hybridep import HybridEP, HybridState
from moe_dispatch.backends.deep_ep.normal import NormalTransport
from moe_dispatch.backends.deep_ep.transport import Way
from moe_dispatch.dispatchers import eager
from moe_dispatch.dispatchers.rows import Home, merge_duplicates, pad_rows
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import group_slots, reduce, sum_bags
from moe_dispatch.permutation import rows as permutation_rows
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch.testing import SCENARIOS, Case, Ranks, run_case
from moe_dispatch.testing.case import BackendSpec
from moe_dispatch.testing.kit import describe, fitted, scenario_cases

Patch = pytest.MonkeyPatch


def padding_trimmed_from_the_front(patch: Patch) -> None:
    restore = Home.restore

    def from_the_end(home: Home, rows_TD: Tensor) -> Tensor:
        return restore(home, rows_TD[len(rows_TD) - home.count :])

    patch.setattr(Home, "restore", from_the_end)


def padding_rows_sent_to_expert_0(patch: Patch) -> None:
    patch.setattr(eager, "pad_rows", lambda tensor, rows, value: pad_rows(tensor, rows, max(value, 0)))


def weights_applied_twice(patch: Patch) -> None:
    combine = AllToAll.combine

    def twice(self: AllToAll, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return combine(self, rows_RD * weights_R.unsqueeze(1), weights_R, state, weighted=weighted)

    patch.setattr(AllToAll, "combine", twice)


def weights_not_applied(patch: Patch) -> None:
    combine = AllToAll.combine

    def unweighted(self: AllToAll, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return combine(self, rows_RD, weights_R, state, weighted=False)

    patch.setattr(AllToAll, "combine", unweighted)


def weights_rounded_to_bfloat16(patch: Patch) -> None:
    def rounded(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = merge_duplicates(ids_TK, weights_TK, asks=asks)
        return ids_TK, weights_TK.bfloat16().to(weights_TK.dtype)

    patch.setattr(eager, "merge_duplicates", rounded)


def gradient_of_weights_dropped(patch: Patch) -> None:
    def detached(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool) -> tuple[Tensor, Tensor]:
        return merge_duplicates(ids_TK, weights_TK.detach(), asks=asks)

    patch.setattr(eager, "merge_duplicates", detached)


def duplicates_not_merged(patch: Patch) -> None:
    patch.setattr(eager, "merge_duplicates", lambda ids_TK, weights_TK, **_: (ids_TK, weights_TK))


def experts_in_reverse_order(patch: Patch) -> None:
    def reverse(keys_SK: Tensor, counts: Sequence[int], pad_multiple: int = 1) -> SlotIndex:
        last = len(counts) - 1
        keys_SK = torch.where((keys_SK >= 0) & (keys_SK <= last), last - keys_SK, keys_SK)
        return group_slots(keys_SK, counts[::-1], pad_multiple)

    patch.setattr(alltoall, "group_slots", reverse)


def arriving(patch: Patch, change: Callable[[Arrived], dict[str, Any]]) -> None:
    dispatch = AllToAll.dispatch_async

    def changed(self: AllToAll, *args: Any) -> Callable[[], Arrived]:
        finish = dispatch(self, *args)

        def complete() -> Arrived:
            arrived = finish()
            return dataclasses.replace(arrived, **change(arrived))

        return complete

    patch.setattr(AllToAll, "dispatch_async", changed)


def rows_of_an_expert_in_reverse(patch: Patch) -> None:
    def reverse(arrived: Arrived) -> dict[str, Any]:
        parts = zip(
            arrived.rows.split(arrived.tokens_per_expert.tolist()), arrived.real_tokens_per_expert.tolist(), strict=True
        )
        return {"rows": torch.cat([torch.cat((part[:real].flip(0), part[real:])) for part, real in parts])}

    arriving(patch, reverse)


def counts_without_padding(patch: Patch) -> None:
    arriving(patch, lambda arrived: {"tokens_per_expert": arrived.real_tokens_per_expert})


def padding_not_cleared(patch: Patch) -> None:
    patch.setattr(permutation_rows, "_clear_padding", lambda out, index: out)


def gradients_of_padding_read(patch: Patch) -> None:
    to_slots = SlotIndex.to_slots
    patch.setattr(SlotIndex, "to_slots", lambda index, values_R: to_slots(index, values_R) + 0 * values_R.sum())


def outputs_of_padding_read(patch: Patch) -> None:
    def reading(rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor) -> None:
        reduce(rows_RD, index, weights_R, out)
        out.add_(0 * rows_RD.sum())

    patch.setattr(permutation_rows.TorchPermutation, "reduce", staticmethod(reading))


def state_kept_on_the_backend(patch: Patch) -> None:
    combine = AllToAll.combine
    latest: dict[int, Any] = {}
    arriving(patch, lambda arrived: latest.update({id(arrived.state.context): arrived.state}) or {})

    def with_latest(self: AllToAll, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        return combine(self, rows_RD, weights_R, latest[id(self.context)], weighted=weighted)

    patch.setattr(AllToAll, "combine", with_latest)


def state_of_the_latest_call_in_backward(patch: Patch) -> None:
    backward = rank_major._Combine.backward
    latest: dict[int, Any] = {}
    arriving(patch, lambda arrived: latest.update({id(arrived.state.context): arrived.state}) or {})

    def with_latest(ctx: Any, grad_TD: Tensor) -> Any:
        ctx.route = latest[id(ctx.route.context)]
        return backward(ctx, grad_TD)

    patch.setattr(rank_major._Combine, "backward", staticmethod(with_latest))


def buffer_shared_by_all_calls(patch: Patch) -> None:
    """What a workspace that hands out one buffer would do: rows of the first call change when the second arrives."""
    shared: dict[int, Tensor] = {}

    def share(arrived: Arrived) -> dict[str, Any]:
        earlier = shared.get(id(arrived.state.context))
        if earlier is not None:
            earlier.data.fill_(1)
        shared[id(arrived.state.context)] = arrived.rows
        return {}

    arriving(patch, share)


def rows_that_are_no_tokens_sent(patch: Patch) -> None:
    patch.setattr(Layout, "valid_T", lambda layout, num_rows, device=None: None)


def rows_that_are_no_tokens_not_zeroed(patch: Patch) -> None:
    patch.setattr(
        "moe_dispatch.dispatchers.rows._put", lambda rows, chosen, num_rows: _put_into_ones(rows, chosen, num_rows)
    )


def _put_into_ones(rows: Tensor, chosen: Tensor, num_rows: int) -> Tensor:
    return rows.new_ones(num_rows, *rows.shape[1:]).index_copy_(0, chosen, rows)


def weights_of_empty_slots_read(patch: Patch) -> None:
    def touching(rows_TD: Tensor, weights_TK: Tensor, *args: Any, **named: Any) -> Arrived:
        arrived = rank_major.arrive(rows_TD, weights_TK, *args, **named)
        return dataclasses.replace(arrived, weights=arrived.weights + 0 * weights_TK.sum())

    patch.setattr(alltoall, "arrive", touching)


def idle_rank_leaves_the_backward(patch: Patch) -> None:
    def untied(rows_RD: Tensor, weights_R: Tensor, route: Any, *, weighted: bool) -> Tensor:
        return rank_major.bring_home(rows_RD, weights_R.detach(), route, weighted=weighted)

    patch.setattr(alltoall, "bring_home", untied)


def verbs_without_anchor(patch: Patch) -> None:
    patch.setattr(eager, "anchor", lambda tensor, _: tensor)


def float32_sums_for_float64_rows(patch: Patch) -> None:
    def rounded(rows: Tensor, members_N: Tensor, cu_S: Tensor, weights_N: Tensor | None, out: Tensor) -> None:
        sum_bags(rows.float(), members_N, cu_S, weights_N, out)

    patch.setattr(permutation_rows, "sum_bags", rounded)


def weights_applied_twice_by_vendors(patch: Patch) -> None:
    for cls in (DeepEP, HybridEP):
        patch.setattr(cls, "combine", _combining_other_rows(cls.combine, lambda rows, weights: rows * weights))


def weights_not_applied_by_vendors(patch: Patch) -> None:
    for cls in (DeepEP, HybridEP):
        patch.setattr(cls, "combine", _combining_other_rows(cls.combine, lambda rows, weights: rows / weights))


def _combining_other_rows(combine: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def changed(self: Any, rows_RD: Tensor, weights_R: Tensor, state: Any, *, weighted: bool) -> Tensor:
        other_RD = change(rows_RD, weights_R.unsqueeze(1)).to(rows_RD.dtype)
        result: Tensor = combine(self, other_RD, weights_R, state, weighted=weighted)
        return result

    return changed


def handle_of_another_call(patch: Patch) -> None:
    """Whatever is done after a dispatch goes the way of the first one."""
    for cls, method in ((NormalTransport, "sum_at_home"), (HybridTransport, "sum_at_home")):
        patch.setattr(cls, method, _by_the_first_way(getattr(cls, method)))


def _by_the_first_way(original: Any) -> Any:
    first: dict[int, Way] = {}

    def swapped(self: Any, rows: Tensor, values: Tensor | None, way: Way) -> Any:
        return original(self, rows, values, first.setdefault(id(self), way))

    return swapped


def experts_padded_once_more(patch: Patch) -> None:
    dispatch = HybridEP.dispatch

    def twice(self: HybridEP, *args: Any) -> Arrived:
        arrived = dispatch(self, *args)
        counts = [count + 16 if count else 0 for count in arrived.tokens_per_expert_list or ()]
        missing = sum(counts) - len(arrived.rows)
        return dataclasses.replace(
            arrived,
            rows=torch.nn.functional.pad(arrived.rows, (0, 0, 0, missing)),
            weights=torch.nn.functional.pad(arrived.weights, (0, missing)),
            tokens_per_expert=torch.tensor(counts),
            tokens_per_expert_list=tuple(counts),
        )

    patch.setattr(HybridEP, "dispatch", twice)


def zero_weights_taken_for_padding(patch: Patch) -> None:
    patch.setattr(hybridep, "_marked", lambda weights_TK: weights_TK.float() * 0)


def gradient_of_weights_of_another_slot(patch: Patch) -> None:
    bring_home = HybridState.bring_home

    def rolled(self: HybridState, rows_RD: Tensor, values_R: Tensor | None = None) -> Any:
        rows_TD, values_TK = bring_home(self, rows_RD, values_R)
        return rows_TD, None if values_TK is None else values_TK.roll(1, 1)

    patch.setattr(HybridState, "bring_home", rolled)


DEEPEP: BackendSpec = {"name": "deepep", "emulate": "v1.2.1"}
HYBRIDEP: BackendSpec = {"name": "hybridep", "emulate": "hybridep-34152ae"}

# The bug, the backend it is planted in, and the scenario that must see it.
MUTATIONS: list[tuple[Callable[[Patch], None], BackendSpec, str]] = [
    (padding_trimmed_from_the_front, "strict", "balanced"),
    (padding_trimmed_from_the_front, "allgather", "unequal_tokens"),
    (padding_rows_sent_to_expert_0, "strict", "balanced"),
    (padding_rows_sent_to_expert_0, "allgather", "rank_without_tokens"),
    (weights_applied_twice, "alltoall", "balanced"),
    (weights_not_applied, "alltoall", "balanced"),
    (weights_rounded_to_bfloat16, "alltoall", "float32"),
    (gradient_of_weights_dropped, "alltoall", "balanced"),
    (gradient_of_weights_dropped, "alltoall", "float32_experts"),
    (duplicates_not_merged, "alltoall", "duplicates"),
    (experts_in_reverse_order, "alltoall", "balanced"),
    (rows_of_an_expert_in_reverse, "alltoall", "skewed"),
    (counts_without_padding, "alltoall", "pad_16"),
    (padding_not_cleared, "alltoall", "pad_16"),
    (padding_not_cleared, "local", "pad_16_unpoisoned"),
    (gradients_of_padding_read, "alltoall", "pad_16_weights_by_experts"),
    (outputs_of_padding_read, "alltoall", "pad_16"),
    (state_kept_on_the_backend, "alltoall", "two_in_flight"),
    (state_of_the_latest_call_in_backward, "alltoall", "backward_one_by_one"),
    (state_of_the_latest_call_in_backward, "alltoall", "checkpointed"),
    (buffer_shared_by_all_calls, "alltoall", "two_in_flight"),
    (rows_that_are_no_tokens_sent, "alltoall", "balanced"),
    (rows_that_are_no_tokens_not_zeroed, "alltoall", "balanced"),
    (weights_of_empty_slots_read, "alltoall", "partly_nowhere"),
    (idle_rank_leaves_the_backward, "alltoall", "idle_ranks_detached"),
    (verbs_without_anchor, "alltoall", "experts_only"),
    (float32_sums_for_float64_rows, "local", "float64"),
    (padding_trimmed_from_the_front, HYBRIDEP, "balanced"),
    (padding_rows_sent_to_expert_0, HYBRIDEP, "balanced"),
    (experts_padded_once_more, HYBRIDEP, "pad_16"),
    (weights_applied_twice_by_vendors, DEEPEP, "balanced"),
    (weights_applied_twice_by_vendors, HYBRIDEP, "balanced"),
    (weights_not_applied_by_vendors, DEEPEP, "balanced"),
    (weights_not_applied_by_vendors, HYBRIDEP, "balanced"),
    (handle_of_another_call, DEEPEP, "two_in_flight"),
    (handle_of_another_call, HYBRIDEP, "two_in_flight"),
    (zero_weights_taken_for_padding, HYBRIDEP, "pad_16"),
    (gradient_of_weights_of_another_slot, HYBRIDEP, "balanced"),
]


def _named(value: Any) -> str:
    return getattr(value, "__name__", None) or describe(value)


@pytest.mark.parametrize(("plant", "backend", "name"), MUTATIONS, ids=_named)
def test_kit_sees(plant: Callable[[Patch], None], backend: BackendSpec, name: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    ep_size = 1 if backend == "local" else 2
    ranks = Ranks(timeout=datetime.timedelta(seconds=1))  # peers of a rank that failed wait this long
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    with pytest.raises((AssertionError, RuntimeError, MoEDispatchError)):
        run_all(backend, scenario_cases(fitted(backend, scenario, ep_size), ep_size), ranks)


def test_kit_sees_slots_to_nowhere_counted_a_place_too_early(monkeypatch: Patch) -> None:
    """With one expert a rank that is before the first place of the table; with more it is overwritten."""
    send_counts = AllToAll._send_counts

    def too_early(self: AllToAll, places_TK: Tensor, members_PT: Tensor) -> Any:
        goes_nowhere = places_TK < 1 + self.context.shape.num_local_experts
        return send_counts(self, places_TK - goes_nowhere.long(), members_PT)

    monkeypatch.setattr(AllToAll, "_send_counts", too_early)
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == "one_expert_per_rank")
    with pytest.raises(RuntimeError):
        run_all("alltoall", scenario_cases(scenario, 4), Ranks(timeout=datetime.timedelta(seconds=1)))


def run_all(backend: BackendSpec, cases: Iterable[Case], ranks: Ranks) -> None:
    for case in cases:
        run_case(backend, case, ranks)
