"""A rank on torch's fake process group allocates, counts and sends what a rank among others does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.communication import Communicator
from moe_dispatch.dispatchers import even_rounds, run_in_chunks
from moe_dispatch.errors import ConfigError, StateError
from tests.ranks import run_ranks

RANK, RANKS, EXPERTS, TOP_K, HIDDEN, ROWS = 3, 4, 8, 3, 128, 32
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": ROWS}


@pytest.fixture
def fake() -> Iterator[dist.ProcessGroup]:
    """A group of rank 3 for tensors of the CPU, as gloo's are; the whole fake one takes those of any device."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS)
    try:
        yield dist.new_group(backend="cpu:fake")
    finally:
        dist.destroy_process_group()


def even_ids() -> Tensor:
    """Each expert gets as many rows as another. Rows go to two or three ranks."""
    return (torch.arange(ROWS).unsqueeze(1) + torch.tensor([0, 1, 5])) % EXPERTS


def memory(value: Any) -> Iterator[Tensor]:
    """All tensors that a value holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from memory(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "context":  # outlives the call
                yield from memory(getattr(value, field.name, None))


def measured(group: dist.ProcessGroup, ids_TK: Tensor, **fields: Any) -> dict[str, Any]:
    """Run a layer forward and backward, and return its sizes: of results and of what is saved, and its counters."""
    options = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "backend": "alltoall", **fields}
    carried = options.pop("carry", None)
    dispatcher = build_dispatcher(DispatcherConfig(**options), group, name="layer")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(ids_TK), HIDDEN, generator=generator).requires_grad_()
    weights = torch.rand(len(ids_TK), TOP_K, generator=generator).requires_grad_()
    saved: list[Tensor] = []
    found: dict[str, Any] = {}

    def experts(sent: Dispatched) -> Tensor:
        for part in memory(sent.carried) if carried else ():
            found.setdefault("carried", []).append(part.shape)
        found.setdefault("rows", []).append(sent.rows.shape)
        found.setdefault("tokens", []).append(sent.real_tokens_per_expert.tolist())
        found.setdefault("state", []).append(sorted((one.shape, one.dtype) for one in memory(sent.state)))
        return sent.rows.tanh()

    def keep(one: Tensor) -> Tensor:
        saved.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        if options.get("chunks"):
            y = run_in_chunks(dispatcher, experts, x, Routing(ids_TK, weights))
        else:
            carry = {"adapter": torch.arange(len(x))} if carried else None
            sent = dispatcher.dispatch(x, Routing(ids_TK, weights), carry=carry)
            y = dispatcher.combine(experts(sent), sent)
    y.square().sum().backward()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    metrics = dispatcher.metrics()
    for name in ("dispatches", "rows_padded", "rows_skipped", "bytes_sent", "collectives", "expert_copies"):
        found[name] = getattr(metrics, name)
    found |= {"y": y.shape, "saved": sum(storages.values()), "counts": dispatcher.expert_counts().tolist()}
    if options.get("graph_safe"):
        found |= {"required": dispatcher.required_capacity(), "check": dispatcher.check()}
    values = {"y": y, "x.grad": x.grad, "weights.grad": weights.grad}
    found["finite"] = [name for name, value in values.items() if value is not None and value.isfinite().all()]
    dispatcher.close()
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"backend": "allgather"},
        {"backend": {"name": "alltoall", "reduction": "exact"}},
        {"pad_multiple": 16},
        {"wire": "bfloat16"},
        {"wire": "float8_e4m3fn"},
        {"backend": "allgather", "wire": "mxfp8", "pad_multiple": 32},
        {"carry": True},
        {"chunks": 5},
        {"chunks": 5, "backend": "allgather"},
        {"debug": True},
        {"row_counts": "check", "backend": "allgather"},
        {"balance": "exact"},
        {"balance": {"name": "exact", "bound": 1.5}},
        SAFE,
        {**SAFE, "backend": "allgather"},
        {**SAFE, "graph_safe": {"capacity_factor": 1.5, "on_overflow": "drop"}, "pad_multiple": 8},
        {**SAFE, "balance": "exact"},
        {**SAFE, "chunks": 5},
        {**SAFE, "wire": "mxfp8", "pad_multiple": 32, "carry": True},
    ],
    ids=str,
)
def test_sizes_are_those_of_real_ranks_with_even_routing(fields: dict[str, Any], fake: dist.ProcessGroup) -> None:
    alone = measured(fake, even_ids(), **fields)
    among_others = run_ranks(lambda group: measured(group, even_ids(), **fields), RANKS)[RANK]
    assert alone["finite"] == ["y", "x.grad", "weights.grad"]
    assert alone == among_others


def skewed_ids() -> Tensor:
    """Half of the rows name experts 6, 7 and 0. No expert has as many rows as another one has on another rank."""
    usual = even_ids()
    usual[ROWS // 2 :] = torch.tensor([6, 7, 0])
    return usual


def without_locality(found: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the copies to which one rank sends and another does not."""
    return {name: found[name] for name in ("rows", "tokens", "counts", "expert_copies", "y", "finite", "saved")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"backend": "allgather"},
        {"backend": {"name": "alltoall", "reduction": "exact"}},
        SAFE,
        {**SAFE, "backend": "allgather"},
        {**SAFE, "graph_safe": {"capacity_factor": 1.0, "on_overflow": "drop"}},
    ],
    ids=str,
)
def test_counts_are_those_of_ranks_that_route_as_this_one(fields: dict[str, Any], fake: dist.ProcessGroup) -> None:
    """Numbers of rank 3 alone, such as its own rows for its experts, are smaller."""
    alone = measured(fake, skewed_ids(), **fields)
    among_others = run_ranks(lambda group: measured(group, skewed_ids(), **fields), RANKS)[RANK]
    assert alone == among_others
    own = torch.bincount(skewed_ids().flatten(), minlength=EXPERTS)[-2:]
    if not isinstance(fields.get("graph_safe"), dict):
        assert alone["tokens"] == [(RANKS * own).tolist()]


