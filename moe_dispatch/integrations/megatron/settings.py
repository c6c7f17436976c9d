"""Make a DispatcherConfig from a TransformerConfig, and refuse settings of Megatron that do not work.

This module does not import megatron-core. A config is any object with the fields of a TransformerConfig. Fields that a
version lacks count as None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.checks import refuse_chunks, refuse_quantised_rows
from moe_dispatch.seams.options import spelled_out, with_option

# Fields of a DispatcherConfig that come from Megatron, and their source there.
_DERIVED = {
    "num_experts": "num_moe_experts",
    "top_k": "moe_router_topk",
    "hidden_size": "hidden_size, or moe_latent_size",
    "weights": "its experts, which apply the probabilities",
}
# Accepted values of fields of Megatron's config, including the default.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "transformer_impl": (None, "local", "transformer_engine"),
    "moe_dispatch_fwd_dtype": (None, "bf16"),
    "moe_combine_bwd_dtype": (None, "bf16"),
}
# The way out for each field with another value. Fields that are not in _ACCEPTED must be None or False.
_WAYS_OUT = {
    "moe_token_dispatcher_type": 'Set it to "alltoall", and name the library here: backend="deepep", '
    'backend="hybridep" or backend="nccl_ep"',
    "moe_enable_deepep": 'Leave it out, and pass backend="deepep"',
    "moe_permute_fusion_into_hybridep": 'Leave it out, and pass backend={"name": "hybridep", "fuse_permute": True}',
    "moe_hybridep_pad_uneven_dispatch_inputs": "Leave it out: the dispatcher makes row counts equal if needed",
    "moe_hybridep_pad_variable_tokens": "Leave it out: the dispatcher makes row counts equal if needed",
    "moe_flex_dispatcher_num_sms": 'Leave it out, and pass an option: backend={"name": "deepep", "num_sms": 24}, or '
    'num_sms_dispatch and num_sms_combine of "hybridep"',
    "moe_ncclep_static_shape": "Leave it out, and pass graph_safe=True, max_tokens_per_rank=",
    "moe_ncclep_zero_copy": "Leave it out",
    "moe_ncclep_use_symm_mem": "Leave it out",
    "moe_dispatch_fwd_dtype": 'Leave it out, and pass wire="mxfp8"',
    "moe_combine_bwd_dtype": "Leave it out: gradients travel in their own dtype",
    "moe_megakernel_backend": "Leave it out: a megakernel moves rows and runs experts itself, so it takes the place of "
    "every dispatcher",
    "moe_pad_expert_input_to_capacity": "Set it to False; for static shapes pass max_tokens_per_rank= and "
    'graph_safe={"capacity_factor": ..., "on_overflow": ...}',
    "moe_pad_experts_for_cuda_graph_inference": "Set it to False; for static shapes pass graph_safe=True, "
    "max_tokens_per_rank=",
    "moe_paged_stash": "Set it to False; Dispatcher.retry_on_overflow repeats a step that outgrew its buffers",
    "transformer_impl": 'Use "transformer_engine": the inference layers have their own dispatchers',
}
# Fields of Megatron's config that do not work with balanced experts, and the reason.
_UNBALANCED = {
    "fp8": "transformer-engine keeps quantised weights, and those of copies change",
    "fp4": "transformer-engine keeps quantised weights, and those of copies change",
    "use_transformer_engine_op_fuser": "the fused operators hold parameters of their own",
    "overlap_dispatch_backward_with_experts_wgrad": "gradients of copies would not come home before the reduction",
}


def dispatcher_config(
    config: Any, backend: str | Mapping[str, Any], *, etp_size: int, pad_multiple: int, given: dict[str, Any]
) -> DispatcherConfig:
    """Return the DispatcherConfig of an MoE layer with this TransformerConfig. ``given`` holds further fields.

    Each expert has a part on each of the ``etp_size`` expert-tensor-parallel ranks, and the Dispatcher treats a part as
    an expert. Each of Megatron's experts needs a multiple of ``pad_multiple`` rows.
    """
    check_settings(config)
    for field in _DERIVED.keys() & given.keys():
        raise ConfigError(
            f"MegatronDispatcher: {field} must be left to Megatron, got {given[field]!r}. It comes from "
            f"{_DERIVED[field]}."
        )
    fields: dict[str, Any] = {"pad_multiple": pad_multiple, **given}
    if (factor := _value(config, "moe_expert_rank_capacity_factor")) is not None:
        capacity = with_option(given, "graph_safe", "capacity_factor", float(factor))
        fields["graph_safe"] = {**capacity, **spelled_out("graph_safe", given.get("graph_safe"))}
    derived = DispatcherConfig(
        backend=backend,
        num_experts=config.num_moe_experts * etp_size,
        top_k=config.moe_router_topk * etp_size,
        hidden_size=_value(config, "moe_latent_size") or config.hidden_size,
        weights="experts",
        **fields,
    )
    _check_balance(config, derived)
    refuse_quantised_rows("MegatronDispatcher", derived)
    refuse_chunks("MegatronDispatcher", derived)
    if derived.pad_multiple_rows % pad_multiple:
        raise ConfigError(
            f"MegatronDispatcher: pad_multiple must be a multiple of {pad_multiple}, which the precision of the "
            f"experts needs, got {derived.pad_multiple_rows}. Leave it out."
        )
    if captures_experts(config) and not derived.graph_safe:
        raise ConfigError(
            f"MegatronDispatcher: cuda_graph_impl={config.cuda_graph_impl!r} captures the MoE layer, which needs "
            "graph_safe=True, got False. Pass graph_safe=True and max_tokens_per_rank=, or capture moe_router only."
        )
    return derived


def check_settings(config: Any) -> None:
    """Raise ConfigError for a setting that is never supported. The error names the field, its value and a way out."""
    if not config.num_moe_experts:
        raise ConfigError(
            f"MegatronDispatcher: num_moe_experts must be a positive number, got {config.num_moe_experts}. Build a "
            "model with MoE layers."
        )
    for field, way_out in _WAYS_OUT.items():
        value = _value(config, field)
        if value not in _ACCEPTED.get(field, (None, False)):
            raise ConfigError(f"MegatronDispatcher: {field}={value!r} is not supported. {way_out}.")
    if overlaps(config) and (graphs := _value(config, "cuda_graph_impl")) not in (None, "none"):
        raise ConfigError(
            f"MegatronDispatcher: cuda_graph_impl={graphs!r} does not work with overlap_moe_expert_parallel_comm=True: "
            "a replayed graph runs no hooks and keeps no tensors between phases. Leave one of them out."
        )


def _check_balance(config: Any, ours: DispatcherConfig) -> None:
    """Refuse spare expert slots that cannot be served, or not with these settings of Megatron."""
    if ours.slot_options is None:
        return
    if ours.slot_options.name != "exact" or ours.graph_safe:
        raise ConfigError(
            'MegatronDispatcher: balance must be "exact" with graph_safe=False, got '
            f"balance={ours.balance!r} and graph_safe={ours.graph_safe}. Leave one of them out."
        )
    for field, why in _UNBALANCED.items():
        if value := _value(config, field):
            raise ConfigError(f"MegatronDispatcher: balance does not work with {field}={value!r}: {why}.")


def overlaps(config: Any) -> bool:
    """Return whether Megatron runs the forward of one micro-batch beside the backward of another."""
    return bool(_value(config, "overlap_moe_expert_parallel_comm"))


def captures_experts(config: Any) -> bool:
    """Return whether CUDA graphs of this config capture the communication of an MoE layer, and not only its router."""
    how = _value(config, "cuda_graph_impl")
    if how in (None, "none"):
        return False
    # 0.16 calls the field cuda_graph_scope. It is one name or a list of names; an empty list means the whole layer.
    scope = _value(config, "cuda_graph_modules") or _value(config, "cuda_graph_scope") or ()
    names = {getattr(part, "name", part) for part in ((scope,) if isinstance(scope, str) else scope)}
    return how == "full_iteration" or not names or bool(names & {"moe", "full", "full_iteration"})


def _value(config: Any, field: str) -> Any:
    return getattr(config, field, None)
