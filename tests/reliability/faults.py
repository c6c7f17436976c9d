"""Break one real process of four in every phase, and see what the survivors raise, and after how long.

    python tests/reliability/faults.py                                  # a small selection, as `make slow` runs it
    python tests/reliability/faults.py --all --watchdog 5 --jobs 4      # everything, as `make faults` runs it
    python tests/reliability/faults.py --slow-steps 10000 --watchdog 5  # no alarm where a rank is slow but alive

Ranks are forked from a process that has imported torch, so a case costs a second and the time limit. Rank 0 hosts the
store of the group, which is harder than torchrun: the store leaves with rank 0.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import itertools
import json
import logging
import multiprocessing
import os
import platform
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moe_dispatch import Dispatcher, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers import autograd

SIZE, LAYERS, STEPS = 4, 2, 3
GROUP_TIMEOUT = datetime.timedelta(seconds=120)
HIDDEN, EXPERTS, TOP_K, ROWS = 256, 8, 2, 6

BACKENDS: dict[str, dict[str, Any]] = {
    "alltoall": {"backend": "alltoall"},
    "alltoall exact": {"backend": {"name": "alltoall", "reduction": "exact"}},
    "alltoall_by_node": {"backend": {"name": "alltoall_by_node", "ranks_per_node": 2}},
    "alltoall graph-safe": {"backend": "alltoall", "graph_safe": True},
    "allgather": {"backend": "allgather"},
    "allgather graph-safe": {"backend": "allgather", "graph_safe": True},
    "deepep v1.2.1": {"backend": {"name": "deepep", "emulate": "v1.2.1"}, "wire": "bfloat16"},
    "deepep v2-2.1.0": {"backend": {"name": "deepep", "emulate": "v2-2.1.0"}, "wire": "bfloat16"},
    "hybridep-94a9f8f": {"backend": {"name": "hybridep", "emulate": "hybridep-94a9f8f"}, "wire": "bfloat16"},
    "hybridep-744": {"backend": {"name": "hybridep", "emulate": "hybridep-744"}, "wire": "bfloat16"},
}
# The collective in which a phase breaks: a verb, and how many collectives of the verb come before it.
PHASES = {
    "build": ("build", 1),
    "plan": ("plan", 0),
    "counts": ("dispatch", 0),
    "rows": ("dispatch", 1),
    "rows on the node": ("dispatch", 2),
    "combine": ("combine", 0),
    "combine.backward": ("combine.backward", 0),
    "dispatch.backward": ("dispatch.backward", 0),
    "close": ("close", 0),
}
FAULTS = ("kill", "stop", "delay", "raise", "skip")
COLUMNS = (*FAULTS, "none")  # of the table
ORDER = "order"  # the culprit dispatches the second layer before it combines the first


@dataclass(frozen=True)
class Case:
    """A backend, a phase and a fault; without a fault, a clean run."""

    backend: str
    phase: str = "none"
    fault: str = "none"
    slow_steps: int = 0  # steps with a slow culprit, before the program
    culprit: int = 1

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.phase}, {self.fault}, rank {self.culprit}"


@dataclass(frozen=True)
class Ending:
    """How a rank ended: its error, how long after the fault, and its exit status, None if it did not exit."""

    error: str
    text: str
    seconds: float
    status: int | None
    log: str


Row = tuple[Case, Sequence[Ending], str]  # with what is wrong

SELECTION = (
    Case("alltoall", "counts", "kill"),
    Case("alltoall", "rows", "stop", culprit=0),
    Case("alltoall", "combine.backward", "delay"),
    Case("allgather", "plan", "raise"),
    Case("allgather graph-safe", "dispatch.backward", "kill"),
    Case("deepep v1.2.1", "combine", "stop"),
    Case("hybridep-744", "build", "delay"),
    Case("alltoall", ORDER),
)


class Skipped(Exception):
    """The culprit goes on with its next step, as a script does that catches an error of one rank."""


class Trap:
    """Counts the collectives of each verb, and breaks the culprit at the beginning of one."""

    def __init__(self, case: Case, act: Callable[[], None]) -> None:
        self.verb, self.armed = "", False
        self.met: Counter[str] = Counter()
        self._target, self._act = PHASES.get(case.phase), act
        start = Communicator._start
        trap = self

        def counted(communicator: Communicator, *args: Any, **options: Any) -> Any:
            trap.met[trap.verb] += 1
            if trap.armed and trap._target == (trap.verb, trap.met[trap.verb] - 1):
                trap.armed = False
                trap._act()
            return start(communicator, *args, **options)

        Communicator._start = counted  # type: ignore[method-assign, assignment]
        self._follow("combine.backward", autograd.Combine)
        self._follow("dispatch.backward", autograd.Dispatch)

    def _follow(self, verb: str, function: Any) -> None:
        original = function.backward

        def followed(*args: Any) -> Any:
            with self.during(verb):
                return original(*args)

        function.backward = staticmethod(followed)

    @contextmanager
    def during(self, verb: str) -> Iterator[None]:
        before, self.verb = self.verb, verb
        self.met[verb] = 0
        try:
            yield
        finally:
            self.verb = before


def config_of(case: Case, limit: float) -> DispatcherConfig:
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens_per_rank": ROWS}
    return DispatcherConfig(**sizes, watchdog=limit, **BACKENDS[case.backend])


def program(rank: int, case: Case, limit: float, trap: Trap) -> dict[str, int]:
    """Three steps of two layers; the number of collectives of each verb in the last layer."""
    config = config_of(case, limit)
    trap.armed = case.phase == "build"
    with trap.during("build"):
        layers = [build_dispatcher(config, dist.group.WORLD, name=f"layers.{i}") for i in range(LAYERS)]
    met = {"build": trap.met["build"]}
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
        try:
            if case.phase == ORDER and step == 1 and rank == case.culprit:
                crossed_step(layers, x, generator)
            else:
                one_step(layers, x, generator, trap, arms=step == 1)
        except Skipped:
            continue
        met.update(trap.met)
    trap.armed = case.phase == "close"
    with trap.during("close"):
        for layer in layers:
            layer.close()
    return {**met, "close": trap.met["close"]}


def routing(generator: torch.Generator) -> Routing:
    weights, ids = torch.rand(ROWS, EXPERTS, generator=generator).topk(TOP_K)
    return Routing(ids, weights)


def one_step(
    layers: Sequence[Dispatcher], x: torch.Tensor, generator: torch.Generator, trap: Trap, *, arms: bool
) -> None:
    y = x
    for layer in layers:
        trap.armed = arms and layer is layers[-1]
        with trap.during("plan"):
            plan = layer.plan(like=y)
        with trap.during("dispatch"):
            sent = layer.dispatch(y, routing(generator), plan)
        with trap.during("combine"):
            y = layer.combine(sent.rows * 2, sent)
    y.sum().backward()


def crossed_step(layers: Sequence[Dispatcher], x: torch.Tensor, generator: torch.Generator) -> None:
    first, second = (layer.dispatch(x, routing(generator), layer.plan(like=x)) for layer in layers)
    y = layers[0].combine(first.rows, first) + layers[1].combine(second.rows, second)
    y.sum().backward()


def act(case: Case, limit: float, fault_time: Path) -> Callable[[], None]:
    """What the culprit does when its trap snaps. It first writes down when."""

    def snap() -> None:
        fault_time.write_text(str(time.monotonic()))
        match case.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay":
                time.sleep(2 * limit + 6)
            case "raise":
                raise ValueError("planted")
            case "skip":
                raise Skipped

    return snap


def run_rank(rank: int, *, port: int, case: Case, limit: float, folder: Path) -> NoReturn:
    """One rank, in a process of its own, from the first line to the end of the interpreter."""
    told: dict[str, Any] = {"error": "", "text": "", "raised": 0.0}
    output = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    logging.getLogger("moe_dispatch").setLevel(logging.ERROR)  # the emulation warns that it is one
    try:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=SIZE, timeout=GROUP_TIMEOUT)
        snap = act(case, limit, folder / "fault") if rank == case.culprit else lambda: None
        if case.slow_steps:
            slow_steps(rank, case, limit)
        told["text"] = json.dumps(program(rank, case, limit, Trap(case, snap)))
    except BaseException as error:
        told.update(error=type(error).__name__, text=str(error), raised=time.monotonic())
        if rank != case.culprit and type(error).__name__ != "LostPeerError":
            traceback.print_exc()
    (folder / f"{rank}.json").write_text(json.dumps(told))
    atexit._run_exitfuncs()  # the end of an interpreter, which a fork reaches only by leaving the code of its parent
    os._exit(3 if told["error"] else 0)


def run_case(case: Case, limit: float) -> list[Ending]:
    """Run a case; how each rank ended."""
    folder = Path(tempfile.mkdtemp())  # not an object, which a rank would remove at its end
    pids = fork_ranks(partial(run_rank, case=case, limit=limit, folder=folder))
    statuses = wait_for(pids, limit + 20 + 0.1 * case.slow_steps, case.culprit)
    fault_time = folder / "fault"
    begin = float(fault_time.read_text()) if fault_time.exists() else 0.0
    endings = [_ending(folder, rank, begin, status) for rank, status in enumerate(statuses)]
    shutil.rmtree(folder)
    return endings


def fork_ranks(run: Callable[..., NoReturn]) -> list[int]:
    """Fork processes that call ``run(rank, port=port)`` with a free port for the store; their ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(SIZE):
        if not (pid := os.fork()):
            try:
                run(rank, port=port)
            finally:
                os._exit(4)
        pids.append(pid)
    return pids


