"""Case 2, Megatron-LM #4816: packed sequences of any length on every rank, through deepep and hybridep."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch import Dispatched, Dispatcher, DispatcherConfig, Plan, Routing, build_dispatcher
from moe_dispatch_testing import count_collectives, run_processes
from moe_dispatch_testing.emulation import EmulatedHang, emulated_deep_ep
from moe_dispatch_testing.ranks import thread_group
from tests.deep_ep_backends.vendors import backend_of
from tests.dispatchers.layer import outcomes
from tests.emulation.hybrid_case import make_sources, open_buffer, sent
from tests.integration.deep_ep_users.dense import TOLERANCE, gradient, worst_row
from tests.integration.needs import needs
from tests.ranks import run_ranks
from tests.sharded.grid import Grid
from tests.sharded.model import Sizes, Whole, every_expert, parameters, run_whole
from tests.sharded.packing import Packed
from tests.sharded.part import Job, Outcome, apply_experts, run_job

V1, V2 = "v1.2.1", "v2-2.1.0"
EQUAL_ROWS, ANY_ROWS = "hybridep-94a9f8f", "hybridep-744"
RELEASES = {V1: "deepep", V2: "deepep", EQUAL_ROWS: "hybridep", ANY_ROWS: "hybridep"}
RANKS, PAD_MULTIPLE = 4, 16
SIZES = Sizes(layers=2, hidden=256, inner=16)  # 256 columns are the fewest that deep_ep v1 takes
# By step and rank: 14, 3, 0 and 37 tokens; then a rank without rows.
STEPS = (
    (
        Packed(lengths=(5, 9), padded=(8, 16), seed=0),
        Packed(lengths=(3,), padded=(4,), seed=1),
        Packed(lengths=(0, 0), padded=(8, 4), seed=2),
        Packed(lengths=(31, 0, 6), padded=(40, 8, 8), seed=3),
    ),
    (
        Packed(lengths=(70,), padded=(72,), seed=4),
        Packed(lengths=(), padded=(), seed=5),
        Packed(lengths=(1, 1, 1), padded=(4, 4, 4), seed=6),
        Packed(lengths=(12,), padded=(12,), seed=7),
    ),
)


def fields_of(release: str, **fields: Any) -> dict[str, Any]:
    backend = {"name": RELEASES[release], "emulate": release}
    return {"backend": backend, "pad_multiple": PAD_MULTIPLE, "wire": "bfloat16", **fields}


def config(release: str, **fields: Any) -> DispatcherConfig:
    sizes = {"num_experts": SIZES.experts, "top_k": SIZES.top_k, "hidden_size": SIZES.hidden}
    return DispatcherConfig(**{**sizes, **fields_of(release, **fields)})


# Any number of tokens on each rank.


def routing_of(batch: Packed) -> Routing:
    weights_TK = batch.random(SIZES.top_k, salt=2).softmax(1)
    return Routing(batch.random(SIZES.experts, salt=1).topk(SIZES.top_k).indices, weights_TK.requires_grad_())


def layer(
    dispatcher: Dispatcher, group: dist.ProcessGroup, batch: Packed, plan: Plan | None = None
) -> tuple[dict[str, Tensor], Dispatched]:
    """Output and gradients of a layer on one rank, whose rows that are no tokens hold NaN."""
    x_TD = batch.random(SIZES.hidden).float().masked_fill(~batch.real_T.unsqueeze(1), float("nan")).requires_grad_()
    given = routing_of(batch)
    weights_TK = given.topk_weights.detach().float().requires_grad_()
    own = [parameters(SIZES)[0][name].chunk(group.size())[group.rank()].float() for name in ("up", "down")]
    up_LDF, down_LFD = (part.requires_grad_() for part in own)
    sent = dispatcher.dispatch(x_TD, Routing(given.topk_ids, weights_TK), plan or batch.layout)
    y_TD = dispatcher.combine(apply_experts(sent, up_LDF, down_LFD), sent)
    y_TD.backward(batch.random(SIZES.hidden, salt=3).float())
    leaves = {"x": x_TD, "weights": weights_TK, "up": up_LDF, "down": down_LFD}
    return {"y": y_TD.detach()} | {name: gradient(leaf) for name, leaf in leaves.items()}, sent


def dense(step: tuple[Packed, ...]) -> list[dict[str, Tensor]]:
    """The same of all ranks in float64: rows that are no tokens get zero, and give zero."""
    experts = {name: parameters(SIZES)[0][name].requires_grad_() for name in ("up", "down")}
    found = []
    for batch in step:
        x_TD, given = batch.random(SIZES.hidden).requires_grad_(), routing_of(batch)
        y_TD = every_expert(x_TD, experts, given.topk_ids, given.topk_weights) * batch.real_T.unsqueeze(1)
        y_TD.backward(batch.random(SIZES.hidden, salt=3))
        found.append({"y": y_TD.detach(), "x": gradient(x_TD), "weights": gradient(given.topk_weights)})
    for name, whole in experts.items():
        for of_rank, part in zip(found, gradient(whole).chunk(len(step)), strict=True):
            of_rank[name] = part
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_counts_that_vary_by_rank_and_step_are_the_dense_layer(release: str) -> None:
    """Counts per expert are exact, and padding is trimmed."""

    def body(group: dist.ProcessGroup) -> list[tuple[dict[str, Tensor], Dispatched]]:
        dispatcher = build_dispatcher(config(release), group)
        found = [layer(dispatcher, group, step[group.rank()]) for step in STEPS]
        dispatcher.close()
        return found

    by_rank = run_ranks(body, RANKS)
    for number, step in enumerate(STEPS):
        ids = torch.cat([routing_of(batch).topk_ids[batch.real_T] for batch in step])
        counts = ids.flatten().bincount(minlength=SIZES.experts).view(RANKS, -1).tolist()
        for rank, (batch, want) in enumerate(zip(step, dense(step), strict=True)):
            got, sent = by_rank[rank][number]
            errors = {name: worst_row(got[name], tensor) for name, tensor in want.items()}
            assert max(errors.values()) <= TOLERANCE, f"rank {rank} in step {number}: {errors}"
            assert sent.real_tokens_per_expert.tolist() == counts[rank]
            padded = [count + -count % PAD_MULTIPLE for count in counts[rank]]
            assert sent.tokens_per_expert.tolist() == padded
            assert len(sent.rows) == sum(padded)
            assert not any(got[name][~batch.real_T].any() for name in ("y", "x", "weights"))


@pytest.mark.parametrize(
    ("release", "row_counts"),
    [(V1, "agree"), (V2, "static"), (EQUAL_ROWS, "static"), (EQUAL_ROWS, "agree"), (ANY_ROWS, "agree")],
)
def test_one_plan_of_a_micro_batch_serves_all_layers(release: str, row_counts: str) -> None:
    """On the control group: one all-reduce of a micro-batch where sizes are agreed on, nothing where static."""
    store = HashStore()

    def body(group: dist.ProcessGroup) -> dict[str, int]:
        control = thread_group(store, group.rank(), group.size())
        fields = config(release, row_counts=row_counts, max_tokens_per_rank=100)
        layers = [build_dispatcher(fields, group, control_group=control) for _ in range(3)]
        with count_collectives(control) as seen:
            for step in STEPS:
                plan = layers[0].plan(step[group.rank()].layout)
                for dispatcher in layers:
                    layer(dispatcher, group, step[group.rank()], plan)
        for dispatcher in layers:
            dispatcher.close()
        return dict(seen.counts)

    agrees = row_counts == "agree" and release != V1  # v1 takes any counts, and needs to know none
    assert run_ranks(body, 2) == [{"allreduce": len(STEPS)} if agrees else {}] * 2


# The same by hand: a training loop that hands each rank's own row count to the library.


def test_own_counts_by_hand_hang_in_hybridep() -> None:
    sources = make_sources([64, 128])
    for result in outcomes(
        lambda group: sent(open_buffer(EQUAL_ROWS, group), sources[group.rank()], pad_multiple=16), 2
    ):
        assert isinstance(result, EmulatedHang)
        assert "every rank must pass the same num_of_tokens_per_rank, got [64, 128] by rank" in str(result)


@pytest.mark.parametrize("release", [EQUAL_ROWS, ANY_ROWS])
def test_buffers_of_own_size_by_hand_hang_in_hybridep(release: str) -> None:
    """DeepEP #604: one rank enters the all-gather of a larger buffer, its peer does not."""

    def body(group: dist.ProcessGroup) -> None:
        for counts in ((640, 640), (640, 1280)):
            buffer = open_buffer(release, group, rows=counts[group.rank()])
            sent(buffer, make_sources(counts)[group.rank()], pad_multiple=16)

    for result in outcomes(body, 2):
        assert isinstance(result, EmulatedHang), repr(result)


