"""All torch.distributed collectives of moe_dispatch, and ``raise_alike``, with which ranks raise together.

Only the kernels of ``deep_ep`` and the notes of the watchdog travel by other ways.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError, PeerError, StateError
from moe_dispatch.seams.group_observers import Work, observers_of
from moe_dispatch.seams.plug_ins import load_plug_in


@final
class Alone:
    """The process group of a single rank without torch.distributed: its collectives copy, and complete at once."""

    def alltoall_base(self, out: Tensor, inp: Tensor, *others: Any) -> Alone:
        """Copy ``inp`` to ``out``. All-gather and reduce-scatter do the same."""
        out.copy_(inp)
        return self

    _allgather_base = _reduce_scatter_base = alltoall_base

    def allreduce(self, *arguments: Any) -> Alone:
        """Leave the tensors as they are."""
        return self

    def wait(self) -> None:
        """Return at once."""


Value = TypeVar("Value")


@final
class JobGroup(NamedTuple):
    """What torch.distributed knows of a process group, to find it again after it was destroyed and made anew.

    Attributes:
        is_default: Whether it is the default group.
        name: Its name.
        ranks: Its ranks in the default group.
    """

    is_default: bool
    name: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> JobGroup | None:
        """Return the record of a group; None for a wrapper, or a group that torch.distributed does not know."""
        if type(group) is dist.ProcessGroup:
            with suppress(KeyError, ValueError, RuntimeError):
                ranks = dist.get_process_group_ranks(group)
                return cls(group is dist.group.WORLD, group.group_name, tuple(ranks))
        return None


class Communicator:
    """Run collectives on a process group, or on a single rank without one, and count calls and sent bytes.

    The methods call the ProcessGroup directly. The functions of torch.distributed would add 20 to 50 us of Python a
    call, and some of them are being renamed.

    Attributes:
        group: The process group, or None for a single rank.
        of_job: What torch.distributed knew of the group; None if it did not know it.
        observers: What observes the group; the same list in all communicators of the group.
        rank: This rank's number in the group.
        size: Number of ranks.
        bytes_sent: Bytes sent to other ranks, by label. Counted on the host, without a sync.
        calls: Number of collectives, by label.
        dry_run: Whether the group is torch's fake one, so that no rank but this one exists.
    """

    dry_run: ClassVar[bool] = False

    def __new__(cls, group: dist.ProcessGroup | None) -> Communicator:
        """Make a communicator; on a fake group, of the class that copies what other ranks would send."""
        if group is None or "fake" not in _backend_name(real_group(group)).replace(":", ",").split(","):
            return super().__new__(cls)
        what = "A fake process group needs it. Use another group"
        kind: type[Communicator] = load_plug_in("moe_dispatch.capabilities.dry_runs.communicator", what).DryRun
        return super().__new__(kind)

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.hold(group)
        inside = None if group is None else real_group(group)
        self.rank = 0 if inside is None else inside.rank()
        self.size = 1 if inside is None else inside.size()
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        _communicators.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return the object itself, because groups cannot be copied: a copy of a model talks to the same ranks."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StateError("moe_dispatch: a process group cannot be saved. Save model.state_dict() instead of the model.")

    @property
    def library_group(self) -> dist.ProcessGroup | None:
        """The group to hand to a library, which reads facts in C++: the one inside a wrapper, see ``real_group``."""
        return None if self.group is None else real_group(self.group)

    def _maker_of(self, name: str) -> dist.ProcessGroup:
        """Return the group whose method ``name`` makes a collective: the wrapper if its class defines the method."""
        wrapper = self.group
        assert wrapper is not None
        if (inside := real_group(wrapper)) is wrapper:
            raise _holds_none(wrapper)
        if (inside.rank(), inside.size()) != (self.rank, self.size):
            raise StateError(
                f"Dispatcher: the group in the {type(wrapper).__name__} must have the rank and the size that the "
                f"dispatcher was built with, {self.rank} of {self.size}, got {inside.rank()} of {inside.size()}. Close "
                "the dispatcher and build another."
            )
        return inside if getattr(type(wrapper), name) is getattr(dist.ProcessGroup, name) else wrapper

    def hold(self, group: dist.ProcessGroup | None) -> None:
        """Use a group from now on. It has this rank and this size."""
        self.group, self.of_job = group, JobGroup.of(group)
        self.observers = observers_of(group)
        self._is_wrapped = group is not None and real_group(group) is not group

    @property
    def is_gone(self) -> bool:
        """Whether the group was destroyed."""
        return self.of_job is not None and JobGroup.of(self.group) is None

    def let_go(self) -> None:
        """Drop the process group, at ``close`` or at the end of the process. Nothing can be sent afterwards."""
        self.group = None

    def _start(self, name: str, *arguments: Any, tensor: Tensor, label: str, nbytes: int, options: Any) -> Work:
        """Start a collective on ``tensor``, count it, and return the handle to wait for.

        Args:
            name: Method of the process group.
            *arguments: Its arguments before the options.
            tensor: Tensor on the device of the collective.
            label: Name under which the call and its bytes are counted.
            nbytes: Bytes that this rank sends to other ranks.
            options: Options of the method.

        Raises:
            StateError: The group was let go, or an observer refuses the collective.
        """
        if self.group is None and self.size > 1:
            raise StateError(
                f"Dispatcher: the group must be in use, got a call ({label}) after close(). Close the dispatcher after "
                "the last backward."
            )
        group: Any = _ALONE if self.group is None else self._maker_of(name) if self._is_wrapped else self.group
        start = partial(getattr(group, name), *arguments)
        for observer in self.observers:
            start = partial(observer.collective, label, nbytes, tensor, start)
        try:
            started: Work = start(options)
        except RuntimeError as error:
            self.explain(error, label)
            raise
        self.calls[label] += 1
        self.bytes_sent[label] += nbytes
        return _Started(self, label, started)

    def explain(self, error: RuntimeError, label: str) -> None:
        """Add to an error of the transport which exchange failed, and how to learn the rank that is at fault."""
        if self.size == 1 or isinstance(error, MoEDispatchError):  # the watchdog says more
            return
        error.add_note(
            f"moe_dispatch: the exchange {label!r} failed on rank {self.rank} of {self.size}, which has started "
            f"{self.calls[label]} of this kind. Mostly a rank has not come to it: it ended, it left out a layer or a "
            "backward, or this rank made one call more. Set MOE_DISPATCH_WATCHDOG=60 on every rank, and the error "
            'names the rank: see "The job hangs" in docs/troubleshooting.md.'
        )

    def all_to_all(
        self, received: Tensor, sent: Tensor, rows_in: Sequence[int], rows_out: Sequence[int], *, label: str
    ) -> Work:
        """Start to send rows to the ranks. Returns the handle to wait for.

        Args:
            received: Tensor that receives the rows, ordered by source rank.
            sent: Rows of this rank, ordered by destination rank.
            rows_in: Number of rows from each rank.
            rows_out: Number of rows to each rank.
            label: Name under which the call and its bytes are counted.
        """
        rows, nbytes, options = sent.shape[0], sent.nbytes, dist.AllToAllOptions()
        to_others = nbytes - nbytes // rows * rows_out[self.rank] if rows else 0
        arguments = received, sent, list(rows_in), list(rows_out)
        return self._start("alltoall_base", *arguments, tensor=sent, label=label, nbytes=to_others, options=options)

    def all_gather(self, out: Tensor, inp: Tensor, *, label: str) -> None:
        """Write the ``inp`` of all ranks into ``out``, stacked along dim 0 in the order of the ranks."""
        nbytes, options = inp.nbytes * (self.size - 1), AllgatherOptions()
        self._start("_allgather_base", out, inp, tensor=inp, label=label, nbytes=nbytes, options=options).wait()

    def reduce_scatter(self, out: Tensor, inp: Tensor, *, label: str) -> None:
        """Sum ``inp`` over the ranks, and write the r-th part of the sum along dim 0 into ``out`` of rank r."""
        nbytes, options = inp.nbytes - inp.nbytes // self.size, dist.ReduceScatterOptions()
        self._start("_reduce_scatter_base", out, inp, tensor=inp, label=label, nbytes=nbytes, options=options).wait()

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType, *, label: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        nbytes = 2 * tensor.nbytes * (self.size - 1) // self.size  # of a ring all-reduce
        self._start("allreduce", [tensor], tensor=tensor, label=label, nbytes=nbytes, options=options).wait()

    def max(self, values: Sequence[int], *, label: str) -> list[int]:
        """Return the maximum of each host integer over the ranks. Cost: one all-reduce; on a GPU also a host sync."""
        tensor = to_device(values, control_device(self.group))
        self._all_reduce(tensor, dist.ReduceOp.MAX, label=label)
        return read_host(tensor)

    def max_and_sum(self, values: Sequence[int], sums: Sequence[Tensor], *, label: str) -> list[int]:
        """Return the maximum of each host integer over the ranks, then the sum of each number of ``sums``.

        Args:
            values: Integers of this rank; every rank passes the same number of them.
            sums: int64 tensors of one dimension on the control device; their lengths are the same on every rank.
            label: Name under which the call and its bytes are counted.

        Cost: one all-reduce; on a GPU also a host sync.
        """
        # Every rank adds its values at a place of their own, where the other ranks add zeros.
        mine = [0] * (self.size * len(values))
        mine[self.rank :: self.size] = values
        tensor = torch.cat([to_device(mine, control_device(self.group)), *sums])
        self._all_reduce(tensor, dist.ReduceOp.SUM, label=label)
        found = read_host(tensor)
        highest = [max(found[begin : begin + self.size]) for begin in range(0, len(mine), self.size)]
        return highest + found[len(mine) :]

    def touch(self, device: torch.device) -> None:
        """Run a collective of one element, so that the group makes its communicator for the device."""
        if self.group is not None:
            own = own_device(self.group, device)
            self._all_reduce(torch.zeros(1, device=own), dist.ReduceOp.SUM, label="build")

    def gather_integers(self, values: Sequence[int], *, label: str) -> list[list[int]]:
        """Return the host integers of all ranks, by rank. Each rank passes the same number. Cost: one all-gather."""
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        gathered: list[list[int]] = self.gather_tensor(mine, label=label).tolist()
        return gathered

    def gather_tensor(self, mine: Tensor, *, label: str) -> Tensor:
        """Return the CPU tensors (N,) of all ranks as (P, N) on the CPU. A group without a CPU backend works too."""
        mine = to_device(mine, control_device(self.group))
        everyone = mine.new_empty(self.size * len(mine))
        self.all_gather(everyone, mine, label=label)
        return everyone.view(self.size, len(mine)).cpu()

    def gather_json(self, value: Any, *, label: str) -> list[Any]:
        """Return the JSON ``value`` of all ranks, by rank. Cost: two collectives; for building and reports only."""
        if self.group is None:
            return [value]
        payload = json.dumps(value).encode()
        (longest,) = self.max([len(payload)], label=label)
        device = control_device(self.group)
        mine = torch.tensor(list(payload.ljust(longest)), dtype=torch.uint8, device=device)
        everyone = torch.empty(longest * self.size, dtype=torch.uint8, device=device)
        self.all_gather(everyone, mine, label=label)
        return [json.loads(bytes(part)) for part in everyone.view(self.size, longest).tolist()]

    def broadcast(self, values: Tensor | None, length: int, *, source: int, label: str) -> Tensor:
        """Return the int64 ``values`` of rank ``source`` on every rank, as a CPU tensor.

        Args:
            values: (length,) on rank ``source``; None on the other ranks.
            length: Number of values; the same on every rank.
            source: Number of the sending rank in the group.
            label: Name under which the call and its bytes are counted.
        """
        device = control_device(self.group)
        inside = torch.empty(length, dtype=torch.int64, device=device) if values is None else values.to(device)
        options = dist.BroadcastOptions()
        options.rootRank = source
        nbytes = inside.nbytes * (self.size - 1) if self.rank == source else 0
        self._start("broadcast", [inside], tensor=inside, label=label, nbytes=nbytes, options=options).wait()
        return inside.cpu()

    def gather_bytes(self, payload: Tensor, *, label: str) -> list[Tensor] | None:
        """Return the payloads of all ranks on rank 0, by rank. The other ranks get None.

        Args:
            payload: uint8 on the CPU. Its length may differ between ranks.
            label: Name under which calls and bytes are counted.

        Cost: three collectives; rank 0 holds P times the bytes of the longest payload. For reports only.
        """
        if self.group is None:
            return [payload]
        lengths: list[int] = self.gather_json(len(payload), label=label)
        device = control_device(self.group)
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        mine[: len(payload)] = payload
        everyone = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else []
        arguments, nbytes = ([everyone] if everyone else [], [mine]), mine.nbytes if self.rank else 0
        self._start("gather", *arguments, tensor=mine, label=label, nbytes=nbytes, options=dist.GatherOptions()).wait()
        return [part[:length].cpu() for part, length in zip(everyone, lengths, strict=True)] if everyone else None


@final
@dataclass(slots=True, eq=False)
class _Started:
    """A collective that has started. An error of its transport gets a note from the communicator."""

    _communicator: Communicator
    _label: str
    _work: Work

    def wait(self) -> None:
        """Wait for the collective; on a GPU only the current stream waits."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._communicator.explain(error, self._label)
            raise
        del self._work  # it would keep the received rows in memory


