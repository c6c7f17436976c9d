"""Commands, options and help texts. The one module that imports Typer."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
import typer

import moe_dispatch
from moe_dispatch.cli import console
from moe_dispatch.cli.ranks import PeerFailed, RankFailed, this_rank
from moe_dispatch.errors import MoEDispatchError

Command = TypeVar("Command", bound=Callable[..., int])

app = typer.Typer(
    name="moe-dispatch",
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts as they stand here, to be copied from
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> int:
    """Parse ``sys.argv`` and run what it asks for; usage errors end with 2."""
    app(prog_name="moe-dispatch")
    return 0


def answering(command: Command) -> Command:
    """A command whose return value is the exit status, and whose errors are told in a line: 2, or 130 for Ctrl-C."""

    @functools.wraps(command)
    def answered(*arguments: Any, **options: Any) -> None:
        raise typer.Exit(_status(lambda: command(*arguments, **options)))

    return answered  # type: ignore[return-value]


def _status(command: Callable[[], int]) -> int:
    try:
        return command()
    except RankFailed as failure:
        console.error(str(failure))
    except PeerFailed:
        pass
    except MoEDispatchError as wrong:
        if this_rank() == 0:  # what is wrong before ranks meet is wrong on all of them
            console.error(str(wrong))
    except KeyboardInterrupt:
        console.error("interrupted, all ranks are ended.")
        return 130
    return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        console.line(
            f"moe-dispatch {moe_dispatch.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
        )
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """Look at, check and compare the ways in which mixture-of-experts tokens travel.

    \b
    moe-dispatch doctor                               what can be used on this machine
    moe-dispatch check my_package:MyBackend           is a backend right?
    moe-dispatch compare -b alltoall,allgather c.yaml are two backends the same, and what do they cost?

    A command that starts ranks starts processes of this machine, or is started by torchrun on all of them:

    \b
    torchrun --nproc-per-node 4 --no-python moe-dispatch doctor
    """  # noqa: D301 - \b is what keeps the lines of a paragraph apart
