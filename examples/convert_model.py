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

import argparse
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_dispatch import Dispatcher, DispatcherConfig, MoEDispatchError, Routing
from moe_dispatch.cli.place import Place, alone, describe, joined
from moe_dispatch.cli.ranks import RankFailed, run_ranks

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 128, 8, 2
COMPARED = ("alltoall", "allgather", "local")
# float32 keeps seven digits, and sums of some hundred terms in another order lose one or two of them.
ALLOWED = 1e-5

Group = dist.ProcessGroup | None
Show = Callable[[object], None]


# Before: all experts on every rank.
class PlainMoE(nn.Module):
    """A router, and experts of which each token goes to the top_k that score it best."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, inner))
        self.up = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for matrices in (self.gate, self.up, self.down):
            nn.init.normal_(matrices, std=matrices.shape[1] ** -0.5)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        inner = F.silu(rows @ self.gate[index]) * (rows @ self.up[index])
        return inner @ self.down[index]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x.flatten(0, 1)).softmax(dim=-1)
        weights, ids = scores.topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = x.flatten(0, 1)
        y = torch.zeros_like(rows)
        for index in range(len(self.gate)):
            token, slot = (ids == index).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.expert(index, rows[token]) * weights[token, slot, None])
        return y.view_as(x)


# After: each rank holds its share of them.
class ExpertParallelMoE(Dispatcher):
    """A router, and experts of which each token goes to the top_k that score it best."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, backend: str, group: Group) -> None:
        super().__init__(DispatcherConfig(backend=backend, num_experts=experts, top_k=top_k, hidden_size=hidden), group)
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        experts //= group.size() if group else 1
        self.gate = nn.Parameter(torch.empty(experts, hidden, inner))
        self.up = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for matrices in (self.gate, self.up, self.down):
            nn.init.normal_(matrices, std=matrices.shape[1] ** -0.5)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        inner = F.silu(rows @ self.gate[index]) * (rows @ self.up[index])
        return inner @ self.down[index]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x.flatten(0, 1)).softmax(dim=-1)
        weights, ids = scores.topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # it routes by itself
        weights, ids = self.route(x)
        sent = self.dispatch(x, Routing(ids, weights))
        parts = sent.rows.split(sent.tokens_per_expert_list)
        out = [self.expert(index, rows) for index, rows in enumerate(parts)]
        return self.combine(torch.cat(out), sent)


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
    f"{name:>10}" for name in ("output", "tokens", "gate", "up", "down", "router")
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
    try:
        return run_and_report(_parser().parse_args(arguments))
    except (RankFailed, MoEDispatchError, ValueError) as error:
        print(f"convert_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert_model: interrupted, all ranks are ended.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", help="compare this one only; local is on one rank")
    parser.add_argument("--ranks", type=int, help="processes (default: 4; under torchrun its WORLD_SIZE)")
    return parser


def run_and_report(options: argparse.Namespace) -> int:
    """Compare, with a line for each backend when it is done; 1 where one differs.

    Raises:
        ValueError: what is asked for does not fit together.
    """
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    ranks = (world or 4) if options.ranks is None else options.ranks
    if ranks < 1 or world not in (None, ranks):
        limit = "1 or more" if world is None else f"torchrun's WORLD_SIZE ({world})"
        raise ValueError(f"--ranks must be {limit}, got {ranks}. Leave --ranks out.")
    rank, ranks_here = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    show: Show = partial(print, flush=True) if rank == 0 else lambda line: None
    show(f"{len(changed_lines())} lines changed; on {describe(ranks_here)}, parts of the largest number:\n{HEADINGS}")
    backends = COMPARED if options.backend is None else (options.backend,)
    made = compare_shared([name for name in backends if name != "local"], ranks, ranks_here, show)
    if rank == 0 and "local" in backends:
        made += compare_all(["local"], alone(), show)
    return int(not all(comparison.same for comparison in made))


def compare_shared(backends: Sequence[str], ranks: int, ranks_here: int, show: Show) -> list[Comparison]:
    """On processes that torchrun has started, this one among them, or on new ones; as rank 0 has it."""
    if not backends:
        return []
    if "RANK" not in os.environ:
        made: list[Comparison] = run_ranks(partial(compare_all, backends), ranks, show)
        return made
    with joined(local_rank=int(os.environ["LOCAL_RANK"]), ranks_here=ranks_here) as place:
        return compare_all(backends, place, show)


if __name__ == "__main__":
    sys.exit(main())
