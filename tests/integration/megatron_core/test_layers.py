"""Layers by spec and converted models; calls in flight, recomputed, in pieces; rows that are padding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.integration.deep_ep_users.dense import gradient
from tests.integration.deep_ep_users.megatron_layer import GivenRouter
from tests.integration.megatron_core.jobs import Check, require, run_checks
from tests.integration.megatron_core.layer import (
    EXPERTS,
    RANKS,
    TOP_K,
    Case,
    Outcome,
    Parallel,
    build,
    difference,
    groups,
    outcome,
    own_spec,
    transformer_config,
)
from tests.integration.megatron_core.model import gpt_model, gpt_outcome
from tests.integration.needs import needs

pytestmark = needs("megatron")

ETP = Parallel(ep=2, etp=2, tp=2)
OVERLAP = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True}


def by_spec(rank: int) -> float:
    from moe_dispatch.integrations.megatron import DispatchMoELayer, MegatronDispatcher, moe_layer_spec

    case = Case(seed=1, config=OVERLAP)
    own, ours = build(own_spec(), case), build(moe_layer_spec(own_spec(), backend="allgather"), case)
    assert isinstance(ours, DispatchMoELayer)
    assert isinstance(ours.token_dispatcher, MegatronDispatcher)
    assert ours.token_dispatcher.dispatcher.backend_name == "allgather"
    assert list(ours.state_dict()) == list(own.state_dict())
    return difference(outcome(ours, case.hidden(rank)), outcome(own, case.hidden(rank)))


def converted_gpt(rank: int) -> float:
    from moe_dispatch.integrations.megatron import MegatronDispatcher, convert

    case = Case(seed=2, config={"num_layers": 2, "moe_layer_freq": [0, 1]})
    model = gpt_model(case)
    want = gpt_outcome(model, case, rank)
    convert(model)
    dispatcher = model.decoder.layers[-1].mlp.token_dispatcher
    assert isinstance(dispatcher, MegatronDispatcher)
    assert dispatcher.dispatcher.name == "decoder.layers.1.mlp"
    return difference(gpt_outcome(model, case, rank), want)


def gpt_by_spec(rank: int) -> float:
    from moe_dispatch.integrations.megatron import DispatchMoELayer, moe_layer_spec

    case = Case(seed=3, parallel=Parallel(ep=2), config={"num_layers": 2})
    own = gpt_model(case)
    ours = gpt_model(case, functools.partial(moe_layer_spec, pg_collection=groups(case.parallel)))
    assert all(isinstance(layer.mlp, DispatchMoELayer) for layer in ours.decoder.layers)
    ours.load_state_dict(own.state_dict())
    return difference(gpt_outcome(ours, case, rank), gpt_outcome(own, case, rank))


def gpt_by_block_spec(rank: int) -> float:
    """A dense layer and an MoE layer, as slime and Megatron-Bridge build them."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from moe_dispatch.integrations.megatron import DispatchMoELayer, moe_layer_spec

    case = Case(seed=10, config={"num_layers": 2, "moe_layer_freq": [0, 1]})
    spec = get_gpt_decoder_block_spec(transformer_config(case), use_transformer_engine=False, pp_rank=0)
    own = gpt_model(case, lambda _: spec)
    ours = gpt_model(case, lambda _: moe_layer_spec(spec, pg_collection=groups(case.parallel)))
    assert [isinstance(layer.mlp, DispatchMoELayer) for layer in ours.decoder.layers] == [False, True]
    assert not any(isinstance(layer.mlp, DispatchMoELayer) for layer in own.decoder.layers)
    ours.load_state_dict(own.state_dict())
    return difference(gpt_outcome(ours, case, rank), gpt_outcome(own, case, rank))


def another_backend(rank: int) -> float:
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=4, parallel=ETP, config=OVERLAP)
    layer = build(own_spec(), case)
    convert(layer, backend="alltoall")
    first, hooks = outcome(layer, case.hidden(rank)), len(layer.router._forward_hooks)
    replaced = layer.token_dispatcher
    convert(layer, backend="allgather")
    assert len(layer.router._forward_hooks) == hooks == 1
    with pytest.raises(RuntimeError, match="closed"):
        replaced.dispatcher.plan(like=case.hidden(rank))
    return difference(outcome(layer, case.hidden(rank)), first)


def no_tokens(rank: int) -> float:
    """The learned router takes no empty input, so choices are given."""
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=5, tokens=(6, 0, 9, 5), config=OVERLAP)
    layer = build(own_spec(), case)
    layer.router = GivenRouter()

    def called() -> Outcome:
        generator = torch.Generator().manual_seed(rank)
        scores_TE = torch.randn(case.tokens[rank] * case.batch, EXPERTS, generator=generator)
        chosen_TE = torch.zeros_like(scores_TE).scatter(1, scores_TE.topk(TOP_K).indices, 1.0).bool()
        probs_TE = scores_TE.softmax(1).requires_grad_()
        layer.router.answer = (probs_TE * chosen_TE, chosen_TE)
        hidden = case.hidden(rank).requires_grad_()
        layer.zero_grad()
        output, _ = layer(hidden)
        output.backward(torch.ones_like(output))
        return {"output": output.detach(), "hidden": gradient(hidden), "probs": gradient(probs_TE)} | {
            name: weight.grad.clone() for name, weight in layer.named_parameters() if weight.grad is not None
        }

    want = called()
    convert(layer)
    return difference(called(), want)


