"""Megatron's routers replay a table: by key, in any division of the rows, as Megatron's own replay where that works."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.replay import RoutingTable
from tests.integration.jobs import Check, require
from tests.integration.megatron_core.layer import (
    BALANCED,
    EXPERTS,
    TOP_K,
    Outcome,
    groups,
    has_copied_experts,
    own_spec,
    transformer_config,
)
from tests.integration.megatron_core.model import moe_block
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.megatron_core.test_packed import (
    ALONE,
    LAYERS,
    PADDED,
    REAL,
    SHARDED,
    case_of,
    drawn,
    params,
    recompute_layers,
    rows_of_rank,
)
from tests.integration.megatron_core.test_packed import called as call
from tests.integration.needs import needs
from tests.integration.steps import difference

pytestmark = needs("megatron")

NAMES = [f"sample {index}" for index in range(len(REAL))]


def entries() -> list[Tensor]:
    """Ids (S, L, K) of each sequence, different in each entry."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.rand(length, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].contiguous()
        for length in REAL
    ]


def table_of(ids: list[Tensor], **options: Any) -> RoutingTable:
    return RoutingTable(zip(NAMES, ids, strict=True), num_experts=EXPERTS, **options)


def ids_of_rows(rank: int, parallel: Any) -> Tensor:
    """(T, L, K) of this rank's rows, without any of the code that is tested; 0, 1, 2 in padding."""
    whole = torch.arange(TOP_K).repeat(sum(PADDED), LAYERS, 1)
    start = 0
    for ids, padded in zip(entries(), PADDED, strict=True):
        whole[start : start + len(ids)] = ids
        start += padded
    return whole[rows_of_rank(rank, parallel)]


class Routed:
    """What the routers of a block chose, in order of their calls."""

    def __init__(self, block: Any) -> None:
        self.maps: list[tuple[int, Tensor]] = []
        for number, layer in enumerate(block.layers):
            layer.mlp.router.register_forward_hook(
                lambda router, args, routed, number=number: self.maps.append((number, routed[1]))
            )


def replays(rank: int, parallel: Any, how: str) -> float:
    """Against Megatron's own replay of the same ids; and every real row went to its experts."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from moe_dispatch.integrations.megatron import RoutingReplay, convert

    RouterReplay.clear_global_router_replay_instances()
    block = moe_block(case_of(parallel, moe_enable_routing_replay=True))
    hidden, real_T = drawn(rank, parallel)
    ids_TLK = ids_of_rows(rank, parallel)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    RouterReplay.set_replay_data(list(ids_TLK.unbind(1)))
    want = call(block, hidden, real_T, packed_seq_params=params(), padding_mask=~real_T.unsqueeze(0))
    convert(block, **(BALANCED if "balanced" in how else {}))
    routed, table = Routed(block), table_of(entries())
    replay = RoutingReplay(block, table)
    if "recomputed" in how:
        recompute_layers(block)
    packed, other, between = params(), params(), None
    replay.micro_batch(packed, NAMES)
    if how == "interleaved":  # another micro-batch of other names runs before the backward, as in a pipeline
        replay.micro_batch(other, [None] * len(NAMES))
        between = functools.partial(block, hidden, None, packed_seq_params=other)
    first = call(block, hidden, real_T, between=between, packed_seq_params=packed)
    for number, map_TE in routed.maps[:LAYERS] + (routed.maps[LAYERS:] if "recomputed" in how else []):
        expected = torch.zeros_like(map_TE).scatter(1, ids_TLK[:, number], True)
        assert (map_TE[real_T] == expected[real_T]).all()
        assert not map_TE[~real_T].any()
    assert len(routed.maps) == LAYERS * (2 if "recomputed" in how or how == "interleaved" else 1)
    assert has_copied_experts(block) == ("balanced" in how)
    table.check_used(group=torch.distributed.group.WORLD)
    replay.close()
    assert isinstance(block.layers[0].mlp.router.router_replay, RouterReplay)
    return difference(first, want)


def unknown_entries(rank: int) -> tuple[float, float]:
    """A table that knows nothing changes nothing; a table of the router's own choices has no drift, another one has."""
    from moe_dispatch.integrations.megatron import RoutingReplay, convert

    block = moe_block(case_of(ALONE))
    hidden, real_T = drawn(rank, ALONE)
    convert(block)
    dispatcher = block.layers[0].mlp.token_dispatcher.dispatcher
    routed = Routed(block)
    start = slots(dispatcher)
    want = call(block, hidden, real_T, packed_seq_params=params())
    own = torch.stack([map_TE.int().topk(TOP_K, dim=1).indices for _, map_TE in routed.maps], 1)

    def replayed(ids: list[Tensor]) -> Outcome:
        replay, packed = RoutingReplay(block, table_of(ids)), params()
        replay.micro_batch(packed, NAMES)
        found = call(block, hidden, real_T, packed_seq_params=packed)
        replay.close()
        return found

    for how, ids in {"unknown": [torch.full_like(part, -1) for part in entries()], "own": cut_up(own)}.items():
        assert difference(replayed(ids), want) < 1e-5, how
    own_choice = slots(dispatcher)
    replayed(entries())
    (own_drifted, own_replayed), (drifted, replayed_slots) = own_choice - start, slots(dispatcher) - own_choice
    return float(own_drifted / own_replayed), float(drifted / replayed_slots)