def wait_for(pids: Sequence[int], seconds: float, culprit: int) -> list[int | None]:
    """Exit status of each, None if it was killed after ``seconds``. A stopped culprit is killed last."""
    ended: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[rank] = os.waitstatus_to_exitcode(found[1])
        if time.monotonic() > deadline or (culprit not in ended and len(ended) == len(pids) - 1):
            for rank in set(range(len(pids))) - set(ended):
                os.kill(pids[rank], signal.SIGKILL)
                os.waitpid(pids[rank], 0)
                ended[rank] = None
        time.sleep(0.005)
    return [ended[rank] for rank in range(len(pids))]


def _ending(folder: Path, rank: int, begin: float, status: int | None) -> Ending:
    result, log = folder / f"{rank}.json", folder / f"{rank}.log"
    told: dict[str, Any] = {"error": "", "text": "", "raised": 0.0}
    told |= json.loads(result.read_text()) if result.exists() else {}
    return Ending(told["error"], told["text"], told["raised"] - begin, status, log.read_text() if log.exists() else "")


def verdict(case: Case, endings: Sequence[Ending], limit: float) -> str:
    """What is wrong with how the survivors ended; "" where all is right."""
    survivors = [(rank, ending) for rank, ending in enumerate(endings) if rank != case.culprit]
    problems = [f"rank {rank}: {problem}" for rank, one in survivors if (problem := _problem(case, one, limit))]
    return "; ".join(problems)