_ALONE = Alone()
_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _let_go_of_groups() -> None:
    """Drop all process groups while the interpreter still runs.

    Models hold their dispatchers until the end. A process group that is destroyed during the interpreter's shutdown may
    abort the process. A successful run would then end with the exit status of a failure.
    """
    for communicator in [*_communicators]:
        communicator.let_go()


def raise_alike(
    control: Communicator,
    problem: Exception | None,
    *,
    values: Sequence[int] = (),
    sums: Sequence[Tensor] = (),
    facts: Mapping[str, Any] | None = None,
    of_call: bool = False,
    label: str,
) -> list[int]:
    """Raise on every rank if one rank has a problem or if facts differ; otherwise agree on numbers. Collective.

    An error that only one rank raises leaves its peers waiting in the next collective. So a rank catches its error and
    passes it to this function. The other ranks pass None, and every rank raises.

    Args:
        control: Communicator of the ranks. A CPU group does not make a GPU wait.
        problem: Error of this rank, or None.
        values: Integers of this rank; every rank passes the same number of them. If a rank has a problem, they are not
            used.
        sums: Counts of this rank, as in ``Communicator.max_and_sum``.
        facts: JSON values, by name, that must be equal on all ranks.
        of_call: Whether the facts describe one call (InputError) or the setup of the ranks (ConfigError).
        label: Name under which calls and bytes are counted.

    Returns:
        The maximum of each of ``values`` over the ranks, then the sum of each number of ``sums``.

    Raises:
        Exception: This rank has a problem; ``problem`` itself is raised.
        PeerError: Another rank has a problem. The error has the number of that rank and its text.
        ConfigError: The facts differ. The error has the name of a fact and its values on two ranks.
        InputError: The facts differ, and ``of_call`` is True.

    Cost: one all-reduce of the values and three more integers; with ``sums``, of these integers of each rank and of the
    sums. On a GPU-only group also a host sync. If something is wrong, also an exchange of texts.
    """
    unheard: Exception | None = None
    try:
        number = digest(facts or {})
        # max(number) equals -max(-number), which is min(number), only if all ranks have the same number.
        numbers = [int(problem is not None), number, -number, *values]
        found = control.max_and_sum(numbers, sums, label=label) if sums else control.max(numbers, label=label)
        refused, high, low, *highest = found
        if not refused and high == -low:
            return highest
        mine = [_plain(facts), None if problem is None else _text_of(problem)]
        everyone = control.gather_json(mine, label=label)
    except Exception as failure:  # the peers are in another collective; this rank's own error matters more
        if problem is None:
            raise
        unheard = failure
    if problem is not None:
        if unheard is not None:
            problem.add_note(f"The other ranks were not told: {unheard}")
        raise problem
    refusals = [f"rank {rank} refused: {text}" for rank, (_, text) in enumerate(everyone) if text is not None]
    if not refusals:
        _refuse_difference([of_rank or {} for of_rank, _ in everyone], of_call=of_call)
    raise PeerError("; ".join(refusals) + " [MD08]")