def cut_up(rows_TLK: Tensor) -> list[Tensor]:
    starts = [sum(PADDED[:index]) for index in range(len(PADDED))]
    return [rows_TLK[start : start + real] for start, real in zip(starts, REAL, strict=True)]


def slots(dispatcher: Any) -> Tensor:
    """Drifted and replayed slots so far of the channel, which models of other checks may still share."""
    metrics = dispatcher.metrics()
    return torch.tensor([sum(metrics.slots_drifted.values()), sum(metrics.slots_replayed.values())])


def predicts_more_tokens(rank: int) -> tuple[bool, bool] | None:
    """Whether the block was replayed, and whether the layer for multi-token prediction behind it chose by itself.

    NeMo-RL #3903: Megatron's own replay has one list for all routers, and the layer for multi-token prediction, whose
    number is 1, replayed the first layer of the backbone.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from moe_dispatch.integrations.megatron import RoutingReplay, convert

    case = case_of(ALONE, mtp_num_layers=1)
    attention = ModuleSpec(module=IdentityOp, params={"attn_mask_type": AttnMaskType.causal})
    submodules = TransformerLayerSubmodules(self_attention=attention, mlp=own_spec(), mlp_bda=get_bias_dropout_add)
    inner = ModuleSpec(module=TransformerLayer, submodules=submodules)
    spec = get_mtp_layer_spec(inner, False)
    if not hasattr(spec.submodules, "mtp_model_layer"):
        return None
    predictor = build_module(spec, config=transformer_config(case), pg_collection=groups(ALONE))
    decoder = moe_block(case_of(ALONE))
    model = nn.ModuleDict({"decoder": decoder, "mtp": predictor})
    convert(model)
    layer = predictor.mtp_model_layer
    assert layer.layer_number == decoder.layers[0].layer_number == 1
    hidden, real_T = drawn(rank, ALONE)
    chosen: list[Tensor] = []
    layer.mlp.router.register_forward_hook(lambda router, args, routed: chosen.append(routed[1]))
    routed = Routed(decoder)

    def forward(packed: Any) -> None:
        decoder(hidden, None, packed_seq_params=packed)
        tokens = torch.arange(len(hidden)).unsqueeze(0)
        embedding = functools.partial(lambda given, **_: given, hidden)
        predictor(tokens, tokens, hidden, None, packed_seq_params=packed, embedding=embedding)

    with torch.no_grad():
        forward(params())
        replay = RoutingReplay(model, table_of(entries()))
        packed = params()
        replay.micro_batch(packed, NAMES)
        forward(packed)
    replay.close()
    ids_TLK = ids_of_rows(rank, ALONE)
    want = torch.zeros_like(routed.maps[LAYERS][1]).scatter(1, ids_TLK[:, 0], True)
    replayed = torch.equal(routed.maps[LAYERS][1][real_T], want[real_T])
    return replayed, torch.equal(*chosen) and not torch.equal(chosen[1][real_T], want[real_T])


def not_named(rank: int) -> None:
    from moe_dispatch.integrations.megatron import RoutingReplay

    block = moe_block(case_of(ALONE))
    replay = RoutingReplay(block, table_of(entries()))
    with pytest.raises(StateError, match=r"RoutingReplay: forward\(\) was called without replay\.micro_batch"):
        block(drawn(rank, ALONE)[0], None, packed_seq_params=params())
    replay.close()
    with pytest.raises(ConfigError, match=r"must have all MoE layers of this stage, got none for \[1\], and \[0\] in"):
        RoutingReplay(block, table_of([ids[:, :1] for ids in entries()]))
    with pytest.raises(InputError, match=r"must name an expert in each of 3 slots, got \[4, -1, 1\] for .*, and 24 en"):
        RoutingReplay(block, table_of([torch.tensor([4, -1, 1]).expand_as(ids) for ids in entries()]))
    with pytest.raises(ConfigError, match=r"the table must have the num_moe_experts of the model \(8\), got 9"):
        RoutingReplay(block, RoutingTable(zip(NAMES, entries(), strict=True), num_experts=9))
    with pytest.raises(ConfigError, match=r"the table must have the moe_router_topk of the model \(3\), got 2"):
        RoutingReplay(block, table_of([ids[..., :2] for ids in entries()]))
    # Layers are counted among the MoE layers of the whole model: these two are its first and its third.
    for frequency, numbers in ((2, (1, 5)), ([0, 1, 1, 0, 1], (2, 5))):
        for layer, number in zip(block.layers, numbers, strict=True):
            layer.layer_number, layer.config.moe_layer_freq = number, frequency
        with pytest.raises(ConfigError, match=r"got none for \[2\], and \[0, 1\] in"):
            RoutingReplay(block, table_of(entries()))
    config = block.layers[0].config
    changes: Any = {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
        "pipeline_model_parallel_size": 2,
    }
    with patch.multiple(config, **changes), pytest.raises(ConfigError, match=r"whole layers, got .*=\['moe'\]"):
        RoutingReplay(block, table_of(entries()))
    for layer in block.layers:
        layer.config.moe_router_load_balancing_type = "sinkhorn"
    with pytest.raises(ConfigError, match=r"must choose experts by its own top-k, got .*'sinkhorn'"):
        RoutingReplay(block, table_of(entries()))
    with pytest.raises(ConfigError, match="the model has no MoE layers in a TransformerBlock"):
        RoutingReplay(nn.Linear(2, 2), table_of(entries()))


CHECKS: dict[str, Check] = {
    f"{name}, {how}": functools.partial(replays, parallel=parallel, how=how)
    for name, parallel, how in (
        ("whole", ALONE, "recomputed"),
        ("whole", ALONE, "interleaved"),
        ("tp 2, cp 2", SHARDED, "interleaved"),
        ("tp 2, cp 2", SHARDED, "balanced, recomputed"),
    )
}


@functools.cache
def results() -> dict[str, list[Any]]:
    checks: dict[str, Check] = {"unknown": unknown_entries, "predicts": predicts_more_tokens, "not named": not_named}
    return run_megatron(CHECKS | checks)


@pytest.mark.parametrize("name", CHECKS)
def test_routers_replay_the_table(name: str) -> None:
    assert max(require(results()[name])) < 1e-5


def test_unknown_entries_leave_the_choice_to_the_router_and_drift_is_counted() -> None:
    for without, drift in require(results()["unknown"]):
        assert without == 0.0
        assert 0.1 < drift <= 1.0


def test_layers_for_multi_token_prediction_choose_by_themselves() -> None:
    found = require(results()["predicts"])
    if None in found:
        pytest.skip("megatron-core 0.16 builds these layers over its global groups only")
    for replayed, natively in found:
        assert replayed
        assert natively


def test_what_cannot_be_replayed_is_refused() -> None:
    require(results()["not named"])
