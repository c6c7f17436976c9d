"""Code and commands of the pages, run as they stand, and how far a result is from its reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language; ``page`` is its path from the root of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_page(page: str, until: str = "", **names: Any) -> dict[str, Any]:
    """Run the Python of a page under docs/, up to a heading if one is given; return all names that it knows then."""
    path = ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    if until:
        text, found, _ = text.partition(f"\n{until}\n")
        assert found
    namespace: dict[str, Any] = dict(names)
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        above = text.count("\n", 0, block.start(1))  # empty lines make a traceback name the line of the page
        exec(compile("\n" * above + block[1], str(path), "exec"), namespace)
    return namespace


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page under docs/ that are followed by what they print, each with that."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```sh\n([^`]*?)\n```\n\n```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)


def run_command(command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command of a page: variables, then ``python`` or ``torchrun`` with its arguments."""
    *settings, program = re.split(r" (?=python|torchrun)", f" {command}")
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    environment |= dict(setting.strip().split("=", 1) for setting in settings if setting.strip())
    words = program.replace("torchrun", "-m torch.distributed.run").split()
    started = [sys.executable, *(words[1:] if words[0] == "python" else words)]
    return subprocess.run(started, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


def relative(got: Tensor | None, want: Tensor | None) -> float:
    """The length of the difference as a part of the reference's; AssertionError where either is missing or a shape."""
    assert got is not None, "no gradient came back"
    assert want is not None
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    difference: float = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()
    return difference


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """All of them in one vector, by name."""
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])
