"""Bugs planted one at a time: the kit must fail for each of them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch.backends import rank_major
from moe_dispatch.backends.alltoall import backend as alltoall
from moe_dispatch.backends.alltoall import exact
from moe_dispatch.backends.alltoall.backend import AllToAll, AllToAllRoute
from moe_dispatch.backends.alltoall.fixed import FixedAllToAll
from moe_dispatch.backends.base import Arrived
from moe_dispatch.backends.deep_ep import hybridep
from moe_dispatch.backends.deep_ep.buffers import Handle
from moe_dispatch.backends.deep_ep.deepep_v1 import NormalDeepEP
from moe_dispatch.backends.deep_ep.expert_major import ExpertMajorRoute
from moe_dispatch.backends.deep_ep.hybridep import HybridEP
from moe_dispatch.backends.deep_ep.rank_rows import DeepEPRoute
from moe_dispatch.dispatchers import autograd
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.layouts import Layout
from moe_dispatch.permutation import Permutation, TorchPermutation, group_slots, merge_slots
from moe_dispatch.permutation import rows as permutation_rows
from moe_dispatch.permutation.index import SlotIndex
from moe_dispatch_testing import SCENARIOS, Case, Ranks, run_case
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.kit import describe, fitted, scenario_cases

Patch = pytest.MonkeyPatch


# Each of these routes applies the weights in its own way.
ROUTES = (AllToAllRoute, DeepEPRoute, ExpertMajorRoute)


def padding_trimmed_from_the_front(patch: Patch) -> None:
    trim = autograd.trim

    def from_the_front(tensor: Tensor, real_rows: Tensor | None, num_rows: int) -> Tensor:
        count = num_rows if real_rows is None else len(real_rows)
        return trim(tensor[len(tensor) - count :], real_rows, num_rows)

    patch.setattr(autograd, "trim", from_the_front)


def padding_rows_sent_to_expert_0(patch: Patch) -> None:
    pad = autograd.pad
    patch.setattr(
        autograd, "pad", lambda tensor, real_rows, padded, fill=0: pad(tensor, real_rows, padded, max(fill, 0))
    )


def weights_applied_twice(patch: Patch) -> None:
    for cls in ROUTES:
        patch.setattr(cls, "combine", _weighted_twice(cls.combine))


def _weighted_twice(combine: Any) -> Any:
    def twice(route: Any, rows_RD: Tensor, weights_R: Tensor) -> Any:
        return combine(route, (rows_RD * weights_R.unsqueeze(1)).to(rows_RD.dtype), weights_R)

    return twice


def weights_not_applied(patch: Patch) -> None:
    for cls in ROUTES:
        patch.setattr(cls, "combine", _unweighted(cls.combine))


def _unweighted(combine: Any) -> Any:
    return lambda route, rows_RD, weights_R: combine(route, rows_RD, None)


def weights_not_applied_in_the_backward(patch: Patch) -> None:
    for cls in ROUTES:
        patch.setattr(cls, "combine_backward", _unweighted_backward(cls.combine_backward))


def _unweighted_backward(backward: Any) -> Any:
    def unweighted(route: Any, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor) -> Any:
        _, dots_R = backward(route, grad_TD, rows_RD, weights_R)
        return backward(route, grad_TD, None, None)[0], dots_R

    return unweighted


def weights_rounded_to_bfloat16(patch: Patch) -> None:
    def rounded(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool, **_: object) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = merge_slots(ids_TK, weights_TK, asks=asks)
        return ids_TK, weights_TK.bfloat16().to(weights_TK.dtype)

    patch.setattr(Permutation, "merge_slots", staticmethod(rounded))


def gradient_of_weights_dropped(patch: Patch) -> None:
    def detached(ids_TK: Tensor, weights_TK: Tensor, *, asks: bool, **_: object) -> tuple[Tensor, Tensor]:
        return merge_slots(ids_TK, weights_TK.detach(), asks=asks)

    patch.setattr(Permutation, "merge_slots", staticmethod(detached))


def duplicates_not_merged(patch: Patch) -> None:
    patch.setattr(Permutation, "merge_slots", staticmethod(lambda ids_TK, weights_TK, **_: (ids_TK, weights_TK)))


def experts_in_reverse_order(patch: Patch) -> None:
    def reverse(
        keys_SK: Tensor, counts: Sequence[int], pad_multiple: int = 1, *, real_L: Tensor | None = None, **_: Any
    ) -> SlotIndex:
        last = len(counts) - 1
        keys_SK = torch.where((keys_SK >= 0) & (keys_SK <= last), last - keys_SK, keys_SK)
        index = group_slots(keys_SK, counts[::-1], pad_multiple)
        return dataclasses.replace(index, counts=counts, real_L=real_L)

    patch.setattr(Permutation, "group_slots", staticmethod(reverse))
    patch.setattr(exact, "group_slots", reverse)


def arriving(patch: Patch, change: Callable[[Arrived], dict[str, Any]]) -> None:
    for backend in (AllToAll, FixedAllToAll):
        patch.setattr(backend, "finish", _changed(backend.finish, change))


def _changed(finish: Callable[..., Arrived], change: Callable[[Arrived], dict[str, Any]]) -> Callable[..., Arrived]:
    def changed(self: Any, started: Any) -> Arrived:
        arrived = finish(self, started)
        return dataclasses.replace(arrived, **change(arrived))

    return changed


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
    patch.setattr(permutation_rows, "clear_padding", lambda buffer, index: buffer[: index.num_grouped].clone())


def gradients_of_padding_read(patch: Patch) -> None:
    to_slots = SlotIndex.to_slots
    patch.setattr(SlotIndex, "to_slots", lambda index, values_R: to_slots(index, values_R) + 0 * values_R.sum())


def outputs_of_padding_read(patch: Patch) -> None:
    reduce = TorchPermutation.reduce

    def reading(
        self: TorchPermutation, rows_RD: Tensor, index: SlotIndex, weights_R: Tensor | None, out: Tensor
    ) -> None:
        reduce(self, rows_RD, index, weights_R, out)
        out.add_(0 * rows_RD.sum())

    patch.setattr(TorchPermutation, "reduce", reading)


def route_kept_on_the_backend(patch: Patch) -> None:
    combine, latest = AllToAllRoute.combine, _latest_routes(patch)
    patch.setattr(AllToAllRoute, "combine", lambda route, *args: combine(latest[id(route.context)], *args))


def route_of_the_latest_call_in_backward(patch: Patch) -> None:
    backward, latest = autograd.Combine.backward, _latest_routes(patch)

    def with_latest(ctx: Any, grad_TD: Tensor) -> Any:
        ctx.state = dataclasses.replace(ctx.state, route=latest[id(ctx.state.route.context)])
        return backward(ctx, grad_TD)

    patch.setattr(autograd.Combine, "backward", staticmethod(with_latest))


def _latest_routes(patch: Patch) -> dict[int, AllToAllRoute]:
    """Return a dict that holds the route of the latest dispatch by context; each rank's dispatcher has its own."""
    latest: dict[int, Any] = {}
    arriving(patch, lambda arrived: latest.update({id(route_of(arrived).context): arrived.route}) or {})
    return latest


