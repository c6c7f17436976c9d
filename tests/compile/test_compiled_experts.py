"""Experts in a compiled region: both helpers, a loop over host counts, and arguments in the wrong order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch import Dispatched
from tests.compile.layer import HIDDEN, NUM_EXPERTS, Experts, dispatcher_for, graphs, layer_of, needs_compiler, tensors

Results = list[Tensor | None]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 16, "pad_multiple": 4}


def matrices(dtype: torch.dtype = torch.float32, inner: int = 24) -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(NUM_EXPERTS, HIDDEN, inner, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, inner, HIDDEN, generator=generator) / inner**0.5
    return nn.Parameter(up.to(dtype)), nn.Parameter(down.to(dtype))


def grouped(up: Tensor, down: Tensor) -> Experts:
    def experts(sent: Dispatched) -> Tensor:
        inner = torch.tanh(sent.grouped_mm(sent.rows, up))
        return sent.grouped_mm(inner / inner.norm(dim=1, keepdim=True), down)  # 0/0 on padding

    return experts


def modules() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN)) for _ in range(8))


def loop(mlps: nn.ModuleList) -> Experts:
    def experts(sent: Dispatched) -> Tensor:
        assert sent.tokens_per_expert_list is not None
        parts = sent.rows.split(sent.tokens_per_expert_list)
        return torch.cat([mlp(rows) for mlp, rows in zip(mlps, parts, strict=True)])

    return experts


def step(run: Callable[..., Tensor], rows: int, dtype: torch.dtype, leaves: list[nn.Parameter]) -> Results:
    x, ids, weights = tensors(rows, rows, dtype)
    for leaf in leaves:
        leaf.grad = None
    y = run(x, ids, weights)
    y.square().sum().backward()
    return [y.detach(), x.grad, weights.grad, *(leaf.grad for leaf in leaves)]


def expect_close(got: Results, wanted: Results) -> None:
    loose = wanted[0] is not None and wanted[0].dtype in (torch.bfloat16, torch.float16)
    for one, other in zip(got, wanted, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=2e-2 if loose else 1e-4, atol=2e-1 if loose else 1e-5)


def expect_same_steps(
    layer: Callable[..., Tensor], leaves: list[nn.Parameter], dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Compiled once for any number of rows, the layer gives what it gives in eager mode."""
    compiled = torch.compile(layer, fullgraph=True, **options)

    def run(*inputs: Tensor) -> Tensor:
        for tensor in inputs:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        return compiled(*inputs)

    for rows in (10, 7, 0, 1):
        expect_close(step(run, rows, dtype, leaves), step(layer, rows, dtype, leaves))
    assert graphs() == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_grouped_mm_with_inductor(fields: dict[str, Any]) -> None:
    leaves = matrices()
    expect_same_steps(layer_of(dispatcher_for("alltoall", **fields), grouped(*leaves)), [*leaves])


@pytest.mark.parametrize(
    ("dtype", "inner", "fields"),
    [(torch.float32, 5, SAFE), (torch.bfloat16, 24, {})],  # 5: rows that are not aligned
    ids=["graph-safe", "bfloat16"],
)
def test_grouped_mm(dtype: torch.dtype, inner: int, fields: dict[str, Any]) -> None:
    leaves = matrices(dtype, inner)
    layer = layer_of(dispatcher_for("alltoall", **fields), grouped(*leaves))
    expect_same_steps(layer, [*leaves], dtype, backend="aot_eager")


@pytest.mark.slow
@needs_compiler
def test_per_expert() -> None:
    mlps = modules()
    layer = layer_of(dispatcher_for("alltoall", pad_multiple=4), lambda sent: sent.per_expert(mlps))
    expect_same_steps(layer, list(mlps.parameters()))


def test_an_expert_that_ignores_its_rows_gives_them_no_gradient() -> None:
    functions: list[Callable[[Tensor], Tensor]] = [torch.relu, torch.zeros_like, *[nn.Identity()] * 6]
    layer = layer_of(dispatcher_for(), lambda sent: sent.per_expert(functions))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expect_close(step(compiled, 10, torch.float32, []), step(layer, 10, torch.float32, []))


def test_a_loop_over_host_counts_names_the_helpers() -> None:
    compiled = torch.compile(layer_of(dispatcher_for(), loop(modules())), fullgraph=True, backend="aot_eager")
    told = r"(?s)counts stay on the device in a compiled region.*sent.per_expert and sent.grouped_mm compile.*disable"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=told):
        compiled(*tensors(10, 0, torch.float32))


# torch reads .grad of a tensor between two graphs, and hides the warning except where warnings are errors.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("disabled", [False, True], ids=["breaks", "disabled"])
def test_a_loop_over_host_counts_runs_where_the_graph_may_break(disabled: bool) -> None:
    mlps = modules()
    experts = loop(mlps)
    layer = layer_of(dispatcher_for("alltoall"), experts)
    broken = layer_of(dispatcher_for("alltoall"), torch.compiler.disable(experts) if disabled else experts)
    compiled = torch.compile(broken, backend="aot_eager")
    for rows in (10, 7):
        leaves = list(mlps.parameters())
        expect_close(step(compiled, rows, torch.float32, leaves), step(layer, rows, torch.float32, leaves))


def test_weights_before_ids() -> None:
    compiled = torch.compile(layer_of(dispatcher_for(), lambda sent: sent.rows), fullgraph=True, backend="aot_eager")
    x, ids, weights = tensors(10, 0, torch.float32)
    with pytest.raises(ValueError, match=r"torch\.topk returns the weights first"):
        compiled(x, weights, ids)
