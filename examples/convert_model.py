r"""Convert a plain mixture-of-experts block to expert parallelism, and compare the results of both blocks.

    python examples/convert_model.py                                  # alltoall and allgather on 4 ranks, local on 1
    python examples/convert_model.py --backend alltoall --ranks 2     # one backend
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/convert_model.py --backend alltoall                  # on each of two machines; HOST is the first

Every rank has its own tokens, and another number of them; rank 1 has none. Each rank runs the plain block, with all
experts, on its tokens. The gradients of the converted block must be the sums of these gradients over ranks. The script
prints the largest differences of outputs and gradients, relative to the largest number of each tensor. The exit status
is 1 if a difference is larger than rounding.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from launch import choose_ranks, choose_transport, exit_status, launch, make_parser, this_rank
from moe_dispatch import Dispatcher, DispatcherConfig, Routing

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 128, 8, 2
COMPARED = ("alltoall", "allgather", "local")
# float32 keeps seven digits. Sums of some hundred terms in another order lose one or two digits.
ALLOWED = 1e-5

Group = dist.ProcessGroup | None


class Experts(nn.Module):
    """Gated experts: all experts, or the experts of one rank."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, inner))
        self.up = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        for matrices in (self.gate, self.up, self.down):
            nn.init.normal_(matrices, std=matrices.shape[1] ** -0.5)

    def forward(self, index: int, rows: Tensor) -> Tensor:
        inner = F.silu(rows @ self.gate[index]) * (rows @ self.up[index])
        return inner @ self.down[index]


class Router(nn.Linear):
    """A linear router. It returns the weights and ids of the top_k experts with the highest score of each token."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__(hidden, experts, bias=False)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # weights and ids, not scores
        weights, ids = super().forward(x.flatten(0, 1)).softmax(dim=-1).topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), ids


# Before: every rank holds all experts.
class PlainMoE(nn.Module):
    """A router, and experts of which each token goes to the top_k that score it best."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = Router(hidden, experts, top_k)
        self.mlp = Experts(hidden, inner, experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        rows = x.flatten(0, 1)
        y = torch.zeros_like(rows)
        for index in range(len(self.mlp.gate)):
            token, slot = (ids == index).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.mlp(index, rows[token]) * weights[token, slot, None])
        return y.view_as(x)


# After: each rank holds its share of the experts.
class ExpertParallelMoE(Dispatcher):
    """A router, and experts of which each token goes to the top_k that score it best."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, backend: str, group: Group) -> None:
        super().__init__(DispatcherConfig(backend=backend, num_experts=experts, top_k=top_k, hidden_size=hidden), group)
        self.router = Router(hidden, experts, top_k)
        self.mlp = Experts(hidden, inner, self.num_local_experts)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # it routes by itself
        weights, ids = self.router(x)
        sent = self.dispatch(x, Routing(ids, weights))
        return self.combine(sent.per_expert(partial(self.mlp, index) for index in range(len(self.mlp.gate))), sent)


def changed_lines() -> list[str]:
    """Return the diff of the two blocks: removed lines with "-", and added lines with "+"."""
    before, after = (inspect.getsource(block).splitlines() for block in (PlainMoE, ExpertParallelMoE))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return [line for line in lines if not line.startswith("@@")]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Differences between the converted block and the plain block.

    Attributes:
        backend: Backend of the converted block.
        ranks: Number of ranks.
        differences: Largest difference of each tensor on any rank, relative to the largest number of the tensor.
    """

    backend: str
    ranks: int
    differences: dict[str, float]

    @property
    def same(self) -> bool:
        """True if all differences are within rounding."""
        return all(difference <= ALLOWED for difference in self.differences.values())

    def __str__(self) -> str:
        found = "".join(f"{difference:>10.1e}" for difference in self.differences.values())
        return f"{self.backend:10}{self.ranks:>5}{found}  {'same' if self.same else 'DIFFERENT'}"


HEADINGS = f"{'backend':10}{'ranks':>5}" + "".join(
    f"{name:>10}" for name in ("output", "tokens", "router", "gate", "up", "down")
)


