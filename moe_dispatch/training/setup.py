"""The set-up of a training: the ranks, and what the functions of this folder need to know of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch.training.table import Kind, Table, table_of


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The ranks of a training, for which gradients, norms and checkpoints are those of one process.

    ``Setup(mesh).table(model)`` says what this rank holds of each parameter, and the methods act on it. Along all
    dimensions of the mesh but ``stages`` and ``one_loss``, each rank computes a loss of its own. The gradient of a step
    is that of the mean of all these losses. This is what DistributedDataParallel and ``fully_shard`` compute of dense
    parameters.

    A parameter belongs to the experts if it is below a ``Dispatcher``, and is a stack of the experts of this rank along
    dimension 0, a DTensor over the group of the dispatcher, or in a ``ModuleList`` with one module for each expert of
    this rank. Routers, and stacks of the experts of all ranks, are dense. An adapter of PEFT is what it adapts.

    Attributes:
        mesh: All ranks of the model, with a dimension for each way to share it. Each group of dispatchers, of
            DistributedDataParallel and of ``fully_shard`` must span some of its dimensions. None stands for one
            process, or takes the mesh of the DTensors of the model that spans all ranks, or all ranks if they are one
            expert-parallel group.
        stages: Names of dimensions along which ranks hold other layers.
        one_loss: Names of dimensions along which ranks compute one loss together, as under tensor parallelism.
        on_parts: Patterns of names, as in ``fnmatch``, of the parameters of which each rank along ``one_loss`` computes
            a part, such as a router on parts of sequences. By default, all that are below ``OnParts``. The other
            ones see everything on each rank.
        kinds: Patterns of names, each with "dense" or "expert", for parameters about which the model does not tell.

    Raises:
        ConfigError: By the methods. The set-up gives wrong gradients, or a parameter cannot be told.
    """

    mesh: DeviceMesh | None = field(default=None, kw_only=False)
    stages: Sequence[str] = ("pp",)
    one_loss: Sequence[str] = ("tp",)
    on_parts: Sequence[str] | None = None
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def table(self, model: nn.Module) -> Table:
        """Return what this rank holds of each parameter and buffer of a model, wrapped or not.

        If DistributedDataParallel wraps the model, pass the wrapper: the model does not know of it. The names are those
        of the model inside.

        Cost: none but a walk over the modules.
        """
        return table_of(
            model,
            self.mesh,
            stages=self.stages,
            one_loss=self.one_loss,
            on_parts=self.on_parts,
            kinds=self.kinds,
        )