def test_buffers_of_own_size_by_hand_hang_in_deepep_v2() -> None:
    torch.use_deterministic_algorithms(False)  # it refuses to run where memory is filled; conftest.py restores it

    def body(group: dist.ProcessGroup) -> None:
        rows = (64, 128)[group.rank()]
        buffer: Any = emulated_deep_ep(V2).ElasticBuffer(group, num_max_tokens_per_rank=rows, hidden=256, num_topk=2)
        ids, weights = torch.tensor([[0, 5]]).repeat(rows, 1), torch.ones(rows, 2)
        buffer.dispatch(torch.ones(rows, 256).bfloat16(), topk_idx=ids, topk_weights=weights, num_experts=8)

    for result in outcomes(body, 2):
        assert isinstance(result, EmulatedHang), repr(result)


# Buffers within a node.


@pytest.mark.parametrize(("size", "ranks_per_node"), [(2, None), (4, 4), (8, 8)])
def test_no_rdma_buffer_inside_a_node(size: int, ranks_per_node: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its size asked for: a build without internode support may not know (their words in #4816)."""

    def asked(self: Any, hidden_bytes: int, num_ranks: int) -> int:
        raise AssertionError("the size of an RDMA buffer was asked for")

    monkeypatch.setattr(emulated_deep_ep(V1).Config, "get_rdma_buffer_size_hint", asked)

    def body(group: dist.ProcessGroup) -> int:
        node = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
        backend = {"name": "deepep", "emulate": V1, **node}
        dispatcher = build_dispatcher(config(V1, backend=backend, num_experts=2 * size), group)
        found: int = backend_of(dispatcher).buffer().num_rdma_bytes
        dispatcher.close()
        return found

    assert run_ranks(body, size) == [0] * size


# The proxy set-up as eight processes: rows that tensor parallelism with sequence parallelism and context parallelism
# divide, and expert parallelism.

GRID = Grid(tp=2, cp=2, dp=2)
# Ranks bring other counts in each micro-batch. In the second, half of the ranks have rows and no token among them; in
# the third, half of the ranks have no row at all.
MICRO_BATCHES = (
    (Packed(lengths=(13, 5, 30), padded=(16, 8, 32), seed=0), Packed(lengths=(7,), padded=(8,), seed=1)),
    (Packed(lengths=(0, 0), padded=(8, 16), seed=2), Packed(lengths=(21, 3, 1), padded=(24, 8, 16), seed=3)),
    (Packed(lengths=(9,), padded=(16,), seed=4), Packed(lengths=(), padded=(), seed=5)),
)
# Where experts lie: over neighbours, as Megatron lays them out with expert tensor parallelism 1 (a tensor-parallel
# pair) and 2 (a context-parallel pair, each expert cut in two; what #4816 tests); and over the halves of the data.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "etp 1": {"expert_groups": GRID.expert_groups(ep=2)},
    "etp 2": {"expert_groups": GRID.expert_groups(ep=2, etp=2), "etp": 2},
    "over data": {"expert_groups": GRID.groups("dp")},
}
STATIC = {"row_counts": "static", "max_tokens_per_rank": 16}
PROXY: dict[str, tuple[dict[str, Any], str]] = {
    "alltoall": ({"backend": "alltoall", "pad_multiple": PAD_MULTIPLE}, "etp 1"),
    "deepep v1": (fields_of(V1), "over data"),
    "deepep v2": (fields_of(V2), "etp 2"),
    "hybridep, equal rows": (fields_of(EQUAL_ROWS), "etp 1"),
    "hybridep, any rows": (fields_of(ANY_ROWS), "etp 2"),
    "deepep v2, static": (fields_of(V2, **STATIC), "over data"),
    "hybridep, static": (fields_of(EQUAL_ROWS, **STATIC), "over data"),
}


def on_rank(rank: int) -> dict[str, Outcome]:
    return {
        name: run_job(rank, Job(grid=GRID, sizes=SIZES, step=MICRO_BATCHES, fields=fields, **PLACEMENTS[placement]))
        for name, (fields, placement) in PROXY.items()
    }


@functools.cache
def proxy() -> Mapping[str, Outcome]:
    """What came of every job, on rank 0: eight processes take most of their time to import torch."""
    by_rank: list[Mapping[str, Outcome]] = run_processes(on_rank, GRID.size, timeout=datetime.timedelta(minutes=5))
    return by_rank[0]


@functools.cache
def whole() -> Whole:
    return run_whole(SIZES, MICRO_BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROXY)
def test_eight_ranks_have_the_gradients_and_counts_of_one(name: str) -> None:
    found, tolerance = proxy()[name], 1e-5 if name == "alltoall" else TOLERANCE
    errors = {part: worst_row(found.tensors[part], tensor) for part, tensor in whole().tensors.items()}
    assert {part: error for part, error in errors.items() if not error <= tolerance} == {}
    shards = PLACEMENTS[PROXY[name][1]].get("etp", 1)
    assert found.tensors["tokens"].tolist() == (shards * whole().tokens_per_expert).tolist()
    # Sizes are agreed on once per micro-batch, and not for each layer. Those that need no agreement exchange nothing.
    agrees = name not in ("alltoall", "deepep v1") and "static" not in name
    assert found.agreements == ({"allreduce": len(MICRO_BATCHES)} if agrees else {})


@pytest.mark.integration
@needs("megatron")[1]
def test_ranks_stand_where_megatron_puts_them() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that transformer-engine is not there
        from megatron.core.parallel_state import RankGenerator

    def placed(axis: str, **sizes: int) -> tuple[tuple[int, ...], ...]:
        generator = RankGenerator(pp=1, order="tp-cp-ep-dp-pp", **sizes)
        return tuple(map(tuple, generator.get_ranks(axis)))

    for axis in ("tp", "cp", "dp"):
        assert placed(axis, tp=2, ep=1, dp=2, cp=2) == GRID.groups(axis)
    for etp in (1, 2):
        found = placed("tp-ep", tp=etp, ep=2, dp=GRID.size // (etp * 2), cp=1)
        assert found == PLACEMENTS[f"etp {etp}"]["expert_groups"]