def compare(group: Group, device: torch.device, backend: str) -> Comparison:
    """Run both blocks, forward and backward, with equal weights. Collective."""
    torch.manual_seed(0)
    plain = PlainMoE(HIDDEN, INNER, NUM_EXPERTS, TOP_K).to(device)
    block = ExpertParallelMoE(HIDDEN, INNER, NUM_EXPERTS, TOP_K, backend, group).to(device)
    block.load_state_dict({name: own_part(name, weight, group) for name, weight in plain.state_dict().items()})
    want, got = run(plain, group), run(block, group)
    for name, _ in plain.named_parameters():
        want[name] = own_part(name, reduced(want[name], dist.ReduceOp.SUM, group), group)
    got["router.weight"] = reduced(got["router.weight"], dist.ReduceOp.SUM, group)
    differences = {name: largest_difference(got[name], tensor, group) for name, tensor in want.items()}
    block.close()
    return Comparison(backend=backend, ranks=rank_and_size(group)[1], differences=differences)


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    return (0, 1) if group is None else (group.rank(), group.size())


def reduced(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """Return the sum or maximum of a tensor over ranks. Collective."""
    result = tensor.clone()
    if group is not None:
        dist.all_reduce(result, operation, group=group)
    return result


def own_part(name: str, whole: Tensor, group: Group) -> Tensor:
    """Return the part of a parameter that this rank holds: the whole router, or the share of its experts."""
    rank, size = rank_and_size(group)
    return whole if name.startswith("router") else whole.chunk(size)[rank]


def run(block: nn.Module, group: Group) -> dict[str, Tensor]:
    """Return the output for the tokens of this rank, and every gradient."""
    rank, _ = rank_and_size(group)
    length = 0 if rank == 1 else 16 + 7 * rank
    generator = torch.Generator().manual_seed(rank)
    x, upstream = torch.randn(2, 3, length, HIDDEN, generator=generator).to(next(block.parameters()).device)
    y = block(x.requires_grad_())
    y.backward(upstream)
    leaves = {"tokens": x, **dict(block.named_parameters())}
    return {"output": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def largest_difference(got: Tensor, want: Tensor, group: Group) -> float:
    """Return the largest difference on any rank, relative to the largest number; infinite if there is a NaN."""
    sizes = [tensor.abs().amax() if tensor.numel() else tensor.sum() for tensor in (got - want, want)]
    largest = torch.stack(sizes).detach().nan_to_num(nan=torch.inf)
    difference, scale = reduced(largest, dist.ReduceOp.MAX, group).tolist()
    return float(difference / scale) if scale else float("inf")


def compare_all(group: Group, device: torch.device, backends: Sequence[str]) -> list[Comparison]:
    """Compare one backend after the other. Rank 0 prints each comparison. Collective."""
    made = []
    for backend in backends:
        made.append(compare(group, device, backend))
        if rank_and_size(group)[0] == 0:
            print(made[-1], flush=True)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the backends that the arguments ask for, and return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--backend", help="compare this backend only; local runs on one rank")
    options = parser.parse_args(arguments)
    return exit_status("convert_model", lambda: run_and_report(options.backend, options.ranks))


def run_and_report(backend: str | None, asked: int | None) -> int:
    """Compare, and print a line for each backend. Return 1 if a backend differs.

    Raises:
        ValueError: The number of ranks does not fit.
    """
    ranks = choose_ranks(asked)
    if this_rank() == 0:
        heading = f"{len(changed_lines())} lines changed; differences over {choose_transport(ranks)}, relative to"
        print(f"{heading} the largest number of each tensor:\n{HEADINGS}", flush=True)
    backends = COMPARED if backend is None else (backend,)
    sharded = [name for name in backends if name != "local"]
    made: list[Comparison] = launch(compare_all, ranks, sharded) if sharded else []
    if "local" in backends and this_rank() == 0:
        made += compare_all(None, torch.device("cuda" if torch.cuda.is_available() else "cpu"), ["local"])
    return int(not all(comparison.same for comparison in made))


if __name__ == "__main__":
    sys.exit(main())