@pytest.mark.parametrize(
    "fields",
    [
        {"balance": "eplb"},
        {"balance": {"name": "exact", "min_rows": 0}},
        {"balance": {"name": "exact", "min_rows": 0}, "backend": "allgather", "pad_multiple": 8},
        {**SAFE, "balance": "exact"},
        {**SAFE, "balance": "exact", "backend": "allgather"},
    ],
    ids=str,
)
def test_copies_of_experts_get_their_share_of_all_ranks(fields: dict[str, Any], fake: dist.ProcessGroup) -> None:
    alone = without_locality(measured(fake, skewed_ids(), **fields))
    among_others = run_ranks(lambda group: without_locality(measured(group, skewed_ids(), **fields)), RANKS)[RANK]
    if "eplb" in str(fields):
        assert alone == among_others
        return
    # A share is a whole number of rows of each rank.
    assert alone["expert_copies"] == among_others["expert_copies"] > 0
    for mine, theirs in zip(alone["tokens"][0], among_others["tokens"][0], strict=True):
        assert abs(mine - theirs) < RANKS
    assert abs(alone["rows"][0][0] - among_others["rows"][0][0]) < 2 * RANKS
    assert alone["finite"] == among_others["finite"]


def small(group: Any, **fields: Any) -> Any:
    options = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "backend": "alltoall", **fields}
    return build_dispatcher(DispatcherConfig(**options), group, name="layer")


@pytest.mark.parametrize("fields", [{}, {"backend": "allgather"}, SAFE], ids=str)
def test_the_group_of_init_process_group(fields: dict[str, Any], fake: dist.ProcessGroup) -> None:
    """It takes tensors of any device, so ranks sum no counts when they agree on sizes."""
    assert dist.group.WORLD is not None
    whole, of_cpu = (measured(group, even_ids(), **fields) for group in (dist.group.WORLD, fake))
    for found in (whole, of_cpu):
        found["bytes_sent"].pop("sizes", None)
    assert whole == of_cpu


