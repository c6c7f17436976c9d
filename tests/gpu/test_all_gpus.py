"""``alltoall`` and ``allgather`` over NCCL with all GPUs of the machine, and with fewer: the largest group comes first.

On simulated CUDA, ranks are threads, and a part of the cases of the kit runs.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import capture
from moe_dispatch.errors import LostPeerError
from moe_dispatch_testing.case import Case, case_config, check_expert_gradients, poisoned_memory, run_rank
from moe_dispatch_testing.kit import backend_cases
from moe_dispatch_testing.ranks import RankFailed
from tests.gpu.first_hour.layer import Layer
from tests.gpu.ranks import group_sizes, run_on_gpus
from tests.simulated_cuda.device import is_simulated

pytestmark = pytest.mark.gpu
SIZES = group_sizes()
FEW = 8  # cases on simulated devices; tests/simulated_cuda/test_kit.py has more of them
LIMIT, GROUP_SECONDS, PATIENCE = 3.0, 20, 60  # seconds: of the watchdog, of NCCL, and of this test


def cases_of(backend: Any, size: int) -> list[Case]:
    cases = list(backend_cases(backend, (size,), device="cuda"))
    return Random(size).sample(cases, FEW) if is_simulated() else cases


def run_kit(group: dist.ProcessGroup, backend: Any) -> int:
    """Run the cases on this rank. Return their number."""
    cases = cases_of(backend, group.size())
    with poisoned_memory():
        for case in cases:
            try:
                gradients = run_rank(case_config(backend, case), group, case)
                check_expert_gradients(case, [[summed(group, each) for each in call] for call in gradients])
            except BaseException as error:
                error.add_note(f"in the case {case.id}")
                raise
    return len(cases)


def summed(group: dist.ProcessGroup, mine: Tensor) -> Tensor:
    total = mine.cuda()
    group.allreduce([total]).wait()
    return total.cpu()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["alltoall", "allgather", "alltoall_by_node"])
def test_conforms(backend: str, size: int) -> None:
    spec: Any = backend
    if backend == "alltoall_by_node":
        if size % 2 or size < 4:
            pytest.skip(f"alltoall_by_node needs two ranks on each of several nodes, got {size} ranks")
        spec = {"name": "alltoall_by_node", "ranks_per_node": 2}
    counts = run_on_gpus(run_kit, size, spec)
    assert len(set(counts)) == 1
    assert counts[0] >= FEW


def replay(group: dist.ProcessGroup, backend: str) -> None:
    """Compare replays of one graph with steps that are launched anew, with other routings and rows without experts."""
    layer, rank = Layer(backend, "cuda", small=True, group=group, graph_safe=True), group.rank()

    def inputs(number: int) -> tuple[Tensor, Tensor, Tensor]:
        x, ids, weights = layer.inputs(number * group.size() + rank)
        return x, ids.index_fill(0, torch.arange(min(rank * number, layer.rows), device="cuda"), -1), weights

    graph = capture(layer.dispatcher, layer.step, *inputs(0))
    for number in range(1, 6):
        given = inputs(number)
        expected = layer.step(*given)
        for got, wanted in zip(graph.replay(*given), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert not layer.dispatcher.check().overflowed
    layer.dispatcher.close()


# torch warns of the run before the capture, in which a leaf is used on two streams.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_replays_equal_steps(backend: str, size: int) -> None:
    run_on_gpus(replay, size, backend)


class Told(logging.Handler):
    """Writes the text of a rank that has lost another one to a file, because NCCL may end the process."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(logging.ERROR)
        self.path, self.rank = path, rank

    def emit(self, record: logging.LogRecord) -> None:
        if f"from rank {self.rank}, failed" in record.getMessage():  # simulated ranks share a logger
            self.write(record.getMessage())

    def write(self, text: str) -> None:
        self.path.write_text(text)


def lose_a_rank(group: dist.ProcessGroup, folder: str, graph_safe: bool) -> None:
    """Run steps with a watchdog until rank 1 dies, and write what the others are told."""
    rank = group.rank()
    layer = Layer("alltoall", "cuda", small=True, group=group, graph_safe=graph_safe, watchdog=LIMIT)
    told = Told(Path(folder) / str(rank), rank)
    logging.getLogger("moe_dispatch").addHandler(told)
    try:
        for number in range(6):
            if rank == 1 and number == 2:
                return _die(Path(folder) / "died")
            layer.step(*layer.inputs(number))
            torch.cuda.synchronize()
    except LostPeerError as error:
        told.write(str(error))
    finally:
        logging.getLogger("moe_dispatch").removeHandler(told)


def _die(note: Path) -> None:
    """End this rank without a word: the process, or the body of a thread."""
    note.write_text(str(time.time()))
    if not is_simulated():
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1] or [2])
@pytest.mark.parametrize("graph_safe", [False, True], ids=["eager", "graph-safe"])
def test_the_others_name_a_killed_rank(
    size: int, graph_safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that hang are ended by this test, after ``PATIENCE``."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one rank of two or more is killed, and there is one GPU")
    monkeypatch.setenv("SIMULATED_NCCL_SECONDS", "1")
    with suppress(RankFailed):
        options = {"minutes": GROUP_SECONDS / 60, "grace_seconds": PATIENCE}
        run_on_gpus(lose_a_rank, size, str(tmp_path), graph_safe, **options)
    died = tmp_path / "died"
    assert time.time() - float(died.read_text()) < PATIENCE
    died.unlink()
    texts = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert texts.keys() == {*range(size)} - {1}
    assert all("Look at rank 1 first." in text for text in texts.values())
