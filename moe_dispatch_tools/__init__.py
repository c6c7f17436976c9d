"""The command ``moe-dispatch``. Each subcommand has a folder; the modules beside the folders are shared."""

from __future__ import annotations

import sys

from moe_dispatch.versions import how_to_install

EXTRA = ("typer", "rich", "matplotlib", "jinja2")


def main() -> int:
    """Run the command line. The exit status is 2 for an error, 1 for the answer "no", 130 for an interrupt."""
    try:
        from moe_dispatch_tools.app import run  # noqa: PLC0415 - its packages are optional

        return run()
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write(f"Error: moe-dispatch needs {error.name}, which is not installed. {how_to_install('cli')}\n")
        return 2
