"""A small torchtitan as its main branch is since it has TokenDispatcherTransform: the seams that we use, in our words.

Shapes, names and the order of calls are those of the main branch; the arithmetic runs in the dtype of the tokens, so
that results can be compared to 1e-12.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

INTEGRATION = "moe_dispatch.integrations.torchtitan"
_ambient = threading.local()


@contextmanager
def ep_mesh(group: dist.ProcessGroup | None) -> Iterator[None]:
    """The block in which a rank's dispatchers find their group, as torchtitan's SPMD context."""
    _ambient.group = group
    try:
        yield
    finally:
        _ambient.group = None


class Module(nn.Module):
    """A module that is built from its config, and whose submodules are all of this class."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self) -> Any:
            return self._owner(self)  # type: ignore[attr-defined]

        def traverse(self, kind: type) -> list[tuple[str, Any, Any, str | None]]:
            found: list[tuple[str, Any, Any, str | None]] = [("", self, None, None)] if isinstance(self, kind) else []
            for each in dataclasses.fields(self):
                if isinstance(child := getattr(self, each.name), Module.Config):
                    for path, config, parent, name in child.traverse(kind):
                        found.append((f"{each.name}.{path}".rstrip("."), config, parent or self, name or each.name))
            return found

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls  # type: ignore[attr-defined]

    def init_states(self) -> None:
        for child in self.children():
            assert isinstance(child, Module), type(child)
            child.init_states()
        self._init_self_buffers()

    def _init_self_buffers(self) -> None:
        pass


