"""The watchdog inside one process: its verdicts, its errors, and how its thread ends. tests/reliability kills ranks."""

from __future__ import annotations

import copy
import datetime
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from moe_dispatch import build_dispatcher
from moe_dispatch.capabilities.observers.watchdog import RankNote, Watch, WatchedCall, watch_group, watch_of
from moe_dispatch.errors import ConfigError, LostPeerError
from moe_dispatch_testing import RankFailed, run_processes, run_ranks
from moe_dispatch_testing.ranks import thread_group
from tests.dispatchers.layer import (
    Group,
    identity_round,
    outcomes,
    raises_everywhere,
    random_routing,
    random_rows,
    small_config,
)

VARIABLE = "MOE_DISPATCH_WATCHDOG"
THREAD = "moe_dispatch-watchdog"


def note(phase: str = "counts (call 7)", **values: Any) -> RankNote:
    number = int(phase.rsplit(maxsplit=1)[1].rstrip(")"))
    here = RankNote("a", 1, False, number, phase.split()[0], "in", phase, 1.0, 6, "combine (call 6)")
    return here._replace(**values)


def one_rank() -> dist.ProcessGroup:
    return run_ranks(lambda group: group, 1)[0]


HERE, GONE = note(), note(alive=False)
ELSEWHERE = note("combine (call 6)", state="after")
SENDING = note("dispatch (call 7)", state="after starting")
OTHER = note("counts of 'other' (call 7)")
COMBINE = note("combine (call 7)")


OF_0, OF_1, OF_2 = (f"because of rank {rank} on a" for rank in range(3))
TIE = "Nothing shows which of them is wrong: compare the calls of ranks "
NOBODY = "5 s, although ranks 0, 1"


@pytest.mark.parametrize(
    ("notes", "texts"),
    [
        ([HERE, HERE], [f"{NOBODY} are in counts", "Look at the network"]),
        ([HERE, GONE], [f"{OF_1}: rank 0 is in counts (call 7); rank 1 is without a sign"]),
        ([HERE, GONE, ELSEWHERE], [OF_1]),  # a rank that is gone keeps others elsewhere
        ([HERE, None], ["of rank 1 on an unknown host", "rank 1 is before its first dispatcher with a watchdog"]),
        ([ELSEWHERE, HERE], [OF_0]),
        ([HERE, ELSEWHERE._replace(refused="x is wrong.")], [OF_1, 'combine (call 6), and raised "x is wrong.". Look']),
        ([HERE, SENDING], [OF_1, "elsewhere for 1 s after starting dispatch (call 7)"]),
        ([HERE, note(state="after", ended=True), ELSEWHERE], [OF_1]),
        ([HERE, note(ended=True), ELSEWHERE], [OF_2]),  # rank 1 failed in the call, too
        ([HERE, HERE, COMBINE], [OF_2, "in different orders: ranks 0, 1 are in"]),
        ([HERE, OTHER], ["5 s, although rank 0 is in"]),  # names may differ
        ([HERE, HERE, OTHER], [OF_2]),
        ([HERE, GONE, COMBINE, HERE], [OF_2]),  # and 1 aborted
        ([HERE, note("counts (call 8)"), HERE], [OF_1]),
        ([HERE, COMBINE], [f"{TIE}0, 1."]),
        ([HERE, note("counts (call 8)")], [f"{TIE}0, 1."]),
        ([HERE, HERE, COMBINE, COMBINE], [f"{TIE}0, 1, 2, 3."]),
        ([HERE, HERE, OTHER, OTHER], [NOBODY]),
        ([HERE, COMBINE, note("dispatch (call 8)", raised="dispatch (call 7)")], [OF_2]),
        ([note(raised="rows (call 6)"), COMBINE], [OF_0, "call 7), after an error of its own in rows (call 6)"]),
        ([HERE, note("rows (call 5)", alive=False)], ["after taking part in combine (call 6). Look at rank 1 first"]),
        ([HERE, note("- (call 0)", state="after")], ["rank 1 is before its first call"]),
        (
            [note(seconds=s) for s in (6.5, 1.1, 6.1)],
            [f"{OF_1}: rank 1 came long after the first rank, and now ranks"],
        ),
        ([note(seconds=3.5), note(seconds=1.1)], [NOBODY]),  # an early failure
        ([], ["no answer from the store", "rank 0 of the job, or the agent of torchrun"]),
    ],
)
def test_who_is_named(notes: list[RankNote | None], texts: list[str]) -> None:
    group = one_rank()
    watch = watch_group(group, 5)
    watch.layer = "layers.3"
    told = watch._text(WatchedCall(watch, 7, "counts", 64), notes)
    assert told.startswith(
        "Watchdog: counts of 'layers.3' (call 7), 64 bytes from rank 0, failed or took longer than 5 s"
    )
    for text in texts:
        assert text in told


