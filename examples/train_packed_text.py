r"""Train a small mixture-of-experts language model on packed text, and see that the backend makes no difference.

    python examples/train_packed_text.py                                  # all backends, compared with local
    python examples/train_packed_text.py --backend alltoall --ranks 2     # that one only
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/train_packed_text.py --backend alltoall                  # several machines

The data are the help texts that CPython ships, as bytes, packed without padding: in every step every rank has another
number of tokens. `alltoall`, `allgather`, `deepep` and `hybridep` share the experts out over ranks; `local` trains the
same model on the same data in one process. On a CPU `deepep` and `hybridep` run on the emulation of their library. Ends
with 1 when the curves differ, the loss does not fall or an expert stays idle.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from command_line import choose_ranks, exit_status, make_parser
from moe_dispatch import DispatcherConfig
from moe_dispatch.backends import Rejected, load_backend
from moe_dispatch.cli.place import Place, alone, describe
from moe_dispatch.cli.ranks import Send, on_ranks, ranks_here, this_rank
from moe_dispatch.probing import how_to_install
from packed_text.model import ModelShape
from packed_text.training import Run, Task, train

# They carry nothing wider than bfloat16.
VENDORS = ("deepep", "hybridep")
COMPARED = ("alltoall", "allgather", *VENDORS, "local")
SAMPLE_CONFIG = Path(__file__).with_name("config.yaml")
PICTURE = Path("out") / "train_packed_text.png"

OnStep = Callable[[int, float], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the arguments ask for; the exit status."""
    options = _parser().parse_args(arguments)
    return exit_status("train_packed_text", lambda: train_and_report(make_tasks(options)))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", help="train with this backend only")
    parser.add_argument("--steps", type=_positive, default=48, help="training steps (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=SAMPLE_CONFIG, help="a DispatcherConfig, YAML or JSON")
    parser.add_argument("--trace", type=Path, help="a file for the routing of all steps, of the first backend trained")
    parser.add_argument("--run", type=Path, help="a directory for what each step counted, of the first backend trained")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def make_tasks(options: argparse.Namespace) -> list[Task]:
    """The trainings to do, "local" last.

    Raises:
        ValueError: what is asked for does not fit together.
    """
    packs = choose_ranks(options.ranks)
    named = {} if options.backend is None else {"backend": options.backend}
    config = DispatcherConfig.load(options.config, **named)
    if config.hidden_size % (multiple := ModelShape().hidden_multiple):
        raise ValueError(
            f"hidden_size must be a multiple of {multiple}, got {config.hidden_size}. Attention has "
            f"{ModelShape().num_heads} heads of an even width."
        )
    compared = config.backend_name == "auto" and not named
    configs = [changed for name in COMPARED for changed in variants(config, name, packs)] if compared else [config]
    recorded = [{"trace": options.trace, "log": options.run}, *[{}] * (len(configs) - 1)]
    return [
        Task(config=config, steps=options.steps, packs=packs, **recordings)
        for config, recordings in zip(configs, recorded, strict=True)
    ]


def variants(config: DispatcherConfig, name: str, ranks: int) -> list[DispatcherConfig]:
    """The config for one of the backends compared; none for a library that cannot run here, nor be emulated."""
    if name not in VENDORS:
        return [config.replace(backend=name)]
    emulate = isinstance(load_backend(name)().probe(), Rejected)
    if emulate and torch.cuda.is_available():  # the emulation takes no CUDA tensors
        return []
    if name == "deepep" and ranks not in (2, 4, 8):  # within one node
        return []
    backend: str | dict[str, object] = {"name": name, "emulate": True} if emulate else name
    return [config.replace(backend=backend, wire_dtype="bfloat16")]


def train_and_report(tasks: list[Task]) -> int:
    """Train, with a progress bar, then show table, checks and picture; 1 if a check failed."""
    try:
        # Imported here: the processes that on_ranks starts import this file and need neither.
        from rich.console import Console  # noqa: PLC0415

        from packed_text import picture, report  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(f"{error.name} is missing. {how_to_install('dev')}") from error
    console, started = Console(), time.perf_counter()
    rank, ranks = this_rank(), tasks[0].packs
    if rank == 0:
        console.print(f"{ranks} ranks on {describe(ranks_here(ranks))}, {tasks[0].steps} steps", highlight=False)
    with report.Bars(console, tasks, visible=rank == 0) as bars:
        runs = train_all(tasks, bars.advance, rank=rank)
    if rank:
        return 0
    checks = report.check_runs(runs)
    console.print(report.runs_table(runs))
    report.show_checks(console, checks)
    picture.draw(runs, PICTURE)
    console.print(f"{PICTURE}; {time.perf_counter() - started:.0f} s in all", highlight=False)
    return int(any(check.passed is False for check in checks))


def train_all(tasks: list[Task], on_step: OnStep, *, rank: int) -> list[Run]:
    """Train on all ranks what needs them, then on rank 0 alone what does not. Ranks but 0 may return fewer runs."""
    sharded = [task for task in tasks if task.config.backend_name != "local"]
    runs: list[Run] = []
    if sharded:
        runs = on_ranks(partial(train_sharded, sharded), tasks[0].packs, lambda message: on_step(*message))
    if rank == 0:
        runs += [train(task, alone(), partial(on_step, len(sharded))) for task in tasks[len(sharded) :]]
    return runs


def train_sharded(tasks: list[Task], place: Place, send: Send) -> list[Run]:
    """One task after the other on this rank; sends (index, loss) after every step."""

    def sender(index: int) -> Callable[[float], None]:
        return lambda loss: send((index, loss))

    return [train(task, place, sender(index)) for index, task in enumerate(tasks)]


if __name__ == "__main__":
    sys.exit(main())
