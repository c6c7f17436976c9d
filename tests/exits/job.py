"""A rank of a short torchrun job: build a dispatcher, use it or not, and end as a program should."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher

KEPT: list[object] = []  # what a program never lets go of


def main(kind: str, use: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    groups: dict[str, Callable[[], Any]] = {
        "world": lambda: dist.group.WORLD,
        "sub-group": lambda: dist.new_group(list(range(size))),
        "mesh": lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)),
    }
    config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=16)
    dispatcher = build_dispatcher(config, groups[kind]())
    KEPT.append(dispatcher)
    if use != "idle":
        x = torch.randn(4, 16, requires_grad=True)
        sent = dispatcher.dispatch(x, Routing(torch.tensor([[0, 7]] * 4), torch.ones(4, 2)))
        y = dispatcher.combine(sent.rows, sent)
        y.sum().backward()
        KEPT.append((sent, y))
    if use == "closed":
        dispatcher.close()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
