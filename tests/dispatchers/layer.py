"""What these tests share: a small config, random routing, experts that loop, and what each rank came to."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.quantised import QuantisedRows
from moe_dispatch_testing.ranks import TIMEOUT, run_ranks
from tests import ranks

NUM_EXPERTS, TOP_K, HIDDEN = 8, 2, 16
BACKENDS = [("local", 1), ("alltoall", 2), ("allgather", 2)]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 4}

Group = Any  # a process group; None on one rank alone
Result = TypeVar("Result")


def small_config(backend: str | dict[str, Any] = "alltoall", **fields: Any) -> DispatcherConfig:
    sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
    return DispatcherConfig(backend=backend, **{**sizes, **fields})


def random_routing(rows: int, seed: int = 0, *, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    return Routing(ids, torch.rand(rows, top_k, generator=generator))


def random_rows(rows: int, hidden: int = HIDDEN, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator, dtype=torch.float64).to(dtype)


def expert_weights(
    num_experts: int = NUM_EXPERTS, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32, seed: int = 99
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_experts, hidden, hidden, generator=generator, dtype=torch.float64)
    return weights.div(hidden**0.5).to(dtype)


def apply_experts(sent: Dispatched, weights_LDD: Tensor) -> Tensor:
    """Each local expert is ``tanh(rows @ weights)``."""
    assert sent.tokens_per_expert_list is not None
    parts = sent.rows.split(sent.tokens_per_expert_list)
    return torch.cat([torch.tanh(part @ weights) for part, weights in zip(parts, weights_LDD, strict=True)])


def rank_of(group: Group) -> int:
    return 0 if group is None else group.rank()


def local_part(weights_EDD: Tensor, group: Group) -> Tensor:
    """This rank's experts, a leaf of its own."""
    size = 1 if group is None else group.size()
    return weights_EDD.chunk(size)[rank_of(group)].clone().requires_grad_()


def cut_layer(
    config: DispatcherConfig, cut: list[int], x_TD: Tensor, way: Routing, grad_TD: Tensor, weights_EDD: Tensor
) -> dict[str, Tensor]:
    """Output and gradients of all tokens and experts, in global order, where rank r has ``cut[r]`` of the tokens."""

    def body(group: Group) -> dict[str, Tensor]:
        rank = rank_of(group)
        dispatcher, mine = build_dispatcher(config, group), local_part(weights_EDD, group)
        x = x_TD.split(cut)[rank].clone().requires_grad_()
        topk_weights = way.topk_weights.split(cut)[rank].clone().requires_grad_()
        sent = dispatcher.dispatch(x, Routing(way.topk_ids.split(cut)[rank], topk_weights))
        outputs = apply_experts(sent, mine)
        if config.weights == "experts":
            outputs = (outputs.float() * sent.weights.unsqueeze(1)).to(x.dtype)
        y = dispatcher.combine(outputs, sent)
        y.backward(grad_TD.split(cut)[rank])
        assert x.grad is not None
        assert sent.rows.dtype == y.dtype == x.grad.dtype == x.dtype
        parts = {"y": y.detach(), "x": x.grad, "weights": topk_weights.grad, "experts": mine.grad}
        return {name: part for name, part in parts.items() if part is not None}

    results = on_ranks(body, len(cut))
    return {name: torch.cat([result[name] for result in results]) for name in results[0]}


class _Doubled(torch.autograd.Function):
    """Stand for experts that read quantised rows only: each output is twice its row."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        blocks = values.float().view(*scales.shape, -1) * scales.float().unsqueeze(-1)
        return (2 * blocks).view(values.shape).to(edge.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None, None


def doubled(quantised: QuantisedRows | None) -> Tensor:
    assert quantised is not None
    outputs: Tensor = _Doubled.apply(quantised.edge, quantised.values, quantised.scales)  # type: ignore[no-untyped-call]
    return outputs


def by_operators(call: Callable[[Tensor], Result], x: Tensor) -> Result:
    """Call under selective checkpointing, which calls operators, because they can be saved."""
    raised: list[Exception] = []

    def guarded(x: Tensor) -> Any:
        try:
            return call(x)
        except Exception as error:
            raised.append(error)
            return x

    # No error passes through `checkpoint`: torch 2.10 would leave its modes on until the garbage collector ends them,
    # in whichever thread it runs.
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    result: Result = checkpoint(guarded, x, use_reentrant=False, context_fn=contexts)
    if raised:
        raise raised[0]
    return result


def identity_round(dispatcher: Dispatcher, rows: int = 4, seed: int = 0) -> None:
    """One right call, to show that a dispatcher and its group can still be used."""
    x, routing = random_rows(rows, dispatcher.config.hidden_size, seed), random_routing(rows, seed)
    sent = dispatcher.dispatch(x, routing)
    y = dispatcher.combine(sent.rows, sent)
    torch.testing.assert_close(y, x * routing.topk_weights.sum(1, keepdim=True))


def caught(body: Callable[..., Any], *arguments: Any) -> Any:
    """What ``body`` returned or raised."""
    try:
        return body(*arguments)
    except Exception as error:
        return error


def outcomes(
    body: Callable[[dist.ProcessGroup], Any], size: int, *, seconds: float = TIMEOUT.total_seconds()
) -> list[Any]:
    """What ``body`` returned or raised, by rank; ``seconds`` is the timeout of the group."""
    return run_ranks(partial(caught, body), size, timeout=datetime.timedelta(seconds=seconds))


def on_ranks(body: Callable[[Group], Result], size: int) -> list[Result]:
    """What ``body`` returned, by rank; a size of 1 is one rank without a process group."""
    return ranks.run_ranks(body, size) if size > 1 else [body(None)]


def outcomes_on(body: Callable[[Group], Any], size: int) -> list[Any]:
    """What ``body`` returned or raised, by rank; a size of 1 is one rank without a process group."""
    return outcomes(body, size) if size > 1 else [caught(body, None)]


def refused(body: Callable[[Group], Any], size: int, kind: type[Exception], *texts: str) -> None:
    """Every rank raises ``kind`` with all of ``texts`` in its message, and leaves no peer waiting."""
    on_ranks(lambda group: raises_everywhere([caught(body, group)], kind, *texts), size)


def raises_everywhere(results: list[Any], kind: type[Exception], *texts: str) -> None:
    """Every rank raised ``kind`` with all of ``texts`` in its message."""
    for rank, result in enumerate(results):
        if not isinstance(result, kind):
            told = "".join(traceback.format_exception(result)) if isinstance(result, Exception) else repr(result)
            raise AssertionError(f"rank {rank} must raise {kind.__name__}, got {told}")
        for text in texts:
            assert text in str(result), f"rank {rank}: {text!r} is not in {result}"
