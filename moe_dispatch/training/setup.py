"""The set-up of a training: the ranks, and what the functions of this folder need to know of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from moe_dispatch.training.gradients import clip_gradients, reduce_gradients, spread_infinities, start_alike
from moe_dispatch.training.holding import Kind
from moe_dispatch.training.state import TrainingState
from moe_dispatch.training.table import Table, table_of
from moe_dispatch.training.wrap import under_ddp, under_fsdp


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

    def start(self, model: nn.Module) -> None:
        """Make all parameters and buffers equal that must be equal: those of the first rank that holds them.

        Call it on all ranks when the weights are made or loaded, before or after ``fully_shard``. Weights of different
        experts, and of different stages, stay as they are.

        Cost: a broadcast of each tensor, along each dimension on which it is the same.
        """
        start_alike(self.table(model))

    def reduce(self, model: nn.Module) -> None:
        """Make each gradient that of the mean of the losses of all ranks, if a wrapper has not done so.

        Call it on all ranks once a step, after the last backward. Gradients that only some ranks have are filled up
        with zeros there. A parameter without a gradient on any rank keeps none.

        Raises:
            StateError: The gradients are reduced already, and no backward has run since.

        Cost: nothing for what a wrapper has reduced. Else an all-reduce of each gradient, and a host sync to learn
        which ranks have one.
        """
        reduce_gradients(self.table(model))

    def clip(
        self,
        model: nn.Module,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        foreach: bool | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients of all ranks so that the norm of the whole model's gradient is at most ``max_norm``.

        Call it after ``reduce``. ``torch.nn.utils.clip_grad_norm_`` refuses parameters on different meshes, and does
        not know that ranks hold different experts.

        Args:
            model: The model, wrapped or not.
            max_norm: Largest norm after the call.
            norm_type: Order of the norm, also ``math.inf``.
            foreach: Whether to use one kernel for many gradients; False computes them one by one.
            error_if_nonfinite: Whether to raise if the norm is not finite; then all ranks raise, after a host sync.

        Returns:
            The norm before clipping, a float64 scalar that has the same bits on every rank. The norms of gradients in
            16 bits are computed in float32.

        Raises:
            InputError: The norm is not finite, and ``error_if_nonfinite`` is set.

        Cost: an all-reduce of one number.
        """
        return clip_gradients(
            self.table(model), max_norm, float(norm_type), foreach=foreach, error_if_nonfinite=error_if_nonfinite
        )

    def skip_together(self, model: nn.Module) -> Tensor:
        """Make all gradients NaN on every rank if one is infinite or NaN on any rank, so that all ranks skip the step.

        Call it after ``reduce`` and before ``unscale_`` of a gradient scaler. A scaler decides on each rank by the
        gradients that it finds there. Without this, ranks that hold other experts skip other steps, and part for ever.

        Returns:
            Whether the ranks will skip the step: a bool scalar on the device, the same on every rank.

        Cost: an all-reduce of one number, and a kernel that reads and one that writes each gradient.
        """
        return spread_infinities(self.table(model))

    def ddp(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        """Start the ranks alike, and wrap a model in DistributedDataParallel, which leaves the experts out.

        Pass the result to the other methods. ``reduce`` then adds up the gradients of experts.

        Args:
            model: The model, on its device.
            **options: Arguments of DistributedDataParallel.
        """
        table = self.table(model)
        return under_ddp(table, model, self._data_dims(table), options)

    def shard(
        self,
        model: nn.Module,
        policy: MixedPrecisionPolicy | None = None,
        *,
        router_policy: MixedPrecisionPolicy | None = None,
        blocks: Sequence[nn.Module] = (),
        replicate: Sequence[str] = (),
        **options: Any,
    ) -> FSDPModule:
        """Start the ranks alike, and call ``fully_shard``: experts over the ranks with copies, all else over all ranks.

        Stacks of experts become DTensors of all experts. Make the optimizer after this call. Ranks along ``stages`` and
        ``one_loss`` are left to pipelines and tensor parallelism.

        Args:
            model: The model, on its device.
            policy: Dtypes to compute and to reduce in. A dispatcher gets its arguments as they are, so the weights in
                ``Routing`` stay in float32.
            router_policy: Policy of modules named "router"; by default ``policy``.
            blocks: Modules of the model whose parameters are gathered together, such as its layers.
            replicate: Dimensions along which parameters are replicated, not sharded, outside of the experts (HSDP).
            **options: Further arguments of ``fully_shard``. On pipeline stages ``reshard_after_forward`` is False by
                default: schedules that split the backward lose gradients with True.

        Raises:
            ConfigError: A dispatcher holds dense parameters itself, or there is one copy of the experts and the mesh
                has no dimension of one rank.
        """
        table, policy = self.table(model), policy or MixedPrecisionPolicy()
        if {*self.stages} & {*table.axes.dims}:
            options.setdefault("reshard_after_forward", False)
        return under_fsdp(
            table, model, self._data_dims(table), replicate, blocks, policy, router_policy or policy, options
        )

    def state(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> Stateful:
        """Return the state of a model and its optimizers, which another number of ranks can load.

        ``dcp.save({"training": setup.state(model, optimizer)}, checkpoint_id=folder)`` saves it, and ``dcp.load`` with
        the same arguments loads it, where ``dcp`` is ``torch.distributed.checkpoint``. Both are collective over all
        ranks. Without this, ``dcp`` takes plain tensors of different experts for replicas, and saves those of one rank.

        Layers that pipeline stages hold under the same name belong to the number of the stage. Give layers names of
        their own to load on another number of stages. A state that has not the shape of its parameter, such as
        the scales of 8-bit optimizers for a plain stack of experts, loads on the same ranks only.
        """
        return TrainingState(self.table(model), model, optimizers)

    def _data_dims(self, table: Table) -> tuple[str, ...]:
        return tuple(dim for dim in table.axes.dims if dim not in {*self.stages, *self.one_loss})
