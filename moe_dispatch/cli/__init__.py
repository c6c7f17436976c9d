"""The command ``moe-dispatch``: a folder for each command, and beside these folders what commands share."""

from __future__ import annotations

import sys

from moe_dispatch.probing import how_to_install

EXTRA = ("typer", "rich", "matplotlib")


def main() -> int:
    """Run the command line; the exit status is 2 for an error, 1 for the answer "no", 130 for an interrupt."""
    try:
        from moe_dispatch.cli.app import run  # noqa: PLC0415 - its packages are optional
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write(f"Error: moe-dispatch needs {error.name}, got none. {how_to_install('cli')}\n")
        return 1
    return run()
