"""Find the rank that the other ranks wait for, with notes of all ranks in the process group's store.

Suppose one rank never enters a collective. Then the collective fails on the other ranks after the group's timeout,
minutes later, and the error does not name the missing rank. With ``watchdog=seconds``, each collective of this library
has that time limit instead. Each rank notes which collective it is in, and a thread writes the note into the group's
store once a beat. A rank whose collective fails reads the notes of all ranks, and raises a ``LostPeerError`` that says
where each rank is.

A note has a number that grows with each beat. If the number of a rank stays the same, its process is gone or stopped.

Keys in the store:

- ``r``: the note of rank r.
- ``ended/r``: set if the watch of rank r ended normally.
- ``reading``: the notes of all ranks after the first failure, for the ranks that fail later.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from moe_dispatch.errors import ConfigError, LostPeerError

logger = logging.getLogger("moe_dispatch")

_PREFIX = "moe_dispatch/watchdog"


@final
class Call:
    """One collective of this rank on a watched group: what the rank notes about it, and the handle to wait for.

    Attributes:
        number: Number of the collective on this group, counted from 1; 0 for the time before the first.
        label: Phase, such as "counts" or "combine.backward".
        layer: Name of the dispatcher, or "" if unknown.
        nbytes: Bytes that the collective sends to other ranks.
        state: "in" while the host is inside, "after starting" before ``wait``, or "after".
        since: ``time.monotonic()`` of the last change of the state.
    """

    __slots__ = ("_is_cpu", "_watch", "_work", "label", "layer", "nbytes", "number", "since", "state")

    def __init__(self, watch: Watch, number: int, label: str, nbytes: int) -> None:
        self._watch = watch
        self._work: dist.Work | None = None
        self._is_cpu = True
        self.number, self.label, self.layer, self.nbytes = number, label, watch.layer, nbytes
        self.move("in" if number else "after")

    def move(self, state: str) -> None:
        """Note that this rank enters or leaves the collective."""
        self.state, self.since = state, time.monotonic()

    @property
    def phase(self) -> str:
        """Description of the collective, such as "counts of 'layers.3' (call 7)"."""
        return f"{self.label}{f' of {self.layer!r}' if self.layer else ''} (call {self.number})"

    def started(self, work: dist.Work, tensor: Tensor) -> Call:
        """Keep the handle of the collective on ``tensor``, and return the call."""
        self._work, self._is_cpu = work, tensor.is_cpu
        self.move("after starting")
        return self

    def wait(self) -> None:
        """Wait for the collective; on a GPU only the current stream waits.

        Raises:
            LostPeerError: The collective failed or took too long. The error says where each rank is.
        """
        assert self._work is not None
        self.move("in")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LostPeerError(self._watch.explain(self)) from error
        self.move("after")
        self._work = None
        if self._is_cpu:
            self._watch.finished = self
        else:
            self._watch.keep(self)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The note that one rank writes to the store.

    Attributes:
        host: Host name of the rank.
        beat: Counter that grows while the process of the rank runs.
        ended: Whether the process exited normally, or destroyed the group.
        number: Number of the rank's last call.
        label: Phase of the last call.
        state: State of the last call.
        phase: Description of the last call.
        seconds: How long the last call has had this state.
        finished: Number of the last call that is known to have completed.
        finished_phase: Description of the last completed call.
    """

    host: str
    beat: int
    ended: bool
    number: int
    label: str
    state: str
    phase: str
    seconds: float
    finished: int
    finished_phase: str


Reading = Sequence[tuple[Report | None, bool]]  # by rank: the report, and whether its beat counter grows


