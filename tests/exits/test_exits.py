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


CLOSES_LATE = """
import atexit
held = []
atexit.register(lambda: held[0].close())  # registered first, so it runs last
from moe_dispatch import DispatcherConfig, build_dispatcher
held.append(build_dispatcher(DispatcherConfig(backend="local", num_experts=4, top_k=2, hidden_size=8)))
"""


def test_a_dispatcher_may_be_closed_after_its_channel_let_go() -> None:
    job = subprocess.run([sys.executable, "-c", CLOSES_LATE], capture_output=True, text=True, timeout=60, check=False)
    assert (job.returncode, job.stderr) == (0, "")
