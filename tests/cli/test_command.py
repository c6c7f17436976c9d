"""The command as a whole: its help, its errors, what it imports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moe_dispatch_tools
from moe_dispatch import __version__
from moe_dispatch.backends import known_backends
from moe_dispatch_tools import options
from moe_dispatch_tools.app import app
from tests.cli.conftest import Command
from tests.cli.processes import hearing_interrupts, members, wait_for

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "check", "plan", "compare", "report")


def start(*arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """The real thing, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "moe_dispatch_tools", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_version(command: Command) -> None:
    assert re.match(rf"moe-dispatch {re.escape(__version__)}, Python [\d.]+, torch \d", command("--version").out)


def test_help_lists_every_command_and_completion(command: Command) -> None:
    answer = command("--help")
    assert answer.status == 0
    assert all(re.search(rf"^  {name} ", answer.out, re.MULTILINE) for name in COMMANDS)
    assert "--install-completion" in answer.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_one_a_line(name: str, command: Command) -> None:
    examples = re.findall(rf"^ *(moe-dispatch {name}.*)$", command(name, "--help").out, re.MULTILINE)
    assert len(examples) >= 3
    assert all(example.count("moe-dispatch") == 1 for example in examples)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", COMMANDS),
        ("doctor --backend ", known_backends()),
        ("check a", ("allgather", "alltoall")),
        ("plan c.yaml -b alltoall,", [f"alltoall,{name}" for name in known_backends() if name != "alltoall"]),
        ("compare c.yaml --backends lo", ("local",)),
    ],
)
def test_shell_completes_choices(words: str, expected: Iterable[str]) -> None:
    assert completions(words) == [*expected]


def test_shell_completes_backends_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("ring", "a_package_that_is_not_imported:Ring", "moe_dispatch.backends")
    monkeypatch.setattr(options, "entry_points", lambda group: [point] if group == point.group else [])
    assert completions("doctor -b r") == ["ring"]


def completions(words: str) -> list[str]:
    """Complete the last word, as bash asks for it."""
    typed = ["moe-dispatch", *words.split(" ")]
    asked = {"COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    answer = CliRunner().invoke(app, prog_name="moe-dispatch", env={**asked, "_MOE_DISPATCH_COMPLETE": "complete_bash"})
    return answer.stdout.split()


def test_help_and_completion_import_neither_torch_nor_matplotlib() -> None:
    shown = """
import contextlib, io, os, sys
from moe_dispatch_tools import main

def call(*arguments):
    sys.argv = ["moe-dispatch", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    return out.getvalue()

assert all("Options:" in call(*name.split(), "--help") for name in ("", *NAMES))
os.environ |= {"_MOE_DISPATCH_COMPLETE": "complete_bash", "COMP_WORDS": "moe-dispatch doctor -b ", "COMP_CWORD": "3"}
assert "alltoall" in call()
print(*sys.modules)
""".replace("NAMES", repr(COMMANDS))
    finished = subprocess.run(
        [sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert {"torch", "matplotlib"}.isdisjoint(finished.stdout.split())


def test_wrong_usage_ends_with_2(command: Command) -> None:
    answer = command("doctor", "--bakend", "alltoall")
    assert answer.status == 2
    assert "--bakend" in answer.error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("check alltoall --ep 1 --ep=2", "--ep is given more than once. Write --ep 1,2.\n"),
        (
            "compare -b local --backends alltoall",
            "--backends is given more than once. Write --backends local,alltoall.\n",
        ),
        ("doctor -b local --backend alltoall --ranks 1", "--backend is given more than once.\n"),
        ("plan config.json --ep 1 --ep 2", "--ep is given more than once.\n"),
    ],
)
def test_option_given_twice_is_refused(words: str, told: str, command: Command) -> None:
    answer = command(*words.split())
    assert (answer.status, answer.out) == (2, "")
    assert f"Invalid value: {told}" in answer.error


def test_interrupt_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_dispatch_tools.doctor.command.run", interrupted)
    answer = command("doctor")
    assert (answer.status, answer.error) == (130, "Error: interrupted, all ranks are ended.\n")


@pytest.mark.parametrize("missing", moe_dispatch_tools.EXTRA)
def test_missing_packages_are_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in sorted((name for name in sys.modules if name.startswith("moe_dispatch_tools.")), reverse=True):
        parent, _, child = name.rpartition(".")
        monkeypatch.delattr(sys.modules[parent], child)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["moe-dispatch", "report", "run.safetensors"])
    assert moe_dispatch_tools.main() == 2
    told = (
        rf"Error: moe-dispatch needs {missing}.*, which is not installed. In {ROOT}, run: pip install -e '\.\[cli\]'.\n"
    )
    assert re.fullmatch(told, capsys.readouterr().err)


def test_processes_of_ranks_load_neither_typer_nor_rich() -> None:
    loaded = "import sys, moe_dispatch_tools.doctor.self_tests, moe_dispatch_tools.compare.measurement"
    loaded += "; print(*sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert {"typer", "rich", "matplotlib"}.isdisjoint(finished.stdout.split())


def test_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal's group."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("processes are counted in /proc")
    config = tmp_path / "config.json"
    config.write_text('{"num_experts": 4, "top_k": 2, "hidden_size": 32}')
    with hearing_interrupts():
        process = start("compare", "-b", "alltoall", str(config), "--ranks", "2", "--steps", "100000")
    try:
        wait_for(lambda: len(members(process.pid)) >= 3 or process.poll() is not None, seconds=240)
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=240)
        assert (process.returncode, out, error) == (130, "", "Error: interrupted, all ranks are ended.\n")
        wait_for(lambda: not members(process.pid))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
