r"""Compare a pipeline schedule that splits the backward with one that does not, on mixture-of-experts blocks.

    python examples/time_pipelines.py
    python examples/time_pipelines.py --tokens 512 --hidden 256 --steps 40
    torchrun --nproc-per-node 4 examples/time_pipelines.py

There are 4 stages, 2 on each rank, and each stage has 2 expert-parallel ranks. A stage is a block of four linear layers
and experts. The schedules are Interleaved1F1B and InterleavedZeroBubble, and a line has

- how often a block runs for each micro-batch under InterleavedZeroBubble: the largest of all stages,
- the exchanges of dispatchers in the passes for weights of one such step, on all ranks,
- the processor time of a step under InterleavedZeroBubble, of all ranks, divided by that under Interleaved1F1B. The two
  take turns, and the quotient is the median. On a busy machine it is noise.

Experts are plain, or those of ``moe_dispatch.lean``. They run without a checkpoint, with torch's, and with that of
``moe_dispatch.recompute`` ("ours"). The exit status is 1 if the schedules give other gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining import stage as stages
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from launch import DEFAULT_RANKS, choose_ranks, choose_transport, exit_status, launch, make_parser, this_rank
from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.lean import first_mm, last_mm, swiglu
from moe_dispatch.pipelining import build_stage
from moe_dispatch.recompute import checkpoint

EXPERTS, TOP_K, NUM_STAGES = 8, 2, 4
CHECKPOINTS: dict[str, Any] = {
    "none": lambda function, x: function(x),
    "torch's": lambda function, x: torch_checkpoint(function, x, use_reentrant=False),
    "ours": checkpoint,
}
LINES = (("plain", "none"), ("plain", "torch's"), ("plain", "ours"), ("lean", "none"), ("lean", "ours"))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is trained. ``tokens`` are those of a micro-batch of one rank."""

    tokens: int = 256
    hidden: int = 128
    inner: int = 256
    micro_batches: int = 8
    steps: int = 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The numbers of a line, as above. ``far``: distance of the schedules' gradients, divided by their norm."""

    experts: str
    checkpoint: str
    runs: float
    exchanges: int
    time_ratio: float
    far: float


