"""Packs of whole sequences as the micro-batches of a pipeline, against each sequence by itself in float64."""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.capabilities.pipelining.building import _check_offsets as check_offsets
from moe_dispatch.errors import InputError, LayoutError
from moe_dispatch.layouts import Layout
from moe_dispatch.pipelining import build_stage, read_layout, share_layouts
from moe_dispatch.recompute import checkpoint
from moe_dispatch_testing import run_processes
from tests.pipelining.table import EXPERTS, HIDDEN, INNER, TOP_K, parameter
from tests.ranks import run_ranks

ROWS = 12  # of every micro-batch, with padding
LENGTHS = [  # of the sequences of each micro-batch, by data-parallel rank
    [[5, 3], [12], [1, 0, 4, 2], [4]],  # of the last the second tensor-parallel rank has no token
    [[2, 9], [], [6], [3, 3, 3]],  # no token in the second micro-batch
]
CASES: dict[str, dict[str, Any]] = {
    "2 stages": {"schedule": "1F1B", "mesh": (2, 2, 1), "num_stages": 2},
    "4 stages": {"schedule": "InterleavedZeroBubble", "mesh": (2, 2, 1), "num_stages": 4},
    "a stage on each rank": {"schedule": "GPipe", "mesh": (4, 1, 1), "num_stages": 4},
    "stages that learn shapes": {"schedule": "1F1B", "mesh": (2, 2, 1), "num_stages": 2, "probe": True},
    "tensor parallel": {"schedule": "1F1B", "mesh": (2, 1, 2), "num_stages": 2},
    "of another micro-batch": {"schedule": "1F1B", "mesh": (2, 2, 1), "num_stages": 2, "wrong": 1},
}


class Experts(Dispatcher):
    def __init__(self, config: DispatcherConfig, group: Any, first: Tensor, second: Tensor) -> None:
        super().__init__(config, group)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.grouped_mm(torch.tanh(sent.grouped_mm(sent.rows, self.first)), self.second)


class Layer(nn.Module):
    """A layer that looks back within a sequence, and experts, which depend on the place in the sequence."""

    def __init__(self, number: int, config: DispatcherConfig | None, mesh: DeviceMesh | None) -> None:
        super().__init__()
        group = None if mesh is None else mesh["ep" if mesh["ep"].size() > 1 else "tp"].get_group()
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        seed, self.number = 10 * number, number
        self.tp = None if mesh is None or mesh["tp"].size() == 1 else mesh["tp"].get_group()
        self.dense = nn.Parameter(parameter(seed, HIDDEN, HIDDEN).double())
        self.router = nn.Parameter(parameter(seed + 1, HIDDEN, EXPERTS).double())
        shapes = (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER, HIDDEN)
        first, second = (parameter(seed + n + 2, *s).double().chunk(size)[rank] for n, s in enumerate(shapes))
        if config is None:
            self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        else:
            self.experts = Experts(config, group if size > 1 else None, first, second)

    def forward(self, x: Tensor, packs: Tensor) -> Tensor:
        layout = read_layout(packs)
        assert isinstance(layout, THD)
        whole = x if self.tp is None else collectives.all_gather_tensor_autograd(x, 0, self.tp)
        ids, mixed = torch.zeros(len(whole), TOP_K, dtype=torch.int64), torch.zeros_like(whole)
        for start, length in zip(layout.owned.tolist(), layout.real.diff().tolist(), strict=False):
            rows = slice(start, start + length)
            mixed[rows], ids[rows] = self.looked_back(whole[rows]), self.chosen(length)
        mine: Layout = layout
        if self.tp is not None:
            mine = layout.shard(self.tp.rank(), self.tp.size())
            mixed, ids = (each.chunk(self.tp.size())[self.tp.rank()] for each in (mixed, ids))
        return checkpoint(self.joined, x, mixed, ids, mine) if self.number % 2 else self.joined(x, mixed, ids, mine)

    def joined(self, x: Tensor, mixed: Tensor, ids: Tensor, layout: Layout) -> Tensor:
        x = x + mixed
        y: Tensor = x + self.experts(x, Routing(ids, self.weights(x, ids)), layout)
        return y

    def looked_back(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, len(x) + 1, dtype=x.dtype).unsqueeze(1)
        return torch.tanh(x.cumsum(0) / counts @ self.dense)

    def chosen(self, length: int) -> Tensor:
        place = torch.arange(length).unsqueeze(1)
        return (3 * place + self.number + torch.tensor([0, 1]) * (1 + length % 2 + place % 2)) % EXPERTS

    def weights(self, x: Tensor, ids: Tensor) -> Tensor:
        return (x @ self.router).softmax(1).gather(1, ids)

    def of_sequence(self, x: Tensor) -> Tensor:
        """The layer for one sequence, without a dispatcher."""
        x = x + self.looked_back(x)
        ids = self.chosen(len(x))
        weights, rows = self.weights(x, ids), x
        for number in range(EXPERTS):
            share = (weights * (ids == number)).sum(1, keepdim=True)
            x = x + share * (torch.tanh(rows @ self.first[number]) @ self.second[number])
        return x


