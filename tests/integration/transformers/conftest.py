"""Every test here needs transformers; it is looked for by its distribution, since this folder has its name too."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent.name == "transformers"]
    for item in here:
        item.add_marker(pytest.mark.integration)
    try:
        version("transformers")
    except PackageNotFoundError:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs transformers: install moe-dispatch[transformers]"))


@pytest.fixture(scope="session")
def mesh() -> Iterator[DeviceMesh]:
    """Meshes of one rank: what transformers needs to wire experts, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("ep", "tp"))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
