"""The rules in which V2.5's EPBuffer differs from v2's ElasticBuffer, and where each rule is in the source.

Both classes have one implementation here. Its checks name the lines of v2, and ``ElasticRelease`` translates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from moe_dispatch_testing.emulation.refusals import elastic_assert


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRelease:
    """The rules of one release.

    Attributes:
        name: Name of the release.
        buffer: Name of the buffer class.
        row_alignment_bytes: Number of which the bytes of a row in a buffer are a multiple.
        max_local_experts: Largest number of experts of one rank.
        sm_gbs: Bandwidths at which one SM reads and writes.
        sm_margin: Factor for SMs above the computed number.
        sm_multiple: Number of which the recommended number of SMs is a multiple.
        lines: File and line of a rule in this release, by file and line in v2.
        words: Names in the conditions of this release, by name in v2.
    """

    name: str
    buffer: str
    row_alignment_bytes: int
    max_local_experts: int
    sm_gbs: tuple[float, float]
    sm_margin: float
    sm_multiple: int
    lines: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_v25(self) -> bool:
        """Whether this is V2.5.

        Its handles hold the ``topk_idx`` of the caller, not a copy, and refuse it after a change in place. A given
        number of SMs is rounded up to an even number. Combine counts for the recommended number of SMs. Calls can
        defer their epilogues.
        """
        return self.buffer == "EPBuffer"

    def call(self, verb: str) -> str:
        """Return the name of a method with its class, for errors."""
        return f"{self.buffer}.{verb}"

    def line(self, source: str) -> str:
        """Return the file and line of this release for a file and line of v2."""
        return self.lines.get(source, source)

    def check(self, holds: bool, condition: str, source: str) -> None:
        """Raise the error of the release if a check on the host fails. ``condition`` and ``source`` are those of v2."""
        for word, other in self.words.items():
            condition = condition.replace(word, other)
        elastic_assert(holds, condition, self.line(source))


# Lines of csrc/elastic/buffer.hpp in v2, and of csrc/buffers/ep.hpp in V2.5.
_BUFFER_LINES = {
    98: 66,
    540: 142,
    657: 254,
    660: 257,
    728: 312,
    731: 317,
    754: 342,
    755: 343,
    756: 344,
    765: 353,
    767: 355,
    776: 364,
    777: 365,
    778: 366,
    783: 371,
    784: 372,
    785: 373,
    795: 383,
    805: 394,
    963: 544,
    979: 312,
    1198: 808,
    1202: 815,
    1203: 816,
    1204: 817,
    1211: 824,
    1214: 827,
    1219: 832,
    1220: 833,
    1228: 842,
    1231: 844,
    1233: 846,
    1234: 847,
    1242: 854,
    1243: 855,
    1244: 856,
    1254: 866,
}
_IMPLS = "deep_ep/include/deep_ep/impls"
_LAYOUTS = "deep_ep/include/deep_ep/layout/ep"
_V2_LAYOUT = "deep_ep/include/deep_ep/common/layout.cuh"

V2 = ElasticRelease(
    name="v2-2.1.0",
    buffer="ElasticBuffer",
    row_alignment_bytes=32,  # deep_ep/include/deep_ep/common/ptx.cuh:16
    max_local_experts=256,  # common/layout.cuh:21
    sm_gbs=(200, 50),
    sm_margin=1.25,
    sm_multiple=2,
)
V25 = ElasticRelease(
    name="v2.5.0",
    buffer="EPBuffer",
    row_alignment_bytes=64,  # layout/ep/token.cuh:34-37 and common/compiled.cuh:68
    max_local_experts=512,  # layout/ep/workspace.cuh:11
    sm_gbs=(180, 45),  # deep_ep/utils/envs.py:194-204
    sm_margin=1.3,  # deep_ep/buffers/ep.py:530
    sm_multiple=4,
    lines={
        **{f"csrc/elastic/buffer.hpp:{line}": f"csrc/buffers/ep.hpp:{found}" for line, found in _BUFFER_LINES.items()},
        "csrc/elastic/utils.hpp:17": "csrc/utils/tensor.hpp:16",
        "csrc/kernels/elastic/dispatch.hpp:168": "csrc/kernels/ep/dispatch.hpp:57",
        f"{_V2_LAYOUT}:37": f"{_LAYOUTS}/workspace.cuh:43",
        f"{_V2_LAYOUT}:38": f"{_LAYOUTS}/workspace.cuh:44",
        f"{_V2_LAYOUT}:39": f"{_LAYOUTS}/workspace.cuh:45",
        f"{_V2_LAYOUT}:40": f"{_LAYOUTS}/workspace.cuh:46",
        f"{_V2_LAYOUT}:198": f"{_LAYOUTS}/token.cuh:29",
        f"{_IMPLS}/combine.cuh:69": f"{_IMPLS}/ep/combine.cuh:70",
        f"{_IMPLS}/combine.cuh:109": f"{_IMPLS}/ep/combine.cuh:110",
        f"{_IMPLS}/dispatch.cuh:93": f"{_IMPLS}/ep/dispatch.cuh:92",
        f"{_IMPLS}/dispatch.cuh:101": f"{_IMPLS}/ep/dispatch.cuh:100",
        f"{_IMPLS}/dispatch_copy_epilogue.cuh:107": f"{_IMPLS}/ep/dispatch_copy_epilogue.cuh:108",
        f"{_IMPLS}/dispatch_copy_epilogue.cuh:119": f"{_IMPLS}/ep/dispatch_copy_epilogue.cuh:120",
    },
    words={
        "nccl_context->": "context->",
        "symmetric::kNumAlignmentBytes": "kNumAllocationAlignmentBytes",
        "ptx::kNumTMAAlignBytes": "kNumTMAAlignmentBytes",
        "jit::device_runtime->": "jit->device.",
        "kNumMaxExperts": "EPSignals::kNumMaxExperts",
        "bias.dim() == 2 and bias.is_contiguous()": "bias.dim() == 2 and bias.is_cuda() and bias.is_contiguous()",
    },
)
"""Facts of V2.5: commit def8651 of DeepEP for the C++ files, and db8166d for the Python files, both of 2026-09."""