def route_of(arrived: Arrived) -> AllToAllRoute:
    assert isinstance(arrived.route, AllToAllRoute)
    return arrived.route


def buffer_shared_by_all_calls(patch: Patch) -> None:
    """Overwrite the rows of the first call when the second arrives, as a workspace with a single buffer would."""
    shared: dict[int, Tensor] = {}

    def share(arrived: Arrived) -> dict[str, Any]:
        earlier = shared.get(id(route_of(arrived).context))
        if earlier is not None:
            earlier.data.fill_(1)
        shared[id(route_of(arrived).context)] = arrived.rows
        return {}

    arriving(patch, share)


def rows_that_are_no_tokens_sent(patch: Patch) -> None:
    patch.setattr(Layout, "valid_T", lambda layout, num_rows, device=None: None)


def rows_that_are_no_tokens_not_zeroed(patch: Patch) -> None:
    trim = autograd.trim

    def put_into_ones(tensor: Tensor, real_rows: Tensor | None, num_rows: int) -> Tensor:
        found = trim(tensor, real_rows, num_rows)
        if real_rows is None:
            return found
        return torch.ones_like(found).index_copy_(0, real_rows, found[real_rows])

    patch.setattr(autograd, "trim", put_into_ones)


def weights_of_empty_slots_read(patch: Patch) -> None:
    def touching(route: Any, rows_SD: Tensor, weights_SK: Tensor, *args: Any, **named: Any) -> Arrived:
        arrived = rank_major.arrive(route, rows_SD, weights_SK, *args, **named)
        return dataclasses.replace(arrived, weights=arrived.weights + 0 * weights_SK.sum())

    patch.setattr(alltoall, "arrive", touching)


def idle_rank_leaves_the_backward(patch: Patch) -> None:
    original = autograd.Combine

    def untied(rows_RD: Tensor, weights_R: Tensor, *args: Any) -> Any:
        return original.apply(rows_RD, weights_R.detach().requires_grad_(), *args)  # type: ignore[no-untyped-call]

    patch.setattr(autograd, "Combine", SimpleNamespace(apply=untied))


