"""What ``capture`` and ``Captured.replay`` refuse. The graph is a stand-in: there is no CUDA here (see tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatcher, DispatcherConfig, Plan, Routing, build_dispatcher, capture
from moe_dispatch import cuda_graphs as capturing
from moe_dispatch.cuda_graphs import Captured
from moe_dispatch.errors import InputError, StateError

HIDDEN, TOKENS = 16, 6
IDS = torch.arange(2).repeat(TOKENS, 1)
X, WEIGHTS = torch.ones(TOKENS, HIDDEN), torch.ones(TOKENS, 2)


class Replayer:
    """Runs a step again and writes its results into those of the first run, as a CUDA graph does."""

    def __init__(self, step: Callable[[], Tensor], warmup: int) -> None:
        self.runs = warmup + 1
        for _ in range(warmup):
            step()
        self.step, self.outputs = step, step()

    def replay(self) -> None:
        self.runs += 1
        self.outputs.copy_(self.step())


@pytest.fixture
def replayers(monkeypatch: pytest.MonkeyPatch) -> list[Replayer]:
    made: list[Replayer] = []

    def record(step: Callable[[], Tensor], warmup: int, undo: Sequence[Callable[[], None]]) -> tuple[Any, Any]:
        made.append(Replayer(step, warmup))
        return made[-1], made[-1].outputs

    monkeypatch.setattr(capturing, "_record", record)
    monkeypatch.setattr(capturing, "_not_on_cuda", lambda inputs: [])
    return made


def dispatcher_of(**changes: Any) -> Dispatcher:
    fields: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": HIDDEN, "graph_safe": True}
    return build_dispatcher(DispatcherConfig(**{**fields, "backend": "local", "max_tokens_per_rank": 8, **changes}))


def captured(dispatcher: Dispatcher, plan: Plan | None = None, others: tuple[Dispatcher, ...] = ()) -> Captured:
    def run(x: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, Routing(IDS, weights), plan)
        return dispatcher.combine(sent.rows, sent)

    return capture(dispatcher, run, torch.zeros_like(X), WEIGHTS, plan=plan, others=others)


def test_replays_with_new_values_and_the_plan_that_was_captured(replayers: list[Replayer]) -> None:
    dispatcher = dispatcher_of()
    plan, other = dispatcher.plan(like=X), dispatcher.plan(like=X)
    graph = captured(dispatcher, plan)
    first = graph.replay(X, WEIGHTS / 2, plan=plan)
    assert first.unique().tolist() == [1.0]
    second = graph.replay(X, WEIGHTS * 2)
    assert second is first
    assert first.unique().tolist() == [4.0]
    assert [replayer.runs for replayer in replayers] == [3 + 1 + 2]
    with pytest.raises(StateError, match=r"Captured.replay: another plan was captured"):
        graph.replay(X, WEIGHTS, plan=other)


@pytest.mark.usefixtures("replayers")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Dispatcher.close, r"Dispatcher: the dispatcher must be open, got a closed one"),
        (Dispatcher.grow, r"a dispatcher has grown since the capture. Capture again"),
    ],
)
@pytest.mark.parametrize("is_other", [False, True])
def test_refuses_after_a_change_of_a_dispatcher(
    change: Callable[[Dispatcher], object], text: str, is_other: bool
) -> None:
    finite: dict[str, Any] = {"graph_safe": {"capacity_factor": 0.5, "on_overflow": "raise"}}
    used, other = dispatcher_of(**finite), dispatcher_of(pad_multiple=4, **finite)
    other.dispatch(X, Routing(IDS, WEIGHTS))  # so that it needs more
    graph = captured(used, others=(other,))
    graph.replay(X, WEIGHTS)
    change(other if is_other else used)
    with pytest.raises(StateError, match=text):
        graph.replay(X, WEIGHTS)


@pytest.mark.usefixtures("replayers")
@pytest.mark.parametrize(
    ("field", "way_out"), [({"graph_safe": False}, "Set graph_safe"), ({"debug": True}, "leave debug")]
)
def test_refuses_what_waits_for_the_host(field: dict[str, bool], way_out: str) -> None:
    with pytest.raises(StateError, match=rf"capture: a graph cannot wait for the host.*{way_out}"):
        captured(dispatcher_of(**field))


@pytest.mark.usefixtures("replayers")
@pytest.mark.parametrize("inputs", [(X,), (torch.ones(TOKENS + 1, HIDDEN), WEIGHTS), (X.double(), WEIGHTS)])
def test_refuses_other_inputs(inputs: tuple[Tensor, ...]) -> None:
    with pytest.raises(InputError, match=r"Captured.replay: inputs must be like those captured, .*, got "):
        captured(dispatcher_of()).replay(*inputs)


def test_refuses_the_cpu() -> None:
    with pytest.raises(InputError, match=r"capture: inputs must be on a CUDA device, got cpu, cpu"):
        captured(dispatcher_of())
