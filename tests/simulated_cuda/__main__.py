"""Run a Python program on simulated devices: ``python -m tests.simulated_cuda PROGRAM [ARGUMENT ...]``.

The program is a path, or ``-m`` and a module. Races between streams are printed at the end, and make the exit status 1.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.simulated_cuda.device import recorded, watched_streams
from tests.simulated_cuda.plugin import refuse_races
from tests.simulated_cuda.values import simulated


def main(arguments: list[str]) -> int | str | None:
    """Return the exit status of the program."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(sys.argv[0])))
    status: int | str | None = 0
    with recorded() as records, watched_streams(), simulated():
        try:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    refuse_races(records)
    return status


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # the threads of NCCL would wait for a device