class LocalTokenDispatcher(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_experts: int
        top_k: int

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k

    def init_buffer(self) -> None:
        pass

    def dispatch(self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Any:
        order_N = ids_TK.flatten().argsort(stable=True)
        return x_TD[order_N // self.top_k], counts_E, (order_N, scores_TK)

    def combine(self, rows_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        order_N, scores_TK = metadata
        weighted = rows_RD * scores_TK.flatten()[order_N].unsqueeze(1)
        return torch.zeros_like(x_TD).index_add(0, order_N // self.top_k, weighted)


class BaseEPTokenDispatcher(LocalTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    @property
    def ep_mesh(self) -> Any:
        return getattr(_ambient, "group", None)


class GroupedLinear(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_groups: int
        in_features: int
        out_features: tuple[int, ...]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_groups, *config.out_features, config.in_features))

    def forward(self, rows_RI: Tensor, offs_E: Tensor) -> Tensor:
        parts = rows_RI[: int(offs_E[-1])].tensor_split(offs_E[:-1].tolist())
        out = [part @ weight.flatten(0, -2).T for part, weight in zip(parts, self.weight, strict=True)]
        done = torch.cat(out).unflatten(1, self.weight.shape[1:-1])
        return torch.cat([done, done.new_zeros(len(rows_RI) - len(done), *done.shape[1:])])


class RoutedExperts(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w13: GroupedLinear.Config
        w2: GroupedLinear.Config
        token_dispatcher: LocalTokenDispatcher.Config

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w13, self.w2 = config.w13.build(), config.w2.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def _init_self_buffers(self) -> None:
        self.token_dispatcher.init_buffer()

    def forward(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
        *,
        expert_output_postprocess: Any = None,
    ) -> Tensor:
        rows_RD, counts_L, metadata = self.token_dispatcher.dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        offs_L = counts_L.cumsum(0)
        gate_RF, up_RF = self.w13(rows_RD, offs_L).unbind(-2)
        rows_RD = self.w2(nn.functional.silu(gate_RF) * up_RF, offs_L)
        if expert_output_postprocess is not None:
            rows_RD = expert_output_postprocess(rows_RD)
        y_TD: Tensor = self.token_dispatcher.combine(rows_RD, metadata, x_TD)
        return y_TD


class Router(Module):
    tokens_per_expert_E: Tensor

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_experts: int
        top_k: int
        dim: int
        route_norm: bool = True
        route_scale: float = 1.5

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.route_norm, self.route_scale = config.top_k, config.route_norm, config.route_scale
        self.gate = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.register_buffer("tokens_per_expert_E", torch.zeros(config.num_experts), persistent=False)

    def _select_experts(self, scores_TE: Tensor, bias_E: Tensor | None = None, **kwargs: Any) -> Tensor:
        return (scores_TE if bias_E is None else scores_TE + bias_E).topk(self.top_k, -1).indices

    def forward(
        self, x_TD: Tensor, expert_bias_E: Tensor | None = None, *, padding_mask_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores_TE = (x_TD @ self.gate.T).sigmoid()
        ids_TK = self._select_experts(scores_TE, expert_bias_E, padding_mask_T=padding_mask_T)
        scores_TK = scores_TE.gather(-1, ids_TK)
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True) * self.route_scale
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(-1, ids_TK, True)
        if self.training:
            real_TE = map_TE if padding_mask_T is None else map_TE & ~padding_mask_T.unsqueeze(-1)
            with torch.no_grad():
                self.tokens_per_expert_E += real_TE.sum(0)
        return scores_TK, ids_TK, map_TE


class MoE(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        router: Router.Config
        routed_experts: RoutedExperts.Config

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router, self.routed_experts = config.router.build(), config.routed_experts.build()

    def forward(self, x_TD: Tensor, *, padding_mask_T: Tensor | None = None) -> Tensor:
        scores_TK, ids_TK, map_TE = self.router(x_TD, None, padding_mask_T=padding_mask_T)
        y_TD: Tensor = self.routed_experts(x_TD, scores_TK, ids_TK, map_TE.sum(0))
        return y_TD


@dataclass(kw_only=True, slots=True)
class TokenDispatcherTransform:
    dispatcher: type[LocalTokenDispatcher]
    kwargs: dict[str, Any] = field(default_factory=dict)
    routed_experts: type[RoutedExperts] | None = None

    def transform(self, model: Any, *, tokens: int) -> Any:
        assert issubclass(self.dispatcher, LocalTokenDispatcher)
        names = {each.name for each in dataclasses.fields(self.dispatcher.Config)}
        for _, config, parent, name in model.traverse(RoutedExperts.Config):
            if self.routed_experts is not None:
                assert issubclass(self.routed_experts.Config, type(config))
                kept = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
                config = self.routed_experts.Config(**kept)
                setattr(parent, name, config)
            theirs = config.token_dispatcher
            filled = {"hidden_dim": config.w13.in_features, "num_max_tokens_per_rank": tokens}
            values = {"num_experts": theirs.num_experts, "top_k": theirs.top_k, **self.kwargs}
            config.token_dispatcher = self.dispatcher.Config(
                **values, **{name: value for name, value in filled.items() if name in names}
            )
        return model


def moe_config(*, dim: int, inner: int, num_experts: int, top_k: int) -> Any:
    return MoE.Config(
        router=Router.Config(num_experts=num_experts, top_k=top_k, dim=dim),
        routed_experts=RoutedExperts.Config(
            w13=GroupedLinear.Config(num_groups=num_experts, in_features=dim, out_features=(2, inner)),
            w2=GroupedLinear.Config(num_groups=num_experts, in_features=inner, out_features=(dim,)),
            token_dispatcher=BaseEPTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
        ),
    )


@contextmanager
def installed(*, transform: bool = True, experts: type = RoutedExperts) -> Iterator[None]:
    """In the block, importing our integration finds this torchtitan.

    Args:
        transform: Whether it has TokenDispatcherTransform.
        experts: Its RoutedExperts.
    """
    modules: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.config": {},
        "torchtitan.config.transform": {"TokenDispatcherTransform": TokenDispatcherTransform},
        "torchtitan.distributed": {},
        "torchtitan.distributed.spmd_types": {"maybe_set_sparse_mesh": nullcontext},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.moe": {"MoE": MoE, "RoutedExperts": experts},
        "torchtitan.models.common.token_dispatcher": {"BaseEPTokenDispatcher": BaseEPTokenDispatcher},
    }
    if not transform:
        del modules["torchtitan.config.transform"]
    present = {}
    for name, contents in modules.items():
        present[name] = ModuleType(name)
        present[name].__spec__ = ModuleSpec(name, None, is_package=True)
        present[name].__path__ = []
        vars(present[name]).update(contents)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan" or name == INTEGRATION]:
            del sys.modules[name]
        sys.modules.update(present)
        yield
