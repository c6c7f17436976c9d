"""deep_ep.EPBuffer of V2.5: its differences from ElasticBuffer of v2."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.emulation.elastic_case import COUNTS, dispatched, open_buffer
from tests.emulation.tokens import Call, Tokens, call_on_two_ranks, make_tokens, run_ranks

RELEASE = "v2.5.0"
deep_ep: Any = emulated_deep_ep(RELEASE)


def refused(call: Call) -> list[str]:
    return call_on_two_ranks(lambda group: open_buffer(group, RELEASE), call)


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_rows_sums_and_weights_are_those_of_v2(size: int, do_expand: bool) -> None:
    everyone = make_tokens(COUNTS[size])

    def body(group: dist.ProcessGroup, release: str) -> Any:
        buffer = open_buffer(group, release, deterministic=True)
        options = {"do_expand": do_expand, "do_zero_padding": do_expand, "expert_alignment": 4}
        x, ids, weights, handle, _ = dispatched(buffer, everyone[group.rank()], **options)
        y, returned, _ = buffer.combine(x, handle, topk_weights=weights)
        again = buffer.dispatch(
            everyone[group.rank()].x, handle=handle, num_sms=4, do_expand=do_expand, do_zero_padding=do_expand
        )[0]
        return x, ids, weights, y, returned, again

    for old, new in zip(
        run_ranks(lambda group: body(group, "v2-2.1.0"), size),
        run_ranks(lambda group: body(group, RELEASE), size),
        strict=True,
    ):
        for one, other in zip(old, new, strict=True):
            assert one is other or torch.equal(one, other)


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
    "padding of a compact form": ({"do_zero_padding": True}, "do_zero_padding needs do_expand"),
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
