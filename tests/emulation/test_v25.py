"""deep_ep.EPBuffer of V2.5: its differences from ElasticBuffer of v2, and copies of experts on other ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation import EmulatedAbort, EmulatedHang, emulated_deep_ep
from tests.emulation.test_elastic import COUNTS, dispatched, open_buffer
from tests.emulation.tokens import Call, Tokens, call_on_two_ranks, make_tokens, run_ranks

RELEASE = "v2.5.0"
deep_ep: Any = emulated_deep_ep(RELEASE)


def refused(call: Call) -> list[str]:
    return call_on_two_ranks(lambda group: open_buffer(group, RELEASE), call)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deferred_dispatch_gives_its_rows_at_the_first_wait(deterministic: bool) -> None:
    everyone = make_tokens(COUNTS[2])

    def body(group: dist.ProcessGroup) -> None:
        tokens = everyone[group.rank()]
        buffer = open_buffer(group, RELEASE, deterministic=deterministic)
        direct = dispatched(open_buffer(group, RELEASE, deterministic=deterministic), tokens)
        event = dispatched(buffer, tokens, async_with_compute_stream=True, defer_epilogue=True)
        x, ids, weights, handle = event.wait()
        assert event.wait() is None
        assert torch.equal(x, direct[0])
        assert torch.equal(ids, direct[1])
        assert torch.equal(weights, direct[2])
        assert handle.num_recv_tokens_per_expert_list == direct[3].num_recv_tokens_per_expert_list
        deferred = buffer.combine(x, handle, async_with_compute_stream=True, defer_epilogue=True)
        y, returned = deferred.current_stream_wait()
        assert returned is None
        assert torch.equal(y, buffer.combine(x, handle)[0])

    run_ranks(body, 2)


def test_a_call_before_the_wait_writes_over_the_rows() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        event = dispatched(buffer, tokens, async_with_compute_stream=True, defer_epilogue=True)
        dispatched(buffer, tokens)
        return event.wait()

    told = "EmulatedAbort: deep_ep: EPBuffer.dispatch: a deferred epilogue must run before the next call on its buffer"
    assert all(end.startswith(told) for end in refused(call))


def test_a_handle_refuses_ids_that_changed() -> None:
    def call(buffer: Any, tokens: Tokens) -> object:
        ids = tokens.topk_idx.clone()
        x, *_, handle, _ = dispatched(buffer, tokens, topk_idx=ids)
        assert handle.topk_idx is ids
        ids.add_(0)
        return buffer.combine(x, handle)

    told = "AssertionError: `topk_idx` must not be modified while the EP handle is in use"
    assert refused(call) == [told, told]
    with torch.inference_mode():
        (tokens,) = make_tokens(COUNTS[1])
        ids = tokens.topk_idx.clone()
        handle = dispatched(open_buffer(None, RELEASE), tokens, topk_idx=ids)[3]
        ids.add_(0)
        assert handle.topk_idx is ids  # a tensor of inference mode has no version


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a copied handle": ({"do_handle_copy": True}, "AssertionError: `do_handle_copy` must be False; handle copying"),
    "a deferred call that is not asynchronous": ({"defer_epilogue": True}, "needs async_with_compute_stream"),
    "experts of no rank": ({"num_experts": 7, "num_sms": 4}, "num_experts must divide by 2 ranks"),
    "1026 experts": ({"num_experts": 1026}, "at most 512 experts per rank, got 1026"),
    "an argument of v2": ({"previous_event_before_epilogue": None}, "TypeError: got an unexpected keyword argument"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_dispatch_refuses(case: str) -> None:
    options, said = BAD_CALLS[case]
    for end in refused(lambda buffer, tokens: dispatched(buffer, tokens, **options)):
        assert re.search(said, end), end


@pytest.mark.parametrize("release", ["v2-2.1.0", RELEASE])
def test_sums_do_not_follow_the_default_dtype(release: str) -> None:
    """256 + 1 + 2 is 259 in float32, and 260 when it is rounded to bfloat16. Added in bfloat16 it is 258."""
    (tokens,) = make_tokens(COUNTS[1])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        buffer = open_buffer(None, release)
        x, *_, handle, _ = dispatched(buffer, tokens)
        bias = torch.full_like(tokens.x, 256), torch.ones_like(tokens.x)
        y = buffer.combine(torch.full_like(x, 2), handle, bias=bias)[0]
    finally:
        torch.set_default_dtype(before)
    sent = (tokens.topk_idx >= 0).any(1)
    assert (y[sent] == 260).all()


SLOTS, OWN = 3, 2
UNTOUCHED = 7.0


def mapping_of(size: int) -> Tensor:
    """For each rank an empty slot, an expert of the next rank, and expert 0 (on rank 0: the last one, or none)."""
    experts = size * OWN
    rows = [[-1, (rank * OWN + OWN + 1) % experts, 0 if rank else experts - 1] for rank in range(size)]
    return torch.tensor(rows if size > 1 else [[-1] * SLOTS], dtype=torch.int32)


def expert(number: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(width).remainder(5).add(10 * number).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_are_in_their_slots_after_the_wait(size: int) -> None:
    mapping = mapping_of(size)

    def body(group: dist.ProcessGroup) -> None:
        rank, plan = group.rank(), deep_ep.BufferAllocator()
        slots = [plan.allocate((SLOTS, 16), torch.bfloat16), plan.allocate((SLOTS, 2, 4), torch.float32)]
        assert all(slot.is_meta for slot in slots)
        buffer = open_buffer(group, RELEASE, lb_allocation_plan_or_num_bytes=plan)
        assert (plan.materialized, buffer.num_lb_bytes) == (True, 2 * deep_ep.get_num_allocation_alignment())
        own = [
            torch.stack([expert(rank * OWN + index, width, dtype) for index in range(OWN)])
            for width, dtype in ((16, torch.bfloat16), (8, torch.float32))
        ]
        for slot in slots:
            slot.fill_(UNTOUCHED)
        event = buffer.lb_prefetch_weights(slots, own, mapping)
        assert all((slot == UNTOUCHED).all() for slot in slots)
        event.wait()
        for slot in slots:
            for found, number in zip(slot.flatten(1), mapping[rank].tolist(), strict=True):
                wanted = expert(number, len(found), slot.dtype) if number >= 0 else torch.full_like(found, UNTOUCHED)
                assert torch.equal(found, wanted)

    run_ranks(body, size)


def reduced(group: dist.ProcessGroup, mapping: Tensor, slots: Tensor, own: Tensor) -> Tensor:
    plan = deep_ep.BufferAllocator()
    region = plan.allocate(slots.shape, torch.float32)
    buffer, result = open_buffer(group, RELEASE, lb_allocation_plan_or_num_bytes=plan), own.clone()
    region.copy_(slots)
    buffer.lb_reduce_grads(region, result, mapping).wait()
    assert torch.equal(region, slots)
    return result


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_are_added_to_those_at_home(size: int) -> None:
    mapping, width = mapping_of(size), 8

    def grads(rank: int) -> Tensor:
        return torch.arange(SLOTS * width).view(SLOTS, width).add(100 * rank).float()

    def body(group: dist.ProcessGroup) -> None:
        wanted = torch.full((size * OWN, width), 1000.0)
        for rank, of_rank in enumerate(mapping.tolist()):
            for slot, number in enumerate(of_rank):
                if number >= 0:
                    wanted[number] += grads(rank)[slot]
        own = torch.full((OWN, width), 1000.0)
        found = reduced(group, mapping, grads(group.rank()), own)
        assert torch.equal(found, wanted.chunk(size)[group.rank()])

    run_ranks(body, size)


def changed(mapping: Tensor, value: int) -> Tensor:
    mapping = mapping.clone()
    mapping[1, 0] = value
    return mapping


ARGUMENTS: dict[str, tuple[dict[str, Any], str, type[Exception]]] = {
    "int64": ({"mapping": mapping_of(2).long()}, r"must be contiguous int32 \(P, S\), got torch\.int64", RuntimeError),
    "rows": ({"mapping": mapping_of(4)}, "the mapping must have 2 rows, got 4", RuntimeError),
    "slots": ({"mapping": mapping_of(2)[:, :2].contiguous()}, "must have 2 slots and 2 experts, got 3", RuntimeError),
    "bytes": ({"own": torch.ones(OWN, 7)}, "equal bytes, a multiple of 32, got 28", RuntimeError),
    "strides": ({"own": torch.ones(8, OWN).t()}, "must be contiguous", RuntimeError),
    "outside": ({"slots": torch.ones(SLOTS, 8)}, "must lie in the region", EmulatedAbort),
    "own expert": ({"mapping": changed(mapping_of(2), 3)}, "own experts must not be in its redundant", EmulatedAbort),
    "no expert": ({"mapping": changed(mapping_of(2), 4)}, "experts below 4, or -1, got -1 to 4", EmulatedAbort),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_the_kernels_cannot_take(name: str) -> None:
    given, told, kind = ARGUMENTS[name]

    def body(group: dist.ProcessGroup) -> None:
        plan = deep_ep.BufferAllocator()
        slots = plan.allocate((SLOTS, 8), torch.float32)
        buffer = open_buffer(group, RELEASE, lb_allocation_plan_or_num_bytes=plan)
        arguments = {"slots": slots, "own": torch.ones(OWN, 8), "mapping": mapping_of(2), **given}
        for method in (buffer.lb_prefetch_weights, buffer.lb_reduce_grads):
            with pytest.raises(kind, match=told):
                method(*arguments.values())

    run_ranks(body, 2)


def test_numbers_and_dtypes_of_tensors() -> None:
    buffer, mapping = open_buffer(None, RELEASE), torch.full((1, 0), -1, dtype=torch.int32)
    slots, own = torch.ones(0, 8), torch.ones(OWN, 8)
    for count in (0, 17):
        with pytest.raises(RuntimeError, match=f"must be 1 to 16 pairs of tensors, got {count} and {count}"):
            buffer.lb_prefetch_weights([slots] * count, [own] * count, mapping)
    with pytest.raises(RuntimeError, match=r"must be float32 and 2-D, got torch\.bfloat16"):
        buffer.lb_reduce_grads(slots, own.bfloat16(), mapping)


def test_ranks_with_other_mappings_are_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        buffer = open_buffer(group, RELEASE, lb_allocation_plan_or_num_bytes=2**21)
        slots = buffer.runtime.lb_storage[: SLOTS * 32].view(torch.float32).view(SLOTS, 8)
        mapping = mapping_of(2) if group.rank() else torch.full((2, SLOTS), -1, dtype=torch.int32)
        with pytest.raises(EmulatedHang, match="every rank must pass the same redundancy_mapping"):
            buffer.lb_prefetch_weights(slots, torch.ones(OWN, 8), mapping)

    run_ranks(body, 2)


def test_memory_of_copies_has_whole_blocks_and_a_plan_serves_once() -> None:
    with pytest.raises(RuntimeError, match="num_lb_bytes must be a multiple of 2097152, got 64"):
        open_buffer(None, RELEASE, lb_allocation_plan_or_num_bytes=64)
    plan = deep_ep.BufferAllocator()
    plan.allocate((1, 8), torch.float32)
    open_buffer(None, RELEASE, lb_allocation_plan_or_num_bytes=plan)
    with pytest.raises(AssertionError):
        open_buffer(None, RELEASE, lb_allocation_plan_or_num_bytes=plan)
    with pytest.raises(AssertionError, match="cannot be changed"):
        plan.allocate((1, 8), torch.float32)
