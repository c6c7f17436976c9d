"""Process groups below a Python wrapper, which trainers destroy and make anew between phases."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.communication import control_device, device_of, device_types
from moe_dispatch.errors import StateError
from moe_dispatch_testing import run_ranks
from moe_dispatch_testing.ranks import thread_group

MINUTE = datetime.timedelta(seconds=60)
Make = Callable[[], dist.ProcessGroup]


class Silent(dist.ProcessGroup):
    """A wrapper that defines no collective: callers have to look inside."""

    def __init__(self, make: Make) -> None:
        self.made = make()
        super().__init__(0, 1)  # type: ignore[call-arg]  # as torchft's wrappers do; the group inside knows better
        self.make = make

    def reload(self) -> None:
        """Make the group inside anew."""
        self.made = self.make()


class Forwarding(Silent):
    """A wrapper that counts the collectives which it hands on."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.calls = 0

    def _hand_on(self, name: str, *arguments: Any) -> Any:
        self.calls += 1
        return getattr(self.made, name)(*arguments)

    def allreduce(self, *arguments: Any) -> Any:
        """Hand the call on."""
        return self._hand_on("allreduce", *arguments)

    def alltoall_base(self, *arguments: Any) -> Any:
        """Hand the call on."""
        return self._hand_on("alltoall_base", *arguments)

    def _allgather_base(self, *arguments: Any) -> Any:
        return self._hand_on("_allgather_base", *arguments)


def step(group: dist.ProcessGroup, dispatcher: Any) -> Tensor:
    """Run a forward and a backward with other numbers of rows on each rank; return all results."""
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(3 + 2 * group.rank(), 256, generator=generator, requires_grad=True)
    weights, ids = torch.rand(len(x), 8, generator=generator).topk(2)
    weights.requires_grad_()
    sent = dispatcher.dispatch(x, Routing(ids, weights))
    y = dispatcher.combine(sent.rows.sin(), sent)
    y.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return torch.cat([t.detach().flatten() for t in (y, x.grad, weights.grad)])


DEEPEP = {"name": "deepep", "emulate": True}
HYBRIDEP = {"name": "hybridep", "emulate": True}


@pytest.mark.parametrize("kind", [Silent, Forwarding])
@pytest.mark.parametrize("settings", [{}, {"graph_safe": True}, {"watchdog": 20.0}, {"balance": "exact"}])
@pytest.mark.parametrize("backend", ["alltoall", "allgather", DEEPEP, HYBRIDEP])
def test_a_step_on_a_wrapped_group_has_the_bits_of_the_plain_one(
    backend: Any, settings: Any, kind: type[Silent]
) -> None:
    shared = HashStore()

    def rank(group: dist.ProcessGroup) -> None:
        wire: dict[str, Any] = {} if isinstance(backend, str) else {"wire": "bfloat16"}
        config = DispatcherConfig(
            backend=backend, num_experts=8, top_k=2, hidden_size=256, max_tokens_per_rank=8, **settings, **wire
        )
        numbers = iter(range(9))

        def make() -> dist.ProcessGroup:
            return thread_group(PrefixStore(str(next(numbers)), shared), group.rank(), group.size(), MINUTE)

        plain = build_dispatcher(config, group)
        expected = step(group, plain)
        plain.close()
        wrapper = kind(make)
        dispatcher = build_dispatcher(config, wrapper)
        assert torch.equal(step(group, dispatcher), expected)
        wrapper.reload()
        assert torch.equal(step(group, dispatcher), expected)
        dispatcher.self_test()
        assert dispatcher.metrics(gather=True).dispatches > 0
        if isinstance(wrapper, Forwarding):
            assert wrapper.calls > 0
        another = build_dispatcher(config, wrapper)
        assert torch.equal(step(group, another), expected)
        another.close()
        dispatcher.close()

    run_ranks(rank, 2)


def group_of(kind: str) -> dist.ProcessGroup:
    """Return a group of one rank whose backend exchanges tensors of one kind of device."""
    store = HashStore()
    group = dist.ProcessGroup(PrefixStore("group", store), 0, 1)
    backend = dist.ProcessGroupGloo(PrefixStore("backend", store), 0, 1, MINUTE)
    group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_devices_are_those_of_the_group_inside(kind: str) -> None:
    wrapper = Silent(lambda: Silent(lambda: group_of(kind)))
    assert device_types(wrapper) == {kind}
    assert control_device(wrapper).type == kind
    assert device_of(wrapper, torch.device("cpu")).type == kind


@pytest.mark.parametrize("kind", [Silent, Forwarding])
def test_a_wrapper_that_holds_no_group_is_refused(kind: type[Silent]) -> None:
    wrapper = kind(lambda: group_of("cpu"))
    config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=256)
    dispatcher = build_dispatcher(config, wrapper)
    step(wrapper, dispatcher)
    del wrapper.made
    with pytest.raises(StateError, match=f"the {kind.__name__} must hold a process group, got one that holds none"):
        step(wrapper, dispatcher)
    with pytest.raises(StateError, match="Make the group inside anew"):
        build_dispatcher(config.replace(top_k=1), wrapper)
    wrapper.reload()
    step(wrapper, dispatcher)
    dispatcher.close()


class Telling(dist.ProcessGroup):
    """A group without another one inside, as torchft's are that run in a process of their own."""

    def getBackendName(self) -> str:  # noqa: N802 - a name of torch
        """Return the name that torchft gives its groups."""
        return "torchft-nccl"


def test_a_group_that_comes_back_with_another_size_is_refused() -> None:
    def rank(group: dist.ProcessGroup) -> None:
        groups = iter([group, group_of("cpu")])
        wrapper = Silent(lambda: next(groups))
        config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=256)
        dispatcher = build_dispatcher(config, wrapper)
        wrapper.reload()
        with pytest.raises(StateError, match=rf"built with, {group.rank()} of 2, got 0 of 1\. Close the dispatcher"):
            step(group, dispatcher)
        wrapper.made = group
        dispatcher.close()

    run_ranks(rank, 2)


def test_a_python_group_tells_its_devices_by_the_name_of_its_backend() -> None:
    telling = Telling(0, 1)  # type: ignore[call-arg]
    assert device_types(telling) == {"cuda"}