def _skips_combine(group: Group) -> None:
    rank = group.rank()
    dispatcher = build_dispatcher(small_config(watchdog=0.5), group, name=f"layers.{rank}")
    sent = dispatcher.dispatch(random_rows(4), random_routing(4))
    if rank != 1:
        dispatcher.combine(sent.rows, sent)
    else:
        time.sleep(2)


def _comes_late(group: Group) -> None:
    """Rank 2 comes after the time limit, while the other ranks read the notes for two beats."""
    dispatcher = build_dispatcher(small_config(watchdog=2), group)
    if group.rank() == 2:
        time.sleep(2.3)
    dispatcher.dispatch(random_rows(4), random_routing(4))


def _early_failure(group: Group) -> tuple[float, str]:
    """Rank 0 fails at once; the others have a time limit that is not over."""
    watch = watch_group(group, 2)
    begin = time.monotonic()
    call = watch.call = WatchedCall(watch, 1, "counts", 0)
    if group.rank():
        time.sleep(1.5)
    return time.monotonic() - begin, watch.explain(call)


class _Interrupted:
    """Stands in for a collective in which this rank gets Ctrl-C."""

    def wait(self) -> None:
        raise KeyboardInterrupt


def _interrupted_on_rank_0(group: Group) -> str:
    watch = watch_group(group, 0.5)
    if group.rank():
        watch.call = WatchedCall(watch, 2, "rows", 0)
        return watch.explain(watch.call)
    work, options = cast(dist.Work, _Interrupted()), dist.AllreduceOptions()
    with pytest.raises(KeyboardInterrupt):
        watch.collective("counts", 0, torch.zeros(1), lambda options: work, options).wait()
    time.sleep(1)
    return ""


def _all_that_wait(rank: int) -> Any:
    """On ranks 1 and 2 what is told in a sub-group, and on rank 0 what threads that wait at the same time are told."""
    group = dist.new_group([1, 2], backend="gloo")
    if rank == 1:
        watch = watch_group(group, 0.5)
        return watch.explain(WatchedCall(watch, 1, "counts", 0))
    if rank == 2:  # which never had a watch
        return time.sleep(1)
    bodies: list[tuple[Callable[[Group], Any], int]] = [
        (_skips_combine, 4),
        (_comes_late, 4),
        (_early_failure, 2),
        (_interrupted_on_rank_0, 2),
    ]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda job: outcomes(*job), bodies)
    return {
        body.__name__: [f"{type(told).__name__}: {told}" if isinstance(told, Exception) else told for told in results]
        for (body, _), results in zip(bodies, found, strict=True)
    }


@pytest.fixture(scope="module")
def told() -> list[Any]:
    """In processes of their own: late in whole runs of the suite ranks got the error of gloo, nobody knows why."""
    return run_processes(_all_that_wait, 3)


def test_ranks_that_are_threads_name_the_one_that_stays_away(told: list[Any]) -> None:
    first, absent, *others = told[0]["_skips_combine"]
    assert absent is None
    for text in (first, *others):
        assert text.startswith("LostPeerError: ")
        for part in ("combine of 'layers.", "because of rank 1 on", "rank 1 is elsewhere for", "after dispatch of"):
            assert part in text


def test_a_rank_that_comes_during_the_search_is_named(told: list[Any]) -> None:
    for text in told[0]["_comes_late"][:2]:
        assert "because of rank 2 on" in text


def test_ranks_that_fail_later_tell_what_the_first_one_read(told: list[Any]) -> None:
    (_, first), (begun, second) = told[0]["_early_failure"]
    assert "although ranks 0, 1 are in counts" in first
    assert second.split("2 s")[1] == first.split("2 s")[1]
    assert begun < 2


def test_a_rank_that_catches_an_interruption_is_named(told: list[Any]) -> None:
    """Also by the only other rank, which is in the next collective."""
    text = told[0]["_interrupted_on_rank_0"][1]
    assert "because of rank 0 on" in text
    assert "after an error of its own in counts (call 1); rank 1 is in rows (call 2). Look at rank 0 first" in text


def test_ranks_of_a_sub_group_have_both_numbers(told: list[Any]) -> None:
    assert "0 bytes from rank 0 of the group (1 of the job)" in told[1]
    assert "Look at rank 1 of the group (2 of the job) first" in told[1]


def test_a_group_without_a_store_that_can_be_cloned_is_refused() -> None:
    for group in (dist.ProcessGroup(0, 1), dist.ProcessGroup(dist.Store(), 0, 1)):  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="watchdog=5 needs a process group whose store can be cloned"):
            watch_group(group, 5)