def test_a_dry_run_says_so(fake: dist.ProcessGroup) -> None:
    dispatcher = small(fake)
    assert "backend='alltoall', rank 3 of 4, dry run, num_experts=8" in repr(dispatcher)
    assert dispatcher.metrics().dry_run
    assert "dry_run=True" in repr(dispatcher.metrics(gather=True))
    with pytest.raises(StateError, match="self_test: ranks must exchange rows, got a dry run on torch's fake process"):
        dispatcher.self_test()
    dispatcher.close()
    assert "dry run, closed" in repr(dispatcher)
    assert not run_ranks(lambda group: small(group).metrics().dry_run, 2)[0]


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ({"name": "hybridep", "emulate": True}, "Backend 'hybridep' needs ranks to exchange rows with, got a dry run"),
        ({"name": "deepep", "emulate": "v1.2.1"}, "Backend 'deepep' needs ranks to exchange rows with, got a dry run"),
        ({"name": "deepep", "emulate": "v2.5.0"}, "Backend 'deepep' needs ranks to exchange rows with, got a dry run"),
        ({"name": "alltoall_by_node", "ranks_per_node": 2}, "a dry run must be on one node, got several"),
    ],
    ids=str,
)
def test_what_needs_other_ranks_is_refused_by_name(backend: Any, told: str, fake: dist.ProcessGroup) -> None:
    with pytest.raises(ConfigError, match=told):
        small(fake, backend=backend, wire="bfloat16", hidden_size=256)


def test_a_library_gets_no_fake_group(fake: dist.ProcessGroup) -> None:
    with pytest.raises(ConfigError, match="A library cannot exchange rows in a dry run on torch's fake process group"):
        _ = Communicator(fake).library_group


def test_every_collective_of_a_dry_run(fake: dist.ProcessGroup) -> None:
    ranks = Communicator(fake)
    assert ranks.max([-5, 3], label="test") == [-5, 3]
    sums = [torch.tensor([2, 1])]
    assert ranks.max_and_sum([-5, 3], sums, label="test") == [-5, 3, 2 * RANKS, RANKS]
    assert ranks.gather_json({"a": 1}, label="test") == [{"a": 1}] * RANKS
    assert ranks.gather_bytes(torch.tensor([7], dtype=torch.uint8), label="test") is None  # it is not rank 0
    assert ranks.broadcast(torch.tensor([4]), 1, source=RANK, label="test").tolist() == [4]
    received, sent = torch.full((7, 1), -1), torch.arange(8).unsqueeze(1)
    ranks.all_to_all(received, sent, [2, 1, 3, 1], [1, 2, 3, 2], label="test").wait()
    assert received.flatten().tolist() == [6, 7, 6, 6, 7, 0, 6]  # cut, or filled with zeros
    part = torch.empty(2)
    ranks.reduce_scatter(part, torch.arange(8.0), label="test")
    assert part.tolist() == [24, 28]
    with pytest.raises(StateError, match=r"receives nothing from rank 0\. Make its values on rank 3 too"):
        ranks.broadcast(None, 1, source=0, label="test")
    assert [*even_rounds([1, 2], 0, fake)] == [1, 2]


def test_parts_of_a_mesh_and_a_group_for_sizes() -> None:
    """The expert-parallel groups of 256 ranks, of which none but one exists."""
    dist.init_process_group("fake", rank=77, world_size=256)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (4, 64), mesh_dim_names=("copies", "ep"))
        dispatcher = small(mesh["ep"], num_experts=128)
        assert "rank 13 of 64, dry run" in repr(dispatcher)
        x = torch.randn(512, HIDDEN, requires_grad=True)
        ids = (torch.arange(512).unsqueeze(1) + torch.tensor([0, 1, 5])) % 128
        sent = dispatcher.dispatch(x, Routing(ids, torch.rand(512, TOP_K)))
        assert sent.tokens_per_expert_list == (512 * 3 // 2, 512 * 3 // 2)
        dispatcher.combine(sent.rows, sent).sum().backward()
        dispatcher.close()
    finally:
        dist.destroy_process_group()
