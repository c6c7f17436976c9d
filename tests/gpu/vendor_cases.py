"""The cases of the conformance kit that run on the real deep_ep: those that share their kernels with many others.

V2, V2.5 and HybridEP compile a kernel with nvcc for each new shape, which takes about 8 seconds. Few shapes have nearly
all cases. ``tests/deep_ep_backends/test_compilations.py`` counts the kernels on the emulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from moe_dispatch_testing.case import BackendSpec, Case, case_config
from moe_dispatch_testing.kit import backend_cases

SHAPES = 4
"""Number of shapes whose cases run."""
SECONDS_PER_KERNEL = 8


def vendor_cases(backend: BackendSpec, ep_size: int, device: str = "cpu") -> list[Case]:
    """Return the cases of the most frequent shapes, shape by shape."""
    name = backend if isinstance(backend, str) else backend["name"]
    by_shape: Mapping[Any, list[Case]] = defaultdict(list)
    for case in backend_cases(backend, (ep_size,), device=device):
        config = case_config(backend, case)
        slots = config.num_experts + config.spare_slots(ep_size) * ep_size
        shape: tuple[object, ...] = (slots, bool(config.graph_safe))
        if name == "hybridep":
            shape += (config.pad_multiple,)
        else:
            shape += (config.top_k, case.scenario.wire_dtype, config.max_tokens_per_rank)
        by_shape[shape].append(case)
    frequent = sorted(by_shape.values(), key=len, reverse=True)[:SHAPES]
    return [case for cases in frequent for case in cases]