def _problem(case: Case, ending: Ending, limit: float) -> str:
    told = f"status {ending.status}, {ending.error or 'no error'} {ending.text} {ending.log[-300:]}"
    loose = case.fault == "skip" or case.phase == ORDER
    if case.fault == "none" and not loose:
        return told if ending.status != 0 or ending.log else ""
    if loose and (ending.status == -signal.SIGABRT or ending.error in ("EmulatedHang", "PeerError")):
        return ""  # gloo aborts on sizes that do not match; the emulation compares calls
    if ending.error != "LostPeerError" or ending.status is None:
        return told
    if "refusal" in ending.text:
        return f"went on to another collective: {ending.text}"
    # Without the store, which rank 0 hosts, the text says that this rank is to blame.
    names_host = "no answer from the store" in ending.text and "rank 0 of the job, or the agent" in ending.text
    if not loose and f"Look at rank {case.culprit} first" not in ending.text and not (names_host and case.culprit == 0):
        return ending.text
    layer = f"'layers.{0 if case.phase == 'close' else LAYERS - 1}'"
    if not loose and case.phase != "build" and layer not in ending.text:
        return f"names no layer: {ending.text}"
    return f"only after {ending.seconds:.1f} s" if not loose and ending.seconds > limit + 5 else ""


def cases_of(backend: str, met: dict[str, int]) -> list[Case]:
    """All cases of a backend, given how many collectives each verb has: a verb without any cannot break."""
    phases = [phase for phase, (verb, before) in PHASES.items() if met.get(verb, 0) > before]
    host = [Case(backend, "counts", fault, culprit=0) for fault in FAULTS] if backend == "alltoall" else []
    return [*host, *(Case(backend, phase, fault) for phase in phases for fault in FAULTS), Case(backend, ORDER)]


