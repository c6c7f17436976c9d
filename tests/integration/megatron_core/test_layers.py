"""Layers, converted or by spec, beside those of Megatron; in flight, recomputed, in pieces; rows that are padding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.errors import ConfigError
from tests.integration.deep_ep_users.dense import gradient
from tests.integration.deep_ep_users.megatron_layer import GivenRouter
from tests.integration.jobs import Check, require
from tests.integration.megatron_core.layer import (
    BALANCED,
    EXPERTS,
    RANKS,
    TOP_K,
    Case,
    Outcome,
    Parallel,
    build,
    gradients_of,
    groups,
    has_copied_experts,
    outcome,
    own_spec,
    transformer_config,
)
from tests.integration.megatron_core.model import gpt_model, gpt_outcome
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.megatron_core.test_balanced_layers import grouped_experts
from tests.integration.needs import needs
from tests.integration.steps import difference

pytestmark = needs("megatron")

TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
SHARED = {"moe_shared_expert_intermediate_size": 16}
OVERLAP = SHARED | {"moe_shared_expert_overlap": True}
CAPACITY = {"moe_expert_capacity_factor": 0.5}
TP, ETP = Parallel(ep=2, tp=2), Parallel(ep=2, etp=2, tp=2)
UNEQUAL = (6, 3, 9, 5)
# What the vendors' libraries carry.
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, "config": {"hidden_size": 256}, "tokens": (32, 32, 9, 9)}
HYBRIDEP = {"name": "hybridep", "emulate": True}
DEEPEP = {"name": "deepep", "emulate": True}

# Each division of ranks, each backend and each field of Megatron's, and the pairs of them that meet in our code.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "shared experts, unequal tokens": (Case(config=SHARED, tokens=UNEQUAL, seed=4), {}),
    "unequal tokens, allgather": (Case(tokens=UNEQUAL, seed=5), {"backend": "allgather"}),
    "exact reduction, debug": (Case(seed=2), {"backend": {"name": "alltoall", "reduction": "exact"}, "debug": True}),
    "ep 2 of 4, shared experts, overlap, gate": (
        Case(parallel=Parallel(ep=2), config=OVERLAP | {"moe_shared_expert_gate": True}, seed=14),
        {},
    ),
    "ep 1": (Case(parallel=Parallel(ep=1), seed=7), {"backend": "local"}),
    "ep 2, tp 2, shared experts, overlap": (Case(parallel=TP, config=OVERLAP, seed=15), {}),
    "ep 2, etp 2, allgather": (Case(parallel=ETP, seed=10), {"backend": "allgather"}),
    "ep 1, etp 4": (Case(parallel=Parallel(ep=1, etp=4), seed=11), {}),
    "etp 2, weights on the input": (Case(parallel=ETP, config=TOP_1, seed=17), {}),
    "dropped by the router": (Case(config=CAPACITY, seed=18), {}),
    "balanced": (Case(tokens=UNEQUAL, config=OVERLAP, seed=24), BALANCED),
    "balanced, ep 2, etp 2, weights on the input": (Case(parallel=ETP, config=TOP_1, seed=27), BALANCED),
    "balanced, dropped by the router": (Case(config=CAPACITY, seed=28), BALANCED),
    "a type that is not alltoall": (Case(config={"moe_token_dispatcher_type": "allgather"}, seed=19), {}),
}
BFLOAT16_CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "hybridep, etp 2": (Case(parallel=ETP, seed=21, **BFLOAT16), {"backend": HYBRIDEP}),
    "hybridep, balanced": (Case(seed=29, **BFLOAT16), {"backend": HYBRIDEP} | BALANCED),
    "deepep, etp 2": (Case(parallel=ETP, seed=23, **BFLOAT16), {"backend": DEEPEP}),
}
TOLERANCES = dict.fromkeys(CASES, 1e-5) | dict.fromkeys(BFLOAT16_CASES, 1.6e-2)


def equal(rank: int, case: Case, given: dict[str, Any]) -> float:
    """How far our layer is from Megatron's; it must be ours, and its parameters where they were."""
    from moe_dispatch.integrations.megatron import MegatronDispatcher, convert

    layer = build(own_spec(), case)
    hidden, keys = case.hidden(rank), list(layer.state_dict())
    want = outcome(layer, hidden)
    convert(layer, **given)
    assert isinstance(layer.token_dispatcher, MegatronDispatcher)
    assert list(layer.state_dict()) == keys
    got = outcome(layer, hidden)
    assert has_copied_experts(layer) == ("balance" in given)
    layer.token_dispatcher.close()
    return difference(got, want)


