"""Megatron's own schedule of one forward beside one backward, on a CPU with simulated streams and poisoned memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moe_dispatch
from moe_dispatch.communication import Communicator
from moe_dispatch_testing import count_host_syncs
from tests.integration.megatron_core.layer import gradients_of
from tests.integration.megatron_core.model import gpt_model


@final
class Stream:
    """A stream of a simulated device.

    Attributes:
        time: When all its work is done.
        seen: The number of operators of each stream, by name, that are done before its next operator.
    """

    def __init__(self, name: str = "") -> None:
        self.name, self.time = name, 0.0
        self.seen: Counter[str] = Counter()


@final
class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time, self.seen = 0.0, Counter[str]()

    def record(self, stream: Stream) -> None:
        self.time, self.seen = stream.time, stream.seen.copy()

    def wait(self, stream: Stream) -> None:
        stream.time, stream.seen = max(stream.time, self.time), stream.seen | self.seen  # the larger numbers


@final
@dataclass(slots=True)
class Memory:
    """A storage that an operator made: on which stream and in which node, its last use on each stream, and its writes.

    ``recorded`` has the streams that ``record_stream`` named: the allocator waits for them before it reuses memory.
    """

    made_on: str
    node: str
    weak: StorageWeakRef  # no other storage gets the address of this one while it lives
    uses: Counter[str] = field(default_factory=Counter)
    written: tuple[str, int] = ("", 0)
    recorded: set[str] = field(default_factory=set)


@final
class MemoryOrder(TorchDispatchMode):
    """Watches memory that two streams use. torch's allocator gives freed memory to the stream that it was made on.

    ``races`` says which memory was used before another stream had written it, or could be reused before another stream
    had used it.
    """

    def __init__(self, current: list[Stream], node: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current, self.node, self.races = current, node, set[str]()
        self.memories: dict[int, Memory] = {}
        self.shared: dict[int, Memory] = {}  # those that another stream than their own has used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self.current[-1]
        stream.seen[stream.name] += 1
        for key, memory in list(self.shared.items()):
            if memory.weak.expired() and memory.made_on == stream.name:
                del self.shared[key]
                for user, number in memory.uses.items():
                    if number > stream.seen[user] and user not in memory.recorded:
                        self.races.add(f"memory of {memory.node} is reused before {user} is done")
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        written, read = list[Any](), list[Any]()
        for argument in func._schema.arguments:
            value = (values | (kwargs or {})).get(argument.name)
            (written if argument.alias_info and argument.alias_info.is_write else read).extend(tree_leaves(value))
        result = func(*args, **(kwargs or {}))
        for tensors, how in ((read, "reads"), (written, "writes"), (tree_leaves(result), "makes")):
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    self.use(tensor.untyped_storage(), stream, how)
        return result

    def use(self, storage: torch.UntypedStorage, stream: Stream, how: str) -> None:
        memory, number = self.memories.get(storage._cdata), stream.seen[stream.name]
        if memory is None and how == "makes":
            weak = StorageWeakRef(storage)
            self.memories[storage._cdata] = Memory(stream.name, self.node[-1], weak, written=(stream.name, number))
        elif memory is not None:
            writer, when = memory.written
            if when > stream.seen[writer]:
                self.races.add(f"{self.node[-1]} {how} memory of {memory.node} that {writer} has not written yet")
            memory.uses[stream.name] = number
            if stream.name != memory.made_on:
                self.shared[storage._cdata] = memory
            if how == "writes":
                memory.written = (stream.name, number)


@final
@dataclass(frozen=True, slots=True)
class Ran:
    """A node that ran, such as "moe_dispatch forward": its stream, when, and how often a verb made the host wait."""

    node: str
    stream: str
    begin: float
    end: float
    host_reads: int


READS = str(Path(moe_dispatch.__file__).with_name("communication.py"))  # where the verbs read a device


@final
@dataclass(slots=True)
class Seen:
    """What happened in a schedule.

    Attributes:
        nodes: The nodes in the order of the host.
        collectives: Labels of the collectives of dispatchers, each behind the node that it ran in.
        freed: Number of storages that the schedule freed.
        races: What ``MemoryOrder`` found.
    """

    nodes: list[Ran] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    freed: int = 0
    races: list[str] = field(default_factory=list)


# A backward takes twice as long as a forward on the compute stream. An exchange takes as long both ways. The host waits
# for the exchange of counts, the first part of a dispatch.
UNITS = {"compute forward": 1.0, "compute backward": 2.0, "exchange forward": 1.0, "exchange backward": 1.0}
COUNTS = 0.2


@contextmanager
def simulated_streams(*, watch_memory: bool = True) -> Iterator[Seen]:
    """Let Megatron's schedule run on a CPU, and watch it. Memory that it frees is filled with NaN, and kept.

    To watch memory takes most of the time.
    """
    from megatron.core.pipeline_parallel import utils

    seen, compute = Seen(), Stream("compute")
    current, node = [compute], ["outside"]
    host, order = [0.0], MemoryOrder(current, node)
    resize, start, reads = torch.UntypedStorage.resize_, Communicator._start, list[Any]()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def poison(storage: torch.UntypedStorage, size: int) -> Any:
        if size or sys._getframe(1).f_globals["__name__"] != utils.__name__:
            return resize(storage, size)
        seen.freed += 1
        return storage.fill_(0xFF)  # type: ignore[attr-defined]

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        if (memory := order.memories.get(tensor.untyped_storage()._cdata)) is not None:
            memory.recorded.add(stream.name)

    def started(communicator: Communicator, name: str, *args: Any, **kwargs: Any) -> Any:
        seen.collectives.append(f"{node[-1]}: {kwargs['label']}")
        return start(communicator, name, *args, **kwargs)

    def timed(phase: str, run: Any) -> Any:
        def runs(self: Any, *args: Any) -> Any:
            node.append(f"{self.name} {phase}")
            reads.clear()
            result = run(self, *args)
            node.pop()
            begin, stream = max(self.event.time, host[0]), self.stream  # the node recorded the event
            stream.time = self.event.time = end = begin + UNITS[f"{stream.name} {phase}"]
            host_reads = sum(read.place.startswith(READS) for read in reads)
            if host_reads:
                host[0] = begin + COUNTS
            seen.nodes.append(Ran(f"{self.name} {phase}", stream.name, begin, end, host_reads))
            return result

        return runs

    streams = {"_COMM_STREAM": Stream("exchange"), "_COMP_STREAM": compute}  # 0.19 takes the current stream to compute
    with ExitStack() as stack:
        for name, stand_in in {
            "Event": Event,
            "Stream": Stream,
            "stream": on,
            "current_stream": lambda *args: current[-1],
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        for name in ("range_push", "range_pop"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *args: None))
        for name, stream in streams.items():
            stack.enter_context(patch.object(utils, name, stream, create=True))
        stack.enter_context(patch.object(Tensor, "record_stream", record_stream))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", poison))
        stack.enter_context(patch.object(Communicator, "_start", started))
        for phase in ("forward", "backward"):
            method = f"_{phase}"
            stack.enter_context(
                patch.object(utils.ScheduleNode, method, timed(phase, getattr(utils.ScheduleNode, method)))
            )
        reads = stack.enter_context(count_host_syncs())
        if watch_memory:
            stack.enter_context(order)
        yield seen
    seen.races.extend(sorted(order.races))


@final
class Attention(nn.Module):
    """An attention over packed sequences without kernels: each row attends to itself."""

    def __init__(self, config: Any, layer_number: int, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.hidden_size, config.hidden_size) / config.hidden_size**0.5)

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        return hidden @ self.weight.to(hidden.dtype), None

    def backward_dw(self) -> None:
        pass


def packed_model(case: Any) -> Any:
    """A GPTModel whose attention takes packed sequences."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.spec_utils import ModuleSpec

    def change(spec: Any) -> Any:
        spec.submodules.self_attention = ModuleSpec(module=Attention)
        spec.submodules.self_attn_bda = get_bias_dropout_add
        return spec

    return gpt_model(case, change)