def two_in_flight(rank: int) -> float:
    """Forward twice, then backward twice, the first first: as if one after the other."""
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=6, parallel=ETP, tokens=(4, 4, 6, 6))
    layer = build(own_spec(), case)
    convert(layer)
    inputs = [case.hidden(rank), 2 * case.hidden(rank) + 1]
    apart = [outcome(layer, hidden) for hidden in inputs]
    leaves = [hidden.requires_grad_() for hidden in inputs]
    layer.zero_grad()
    outputs = [layer(leaf)[0] for leaf in leaves]
    for output in outputs:
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    errors = [
        difference(
            {"output": output.detach(), "hidden": gradient(leaf)}, {name: one[name] for name in ("output", "hidden")}
        )
        for output, leaf, one in zip(outputs, leaves, apart, strict=True)
    ]
    together = {name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None}
    return max(*errors, difference(together, {name: apart[0][name] + apart[1][name] for name in together}))


def recomputed(rank: int, use_reentrant: bool) -> float:
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=7, tokens=(6, 3, 9, 5), config=OVERLAP)
    layer = build(own_spec(), case)
    convert(layer)
    want = outcome(layer, case.hidden(rank))
    forward = layer.forward
    layer.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=use_reentrant)
    return difference(outcome(layer, case.hidden(rank)), want)


def in_pieces(rank: int) -> float:
    """As a transformer layer calls it around partial CUDA graphs: cudagraph_attrs name what it carries on."""
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=8, config={"moe_shared_expert_intermediate_size": 16})
    layer = build(own_spec(), case)
    convert(layer)
    want = outcome(layer, case.hidden(rank))["output"]
    dispatcher = layer.token_dispatcher
    layer.fwd_execution_map = "route"
    hidden, probs, shared = layer(case.hidden(rank), intermediate_tensors=())
    carried = {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs}
    assert all(torch.is_tensor(value) for value in carried.values())
    layer(case.hidden(rank).flip(0), intermediate_tensors=())  # another replay comes between
    for name, value in carried.items():
        setattr(dispatcher, name, value)
    layer.fwd_execution_map = "expert_compute"
    output, bias = layer(None, intermediate_tensors=(hidden, probs))
    assert bias is None
    layer.fwd_execution_map = "postprocess"
    return difference({"output": layer(None, intermediate_tensors=(output, shared)).detach()}, {"output": want})


def padding_mask(rank: int) -> tuple[float, float, bool]:
    """Masked rows go nowhere; the others and the router's loss are as Megatron has them, where no gradient comes in."""
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=9, tokens=(6, 6, 6, 6))
    layer = build(own_spec(), case)
    padding_BS = torch.zeros(case.batch, case.tokens[rank], dtype=torch.bool)
    padding_BS[0, 4:], padding_BS[1, 1 + rank :] = True, True
    real_SB1 = ~padding_BS.T.unsqueeze(2)

    def called() -> tuple[Outcome, Tensor]:
        hidden = case.hidden(rank).requires_grad_()
        layer.zero_grad()
        output, _ = layer(hidden, padding_mask=padding_BS)
        (output * real_SB1).square().sum().backward()
        grads = {name: weight.grad.clone() for name, weight in layer.named_parameters() if weight.grad is not None}
        return {"output": output.detach() * real_SB1, "hidden": gradient(hidden)} | grads, output.detach()

    want, _ = called()
    convert(layer)
    dispatcher = layer.token_dispatcher.dispatcher
    before = dispatcher.metrics(gather=True).real_tokens_per_expert
    got, output = called()
    sent = dispatcher.metrics(gather=True).real_tokens_per_expert - before
    real = sum(4 + 1 + other for other in range(RANKS))
    return difference(got, want), float((output * ~real_SB1).abs().max()), int(sent.sum()) == real * TOP_K


CHECKS: dict[str, Check] = {
    "by spec": by_spec,
    "a converted GPTModel": converted_gpt,
    "a GPTModel by spec": gpt_by_spec,
    "a GPTModel by the spec of its block": gpt_by_block_spec,
    "another backend": another_backend,
    "no tokens": no_tokens,
    "two in flight": two_in_flight,
    "recomputed": functools.partial(recomputed, use_reentrant=False),
    "recomputed, reentrant": functools.partial(recomputed, use_reentrant=True),
    "in pieces": in_pieces,
}


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_checks(CHECKS | {"padding mask": padding_mask})


@pytest.mark.parametrize("name", CHECKS)
def test_equal(name: str) -> None:
    assert max(require(results()[name])) < 1e-5


def test_rows_of_the_padding_mask_go_nowhere() -> None:
    for error, masked, only_real_ones_sent in require(results()["padding mask"]):
        assert error < 1e-5
        assert masked == 0.0
        assert only_real_ones_sent