def pack(lengths: list[int]) -> THD:
    """Sequences, and one without a token that owns the padding."""
    cu = [0, *accumulate(lengths)]
    return THD([*cu, cu[-1]], cu_seqlens_padded=[*cu, ROWS], max_seqlen=max(lengths, default=0))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """All packs of a rank. Padding holds large values, and its target is NaN."""
    generator = torch.Generator().manual_seed(rank)
    x, target = torch.randn(2, len(LENGTHS[rank]) * ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    for number, lengths in enumerate(LENGTHS[rank]):
        padding = slice(number * ROWS + sum(lengths), (number + 1) * ROWS)
        x[padding], target[padding] = 100.0, float("nan")
    return x, target


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return torch.where(target.isnan(), 0, y - target.nan_to_num()).square().sum()


def wanted(ranks: int, num_stages: int) -> tuple[list[dict[str, Tensor]], list[list[float]]]:
    """Gradients of one process by stage, and losses by data-parallel rank and micro-batch."""
    layers, losses = [Layer(number, None, None) for number in range(num_stages)], list[list[float]]()
    for rank in range(ranks):
        losses.append([])
        x, target = (each.split(ROWS) for each in batch(rank))
        for lengths, *both in zip(LENGTHS[rank], x, target, strict=True):
            loss = torch.zeros((), dtype=torch.float64)
            for y, goal in zip(*(each[: sum(lengths)].split(lengths) for each in both), strict=True):
                for layer in layers:
                    y = layer.of_sequence(y)
                loss = loss + loss_of(y, goal)
            if loss.requires_grad:
                loss.backward()
            losses[-1].append(float(loss.detach()))
    return [{name: p.grad for name, p in layer.named_parameters() if p.grad is not None} for layer in layers], losses


def trained(
    schedule: str, mesh: DeviceMesh, num_stages: int, *, probe: bool = False, wrong: int | None = None
) -> dict[str, float]:
    """Run two steps, and return how far losses and gradients are from those of one process, each beside its size.

    Args:
        wrong: A stage that gets the layouts of other micro-batches.
    """
    pp, tp = mesh["pp"], mesh["tp"]
    replica = mesh["pp", "tp"]._flatten().get_group()
    backend = "local" if mesh["ep"].size() * tp.size() == 1 else "alltoall"
    config = DispatcherConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, backend=backend)
    stage, rank = pp.get_local_rank(), mesh["ep"].get_local_rank()
    mine = [*range(stage, num_stages, pp.size())]
    layers = {number: Layer(number, config, mesh) for number in mine}
    part = ROWS // tp.size()
    shape, device = torch.empty(part, HIDDEN, dtype=torch.float64, device="meta"), torch.device("cpu")
    built = [
        PipelineStage(layer, number, num_stages, device, group=pp.get_group())
        if probe
        else build_stage(layer, number, num_stages, inputs=shape, device=device, group=pp.get_group())
        for number, layer in layers.items()
    ]
    run = getattr(schedules, f"Schedule{schedule}")(
        built if len(built) > 1 else built[0], len(LENGTHS[rank]), loss_fn=loss_of, scale_grads=False
    )
    inputs = [torch.cat(each.split(part)[tp.get_local_rank() :: tp.size()]) for each in batch(rank)]
    for _ in range(2):  # the second step is like the first
        for layer in layers.values():
            layer.zero_grad()
        packs = share_layouts([pack(each) for each in LENGTHS[rank]] if replica.rank() == 0 else None, replica)
        if wrong == stage:
            packs = packs.roll(1, 0)
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": inputs[1], "losses": losses} if num_stages - 1 in mine else {}
        run.step(*([inputs[0]] if 0 in mine else []), packs=packs, **last)
    grads, of_rank = wanted(mesh["ep"].size(), num_stages)
    far = {}
    if losses:
        found = torch.stack(losses).detach()
        dist.all_reduce(found, group=tp.get_group())
        far["losses"] = float((found - found.new_tensor(of_rank[rank])).abs().max() / max(of_rank[rank]))
    for number, layer in layers.items():
        group = layer.experts.group
        layer.experts.close()
        for name, p in layer.named_parameters():
            want, grad = grads[number][name.removeprefix("experts.")], p.grad
            assert grad is not None
            if name.startswith("experts.") and backend != "local":
                assert group is not None
                want = want.chunk(group.size())[group.rank()]
            else:
                for each in ("ep", "tp"):
                    dist.all_reduce(grad, group=mesh[each].get_group())
            far[f"{number}.{name}"] = float((grad - want).norm() / want.norm())
    return far


