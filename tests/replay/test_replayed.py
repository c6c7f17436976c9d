"""Weights and gradients of replayed routing, and the measured drift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_dispatch import THD, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch.replay import RoutingTable, replayed
from tests.dispatchers.layer import apply_experts, expert_weights, local_part, random_rows
from tests.ranks import run_ranks
from tests.replay.samples import random_ids

E, K, D, T, SCALE = 8, 3, 16, 12, 1.7
CONFIG = DispatcherConfig(backend="alltoall", num_experts=E, top_k=K, hidden_size=D)


def dense(x: Tensor, router: Tensor, weights_EDD: Tensor, ids_TK: Tensor) -> Tensor:
    """A float64 layer that computes every expert for every row, and picks the forced ones."""
    scores_TE = F.softmax(x @ router, 1)
    forced_TE = torch.stack([(ids_TK == expert).sum(1) for expert in range(E)], 1) * scores_TE
    forced_TE = SCALE * forced_TE / forced_TE.sum(1, keepdim=True).clamp(min=1e-300)
    every_TED = torch.tanh(torch.einsum("td,edf->tef", x, weights_EDD))
    return torch.einsum("te,tef->tf", forced_TE, every_TED)


@pytest.mark.parametrize(("size", "recompute"), [(1, "reentrant"), (2, None), (2, "not reentrant")])
def test_gradients_equal_a_dense_model_with_forced_ids(size: int, recompute: str | None) -> None:
    lengths = {rank: T - 2 - rank for rank in range(size)}
    table = RoutingTable({r: random_ids(n, 2, K, E, r) for r, n in lengths.items()}, num_experts=E)
    table.stored_NLK[1, 1] = table.stored_NLK[1, 1, 0]  # one row names an expert three times

    def body(group: Any) -> tuple[Tensor, ...]:
        rank = group.rank()
        weights = local_part(expert_weights(E, D, torch.float64), group)
        router = random_rows(D, E, 5, torch.float64).requires_grad_()
        x = random_rows(T, D, rank, torch.float64).requires_grad_()
        layout = THD([0, lengths[rank]], [0, T])
        cut, dispatcher = table.cut(layout, [rank], like=x), build_dispatcher(CONFIG, group)

        def layer(x: Tensor) -> Tensor:
            routing = replayed(cut.routing_for(1), F.softmax(x @ router, 1), normalize=True, scale=SCALE)
            sent = dispatcher.dispatch(x, routing, layout)
            return dispatcher.combine(apply_experts(sent, weights), sent)

        y: Tensor = layer(x) if recompute is None else checkpoint(layer, x, use_reentrant=recompute == "reentrant")
        (y * random_rows(T, D, 50 + rank, torch.float64)).sum().backward()
        assert x.grad is not None
        assert router.grad is not None
        assert weights.grad is not None
        return y.detach(), x.grad, router.grad, weights.grad

    parts = run_ranks(body, size)
    all_weights = expert_weights(E, D, torch.float64).requires_grad_()
    router_grad = torch.zeros(D, E, dtype=torch.float64)
    for rank, (y, x_grad, grad, _) in enumerate(parts):
        x = random_rows(T, D, rank, torch.float64).requires_grad_()
        router = random_rows(D, E, 5, torch.float64).requires_grad_()
        ids = torch.cat([table.entries(rank)[:, 1], torch.full((T - lengths[rank], K), -1)])
        wanted = dense(x, router, all_weights, ids)
        (wanted * random_rows(T, D, 50 + rank, torch.float64)).sum().backward()
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(grad, router.grad)
        assert router.grad is not None
        router_grad += router.grad
    torch.testing.assert_close(torch.cat([part[3] for part in parts]), all_weights.grad)
    assert router_grad.abs().sum() > 0


def test_drifted_ids_keep_their_scores() -> None:
    """ISEEKYAN/Megatron-LM#79: gathered from scores that a top-k had zeroed, drifted ids had no gradient."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]], requires_grad=True)
    routing = replayed(torch.tensor([[2, 3]]), scores, normalize=True)
    torch.testing.assert_close(routing.topk_weights, torch.tensor([[0.75, 0.25]]))
    routing.topk_weights[0, 0].backward()
    assert scores.grad is not None
    assert (scores.grad[0, 2:] != 0).all()
    assert (scores.grad[0, :2] == 0).all()
    assert routing.drift is not None
    assert routing.drift.tolist() == [2, 2]
    swapped = replayed(torch.tensor([[1, 0]]), scores, normalize=True)
    assert swapped.drift is not None
    assert swapped.drift.tolist() == [0, 2], "another order of the slots is no drift"


