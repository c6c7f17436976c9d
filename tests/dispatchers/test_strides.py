"""Tensors of any strides: views of wider tables, transposed, expanded, and of one row, of one number or of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.capabilities.carry import columns
from moe_dispatch.dispatchers import SlotWeights, run_in_chunks
from moe_dispatch.permutation import grouped_mm
from tests.deep_ep_backends.vendors import HYBRID, RAGGED, V1, V2, V25
from tests.dispatchers.layer import Group, on_ranks, rank_of

E, D = 8, 256
EXACT, BY_NODE = {"name": "alltoall", "reduction": "exact"}, {"name": "alltoall_by_node", "ranks_per_node": 1}
BACKENDS: list[Any] = ["alltoall", "allgather", EXACT, BY_NODE, V1, V2, V25, HYBRID, RAGGED]
STRIDES = ("as it is", "column of a table", "transposed", "every other row", "odd")


def strided(tensor: Tensor, how: str) -> Tensor:
    """The same numbers with other strides."""
    if how == "column of a table":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if how == "transposed":
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.flip(0).clone().flip(0)
    if how == "every other row":
        return tensor.repeat_interleave(2, 0)[::2]
    if how == "odd":  # of dimensions of size 1; their strides mean nothing
        strides = [7 + dim if size <= 1 else tensor.stride(dim) for dim, size in enumerate(tensor.shape)]
        return tensor.as_strided(tensor.shape, strides)
    return tensor


def inputs(rank: int, rows: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, D, generator=generator)
    weights, ids = torch.rand(rows, E, generator=generator).topk(top_k)
    return x, ids, weights, torch.arange(rows) + 100 * rank, torch.randn(rows, D, generator=generator)


def step(
    group: Group, backend: Any, fields: dict[str, Any], rows: int, top_k: int, how: tuple[str, ...]
) -> dict[str, Tensor]:
    """A step whose x, ids, weights, carry and upstream gradient have the strides ``how`` on rank 0."""
    rank = rank_of(group)
    values = inputs(rank, rows if rank == 0 else 5, top_k)
    if rank == 0:
        values = tuple(map(strided, values, how))  # type: ignore[assignment]
    x, ids, weights, carried, upstream = values
    x, weights = x.requires_grad_(), weights.requires_grad_()
    config = DispatcherConfig(
        backend=backend,
        num_experts=E,
        top_k=top_k,
        hidden_size=D,
        wire="bfloat16" if isinstance(backend, dict) and backend["name"] != "alltoall" else None,
        **fields,
    )
    dispatcher, found = build_dispatcher(config, group), list[Tensor]()

    def experts(sent: Dispatched, *_: Tensor) -> Tensor:
        assert sent.carried is not None
        found.append(sent.carried["token"])
        return sent.rows * 2

    routing, carry = Routing(ids, weights), {"token": carried}
    if "chunks" in fields:
        y = run_in_chunks(dispatcher, experts, x, routing, carry=carry)
    elif "balance" in fields:
        matrices = torch.ones(E // 2, 1)
        sent, rows_RD = SlotWeights(dispatcher).run(dispatcher.dispatch(x, routing, carry=carry), experts, matrices)
        y = dispatcher.combine(rows_RD, sent)
    else:
        sent = dispatcher.dispatch(x, routing, carry=carry)
        y = dispatcher.combine(experts(sent), sent)
    y.backward(upstream)
    dispatcher.close()
    assert x.grad is not None
    assert weights.grad is not None
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "carried": torch.cat(found)}


def check(backend: Any, fields: dict[str, Any], rows: int, top_k: int, how: tuple[str, ...]) -> None:
    """The results have the bits of those of plain tensors."""
    plain, others = (
        on_ranks(lambda group, how=each: step(group, backend, fields, rows, top_k, how), 2)  # type: ignore[misc]
        for each in (("as it is",) * 5, how)
    )
    for mine, its in zip(others, plain, strict=True):
        for name, tensor in its.items():
            assert torch.equal(mine[name], tensor), name


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph-safe": {"graph_safe": True, "max_tokens_per_rank": 8},
    "chunks": {"chunks": 1},
    "balanced": {"balance": {"name": "exact", "min_rows": 0}},
    "eplb": {"balance": {"name": "eplb", "spare_experts_per_rank": 2}},
}


@pytest.mark.parametrize("how", STRIDES[1:])
@pytest.mark.parametrize(("rows", "top_k"), [(1, 2), (1, 1), (0, 1), (3, 1)])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_few_rows_of_odd_strides(backend: Any, rows: int, top_k: int, how: str) -> None:
    """One rank raised torch's "stride(-1) must be 1", and the others waited for it."""
    check(backend, {}, rows, top_k, (how,) * 5)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("backend", ["alltoall", "allgather", V25, HYBRID], ids=str)
def test_odd_strides_in_every_mode(backend: Any, mode: str, top_k: int) -> None:
    for rows in (0, 1, 4):
        check(backend, MODES[mode], rows, top_k, ("column of a table",) * 5)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["alltoall", "allgather", EXACT, V1, HYBRID]),
    st.sampled_from(["eager", "chunks"]),
    st.integers(0, 4),
    st.integers(1, 3),
    st.tuples(*[st.sampled_from(STRIDES)] * 5),
)
def test_any_strides(backend: Any, mode: str, rows: int, top_k: int, how: tuple[str, ...]) -> None:
    check(backend, MODES[mode], rows, top_k, how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_one_row(dtype: torch.dtype) -> None:
    """torch's grouped GEMM refused the stride 9 of a dimension of size 1."""
    config = DispatcherConfig(backend="local", num_experts=2, top_k=1, hidden_size=8)
    sent = build_dispatcher(config).dispatch(
        torch.ones(1, 8, dtype=dtype), Routing(torch.zeros(1, 1).long(), torch.ones(1, 1))
    )
    wide, matrices = torch.randn(1, 9, dtype=dtype), torch.randn(2, 8, 8, dtype=dtype, requires_grad=True)
    rows = wide[:, :8].detach().requires_grad_()
    y = sent.grouped_mm(rows, matrices)
    torch.testing.assert_close(y, rows @ matrices[0])
    upstream = torch.ones(1, 9, dtype=dtype)[:, :8]
    y.backward(upstream)
    assert matrices.grad is not None
    torch.testing.assert_close(matrices.grad[0], rows.detach().t() @ upstream)


def test_a_planted_contiguous_is_refused_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (columns, grouped_mm):
        monkeypatch.setattr(module, "dense", Tensor.contiguous)
    config = DispatcherConfig(backend="local", num_experts=2, top_k=1, hidden_size=8)
    dispatcher, routing = build_dispatcher(config), Routing(torch.zeros(1, 1).long(), torch.ones(1, 1))
    carry = {"token": torch.arange(2).view(1, 2)[:, 0]}
    with pytest.raises(RuntimeError, match=r"stride\(-1\) must be 1"):
        dispatcher.dispatch(torch.ones(1, 8), routing, carry=carry)
    sent = dispatcher.dispatch(torch.ones(1, 8), routing)
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        sent.grouped_mm(torch.ones(1, 9)[:, :8], torch.ones(2, 8, 8))