def refused(mesh: DeviceMesh, **keywords: Tensor) -> str:
    """The error of the first step of 4 micro-batches with a keyword."""
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    shape = torch.empty(8, HIDDEN, device="meta")
    stage = build_stage(nn.Linear(HIDDEN, HIDDEN), rank, 2, inputs=shape, device="cpu", group=group)
    run: Any = schedules.Schedule1F1B(stage, 4, loss_fn=loss_of)
    x = torch.zeros(32, HIDDEN)
    with pytest.raises(InputError) as caught:
        run.step(*([x] if rank == 0 else []), **keywords, **({"target": x} if rank == 1 else {}))
    return str(caught.value)


def body(rank: int) -> dict[str, Any]:
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for case in CASES.values():
        shape = case["mesh"]
        meshes.setdefault(shape, init_device_mesh("cpu", shape, mesh_dim_names=("pp", "ep", "tp")))
    found: dict[str, Any] = {name: trained(**{**case, "mesh": meshes[case["mesh"]]}) for name, case in CASES.items()}
    mesh = meshes[2, 2, 1]
    found["offsets"] = refused(mesh, cu_seqlens=torch.arange(0, 33, 4))
    group = mesh["pp"].get_group()
    found["layouts"] = refused(mesh, packs=share_layouts([THD([0, 4])] * 8 if group.rank() == 0 else None, group))
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(body, 4, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "wrong" not in case])
def test_packs_give_losses_and_gradients_of_single_sequences(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert max(rank[name].values()) < 1e-12, rank[name]
    assert sum("losses" in rank[name] for rank in ranks) == (1 if CASES[name]["mesh"][0] == 4 else 2)


def test_layouts_of_another_micro_batch_are_noticed(ranks: list[dict[str, Any]]) -> None:
    """What the test above must catch: one of the stages has the right rows with the layouts of others."""
    for rank in ranks:
        assert max(rank["of another micro-batch"].values()) > 1e-2


def test_offsets_that_the_schedule_cuts_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "got cu_seqlens of 9 entries, which the schedule has cut into 4 parts" in rank["offsets"]


def test_more_layouts_than_micro_batches_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["layouts"].startswith("read_layout: row must be the row of one micro-batch, (1, W), got (2,")


@pytest.mark.parametrize("offsets", [[0, 4, 8, 0, 3, 8], [0, 8, 0, 8], [0, 0, 0, 0]])
def test_offsets_of_each_micro_batch_are_taken(offsets: list[int]) -> None:
    whole = torch.tensor(offsets)
    check_offsets("cu_seqlens", whole.tensor_split(2)[0], 2)
    check_offsets("cu_seqlens", whole.view(2, -1).tensor_split(2)[0], 2)
    check_offsets("cu_seqlens", whole, 2)  # not cut
    check_offsets("cu_seqlens", torch.arange(0, 40, 4)[:3], 2)  # not cut by a schedule


@pytest.mark.parametrize(("number", "parts"), [(9, 4), (9, 2), (10, 3)])
def test_offsets_of_a_whole_batch_are_refused(number: int, parts: int) -> None:
    with pytest.raises(InputError, match=f"got cu_seq_lens_q of {number} entries, .* cut into {parts} parts"):
        check_offsets("cu_seq_lens_q", torch.arange(number).tensor_split(parts)[0], parts)


def test_layouts_must_have_one_number_of_rows() -> None:
    def share(group: dist.ProcessGroup) -> None:
        with pytest.raises(LayoutError, match=r"got \[4, 5\]. Let each pack end in padding: .*\[..., 5\]"):
            share_layouts([THD([0, 4]), THD([0, 2, 5])] if group.rank() == 1 else None, group, src=1)

    run_ranks(share, 2)


@pytest.mark.parametrize("given", [None, []])
def test_layouts_come_from_src(given: list[Layout] | None) -> None:
    def share(group: dist.ProcessGroup) -> None:
        with pytest.raises(LayoutError, match=r"share_layouts: exactly rank 0 \(src\) must give a layout"):
            share_layouts(given, group)

    run_ranks(share, 2)


def test_layouts_arrive_as_they_were_given() -> None:
    layouts = [pack([1]), THD([0, 3, 7, 9, 9], [0, 4, 8, 10, 12], 5).shard(0, 2), pack([ROWS // 2])]

    def share(group: dist.ProcessGroup) -> list[Layout]:
        table = share_layouts(layouts if group.rank() == 0 else None, group)
        return [read_layout(row) for row in table.tensor_split(len(layouts))]

    with pytest.raises(LayoutError):  # a shard of half the rows
        run_ranks(share, 2)
    layouts[1] = THD([0, 3, 7, 9, 9], [0, 4, 8, 10, 12], 5)
    for arrived in run_ranks(share, 2):
        assert list(map(repr, arrived)) == list(map(repr, layouts))


@pytest.mark.parametrize("shape", [(2, 5), (0, 5), (5,)])
def test_a_row_is_that_of_one_micro_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"read_layout: row must be the row of one micro-batch, \(1, W\), got"):
        read_layout(torch.zeros(shape, dtype=torch.int64))
