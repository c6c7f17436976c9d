"""A TransformerConfig as a DispatcherConfig; what the Dispatcher cannot do is refused by its Megatron name.

Nothing here imports megatron-core: a config is any object with its fields, and fields that a version lacks are unset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError

# Fields of a DispatcherConfig that Megatron decides, and where.
_DERIVED = {
    "num_experts": "num_moe_experts",
    "top_k": "moe_router_topk",
    "hidden_size": "hidden_size, or moe_latent_size",
    "weights": "its experts, which apply the probabilities",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """Values of one field that work here; its absence works too."""

    field: str
    accepted: tuple[Any, ...] = (None, False)
    way_out: str


_RULES = (
    _Rule(
        field="moe_token_dispatcher_type",
        accepted=("alltoall", "allgather"),
        way_out='Set it to "alltoall", and name the library here: backend="deepep" or backend="hybridep"',
    ),
    _Rule(field="moe_enable_deepep", way_out='Leave it out, and pass backend="deepep"'),
    _Rule(
        field="moe_permute_fusion_into_hybridep",
        way_out='Leave it out, and pass backend={"name": "hybridep", "fuse_permute": True}',
    ),
    _Rule(field="moe_hybridep_pad_uneven_dispatch_inputs", way_out="Leave it out: rows are always evened out"),
    _Rule(
        field="moe_flex_dispatcher_num_sms",
        way_out='Leave it out, and pass an option: backend={"name": "deepep", "num_sms": 24}, or num_sms_dispatch and '
        'num_sms_combine of "hybridep"',
    ),
    _Rule(field="moe_ncclep_static_shape", way_out="Leave it out, and pass graph_safe=True, max_tokens_per_rank="),
    _Rule(field="moe_ncclep_zero_copy", way_out="Leave it out"),
    _Rule(
        field="moe_pad_expert_input_to_capacity",
        way_out="Set it to False; for static shapes pass graph_safe=True, max_tokens_per_rank=, capacity_factor=",
    ),
    _Rule(
        field="moe_pad_experts_for_cuda_graph_inference",
        way_out="Set it to False; for static shapes pass graph_safe=True, max_tokens_per_rank=",
    ),
    _Rule(
        field="moe_paged_stash",
        way_out="Set it to False; for a step that outgrew its buffers there is Dispatcher.retry_on_overflow",
    ),
    _Rule(
        field="overlap_moe_expert_parallel_comm",
        way_out="Set it to False: it cuts the autograd graph between phases, which belong together here",
    ),
    _Rule(
        field="transformer_impl",
        accepted=(None, "local", "transformer_engine"),
        way_out='Use "transformer_engine"; the inference layers come with dispatchers of their own',
    ),
)


def dispatcher_config(
    config: Any, backend: str | dict[str, Any], *, etp_size: int, pad_multiple: int, given: dict[str, Any]
) -> DispatcherConfig:
    """The DispatcherConfig of an MoE layer.

    Args:
        config: its TransformerConfig.
        backend: as in a DispatcherConfig.
        etp_size: expert-tensor-parallel ranks; each holds a part of every one of its experts, which the Dispatcher sees
            as an expert of its own.
        pad_multiple: rows per expert that Megatron's experts need, 1 for any.
        given: further fields of a DispatcherConfig.

    Raises:
        ConfigError: a setting of Megatron's that is not supported, a field that it decides, or fields that do not fit.
    """
    check_settings(config)
    for field in _DERIVED.keys() & given.keys():
        raise ConfigError(
            f"MegatronDispatcher: {field} must be left to Megatron, got {given[field]!r}. It comes from "
            f"{_DERIVED[field]}."
        )
    fields: dict[str, Any] = {"pad_multiple": pad_multiple}
    if (factor := _value(config, "moe_expert_rank_capacity_factor")) is not None:
        fields |= {"graph_safe": True, "capacity_factor": float(factor)}
    derived = DispatcherConfig(
        backend=backend,
        num_experts=config.num_moe_experts * etp_size,
        top_k=config.moe_router_topk * etp_size,
        hidden_size=_value(config, "moe_latent_size") or config.hidden_size,
        weights="experts",
        **(fields | given),
    )
    _check_padding(derived, pad_multiple)
    _check_graphs(config, derived)
    return derived


def check_settings(config: Any) -> None:
    """Refuse what does not depend on groups.

    Raises:
        ConfigError: naming Megatron's field, its value and the way out.
    """
    if not config.num_moe_experts:
        raise ConfigError(
            f"MegatronDispatcher: num_moe_experts must be a positive number, got {config.num_moe_experts}. Build a "
            "model with MoE layers."
        )
    for rule in _RULES:
        value = _value(config, rule.field)
        if value not in rule.accepted:
            raise ConfigError(f"MegatronDispatcher: {rule.field}={value!r} is not supported. {rule.way_out}.")


def captures_experts(config: Any) -> bool:
    """Whether CUDA graphs of this config hold the communication of an MoE layer, not only its router."""
    how = _value(config, "cuda_graph_impl")
    if how in (None, "none"):
        return False
    # 0.16 calls the field cuda_graph_scope. A string is one name; no name is all of a layer.
    scope = _value(config, "cuda_graph_modules") or _value(config, "cuda_graph_scope") or ()
    names = {getattr(part, "name", part) for part in ((scope,) if isinstance(scope, str) else scope)}
    return how == "full_iteration" or not names or bool(names & {"moe", "full", "full_iteration"})


def _check_padding(derived: DispatcherConfig, needed: int) -> None:
    if derived.pad_multiple_rows % needed:
        raise ConfigError(
            f"MegatronDispatcher: pad_multiple must be a multiple of {needed}, which these experts need in their "
            f"precision, got {derived.pad_multiple_rows}. Leave it out."
        )


def _check_graphs(config: Any, derived: DispatcherConfig) -> None:
    if captures_experts(config) and not derived.graph_safe:
        raise ConfigError(
            f"MegatronDispatcher: cuda_graph_impl={config.cuda_graph_impl!r} captures the MoE layer, which needs "
            "graph_safe=True, got False. Pass graph_safe=True and max_tokens_per_rank=, or capture moe_router only."
        )


def _value(config: Any, field: str) -> Any:
    return getattr(config, field, None)
