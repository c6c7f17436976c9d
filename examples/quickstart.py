"""Move tokens between two ranks and check the result: ``torchrun --nproc-per-node 2 examples/quickstart.py``."""

import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher

dist.init_process_group("gloo")
rank = dist.get_rank()

config = DispatcherConfig(num_experts=4, top_k=2, hidden_size=8)  # backend="auto" is alltoall here
dispatcher = build_dispatcher(config, dist.group.WORLD)  # rank 0 owns experts 0 and 1, rank 1 owns experts 2 and 3

x = torch.randn(3 + 2 * rank, 8)  # 3 tokens on rank 0, 5 tokens on rank 1
topk_ids = torch.tensor([[0, 3]]).expand(len(x), 2)  # your router: here each token goes to experts 0 and 3
topk_weights = torch.full((len(x), 2), 0.5)

sent = dispatcher.dispatch(x, Routing(topk_ids, topk_weights))
outputs = sent.rows * (rank + 1)  # your experts: here rank 0 returns the row, and rank 1 twice the row
y = dispatcher.combine(outputs, sent)  # one row for each row of x

rows = sent.tokens_per_expert_list
print(f"rank {rank}: {len(x)} tokens, rows per expert {rows}, y == 1.5 * x: {torch.equal(y, 1.5 * x)}\n", end="")
dist.destroy_process_group()
