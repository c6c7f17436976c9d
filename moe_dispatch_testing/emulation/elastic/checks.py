"""The checks of v2's ElasticBuffer and V2.5's EPBuffer on their arguments, with the texts of the release.

Files and lines are those of v2. ``ElasticRelease.check`` translates them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_dispatch_testing.emulation.elastic.call import HPP, CombineInput, DispatchInput, Options
from moe_dispatch_testing.emulation.elastic.handle import EPHandle
from moe_dispatch_testing.emulation.elastic.release import ElasticRelease
from moe_dispatch_testing.emulation.elastic.sizes import RowSizes
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, require_cpu


def check_dispatch(
    release: ElasticRelease, sent: DispatchInput, options: Options, num_ranks: int, *, is_cached: bool
) -> RowSizes:
    """Make the checks of csrc/elastic/buffer.hpp:731-805 and csrc/kernels/elastic/dispatch.hpp:168.

    Returns:
        The sizes of a row.
    """
    x, ids, weights = sent.x, sent.topk_idx, sent.topk_weights
    require_cpu(release.call("dispatch"), x, sent.sf, ids, weights, sent.stats)
    release.check(not options.do_zero_padding or options.do_expand, "not do_zero_padding or do_expand", f"{HPP}:731")
    _require_dims(release, x, 2)
    release.check(x.is_contiguous(), "x.is_cuda() and x.is_contiguous()", f"{HPP}:754")
    _check_row_bytes(release, x, 755)
    bound = "num_tokens <= num_max_tokens_per_rank"
    release.check(x.shape[0] <= options.num_max_tokens_per_rank, bound, f"{HPP}:756")
    if sent.sf is not None:
        _require_dims(release, sent.sf, 2)
        release.check(sent.sf.shape[0] == x.shape[0], "num_tokens == num_tokens_", f"{HPP}:765")
        release.check(sent.sf.element_size() == 4, "sf->element_size() == sizeof(sf_pack_t)", f"{HPP}:767")
    _require_dims(release, ids, 2)
    release.check(ids.shape[0] == x.shape[0], "num_tokens == num_tokens_", f"{HPP}:776")
    of_type = "topk_idx.scalar_type() == c10::CppTypeToScalarType<topk_idx_t>::value"
    release.check(ids.dtype == torch.int64, of_type, f"{HPP}:777")
    release.check(ids.is_contiguous(), "topk_idx.is_cuda() and topk_idx.is_contiguous()", f"{HPP}:778")
    if weights is not None:
        _check_weights(release, weights, x.shape[0], ids.shape[1])
    num_local_experts = options.num_experts // num_ranks
    if sent.stats is not None:
        _check_stats(release, sent.stats, num_local_experts, is_cached=is_cached)
    release.check(options.num_experts % num_ranks == 0, "num_experts % nccl_context->num_ranks == 0", f"{HPP}:805")
    return RowSizes(
        release=release,
        num_max_tokens_per_rank=options.num_max_tokens_per_rank,
        hidden=x.shape[1],
        element_bytes=x.element_size(),
        num_sf_packs=0 if sent.sf is None else sent.sf.shape[1],
        num_topk=ids.shape[1],
    )


def check_compiles(release: ElasticRelease, num_topk: int) -> None:
    """Refuse a top-k for which the kernel does not compile (deep_ep/include/deep_ep/impls/dispatch.cuh:93)."""
    if num_topk > 32:
        _fail_to_compile(release, "Insufficient lanes", "deep_ep/include/deep_ep/impls/dispatch.cuh:93")


def check_ids(release: ElasticRelease, topk_idx: Tensor, num_experts: int) -> None:
    """Refuse an id of ``num_experts`` or more. The kernel would write beyond its last counter (dispatch.cuh:96-101)."""
    if topk_idx.numel() and int(topk_idx.max()) >= num_experts:
        raise EmulatedAbort(
            f"{release.call('dispatch')}: topk_idx must be below num_experts ({num_experts}), got "
            f"{int(topk_idx.max())}. The kernel writes outside shared memory. Use -1 for a choice without an expert."
        )


def check_combine(release: ElasticRelease, sent: CombineInput, handle: EPHandle, num_ranks: int) -> RowSizes:
    """Make the checks of csrc/elastic/buffer.hpp:1201-1247 and deep_ep/include/deep_ep/impls/combine.cuh:109.

    Returns:
        The sizes of a row.
    """
    x, topk_weights = sent.x, sent.topk_weights
    require_cpu(release.call("combine"), x, topk_weights, *sent.biases)
    _require_dims(release, x, 2)
    release.check(x.is_contiguous(), "x.is_cuda() and x.is_contiguous()", f"{HPP}:1202")
    release.check(x.dtype == torch.bfloat16, "x.scalar_type() == torch::kBFloat16", f"{HPP}:1203")
    _check_row_bytes(release, x, 1204)
    num_tokens, num_topk = handle.topk_idx.shape
    ranks = handle.psum_num_recv_tokens_per_scaleup_rank.shape[0]
    release.check(ranks == num_ranks, "num_scaleup_ranks == nccl_context->num_scaleup_ranks", f"{HPP}:1211")
    bound = "num_combined_tokens <= num_max_tokens_per_rank"
    release.check(num_tokens <= handle.num_max_tokens_per_rank, bound, f"{HPP}:1214")
    rows = "num_reduced_tokens == (use_expanded_layout ? num_reduced_tokens : num_tokens)"
    release.check(handle.do_expand or handle.recv_src_metadata.shape[0] == x.shape[0], rows, f"{HPP}:1219")
    columns = handle.recv_src_metadata.shape[1]
    release.check(columns == num_topk + 2, "num_topk_p2 == num_topk + 2", f"{HPP}:1220")
    if topk_weights is not None:
        _check_combined_weights(release, topk_weights, x.shape[0], num_topk, handle)
    for bias in sent.biases:
        release.check(
            bias.dim() == 2 and bias.is_contiguous(), "bias.dim() == 2 and bias.is_contiguous()", f"{HPP}:1242"
        )
        release.check(bias.dtype == x.dtype, "bias.scalar_type() == x.scalar_type()", f"{HPP}:1243")
        fits = "bias.size(0) == num_combined_tokens and bias.size(1) == hidden"
        release.check(bias.shape == (num_tokens, x.shape[1]), fits, f"{HPP}:1244")
    if x.shape[1] % 256 != 0:
        _fail_to_compile(release, "Invalid hidden", "deep_ep/include/deep_ep/impls/combine.cuh:109")
    return RowSizes(
        release=release,
        num_max_tokens_per_rank=handle.num_max_tokens_per_rank,
        hidden=x.shape[1],
        element_bytes=2,
        num_sf_packs=0,
        num_topk=num_topk,
    )


def _check_combined_weights(
    release: ElasticRelease, weights: Tensor, num_rows: int, num_topk: int, handle: EPHandle
) -> None:
    _require_dims(release, weights, 1 if handle.do_expand else 2)
    if handle.do_expand:
        release.check(weights.shape[0] == num_rows, "num_tokens == num_tokens__", f"{HPP}:1228")
    else:
        rule = "num_tokens == num_tokens__ and num_topk == num_topk__"
        release.check(weights.shape == (num_rows, num_topk), rule, f"{HPP}:1231")
    placed = "topk_weights->is_cuda() and topk_weights->is_contiguous()"
    release.check(weights.is_contiguous(), placed, f"{HPP}:1233")
    release.check(weights.dtype == torch.float32, "topk_weights->scalar_type() == torch::kFloat", f"{HPP}:1234")


def _check_weights(release: ElasticRelease, weights: Tensor, num_tokens: int, num_topk: int) -> None:
    _require_dims(release, weights, 2)
    release.check(weights.shape[0] == num_tokens, "num_tokens == num_tokens__", f"{HPP}:784")
    placed = "topk_weights->is_cuda() and topk_weights->is_contiguous()"
    release.check(weights.is_contiguous(), placed, f"{HPP}:785")
    _require_type(weights, torch.float32, "Float")
    if weights.shape[1] != num_topk:
        raise EmulatedAbort(
            f"{release.call('dispatch')}: topk_weights must have the {num_topk} columns of topk_idx, "
            f"got {weights.shape[1]}. deep_ep does not check it ({release.line(f'{HPP}:783')}), and the kernel reads "
            "past the weights."
        )


def _check_stats(release: ElasticRelease, stats: Tensor, num_local_experts: int, *, is_cached: bool) -> None:
    _require_dims(release, stats, 1)
    release.check(stats.shape[0] == num_local_experts, "num_local_experts == num_local_experts_", f"{HPP}:795")
    _require_type(stats, torch.int32, "Int")
    unused = "cumulative_local_expert_recv_stats == nullptr"
    release.check(not is_cached, unused, "csrc/kernels/elastic/dispatch.hpp:168")


def _require_dims(release: ElasticRelease, tensor: Tensor, dims: int) -> None:
    release.check(tensor.dim() == dims, "t.dim() == kNumDims", "csrc/elastic/utils.hpp:17")


def _require_type(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse another dtype with the text of torch's ``data_ptr<T>()``."""
    if tensor.dtype != dtype:
        names = {torch.bfloat16: "BFloat16", torch.float64: "Double", torch.float16: "Half", torch.int64: "Long"}
        raise RuntimeError(f"expected scalar type {name} but found {names.get(tensor.dtype, tensor.dtype)}")


def _check_row_bytes(release: ElasticRelease, x: Tensor, line: int) -> None:
    holds = x.shape[1] * x.element_size() % 16 == 0
    release.check(holds, "(x.size(1) * x.element_size()) % sizeof(int4) == 0", f"{HPP}:{line}")


def _fail_to_compile(release: ElasticRelease, said: str, source: str) -> None:
    """Raise the error of a static assertion: a kernel is compiled on first use, and nvcc prints the failure."""
    raise RuntimeError(
        'Assertion exception (csrc/jit/compiler.hpp:239): false and "NVCC compilation failed"; '
        f'nvcc: error: static assertion failed with "{said}" ({release.line(source)})'
    )