def ranks_by_value(values: Mapping[int, Value]) -> dict[Value, str]:
    """Return a text such as "ranks 0, 2" for each value, from the values by rank."""
    ranks: dict[Value, list[str]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(str(rank))
    return {value: f"rank{'s' if len(these) > 1 else ''} {', '.join(these)}" for value, these in ranks.items()}


def digest(facts: Mapping[str, Any]) -> int:
    """Return a number of 60 bits that is equal for equal facts."""
    return int(hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:15], 16)


def canonical_json(value: Any) -> str:
    """Return the same text for equal values. Keys are sorted, and 2.0 is written as 2."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value)))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text_of(problem: BaseException) -> str:
    """Return the text of an error for the peers. It starts with the type unless the error is our own."""
    if isinstance(problem, MoEDispatchError):
        return str(problem)
    return f"{type(problem).__name__}: {str(problem) or 'no text'}"


def _refuse_difference(facts: Sequence[Mapping[str, Any]], *, of_call: bool) -> None:
    """Raise an error for the first fact that differs between ranks.

    A fact may be missing on a rank with another version of the library.
    """
    way_out = "Make the same call on every rank."
    if not of_call:
        way_out = "Give every rank the same config, library and environment. [MD03]"
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        values = [repr(of_rank[name]) if name in of_rank else "nothing" for of_rank in facts]
        texts = [canonical_json(of_rank[name]) if name in of_rank else "nothing" for of_rank in facts]
        for rank, value in enumerate(values):
            if texts[rank] != texts[0]:
                text = f"Ranks disagree on {name}: rank 0 has {values[0]}, rank {rank} has {value}. {way_out}"
                raise InputError(text) if of_call else ConfigError(text)


def real_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group that has the backends and the store.

    A trainer may put a Python subclass of ProcessGroup around a group, to destroy it and to make it anew. torch reads
    most facts of a group in C++ and never asks the subclass. So ask this function again whenever a fact is needed.
    A wrapper holds its group in an attribute; without such an attribute, it is returned itself.
    """
    while type(group) is not dist.ProcessGroup:
        inside = [held for held in vars(group).values() if isinstance(held, dist.ProcessGroup)]
        if not inside:
            break
        group = inside[0]
    return group


