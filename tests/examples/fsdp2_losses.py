"""Run examples/train_fsdp2.py under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(ranks: int, *arguments: str) -> str:
    """What a training printed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    process = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / "train_fsdp2.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def losses_in(text: str) -> dict[int, float]:
    """The loss of each step that a training printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+), loss (\S+)$", text, re.MULTILINE)}


def losses(ranks: int, *arguments: str) -> dict[int, float]:
    """Run a training and return the loss of each step."""
    return losses_in(printed(ranks, *arguments))
