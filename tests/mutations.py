"""Plant random bugs in the core, one at a time, and count those that some test of ``make test`` catches.

    python -m tests.mutations --count 300 --seed 40 --jobs 2 --list survivors.md

A first run notes which functions of the core each test calls. Each bug is then planted in a copy of the checkout, and
the tests that call its function run there, the quickest first, until one fails. A bug in a function that no test calls
in its own process counts as missed; those of Triton kernels are for the slow tests, which interpret them. With two jobs
on two cores, 300 bugs take about half an hour.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, final

import pytest

ROOT = Path(__file__).parents[1]
CORE = ("dispatchers", "backends", "layouts", "permutation", "balance", "steps")
SECONDS = 60  # of tests for one bug; the quickest case of each test function comes first
PAIRS = (
    "Add Sub",
    "Mult FloorDiv",
    "BitAnd BitOr",
    "LShift RShift",
    "Lt LtE",
    "Gt GtE",
    "Eq NotEq",
    "Is IsNot",
    "In NotIn",
    "And Or",
)
SWAPS = {one: other for pair in map(str.split, PAIRS) for one, other in (pair, pair[::-1])}

Function = tuple[str, int]  # the file below the root, and the first line of the function with its decorators


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A planted bug: where, what the source says and what it says instead, and the whole file with it."""

    function: Function
    line: int
    old: str
    new: str
    text: str


def bugs_of(path: Path) -> Iterator[tuple[Function, ast.AST, ast.AST | None]]:
    """Yield for every bug of a file the function, a node, and the node in its place; None deletes a statement."""

    def visit(node: ast.AST, function: Function | None) -> Iterator[tuple[Function, ast.AST, ast.AST | None]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):  # without its decorators, annotations and defaults
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                yield from visit(ast.Module(child.body, []), (str(path.relative_to(ROOT)), first))
                continue
            if function is not None and (found := changed(child)) is not False:
                yield function, child, found
            yield from visit(child, function)

    yield from visit(ast.parse(path.read_text()), None)


def changed(node: Any) -> Any:
    """Return what a bug makes of a node, None to delete it, or False if there is no bug for it."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op).__name__ in SWAPS:
        other.op = getattr(ast, SWAPS[type(node.op).__name__])()
    elif isinstance(node, ast.Compare) and type(node.ops[0]).__name__ in SWAPS:
        other.ops[0] = getattr(ast, SWAPS[type(node.ops[0]).__name__])()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        other.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.IfExp):
        other.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    else:
        return False
    return other


def planted(function: Function, node: Any, other: ast.AST | None) -> Bug | None:
    """Write the bug into the text of its file, which keeps its lines. Return None if the result is no Python."""
    data = (ROOT / function[0]).read_bytes()
    lines = data.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    old = data[start:end].decode()
    new = "pass" if other is None else ast.unparse(other)
    breaks = "\n" * (old.count("\n") - new.count("\n"))
    whole = new + breaks if isinstance(node, ast.stmt) else f"({new}{breaks})"
    text = (data[:start] + whole.encode() + data[end:]).decode()
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return Bug(function=function, line=node.lineno, old=old, new=new, text=text)


# A plugin of the first run: which functions each test calls, in all threads of its process.
_called: set[Function] = set()


def _trace(frame: FrameType, event: str, arg: object) -> None:
    name = frame.f_code.co_filename
    if name.startswith(_FOLDERS):
        _called.add((name[len(str(ROOT)) + 1 :], frame.f_code.co_firstlineno))


_FOLDERS = tuple(f"{ROOT}/moe_dispatch/{folder}/" for folder in CORE)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _called.clear()
    start = time.monotonic()
    threading.settrace(_trace)
    sys.settrace(_trace)
    yield
    sys.settrace(None)
    threading.settrace(None)
    with Path(os.environ["CALLED"], str(os.getpid())).open("a") as file:
        file.write(json.dumps([item.nodeid, time.monotonic() - start, sorted(_called)]) + "\n")


def run_tests(root: Path, *arguments: str, **variables: str) -> int:
    """Run pytest in a checkout, and return its exit status."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=root, env={**environment, **variables}, capture_output=True, check=False)
    return done.returncode


def tests_by_function(jobs: int) -> dict[Function, list[tuple[float, str]]]:
    """Run ``make test``. Return the tests that call each function, with their seconds: one case of each test first."""
    with tempfile.TemporaryDirectory() as folder:
        run_tests(ROOT, "-m", "not slow", "-n", str(jobs), "-p", "tests.mutations", CALLED=folder)
        lines = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    found: dict[Function, list[tuple[float, str]]] = defaultdict(list)
    for name, seconds, called in sorted(lines, key=lambda line: float(line[1])):
        for file, first in called:
            found[file, first].append((seconds, name))
    return {function: _one_of_each_first(tests) for function, tests in found.items()}


def _one_of_each_first(tests: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    seen: Counter[str] = Counter()
    numbered = []
    for seconds, name in tests:
        seen[name.partition("[")[0]] += 1
        numbered.append((seen[name.partition("[")[0]] > 1, seconds, name))
    return [(seconds, name) for _, seconds, name in sorted(numbered)]


def is_caught(bug: Bug, tests: Sequence[tuple[float, str]], root: Path) -> bool:
    """Plant a bug in a copy of the checkout, and return whether a test fails there."""
    chosen, total = [], 0.0
    for seconds, name in tests:
        if total + seconds <= SECONDS:
            chosen.append(name)
            total += seconds
    file = root / bug.function[0]
    before = file.read_text()
    file.write_text(bug.text)
    try:
        return bool(chosen) and run_tests(root, "-x", *chosen) != 0
    finally:
        file.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="number of bugs")
    parser.add_argument("--seed", type=int, default=40, help="seed of their choice")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout that run at the same time")
    parser.add_argument("--list", type=Path, help="file for a list of the bugs that no test caught")
    given = parser.parse_args()
    places = [
        bug
        for folder in CORE
        for path in sorted((ROOT / "moe_dispatch" / folder).rglob("*.py"))
        for bug in bugs_of(path)
    ]
    random.Random(given.seed).shuffle(places)
    bugs = [bug for place in places[: 2 * given.count] if (bug := planted(*place)) is not None][: given.count]
    tests = tests_by_function(given.jobs)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(given.jobs):
            target = Path(folder, str(job))
            target.mkdir()
            subprocess.run(["cp", "--parents", *filter(None, files), str(target)], cwd=ROOT, check=True)
            copies.put(target)

        def run(bug: Bug) -> bool:
            root = copies.get()
            try:
                caught = is_caught(bug, tests.get(bug.function, []), root)
            finally:
                copies.put(root)
            print("." if caught else "M", end="", flush=True)
            return caught

        missed = [bug for bug, caught in zip(bugs, pool.map(run, bugs), strict=True) if not caught]
    print(f"\n{len(bugs) - len(missed)} of {len(bugs)} bugs are caught")
    if given.list is not None:
        lines = [f"- {bug.function[0]}:{bug.line}: `{bug.old}` became `{bug.new}`\n" for bug in missed]
        given.list.write_text("".join(lines))


if __name__ == "__main__":
    main()
