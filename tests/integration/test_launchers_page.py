"""docs/accelerate-and-ray.md is true: the examples, started by its commands, print what it shows."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.pages import commands, run_command

pytestmark = pytest.mark.integration


def _printed(file: str) -> tuple[list[str], list[str]]:
    """The lines that the command of an example prints and those that the page shows."""
    ((command, shown),) = [run for run in commands("accelerate-and-ray.md") if file in run[0]]
    ran = run_command(command)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines(), shown.splitlines()


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
    assert printed == shown
    assert printed == [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(_losses_of_one_process())]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, which no extra installs")
def test_ray() -> None:
    printed, shown = _printed("ray_ranks.py")
    assert printed == shown
