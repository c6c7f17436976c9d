"""Carry the state of a sharded model to others through files, as trainers with distributed checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks of this machine use, until the last of them is done."""
    with TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name, src=0)
        yield name[0]
        dist.barrier()


def carry(saved: nn.Module, *loading: nn.Module) -> None:
    """Save the state of a model, and load it into other ones."""
    with shared_folder() as folder:
        dcp.save(get_model_state_dict(saved), checkpoint_id=folder)
        for model in loading:
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(model, state)
