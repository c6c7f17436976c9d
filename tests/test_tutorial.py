"""The tutorial and the quickstart are true: their files, started by their commands, print what the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("quickstart.md", "tutorial.md")}
# A command, followed by what it prints.
RUNS = [
    (page, *run)
    for page, text in PAGES.items()
    for run in re.findall(r"^```sh\n([^`]*?)\n```\n\n```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "runs", "others"), [("quickstart.md", 2, 2), ("tutorial.md", 4, 1)])
def test_commands_have_their_output(page: str, runs: int, others: int) -> None:
    """All but the installation, and the command for several machines."""
    assert [shown for shown, *_ in RUNS].count(page) == runs
    assert PAGES[page].count("```sh\n") == runs + others


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "shown"), RUNS, ids=[command for _, command, _ in RUNS])
def test_commands_print_what_the_page_shows(page: str, command: str, shown: str, tmp_path: Path) -> None:
    for name, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGES[page], re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    *settings, program = re.split(r" (?=python|torchrun)", command)
    environment |= dict(setting.split("=", 1) for setting in settings)
    started = [sys.executable, *program.replace("torchrun", "-m torch.distributed.run").split()]
    if started[1] == "python":
        del started[1]
    ran = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    printed = sorted(ran.stdout.splitlines()) or ran.stderr.splitlines()[-1:]
    assert printed == shown.splitlines(), ran.stderr
