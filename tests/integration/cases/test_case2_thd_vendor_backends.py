"""Case 2, Megatron-LM #4816: packed sequences of any length on every rank, through deepep and hybridep."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch import DispatcherConfig, build_dispatcher
from moe_dispatch_testing import count_collectives
from moe_dispatch_testing.emulation import EmulatedHang, emulated_deep_ep
from moe_dispatch_testing.ranks import thread_group
from tests.deep_ep_backends.vendors import backend_of
from tests.dispatchers.layer import outcomes
from tests.integration.cases import thd_grid, thd_layer
from tests.integration.cases.thd_by_hand import elastic_by_hand, hybridep_by_hand
from tests.integration.cases.thd_grid import GRID, PLACEMENTS, SIZES, STEP, allowed_ranks, reason_to_skip
from tests.integration.deep_ep_users.dense import TOLERANCE, worst_row
from tests.pages import run_page
from tests.ranks import run_ranks
from tests.sharded.grid import Place
from tests.sharded.model import Whole, run_whole
from tests.sharded.packing import Packed
from tests.sharded.run import Outcome

OLD_RULES, EQUAL_ROWS, ANY_ROWS = "hybridep-34152ae", "hybridep-94a9f8f", "hybridep-744"
RELEASES = {
    "v1.2.1": "deepep",
    "v2-2.1.0": "deepep",
    OLD_RULES: "hybridep",
    EQUAL_ROWS: "hybridep",
    ANY_ROWS: "hybridep",
}
RANKS = 4


def config(release: str, **fields: Any) -> DispatcherConfig:
    usual: dict[str, Any] = {
        "backend": {"name": RELEASES[release], "emulate": release},
        "num_experts": thd_layer.EXPERTS,
        "top_k": thd_layer.TOP_K,
        "hidden_size": thd_layer.HIDDEN,
        "pad_multiple": thd_layer.PAD_MULTIPLE,
        "wire_dtype": "bfloat16",
    }
    return DispatcherConfig(**usual | fields)


# Any number of tokens on each rank.


def results(release: str) -> list[list[thd_layer.Result]]:
    """Of each rank, step by step."""

    def body(group: dist.ProcessGroup) -> list[thd_layer.Result]:
        dispatcher = build_dispatcher(config(release), group)
        found = [thd_layer.sent_and_back(dispatcher, group, step[group.rank()]) for step in thd_layer.STEPS]
        dispatcher.close()
        return found

    return run_ranks(body, RANKS)


@pytest.mark.parametrize("release", RELEASES)
def test_counts_that_vary_by_rank_and_step_are_the_dense_layer(release: str) -> None:
    """Counts per expert are exact, and padding is trimmed."""
    by_rank, held = results(release), thd_layer.EXPERTS // RANKS
    require_dense(by_rank)
    for number, step in enumerate(thd_layer.STEPS):
        ids = torch.cat([thd_layer.ids_of(batch)[batch.real_T] for batch in step])
        counts = ids.flatten().bincount(minlength=thd_layer.EXPERTS).view(RANKS, held).tolist()
        for rank, batch in enumerate(step):
            got = by_rank[rank][number]
            assert list(got.real_tokens_per_expert) == counts[rank]
            assert list(got.tokens_per_expert) == [count + -count % thd_layer.PAD_MULTIPLE for count in counts[rank]]
            assert got.num_rows == sum(got.tokens_per_expert)
            assert got.y_TD.shape == (batch.num_rows, thd_layer.HIDDEN)
            for tensor in (got.y_TD, got.grad_x_TD, got.grad_weights_TK):
                assert bool((tensor[~batch.real_T] == 0).all())


def require_dense(by_rank: list[list[thd_layer.Result]], *, forced: bool = False) -> None:
    for number, step in enumerate(thd_layer.STEPS):
        for rank, want in enumerate(thd_layer.dense(step, forced=forced)):
            for name in ("y_TD", "grad_x_TD", "grad_weights_TK", "grad_up_LDF", "grad_down_LFD"):
                error = worst_row(getattr(by_rank[rank][number], name), getattr(want, name))
                assert error <= TOLERANCE, f"{name} of rank {rank} in step {number}: {error}"


@pytest.mark.parametrize("release", ["v1.2.1", "v2-2.1.0", EQUAL_ROWS])
def test_a_replayed_routing_is_the_dense_layer_whose_router_is_forced(release: str) -> None:
    """The experts of a rollout in the trainer's own packing. Every entry is used once, and the drift is counted."""

    def body(group: dist.ProcessGroup) -> tuple[list[thd_layer.Result], float]:
        dispatcher = build_dispatcher(config(release), group, name="moe")
        found = []
        for step in thd_layer.STEPS:
            table = thd_layer.table_of(step)
            found.append(thd_layer.sent_and_back(dispatcher, group, step[group.rank()], table=table))
            table.check_used(group=group)
        drift = dispatcher.metrics(gather=True).replay_drift["moe"]
        dispatcher.close()
        return found, drift

    by_rank = run_ranks(body, RANKS)
    require_dense([found for found, _ in by_rank], forced=True)
    assert all(drift > 0.3 for _, drift in by_rank)


