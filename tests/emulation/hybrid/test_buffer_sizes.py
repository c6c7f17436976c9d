"""The sizes that HybridEP can have: capacity and chunks, hidden size and experts, rows of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.emulation import EmulatedAbort, EmulatedHang
from moe_dispatch_testing.emulation.exchange import Exchange
from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer
from moe_dispatch_testing.emulation.hybrid.maps import Topology
from moe_dispatch_testing.emulation.hybrid.release import RELEASES
from moe_dispatch_testing.emulation.hybrid.runtime import Runtime
from tests.emulation.hybrid_case import (
    APRIL,
    BEFORE_RAGGED,
    CURRENT,
    EVERY,
    FUSED,
    HIDDEN,
    JULY,
    LOCAL,
    RAGGED,
    ROWS,
    environment,
    make_sources,
    open_buffer,
    opened,
    outcome,
    returned,
    run_ranks,
    sent,
)

CHUNK_RULE = "MAX_NUM_OF_TOKENS_PER_RANK must be multiple of NUM_OF_TOKENS_PER_CHUNK"


# The capacity and its chunks


def round_trip(release: str, capacity: int, rows: int) -> Callable[[dist.ProcessGroup], Any]:
    sources = make_sources([rows] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(release, group, rows=capacity)
        source = sources[group.rank()]
        sent_rows, _, _, _, handle = sent(buffer, source, pad_multiple=1)
        return returned(buffer, sent_rows, handle)[0].shape

    return body


@pytest.mark.parametrize(
    ("release", "capacity", "rows", "works"),
    [
        (APRIL, 200, 100, True),  # at least 512
        (APRIL, 520, 100, False),  # chunks of 64, nothing rounds the capacity
        (APRIL, 100, 520, False),  # nor rows that make it grow
        (APRIL, 100, 576, True),
        (JULY, 520, 520, True),
        (RAGGED, 520, 520, True),
    ],
)
def test_a_capacity_that_is_no_multiple_of_the_chunk_fails_in_the_compiler(
    release: str, capacity: int, rows: int, works: bool
) -> None:
    if works:
        assert run_ranks(round_trip(release, capacity, rows), 2) == [(rows, HIDDEN)] * 2
        return
    with pytest.raises(RuntimeError, match="Failed to compile the code, compile command: ") as raised:
        run_ranks(round_trip(release, capacity, rows), 2)
    assert CHUNK_RULE in str(raised.value)


def test_dispatch_alone_compiles_with_such_a_capacity() -> None:
    """The assertion stands in the combine kernel, which a dispatch does not instantiate."""
    (source,) = make_sources([ROWS])
    assert sent(open_buffer(APRIL, None, rows=520), source)[0].shape[1] == HIDDEN


@pytest.mark.parametrize(("release", "chunk", "works"), [(APRIL, 8, False), (APRIL, 32, True), (JULY, 48, True)])
def test_chunks_come_from_the_environment(
    release: str, chunk: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = make_sources([ROWS])
    names = {f"NUM_OF_TOKENS_PER_CHUNK_{api}_API": chunk for api in ("DISPATCH", "COMBINE")}
    with environment(monkeypatch, **names):
        buffer = open_buffer(release, None, rows=544)
        if works:
            rows, _, _, _, handle = sent(buffer, source)
            assert returned(buffer, rows, handle)[0].shape == (ROWS, HIDDEN)
            rounded = 544 if release == APRIL else 576
            assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == rounded
        else:
            with pytest.raises(RuntimeError, match="must be multiple of rdma_to_attn_map_load_t"):
                sent(buffer, source)


def test_chunks_of_128_from_the_environment_bring_the_old_failure_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        environment(monkeypatch, NUM_OF_TOKENS_PER_CHUNK_COMBINE_API=128),
        pytest.raises(RuntimeError, match=CHUNK_RULE),
    ):
        run_ranks(round_trip(APRIL, 576, 64), 2)


@pytest.mark.parametrize(("release", "capacity"), [(APRIL, 1008), (JULY, 1024), (RAGGED, 1024)])
def test_rows_of_a_call_are_rounded_to_16_and_since_638_to_the_chunk(release: str, capacity: int) -> None:
    buffer = open_buffer(release, None)
    assert buffer.update_template_config(HIDDEN, 1001).max_num_of_tokens_per_rank == capacity
    assert buffer.runtime.buffer_config.max_num_of_tokens_per_rank == capacity
    assert buffer.update_template_config(HIDDEN, 5).max_num_of_tokens_per_rank == capacity  # it never shrinks


def test_fused_kernels_need_equal_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = make_sources([ROWS])
    with environment(monkeypatch, NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API=128):
        sent(open_buffer(JULY, None), source)
        with pytest.raises(AssertionError, match=r"The config is not valid\."):
            sent(open_buffer(JULY, None), source, fused=True)


# Sizes


@CURRENT
@pytest.mark.parametrize(
    "sizes", [{"hidden_dim": 40}, {"num_local_experts": 3}, {"hidden_dim": 256, "use_fp8": True}], ids=str
)
def test_a_buffer_of_impossible_sizes_is_refused(release: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"The buffer config is not valid\."):
        opened(release, **sizes)


@CURRENT
@pytest.mark.parametrize(
    ("hidden", "options"), [(40, {}), (HIDDEN, {"num_of_experts_per_rank": 3}), (HIDDEN, {"use_fp8": True})], ids=str
)
def test_a_call_with_impossible_sizes_is_refused(release: str, hidden: int, options: dict[str, Any]) -> None:
    (source,) = make_sources([ROWS])
    with pytest.raises(AssertionError, match=r"The config is not valid\."):
        opened(release).dispatch_with_permute(
            hidden=torch.zeros(ROWS, hidden).bfloat16(), routing_map=source.routing, **options
        )


@CURRENT
def test_more_sms_than_there_are_abort(release: str) -> None:
    with pytest.raises(EmulatedAbort, match=r"sm_count \(132\) >= num_sms_dispatch_api \(133\)"):
        opened(release, num_sms_dispatch_api=133)


@FUSED
@CURRENT
def test_no_blocks_to_permute_with(release: str, fused: bool) -> None:
    (source,) = make_sources([ROWS])
    error, said = (EmulatedHang, "must have blocks that permute") if fused else (EmulatedAbort, "grid_size > 0")
    with pytest.raises(error, match=said):
        sent(opened(release, num_blocks_permute=0), source, fused=fused)


@pytest.mark.parametrize(("hidden", "fits"), [(8192, True), (16384, False)])
def test_kernels_that_need_too_much_shared_memory(hidden: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: dist.ProcessGroup) -> Any:
        buffer = hybrid_ep_buffer(JULY)(group, hidden, ROWS, LOCAL)
        return outcome(lambda: buffer.update_template_config(hidden, ROWS))

    with environment(monkeypatch, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=1):
        said = "returned" if fits else "RuntimeError: Cannot fit kernels into shared memory even with minimum stages."
        assert run_ranks(body, 2) == [said] * 2


@pytest.mark.parametrize(
    ("release", "chunk", "capacity", "said"),
    [
        (APRIL, 64, 21824, "returned"),
        (APRIL, 64, 21888, "EmulatedAbort: internode.cu:167: Assertion `tx_depth > 0 && tx_depth < 65536' failed: "),
        (JULY, 64, 21824, "returned"),
        (JULY, 64, 21825, "RuntimeError: The buffer config is not valid."),
        (JULY, 128, 21760, "returned"),
        (JULY, 128, 21761, "RuntimeError: The buffer config is not valid."),
    ],
)
def test_the_most_rows_across_nodes(
    release: str, chunk: int, capacity: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: dist.ProcessGroup) -> str:
        return outcome(lambda: open_buffer(release, group, rows=capacity))

    names = {f"NUM_OF_TOKENS_PER_CHUNK_{api}_API": chunk for api in ("DISPATCH", "COMBINE")}
    with environment(monkeypatch, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=1, **names):
        assert all(one.startswith(said) for one in run_ranks(body, 2))
    assert outcome(lambda: open_buffer(release, None, rows=capacity)) == "returned"  # no rule inside a node


def test_growing_across_nodes_past_the_most_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(JULY, group)
        return outcome(lambda: buffer.update_template_config(HIDDEN, 21825))

    with environment(monkeypatch, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=1):
        assert run_ranks(body, 2) == ["AssertionError: The config is not valid."] * 2


def test_domains_must_divide_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        environment(monkeypatch, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=3),
        pytest.raises(AssertionError, match="The number of ranks 4 should be divisible by the number of ranks per"),
    ):
        run_ranks(lambda group: open_buffer(JULY, group), 4)


def test_the_deprecated_domain_argument_changes_nothing() -> None:
    assert opened(JULY, num_of_hybrid_ep_ranks_per_nvlink_domain=8).num_of_hybrid_ep_ranks_per_nvlink_domain == 1


# Rows of a call


@pytest.mark.parametrize(("size", "rows", "bytes_"), [(1, 66, 8), (1, 67, 12), (2, 65, 8)])
@BEFORE_RAGGED
def test_a_remainder_that_tma_cannot_load(release: str, size: int, rows: int, bytes_: int) -> None:
    sources = make_sources([rows] * size)
    said = rf"TMA 16B alignment error: tma_load_size = remainder_chunk\({rows - 64}\).* = {bytes_}B, must be multiple"

    def body(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(release, group, enable_custom_allgather=False), sources[group.rank()])

    with pytest.raises(RuntimeError, match=said):
        run_ranks(body, size)


@pytest.mark.parametrize(("size", "rows"), [(1, 68), (2, 66), (4, 65)])
@CURRENT
def test_remainders_that_tma_can_load(release: str, size: int, rows: int) -> None:
    sources = make_sources([rows] * size)

    def body(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(release, group, enable_custom_allgather=False), sources[group.rank()])[1].isnan().any()

    assert not any(run_ranks(body, size))


def test_the_custom_allgather_needs_whole_16_bytes_where_it_is_the_default() -> None:
    sources = make_sources([6] * 2)  # 6 rows of 8 experts: 48 bytes; of 4 each: 24
    assert sent(open_buffer(JULY, None), make_sources([4], local=4)[0])[0].shape[1] == HIDDEN

    def body(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(APRIL, group), sources[group.rank()])[0].shape[1]

    assert run_ranks(body, 2) == [HIDDEN] * 2
    odd = make_sources([65] * 4, local=1)

    def aborts(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(APRIL, group, local=1), odd[group.rank()])

    with pytest.raises(EmulatedAbort, match=r"allgather\.cu:97: Assertion `bytes_per_rank \(260\) % 16 == 0' failed"):
        run_ranks(aborts, 4)


@pytest.mark.parametrize("release", [APRIL, JULY])
def test_no_rows_at_all_is_undefined_before_ragged_dispatch(release: str) -> None:
    sources = make_sources([0] * 2)
    with pytest.raises(EmulatedAbort, match="Every rank must have at least one row, got 0"):
        run_ranks(lambda group: sent(open_buffer(release, group), sources[group.rank()]), 2)


@EVERY
def test_a_map_with_other_rows_than_hidden(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        source = sources[group.rank()]
        return open_buffer(release, group).dispatch_with_permute(hidden=source.x[:32], routing_map=source.routing)

    with pytest.raises(AssertionError, match=r"The hidden and the routing(_map| data) should have the same row number"):
        run_ranks(body, 2)


@BEFORE_RAGGED
def test_without_permute_such_a_map_is_not_checked(release: str) -> None:
    (source,) = make_sources([ROWS])
    with pytest.raises(
        EmulatedAbort, match=r"must have a row for each of 32 tokens, got 64\. deep_ep does not check it"
    ):
        open_buffer(release, None).dispatch(source.x[:32], routing_map=source.routing)


@BEFORE_RAGGED
def test_a_map_of_other_experts_aborts(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    with pytest.raises(EmulatedAbort, match=r"num_of_expert \(8\) == experts per rank \* ranks \(4\)' failed"):
        buffer.dispatch_with_permute(hidden=source.x, routing_map=torch.zeros(ROWS, 8, dtype=torch.bool))
    with pytest.raises(EmulatedAbort, match=r"Assertion `local_routing_map.is_contiguous\(\)' failed"):
        buffer.dispatch_with_permute(hidden=source.x, routing_map=torch.zeros(LOCAL, ROWS, dtype=torch.bool).T)


@CURRENT
def test_rows_of_three_dimensions_are_refused(release: str) -> None:
    (source,) = make_sources([ROWS])
    with pytest.raises(ValueError, match=r"too many values to unpack \(expected 2\)"):
        open_buffer(release, None).dispatch_with_permute(hidden=source.x[:, None], routing_map=source.routing)


@pytest.mark.parametrize(("release", "fused", "most"), [(APRIL, False, 256), (APRIL, True, 1024), (JULY, False, 1024)])
def test_the_most_experts_a_rank_can_have(release: str, fused: bool, most: int) -> None:
    for local in (most, most + 4):
        x, routing = torch.zeros(4, HIDDEN).bfloat16(), torch.zeros(4, local, dtype=torch.bool)
        buffer = open_buffer(release, None, local=local)
        call = {"hidden": x, "routing_map": routing, "fuse_permute_dispatch": fused}
        said = outcome(lambda buffer=buffer, call=call: buffer.dispatch_with_permute(**call))
        assert ("experts per rank must be in 1.." in said) == (local > most), said


def test_chunks_across_nodes_are_multiples_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = make_sources([ROWS] * 2)
    names = {f"NUM_OF_TOKENS_PER_CHUNK_{api}_API": 48 for api in ("DISPATCH", "COMBINE")}

    def body(group: dist.ProcessGroup) -> Any:
        return sent(open_buffer(JULY, group), sources[group.rank()])[0].shape[1]

    with environment(monkeypatch, **names):
        assert run_ranks(body, 2) == [HIDDEN] * 2
    with (
        environment(monkeypatch, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=1, **names),
        pytest.raises(RuntimeError, match="NUM_OF_TOKENS_PER_CHUNK must be multiple of 32"),
    ):
        run_ranks(body, 2)


def test_a_capacity_whose_rows_are_no_multiple_of_four_aborts() -> None:
    with pytest.raises(EmulatedAbort, match=r"intranode\.cu:130: .*max_num_of_tokens \(513\) % 4 == 0' failed"):
        open_buffer(APRIL, None, rows=513)
    assert open_buffer(JULY, None, rows=513).runtime.buffer_config.max_num_of_tokens_per_rank == 576


def test_more_than_72_ranks_a_domain_do_not_fit_the_kernels() -> None:
    config = opened(JULY).configurer.buffer_config
    place = Topology(rank=0, ranks_per_node=73, nodes=1)
    with pytest.raises(EmulatedAbort, match=r"ranks per node must be <= 72, got 73\."):
        Runtime(RELEASES[JULY], Exchange(None), place, config, use_shared_buffer=True, custom_allgather=False)
