"""Kinds of options, and completion of their values in a shell. Completion imports neither torch nor a backend."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

BACKENDS = ("allgather", "alltoall", "alltoall_by_node", "deepep", "hybridep", "local", "nccl_ep")


def count(text: str, *, default: str | bool = True, least: int = 1) -> Any:
    """Declare an option for a whole number from ``least`` on; ``default`` describes a default that is computed."""
    return typer.Option(min=least, metavar="N", help=text, show_default=default)


def option(text: str, *flags: str, metavar: str = "NAME", default: str | bool = True, backends: bool = False) -> Any:
    """Declare an option for a text; ``default`` describes a default that is computed.

    If ``backends``, a shell completes names of backends.
    """
    complete = complete_backends if backends else None
    return typer.Option(*flags, metavar=metavar, help=text, show_default=default, autocompletion=complete)


def complete_backends(incomplete: str) -> list[str]:
    """Complete the name of a backend, or the last of several names with commas between."""
    before, comma, last = incomplete.rpartition(",")
    # As moe_dispatch.backends.known_backends lists them, which would import torch.
    known = sorted({*BACKENDS, *(point.name for point in entry_points(group="moe_dispatch.backends"))})
    return [before + comma + name for name in known if name.startswith(last) and name not in before.split(",")]


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Backend = Annotated[
    str,
    typer.Argument(metavar="BACKEND", help="Name, or PACKAGE.MODULE:CLASS.", autocompletion=complete_backends),
]
_TEXT = "Names with commas; +OPTION=VALUE sets an option."
Backends = Annotated[str | None, option(_TEXT, "--backends", "-b", backends=True, metavar="NAMES")]
Changes = Annotated[list[str] | None, option("Change a config field; repeatable.", "--set", metavar="FIELD=VALUE")]
