"""torchtitan's main branch, in a double: dispatchers that a transform chooses, padding, replay, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch import BSHD
from moe_dispatch.errors import ConfigError, IntegrationError, StateError
from moe_dispatch.replay import RoutingTable
from tests.integrations import titan_double as double
from tests.ranks import run_ranks

DIM, INNER, EXPERTS, TOP_K, RANKS = 16, 8, 8, 2, 4
TOKENS = (5, 0, 9, 3)  # of each rank
SIZES = {"dim": DIM, "inner": INNER, "num_experts": EXPERTS, "top_k": TOP_K}
OPTIONS: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "allgather, padded": {"backend": "allgather", "options": {"pad_multiple": 8}},
    "graph-safe": {"backend": "alltoall", "options": {"graph_safe": True}},
    "chunks": {"backend": "alltoall", "options": {"chunks": 4}},
    "balance": {"backend": "alltoall", "options": {"balance": "exact"}},
}


@pytest.fixture(scope="module")
def titan() -> Iterator[Any]:
    with double.installed():
        yield import_module(double.INTEGRATION)


def built(config: Any, group: dist.ProcessGroup | None) -> Any:
    moe = config.build().double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in moe.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        if group is not None and "routed_experts" in name:
            parameter.data = parameter.data.chunk(group.size())[group.rank()].clone()
    with double.ep_mesh(None):
        moe.init_states()  # torchtitan calls it where no mesh is set, too
    return moe


def drawn(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, the gradient of what becomes of them, and its padding."""
    generator = torch.Generator().manual_seed(50 + rank)
    x_TD, upstream_TD = torch.randn(2, TOKENS[rank], DIM, generator=generator, dtype=torch.float64)
    return x_TD, upstream_TD, torch.rand(TOKENS[rank], generator=generator) < 0.4


def passed(moe: Any, x_TD: Tensor, upstream_TD: Tensor, mask_T: Tensor | None) -> dict[str, Tensor]:
    leaf = x_TD.clone().requires_grad_()
    y_TD = moe(leaf, padding_mask_T=mask_T)
    y_TD.backward(upstream_TD)
    assert leaf.grad is not None
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in moe.named_parameters()}
    return {"y": y_TD.detach(), "x": leaf.grad, **grads}


def one_process(mask: bool, ids_TK: Tensor | None = None) -> dict[str, Tensor]:
    """The double's own layer, with all experts, on the tokens of all ranks; upstream gradients of padding are 0."""
    moe = built(double.moe_config(**SIZES), None)
    if ids_TK is not None:
        moe.router._select_experts = lambda *args, **kwargs: ids_TK
    x_TD, upstream_TD, mask_T = (torch.cat(parts) for parts in zip(*map(drawn, range(RANKS)), strict=True))
    if mask:
        upstream_TD = upstream_TD.masked_fill(mask_T.unsqueeze(1), 0)
    got = passed(moe, x_TD, upstream_TD, mask_T if mask else None)
    if mask:
        got["y"] = got["y"].masked_fill(mask_T.unsqueeze(1), 0)
    return got | {"counts": moe.router.tokens_per_expert_E}


def require_same(ranks: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    for name, want in whole.items():
        parts = [rank[name] for rank in ranks]
        got = torch.cat(parts) if name in ("y", "x") or name.startswith("routed_experts") else sum(parts)
        assert want.any(), name
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [False, True], ids=["all real", "padding left out"])
@pytest.mark.parametrize("options", OPTIONS)
def test_their_transform_with_our_classes_gives_the_layer_of_one_process(titan: Any, options: str, mask: bool) -> None:
    def rank(group: dist.ProcessGroup) -> tuple[dict[str, Tensor], int]:
        chosen = double.TokenDispatcherTransform(
            dispatcher=titan.MoEDispatchTokenDispatcher,
            kwargs=OPTIONS[options],
            routed_experts=titan.MoEDispatchRoutedExperts,
        )
        moe = built(chosen.transform(double.moe_config(**SIZES), tokens=max(TOKENS)), group)
        assert list(moe.state_dict()) == ["router.gate", "routed_experts.w13.weight", "routed_experts.w2.weight"]
        if mask:
            titan.leave_out_padding(moe)
        x_TD, upstream_TD, mask_T = drawn(group.rank())
        with double.ep_mesh(group):
            got = passed(moe, x_TD, upstream_TD, mask_T if mask else None)
            sent = moe.routed_experts.token_dispatcher.dispatcher.metrics(gather=True)
        return got | {"counts": moe.router.tokens_per_expert_E}, int(sent.real_tokens_per_expert.sum())

    results = run_ranks(rank, RANKS)
    require_same([got for got, _ in results], one_process(mask))
    real = sum(int((~drawn(rank)[2]).sum()) if mask else TOKENS[rank] for rank in range(RANKS))
    assert [rows for _, rows in results] == [real * TOP_K] * RANKS


