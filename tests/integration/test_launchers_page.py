"""The examples for launchers in docs/training.md, started by its commands, print what it shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.pages import ROOT, commands, run_command

pytestmark = pytest.mark.integration

# What makes examples/accelerate_ranks.py an example for Fabric.
FABRIC = """\
-from accelerate import Accelerator
+from lightning.fabric import Fabric
-    accelerator = Accelerator(cpu=True)  # joins the process group
+    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
+    fabric.launch()  # joins the process group
-    router, optimizer = accelerator.prepare(router, optimizer)  # not the experts
+    router, optimizer = fabric.setup(router, optimizer)  # not the experts
-        accelerator.backward(loss)
+        fabric.backward(loss)
-        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean'):.4f}")
+        fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach(), reduce_op='mean'):.4f}")
-    accelerator.end_training()
+    fabric.barrier()
"""


def _printed(file: str) -> tuple[list[str], list[str]]:
    """The lines that the command of an example prints and those that the page shows."""
    ((command, shown),) = [run for run in commands("training.md") if file in run[0]]
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


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning, which no extra installs")
def test_fabric(tmp_path: Path) -> None:
    """Changes to the calls of Accelerate leave the losses as they are."""
    program = (ROOT / "examples" / "accelerate_ranks.py").read_text(encoding="utf-8")
    for before, after in changes(FABRIC):
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    assert "accelerator." not in program
    (tmp_path / "fabric_ranks.py").write_text(program, encoding="utf-8")
    ran = run_command("MOE_DISPATCH_BACKEND=alltoall torchrun --nproc-per-node 2 fabric_ranks.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    expected = [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(_losses_of_one_process())]
    assert [line for line in ran.stdout.splitlines() if line.startswith("step")] == expected


def changes(diff: str) -> list[tuple[str, str]]:
    """Each removed line of a diff, with the lines that take its place."""
    parts = [part.splitlines() for part in ("\n" + diff).split("\n-")[1:]]
    return [(f"{removed}\n", "".join(f"{line[1:]}\n" for line in added)) for removed, *added in parts]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, which no extra installs")
def test_ray() -> None:
    printed, shown = _printed("ray_ranks.py")
    assert printed == shown
