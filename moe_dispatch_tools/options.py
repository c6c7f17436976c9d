"""Kinds of options, and completion of their values in a shell. Completion imports neither torch nor a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

# Values that other modules define too. Those modules import torch, so a test compares the values instead.
BACKENDS = ("allgather", "alltoall", "deepep", "hybridep", "local")
PEERS = ("floor", "torchtitan", "transformers")
COMPARE_DTYPES = ("float64", "float32", "bfloat16", "float16")
COMPARE_ROUTINGS = (
    "balanced",
    "uniform",
    "skewed",
    "last_expert",
    "first_half",
    "duplicates",
    "nowhere",
    "partly_nowhere",
)
MODES = ("eager", "graph-safe")
PLAN_DTYPES = ("bfloat16", "float16", "float32")


def count(text: str, *, default: str | bool = True, least: int = 1) -> Any:
    """Declare an option for a whole number from ``least`` on; ``default`` describes a default that is computed."""
    return typer.Option(min=least, metavar="N", help=text, show_default=default)


def flag(option: str, text: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(option, help=text)


def option(
    text: str,
    *flags: str,
    metavar: str = "NAME",
    default: str | bool = True,
    of: Sequence[str] = (),
    backends: bool = False,
) -> Any:
    """Declare an option for a text, or for several texts with commas between.

    Args:
        text: Help text.
        *flags: Names of the option, if they differ from the name of the parameter.
        metavar: Placeholder for the value.
        default: Description of a default that is computed.
        of: Values that a shell completes.
        backends: Whether a shell also completes names of backends.
    """
    complete = completing(*of, backends=backends) if of or backends else None
    return typer.Option(*flags, metavar=metavar, help=text, show_default=default, autocompletion=complete)


def completing(*values: str, backends: bool = False) -> Callable[[str], list[str]]:
    """Make a completion of one value, or of the last of several values with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = (*_known_backends(), *values) if backends else values
        given = before.split(",")
        return [before + comma + value for value in known if value.startswith(last) and value not in given]

    return complete


def _known_backends() -> list[str]:
    """List what ``moe_dispatch.backends.known_backends`` lists, which would import torch."""
    return sorted({*BACKENDS, *(point.name for point in entry_points(group="moe_dispatch.backends"))})


Json = Annotated[bool, flag("--json", "Print JSON.")]
Backend = Annotated[
    str,
    typer.Argument(metavar="BACKEND", help="Name, or PACKAGE.MODULE:CLASS.", autocompletion=completing(backends=True)),
]
_NAMES: Any = ("Names with commas; +OPTION=VALUE sets an option.", "--backends", "-b")
Backends = Annotated[str | None, option(*_NAMES, backends=True, metavar="NAMES")]
BackendsAndPeers = Annotated[str | None, option(*_NAMES, of=PEERS, backends=True, metavar="NAMES")]