def test_unknown_rows_take_the_choice_of_the_router() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], requires_grad=True)
    ids = torch.tensor([[-2, -2], [0, -1], [-1, -1]])
    routing = replayed(ids, scores, normalize=False)
    assert routing.topk_ids.tolist() == [[0, 1], [0, -1], [-1, -1]]
    torch.testing.assert_close(routing.topk_weights, torch.tensor([[0.5, 0.3], [0.1, 0.0], [0.0, 0.0]]))
    assert routing.drift is not None
    assert routing.drift.tolist() == [1, 1]  # only the slot that was replayed counts
    own = torch.tensor([[2, 1], [0, 1], [0, 1]])
    chosen = replayed(ids, scores, normalize=True, own_ids_TK=own)
    assert chosen.topk_ids[0].tolist() == [2, 1]
    assert chosen.drift is not None
    assert chosen.drift.tolist() == [0, 1]
    chosen.topk_weights.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "below"),
    [
        *((torch.float32, below) for below in (20.0, 88.0, 95.0, 400.0)),
        *((torch.bfloat16, below) for below in (88.0, 95.0)),
        (torch.float16, 20.0),
    ],
)
def test_replayed_experts_without_a_score_keep_finite_weights(below: float, dtype: torch.dtype) -> None:
    """The softmax of logits far below the largest one underflows to 0, or to a number whose reciprocal is infinite."""
    logits = torch.tensor([[200.0, -200, 200 - below, 200 - below]], dtype=dtype, requires_grad=True)
    scores = logits.softmax(1)
    routing = replayed(torch.tensor([[2, 3]]), scores, normalize=True)
    assert routing.topk_weights.isfinite().all()
    total = float(routing.topk_weights.detach().sum())
    assert total == pytest.approx(1, rel=1e-2) if 2 * scores[0, 2] >= torch.finfo(dtype).tiny else total < 1e-3
    routing.topk_weights[0, 0].backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


IDS, SCORES = torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 3)


@pytest.mark.parametrize(
    ("ids", "scores", "options", "told"),
    [
        (IDS[:3], SCORES, {}, r"ids must be int64 \(T, K\) .* got torch.int64 \(3, 2\) and torch.float32 \(4, 3\)"),
        (IDS.int(), SCORES, {}, r"got torch.int32 \(4, 2\)"),
        (IDS, SCORES.int(), {}, r"scores floating \(T, E\), got torch.int64 \(4, 2\) and torch.int32 \(4, 3\)"),
        (IDS, SCORES[:, :1], {}, r"got 2 slots and 1 experts"),
        (IDS + 3, SCORES, {}, r"ids must lie in -2\.\.2, got 3"),
        (IDS - 3, SCORES, {}, r"ids must lie in -2\.\.2, got -3"),
        (IDS, SCORES, {"own_ids_TK": IDS[:, :1]}, r"own_ids must be int64 \(4, 2\) as ids, got torch.int64 \(4, 1\)"),
    ],
)
def test_refused(ids: Tensor, scores: Tensor, options: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        replayed(ids, scores, normalize=True, **options)


def test_drift_in_the_metrics() -> None:
    def body(group: Any) -> Any:
        first, second = (build_dispatcher(CONFIG, group, name=f"layers.{n}") for n in range(2))
        x, scores = random_rows(T), torch.arange(T * E).view(T, E) % E / 10.0  # experts 7, 6 and 5 in every row
        ids = torch.tensor([[7, 5, 0]]).expand(T, K)
        for dispatcher, given in ((first, ids), (second, ids.flip(1)), (first, ids)):
            sent = dispatcher.dispatch(x, replayed(given, scores, normalize=True))
            dispatcher.combine(sent.rows, sent)
        plain = first.dispatch(x, Routing(ids, torch.rand(T, K)))
        first.combine(plain.rows, plain)
        return first.metrics(), first.metrics(gather=True)

    assert build_dispatcher(CONFIG.replace(backend="local")).metrics().replay_drift == {}, "nothing was replayed"
    for mine, everyone in run_ranks(body, 2):
        assert mine.slots_replayed == {"layers.0": 2 * T * K, "layers.1": T * K}
        assert mine.slots_drifted == {"layers.0": 2 * T, "layers.1": T}
        assert everyone.slots_replayed == {"layers.0": 4 * T * K, "layers.1": 2 * T * K}
        assert everyone.replay_drift == pytest.approx({"layers.0": 1 / 3, "layers.1": 1 / 3})
