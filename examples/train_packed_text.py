r"""Train a small mixture-of-experts language model on packed text, and see that the backend makes no difference.

    python examples/train_packed_text.py                                  # alltoall on 4 ranks, then local on one
    python examples/train_packed_text.py --all                            # all backends
    python examples/train_packed_text.py --backend alltoall --ranks 2     # one backend
    torchrun --nproc-per-node 4 examples/train_packed_text.py --backend alltoall
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/train_packed_text.py --backend alltoall                  # on each of two machines; HOST is the first

The data are the help texts that CPython ships, as bytes, packed without padding. In every step every rank has another
number of tokens. `alltoall`, `allgather`, `deepep` and `hybridep` spread the experts over the ranks. `local` trains the
same model on the same data in one process. On a CPU, `deepep` and `hybridep` run on an emulation of their library. The
exit status is 1 if the loss curves differ, the loss does not fall, or an expert stays idle.

With --run under torchrun, write `torchrun ... -- examples/train_packed_text.py --run DIRECTORY`. Without `--`, torchrun
takes --run for an option of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from launch import choose_ranks, choose_transport, exit_status, launch, make_parser, this_rank
from moe_dispatch import DispatcherConfig
from packed_text.model import Group, ModelShape
from packed_text.training import Run, Task, train

COMPARED = ("alltoall", "local")
ALL = ("alltoall", "allgather", "deepep", "hybridep", "local")
SAMPLE_CONFIG = Path(__file__).with_name("config.yaml")
PICTURE = Path("out") / "train_packed_text.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the backends that the arguments ask for, and return the exit status."""
    options = _parser().parse_args(arguments)
    return exit_status("train_packed_text", lambda: train_and_report(make_tasks(options)))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    backends = parser.add_mutually_exclusive_group()
    backends.add_argument("--backend", help="train with this backend only")
    backends.add_argument("--all", action="store_true", help=f"train with each of {', '.join(ALL)}")
    parser.add_argument("--steps", type=_positive, default=32, help="number of training steps (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=SAMPLE_CONFIG, help="a DispatcherConfig, YAML or JSON")
    parser.add_argument("--trace", type=Path, help="file for the routing of all steps of the first backend")
    parser.add_argument("--run", type=Path, help="directory for the counts of each step of the first backend")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def make_tasks(options: argparse.Namespace) -> list[Task]:
    """Return the trainings to run, with "local" last.

    Raises:
        ValueError: The options do not fit together.
    """
    packs = choose_ranks(options.ranks)
    named = {} if options.backend is None else {"backend": options.backend}
    config = DispatcherConfig.load(options.config, **named)
    if config.hidden_size % (multiple := ModelShape().hidden_multiple):
        raise ValueError(
            f"hidden_size must be a multiple of {multiple}, got {config.hidden_size}. Attention has "
            f"{ModelShape().num_heads} heads of an even width."
        )
    configs = [config]
    if options.all or (config.backend_name == "auto" and not named):
        names = ALL if options.all else COMPARED
        configs = [_with_backend(config, name) for name in names if _can_run(name, packs)]
    recorded = [{"trace": options.trace, "log": options.run}, *[{}] * (len(configs) - 1)]
    return [
        Task(config=config, steps=options.steps, packs=packs, **recordings)
        for config, recordings in zip(configs, recorded, strict=True)
    ]


def _with_backend(config: DispatcherConfig, name: str) -> DispatcherConfig:
    if name not in ("deepep", "hybridep"):
        return config.replace(backend=name)
    # Both libraries carry bfloat16, and run on GPUs only.
    return config.replace(backend={"name": name, "emulate": not torch.cuda.is_available()}, wire="bfloat16")


def _can_run(name: str, ranks: int) -> bool:
    """Return whether a vendor's backend can be part of a comparison: deepep knows few group sizes within a node."""
    if name in ("deepep", "hybridep") and torch.cuda.is_available() and find_spec("deep_ep") is None:
        return False
    return name != "deepep" or ranks in (2, 4, 8)


def train_and_report(tasks: list[Task]) -> int:
    """Train, print a table and the checks, and draw a picture. Return 1 if a check failed."""
    from packed_text import picture, report  # noqa: PLC0415 - the processes of the ranks import this file, and draw nothing

    started, ranks = time.perf_counter(), tasks[0].packs
    sharded = [task for task in tasks if task.config.backend_name != "local"]
    if this_rank() == 0:
        print(f"{ranks} ranks over {choose_transport(ranks)}, {tasks[0].steps} steps", flush=True)
    runs = launch(train_sharded, ranks, sharded) if sharded else []
    if this_rank() != 0:
        return 0
    runs += [train_local(task) for task in tasks[len(sharded) :]]
    checks = report.check_runs(runs)
    print(report.table(runs), report.checks_text(checks), sep="\n")
    picture.draw(runs, PICTURE)
    print(f"{PICTURE}; {time.perf_counter() - started:.0f} s in all")
    return int(any(check.passed is False for check in checks))


def train_sharded(group: Group, device: torch.device, tasks: list[Task]) -> list[Run]:
    """Train one task after the other, as one rank of the group. Collective."""
    return [train(task, group, device) for task in tasks]


def train_local(task: Task) -> Run:
    """Train in this process, without a group."""
    torch.set_num_threads(1)  # the operators are small, and on a busy machine they would wait for a second thread
    return train(task, None, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    sys.exit(main())
