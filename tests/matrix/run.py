"""Run a part of the tests with other versions of Python, torch and the packages of the integrations.

    python tests/matrix/run.py                                       # all cells
    python tests/matrix/run.py --only torch-2.15 --only newest       # cells whose names contain one of these
    python tests/matrix/run.py --only py3.13 --python ~/python3.13   # with an interpreter that is not on the PATH
    python tests/matrix/run.py --only torch-2.10 -- -x --durations=10   # with further arguments of pytest

A cell is a version of Python and the packages to install for it. It has an environment of its own,
`.venv-matrix-<cell>`, of about 6 GB with a CUDA build of torch. The environment is deleted after the run, or kept and
used again with `--keep`. A cell that cannot be installed or that fails does not stop the others. The script writes
`out/matrix/table.md`, and what pip and pytest print to `out/matrix/<cell>.log`. It ends with 1 if the tests of a cell
failed or no cell ran; the table says why a cell did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "matrix"
# Tests that may fail with another torch, Python or Triton: layouts, permutation (with Triton's interpreter),
# dispatchers, compiled layers, and the conformance kit on the backends that need nothing but torch. Left out are:
LEFT_OUT_FILES = (
    "dispatchers/test_watchdog.py",  # ends processes, and waits
    "dispatchers/test_peer_errors.py",  # plain Python, in many combinations
    "compile/test_compile_page.py",  # compiles again what other tests of the folder compile
)
LEFT_OUT_NAMES = (
    *("deepep", "hybridep"),  # emulations of other libraries
    *("bytes", "raises_in_its_dispatch"),  # arithmetic and texts of our own, in many combinations
    "(test_compiled_ranks and allgather)",  # starts processes that compile; alltoall is enough
    "(test_scenarios and (ring or strict))",  # written for tests and examples
)
TORCH_TESTS = (
    *("tests/layouts", "tests/backends", "tests/dispatchers", "tests/compile", "tests/conformance/test_scenarios.py"),
    *(f"--ignore=tests/{file}" for file in LEFT_OUT_FILES),
    *("-k", f"not ({' or '.join(LEFT_OUT_NAMES)})"),
)
SHOWN = ("torch", "triton", "megatron-core", "torchtitan", "transformers")
VERSIONS = f"""
import importlib.metadata, json, platform
found = {{"Python": platform.python_version()}}
for name in {SHOWN}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Cell:
    """A version of Python, arguments of `pip install` for each of its calls, and arguments of pytest."""

    name: str
    python: str
    installs: tuple[str, ...]
    tests: tuple[str, ...] = TORCH_TESTS
    newest: bool = False  # constraints.txt does not apply


def torch_cell(torch: str, python: str) -> Cell:
    return Cell(f"torch-{torch}-py{python}", python, (f"torch=={torch}", "--editable .[dev]"))


CELLS = (
    torch_cell("2.10.0", "3.11"),
    torch_cell("2.11.0", "3.12"),
    torch_cell("2.12.1", "3.12"),
    torch_cell("2.13.0", "3.13"),
    torch_cell("2.14.1", "3.12"),
    torch_cell("2.15.0", "3.11"),
    torch_cell("2.15.0", "3.13"),
    Cell(
        "newest-py3.12",
        "3.12",
        (
            "torch",
            # spmd_types: the version that torchtitan 0.3.0 runs with.
            "--editable .[dev,transformers,megatron] torchtitan spmd_types==0.2.3 tyro triton",
        ),
        tests=("tests/integration",),
        newest=True,
    ),
)


@dataclass(frozen=True)
class Result:
    """One row of the table. Without `status`, pytest's exit status, the cell did not run."""

    cell: str
    versions: str
    date: str
    closing_line: str
    status: int | None = None

    def count(self, *words: str) -> int:
        found = re.findall(r"(\d+) (passed|failed|skipped|error)", self.closing_line)
        return sum(int(number) for number, word in found if word in words)


class NotRun(Exception):
    """The cell cannot run here; the text says why."""


def find_python(version: str, given: list[str]) -> str:
    """Return the interpreter of this version: one of `given`, or `python3.x` of the PATH."""
    for candidate in [*given, shutil.which(f"python{version}")]:
        if candidate is None:
            continue
        ask = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            answer = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        except OSError as error:
            raise NotRun(f"{candidate} cannot be started: {error.strerror}") from error
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    raise NotRun(f"python{version} is not on the PATH, and no --python has this version")


