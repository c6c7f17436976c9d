"""Command lines of the examples: a parser from a script's docstring, the number of ranks, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from moe_dispatch import MoEDispatchError
from moe_dispatch.cli.ranks import PeerFailed, num_ranks
from moe_dispatch.testing import RankFailed

DEFAULT_RANKS = 4


def make_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser with ``--ranks``; the first line of the docstring is its description, the rest its epilog."""
    lines = (docstring or "").splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, help=f"processes (default: {DEFAULT_RANKS}; under torchrun its WORLD_SIZE)"
    )
    return parser


def choose_ranks(asked: int | None) -> int:
    """Return the number of ranks: torchrun's, or ``--ranks`` if given.

    Raises:
        ValueError: ``--ranks`` is less than 1, or differs from torchrun's number.
    """
    ranks = num_ranks(DEFAULT_RANKS if asked is None else asked)
    if asked is not None and asked != ranks:
        raise ValueError(f"--ranks must be torchrun's WORLD_SIZE ({ranks}), got {asked}. Leave --ranks out.")
    if ranks < 1:
        raise ValueError(f"--ranks must be 1 or more, got {ranks}. Leave --ranks out.")
    return ranks


def exit_status(script: str, run: Callable[[], int]) -> int:
    """Return what ``run`` returns, or report its error in one line and return 1, or 130 after Ctrl-C."""
    try:
        return run()
    except (RankFailed, MoEDispatchError, ValueError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 1
    except PeerFailed:
        return 1
    except KeyboardInterrupt:
        print(f"{script}: interrupted, all ranks are ended.", file=sys.stderr)
        return 130
