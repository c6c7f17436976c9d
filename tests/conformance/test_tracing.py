"""A trace without values refuses shapes, branches and copies to the host that depend on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_dispatch_testing import HostSyncError, trace_static
from tests.conformance.planted import NAMES, PLACES, PLANTS, groups, operator, planted

pytestmark = pytest.mark.usefixtures("nothing_planted")


@pytest.fixture
def _fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    groups[0] = dist.group.WORLD
    yield
    dist.destroy_process_group()


def layer(x: Tensor) -> list[Tensor]:
    y = operator(x * 2, 0)
    planted["plain"](y)
    return [y.cos()]


X = torch.ones(4, 3, requires_grad=True)


@pytest.mark.usefixtures("_fake_group")
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_layer_without_a_sync_has_a_shape_and_no_values(device: str | None) -> None:
    backwards = []
    planted["backward"] = lambda grad: backwards.append(grad.shape)
    (y,) = trace_static(layer, X, device=device)
    assert y.shape == (4, 3)
    assert y.device.type == (device or "cpu")
    assert backwards == [(4, 3)]
    assert X.grad is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", PLANTS)
def test_nine_plants(kind: str, place: str) -> None:
    planted[place] = PLANTS[kind]
    with pytest.raises(HostSyncError, match=rf"{NAMES[kind]}|item at"):
        trace_static(layer, X)


def test_a_shape_that_torch_does_not_mark_as_depending_on_data() -> None:
    library = torch.library.Library("unmarked", "FRAGMENT")
    library.define("count(Tensor x) -> Tensor")

    def fake(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    torch.library.register_fake("unmarked::count", fake, lib=library)
    with pytest.raises(HostSyncError, match=r"trace_static: no shape may depend on values, got unmarked.count"):
        trace_static(torch.ops.unmarked.count, X)
    library._destroy()


COPIES: dict[str, Callable[[Tensor], object]] = {
    "to": lambda x: x.to(torch.device("cpu")),
    "like another": lambda x: x.detach().to(torch.empty(0)),
    "into a buffer": lambda x: torch.empty(4, 3).copy_(x.detach()),
    "upload": lambda x: torch.arange(3).to(x.device),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", COPIES)
def test_copies_between_host_and_device(kind: str, place: str) -> None:
    planted[place] = COPIES[kind]
    with pytest.raises(HostSyncError, match=r"aten::(_to_copy|copy_) at"):
        trace_static(layer, X, device="meta")