def constraints(cell: Cell) -> str:
    """Return constraints.txt without torch, which is the cell's, and Triton, whose version each torch chooses."""
    if cell.newest:
        return ""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith(("torch==", "triton==")))


def run(command: list[str], log: Path, minutes: float, cwd: Path = ROOT) -> int:
    """Append what a command prints to the log, and return its exit status, 1 if it takes too long.

    What the command leaves running is killed.
    """
    with log.open("a", encoding="utf-8") as output:
        print("$", shlex.join(command), file=output, flush=True)
        process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            print(f"no end after {minutes:g} minutes", file=output)
            return 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def install(cell: Cell, environment: Path, options: argparse.Namespace, log: Path) -> str:
    """Make the environment, unless a run with `--keep` left the same, and return its interpreter."""
    python = environment / "bin" / "python"
    pinned = constraints(cell)
    done, wanted = environment / ".installed", "\n".join((*cell.installs, pinned))
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return str(python)
    shutil.rmtree(environment, ignore_errors=True)
    if run([find_python(cell.python, options.python), "-m", "venv", str(environment)], log, options.minutes):
        raise NotRun(f"no environment: {last_line(log)}")
    (environment / "constraints.txt").write_text(pinned, encoding="utf-8")
    pip = ["-m", "pip", "install", "--no-cache-dir", "--no-compile", "--constraint"]
    for requirements in cell.installs:
        command = [str(python), *pip, str(environment / "constraints.txt"), *requirements.split()]
        if run(command, log, options.minutes):
            raise NotRun(f"not installed: {last_line(log, 'ERROR: ')}")
    done.write_text(wanted, encoding="utf-8")
    return str(python)


def last_line(log: Path, prefix: str = "") -> str:
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip() and line.startswith(prefix)]
    return lines[-1].removeprefix(prefix).strip("= ") if lines else "nothing was printed"


def run_cell(cell: Cell, options: argparse.Namespace) -> Result:
    environment, log = ROOT / f".venv-matrix-{cell.name}", OUT / f"{cell.name}.log"
    log.unlink(missing_ok=True)
    status, versions = None, f"Python {cell.python}, {cell.installs[0]}"
    try:
        python = install(cell, environment, options, log)
        asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
        versions = ", ".join(f"{name} {version}" for name, version in json.loads(asked.stdout).items())
        pytest = [python, "-m", "pytest", "-q", "--numprocesses", "auto", *cell.tests, *options.pytest]
        status = run(pytest, log, options.minutes)
        closing_line = last_line(log)
        if status > 1:  # pytest broke off
            closing_line += f"; pytest's exit status is {status}"
    except NotRun as error:
        closing_line = f"not run: {error}"
    finally:
        if not options.keep:
            shutil.rmtree(environment, ignore_errors=True)
    return Result(cell.name, versions, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", closing_line, status)


def table(results: list[Result]) -> str:
    rows = ["| cell | versions | passed | failed | skipped | closing line | date |", "|---|---|---|---|---|---|---|"]
    for result in results:
        numbers = f"{result.count('passed')} | {result.count('failed', 'error')} | {result.count('skipped')}"
        rows.append(f"| {result.cell} | {result.versions} | {numbers} | {result.closing_line} | {result.date} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and end")
    parser.add_argument("--only", action="append", default=[], help="part of a cell's name; may be repeated")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to use; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that were kept")
    parser.add_argument("--minutes", type=float, default=60, help="time limit of each command (default: 60)")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if not options.only or any(part in cell.name for part in options.only)]
    if not cells:
        parser.error(f"--only {' '.join(options.only)} must be part of a name: {', '.join(c.name for c in CELLS)}")
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return
    OUT.mkdir(parents=True, exist_ok=True)
    results = []
    for cell in cells:
        print(f"{cell.name}: see {OUT / cell.name}.log", flush=True)
        results.append(run_cell(cell, options))
        print(f"  {results[-1].closing_line}", flush=True)
        (OUT / "table.md").write_text(table(results), encoding="utf-8")
    print(table(results), end="")
    ran = [result.status for result in results if result.status is not None]
    sys.exit(any(ran) or not ran)


if __name__ == "__main__":
    main()
