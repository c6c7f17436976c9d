"""Blocks on parts of sequences, and a group over several dimensions of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_dispatch.errors import InputError
from moe_dispatch.layouts import BSHD, Layout


@final
class OnParts(nn.Module):
    """Run a block on this rank's part of each sequence, and join the parts behind it.

    Without it, all tensor-parallel ranks would dispatch the same x, and experts would compute each row several times.

    Args:
        block: Module that is called with a part (B, S / ranks, D) and its layout, and returns the shape of the part.
        mesh: The tensor-parallel ranks, one-dimensional.
    """

    cuts_sequences = True  # so a table knows that gradients below are those of parts

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.mesh = block, mesh

    def forward(self, x: Tensor, layout: Layout | None = None, *others: Any) -> Tensor:
        """Return what the block makes of x, (B, S, D), which is the same on all ranks of the mesh.

        Raises:
            InputError: The number of ranks does not divide S.

        Cost: an all-gather of the output, and one of the gradient of x in the backward.
        """
        if x.shape[1] % self.mesh.size():
            raise InputError(
                f"OnParts: the {self.mesh.size()} ranks must divide the length of x, got shape {tuple(x.shape)}. "
                "Pad the sequences to a multiple of them."
            )
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        part = whole.redistribute(placements=[Shard(1)]).to_local()
        layout = (layout or BSHD()).shard(self.mesh.get_local_rank(), self.mesh.size())
        y = DTensor.from_local(self.block(part, layout, *others), self.mesh, [Shard(1)])
        return y.redistribute(placements=[Replicate()]).to_local()


def joined_group(mesh: DeviceMesh, dims: Sequence[str] = ("ep", "tp")) -> dist.ProcessGroup:
    """Make a group of all ranks along some dimensions of a mesh, for dispatchers whose experts lie over all of them.

    Collective over all ranks of the job. The group can be destroyed and made again, which a group made with
    ``use_local_synchronization`` cannot.
    """
    mine = (*mesh[(*dims,)].mesh.flatten().tolist(),)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    groups = {ranks: dist.new_group([*ranks]) for ranks in sorted({*everybody})}
    group: dist.ProcessGroup = groups[mine]
    return group
