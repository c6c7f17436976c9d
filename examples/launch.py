"""Ranks of an example: the example joins the ranks that torchrun started, or starts processes of its own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_dispatch import MoEDispatchError
from moe_dispatch_testing import RankFailed, run_processes

DEFAULT_RANKS = 4
TIMEOUT = timedelta(minutes=2)


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def this_rank() -> int:
    """Return the rank that torchrun gave this process, or 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def choose_ranks(asked: int | None) -> int:
    """Return the number of ranks: torchrun's, or ``asked``, or ``DEFAULT_RANKS``.

    Raises:
        ValueError: ``asked`` is less than 1, or differs from torchrun's number.
    """
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else DEFAULT_RANKS if asked is None else asked
    if asked is not None and asked != ranks:
        raise ValueError(f"--ranks must be torchrun's WORLD_SIZE ({ranks}), got {asked}. Leave --ranks out.")
    if ranks < 1:
        raise ValueError(f"--ranks must be 1 or more, got {ranks}. Leave --ranks out.")
    return ranks


def choose_transport(ranks: int) -> str:
    """Return "nccl" if every rank of this machine can have a GPU of its own, else "gloo"."""
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else ranks
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here else "gloo"


def launch(body: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run ``body(group, device, *args)`` on every rank, and return the result of rank 0.

    Under torchrun this process is one of the ranks, and gets its own result. Otherwise this function starts ``ranks``
    processes, which import ``body`` by its name.

    Raises:
        RankFailed: A process failed.
    """
    transport = choose_transport(ranks)
    if not under_torchrun():
        if multiprocessing.get_start_method(allow_none=True) is None:
            # Processes are forked from a server that has imported torch. Spawned processes would all import it.
            multiprocessing.set_start_method("forkserver")
            multiprocessing.set_forkserver_preload(["torch._dynamo", "moe_dispatch_testing"])
        return run_processes(_run_rank, ranks, body, transport, *args, backend=transport, timeout=TIMEOUT)[0]
    local_rank = int(os.environ["LOCAL_RANK"])
    if transport == "nccl":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(transport, timeout=TIMEOUT)
    result = _run_rank(local_rank, body, transport, *args)
    dist.destroy_process_group()
    return result


def _run_rank(local_rank: int, body: Callable[..., Any], transport: str, *args: Any) -> Any:
    device = torch.device("cuda", local_rank) if transport == "nccl" else torch.device("cpu")
    return body(dist.group.WORLD, device, *args)


def make_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser with ``--ranks``. The first line of the docstring is its description, the rest is its epilog."""
    lines = (docstring or "").splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, help=f"number of processes (default: {DEFAULT_RANKS}; under torchrun its WORLD_SIZE)"
    )
    return parser


def exit_status(script: str, run: Callable[[], int]) -> int:
    """Return the result of ``run``, or report its error in one line and return 1, or 130 after Ctrl-C."""
    try:
        return run()
    except (RankFailed, MoEDispatchError, ValueError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"{script}: {error.name} is missing. In a checkout: pip install -e '.[dev]'.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{script}: interrupted, all ranks are ended.", file=sys.stderr)
        return 130
