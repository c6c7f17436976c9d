"""Every torch.distributed collective of moe_dispatch, and the one way in which ranks raise together.

The kernels of ``deep_ep`` exchange rows too: in ``send``, ``send_again`` and ``combine`` of the drivers in
``moe_dispatch.backends.deep_ep``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError, PeerError
from moe_dispatch.watchdog import Call, watch_of

Options = TypeVar("Options")


Started = dist.Work | Call  # a collective that can be waited for


@final
class Communicator:
    """A process group, or a single rank without one, and a count of the bytes sent to other ranks.

    The ProcessGroup's own methods are called rather than the functions of torch.distributed: these add 20 to 50 us of
    Python a call, and some are being renamed. ``bytes_sent`` counts by label, on the host, without a sync.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.watch = watch_of(group)
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def let_go(self) -> None:
        """Drop the process group, at the end of the process; nothing can be sent from then on."""
        self.group = None

    def _count(self, label: str, nbytes: int) -> None:
        self.calls[label] += 1
        self.bytes_sent[label] += nbytes
        if self.watch is not None:
            self.watch.enter(label, nbytes)

    def _started(self, work: dist.Work, tensor: Tensor) -> Started:
        """What to wait for after ``_count`` and the start of a collective on ``tensor``."""
        return work if self.watch is None else self.watch.call.started(work, tensor)

    def _options(self, kind: Callable[[], Options]) -> Options:
        """Options of a collective, with the time limit of the watchdog."""
        options = kind()
        if self.watch is not None:
            options.timeout = self.watch.timeout  # type: ignore[attr-defined]
        return options

    def all_to_all(
        self, received: Tensor, sent: Tensor, rows_in: Sequence[int], rows_out: Sequence[int], *, label: str
    ) -> Started | None:
        """Send rows to the ranks; started, not awaited. None without a group.

        Args:
            received: where the rows of all ranks come to stand, by rank.
            sent: the rows of this rank, by destination.
            rows_in: rows from each rank, along dim 0.
            rows_out: rows to each rank.
            label: name under which calls and bytes are counted.
        """
        rows, nbytes = sent.shape[0], sent.nbytes
        self._count(label, nbytes - nbytes // rows * rows_out[self.rank] if rows else 0)
        if self.group is None:
            received.copy_(sent)
            return None
        options = self._options(dist.AllToAllOptions)
        return self._started(self.group.alltoall_base(received, sent, list(rows_in), list(rows_out), options), sent)

    def all_gather(self, out: Tensor, inp: Tensor, *, label: str) -> None:
        """``inp`` of every rank, stacked along dim 0 of ``out`` by rank."""
        self._count(label, inp.nbytes * (self.size - 1))
        if self.group is None:
            out.copy_(inp)
            return
        self._started(self.group._allgather_base(out, inp, self._options(AllgatherOptions)), inp).wait()

    def reduce_scatter(self, out: Tensor, inp: Tensor, *, label: str) -> None:
        """Sum of ``inp`` over ranks, of which rank r gets the r-th part along dim 0."""
        self._count(label, inp.nbytes - inp.nbytes // self.size)
        if self.group is None:
            out.copy_(inp)
            return
        options = self._options(dist.ReduceScatterOptions)
        self._started(self.group._reduce_scatter_base(out, inp, options), inp).wait()

    def max(self, values: Sequence[int], *, label: str) -> list[int]:
        """Elementwise maximum over ranks of host integers. Cost: one all-reduce, and a host sync if on a GPU."""
        self._count(label, 2 * 8 * len(values) * (self.size - 1) // self.size)  # as a ring all-reduce does it
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device=control_device(self.group))
        options = self._options(dist.AllreduceOptions)
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._started(self.group.allreduce([tensor], options), tensor).wait()
        return read_host(tensor)

    def touch(self, device: torch.device) -> None:
        """A collective of one element, which makes the group's communicator for that device."""
        if self.group is not None:
            tensor = torch.zeros(1, device=device)
            if self.watch is not None:
                self.watch.enter("build", 0)
            self._started(self.group.allreduce([tensor], self._options(dist.AllreduceOptions)), tensor).wait()

    def gather_integers(self, values: Sequence[int], *, label: str) -> list[list[int]]:
        """The host integers of every rank, by rank; as many on each. Cost: one all-gather."""
        if self.group is None:
            return [list(values)]
        device = control_device(self.group)
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        everyone = torch.empty(self.size * len(values), dtype=torch.int64, device=device)
        self.all_gather(everyone, mine, label=label)
        return [list(part) for part in everyone.view(self.size, -1).tolist()]

    def gather_json(self, value: Any, *, label: str) -> list[Any]:
        """``value`` of every rank, by rank. Cost: two collectives; for building and reporting, not for a step."""
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
        """The int64 ``values`` of rank ``source`` on every rank, as a CPU tensor.

        Args:
            values: (length,), on rank ``source``; None elsewhere.
            length: the same number on every rank.
            source: rank in the group.
            label: name under which calls and bytes are counted.
        """
        assert self.group is not None
        device = control_device(self.group)
        inside = torch.empty(length, dtype=torch.int64, device=device) if values is None else values.to(device)
        self._count(label, inside.nbytes * (self.size - 1) if self.rank == source else 0)
        options = self._options(dist.BroadcastOptions)
        options.rootRank = source
        self._started(self.group.broadcast([inside], options), inside).wait()
        return inside.cpu()

    def gather_bytes(self, payload: Tensor, *, label: str) -> list[Tensor] | None:
        """``payload`` of every rank on rank 0, by rank; None on the others.

        Args:
            payload: uint8 on the CPU, of any length.
            label: name under which calls and bytes are counted.

        Cost: two collectives; rank 0 holds P times the longest. For reporting, not for a step.
        """
        if self.group is None:
            return [payload]
        lengths: list[int] = self.gather_json(len(payload), label=label)
        device = control_device(self.group)
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        mine[: len(payload)] = payload
        everyone = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else []
        self._count(label, mine.nbytes if self.rank else 0)
        gathered = self.group.gather([everyone] if everyone else [], [mine], self._options(dist.GatherOptions))
        self._started(gathered, mine).wait()
        return [part[:length].cpu() for part, length in zip(everyone, lengths, strict=True)] if everyone else None


def raise_alike(
    control: Communicator,
    problem: Exception | None,
    *,
    values: Sequence[int] = (),
    facts: Mapping[str, Any] | None = None,
    of_call: bool = False,
    label: str,
) -> list[int]:
    """Raise on every rank if any rank has a problem or other facts; else agree on numbers. Collective.

    An error that only one rank raises leaves its peers waiting in the next collective. So a rank catches what it found
    wrong, enters this function with it as all others do with None, and every rank raises.

    Args:
        control: communicator of the ranks; a CPU group does not make a GPU wait.
        problem: the error of this rank, or None.
        values: integers of this rank, as many on every rank. They do not count on a rank with a problem.
        facts: JSON values by name that must be equal on all ranks.
        of_call: whether the facts describe one call, rather than how the ranks were set up.
        label: name under which calls and bytes are counted.

    Returns:
        The maximum of each of ``values`` over the ranks.

    Raises:
        Exception: ``problem`` itself, on the rank that has it.
        PeerError: another rank has a problem; with its number and its text.
        ConfigError, or InputError if ``of_call``: the facts differ; with the name and the values of two ranks.

    Cost: one all-reduce of the values, two numbers for the facts and one for the problem, and a host sync on a GPU-only
    group. Only if it raises, an exchange of texts.
    """
    unheard: Exception | None = None
    try:
        number = digest(facts or {})
        # The maxima of a number and of its negative cancel exactly where all ranks have the same number.
        refused, high, low, *highest = control.max([int(problem is not None), number, -number, *values], label=label)
        if not refused and high == -low:
            return highest
        told = control.gather_json([_plain(facts), None if problem is None else _text(problem)], label=label)
    except Exception as failure:  # the peers left for another collective: this rank's own error matters more
        if problem is None:
            raise
        unheard = failure
    if problem is not None:
        if unheard is not None:
            problem.add_note(f"The other ranks were not told: {unheard}")
        raise problem
    if not refused:
        _refuse_difference([of_rank or {} for of_rank, _ in told], of_call=of_call)
    raise PeerError(
        "; ".join(f"rank {rank} refused: {text}" for rank, (_, text) in enumerate(told) if text is not None) + " [MD08]"
    )


def digest(facts: Mapping[str, Any]) -> int:
    """Return a number of 60 bits that is equal for equal facts."""
    return int(hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:15], 16)


def canonical_json(value: Any) -> str:
    """One text for equal values: keys are sorted, and a float without a fraction is written as an integer."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(problem: Exception) -> str:
    """What peers are told. Errors of other libraries are named, because they may have no text."""
    if isinstance(problem, MoEDispatchError):
        return str(problem)
    return f"{type(problem).__name__}: {str(problem) or 'no text'}"


def _refuse_difference(facts: Sequence[Mapping[str, Any]], *, of_call: bool) -> None:
    """Raise for the first fact that differs. Ranks with other versions of the library may lack a name."""
    error = InputError if of_call else ConfigError
    way_out = "Make the same call on every rank."
    if not of_call:
        way_out = "Give every rank the same config, library and environment. [MD03]"
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        texts = [canonical_json(of_rank[name]) if name in of_rank else "nothing" for of_rank in facts]
        values = [repr(of_rank[name]) if name in of_rank else "nothing" for of_rank in facts]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise error(
                    f"Ranks disagree on {name}: rank 0 has {values[0]}, rank {rank} has {values[rank]}. {way_out}"
                )


def device_types(group: dist.ProcessGroup | None) -> set[str]:
    """The types of devices whose tensors a group can exchange; without a group, any: none is named."""
    return set() if group is None else {device.type for device in group._device_types}


def device_of(group: dist.ProcessGroup | None, preferred: torch.device) -> torch.device:
    """Where ranks exchange rows: the preferred device if the group has a backend for it, else one it has."""
    kinds = device_types(group)
    return preferred if not kinds or preferred.type in kinds else torch.device(sorted(kinds)[0])


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small host values are exchanged: the CPU if the group has a CPU backend, so that no GPU is made to wait."""
    kinds = device_types(group)
    return torch.device("cpu" if "cpu" in kinds or not kinds else sorted(kinds)[0])


def read_host(tensor: Tensor) -> list[Any]:
    """Values of a tensor on the host. In a verb nothing else reads a device: each call is a host sync on a GPU."""
    result: list[Any] = tensor.tolist()
    return result


@final
class HostCopy:
    """A number of a device that is copied to the host while the device goes on, to be read later.

    ``read`` waits for no work but the copy. A host that has waited for later work in between waits for nothing, so
    ``moe_dispatch.testing.count_host_syncs`` does not count it.
    """

    def __init__(self, number: Tensor) -> None:
        # From a GPU the copy goes to pinned memory, and does not wait.
        self._number = number.to(torch.device("cpu"), non_blocking=True)
        self._number.is_host_copy = True  # type: ignore[attr-defined]
        self._copied: torch.cuda.Event | None = None
        if number.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(number.device))

    def read(self) -> int:
        """Return the number."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._number)
