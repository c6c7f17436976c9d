"""Run one conformance case on every rank, and compare the results with the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.config import DispatcherConfig, RowCounts
from moe_dispatch.dispatchers import build_dispatcher
from moe_dispatch_testing.host_syncs import allow_host_syncs, refuse_host_syncs
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS
from moe_dispatch_testing.rank_context import LayerCall, RankContext, make_call
from moe_dispatch_testing.ranks import Ranks
from moe_dispatch_testing.reference import Expected, expect_close, expect_equal, expect_zero
from moe_dispatch_testing.scenario import Batch, Experts, Scenario
from moe_dispatch_testing.schedules import SCHEDULES

BackendSpec = str | Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A scenario for one group size, input layout, policy of row counts and kind of device.

    Attributes:
        scenario: The scenario.
        ep_size: Number of ranks.
        input_layout: Name in ``INPUT_LAYOUTS``.
        row_counts: Policy of row counts. Graph-safe scenarios ignore it.
        device: Kind of device of all tensors.
    """

    scenario: Scenario
    ep_size: int
    input_layout: str
    row_counts: RowCounts
    device: str = "cpu"

    @property
    def id(self) -> str:
        """Return the name of the case in tests."""
        return f"{self.scenario.name}-ep{self.ep_size}-{self.input_layout}-{self.row_counts}"


def run_case(backend: BackendSpec, case: Case, ranks: Ranks | None) -> None:
    """Run a case and compare its results with the reference.

    Args:
        backend: Name of the backend, or a mapping with its name and options.
        case: The case.
        ranks: Ranks that run the case as threads. If None, a case of one rank runs in this thread, without a group.

    Raises:
        ConformanceError: A result is wrong. Errors of the dispatcher are not caught. A note names the rank.
    """
    config = case_config(backend, case)
    # Compute it before the ranks start. Otherwise every thread would compute it, and its host syncs would be refused.
    _expected(case.scenario, case.ep_size)
    with poisoned_memory(), refuse_host_syncs() if case.scenario.graph_safe else nullcontext():
        if ranks is None:
            gradients = [run_rank(config, None, case)]
        else:
            gradients = ranks.run(lambda group: run_rank(config, group, case), case.ep_size)
    by_call = [zip(*call, strict=True) for call in zip(*gradients, strict=True)]
    check_expert_gradients(case, [[torch.stack(of_ranks).sum(0) for of_ranks in call] for call in by_call])


def check_expert_gradients(case: Case, sums: Sequence[Sequence[Tensor]]) -> None:
    """Compare the gradients of the experts with the reference.

    Args:
        case: The case.
        sums: The sums over ranks of what ``run_rank`` returns on each of them.
    """
    if case.scenario.inference:
        return
    for call, (by_rank, of_call) in enumerate(zip(_expected(case.scenario, case.ep_size), sums, strict=True)):
        for which, name in enumerate(("matrices", "biases")):
            total = torch.stack([_expert_gradient(one, which) for one in by_rank]).sum(0)
            what = f"gradient of the experts' {name} in call {call}"
            expect_close(what, of_call[which], total, case.scenario.tolerance)


