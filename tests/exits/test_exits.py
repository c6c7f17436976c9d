"""A clean run ends with the status of one, whatever it holds to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("job.py")
RANKS = 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "use"), [("world", "idle"), ("sub-group", "used"), ("mesh", "used"), ("world", "closed")]
)
def test_a_clean_job_ends_with_status_0(group: str, use: str) -> None:
    """Before channels let go of their groups, a rank of about every third job of four ranks aborted."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    for _ in range(2):
        job = subprocess.run([*command, str(JOB), group, use], capture_output=True, text=True, timeout=120, check=False)
        assert job.returncode == 0, job.stderr[-2000:]