def device_types(group: dist.ProcessGroup | None) -> set[str]:
    """Return the types of devices whose tensors a group can exchange. Empty without a group: any device is fine.

    Raises:
        StateError: The group is a wrapper that holds no group.
    """
    if group is None:
        return set()
    inside = real_group(group)
    with suppress(AttributeError):  # a wrapper that looks for it in the group that it has let go
        if kinds := {device.type for device in inside._device_types}:
            return kinds
    backends = dist.Backend.backend_capability
    kinds = {kind for name in backends if name in _backend_name(inside) for kind in backends[name]}
    if not kinds and type(inside) is not dist.ProcessGroup:
        raise _holds_none(group)
    return kinds


def _holds_none(group: dist.ProcessGroup) -> StateError:
    """Return the error of a Python group that has neither a group inside nor a backend that torch knows."""
    return StateError(
        f"Dispatcher: the {type(group).__name__} must hold a process group, got one that holds none. Make the group "
        "inside anew before the next call."
    )


def _backend_name(group: dist.ProcessGroup) -> str:
    """Return the name of the backend of a group that is written in Python, such as "torchft-nccl"; "" if unknown."""
    with suppress(AttributeError, KeyError, RuntimeError, ValueError):
        return dist.get_backend(group)
    with suppress(AttributeError, RuntimeError):
        return str(group.getBackendName())  # type: ignore[attr-defined]
    return ""


