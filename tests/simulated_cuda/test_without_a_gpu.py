"""A CUDA build of torch without a GPU, which is what pip installs on most laptops: examples run on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.pages import ROOT

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
RUNS = {
    "quickstart": ((*TORCHRUN, "examples/quickstart.py"), r"rank 1: 5 tokens, .* True"),
    "train_fsdp2": ((*TORCHRUN, "examples/train_fsdp2.py", "--steps", "2"), r"step 2, loss \d\.\d+"),
    "convert_model": (("examples/convert_model.py", "--ranks", "2"), r"local +1 .* same"),
}


@pytest.mark.parametrize("name", RUNS)
def test_examples_run_on_the_cpu(name: str) -> None:
    words, printed = RUNS[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SIMULATED_CUDA_DEVICES": "0"}
    run = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.search(printed, run.stdout), run.stdout