def converted(case: Case) -> Any:
    from moe_dispatch.integrations.megatron import convert

    layer = build(own_spec(), case)
    convert(layer)
    return layer


def converted_gpt(rank: int) -> float:
    from moe_dispatch.integrations.megatron import MegatronDispatcher, convert

    case = Case(seed=2, config={"num_layers": 2, "moe_layer_freq": [0, 1]})
    model = gpt_model(case)
    want = gpt_outcome(model, rank)
    convert(model)
    dispatcher = model.decoder.layers[-1].mlp.token_dispatcher
    assert isinstance(dispatcher, MegatronDispatcher)
    assert dispatcher.dispatcher.name == "decoder.layers.1.mlp"
    return difference(gpt_outcome(model, rank), want)


def gpt_by_spec(rank: int, of_block: bool) -> float:
    """The spec of a layer; and that of a block with a dense layer, as slime and Megatron-Bridge build it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from moe_dispatch.integrations.megatron import DispatchMoELayer, moe_layer_spec

    config = OVERLAP | {"num_layers": 2, "moe_layer_freq": [0, 1] if of_block else 1}
    case = Case(seed=3, parallel=Parallel(ep=2), config=config)
    block = get_gpt_decoder_block_spec(transformer_config(case), use_transformer_engine=False, pp_rank=0)
    own = gpt_model(case, lambda spec: block if of_block else spec)
    given: dict[str, Any] = {"pg_collection": groups(case.parallel), "backend": "allgather"}
    ours = gpt_model(case, lambda spec: moe_layer_spec(block if of_block else spec, **given))
    assert [isinstance(layer.mlp, DispatchMoELayer) for layer in ours.decoder.layers] == [not of_block, True]
    assert not any(isinstance(layer.mlp, DispatchMoELayer) for layer in own.decoder.layers)
    assert ours.decoder.layers[1].mlp.token_dispatcher.dispatcher.backend_name == "allgather"
    assert list(ours.state_dict()) == list(own.state_dict())
    ours.load_state_dict(own.state_dict())
    return difference(gpt_outcome(ours, rank), gpt_outcome(own, rank))


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
        found = {"output": output.detach(), "hidden": gradient(hidden), "probs": gradient(probs_TE)}
        return found | gradients_of(layer)

    want = called()
    convert(layer)
    return difference(called(), want)


def recomputed(rank: int) -> float:
    """Reentrant, so that the first forward runs without gradients. Packed layers are recomputed in the other way."""
    case = Case(seed=7, tokens=(6, 3, 9, 5), config=OVERLAP)
    layer = converted(case)
    want = outcome(layer, case.hidden(rank))
    forward = layer.forward
    layer.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=True)
    return difference(outcome(layer, case.hidden(rank)), want)


def recomputed_on_routes(rank: int) -> float:
    """Megatron's own recomputation of MoE layers, with three live forwards, and routers that choose otherwise in it.

    The forwards have their routes and ids also if ``keep_routes`` ends before their backwards.
    """
    from megatron.core import tensor_parallel

    from moe_dispatch.integrations.megatron import keep_routes

    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    case = Case(seed=7, tokens=(6, 3, 9, 5), config=OVERLAP | bias)
    layer = converted(case)
    metrics = layer.token_dispatcher.dispatcher.metrics

    def called(then: Callable[[], None] = lambda: None) -> Outcome:
        layer.zero_grad()
        hidden = case.hidden(rank)
        batches = [batch.requires_grad_() for batch in (hidden.clone(), hidden.flip(0), 2 * hidden)]
        losses = [layer(batch)[0].square().sum() for batch in batches]
        layer.router.expert_bias += torch.arange(len(layer.router.expert_bias))
        then()
        for loss in losses:
            loss.backward()
        layer.router.expert_bias.zero_()
        return {str(number): gradient(batch) for number, batch in enumerate(batches)} | gradients_of(layer)

    want, before, combines = called(), metrics().dispatches, metrics().collectives["combine"]
    layer.moe_layer_recompute, checkpoint_of_megatron = True, tensor_parallel.checkpoint
    with keep_routes():
        keep_routes().close()  # it was not the first, so it ends nothing
        got = called()
    assert tensor_parallel.checkpoint is checkpoint_of_megatron
    assert metrics().collectives["combine"] == combines + 3, "recomputations of a layer leave it out"
    ended_early = difference(called(keep_routes().close), want)
    assert tensor_parallel.checkpoint is checkpoint_of_megatron
    assert metrics().dispatches == before + 6
    assert difference(called(), want) > 1e-3
    assert metrics().dispatches == before + 12, "without it, each recomputation dispatches anew"
    return max(difference(got, want), ended_early)


def in_pieces(rank: int) -> float:
    """As a transformer layer calls it around partial CUDA graphs: cudagraph_attrs name what it carries on."""
    case = Case(seed=8, config={"moe_shared_expert_intermediate_size": 16})
    layer = converted(case)
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
        output = output.detach()
        return {"output": output * real_SB1, "hidden": gradient(hidden)} | gradients_of(layer), output

    want, _ = called()
    convert(layer)
    dispatcher = layer.token_dispatcher.dispatcher
    before = dispatcher.metrics(gather=True).real_tokens_per_expert
    got, output = called()
    sent = dispatcher.metrics(gather=True).real_tokens_per_expert - before
    real = sum(4 + 1 + other for other in range(RANKS))
    return difference(got, want), float((output * ~real_SB1).abs().max()), int(sent.sum()) == real * TOP_K


def refused_experts(rank: int) -> float:
    """Experts that count on the host cannot be graph-safe, and sharded parameters have no copies."""
    from moe_dispatch.integrations.megatron import convert

    case = Case(seed=10)
    static: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 32}
    layer = converted(case)
    want = outcome(layer, case.hidden(rank))
    with pytest.raises(
        ConfigError, match="graph_safe=True needs experts that leave their counts on the device, got Seq"
    ):
        convert(layer, **static)
    got = outcome(layer, case.hidden(rank))  # with the dispatcher that it had
    layer.experts = grouped_experts(layer, False, case)
    with pytest.raises(ConfigError, match=r"got TEGroupedMLP\. Use TEGroupedMLP with use_transformer_engine_op_fuser"):
        convert(layer, **static)
    layer.config.use_transformer_engine_op_fuser = True
    convert(layer, **static)
    assert layer.token_dispatcher.dispatcher.config.graph_safe
    layer = build(own_spec(), case)
    convert(layer, **BALANCED)
    layer.experts.local_experts[0].linear_fc1.weight.__fsdp_param__ = True
    with pytest.raises(ConfigError, match="balance needs whole parameters, got those of Megatron-FSDP"):
        layer(case.hidden(rank))
    return difference(got, want)


CHECKS: dict[str, Check] = {
    "a converted GPTModel": converted_gpt,
    "a GPTModel by spec": functools.partial(gpt_by_spec, of_block=False),
    "a GPTModel by the spec of its block": functools.partial(gpt_by_spec, of_block=True),
    "another backend": another_backend,
    "no tokens": no_tokens,
    "recomputed": recomputed,
    "recomputed on routes": recomputed_on_routes,
    "in pieces": in_pieces,
    "refused experts": refused_experts,
}


@functools.cache
def results() -> dict[str, list[Any]]:
    cases = {
        name: functools.partial(equal, case=case, given=given)
        for name, (case, given) in (CASES | BFLOAT16_CASES).items()
    }
    return run_megatron(cases | CHECKS | {"padding mask": padding_mask})


@pytest.mark.parametrize("name", TOLERANCES)
def test_a_converted_layer_is_that_of_megatron(name: str) -> None:
    assert max(require(results()[name])) < TOLERANCES[name]


@pytest.mark.parametrize("name", CHECKS)
def test_equal(name: str) -> None:
    assert max(require(results()[name])) < 1e-5


def test_rows_of_the_padding_mask_go_nowhere() -> None:
    for error, masked, only_real_ones_sent in require(results()["padding mask"]):
        assert error < 1e-5
        assert masked == 0.0
        assert only_real_ones_sent