def device_of(group: dist.ProcessGroup | None, preferred: torch.device) -> torch.device:
    """Return the device on which ranks exchange rows: the preferred one, or else one that the group supports."""
    kinds = device_types(group)
    return own_device(group, preferred if not kinds or preferred.type in kinds else sorted(kinds)[0])


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which ranks exchange small host values: the CPU if the group supports it.

    An exchange on the CPU does not make a GPU wait.
    """
    kinds = device_types(group)
    return own_device(group, "cpu" if "cpu" in kinds or not kinds else sorted(kinds)[0])


def own_device(group: dist.ProcessGroup | None, device: torch.device | str) -> torch.device:
    """Return a device. If it has no number, it gets that of ``init_process_group(device_id=...)``.

    Without a number, a device is the current one, which is cuda:0 on every rank that does not set it.
    """
    device, bound = torch.device(device), None if group is None else getattr(real_group(group), "bound_device_id", None)
    return bound if bound is not None and device.index is None and bound.type == device.type else device


def to_device(values: Sequence[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Copy numbers of the host to a device. The host does not wait.

    The memory is pinned, so that the copy is asynchronous. torch does not reuse pinned memory before the copy is done:
    its allocator records an event behind each copy.

    Args:
        values: Integers, which become int64; or a tensor. A tensor that is on a device already is moved from there.
        device: The device.

    Raises:
        StateError: A CUDA graph is being captured. A replay would copy from memory that has been reused.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64, device="cpu")
    device = torch.device(device)
    if device.type == "cuda" and host.is_cpu and type(host) is Tensor and not torch.compiler.is_compiling():
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "Dispatcher: the lengths of a layout are on the host, inside the capture of a CUDA graph. Make a plan "
                "with plan(layout, like=x) before, or keep lengths on the device."
            )
        host = host.pin_memory()
    return host.to(device, non_blocking=host.is_cpu)


def read_host(tensor: Tensor) -> list[Any]:
    """Return the values of a tensor on the host. A host sync on a GPU; the verbs read a device only in this way."""
    result: list[Any] = tensor.tolist()
    return result


@final
class HostCopy:
    """Copy integers from a device to the host while the device goes on, and read them later.

    ``read`` waits only for the copy. If the host has waited for later work of the device in between, the copy is done
    and ``read`` does not wait. So ``moe_dispatch_testing.count_host_syncs`` does not count it.
    """

    def __init__(self, integers: Tensor) -> None:
        # A copy from a GPU goes to pinned memory, so the host does not wait for it.
        self._integers = integers.to(torch.device("cpu"), non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if integers.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(integers.device))

    def read(self) -> Any:
        """Return the integer, or a list of them if the tensor has dimensions."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._integers.tolist()
