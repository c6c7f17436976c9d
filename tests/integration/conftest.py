"""Processes of ranks start with the frameworks imported, which takes longer than most of what they run."""

from __future__ import annotations

import multiprocessing

# What cannot be imported is left out. The list takes the place of the one in tests/conftest.py, which it begins with.
PRELOADED = [
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "transformers.distributed.expert_parallel",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.generation",
    "torchtitan.distributed.activation_checkpoint",
    "torchtitan.models.common.moe_sharding",
]
if multiprocessing.get_start_method(allow_none=True) == "forkserver":
    multiprocessing.set_forkserver_preload(PRELOADED)