def case_config(backend: BackendSpec, case: Case) -> DispatcherConfig:
    """Make the config of a case, which is the same on all ranks."""
    scenario = case.scenario
    most = max(max(INPUT_LAYOUTS[case.input_layout](tokens).num_rows for tokens in scenario.tokens), 1)
    max_tokens = most if case.row_counts == "static" else None
    if scenario.graph_safe:
        max_tokens = scenario.max_tokens
    return DispatcherConfig.load(
        environment={},  # a case means the same in every shell
        backend=backend,
        num_experts=scenario.num_experts,
        balance={"name": "manual", "spare_experts_per_rank": scenario.spare} if scenario.spare else None,
        top_k=scenario.top_k,
        hidden_size=scenario.hidden,
        pad_multiple=scenario.pad_multiple,
        weights=scenario.weights,
        wire=scenario.wire,
        row_counts=None if scenario.graph_safe else case.row_counts,
        max_tokens_per_rank=max_tokens,
        chunks=scenario.chunks,
        graph_safe=scenario.graph_safe,
        debug=scenario.debug,
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN in the whole process, so that a read of uninitialised memory shows in the results."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms does the same, but imports a compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def run_rank(config: DispatcherConfig, group: dist.ProcessGroup | None, case: Case) -> list[tuple[Tensor, Tensor]]:
    """Run a case on one rank, and check its outputs and the gradients of its inputs.

    Returns:
        Gradients of the experts' matrices and biases by call, on the CPU, for ``check_expert_gradients``.
    """
    scenario, rank = case.scenario, 0 if group is None else group.rank()
    schedule = SCHEDULES[scenario.schedule]
    with allow_host_syncs():
        dispatcher = build_dispatcher(config, group)
        if (placement := scenario.placement(case.ep_size)) is not None:
            dispatcher.place(placement, device=case.device)
        calls = tuple(
            make_call(scenario, INPUT_LAYOUTS[case.input_layout](len(batches[rank].x_TD)), batches, rank, experts).to(
                case.device
            )
            for batches, experts in _data(scenario, case.ep_size)
        )
    context = RankContext(scenario=scenario, dispatcher=dispatcher, rank=rank, calls=calls)
    with torch.inference_mode() if scenario.inference else torch.enable_grad():
        outputs = schedule.run(context)
    if not scenario.inference:
        _differentiate(outputs, calls, one_by_one=schedule.one_by_one)
    with allow_host_syncs():
        for call, output, by_rank in zip(calls, outputs, _expected(scenario, case.ep_size), strict=True):
            _check_output(output, call, by_rank[rank], scenario)
            if not scenario.inference:
                _check_gradients(call, by_rank[rank], scenario)
        if scenario.graph_safe:
            expect_equal("overflow of the worst case", dispatcher.check().overflowed, False)
        dispatcher.close()
        return [(_gradient(call.experts.matrix_EWW), _gradient(call.experts.bias_ED)) for call in calls]


def _differentiate(outputs: Sequence[Tensor], calls: Sequence[LayerCall], *, one_by_one: bool) -> None:
    pairs = [(output, call.upstream) for output, call in zip(outputs, calls, strict=True)]
    if not one_by_one:
        torch.autograd.backward([output for output, _ in pairs], [upstream for _, upstream in pairs])
        return
    for output, upstream in reversed(pairs):
        output.backward(upstream)


def _check_output(y: Tensor, call: LayerCall, expected: Expected, scenario: Scenario) -> None:
    expect_equal("shape of y", y.shape, call.x.shape)
    expect_equal("dtype of y", y.dtype, scenario.torch_dtype)
    tokens, others = call.input_layout.split(y.detach().cpu())
    expect_close("y", tokens, expected.y_TD, scenario.tolerance)
    expect_zero("rows of y that are not tokens", others)
    expect_zero("rows of y that went nowhere", tokens[(expected.y_TD == 0).all(1)])


def _check_gradients(call: LayerCall, expected: Expected, scenario: Scenario) -> None:
    for what, leaf, wanted in (
        ("x", call.x, expected.grad_x_TD),
        ("topk_weights", call.weights_TK, expected.grad_weights_TK),
    ):
        if not leaf.requires_grad:
            expect_equal(f"gradient of {what}, which requires none", leaf.grad, None)
            continue
        tokens, others = call.input_layout.split(_gradient(leaf))
        expect_close(f"gradient of {what}", tokens, wanted, scenario.tolerance)
        expect_zero(f"gradient of {what} in rows that are not tokens", others)
        expect_zero(f"gradient of {what} where nothing was sent", tokens[wanted == 0])


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf).cpu() if leaf.grad is None else leaf.grad.cpu()


def _expert_gradient(expected: Expected, which: int) -> Tensor:
    return (expected.grad_matrix_EWW, expected.grad_bias_ED)[which]


def _data(scenario: Scenario, ep_size: int) -> list[tuple[tuple[Batch, ...], Experts]]:
    """Return the batches of all ranks, and the experts, for each call."""
    return _draw(scenario.drawn, ep_size)


def _expected(scenario: Scenario, ep_size: int) -> list[list[Expected]]:
    """Return the expected results by call and rank."""
    return _compute(scenario.drawn, ep_size)


@cache
def _draw(drawn: Scenario, ep_size: int) -> list[tuple[tuple[Batch, ...], Experts]]:
    schedule = SCHEDULES[drawn.schedule]
    turns = [0 if schedule.keeps_tokens else call for call in range(schedule.calls)]
    return [(drawn.batches(ep_size, call, turn), drawn.experts(call)) for call, turn in enumerate(turns)]


@cache
def _compute(drawn: Scenario, ep_size: int) -> list[list[Expected]]:
    data = _draw(drawn, ep_size)
    experts = [its_experts for _, its_experts in data]
    expect = SCHEDULES[drawn.schedule].expect
    by_rank = [expect(drawn, [batches[rank] for batches, _ in data], experts) for rank in range(ep_size)]
    return [list(call) for call in zip(*by_rank, strict=True)]