def test_one_time_limit_for_the_open_dispatchers_of_a_group() -> None:
    def body(group: Group) -> None:
        first = build_dispatcher(small_config(watchdog=5), group)
        with pytest.raises(ConfigError, match="watchdog must be 5 as in the open dispatchers of the group, not 6"):
            build_dispatcher(small_config(watchdog=6), group)
        identity_round(first)
        first.close()
        identity_round(build_dispatcher(small_config(watchdog=6), group))
        watch = watch_of(group)
        assert watch is not None
        assert watch.seconds == 6

    run_ranks(body, 2)


@pytest.fixture
def set_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setenv(VARIABLE, text)


def test_the_environment_sets_the_time_limit(set_limit: Callable[[str], None]) -> None:
    def limit(group: Group) -> float | None:
        identity_round(build_dispatcher(small_config(), group))
        watch = watch_of(group)
        return watch and watch.seconds

    set_limit("7.5")
    assert run_ranks(limit, 2) == [7.5, 7.5]
    for text in ("soon", "0", "-1", "inf", "nan", "1e-300", "1e300"):
        set_limit(text)
        told = f"keywords and {VARIABLE}: DispatcherConfig: watchdog: Input should be "
        raises_everywhere(outcomes(limit, 2), ConfigError, told)


def test_ranks_with_other_limits_are_refused() -> None:
    results = outcomes(lambda group: build_dispatcher(small_config(watchdog=5.0 + group.rank()), group), 2)
    raises_everywhere(results, ConfigError, "Ranks disagree on watchdog: rank 0 has 5, rank 1 has 6")


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == THREAD}


def _until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("seconds", [None, 5])
def test_there_is_a_thread_while_a_group_is_watched(seconds: float | None) -> None:
    before = _threads()

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(watchdog=seconds), group)
        identity_round(dispatcher)
        dispatcher.close()
        assert (watch_of(group) is None) == (_threads() <= before) == (seconds is None)

    run_ranks(body, 2)
    assert _until(lambda: _threads() <= before)


def test_copies_share_the_watch_and_have_names() -> None:
    def body(group: Group) -> list[str]:
        dispatcher = build_dispatcher(small_config(watchdog=5), group, name="teacher")
        other = build_dispatcher(small_config(watchdog=5), group, name="student")
        watch = watch_of(group)
        assert watch is not None
        layers = []
        for one in (copy.deepcopy(dispatcher), other):
            identity_round(one)
            layers.append(watch.call.phase.split("'")[1])
        return layers

    assert run_ranks(body, 2) == [["teacher", "student"]] * 2


def test_dispatchers_that_were_built_before_the_watch_have_names_too() -> None:
    def body(group: Group) -> list[str]:
        first = build_dispatcher(small_config(), group, name="first")
        second = build_dispatcher(small_config(watchdog=5), group, name="second")
        watch = watch_of(group)
        assert watch is not None
        layers = []
        for one in (first, second):
            identity_round(one)
            layers.append(watch.call.phase.split("'")[1])
        return layers

    assert run_ranks(body, 2) == [["first", "second"]] * 2


def test_both_groups_are_watched_where_a_control_group_is_given() -> None:
    store = HashStore()

    def body(group: Group) -> list[str]:
        control = thread_group(store, group.rank(), 2)
        config = small_config("allgather", watchdog=5)
        identity_round(build_dispatcher(config, group, control_group=control, name="layers.0"))
        watches = [watch_of(one) for one in (group, control)]
        return [watch.call.label for watch in watches if watch is not None]

    assert run_ranks(body, 2) == [["combine", "sizes"]] * 2


class _Event:
    """Stands in for a CUDA event that has or has not come, and tells whether a graph is captured."""

    done = captured = False
    asked = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        type(self).asked += 1
        return self.done


@pytest.fixture
def gpu_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    _Event.done, _Event.captured, _Event.asked = False, False, 0
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: _Event.captured)
    group = one_rank()
    watch = watch_group(group, 0.2)
    for number, label in enumerate(("counts", "rows"), 1):
        watch.call = WatchedCall(watch, number, label, 0)
        watch.call.move("after")
        watch.keep(watch.call)
    yield watch
    del group  # and with it ends the watch