@final
class Watch:
    """Note the collectives of this rank on one process group, and write the notes to the store from a thread.

    Args:
        group: The process group. The watch does not keep it alive.
        seconds: Time limit of a collective.

    Attributes:
        layer: Name of the dispatcher that makes the next calls.
        call: The last call that this rank started.
        finished: The last call that is known to have completed.

    Cost: each rank makes one small write to the store and one or two reads a beat. A beat is a fifth of ``seconds``, at
    most a second.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.seconds = seconds
        self.layer = ""
        self.call = self.finished = Call(self, 0, "", 0)
        self._group = weakref.ref(group)
        self._rank, self._size = group.rank(), group.size()
        self._names = _rank_names(group)
        self._host, self._beat = socket.gethostname(), 0
        self._held: Any = group.get_group_store()  # the rank that hosts the store serves it while it is held
        # The thread has its own connection, so that it does not wait for the training script's use of the store.
        self._store = PrefixStore(_PREFIX, self._held).clone()  # type: ignore[attr-defined]
        # Rank 0 usually hosts a TCPStore; under torchrun an agent does. A store of another process looks like rank 0's.
        store = getattr(self._held, "_underlying_non_prefix_store", self._held)
        self._store_host = f" on {store.host}" if isinstance(store, dist.TCPStore) else ""
        self._leaves_with_rank_0 = (
            isinstance(store, dist.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )
        self._marks: deque[tuple[torch.cuda.Event, Call]] = deque()
        self._reading: Reading = ()
        self._asked, self._answered, self._stopping = (threading.Event() for _ in range(3))
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe_dispatch-watchdog", daemon=True)
        self._thread.start()

    @property
    def timeout(self) -> datetime.timedelta:
        """Time limit of a collective."""
        return datetime.timedelta(seconds=self.seconds)

    @property
    def _beat_seconds(self) -> float:
        return min(1.0, self.seconds / 5)

    def enter(self, label: str, nbytes: int) -> None:
        """Note that a collective begins."""
        self.call = Call(self, self.call.number + 1, label, nbytes)

    def keep(self, call: Call) -> None:
        """Watch a collective that only a GPU waits for. If it hangs, the thread logs where each rank is.

        The watch keeps an event on the stream. The handle of the collective would keep the received rows in memory.
        """
        if torch.cuda.is_current_stream_capturing():
            self._marks.clear()  # so that the thread queries no event while a graph is captured
            return
        while self._marks and self._marks[0][0].query():
            self.finished = self._marks.popleft()[1]
        event = torch.cuda.Event()
        event.record()
        self._marks.append((event, call))

    def explain(self, call: Call) -> str:
        """Return a text that says where each rank is, after ``call`` failed on this rank. Takes two to four beats."""
        self._asked.set()
        self._wake.set()
        deadline = time.monotonic() + 3.5 * self._beat_seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not self._answered.wait(0.02):
            pass
        return self._text(call, self._reading)

    def stop(self) -> None:
        """Write that this rank ended, and end the thread. Rank 0 waits a beat, so that the other ranks can read it."""
        self._stopping.set()
        self._wake.set()
        stuck = self._asked.is_set() and not self._answered.is_set()  # the store is gone, and never answers the thread
        if not stuck and threading.current_thread() is not self._thread:
            self._thread.join(timeout=3 * self._beat_seconds)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the rank or the agent that hosts it has ended
            self._write()
            while not self._is_over():
                self._wake.wait(self._beat_seconds)
                self._wake.clear()
                self._write()
                self._hear()
            self._end()
        self._held = None

    def _is_over(self) -> bool:
        """Return whether this watch was stopped, or its group destroyed."""
        group = self._group()
        return self._stopping.is_set() or group is None or (bool(self._names) and not _rank_names(group))

    def _hear(self) -> None:
        """Read the notes of all ranks if this rank or another one asks for them."""
        if self._answered.is_set():
            return
        if self._store.check(["reading"]):
            self._reading = _decoded(self._store.get("reading"))
        elif self._asked.is_set() or self._overdue() is not None:
            # All ranks use the first reading. Ranks that raise end soon, and a later reading would show them as gone.
            self._reading = _decoded(self._store.compare_set("reading", "", _encoded(self._read_all())))
        elif self._leaves_with_rank_0 and self._rank and self._store.check(["ended/0"]):
            # Rank 0 has ended, and the store ends with it. torch prints warnings if a store is used after its end.
            self._reading = [(report, True) for report in self._read_reports()]
            self._stopping.set()
        else:
            return
        self._answered.set()
        if (call := self._overdue()) is not None:
            logger.error("%s", self._text(call, self._reading))

    def _end(self) -> None:
        self._write(ended=True)
        self._store.set(f"ended/{self._rank}", "")
        everyone = [f"ended/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + 1.5 * self._beat_seconds
        while self._leaves_with_rank_0 and not self._rank and time.monotonic() < deadline:
            if self._store.check(everyone):
                return
            time.sleep(0.01)

    def _write(self, *, ended: bool = False) -> None:
        self._beat += 1
        call, finished = self.call, self.finished
        report = Report(
            host=self._host,
            beat=self._beat,
            ended=ended,
            number=call.number,
            label=call.label,
            state=call.state,
            phase=call.phase,
            seconds=time.monotonic() - call.since,
            finished=finished.number,
            finished_phase=finished.phase,
        )
        self._store.set(str(self._rank), json.dumps(asdict(report)))

    def _read_all(self) -> Reading:
        """Return the report of every rank, and whether its beat counter grows."""
        self._write()
        before = self._read_reports()
        for _ in range(2):  # two beats, because a thread may be late on a busy machine
            self._stopping.wait(self._beat_seconds)
            self._write()
        after = self._read_reports()
        return [
            (new, new is not None and (old is None or new.ended or new.beat != old.beat))
            for old, new in zip(before, after, strict=True)
        ]

    def _read_reports(self) -> list[Report | None]:
        keys = [str(rank) for rank in range(self._size)]
        if self._store.check(keys):
            return [_report(json.loads(value)) for value in self._store.multi_get(keys)]
        return [_report(json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _overdue(self) -> Call | None:
        """Return the first collective that a GPU has waited for longer than the time limit, or None."""
        with suppress(IndexError):  # the main thread may empty the list meanwhile
            event, call = self._marks[0]
            # Only old events are queried, because a query from another thread can break the capture of a graph.
            if time.monotonic() - call.since > self.seconds and not event.query():
                return call
        return None

    def _text(self, call: Call, reading: Reading) -> str:
        begin = (
            f"Watchdog: {call.phase}, {call.nbytes} bytes from {self._ranks([self._rank])}, must complete within "
            f"{self.seconds:g} s, got"
        )
        if not reading:
            return (
                f"{begin} a failure, and no answer from the store of the process group{self._store_host}, so the other "
                "ranks cannot be asked. Look first at the process that hosts the store: rank 0, or the agent of "
                "torchrun."
            )
        finished = max((report for report, _ in reading if report), key=lambda report: report.finished)
        places = [_place(report, alive, finished) for report, alive in reading]
        ranks_at: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            ranks_at.setdefault(place, []).append(rank)
        told = "; ".join(
            f"{self._ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in ranks_at.items()
        )
        late = _late(reading)
        hosts = ", ".join(sorted({report.host for rank, (report, _) in enumerate(reading) if report and rank in late}))
        if not late:
            return f"{begin} no end although {told}. Look at the network between the ranks, or raise watchdog."
        if all(_is_inside(*reading[rank]) for rank in late):
            told = f"the ranks make their calls in different orders: {told}"
        return (
            f"{begin} no end without {self._ranks(late)} on {hosts or 'an unknown host'}: {told}. "
            f"Look at {self._ranks(late)} first."
        )

    def _ranks(self, ranks: Sequence[int]) -> str:
        names = [str(rank) for rank in ranks]
        world = [self._names[rank] for rank in ranks] if self._names else names
        numbers = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
        return numbers if world == names else f"{numbers} of the group ({', '.join(world)} of the job)"


def _rank_names(group: dist.ProcessGroup) -> list[str]:
    """Return the ranks of the group in the default group; empty for a group that torch.distributed does not know."""
    with suppress(KeyError, ValueError, RuntimeError):
        return [str(rank) for rank in dist.get_process_group_ranks(group)]
    return []


def _late(reading: Reading) -> list[int]:
    """Return the ranks to look at first.

    These are the ranks in another collective with the same number; else the ranks that are gone, ended or elsewhere;
    else the ranks in a collective with another number; else the ranks in a collective of another dispatcher.
    """
    inside = {rank: report for rank, (report, alive) in enumerate(reading) if _is_inside(report, alive)}
    gone = [rank for rank, (report, alive) in enumerate(reading) if report is None or not alive]
    elsewhere = [rank for rank, (report, _) in enumerate(reading) if report and report.state != "in"]
    ended = [rank for rank in elsewhere if (report := reading[rank][0]) and report.ended]
    kinds = {rank: (report.number, report.label) for rank, report in inside.items() if report}
    numbers = {rank: number for rank, (number, _) in kinds.items()}
    astray = [] if _minority(numbers) else _minority(kinds)
    # Names of dispatchers may differ between ranks, so they count last, and only against a majority.
    phases = {rank: report.phase for rank, report in inside.items() if report}
    renamed = _minority(phases) if len(set(phases.values())) < len(phases) else []
    return astray or gone or ended or elsewhere or _minority(kinds) or renamed


def _is_inside(report: Report | None, alive: bool) -> bool:
    return report is not None and alive and not report.ended and report.state == "in"


def _minority(values: Mapping[int, object]) -> list[int]:
    """Return the ranks whose value is not the most frequent one."""
    common = Counter(values.values()).most_common(1)
    return [rank for rank, value in values.items() if value != common[0][0]]


def _place(report: Report | None, alive: bool, finished: Report) -> str:
    """Return a text that says where a rank is.

    Args:
        report: Report of the rank, or None if it has written none.
        alive: Whether the beat counter of the rank grows.
        finished: Report of the rank whose last completed call has the highest number. All ranks took part in that call.
    """
    if report is None:
        return "before its first dispatcher with a watchdog"
    if not alive and finished.finished > report.number:
        return f"without a sign of life after taking part in {finished.finished_phase}"
    if not report.number:
        place = "before its first call"
    elif report.state == "in":
        place = f"in {report.phase}"
    else:
        place = f"elsewhere for {report.seconds:.0f} s {report.state} {report.phase}"
    if report.ended:
        return f"at the end of its process or group, {place}"
    return place if alive else f"without a sign of life, last seen {place}"


def _encoded(reading: Reading) -> str:
    return json.dumps([(None if report is None else asdict(report), alive) for report, alive in reading])


def _decoded(text: bytes) -> Reading:
    return [(_report(values), alive) for values, alive in json.loads(text)]


def _report(values: dict[str, Any] | None) -> Report | None:
    return None if values is None else Report(**values)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def watch_group(group: dist.ProcessGroup, seconds: float) -> Watch:
    """Watch a group until it is destroyed or the process ends. A group that has a watch keeps it.

    Raises:
        ConfigError: The group has no store that the watch can use.
    """
    with _lock:
        if (known := _watches.get(group)) is not None:
            return known
        try:
            if group.get_group_store() is None:
                raise RuntimeError("it has no store")
            watch = Watch(group, seconds)
        except RuntimeError as error:
            raise ConfigError(
                f"watchdog={seconds:g} needs a process group with a store that can be cloned, got a group without one "
                f"({str(error).splitlines()[0]}). Make the group with torch.distributed, or leave watchdog out."
            ) from error
        _watches[group] = watch
        weakref.finalize(group, watch.stop)
        return watch


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """Return the watch of a group, or None."""
    return None if group is None else _watches.get(group)
