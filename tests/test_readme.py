"""README.md is short and true: its example runs, its commands exist, and it links to every topic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moe_dispatch.backends import known_backends, load_backend

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

SECTIONS = [
    "Example",
    "Two commands",
    "What it does not do",
    "Backends",
    "Layouts",
    "Graph-safe mode",
    "Integrations",
    "Writing a backend",
    "Performance",
    "Development",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_sections_are_in_order() -> None:
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == SECTIONS


def test_first_screen_says_what_it_is_and_what_has_not_run() -> None:
    first = "\n".join(README.splitlines()[:25])
    for said in (
        "mixture-of-experts",
        "dispatcher.dispatch(",
        "dispatcher.combine(",
        "[!IMPORTANT]",
        "pip install -e .",
    ):
        assert said in first, said
    assert "(docs/hardware.md)" in first


def test_example_is_the_script() -> None:
    script = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert blocks("python") == [script.partition('"""\n\n')[2]]


@pytest.mark.slow
def test_example_prints_what_the_readme_shows() -> None:
    command, shown = blocks("sh")[1], blocks("text")[-1]
    launched = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(launched, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert sorted(ran.stdout.splitlines()) == shown.splitlines(), ran.stderr


def test_commands_name_targets_files_and_extras_that_exist() -> None:
    assert blocks("sh")[2] == "make demo\nmake test\n"
    for line in (line for block in blocks("sh") for line in block.splitlines()):
        match line.split():
            case ["make", target]:
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), line
            case ["pip", "install", "-c", constraints, "torch"]:
                pinned = (ROOT / constraints).read_text(encoding="utf-8")
                version = re.search(r"^torch==([\d.]+)", pinned, re.MULTILINE)
                assert version is not None
                assert f"pins {version[1]}, the tested version" in README
            case ["pip", "install", "-e", "."]:
                project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
                assert project["requires-python"] == ">=3.11"
            case ["torchrun", "--nproc-per-node", "2", script]:
                assert (ROOT / script).is_file()
            case _:
                pytest.fail(f"no rule for {line!r}")
    for target in re.findall(r"`make ([a-z]+)`", README):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_every_backend_of_the_package_is_listed() -> None:
    built_in = [name for name in known_backends() if load_backend(name).__module__.startswith("moe_dispatch.backends.")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section("Backends"), re.MULTILINE)) == built_in
