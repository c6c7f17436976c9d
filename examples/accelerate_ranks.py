"""Train a layer under Hugging Face Accelerate: ``torchrun --nproc-per-node 2 examples/accelerate_ranks.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher


class Experts(torch.nn.Module):
    def __init__(self, count: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(1)  # all ranks draw all experts, and keep theirs
        matrices = torch.randn(count, 16, 16) / 4
        self.matrices = torch.nn.Parameter(matrices.chunk(group.size())[group.rank()].clone())

    def forward(self, sent: Dispatched) -> Tensor:
        return sent.grouped_mm(sent.rows, self.matrices)


def main() -> None:
    accelerator = Accelerator(cpu=True)  # joins the process group
    group = dist.group.WORLD
    assert group is not None
    dispatcher = build_dispatcher(DispatcherConfig.load(num_experts=8, top_k=2, hidden_size=16), group)
    experts, router = Experts(8, group), torch.nn.Linear(16, 8)
    optimizer = torch.optim.SGD([*router.parameters(), *experts.parameters()], lr=0.1)
    router, optimizer = accelerator.prepare(router, optimizer)  # not the experts

    generator = torch.Generator().manual_seed(group.rank())
    for step in range(3):
        x = torch.randn(4 + group.rank(), 16, generator=generator)  # each rank has a different number of tokens
        weights, ids = router(x).softmax(1).topk(2)
        sent = dispatcher.dispatch(x, Routing(ids, weights))
        loss = (dispatcher.combine(experts(sent), sent) - x).square().mean()
        accelerator.backward(loss)
        for parameter in experts.parameters():
            assert parameter.grad is not None
            parameter.grad /= group.size()  # a sum over the ranks so far; the router's gradient is the mean
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean'):.4f}")
    dispatcher.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