def slow_steps(rank: int, case: Case, limit: float) -> None:
    """Train while the culprit is slow: up to 20 ms at random, and once for most of the time limit."""
    trap, chance = Trap(case, lambda: None), random.Random(0)
    layers = [build_dispatcher(config_of(case, limit), dist.group.WORLD, name=f"layers.{i}") for i in range(LAYERS)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(case.slow_steps):
        if rank == case.culprit:
            time.sleep(
                0.6 * limit if step == case.slow_steps // 2 else 0.02 * chance.random() * (chance.random() < 0.2)
            )
        one_step(layers, torch.randn(ROWS, HIDDEN).requires_grad_(), generator, trap, arms=False)


def run_cases(cases: Sequence[Case], options: argparse.Namespace) -> list[Row]:
    """Run each case from a forked process of its own, some at the same time, and judge it."""
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        found = pool.starmap(run_case, [(case, options.watchdog) for case in cases], chunksize=1)
    return [
        (case, endings, verdict(case, endings, options.watchdog)) for case, endings in zip(cases, found, strict=True)
    ]


def table(rows: Sequence[Row], limit: float) -> str:
    """Markdown: for each backend and phase, the seconds until the last survivor raised, by fault."""
    lines = [
        f"`watchdog={limit:g}`, {SIZE} processes, {platform.platform()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}, "
        f"load {os.getloadavg()[0]:.0f}.",
        "",
        "| backend | phase | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for (backend, phase, culprit), group in itertools.groupby(rows, key=lambda row: _place(row[0])):
        cells = {case.fault: _cell(case, endings, problem) for case, endings, problem in group}
        where = phase + (" (on rank 0, the host of the store)" if culprit == 0 else "")
        lines.append(f"| {backend} | {where} | " + " | ".join(cells.get(fault, "") for fault in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def _place(case: Case) -> tuple[str, str, int]:
    return case.backend, case.phase, case.culprit


def _cell(case: Case, endings: Sequence[Ending], problem: str) -> str:
    if problem:
        return "FAILED"
    survivors = [ending for rank, ending in enumerate(endings) if rank != case.culprit]
    kinds = {ending.error or ("abort by gloo" if ending.status else "no error") for ending in survivors}
    if kinds == {"LostPeerError"} and case.fault != "none":
        return f"{max(ending.seconds for ending in survivors):.1f}"
    return ", ".join(sorted(kinds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every phase, fault and backend")
    parser.add_argument("--slow-steps", type=int, help="instead: this many steps with a slow rank, and no alarm")
    parser.add_argument("--watchdog", type=float, default=2.0, help="time limit in seconds (default 2)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time (default 1)")
    parser.add_argument("--table", type=Path, help="write a Markdown table to this file")
    options = parser.parse_args()
    cases = [Case("alltoall", slow_steps=options.slow_steps)] if options.slow_steps else list(SELECTION)
    if options.all:
        clean = run_cases([Case(backend) for backend in BACKENDS], options)
        if problems := [f"clean run of {case.backend}: {problem}" for case, _, problem in clean if problem]:
            sys.exit("\n".join(problems))
        cases = [case for one, endings, _ in clean for case in cases_of(one.backend, json.loads(endings[0].text))]
    rows = run_cases(cases, options)
    text = table(rows, options.watchdog)
    if options.table:
        options.table.write_text(text)
    problems = [f"{case.name}: {problem}" for case, _, problem in rows if problem]
    print(text, *problems, f"{len(rows)} cases, {len(problems)} failed", sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