class SwiGLU(Dispatcher):
    """The experts of this rank."""

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup, inner: int) -> None:
        super().__init__(config, group)
        shape = self.num_local_experts, config.hidden_size, inner
        self.gate, self.up = (nn.Parameter(torch.randn(shape) / config.hidden_size**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(shape).transpose(1, 2).contiguous() / inner**0.5)

    def run_experts(self, sent: Dispatched) -> Any:
        """Run them, lean ones if the rows have not been copied to experts."""
        if self.config.deliver == "packets":
            return last_mm(sent, first_mm(sent, self.gate, self.up), self.down, activation=swiglu)
        gate, up = (sent.grouped_mm(sent.rows, matrix) for matrix in (self.gate, self.up))
        return sent.grouped_mm(swiglu(gate, up), self.down)


class Block(nn.Module):
    """Four linear layers, a router and experts. It counts its runs."""

    def __init__(self, how: str, config: DispatcherConfig, group: dist.ProcessGroup, inner: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.how, self.runs = how, 0
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = SwiGLU(config, group, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block, in its checkpoint if it has one."""
        y: Tensor = CHECKPOINTS[self.how](self.compute, x)
        return y

    def compute(self, x: Tensor) -> Tensor:
        """Run the linear layers, the router and the experts."""
        self.runs += 1
        for linear in self.linears:
            x = x + torch.tanh(linear(x))
        weights, ids = self.router(x).softmax(1).topk(TOP_K)
        y: Tensor = x + self.experts(x, Routing(ids, weights))
        return y


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return the exit status."""
    parser = make_parser(__doc__)
    for name in Sizes.__dataclass_fields__:
        default = getattr(Sizes(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    return exit_status("time_pipelines", lambda: print_table(options))


def print_table(options: argparse.Namespace) -> int:
    """Measure all lines and print them. Return 1 if the schedules give other gradients."""
    if (ranks := choose_ranks(options.ranks)) != DEFAULT_RANKS:
        raise ValueError(f"--ranks must be {DEFAULT_RANKS}, got {ranks}. Leave --ranks out.")
    sizes = Sizes(**{name: getattr(options, name) for name in Sizes.__dataclass_fields__})
    if min(getattr(sizes, name) for name in Sizes.__dataclass_fields__) < 1:
        raise ValueError(f"sizes must be 1 or more, got {sizes}.")
    if sizes.micro_batches % 2:
        raise ValueError(f"--micro-batches must be even, got {sizes.micro_batches}. Interleaved schedules need it.")
    lines: list[Line] = launch(measure, ranks, sizes)
    if this_rank() == 0:
        print(f"{ranks} ranks over {choose_transport(ranks)}, {sizes}")
        print(table(lines))
    return int(any(line.far > 1e-4 for line in lines))


def table(lines: Sequence[Line]) -> str:
    """Return the lines as text, with headings."""
    found = ["experts  checkpoint  runs of a block  exchanges for weights  processor time, zero bubble / 1F1B"]
    for line in lines:
        numbers = f"{line.runs:15.2f}  {line.exchanges:21}  {line.time_ratio:34.2f}"
        found.append(f"{line.experts:7}  {line.checkpoint:10}  {numbers}")
    return "\n".join(found)


def measure(group: dist.ProcessGroup, device: torch.device, sizes: Sizes) -> list[Line]:
    """Measure all lines, as one rank of the group. Collective."""
    torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("pp", "ep"))
    return [measure_line(mesh, device, sizes, *line) for line in LINES]


def measure_line(mesh: DeviceMesh, device: torch.device, sizes: Sizes, experts: str, how: str) -> Line:
    """Run the same steps under both schedules. Collective."""
    group, rank, stage = mesh["ep"].get_group(), mesh["ep"].get_local_rank(), mesh["pp"].get_local_rank()
    config = DispatcherConfig(
        backend="alltoall",
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=sizes.hidden,
        deliver="packets" if experts == "lean" else "rows",
    )
    torch.manual_seed(rank + 2 * stage)
    blocks = {number: Block(how, config, group, sizes.inner).to(device) for number in (stage, stage + 2)}
    x = torch.randn(sizes.micro_batches * sizes.tokens, sizes.hidden, device=device)
    shape = torch.empty(sizes.tokens, sizes.hidden, device="meta")
    schedules: list[Any] = [
        kind(
            [
                build_stage(block, number, NUM_STAGES, inputs=shape, device=device, group=mesh["pp"].get_group())
                for number, block in blocks.items()
            ],
            sizes.micro_batches,
            loss_fn=lambda y, target: (y - target).square().mean(),
        )
        for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
    ]

    def step(schedule: Any) -> float:
        for block in blocks.values():
            block.zero_grad()
            block.runs = 0
        started = time.process_time()
        schedule.step(*([x] if 0 in blocks else []), **({"target": x} if NUM_STAGES - 1 in blocks else {}))
        return time.process_time() - started

    times, grads = [], []
    for schedule in schedules:
        with counted_exchanges(blocks[stage].experts) as exchanges:
            step(schedule)
        grads.append(
            torch.cat([p.grad.flatten() for b in blocks.values() for p in b.parameters() if p.grad is not None])
        )
        runs = max(block.runs for block in blocks.values()) / sizes.micro_batches
    for _ in range(sizes.steps):
        times.append([step(schedule) for schedule in schedules])
    blocks[stage].experts.close()
    far = float((grads[1] - grads[0]).norm() / grads[0].norm())
    largest, total = torch.tensor([runs, far], device=device), torch.tensor([len(exchanges)], device=device)
    sums = torch.tensor(times, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for each in (total, sums):
        dist.all_reduce(each)
    ratio = median((split / whole for whole, split in sums.tolist()))
    runs, far = largest.tolist()
    return Line(experts=experts, checkpoint=how, runs=runs, exchanges=int(total), time_ratio=ratio, far=far)


@contextmanager
def counted_exchanges(dispatcher: Dispatcher) -> Iterator[list[str]]:
    """Let the list get the name of each exchange in a pass for weights, on the channel of the dispatcher."""
    found, backward = list[str](), stages.stage_backward_weight

    def run(*args: Any, **kwargs: Any) -> Any:
        before = dispatcher.metrics()
        result = backward(*args, **kwargs)
        for name, count in (dispatcher.metrics() - before).collectives.items():
            found.extend([name] * count)
        return result

    stages.stage_backward_weight = run
    try:
        yield found
    finally:
        stages.stage_backward_weight = backward


if __name__ == "__main__":
    sys.exit(main())
