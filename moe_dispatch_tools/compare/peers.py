"""The peers: dispatchers of torchtitan and transformers, as released on PyPI (extra ``bench``), and the floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_dispatch.config import DispatcherConfig
from moe_dispatch_testing.rank_context import LayerCall
from moe_dispatch_tools.compare.contenders import Peer, RowFunction
from moe_dispatch_tools.compare.floor import Floor

_NEEDED = {"torchtitan": ("torchtitan", "spmd_types", "tyro", "triton"), "transformers": ("transformers",)}


@final
class Torchtitan(Peer):
    """``AllToAllTokenDispatcher`` of torchtitan 0.3: it sends one row per token and expert, and sorts rows by expert.

    ``combine`` multiplies each slot by its score in float32, rounds it to the dtype of the rows, and adds the slots up.
    """

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup) -> None:
        from torchtitan.distributed.utils import set_spmd_backend  # noqa: PLC0415 - optional
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: PLC0415

        super().__init__(config, group)
        # The other setting exchanges lists of tensors, which gloo does not support for unequal sizes.
        set_spmd_backend("partial_dtensor")
        fields = AllToAllTokenDispatcher.Config(num_experts=config.num_experts, top_k=config.top_k)
        self._dispatcher = AllToAllTokenDispatcher(fields)
        self._dispatcher.wire_meshes(ep_mesh=_meshes(*_size_and_device(group))["ep"])

    def prepare(self, call: LayerCall) -> None:  # routers of torchtitan count the rows of each expert
        self._counts_E = torch.bincount(call.ids_TK.flatten(), minlength=self.config.num_experts)

    def layer(self, call: LayerCall, experts: RowFunction) -> Tensor:
        rows_RD, counts_L, metadata = self._dispatcher.dispatch(call.x, call.weights_TK, call.ids_TK, self._counts_E)
        ids_L = torch.arange(len(counts_L), device=counts_L.device)
        rows_RD = experts(rows_RD, lambda: ids_L.repeat_interleave(counts_L))
        y_TD: Tensor = self._dispatcher.combine(rows_RD, metadata, call.x)
        return y_TD


@final
class Transformers(Peer):
    """``AllToAllEP`` of transformers 5.23: it sends one row per token and expert, and leaves rows in source order.

    The experts of transformers sort the rows, so its times contain no sort, unlike the times of the other contenders.
    Weights have the dtype of the rows, as in the routers of transformers.
    """

    sorts = False

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup) -> None:
        from transformers.distributed.expert_parallel import AllToAllEP  # noqa: PLC0415 - optional

        super().__init__(config, group)
        mesh = _meshes(*_size_and_device(group))
        self._experts = _ExpertsOfTransformers(self.local)
        self._layer = AllToAllEP(self._experts, mesh["ep"], mesh["tp"])

    def layer(self, call: LayerCall, experts: RowFunction) -> Tensor:
        self._experts.apply = experts
        y_TD: Tensor = self._layer(call.x, call.ids_TK, call.weights_TK.to(call.x.dtype))
        return y_TD


@final
class _ExpertsOfTransformers:
    """The part of an experts module that ``AllToAllEP`` uses. The caller sets ``apply`` before each call."""

    apply: RowFunction

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def forward(self, rows_RD: Tensor, local_ids: Tensor, unit_weights: Tensor) -> Tensor:
        """Run the experts on rows (R, D). The weights are 1, because the sender applies the real weights."""
        return self.apply(rows_RD, lambda: local_ids.squeeze(1))


def _size_and_device(group: dist.ProcessGroup) -> tuple[int, str]:
    return group.size(), "cuda" if dist.get_backend(group) == "nccl" else "cpu"


@cache
def _meshes(ep_size: int, device: str) -> DeviceMesh:
    """Return a mesh with all ranks expert-parallel. It is cached, because each new mesh makes process groups."""
    return init_device_mesh(device, (ep_size, 1), mesh_dim_names=("ep", "tp"))


PEERS: dict[str, Callable[[DispatcherConfig, dist.ProcessGroup], Peer]] = {
    "floor": Floor,
    "torchtitan": Torchtitan,
    "transformers": Transformers,
}


def missing_packages(name: str) -> list[str]:
    """Return the packages that a peer needs and that are not installed. Nothing is imported.

    A folder of the same name in the current directory is no package: it has no file.
    """
    return [package for package in _NEEDED.get(name, ()) if getattr(find_spec(package), "origin", None) is None]
