"""README.md is true: its example is a script that prints what the page shows, and every backend is listed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dispatch.backends import known_backends, load_backend

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_example_is_the_script() -> None:
    script = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert blocks("python") == [script.partition('"""\n\n')[2]]


@pytest.mark.slow
def test_example_prints_what_the_readme_shows() -> None:
    (command,) = (block for block in blocks("sh") if block.startswith("torchrun"))
    launched = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(launched, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert sorted(ran.stdout.splitlines()) == blocks("text")[-1].splitlines(), ran.stderr


def test_every_backend_of_the_package_is_listed() -> None:
    built_in = [name for name in known_backends() if load_backend(name).__module__.startswith("moe_dispatch.backends.")]
    table = README.partition("\n## Backends\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == built_in
