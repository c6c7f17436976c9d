"""Bugs planted one at a time: the kit must fail for each of them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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
from moe_dispatch_testing import SCENARIOS, Ranks, run_case
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.kit import describe, fitted, scenario_cases

Patch = pytest.MonkeyPatch


# Each of these routes applies the weights in its own way.
ROUTES = (AllToAllRoute, DeepEPRoute, ExpertMajorRoute)


def around(patch: Patch, name: str, change: Callable[..., Any], *owners: Any) -> None:
    """Put ``change`` in the place of a function of each owner. It is given the original before the arguments."""
    for owner in owners:
        patch.setattr(owner, name, _changed(getattr(owner, name), change))


def _changed(original: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: change(original, *args, **named)


def padding_trimmed_from_the_front(patch: Patch) -> None:
    def from_the_front(trim: Any, tensor: Tensor, real_rows: Tensor | None, num_rows: int) -> Tensor:
        count = num_rows if real_rows is None else len(real_rows)
        found: Tensor = trim(tensor[len(tensor) - count :], real_rows, num_rows)
        return found

    around(patch, "trim", from_the_front, autograd)


def padding_rows_sent_to_expert_0(patch: Patch) -> None:
    around(patch, "pad", lambda pad, *args: pad(*args[:3], max(args[3], 0) if args[3:] else 0), autograd)


def weights_applied_twice(patch: Patch) -> None:
    def twice(combine: Any, route: Any, rows_RD: Tensor, weights_R: Tensor) -> Any:
        return combine(route, (rows_RD * weights_R.unsqueeze(1)).to(rows_RD.dtype), weights_R)

    around(patch, "combine", twice, *ROUTES)


def weights_not_applied(patch: Patch) -> None:
    around(patch, "combine", lambda combine, route, rows_RD, weights_R: combine(route, rows_RD, None), *ROUTES)


def weights_not_applied_in_the_backward(patch: Patch) -> None:
    def unweighted(backward: Any, route: Any, grad_TD: Tensor, *rows_and_weights: Any) -> Any:
        return backward(route, grad_TD, None, None)[0], backward(route, grad_TD, *rows_and_weights)[1]

    around(patch, "combine_backward", unweighted, *ROUTES)


def arriving(patch: Patch, change: Callable[[Arrived], dict[str, Any]]) -> None:
    def changed(finish: Any, *args: Any) -> Arrived:
        arrived: Arrived = finish(*args)
        return dataclasses.replace(arrived, **change(arrived))

    around(patch, "finish", changed, AllToAll, FixedAllToAll)


def outputs_of_padding_read(patch: Patch) -> None:
    def reading(reduce: Any, permutation: Any, rows_RD: Tensor, *args: Any) -> None:
        reduce(permutation, rows_RD, *args)
        args[2].add_(0 * rows_RD.sum())

    around(patch, "reduce", reading, TorchPermutation)


def gradients_of_padding_read(patch: Patch) -> None:
    around(patch, "to_slots", lambda plain, index, values_R: plain(index, values_R) + 0 * values_R.sum(), SlotIndex)


def rows_that_are_no_tokens_not_zeroed(patch: Patch) -> None:
    def put_into_ones(trim: Any, tensor: Tensor, real_rows: Tensor | None, num_rows: int) -> Any:
        found = trim(tensor, real_rows, num_rows)
        return found if real_rows is None else torch.ones_like(found).index_copy_(0, real_rows, found[real_rows])

    around(patch, "trim", put_into_ones, autograd)


def float32_sums_for_float64_rows(patch: Patch) -> None:
    around(patch, "sum_bags", lambda plain, self, rows, *args: plain(self, rows.float(), *args), TorchPermutation)


def handle_of_another_call(patch: Patch) -> None:
    """Pass the handle of the first combine to every later one."""
    first: dict[int, Handle] = {}

    def swapped(combine: Any, backend: Any, rows: Any, values: Any, handle: Handle, **more: Any) -> Any:
        return combine(backend, rows, values, handle=first.setdefault(id(backend), handle), **more)

    around(patch, "combine", swapped, NormalDeepEP, HybridEP)


def experts_padded_once_more(patch: Patch) -> None:
    def twice(dispatch: Any, *args: Any) -> Arrived:
        arrived: Arrived = dispatch(*args)
        counts = [count + 16 if count else 0 for count in arrived.tokens_per_expert_list or ()]
        assert isinstance(arrived.rows, Tensor)
        missing = sum(counts) - len(arrived.rows)
        return dataclasses.replace(
            arrived,
            rows=torch.nn.functional.pad(arrived.rows, (0, 0, 0, missing)),
            weights=torch.nn.functional.pad(arrived.weights, (0, missing)),
            tokens_per_expert=torch.tensor(counts),
            tokens_per_expert_list=tuple(counts),
        )

    around(patch, "dispatch", twice, HybridEP)


def gradient_of_weights_of_another_slot(patch: Patch) -> None:
    def rolled(backward: Any, *args: Any) -> Any:
        grad_TD, grad_TK = backward(*args)
        return grad_TD, None if grad_TK is None else grad_TK.roll(1, 1)

    around(patch, "dispatch_backward", rolled, ExpertMajorRoute)


def weights_of_empty_slots_read(patch: Patch) -> None:
    def touching(arrive: Any, route: Any, rows_SD: Tensor, weights_SK: Tensor, *args: Any, **named: Any) -> Arrived:
        arrived: Arrived = arrive(route, rows_SD, weights_SK, *args, **named)
        return dataclasses.replace(arrived, weights=arrived.weights + 0 * weights_SK.sum())

    around(patch, "arrive", touching, alltoall)


def gradients_sent_in_bfloat16(patch: Patch) -> None:
    def wide(spread: Any, route: Any, rows_TD: Tensor, wire: Any, *, label: str) -> Any:
        return spread(route, rows_TD, "bfloat16" if label == "combine.backward" else wire, label=label)

    around(patch, "spread", wide, AllToAllRoute)


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


def rows_of_an_expert_in_reverse(patch: Patch) -> None:
    def reverse(arrived: Arrived) -> dict[str, Any]:
        assert isinstance(arrived.rows, Tensor)
        parts = zip(
            arrived.rows.split(arrived.tokens_per_expert.tolist()), arrived.real_tokens_per_expert.tolist(), strict=True
        )
        return {"rows": torch.cat([torch.cat((part[:real].flip(0), part[real:])) for part, real in parts])}

    arriving(patch, reverse)


def counts_without_padding(patch: Patch) -> None:
    arriving(patch, lambda arrived: {"tokens_per_expert": arrived.real_tokens_per_expert})


def padding_not_cleared(patch: Patch) -> None:
    patch.setattr(permutation_rows, "clear_padding", lambda buffer, index: buffer[: index.num_grouped].clone())


def route_kept_on_the_backend(patch: Patch) -> None:
    combine, latest = AllToAllRoute.combine, _latest_routes(patch)
    patch.setattr(AllToAllRoute, "combine", lambda route, *args: combine(latest[id(route.context)], *args))


def route_of_the_latest_call_in_backward(patch: Patch) -> None:
    backward, latest = autograd.Combine.backward, _latest_routes(patch)

    def with_latest(ctx: Any, grad_TD: Tensor) -> Any:
        object.__setattr__(
            ctx.state, "route", latest[id(ctx.state.route.context)]
        )  # torch must see no dataclass, so not replace
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
        assert isinstance(arrived.rows, Tensor)
        shared[id(route_of(arrived).context)] = arrived.rows
        return {}

    arriving(patch, share)


def rows_that_are_no_tokens_sent(patch: Patch) -> None:
    patch.setattr(Layout, "valid_T", lambda layout, num_rows, device=None: None)


def idle_rank_leaves_the_backward(patch: Patch) -> None:
    original = autograd.Combine

    def untied(rows_RD: Tensor, weights_R: Tensor, *args: Any) -> Any:
        return original.apply(rows_RD, weights_R.detach().requires_grad_(), *args)  # type: ignore[no-untyped-call]

    patch.setattr(autograd, "Combine", SimpleNamespace(apply=untied))


def verbs_without_anchor(patch: Patch) -> None:
    patch.setattr(autograd, "anchor", lambda tensor, _: tensor)


def rows_sent_again_untied(patch: Patch) -> None:
    patch.setattr(autograd, "tie", lambda tensor, _: tensor)


def zero_weights_taken_for_padding(patch: Patch) -> None:
    patch.setattr(hybridep, "_marked", lambda weights_TK: weights_TK.float() * 0)


DEEPEP: BackendSpec = {"name": "deepep", "emulate": "v1.2.1"}
HYBRIDEP: BackendSpec = {"name": "hybridep", "emulate": "hybridep-94a9f8f"}

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
    (gradients_sent_in_bfloat16, "alltoall", "gradients_mxfp8"),
    (gradients_sent_in_bfloat16, "alltoall", "gradients_float8"),
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
    (padding_trimmed_from_the_front, HYBRIDEP, "unequal_tokens"),
    (padding_rows_sent_to_expert_0, HYBRIDEP, "unequal_tokens"),
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


def run_scenario(backend: BackendSpec, name: str, ep_size: int | None = None) -> None:
    """Run the cases of a scenario, on one rank if the backend is local, else on two."""
    ep_size = ep_size or (1 if backend == "local" else 2)
    ranks = Ranks(timeout=datetime.timedelta(seconds=0.5))  # peers of a rank that failed wait this long
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    for case in scenario_cases(fitted(backend, scenario, ep_size), ep_size):
        run_case(backend, case, ranks)


@pytest.mark.parametrize(("plant", "backend", "name"), MUTATIONS, ids=_named)
def test_kit_sees(plant: Callable[[Patch], None], backend: BackendSpec, name: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, MoEDispatchError)):
        run_scenario(backend, name)


def test_kit_sees_slots_to_nowhere_counted_a_place_too_early(monkeypatch: Patch) -> None:
    """With one expert per rank, that place is before the start of the table; with more it is overwritten."""
    width = 2  # of the table: one expert, and the number of rows

    def too_early(bincount: Any, entries_N: Tensor, *, minlength: int) -> Any:
        return bincount(entries_N - (entries_N < width).long(), minlength=minlength)

    around(monkeypatch, "bincount", too_early, torch)
    with pytest.raises(RuntimeError):
        run_scenario("alltoall", "one_expert_per_rank", 4)
