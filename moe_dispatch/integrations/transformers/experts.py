"""What transformers calls in place of an experts module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.transformers.batch_slice import BatchSlice
from moe_dispatch.integrations.transformers.forwards import plan_in_force
from moe_dispatch.integrations.transformers.model_config import check_agreement, shape_said
from moe_dispatch.types import Dispatched, Routing

# hidden states (R, D), local expert ids (R, K), weights (R, K) -> (R, D), weighted and summed over K
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]
WIRED = "_moe_dispatch"


@final
class ExpertParallel:
    """One experts module whose ranks hold L of E experts each; what ``EPImplementationInterface`` builds.

    Args:
        config: as registered.
        experts: the module, its weights already those of this rank; it is given a mark by which ``attach`` finds it.
        ep_mesh: the ranks that together hold all experts.
        tp_mesh: the ranks that hold the same batch.

    Raises:
        ConfigError: the module's experts are not those that the config counts.
    """

    def __init__(self, config: DispatcherConfig, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        check_experts(experts, config, ep_mesh.size(), held=_held(experts) * ep_mesh.size())
        self.dispatcher = Dispatcher(config, ep_mesh, name=type(experts).__name__)
        self.slices = BatchSlice(tp_mesh.get_group())
        self._forward = experts.forward
        setattr(experts, WIRED, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, D) of this rank's batch, global ids and weights (T, K) -> (T, D)."""
        plan = plan_in_force(self.dispatcher.config)
        routing = Routing(self.slices.cut(top_k_index), self.slices.take(top_k_weights))
        sent = self.dispatcher.dispatch(self.slices.take(hidden_states), routing, plan)
        y = self.dispatcher.combine(run_experts(self._forward, sent, self.dispatcher.config), sent)
        return self.slices.put_together(y, len(hidden_states))


@final
class ExpertsFunction:
    """The same for the experts hook, ``ALL_EXPERTS_FUNCTIONS``, where transformers knows of no ranks.

    A module's weights are used as it holds them: all E experts, of which this rank runs its L, or only its L.

    Args:
        config: as registered.
        group: the expert-parallel group.
        implementation: transformers' function that runs experts.

    Raises:
        ConfigError: the config is graph_safe.
    """

    def __init__(
        self, config: DispatcherConfig, group: dist.ProcessGroup | DeviceMesh, implementation: Callable[..., Tensor]
    ) -> None:
        if config.graph_safe:
            raise ConfigError(
                "register: graph_safe must be False with group=, because without its registry transformers' experts "
                "read all rows they are given, got True. Leave it out, or use DistributedConfig."
            )
        self.dispatcher = Dispatcher(config, group)
        self.group = group
        self.slices = BatchSlice()
        self._implementation = implementation
        ranks = group.get_group() if isinstance(group, DeviceMesh) else group
        self._rank, self._size = ranks.rank(), ranks.size()

    def __call__(self, experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, D) of this rank's batch, global ids and weights (T, K) -> (T, D)."""
        config = self.dispatcher.config
        sent = self.dispatcher.dispatch(hidden_states, Routing(top_k_index, top_k_weights), plan_in_force(config))

        def forward(*rows: Tensor) -> Tensor:
            return self._implementation(self.local(experts), *rows)

        return self.dispatcher.combine(run_experts(forward, sent, config), sent)

    def local(self, experts: nn.Module) -> Any:
        """The module as if it had this rank's experts only.

        Raises:
            ConfigError: it holds neither all experts nor this rank's share of them.
        """
        held, total = _held(experts), self.dispatcher.config.num_experts
        if held * self._size == total:
            return experts
        check_experts(experts, self.dispatcher.config, self._size, held=held)
        return _LocalExperts(experts, self._rank, total // self._size)


class _LocalExperts:
    """A view of an experts module: its parameters are those of some of its experts, all else is its own."""

    def __init__(self, experts: nn.Module, rank: int, num_experts: int) -> None:
        self.num_experts = num_experts
        for name, parameter in experts.named_parameters(recurse=False):
            setattr(self, name, parameter[rank * num_experts : (rank + 1) * num_experts])
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def check_experts(experts: nn.Module, config: DispatcherConfig, ep_size: int, *, held: int) -> None:
    """Refuse experts that are not those that the config counts.

    Args:
        experts: the module.
        config: as registered.
        ep_size: ranks that share them.
        held: how many experts the ranks together hold.

    Raises:
        ConfigError: with both numbers.
    """
    where = f"register: {type(experts).__name__}"
    if held != config.num_experts:
        raise ConfigError(
            f"{where}: the {ep_size} ranks must hold num_experts ({config.num_experts}) together, got {held}. Register "
            "config_for(model.config), and shard every weight of the experts."
        )
    if hasattr(experts, "config"):
        check_agreement(where, config.model_dump(), shape_said(experts.config), experts.config)


def _held(experts: nn.Module) -> int:
    held: Any = experts.num_experts
    return int(held)


def run_experts(forward: ExpertsForward, sent: Dispatched, config: DispatcherConfig) -> Tensor:
    """This rank's experts on the rows that came, (R, D).

    Rows behind the last expert's, in graph-safe mode, are given the id L, which transformers leaves out. No host sync.
    """
    rows_RD = sent.rows
    # A parameter that no row reaches would get no gradient here and one on other ranks, and FSDP would wait for it.
    lacks_rows = not len(rows_RD)
    if lacks_rows:
        rows_RD = F.pad(rows_RD, (0, 0, 0, 1))
    positions_R = torch.arange(len(rows_RD), dtype=torch.int32, device=rows_RD.device)
    ids_R = torch.zeros_like(positions_R) if lacks_rows else torch.searchsorted(sent.offs, positions_R, right=True)
    weights_R = sent.weights if config.weights == "experts" and not lacks_rows else torch.ones_like(rows_RD[:, 0])
    y_RD = forward(rows_RD, ids_R.to(torch.int64).unsqueeze(1), weights_R.to(rows_RD.dtype).unsqueeze(1))
    return y_RD[: len(sent.rows)]
