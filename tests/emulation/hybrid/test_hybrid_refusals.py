"""What HybridEP refuses, in its words; what it would abort or wait for; and what would be garbage there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch_testing.emulation import EmulatedAbort
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
    make_sources,
    open_buffer,
    opened,
    outcome,
    returned,
    run_ranks,
    sent,
)

# Ids and dtypes


@pytest.mark.parametrize("release", [APRIL, JULY])
def test_minus_one_among_ids_traps_before_ragged_dispatch(release: str) -> None:
    ids = torch.tensor([[0, -1]] * 4)

    def body(group: dist.ProcessGroup) -> Any:
        x = torch.zeros(4, HIDDEN).bfloat16()
        return open_buffer(release, group).dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=2 * LOCAL)

    with pytest.raises(EmulatedAbort, match=r"topk_idx must be in \[0, 8\), got -1\.\.0\."):
        run_ranks(body, 2)


def test_ids_without_the_number_of_experts() -> None:
    x, ids = torch.zeros(4, HIDDEN).bfloat16(), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="The number of experts should be provided on index-based routing"):
        open_buffer(JULY, None).dispatch_with_permute(hidden=x, topk_idx=ids)
    with pytest.raises(AssertionError, match="num_of_experts is required with topk_idx"):
        open_buffer(RAGGED, None).dispatch_with_permute(hidden=x, topk_idx=ids)
    with pytest.raises(AssertionError, match=r"num_of_experts \(8\) must match the HybridEP layout \(4\)"):
        open_buffer(RAGGED, None).dispatch_with_permute(hidden=x, topk_idx=ids, num_of_experts=8)


def test_neither_routing_nor_a_handle() -> None:
    x = torch.zeros(4, HIDDEN).bfloat16()
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'size'"):
        open_buffer(JULY, None).dispatch_with_permute(hidden=x)
    with pytest.raises(AssertionError, match="The number of experts should be provided"):
        open_buffer(JULY, None).dispatch(x)
    with pytest.raises(AssertionError, match="The handle and routing_map should not be both None"):
        open_buffer(JULY, None).dispatch(x, num_of_experts=4)


@EVERY
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": torch.zeros(ROWS, HIDDEN)}, r"hidden must have 2 bytes an element \(UINT16\), got torch.float32"),
        ({"hidden": torch.zeros(HIDDEN, ROWS).bfloat16().T}, r"Assertion `hidden.is_contiguous\(\)' failed"),
        ({"probs": torch.zeros(ROWS, 2 * LOCAL).double()}, r"probs.value\(\).dtype\(\) == torch::kFloat32"),
        ({"probs": torch.zeros(2 * LOCAL, ROWS).T}, r"Assertion `probs.value\(\).is_contiguous\(\)' failed"),
    ],
)
def test_tensors_that_the_kernels_cannot_read_abort(release: str, change: dict[str, Any], said: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        source = sources[group.rank()]
        given = {"hidden": source.x, "routing_map": source.routing, "probs": source.probs, "pad_multiple": 1}
        return open_buffer(release, group).dispatch_with_permute(**(given | change))

    with pytest.raises(EmulatedAbort, match=said):
        run_ranks(body, 2)


@BEFORE_RAGGED
def test_probabilities_of_another_shape_are_not_checked_there(release: str) -> None:
    (source,) = make_sources([ROWS])
    given = {"hidden": source.x, "routing_map": source.routing, "probs": torch.zeros(ROWS, 2)}
    with pytest.raises(EmulatedAbort, match=r"probs must be \(64, 4\), got \(64, 2\)"):
        open_buffer(release, None).dispatch_with_permute(**given)
    assert outcome(lambda: open_buffer(RAGGED, None).dispatch_with_permute(**given)).startswith("AssertionError")


@CURRENT
def test_fp8_needs_scales(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer, x = opened(release, hidden_dim=512, use_fp8=True), torch.zeros(ROWS, 512, dtype=torch.uint8)
    with pytest.raises(EmulatedAbort, match=r"Assertion `scaling_factor.has_value\(\)' failed"):
        buffer.dispatch_with_permute(hidden=x, routing_map=source.routing)
    with pytest.raises(EmulatedAbort, match=r"scaling_factor must be \(64, 4\), got \(64, 512\)"):
        buffer.dispatch_with_permute(hidden=x, routing_map=source.routing, scaling_factor=torch.zeros(ROWS, 512))


@FUSED
@CURRENT
def test_combine_takes_bfloat16_only(release: str, fused: bool) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    rows, probs, _, _, handle = sent(buffer, source, fused=fused)
    with pytest.raises(EmulatedAbort, match=r"c10::elementSize\(hidden.scalar_type\(\)\) == 2"):
        returned(buffer, rows.float(), handle, fused=fused)
    with pytest.raises(EmulatedAbort, match=r"args.permuted_tokens.dtype\(\) == torch::kBFloat16"):
        returned(buffer, rows.half(), handle, fused=fused)
    with pytest.raises(EmulatedAbort, match=r"probs.value\(\).dtype\(\) == torch::kFloat32"):
        returned(buffer, rows, handle, probs.bfloat16(), fused=fused)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        returned(buffer, None, handle, fused=fused)  # type: ignore[arg-type]


# Sizes of the output, and handles


@CURRENT
def test_a_blocking_call_with_too_few_permuted_rows_writes_past_the_end(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    if release == APRIL:  # its scan drops rows in blocking mode too
        assert sent(buffer, source, num_permuted_tokens=8)[4][-1].tolist() == [1]
        return
    with pytest.raises(EmulatedAbort, match=r"permute_kernel writes expert row \d+ of 8: deep_ep does not check it"):
        sent(buffer, source, num_permuted_tokens=8)
    assert sent(buffer, source, num_permuted_tokens=0)[0].shape == (0, HIDDEN)  # nothing is launched


def test_padding_that_does_not_fit_is_written_past_the_end_too() -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(JULY, None)
    rows, _, _, _, handle = sent(buffer, source, pad_multiple=64)
    assert rows[-1].eq(0).all()
    call = {"hidden": source.x, "handle": handle, "num_permuted_tokens": len(rows) - 1, "pad_multiple": 64}
    with pytest.raises(EmulatedAbort, match=rf"permute_kernel writes expert row {len(rows) - 1} of {len(rows) - 1}"):
        buffer.dispatch_with_permute(**call)
    assert buffer.dispatch_with_permute(**(call | {"pad_multiple": 0}))[0].shape[0] == len(rows) - 1


@CURRENT
def test_non_blocking_needs_a_size_in_whole_padding(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    for given in (None, -1):
        with pytest.raises(AssertionError, match="The num_permuted_tokens is required for non-blocking mode"):
            sent(buffer, source, non_blocking=True, num_permuted_tokens=given)
    with pytest.raises(AssertionError, match=r"num_permuted_tokens \(250\) must be a multiple of pad_multiple \(16\)"):
        sent(buffer, source, non_blocking=True, num_permuted_tokens=250, pad_multiple=16)


def test_deprecated_arguments_warn_and_still_say_whether_to_block() -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(JULY, None)
    with (
        pytest.warns(UserWarning, match="The use_host_meta is deprecated"),
        pytest.raises(AssertionError, match="required for non-blocking"),
    ):
        sent(buffer, source, use_host_meta=False)
    with pytest.warns(UserWarning, match="The num_dispatched_tokens is deprecated"):
        _, _, _, _, handle = sent(buffer, source, num_dispatched_tokens=3)
    rows = torch.zeros(256, HIDDEN).bfloat16()
    with pytest.warns(UserWarning, match="The num_dispatched_tokens is deprecated"):
        buffer.combine_with_unpermute(hidden=rows, handle=handle, num_dispatched_tokens=3)


@CURRENT
def test_a_cached_handle_needs_the_number_of_rows(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    rows, _, _, _, handle = sent(buffer, source)
    with pytest.raises(TypeError, match="num_permuted_tokens takes an int, got None"):
        buffer.dispatch_with_permute(hidden=source.x, handle=handle)
    with pytest.raises(EmulatedAbort, match="permute_kernel writes expert row"):
        buffer.dispatch_with_permute(hidden=source.x, handle=handle, num_permuted_tokens=len(rows) - 1)
    with (
        pytest.warns(UserWarning, match=r"This handle could be invalid\."),
        pytest.raises(EmulatedAbort, match=r"hidden must be \(64, 32\), got \(32, 32\)"),
    ):
        buffer.dispatch_with_permute(hidden=source.x[:32], handle=handle, num_permuted_tokens=len(rows))


def test_a_handle_of_another_kind_has_another_length() -> None:
    (source,) = make_sources([ROWS])
    april, july = open_buffer(APRIL, None), open_buffer(JULY, None)
    rows, _, _, _, unfused = sent(april, source)
    fused = sent(april, source, fused=True)[4]
    with pytest.raises(ValueError, match=r"not enough values to unpack \(expected 11, got 9\)"):
        returned(april, rows, unfused, fused=True)
    with pytest.raises(ValueError, match=r"too many values to unpack \(expected 9\)"):
        returned(april, rows, fused)
    with pytest.raises(ValueError, match=r"too many values to unpack \(expected 7\)"):
        july.combine(rows, None, unfused)
    for call in (july.combine, lambda hidden: july.combine_with_unpermute(hidden=hidden)):
        with pytest.raises(AssertionError, match="The handle is necessary"):
            call(hidden=rows)
    assert returned(july, rows, sent(july, source, fused=True)[4])[0].shape == (ROWS, HIDDEN)  # one kind since then


@CURRENT
def test_expert_outputs_with_too_few_rows_are_read_past_the_end(release: str) -> None:
    (source,) = make_sources([ROWS])
    buffer = open_buffer(release, None)
    rows, _, _, _, handle = sent(buffer, source)
    with pytest.raises(EmulatedAbort, match=r"unpermute_kernel reads expert row \d+ of \d+"):
        returned(buffer, rows[:-1], handle)
    with pytest.raises(EmulatedAbort, match=r"hidden must have 32 columns, got shape"):
        returned(buffer, torch.zeros(len(rows), 16).bfloat16(), handle)


def test_a_reallocation_ends_the_handles_of_ragged_releases() -> None:
    (source,) = make_sources([ROWS])
    (larger,) = make_sources([600])
    buffer = open_buffer(RAGGED, None)
    rows, _, _, _, handle = sent(buffer, source)
    sent(buffer, larger)
    with pytest.raises(RuntimeError, match=r"created against buffer generation 0, .*\(current generation 1\)"):
        returned(buffer, rows, handle)
    july = open_buffer(JULY, None)
    rows, _, _, _, handle = sent(july, source)
    sent(july, larger)
    assert returned(july, rows, handle)[0].shape == (ROWS, HIDDEN)
    with pytest.raises(AssertionError, match=r"num_of_tokens_per_rank \(8\) must be >= the local token count \(64\)"):
        sent(buffer, source, num_of_tokens_per_rank=8)


def test_a_row_that_lost_all_its_expert_rows_hangs_the_fused_combine() -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: dist.ProcessGroup) -> Any:
        buffer = open_buffer(JULY, group)
        source = sources[group.rank()]
        rows, _, _, _, handle = sent(buffer, source, num_permuted_tokens=16, non_blocking=True, fused=True)
        return outcome(lambda: returned(buffer, rows, handle, fused=True)), returned(buffer, rows, handle)[0]

    for source, (said, sums) in zip(sources, run_ranks(body, 2), strict=True):
        assert said.startswith("EmulatedHang: HybridEPBuffer.combine_with_unpermute: the fused kernel waits")
        assert not sums.isnan().any()  # unfused, a dropped row adds nothing
        assert sums.shape == source.x.shape


def test_settings_of_the_kernels_are_taken_but_for_those_that_change_results() -> None:
    buffer = open_buffer(JULY, None)
    config = buffer.update_template_config(HIDDEN, ROWS, num_of_stages_dispatch_api=4)
    assert config.num_of_stages_dispatch_api == 4
    with pytest.raises(AttributeError, match="no attribute 'num_of_wings'"):
        buffer.update_template_config(HIDDEN, ROWS, num_of_wings=2)
    with pytest.raises(NotImplementedError, match="without device-side sync are not emulated"):
        buffer.update_template_config(HIDDEN, ROWS, device_side_sync_combine_api=False)


def test_tensors_elsewhere_than_on_the_cpu_are_refused() -> None:
    (source,) = make_sources([ROWS])
    with pytest.raises(RuntimeError, match="takes CPU tensors, got one on meta"):
        open_buffer(JULY, None).dispatch_with_permute(hidden=source.x.to("meta"), routing_map=source.routing)
    with pytest.raises(RuntimeError, match="takes CPU tensors, got one on meta"):
        open_buffer(JULY, None).dispatch_with_permute(hidden=source.x, routing_map=source.routing.to("meta"))