def test_a_collective_that_hangs_on_a_gpu_is_logged(gpu_watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "moe_dispatch"):
        assert _until(lambda: bool(caplog.messages))
        time.sleep(0.15)
    (message,) = caplog.messages  # once, and by the first of the calls that hang
    assert message.startswith("Watchdog: counts (call 1), 0 bytes from rank 0, failed or took longer than 0.2 s")


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_gpu_has_ended_is_forgotten_and_a_graph_is_not_asked_for(
    gpu_watch: Watch, caplog: pytest.LogCaptureFixture, captured: bool
) -> None:
    _Event.done, _Event.captured = not captured, captured
    gpu_watch.keep(gpu_watch.call)
    asked = _Event.asked
    time.sleep(0.3)
    assert not caplog.messages
    if captured:
        assert _Event.asked == asked
    else:
        assert gpu_watch.finished.label == "rows"


def _fails(text: str) -> Callable[[Any], Any]:
    def start(_: Any) -> Any:
        raise RuntimeError(f"NCCL error in: NCCLUtils.cpp:77, {text}")

    return start


@pytest.mark.parametrize(
    "text",
    [
        "invalid usage, NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "unhandled system error, NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) failed.",
        "unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_errors_of_nccl_that_lose_no_rank_pass_through(text: str) -> None:
    group = one_rank()
    watch = watch_group(group, 1)
    with pytest.raises(RuntimeError, match=text.split("\n")[0]) as caught:
        watch.collective("rows", 8, torch.empty(1), _fails(text), SimpleNamespace())
    assert not isinstance(caught.value, LostPeerError)
    assert watch.raised == watch.call.phase
    watch.stop()


@pytest.mark.parametrize(
    "text",
    [
        "remote process exited or there was a network error, NCCL version 2.27.5",
        "NCCL communicator was aborted on rank 0.",
        "NCCL timeout when waiting for nonblocking call",
    ],
)
def test_errors_of_nccl_that_lose_a_rank_say_where_the_ranks_are(text: str) -> None:
    group = one_rank()
    watch = watch_group(group, 0.2)
    with pytest.raises(LostPeerError, match="Watchdog: rows"):
        watch.collective("rows", 8, torch.empty(1), _fails(text), SimpleNamespace())
    watch.stop()


BEGIN = """
import os, sys, time
import torch, torch.distributed as dist
from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
rank, how = int(os.environ["RANK"]), sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
groups = [dist.group.WORLD] if how not in ("ended", "killed") else [dist.new_group([0, 2]), dist.new_group([1, 3])]
config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=16, watchdog=5)
dispatcher = build_dispatcher(config, groups[rank % len(groups)])
del groups
sent = dispatcher.dispatch(torch.ones(4, 16), Routing(torch.tensor([[0, 7]] * 4), torch.ones(4, 2)))
dispatcher.combine(sent.rows, sent)
"""
ENDS = """
if how in ("ended", "killed"):
    dist.barrier()
    if rank % 2:
        time.sleep(4)
    if how == "killed" and rank == 3:
        os._exit(3)
    if how == "killed" and rank == 1:
        try:
            dispatcher.combine(sent.rows, sent)
        except RuntimeError as error:
            print(error)
    sys.exit()
if how == "fork":
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dispatcher.combine(sent.rows, sent)
if how == "destroyed first":
    dist.destroy_process_group()
time.sleep(2 * rank)
if how == "destroyed last":
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["destroyed last", "destroyed first", "not destroyed", "fork", "ended", "killed"])
def test_the_host_of_the_store_may_leave_first(how: str) -> None:
    """The store of rank 0, without torchrun. Four ranks are two groups, of which one does not have that rank."""
    size = 4 if how in ("ended", "killed") else 2
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    # Python 3.12 warns of a fork in a process that has threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", BEGIN + ENDS, how]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    jobs = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipe) for rank in range(size)]
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [*[0] * (size - 1), 3 if how == "killed" else 0], outputs
    if how == "killed":
        told, outputs[1] = outputs[1], ""
        assert "store of the process group on 127.0.0.1, because its host has ended normally" in told
        assert "Look at rank 1 of the group (3 of the job)." in told
    assert outputs == [""] * size


TIMEOUT_S = 8


def _step(rank: int, reports: Path) -> None:
    dispatcher = build_dispatcher(small_config(num_experts=9), dist.group.WORLD)
    x = random_rows(4).requires_grad_()
    try:
        for step in range(3):
            sent = dispatcher.dispatch(x, random_routing(4))
            if rank == 1 and step == 1:
                os._exit(3)
            dispatcher.combine(sent.rows, sent).sum().backward()
    except Exception as error:
        (reports / str(rank)).write_text(type(error).__name__)
        raise


def test_a_dead_rank_ends_the_others(tmp_path: Path) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    with pytest.raises(RankFailed, match="exit code 3"):
        run_processes(_step, 3, tmp_path, timeout=timeout, grace_seconds=2 * TIMEOUT_S)
    for survivor in ("0", "2"):
        assert (tmp_path / survivor).read_text() in ("RuntimeError", "DistBackendError")
