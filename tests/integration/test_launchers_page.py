"""docs/accelerate-and-ray.md is true: the examples, started by its commands, print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accelerate-and-ray.md").read_text(encoding="utf-8")
RUNS = re.findall(r"^```sh\n([^`]*?)\n```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.integration


def _printed(file: str) -> tuple[list[str], str]:
    """The lines that the command of an example prints and those that the page shows."""
    ((command, shown),) = [run for run in RUNS if file in run[0]]
    *settings, program = re.split(r" (?=python|torchrun)", f" {command}")
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    environment |= dict(setting.strip().split("=", 1) for setting in settings if setting.strip())
    words = program.replace("torchrun", "-m torch.distributed.run").split()
    started = [sys.executable, *(words[1:] if words[0] == "python" else words)]
    ran = subprocess.run(started, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines(), shown


def _losses_of_one_process() -> list[float]:
    """What the steps of accelerate_ranks.py come to with all experts and the tokens of both ranks in one place."""
    torch.manual_seed(1)
    matrices = (torch.randn(8, 16, 16) / 4).requires_grad_()
    router = torch.nn.Linear(16, 8)
    optimizer = torch.optim.SGD([matrices, *router.parameters()], lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    losses = []
    for _ in range(3):
        parts = []
        for rank, generator in enumerate(generators):
            x = torch.randn(4 + rank, 16, generator=generator)
            weights, ids = router(x).softmax(1).topk(2)
            slots = [torch.einsum("td,tde->te", x, matrices[ids[:, k]]) * weights[:, k, None] for k in range(2)]
            parts.append((slots[0] + slots[1] - x).square().mean())
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate: install moe-dispatch[transformers]")
def test_accelerate() -> None:
    printed, shown = _printed("accelerate_ranks.py")
    assert printed == shown.splitlines()
    assert printed == [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(_losses_of_one_process())]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, which no extra installs")
def test_ray() -> None:
    printed, shown = _printed("ray_ranks.py")
    assert printed == shown.splitlines()
