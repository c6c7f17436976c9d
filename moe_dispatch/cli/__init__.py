"""The command ``moe-dispatch``. What it finds is plain data; only ``app`` needs Typer, and only ``console`` Rich."""

from __future__ import annotations

import sys

EXTRA = ("typer", "rich")


def main() -> int:
    """Run the command line; the exit status. 2 is an error, 1 an answer of "no", 130 an interrupt."""
    try:
        from moe_dispatch.cli.app import run  # noqa: PLC0415 - its packages are optional
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write(f"Error: moe-dispatch needs {error.name}, got none. pip install 'moe-dispatch[cli]'.\n")
        return 1
    return run()
