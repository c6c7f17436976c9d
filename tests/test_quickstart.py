"""The quickstart is true: its files, started by its commands, print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
# A command, followed by what it prints.
RUNS = re.findall(r"^```sh\n([^`]*?)\n```\n\n```text\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)


def test_commands_have_their_output() -> None:
    """All but the installation, and the command for several machines."""
    assert len(RUNS) == 4
    assert PAGE.count("```sh\n") == len(RUNS) + 2


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), RUNS, ids=[command for command, _ in RUNS])
def test_commands_print_what_the_page_shows(command: str, shown: str, tmp_path: Path) -> None:
    for name, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL):
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