@pytest.mark.parametrize(
    ("release", "row_counts"),
    [
        ("v1.2.1", "agree"),
        ("v2-2.1.0", "static"),
        (OLD_RULES, "agree"),
        (EQUAL_ROWS, "static"),
        (EQUAL_ROWS, "agree"),
        (ANY_ROWS, "agree"),
    ],
)
def test_one_plan_of_a_micro_batch_serves_all_layers(release: str, row_counts: str) -> None:
    """On the control group: one all-reduce of a micro-batch where sizes are agreed on, nothing where static."""
    store = HashStore()

    def body(group: dist.ProcessGroup) -> dict[str, int]:
        control = thread_group(store, group.rank(), group.size())
        fields = config(release, row_counts=row_counts, max_tokens_per_rank=100)
        layers = [build_dispatcher(fields, group, control_group=control) for _ in range(3)]
        with count_collectives(control) as seen:
            for step in thd_layer.STEPS:
                plan = layers[0].plan(step[group.rank()].layout)
                for layer in layers:
                    thd_layer.sent_and_back(layer, group, step[group.rank()], plan)
        for layer in layers:
            layer.close()
        return dict(seen.counts)

    agrees = row_counts == "agree" and release != "v1.2.1"  # v1 takes any counts, and needs to know none
    assert run_ranks(body, 2) == [{"allreduce": len(thd_layer.STEPS)} if agrees else {}] * 2


# The same by hand.


@pytest.mark.parametrize("release", [OLD_RULES, EQUAL_ROWS])
def test_own_counts_by_hand_hang_in_hybridep(release: str) -> None:
    for result in outcomes(lambda group: hybridep_by_hand(release, group, (64, 128)[group.rank()], room=512), 2):
        assert isinstance(result, EmulatedHang)
        assert "every rank must pass the same num_of_tokens_per_rank, got [64, 128] by rank" in str(result)


@pytest.mark.parametrize("release", [OLD_RULES, EQUAL_ROWS, ANY_ROWS])
def test_buffers_of_own_size_by_hand_hang_in_hybridep(release: str) -> None:
    """DeepEP #604: one rank enters the all-gather of a larger buffer, its peer does not."""

    def body(group: dist.ProcessGroup) -> None:
        for rows in ((640, 640), (640, 1280)):
            hybridep_by_hand(release, group, rows[group.rank()])

    for result in outcomes(body, 2):
        assert isinstance(result, EmulatedHang), repr(result)


def test_buffers_of_own_size_by_hand_hang_in_deepep_v2() -> None:
    torch.use_deterministic_algorithms(False)  # it refuses to run where memory is filled; conftest.py restores it
    for result in outcomes(lambda group: elastic_by_hand(group, (64, 128)[group.rank()]), 2):
        assert isinstance(result, EmulatedHang), repr(result)


# Buffers within a node.


@pytest.mark.parametrize(("size", "ranks_per_node"), [(2, None), (4, 4), (8, 8)])
def test_no_rdma_buffer_inside_a_node(size: int, ranks_per_node: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its size asked for: a build without internode support may not know (their words in #4816)."""

    def asked(self: Any, hidden_bytes: int, num_ranks: int) -> int:
        raise AssertionError("the size of an RDMA buffer was asked for")

    monkeypatch.setattr(emulated_deep_ep("v1.2.1").Config, "get_rdma_buffer_size_hint", asked)

    def body(group: dist.ProcessGroup) -> int:
        node = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
        backend = {"name": "deepep", "emulate": "v1.2.1", **node}
        dispatcher = build_dispatcher(config("v1.2.1", backend=backend, num_experts=2 * size), group)
        found: int = backend_of(dispatcher).buffer().num_rdma_bytes
        dispatcher.close()
        return found

    assert run_ranks(body, size) == [0] * size


# The proxy set-up, as sixteen processes.


Results = list[Mapping[tuple[str, str], Outcome]]


@pytest.fixture(scope="module")
def whole() -> Whole:
    return run_whole(SIZES, STEP)


@pytest.fixture(scope="module")
def sharded() -> Results:
    """One spawn for all tests below: sixteen processes take most of their time to import torch."""
    reason = reason_to_skip(allowed_ranks())
    if reason is not None:
        pytest.skip(reason)
    return thd_grid.run_jobs()


def test_rounding_changes_no_choice_of_an_expert(whole: Whole) -> None:
    """Else gradients could differ by more than rounding, and the comparison below would say nothing."""
    assert whole.margin > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "placement"), thd_grid.RUN)