def test_use_moe_dispatch_and_the_plain_dispatcher_give_the_same(titan: Any) -> None:
    def rank(group: dist.ProcessGroup) -> dict[str, Tensor]:
        config = double.moe_config(**SIZES)
        assert titan.use_moe_dispatch(config, backend="alltoall") == ["moe"]
        assert type(config.routed_experts) is titan.MoEDispatchRoutedExperts.Config
        moe = built(config, group)
        with double.ep_mesh(group):
            return passed(moe, *drawn(group.rank())[:2], None)

    whole = one_process(mask=False)
    require_same(run_ranks(rank, RANKS), {name: whole[name] for name in whole if name != "counts"})


def test_arguments_that_main_adds_to_routed_experts_reach_them(titan: Any) -> None:
    config = double.moe_config(**SIZES)
    titan.use_moe_dispatch(config, backend="local", chunks=2)
    experts = built(config, None).routed_experts
    x_TD, ids_TK = torch.randn(3, DIM, dtype=torch.float64), torch.tensor([[0, 1], [1, 2], [2, 0]])
    arguments = x_TD, torch.ones(3, TOP_K, dtype=torch.float64), ids_TK, torch.bincount(ids_TK.flatten(), minlength=8)
    tripled = experts(*arguments, expert_output_postprocess=lambda rows_RD: 3 * rows_RD)
    torch.testing.assert_close(tripled, 3 * experts(*arguments), rtol=0, atol=1e-12)


def test_a_replay_lets_the_router_weigh_and_count_the_replayed_experts(titan: Any) -> None:
    ids = [torch.rand(n, EXPERTS, generator=torch.Generator().manual_seed(n)).argsort(-1)[:, :TOP_K] for n in TOKENS]

    def rank(group: dist.ProcessGroup) -> dict[str, Tensor]:
        config = double.moe_config(**SIZES)
        titan.use_moe_dispatch(config, backend="alltoall")
        moe, mine = built(config, group), ids[group.rank()]
        table = RoutingTable(
            {rank: ids_TK.unsqueeze(1) for rank, ids_TK in enumerate(ids) if len(ids_TK)}, num_experts=EXPERTS
        )
        replay = titan.RoutingReplay(moe)
        lengths = [len(mine)] if len(mine) else []
        cut = table.cut(BSHD(lengths), [group.rank()] * len(lengths), like=(len(lengths), len(mine), DIM))
        with double.ep_mesh(group), replay.micro_batch(cut):
            got = passed(moe, *drawn(group.rank())[:2], None)
        (dispatcher,) = [moe.routed_experts.token_dispatcher.dispatcher]
        assert sum(dispatcher.metrics(gather=True).slots_replayed.values()) == sum(TOKENS) * TOP_K
        replay.close()
        assert "_select_experts" not in vars(moe.router)
        return got | {"counts": moe.router.tokens_per_expert_E}

    require_same(run_ranks(rank, RANKS), one_process(mask=False, ids_TK=torch.cat(ids)))


def test_a_replay_outside_its_block_and_a_router_without_a_choice_are_refused(titan: Any) -> None:
    config = double.moe_config(**SIZES)
    titan.use_moe_dispatch(config, backend="local")
    moe = built(config, None)
    titan.RoutingReplay(moe)
    with pytest.raises(StateError, match=r"forward\(\) was called outside `with replay\.micro_batch"):
        moe(torch.zeros(2, DIM, dtype=torch.float64))
    moe.router = nn.Identity()
    with pytest.raises(IntegrationError, match=r"must have _select_experts, got Identity without it\. Install a newer"):
        titan.RoutingReplay(moe)
    with pytest.raises(ConfigError, match=r"must take a padding mask, got Identity without one"):
        titan.leave_out_padding(moe)
    with pytest.raises(ConfigError, match=r"leave_out_padding: Identity has no MoE layers"):
        titan.leave_out_padding(nn.Identity())


@dataclass(kw_only=True, slots=True)
class NeitherConfig(double.Module.Config):
    experts: int = 0


class Neither(double.Module):
    Config = NeitherConfig

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD


@pytest.mark.parametrize("case", [{"transform": False}, {"experts": Neither}], ids=["no transform", "other experts"])
def test_a_version_between_the_seams_is_refused_by_name(case: dict[str, Any]) -> None:
    fields = ", ".join(
        sorted(each.name for each in dataclasses.fields(case.get("experts", double.RoutedExperts).Config))
    )
    told = (
        rf"^torchtitan \S.* lies between release 0\.3\.0 and the main branch.*got {fields}\. Install torchtitan 0\.3\.0"
    )
    with double.installed(**case), pytest.raises(IntegrationError, match=told):
        import_module(double.INTEGRATION)
