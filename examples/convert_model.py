r"""Take a plain mixture-of-experts block to expert parallel: before and after, and that they compute the same.

    python examples/convert_model.py                                  # alltoall and allgather on 4 ranks, local on 1
    python examples/convert_model.py --backend alltoall --ranks 2     # that one only
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/convert_model.py --backend alltoall                  # several machines

Every rank has other tokens and another number of them, the second none. Each runs the plain block, with all experts, on
its own tokens; the sum of these gradients over ranks is what the converted block must have. Prints by how much output
and gradients differ, as a part of the largest number there, and ends with 1 where that is more than rounding.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from command_line import choose_ranks, exit_status, make_parser
from moe_dispatch import Dispatcher, DispatcherConfig, Routing
from moe_dispatch.cli.place import Place, alone, describe
from moe_dispatch.cli.ranks import on_ranks, ranks_here, this_rank

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 128, 8, 2
COMPARED = ("alltoall", "allgather", "local")
# float32 keeps seven digits, and sums of some hundred terms in another order lose one or two of them.
ALLOWED = 1e-5

Group = dist.ProcessGroup | None
Show = Callable[[object], None]


class Experts(nn.Module):
    """Gated experts: all of them, or the share of one rank."""

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
    """A linear router: the weights and ids of the top_k experts that score a token best."""

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__(hidden, experts, bias=False)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # weights and ids, not scores
        weights, ids = super().forward(x.flatten(0, 1)).softmax(dim=-1).topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), ids


# Before: all experts on every rank.
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


# After: each rank holds its share of them.
class ExpertParallelMoE(Dispatcher):
    """A router, and experts of which each token goes to the top_k that score it best."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, backend: str, group: Group) -> None:
        super().__init__(DispatcherConfig(backend=backend, num_experts=experts, top_k=top_k, hidden_size=hidden), group)
        self.router = Router(hidden, experts, top_k)
        self.mlp = Experts(hidden, inner, experts // (group.size() if group else 1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # it routes by itself
        weights, ids = self.router(x)
        sent = self.dispatch(x, Routing(ids, weights))
        parts = sent.rows.split(sent.tokens_per_expert_list)
        return self.combine(torch.cat([self.mlp(index, rows) for index, rows in enumerate(parts)]), sent)


def changed_lines() -> list[str]:
    """What a diff of the two blocks shows: lines that went, with "-", and lines that came, with "+"."""
    before, after = (inspect.getsource(block).splitlines() for block in (PlainMoE, ExpertParallelMoE))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return [line for line in lines if not line.startswith("@@")]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """By how much the converted block differs from the plain one.

    Attributes:
        backend: of the converted block.
        ranks: that it ran on.
        differences: by tensor, the largest on any rank, as a part of the largest number there.
    """

    backend: str
    ranks: int
    differences: dict[str, float]

    @property
    def same(self) -> bool:
        """Whether rounding explains the differences."""
        return all(difference <= ALLOWED for difference in self.differences.values())

    def __str__(self) -> str:
        found = "".join(f"{difference:>10.1e}" for difference in self.differences.values())
        return f"{self.backend:10}{self.ranks:>5}{found}  {'same' if self.same else 'DIFFERENT'}"


HEADINGS = f"{'backend':10}{'ranks':>5}" + "".join(
    f"{name:>10}" for name in ("output", "tokens", "router", "gate", "up", "down")
)


def compare(backend: str, place: Place) -> Comparison:
    """Run both blocks, forward and backward, with the same weights. Collective."""
    torch.manual_seed(0)
    plain = PlainMoE(HIDDEN, INNER, NUM_EXPERTS, TOP_K).to(place.device)
    block = ExpertParallelMoE(HIDDEN, INNER, NUM_EXPERTS, TOP_K, backend, place.group).to(place.device)
    block.load_state_dict({name: held(name, weight, place) for name, weight in plain.state_dict().items()})
    want, got = run(plain, place), run(block, place)
    for name, _ in plain.named_parameters():
        want[name] = held(name, place.sum(want[name]), place)
    got["router.weight"] = place.sum(got["router.weight"])
    differences = {name: largest_difference(got[name], tensor, place) for name, tensor in want.items()}
    block.close()
    return Comparison(backend=backend, ranks=place.size, differences=differences)


def held(name: str, whole: Tensor, place: Place) -> Tensor:
    """What a rank holds of a parameter: all of the router, its share of the experts."""
    return whole if name.startswith("router") else whole.chunk(place.size)[place.rank]


def run(block: nn.Module, place: Place) -> dict[str, Tensor]:
    """The output for this rank's tokens, and every gradient."""
    length = 0 if place.rank == 1 else 16 + 7 * place.rank
    generator = torch.Generator().manual_seed(place.rank)
    x, upstream = torch.randn(2, 3, length, HIDDEN, generator=generator).to(place.device)
    y = block(x.requires_grad_())
    y.backward(upstream)
    leaves = {"tokens": x, **dict(block.named_parameters())}
    return {"output": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def largest_difference(got: Tensor, want: Tensor, place: Place) -> float:
    """Over all ranks, as a part of the largest number on any; infinite where there is a NaN."""
    sizes = [tensor.abs().amax() if tensor.numel() else tensor.sum() for tensor in (got - want, want)]
    largest = torch.stack(sizes).nan_to_num(nan=torch.inf)
    if place.group is not None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        place.group.allreduce([largest], options).wait()
    difference, scale = largest.tolist()
    return float(difference / scale) if scale else float("inf")


def compare_all(backends: Sequence[str], place: Place, show: Show) -> list[Comparison]:
    """One backend after the other on this rank; shows each comparison when it is made."""
    made = []
    for backend in backends:
        made.append(compare(backend, place))
        show(made[-1])
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the arguments ask for; the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--backend", help="compare this one only; local is on one rank")
    options = parser.parse_args(arguments)
    return exit_status("convert_model", lambda: run_and_report(options.backend, options.ranks))


def run_and_report(backend: str | None, asked: int | None) -> int:
    """Compare, with a line for each backend when it is done; 1 where one differs.

    Raises:
        ValueError: the number of ranks does not fit.
    """
    ranks, rank = choose_ranks(asked), this_rank()
    show: Show = partial(print, flush=True) if rank == 0 else lambda line: None
    where = describe(ranks_here(ranks))
    show(f"{len(changed_lines())} lines changed; on {where}, parts of the largest number:\n{HEADINGS}")
    backends = COMPARED if backend is None else (backend,)
    shared = [name for name in backends if name != "local"]
    made: list[Comparison] = on_ranks(partial(compare_all, shared), ranks, show) if shared else []
    if rank == 0 and "local" in backends:
        made += compare_all(["local"], alone(), show)
    return int(not all(comparison.same for comparison in made))


if __name__ == "__main__":
    sys.exit(main())