Batch = dict[str, Any]  # arguments of a GPTModel


def plain_steps(model: Any, batches: list[Batch]) -> dict[str, Tensor]:
    """Losses and all gradients of micro-batches that run one after the other."""
    model.zero_grad()
    losses = []
    for batch in batches:
        losses.append(model(**batch))
        (losses[-1] * upstream(losses[-1])).sum().backward()
        for layer in model.decoder.layers if model.config.delay_wgrad_compute else ():
            layer.mlp.experts.backward_dw()
    return {f"loss {number}": loss.detach() for number, loss in enumerate(losses)} | gradients_of(model)


def overlapped_steps(model: Any, batches: list[Batch]) -> dict[str, Tensor]:
    """The same with Megatron's schedule: the forward of each micro-batch runs beside the backward of the one before."""
    model.zero_grad()
    losses: list[Tensor] = []
    before: Any = None
    for batch in [*batches, None]:
        plan = None if batch is None else model.build_schedule_plan(**batch)
        loss = (plan or before).run(plan, before, b_grad=None if before is None else upstream(losses[-1]))
        losses += [] if plan is None else [loss]
        before = plan
    return {f"loss {number}": loss.detach().clone() for number, loss in enumerate(losses)} | gradients_of(model)


def upstream(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, loss.numel()).view_as(loss).to(loss.dtype)