def verbs_without_anchor(patch: Patch) -> None:
    patch.setattr(autograd, "anchor", lambda tensor, _: tensor)


def rows_sent_again_untied(patch: Patch) -> None:
    patch.setattr(autograd, "tie", lambda tensor, _: tensor)


def float32_sums_for_float64_rows(patch: Patch) -> None:
    sum_bags = TorchPermutation.sum_bags

    def rounded(self: TorchPermutation, rows: Tensor, *args: Any) -> None:
        sum_bags(self, rows.float(), *args)

    patch.setattr(TorchPermutation, "sum_bags", rounded)


def handle_of_another_call(patch: Patch) -> None:
    """Pass the handle of the first combine to every later one."""
    for cls in (NormalDeepEP, HybridEP):
        patch.setattr(cls, "combine", _with_the_first_handle(cls.combine))


def _with_the_first_handle(combine: Any) -> Any:
    first: dict[int, Handle] = {}

    def swapped(backend: Any, rows: Tensor, values: Tensor | None, handle: Handle, **more: Any) -> Any:
        return combine(backend, rows, values, handle=first.setdefault(id(backend), handle), **more)

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
    backward = ExpertMajorRoute.dispatch_backward

    def rolled(route: ExpertMajorRoute, grad_RD: Tensor, grad_R: Tensor | None) -> Any:
        grad_TD, grad_TK = backward(route, grad_RD, grad_R)
        return grad_TD, None if grad_TK is None else grad_TK.roll(1, 1)

    patch.setattr(ExpertMajorRoute, "dispatch_backward", rolled)


DEEPEP: BackendSpec = {"name": "deepep", "emulate": "v1.2.1"}
HYBRIDEP: BackendSpec = {"name": "hybridep", "emulate": "hybridep-34152ae"}

# The bug, the backend it is planted in, and the scenario that must fail.
MUTATIONS: list[tuple[Callable[[Patch], None], BackendSpec, str]] = [
    (padding_trimmed_from_the_front, "strict", "balanced"),
    (padding_trimmed_from_the_front, "allgather", "unequal_tokens"),
    (padding_rows_sent_to_expert_0, "strict", "balanced"),
    (padding_rows_sent_to_expert_0, "allgather", "rank_without_tokens"),
    (weights_applied_twice, "alltoall", "balanced"),
    (weights_not_applied, "alltoall", "balanced"),
    (weights_not_applied_in_the_backward, "alltoall", "balanced"),
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
    (route_kept_on_the_backend, "alltoall", "two_in_flight"),
    (route_of_the_latest_call_in_backward, "alltoall", "backward_one_by_one"),
    (route_of_the_latest_call_in_backward, "alltoall", "checkpointed"),
    (buffer_shared_by_all_calls, "alltoall", "two_in_flight"),
    (rows_that_are_no_tokens_sent, "alltoall", "balanced"),
    (rows_that_are_no_tokens_not_zeroed, "alltoall", "balanced"),
    (weights_of_empty_slots_read, "alltoall", "partly_nowhere"),
    (idle_rank_leaves_the_backward, "alltoall", "idle_ranks_detached"),
    (verbs_without_anchor, "alltoall", "experts_only"),
    (rows_sent_again_untied, "alltoall", "sent_again_detached"),
    (float32_sums_for_float64_rows, "local", "float64"),
    (padding_trimmed_from_the_front, HYBRIDEP, "balanced"),
    (padding_rows_sent_to_expert_0, HYBRIDEP, "balanced"),
    (experts_padded_once_more, HYBRIDEP, "pad_16"),
    (weights_applied_twice, DEEPEP, "balanced"),
    (weights_applied_twice, HYBRIDEP, "balanced"),
    (weights_not_applied, DEEPEP, "balanced"),
    (weights_not_applied, HYBRIDEP, "balanced"),
    (weights_not_applied_in_the_backward, DEEPEP, "balanced"),
    (weights_not_applied_in_the_backward, HYBRIDEP, "balanced"),
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
    """With one expert per rank, that place is before the start of the table; with more it is overwritten."""
    width = 2  # of the table: one expert, and the number of rows

    bincount = torch.bincount

    def too_early(entries_N: Tensor, *, minlength: int) -> Tensor:
        return bincount(entries_N - (entries_N < width).long(), minlength=minlength)

    monkeypatch.setattr(torch, "bincount", too_early)
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == "one_expert_per_rank")
    with pytest.raises(RuntimeError):
        run_all("alltoall", scenario_cases(scenario, 4), Ranks(timeout=datetime.timedelta(seconds=1)))


def run_all(backend: BackendSpec, cases: Iterable[Case], ranks: Ranks) -> None:
    for case in cases:
        run_case(backend, case, ranks)