def test_sixteen_ranks_have_the_gradients_and_counts_of_one(
    backend: str, placement: str, whole: Whole, sharded: Results
) -> None:
    found = sharded[0][backend, placement].tensors
    require_whole(found, whole, 1e-5 if backend == "alltoall" else TOLERANCE)
    shards, per_stage = PLACEMENTS[placement].get("etp", 1), SIZES.layers // GRID.pp
    for stage in range(GRID.pp):
        of_layers = whole.tokens_per_expert[stage * per_stage : (stage + 1) * per_stage]
        assert found[f"tokens.{stage}"].tolist() == (shards * torch.stack(of_layers).sum(0)).tolist()
    # Sizes are agreed on once per micro-batch, and not for each of the two layers of a stage. Those that need no
    # agreement exchange nothing.
    wanted = {"allreduce": len(STEP)} if backend in thd_grid.AGREEING else {}
    assert agreements(sharded, backend, placement) == [wanted] * GRID.pp


@pytest.mark.slow
@pytest.mark.parametrize("backend", thd_grid.RUN_STATIC)
def test_static_counts_are_agreed_on_never(backend: str, whole: Whole, sharded: Results) -> None:
    assert agreements(sharded, backend, "static") == [{}] * GRID.pp
    require_whole(sharded[0][backend, "static"].tensors, whole, TOLERANCE)


def require_whole(found: Mapping[str, Tensor], whole: Whole, tolerance: float) -> None:
    errors = {name: worst_row(found[name], tensor) for name, tensor in whole.tensors.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def agreements(sharded: Results, backend: str, job: str) -> list[dict[str, int] | None]:
    """Collectives on the control groups, as the first rank of each stage saw them."""
    return [by_job[backend, job].agreements for by_job in sharded[:: GRID.stage_size]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_of_a_group_bring_different_counts(placement: str) -> None:
    """The set-up is what the case is about: other counts on the ranks of a group, and none on one of them."""

    def count(batch: Packed, place: Place) -> int:
        layout = batch.layout.shard(place.cp, GRID.cp, "zigzag").shard(place.tp, GRID.tp)
        number = layout.num_real(batch.num_rows // (GRID.cp * GRID.tp))
        assert number is not None
        return number

    by_group = [
        [count(micro_batch[place.dp], place) for place in map(GRID.place, ranks)]
        for micro_batch in STEP
        for ranks in PLACEMENTS[placement]["expert_groups"]
    ]
    assert any(len(set(counts)) == len(counts) for counts in by_group)
    assert any(0 in counts and max(counts) > 0 for counts in by_group)
    assert max(max(counts) for counts in by_group) <= thd_grid.MOST_ROWS


@pytest.mark.integration
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core: install moe-dispatch[megatron]")
def test_ranks_stand_where_megatron_puts_them() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that transformer-engine is not there
        from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order=order)
    for axis in ("tp", "cp", "dp", "pp"):
        assert as_tuples(dense.get_ranks(axis)) == GRID.groups(axis)
    for etp, placement in ((1, "etp 1"), (2, "etp 2")):
        experts = RankGenerator(tp=etp, ep=2, dp=GRID.size // (etp * 2 * 2), pp=2, cp=1, order=order)
        assert as_tuples(experts.get_ranks("tp-ep")) == PLACEMENTS[placement]["expert_groups"]


def as_tuples(groups: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups))


def test_code_of_the_page_runs() -> None:
    namespace = run_page("cases/2-thd-deepep-hybridep.md")
    assert namespace["mine"].num_rows(None) == 4  # the blocks ran to the end
    for layer in namespace["layers"]:
        layer.close()
