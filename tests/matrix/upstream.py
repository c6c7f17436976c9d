"""Run the tests of each framework with its newest release, and say in a table what differs.

    make upstream                                    # newest releases, in a fresh environment
    make upstream ARGS="--only transformers --keep"  # some of them; keep the environment
    make upstream ARGS="--nightly"                   # also torch's nightly CPU build

Each framework is installed by itself, with the pinned torch and otherwise without constraints.txt, and its tests run.
So what differs comes from one package. The table is `out/upstream/table.md`; what pip and pytest print is beside it. It
ends with 1 if a test failed, or if a package could not be installed.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.matrix.constraints import canonical, parsed
from tests.matrix.run import ROOT, NotRun, Result, last_line, run

OUT = ROOT / "out" / "upstream"
NIGHTLY = "https://download.pytorch.org/whl/nightly/cpu"
PINNED = parsed((ROOT / "constraints.txt").read_text(encoding="utf-8"))[1]
TORCH, BASE = f"torch=={PINNED['torch']}", "--editable .[dev,transformers]"


@dataclass(frozen=True)
class Framework:
    """A package, the arguments of `pip install` for each of its calls, and its tests."""

    name: str
    installs: tuple[str, ...]
    tests: tuple[str, ...]


FRAMEWORKS = (
    Framework(
        "transformers", (TORCH, BASE, "--upgrade transformers accelerate peft"), ("tests/integration/transformers",)
    ),
    # spmd_types: the version that torchtitan pins.
    Framework(
        "torchtitan",
        (TORCH, BASE, "--upgrade torchtitan spmd_types==0.2.3 torch-remat tyro"),
        ("tests/integration/titan", "tests/recompute/test_torch_remat.py"),
    ),
    # Its metadata asks for Python 3.12, and it runs on 3.11.
    Framework(
        "megatron-core",
        (TORCH, BASE, "--upgrade --no-deps --ignore-requires-python megatron-core"),
        ("tests/integration/megatron_core",),
    ),
    Framework(
        "torchao",
        (TORCH, BASE, "--upgrade torchao"),
        ("tests/integration/test_torchao.py", "tests/test_quantised.py"),
    ),
    Framework(
        "torch", ("--upgrade torch", "--editable .[dev]"), ("tests/dispatchers", "tests/recompute", "tests/backends")
    ),
)
NIGHTLIES = (
    Framework(
        "torch nightly",
        (f"--pre torch --index-url {NIGHTLY}", "--editable .[dev]"),
        ("tests/dispatchers", "tests/recompute", "tests/backends", "tests/compile"),
    ),
)


def look(framework: Framework, options: argparse.Namespace) -> Result:
    """Install a framework and run its tests."""
    log, environment = OUT / f"{canonical(framework.name)}.log", ROOT / ".venv-upstream"
    log.unlink(missing_ok=True)
    python, status, found = str(environment / "bin" / "python"), None, "?"
    try:
        if not (environment.exists() and options.keep):
            shutil.rmtree(environment, ignore_errors=True)
            if run([options.python, "-m", "venv", str(environment)], log, options.minutes):
                raise NotRun(last_line(log))
        for requirements in framework.installs:
            if run([python, "-m", "pip", "install", "--quiet", *requirements.split()], log, options.minutes):
                raise NotRun(f"not installed: {last_line(log, 'ERROR: ')}")
        package = framework.name.split()[0]
        ask = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
        tests = [python, "-m", "pytest", "-q", "--numprocesses", "auto", "--dist", "loadfile", *framework.tests]
        status = run(tests, log, options.minutes)
        closing_line = last_line(log)
    except NotRun as error:
        closing_line = f"not run: {error}"
    return Result(framework.name, found, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", closing_line, status)


def table(results: list[Result], pinned: dict[str, str]) -> str:
    rows = ["| package | pinned | newest | passed | failed | skipped | date |", "|---|---|---|---|---|---|---|"]
    for each in results:
        passed = each.closing_line if each.status is None else each.count("passed")
        numbers = f"{passed} | {each.count('failed', 'error')} | {each.count('skipped')}"
        rows.append(f"| {each.cell} | {pinned.get(each.cell, '-')} | {each.versions} | {numbers} | {each.date} |")
    return "\n".join(rows) + "\n"


def differs(results: list[Result]) -> bool:
    """Return whether somebody must look: a test failed, no test ran, or a package could not be installed."""
    return any(each.status != 0 for each in results)


def failures(results: list[Result], folder: Path) -> str:
    """Return the names of the tests that failed, by package, for the issue."""
    parts = []
    for each in results:
        log = folder / f"{canonical(each.cell)}.log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))][:20]
        if each.status != 0:
            parts.append(
                "\n".join([f"{each.cell} {each.versions}: {each.closing_line}", *(f"- {name}" for name in named)])
            )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="name of a package; may be repeated")
    parser.add_argument("--nightly", action="store_true", help="also torch's nightly CPU build")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("--keep", action="store_true", help="keep the environment, and use the one that was kept")
    parser.add_argument("--minutes", type=float, default=60, help="time limit of each command (default: 60)")
    options = parser.parse_args()
    known = FRAMEWORKS + NIGHTLIES * options.nightly
    chosen = [each for each in known if not options.only or each.name in options.only]
    if not chosen:
        parser.error(f"--only must be one of {', '.join(each.name for each in known)}")
    OUT.mkdir(parents=True, exist_ok=True)
    results = []
    for framework in chosen:
        print(f"{framework.name}: see {OUT}", flush=True)
        results.append(look(framework, options))
        (OUT / "table.md").write_text(f"{table(results, PINNED)}\n{failures(results, OUT)}", encoding="utf-8")
    if not options.keep:
        shutil.rmtree(ROOT / ".venv-upstream", ignore_errors=True)
    print(table(results, PINNED), end="")
    sys.exit(differs(results))


if __name__ == "__main__":
    main()
