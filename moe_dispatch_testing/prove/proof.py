"""Run set-ups on ranks and on one process, and say whether they are the same."""

from __future__ import annotations

import datetime
import functools
import pickle
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.prove.comparison import Alone, Whole
from moe_dispatch_testing.prove.running import STEPS, Record, Run, of_dtype, run_rank
from moe_dispatch_testing.prove.setup import Setup, load_setup
from moe_dispatch_testing.prove.texts import ranks_of
from moe_dispatch_testing.ranks import RankFailed, run_processes

TIMEOUT = datetime.timedelta(seconds=60)
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """How the steps on the ranks differ from those of one process.

    Attributes:
        findings: What differs, one sentence each. Differences that follow from others are left out.
        num_parameters: Number of parameters that were compared.
        numbers: What the steps returned on one process.
    """

    findings: tuple[str, ...]
    num_parameters: int
    numbers: tuple[Mapping[str, float], ...]

    @property
    def right(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def __str__(self) -> str:
        return "\n".join(self.findings) or f"{self.num_parameters} parameters are those of one process"


def prove(source: Setup | Path | str, *, dtype: str = "float64", timeout: datetime.timedelta = TIMEOUT) -> Proof:
    """Run two steps of a set-up on gloo ranks and on one process, and compare them.

    The start values of the ranks are carried to the one process, so seeds do not matter. Each rank is seeded otherwise,
    as ranks of a job are. Compared are start values of what ranks share, the numbers of each step, all gradients, and
    all parameters and floating-point buffers after each step (in float32 after the first).

    Args:
        source: The set-up, whose functions must be importable by name, or a file that defines them.
        dtype: "float64" or "float32", torch's default dtype while the set-up runs.
        timeout: How long the ranks, and then the one process, may take.

    Returns:
        The proof. ``assert proof.right, proof`` is a test.

    Raises:
        ConfigError: The set-up lacks something.
        RankFailed: A rank raised, died or did not come to the end. The text names it.

    Cost: one process for each rank, then one more.
    """
    return prove_all({"": source}, dtype=dtype, timeout=timeout)[""]


def prove_all(
    sources: Mapping[str, Setup | Path | str], *, dtype: str = "float64", timeout: datetime.timedelta = TIMEOUT
) -> dict[str, Proof]:
    """Prove several set-ups with the same number of ranks. Processes are started once. Return the proofs by name.

    Raises:
        ConfigError: The set-ups have different numbers of ranks. Also as ``prove``.
        RankFailed: As ``prove``.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"prove: dtype must be float64 or float32, got {dtype!r}.")
    setups = {name: one if isinstance(one, Setup) else load_setup(Path(one)) for name, one in sources.items()}
    sizes = {setup.num_ranks for setup in setups.values()}
    if len(sizes) != 1:
        raise ConfigError(f"prove_all: all set-ups must have one number of ranks, got {sorted(sizes)}.")
    names = {name: one if isinstance(one, Setup) else Path(one).resolve() for name, one in sources.items()}
    with tempfile.TemporaryDirectory() as folder:
        on_ranks = functools.partial(
            _on_rank, sources=names, dtype=dtype, folder=folder, seconds=timeout.total_seconds()
        )
        found = _run(on_ranks, sizes.pop(), timeout, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        # Tensors among the arguments of a process would travel as open files, of which there may be too many.
        (Path(folder) / "records").write_bytes(pickle.dumps({name: [one[name] for one in found] for name in names}))
        on_one = functools.partial(_on_one, sources=names, dtype=dtype, folder=folder, seconds=timeout.total_seconds())
        proofs: dict[str, Proof] = _run(on_one, 1, timeout, Path(folder))[0]
    return proofs


def _run(body: functools.partial[Any], size: int, timeout: datetime.timedelta, folder: Path) -> list[Any]:
    """Run a body on ranks. If they do not come to the end, say where each of them stands."""
    try:
        return run_processes(body, size, timeout=timeout * 2 + datetime.timedelta(seconds=30), grace_seconds=3.0)
    except RankFailed as failure:
        where = {int(path.name.removeprefix("rank-")): path.read_text() for path in folder.glob("rank-*")}
        if not where:
            raise
        raise RankFailed(_hang_text(where, size, timeout)) from failure


def _hang_text(where: Mapping[int, str], size: int, timeout: datetime.timedelta) -> str:
    """Say which ranks stand elsewhere than most."""
    places: dict[str, list[int]] = {}
    for rank in range(size):
        places.setdefault(_line(where[rank]) if rank in where else "ended its steps", []).append(rank)
    most = max(places.values(), key=len)
    # Who waits in no exchange keeps the others waiting; else who waits elsewhere than most.
    exchange = re.compile(r"/torch/distributed/|/moe_dispatch/")
    waiting = {rank for rank, stack in where.items() if exchange.search(_frames(stack)[-1][0])}
    odd = [rank for rank in range(size) if rank not in waiting]
    odd = odd or [rank for ranks in places.values() if ranks is not most and len(most) * 2 > size for rank in ranks]
    named = f" Look at {ranks_of(odd)} first." if 0 < len(odd) < size else ""
    ordered = sorted(places.items(), key=lambda item: (item[1][0] not in odd, item[1]))
    lines = [f"{ranks_of(ranks)}: {place}" for place, ranks in ordered]
    stacks = [f"rank {ranks[0]} stands at\n{where[ranks[0]]}" for ranks in places.values() if ranks[0] in where]
    who = "One process does" if size == 1 else "The ranks do"
    return "\n".join(
        [f"prove: {who} not come to the end in {timeout.total_seconds():g} seconds.{named}", *lines, "", *stacks]
    )


def _line(stack: str) -> str:
    """Return the innermost lines of a stack that are not torch's: where the user's code waits."""
    found = _frames(stack)
    own = [one for one in found if "/torch/" not in one[0] and "/multiprocessing/" not in one[0]] or found
    file, line, function, code = own[-1]
    return f"waits in {function}, {file}:{line}: {code}"


def _frames(stack: str) -> list[tuple[str, str, str, str]]:
    """Return the file, line, function and code of each frame."""
    return re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)', stack) or [("", "", "", stack)]


def _setups(sources: Mapping[str, Setup | Path]) -> dict[str, Setup]:
    return {name: one if isinstance(one, Setup) else load_setup(one) for name, one in sources.items()}


def _on_rank(
    rank: int, *, sources: Mapping[str, Setup | Path], dtype: str, folder: str, seconds: float
) -> dict[str, Record]:
    return run_rank(rank, _setups(sources), DTYPES[dtype], Path(folder), seconds)


def _on_one(
    rank: int, *, sources: Mapping[str, Setup | Path], dtype: str, folder: str, seconds: float
) -> dict[str, Proof]:
    records: dict[str, list[Record]] = pickle.loads((Path(folder) / "records").read_bytes())
    proofs = {}
    for name, setup in _setups(sources).items():
        with of_dtype(DTYPES[dtype], Path(folder) / "rank-0", seconds):
            proofs[name] = _compare(setup, records[name])
    return proofs


def _compare(setup: Setup, ranks: Sequence[Record]) -> Proof:
    """Run the steps on this process, from the values with which the ranks started, and compare."""
    run = Run(setup)
    whole = Whole(setup, ranks, run.record)
    begun = whole.of_one(lambda held: held.start)
    findings = list(dict.fromkeys(whole.findings))
    findings = findings or whole.compare_start(begun)
    values = begun | whole.of_ranks(lambda held: held.start)
    run.load(whole.to_load(values))
    for number in range(STEPS):
        if findings:
            break
        run.step(setup.joined(setup.batches_of(number)))
    for number in range(STEPS):
        if findings:
            break
        findings = whole.compare_step(number, ranks, _alone(run, whole, number))
        findings = [f"Step {number + 1}: {text}" for text in findings] if number else findings
    refusals = {record.refusal: None for record in ranks if record.refusal} if findings else {}
    return Proof(
        findings=(*findings, *refusals),
        num_parameters=len(whole.trained()),
        numbers=tuple(run.record.numbers[:STEPS]),
    )


def _alone(run: Run, whole: Whole, number: int) -> Alone:
    """Return a function that runs the step again on the batch of some ranks only, or with -1 on that of all."""
    begun = whole.of_one(lambda held: held.after[number - 1] if number else held.start)
    batches = run.setup.batches_of(number)

    @functools.cache
    def alone(batch: int, seed: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        run.load(whole.to_load(begun))
        torch.manual_seed(seed)
        numbers = run.step(run.setup.joined(batches) if batch < 0 else batches[batch])
        return numbers, whole.of_one(lambda held: held.gradients[-1])

    return alone
