"""Find the rank that the other ranks wait for, with a note of each rank in the process group's store.

Suppose one rank never enters a collective. Then the collective fails on the other ranks after the group's timeout,
minutes later, and the error does not name the missing rank. With ``watchdog=seconds``, each collective of this library
has that time limit instead. Each rank notes which collective it is in, and a thread writes the note into the group's
store once a beat. A rank whose collective fails reads the notes of all ranks, and raises a ``LostPeerError`` that says
where each rank is.

A note has a number that grows with each beat. If the number of a rank stays the same, its process is gone or stopped.

Keys in the store:

- ``r``: the note of rank r.
- ``notes``: the notes of all ranks after the first failure. All ranks use them, because ranks that raise end soon, and
  would look gone to a rank that reads later.
- ``_HOST_ENDED`` and ``_OPEN``, which all groups of the job share: set if the process that hosts the store has ended
  normally, and the number of watches that still use the store.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from moe_dispatch.communication import real_group
from moe_dispatch.dispatchers.channel import open_channels
from moe_dispatch.errors import ConfigError, LostPeerError
from moe_dispatch.seams.group_observers import CollectiveObserver, Work, observers_of

logger = logging.getLogger("moe_dispatch")

RAISED = "after an error of its own in"
# Texts of errors where NCCL has lost a rank: remote error, aborted communicator, timeout, or no answer from rank 0.
_LOST = re.compile(
    "ncclRemoteError|remote process exited|communicator was aborted|error set by ProcessGroupNCCL|timeout|"
    "retrieving ncclUniqueId",
    re.IGNORECASE,
)
_HOST_ENDED, _OPEN = "moe_dispatch/watchdog/host_ended", "moe_dispatch/watchdog/open"


@final
class WatchedCall:
    """One collective of this rank on a watched group: what the rank notes about it, and the handle to wait for.

    Attributes:
        number: Number of the collective on this group, counted from 1; 0 for the time before the first.
        label: Phase, such as "counts" or "combine.backward".
        phase: Description, such as "counts of 'layers.3' (call 7)".
        nbytes: Bytes that the collective sends to other ranks.
        state: "in" while the host is inside, "after starting" before ``wait``, "after", or ``RAISED``.
        since: ``time.monotonic()`` of the last change of the state.
        is_first: Whether it is the first one with its label on the group.
    """

    __slots__ = ("_on_cpu", "_watch", "_work", "is_first", "label", "nbytes", "number", "phase", "since", "state")

    def __init__(self, watch: Watch, number: int, label: str, nbytes: int) -> None:
        self._watch, self.number, self.label, self.nbytes = watch, number, label, nbytes
        self.phase = f"{label}{f' of {watch.layer!r}' if watch.layer else ''} (call {number})"
        self.is_first = label not in watch.labels
        watch.labels.add(label)
        self.move("in" if number else "after")

    def move(self, state: str) -> None:
        """Note that this rank enters or leaves the collective."""
        self.state, self.since = state, time.monotonic()

    def leave(self) -> None:
        """Note that this rank leaves the collective by an error of its own, such as Ctrl-C, which it may catch."""
        self.move(RAISED)
        self._watch.raised = self.phase

    def started(self, work: Work, tensor: Tensor) -> WatchedCall:
        """Keep the handle of the collective on ``tensor``, and return the call."""
        self._work, self._on_cpu = work, tensor.is_cpu
        self.move("after starting")
        return self

    def wait(self) -> None:
        """Wait for the collective; on a GPU only the current stream waits.

        Raises:
            LostPeerError: The collective failed or took too long. The error says where each rank is.
        """
        self.move("in")
        try:
            self._work.wait()
            self.move("after")
        except RuntimeError as error:
            raise LostPeerError(self._watch.explain(self)) from error
        except BaseException:
            self.leave()
            raise
        del self._work  # it would keep the received rows in memory
        if self._on_cpu:
            self._watch.finished = self
        else:
            self._watch.keep(self)


@final
class RankNote(NamedTuple):
    """Where a rank is, as the rank writes it to the store.

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
        alive: Whether the beat counter grew while the notes were read.
        raised: Description of the last call that the rank left by an error of its own; empty if there is none.
        refused: Text of the error by which the rank has refused a call since; empty if it has not.
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
    alive: bool = True
    raised: str = ""
    refused: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether the rank waits in a collective."""
        return self.alive and not self.ended and self.state == "in"


Notes = Sequence[RankNote | None]  # by rank; None for a rank that has written no note


@final
class Watch(CollectiveObserver):
    """Note the collectives of this rank on one process group, and write the notes to the store from a thread.

    Args:
        group: The process group. The watch does not keep it alive.
        seconds: Time limit of a collective.

    Attributes:
        layer: Name of the dispatcher that makes the next calls.
        call: The last call that this rank started.
        finished: The last call that is known to have completed.
        labels: Labels of the calls so far.
        raised: Description of the last call that this rank left by an error of its own; empty if there is none.
        error: Text of the error by which this rank has refused a call since; empty if it has not.

    Cost: each rank makes one small write to the store and one or two reads a beat. A beat is a fifth of ``seconds``, at
    most a second.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.seconds = seconds
        self.layer = self.raised = self.error = ""
        self.labels: set[str] = set()
        self.call = self.finished = WatchedCall(self, 0, "", 0)
        self._group = weakref.ref(group)
        inside = real_group(group)
        self._rank, self._size = inside.rank(), inside.size()
        self._names = _rank_names(group)
        self._host, self._beat = socket.gethostname(), 0
        self._held: Any = inside.get_group_store()  # the rank that hosts the store serves it while it is held
        # The thread has its own connection, so that it does not wait for the training script's use of the store.
        self._store = PrefixStore("moe_dispatch/watchdog", self._held).clone()  # type: ignore[attr-defined]
        self._job: Any = self._store._underlying_non_prefix_store  # the keys that all groups of the job share
        self._job.add(_OPEN, 1)
        # Rank 0 of the job usually hosts a TCPStore; under torchrun an agent does.
        self._store_host = f" on {self._job.host}" if isinstance(self._job, dist.TCPStore) else ""
        hosted_by_rank = bool(self._store_host) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._is_host = hosted_by_rank and (self._names[self._rank] == "0" if self._names else not self._rank)
        self._marks: deque[tuple[torch.cuda.Event, WatchedCall]] = deque()
        self._notes: Notes = ()
        self._host_ended = False
        self._asked, self._answered, self._stopping, self._wake = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._run, name="moe_dispatch-watchdog", daemon=True)
        self._thread.start()

    @property
    def _beat_seconds(self) -> float:
        return min(1.0, self.seconds / 5)

    def called(self, name: str) -> None:
        """Note the dispatcher that makes the next calls."""
        self.layer = name

    def collective(
        self, label: str, nbytes: int, tensor: Tensor, start: Callable[[Any], Work], options: Any
    ) -> WatchedCall:
        """Note that a collective on ``tensor`` begins, and start it with the time limit.

        Raises:
            LostPeerError: NCCL has lost a rank. The error says where each rank is. Other errors of NCCL pass through.
        """
        self.call, self.error = WatchedCall(self, self.call.number + 1, label, nbytes), ""
        options.timeout = datetime.timedelta(seconds=self.seconds)
        try:
            return self.call.started(start(options), tensor)
        except BaseException as error:
            told = str(error) if isinstance(error, RuntimeError) else ""
            if "NCCL" in told and _LOST.search(told):  # it starts nothing once it has lost a rank
                raise LostPeerError(self.explain(self.call)) from error
            self.call.leave()
            raise

    def raised_alone(self, error: Exception) -> None:
        """Note the error by which this rank refuses a call, for the ranks that wait."""
        self.error = str(error)

    def keep(self, call: WatchedCall) -> None:
        """Watch a collective that only a GPU waits for. If it hangs, the thread logs where each rank is."""
        if torch.cuda.is_current_stream_capturing():
            self._marks.clear()  # so that the thread queries no event while a graph is captured
            return
        while self._marks and self._marks[0][0].query():
            self.finished = self._marks.popleft()[1]
        event = torch.cuda.Event()
        event.record()
        self._marks.append((event, call))

    def explain(self, call: WatchedCall) -> str:
        """Return a text that says where each rank is, after ``call`` failed on this rank. Takes two to four beats."""
        self._asked.set()
        self._wake.set()
        self._answered.wait(3.5 * self._beat_seconds)
        return self._text(call, self._notes) + _of_first_call(call, self._notes)

    def stop(self) -> None:
        """Write that this rank ended, and end the thread. The host of the store waits two beats for others."""
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
                if not self._answered.is_set():
                    self._hear()
            self._end()
        self._answered.set()
        self._held = None

    def _is_over(self) -> bool:
        """Return whether this watch was stopped, its group destroyed, or its store is about to end."""
        group = self._group()
        if self._host_ended or self._stopping.is_set() or group is None:
            return True
        return bool(self._names) and not _rank_names(group)

    def _hear(self) -> None:
        """Read the notes of all ranks if this rank or another one asks for them."""
        if self._store.check(["notes"]):
            told = self._store.get("notes")
        elif self._asked.is_set() or self._overdue() is not None:
            told = self._store.compare_set("notes", "", json.dumps(self._read_twice()))
        elif self._job.check([_HOST_ENDED]):
            # The store ends with its host. torch prints warnings if a store is used after its end.
            notes = self._read()  # of use later only if a rank has ended
            told = json.dumps(notes if any(note and note.ended for note in notes) else [])
            self._host_ended = True
        else:
            return
        self._notes = [None if values is None else RankNote(*values) for values in json.loads(told)]
        self._answered.set()
        if (call := self._overdue()) is not None:
            logger.error("%s", self._text(call, self._notes) + _of_first_call(call, self._notes))

    def _end(self) -> None:
        self._write(ended=not self._host_ended)
        self._job.add(_OPEN, -1)
        exits = self._stopping.is_set() and self._group() is not None
        if self._is_host and not self._host_ended and (exits or not dist.is_initialized()):
            self._job.set(_HOST_ENDED, "")
            deadline = time.monotonic() + 2.5 * self._beat_seconds
            while self._job.add(_OPEN, 0) > 0 and time.monotonic() < deadline:
                time.sleep(0.01)

    def _write(self, *, ended: bool = False) -> None:
        self._beat += 1
        call, seconds = self.call, time.monotonic() - self.call.since
        of_call = (call.number, call.label, call.state, call.phase, seconds)
        finished = self.finished.number, self.finished.phase
        note = RankNote(self._host, self._beat, ended, *of_call, *finished, raised=self.raised, refused=self.error)
        self._store.set(str(self._rank), json.dumps(note))

    def _read_twice(self) -> Notes:
        """Return the note of every rank, and whether its beat counter grew in two beats."""
        before = self._read()
        for _ in range(2):  # two beats, because a thread may be late on a busy machine
            self._stopping.wait(self._beat_seconds)
            self._write()
        return [
            new and new._replace(alive=old is None or new.ended or new.beat != old.beat)
            for old, new in zip(before, self._read(), strict=True)
        ]

    def _read(self) -> Notes:
        keys = [str(rank) for rank in range(self._size)]
        if self._store.check(keys):  # one request for all ranks
            return [RankNote(*json.loads(value)) for value in self._store.multi_get(keys)]
        return [RankNote(*json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _overdue(self) -> WatchedCall | None:
        """Return the first collective that a GPU has waited for longer than the time limit, or None."""
        with suppress(IndexError):  # the main thread may empty the list meanwhile
            event, call = self._marks[0]
            # Only old events are queried, because a query from another thread can break the capture of a graph.
            if time.monotonic() - call.since > self.seconds and not event.query():
                return call
        return None

    def _text(self, call: WatchedCall, notes: Notes) -> str:
        begin = (
            f"Watchdog: {call.phase}, {call.nbytes} bytes from {self._ranks([self._rank])}, failed or took longer than "
            f"{self.seconds:g} s"
        )
        if not notes:
            blind = f"{begin}. There is no answer from the store of the process group{self._store_host}"
            if self._host_ended:
                others = [rank for rank in range(self._size) if rank != self._rank]
                return f"{blind}, because its host has ended normally. Look at {self._ranks(others)}."
            return f"{blind}. Look first at the process that hosts it: rank 0 of the job, or the agent of torchrun."
        finished = max((note for note in notes if note), key=lambda note: note.finished)
        ranks_at: dict[str, list[int]] = {}
        for rank, note in enumerate(notes):
            ranks_at.setdefault(_whereabouts(note, finished), []).append(rank)
        told = "; ".join(
            f"{self._ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in ranks_at.items()
        )
        late, inside = _late(notes), [rank for rank, note in enumerate(notes) if note and note.is_inside]
        if len(late) > 1 and late == inside:
            return (
                f"{begin}, because the ranks make their calls in different orders: {told}. Nothing shows which of "
                f"them is wrong: compare the calls of {self._ranks(late)}."
            )
        if late and {*late} <= {*inside}:
            told = f"the ranks make their calls in different orders: {told}"
        elif not late and (late := _came_last(notes, self.seconds / 2)):
            told = f"{self._ranks(late)} came long after the first rank, and now {told}"
        if not late:
            return f"{begin}, although {told}. Look at the network between the ranks, or raise watchdog."
        hosts = ", ".join(sorted({note.host for rank in late if (note := notes[rank])})) or "an unknown host"
        return f"{begin}, because of {self._ranks(late)} on {hosts}: {told}. Look at {self._ranks(late)} first."

    def _ranks(self, ranks: Sequence[int]) -> str:
        names = [str(rank) for rank in ranks]
        world = [self._names[rank] for rank in ranks] if self._names else names
        numbers = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
        return numbers if world == names else f"{numbers} of the group ({', '.join(world)} of the job)"


def _rank_names(group: dist.ProcessGroup) -> list[str]:
    """Return the ranks of the group in the default group; empty for a group that torch.distributed does not know."""
    with suppress(KeyError, ValueError, RuntimeError):
        return [str(rank) for rank in dist.get_process_group_ranks(real_group(group))]
    return []


def _of_first_call(call: WatchedCall, notes: Notes) -> str:
    """Return a sentence for the first call of a kind, before which a rank that is alive may compile; else nothing."""
    is_computing = any(note and note.alive and not note.ended and note.state != "in" for note in notes)
    if not (call.is_first and is_computing):
        return ""
    return (
        f" It is the first {call.label!r} on this group: before it, a rank may compile kernels for minutes. If it "
        "does, raise watchdog."
    )


def _late(notes: Notes) -> list[int]:
    """Return the ranks to look at first.

    These are the ranks in another collective with the same number; else the ranks that are gone, ended or elsewhere;
    else the ranks in a collective with another number; else the ranks in a collective of another dispatcher. A
    collective is another one if fewer ranks are in it than in the most frequent one. If two collectives are equally
    frequent, the ranks that left an earlier collective by an error of their own stand out; if there are none, all do.
    """
    inside = {rank: note for rank, note in enumerate(notes) if note and note.is_inside}
    gone = [rank for rank, note in enumerate(notes) if note is None or not note.alive]
    elsewhere = {rank: note for rank, note in enumerate(notes) if note and note.state != "in"}
    ended = [rank for rank, note in elsewhere.items() if note.ended]
    places = {rank: (note.number, note.label) for rank, note in inside.items()}
    astray = _minority(places)
    if not astray and len({*places.values()}) > 1:
        astray = [rank for rank, note in inside.items() if note.raised] or [*inside]
    same_number = len({note.number for note in inside.values()}) == 1
    # Names of dispatchers may differ between ranks, so they count last, and only against a majority.
    renamed = _minority({rank: note.phase for rank, note in inside.items()})
    return (astray if same_number else []) or gone or ended or [*elsewhere] or astray or renamed


def _came_last(notes: Notes, gap: float) -> list[int]:
    """Return the ranks that came into the collective, in which all ranks are, ``gap`` seconds after the first one."""
    seconds = [note.seconds if note else 0 for note in notes]
    return [rank for rank, here in enumerate(seconds) if max(seconds) - here > gap]


def _minority(values: Mapping[int, object]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; none if two values are equally frequent."""
    common = Counter(values.values()).most_common(2)
    if len(common) > 1 and common[0][1] == common[1][1]:
        return []
    return [rank for rank, value in values.items() if value != common[0][0]]


def _whereabouts(note: RankNote | None, finished: RankNote) -> str:
    """Return a text that says where a rank is.

    Args:
        note: Note of the rank, or None if it has written none.
        finished: Note of the rank whose last completed call has the highest number. All ranks took part in that call.
    """
    if note is None:
        return "before its first dispatcher with a watchdog"
    if not note.alive and finished.finished > note.number:
        return f"without a sign of life after taking part in {finished.finished_phase}"
    if not note.number:
        where = "before its first call"
    elif note.state == "in":
        where = f"in {note.phase}{f', {RAISED} {note.raised}' if note.raised else ''}"
    else:
        where = f"elsewhere for {note.seconds:.0f} s {note.state} {note.phase}"
    if note.refused:
        where += f', and raised "{note.refused}"'
    if note.ended:
        return f"at the end of its process or group, {where}"
    return where if note.alive else f"without a sign of life, last seen {where}"


def watch_groups(seconds: float, groups: Iterable[dist.ProcessGroup], name: str) -> None:
    """Watch the groups of the dispatcher ``name``, with a time limit in seconds.

    Raises:
        ConfigError: Another open dispatcher of a group has a different time limit, or a group has no store that the
            watch can use.
    """
    for group in groups:
        watch = watch_group(group, seconds)
        if watch.seconds != seconds and open_channels(group):
            raise ConfigError(
                f"watchdog must be {watch.seconds:g} as in the open dispatchers of the group, not {seconds:g}."
            )
        watch.seconds, watch.layer = seconds, name


def watch_group(group: dist.ProcessGroup, seconds: float) -> Watch:
    """Watch a group until it is destroyed or the process ends. A group that has a watch keeps it.

    Raises:
        ConfigError: The group has no store that the watch can use.
    """
    if (known := watch_of(group)) is not None:
        return known
    try:
        watch = Watch(group, seconds)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"watchdog={seconds:g} needs a process group whose store can be cloned ({str(error).splitlines()[0]}). "
            "Make the group with torch.distributed, or leave watchdog out."
        ) from error
    observers_of(group).append(watch)
    weakref.finalize(group, watch.stop)
    return watch


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """Return the watch of a group, or None."""
    return next((each for each in observers_of(group) if isinstance(each, Watch)), None)
