"""Which public names will stay.

A *stable* name changes only as this says: the old way works for one more minor version, with a ``DeprecationWarning``
that names the new way. An *experimental* name may change in any version. The CHANGELOG names every change of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The public names of one module."""

    stable: tuple[str, ...] = ()
    experimental: tuple[str, ...] = ()


def _names(stable: str = "", experimental: str = "") -> Names:
    return Names(stable=tuple(stable.split()), experimental=tuple(experimental.split()))


PUBLIC = {
    "moe_dispatch": _names(
        stable="DispatcherConfig Dispatcher build_dispatcher Routing Dispatched Plan "
        "BSHD SBHD THD Rows Masked MoEDispatchError",
        experimental="capture",
    ),
    "moe_dispatch.layouts": _names(
        stable="BSHD SBHD THD Rows Masked Layout Shard ShardKind broadcast_layout padded_length sequence_multiple "
        "bshd_to_thd thd_to_bshd shard_for_context_parallel unshard_from_context_parallel",
    ),
    "moe_dispatch.errors": _names(
        stable="BackendUnavailableError CapacityError ConfigError InputError IntegrationError LayoutError "
        "LostPeerError MoEDispatchError PeerError StateError TraceError",
    ),
    "moe_dispatch.dispatchers": _names(
        stable="Dispatcher build_dispatcher Metrics RequiredCapacity",
        experimental="SlotWeights even_rounds release reopen run_in_chunks",
    ),
    "moe_dispatch.backends": _names(
        stable="register_backend known_backends load_backend parse_backend",
        experimental="PROTOCOL BackendOptions Backend Route BackendContext Constraints WireSupport GraphSafeSupport "
        "MoEShape Sizes Arrived Communicator Usable Rejected Volume SentBytes",
    ),
    "moe_dispatch.backends.rank_major": _names(experimental="RankMajorRoute arrive"),
    "moe_dispatch.backends.wire": _names(experimental="WireFormat Encoded WireOptions"),
    "moe_dispatch.types": _names(experimental="InFlight"),
    "moe_dispatch.config": _names(experimental="ConstraintOverrides GraphSafeOptions"),
    "moe_dispatch.steps.options": _names(experimental="ChunkOptions"),
    "moe_dispatch.quantised": _names(
        experimental="mx_tensor te_grouped_tensor torch_arguments blocked_scales deep_gemm_pair deep_gemm_layout "
        "grouped_gemm quantised_gradient gradient_as QuantisedRows QuantisedOptions",
    ),
    "moe_dispatch.lean": _names(experimental="Activation Outputs first_mm last_mm swiglu"),
    "moe_dispatch.pipelining": _names(experimental="build_stage read_layout share_layouts"),
    "moe_dispatch.recompute": _names(experimental="checkpoint keep_routes keep_routes_of keep_routes_in keep_ids"),
    "moe_dispatch.training": _names(experimental="Setup Table Held OnParts PerExpert joined_group"),
    "moe_dispatch.replay": _names(experimental="RoutingTable Turn Cut Recording replayed SequenceId"),
    "moe_dispatch.balance": _names(
        experimental="ExpertPlacement ExactPlacement exact expected_rows EplbOptions ExactOptions LeastLoadedOptions "
        "ManualOptions Planner PlannerOptions eplb least_loaded run_planner load_planner known_planners",
    ),
    "moe_dispatch.permutation": _names(
        experimental="Permutation SlotIndex TorchPermutation choose_permutation known_permutations probe_permutation "
        "accumulation_dtype count_experts count_values group_slots group_statically merge_slots round_up",
    ),
    "moe_dispatch.integrations.packing": _names(experimental="packing_for Packing PackingSupport"),
    "moe_dispatch.integrations.megatron": _names(
        stable="convert pre_wrap_hook",
        experimental="RoutingReplay keep_routes moe_layer_spec follow_packed_sequences DispatchMoELayer "
        "MegatronDispatcher",
    ),
    "moe_dispatch.integrations.transformers": _names(
        stable="config_for register attach", experimental="dispatchers_of RoutingReplay"
    ),
    "moe_dispatch.integrations.torchtitan": _names(
        stable="use_moe_dispatch",
        experimental="moe_dispatch_override leave_out_padding RoutingReplay MoEDispatchTokenDispatcher "
        "MoEDispatchRoutedExperts",
    ),
    "moe_dispatch.integrations.deepspeed": _names(experimental="use_moe_dispatch"),
    "moe_dispatch.integrations.axolotl": _names(experimental="MoEDispatchArgs MoEDispatchPlugin"),
    "moe_dispatch.integrations.nemo_automodel": _names(stable="use_moe_dispatch", experimental="AutomodelDispatcher"),
    "moe_dispatch_testing": _names(
        stable="check_backend conformance_cases run_ranks run_processes",
        experimental="excuses Report Excuse Failure Case run_case Scenario SCENARIOS ConformanceError Strict "
        "StrictOptions refuse_host_syncs allow_host_syncs HostSyncError trace_static count_collectives Collectives "
        "Collective count_host_syncs HostRead RankFailed Ranks",
    ),
    "moe_dispatch_testing.prove": _names(experimental="Proof Setup load_setup look prove prove_all"),
    "moe_dispatch_testing.emulation": _names(
        experimental="RELEASES emulated_deep_ep imported_as_deep_ep EmulatedAbort EmulatedHang"
    ),
    "moe_dispatch_tools.traces": _names(experimental="Trace Call Part RunLog RunWriter"),
}
"""The public names by module. The fields of ``DispatcherConfig`` are stable, except ``EXPERIMENTAL_FIELDS``."""

EXPERIMENTAL_FIELDS = (
    "balance",
    "chunks",
    "deliver",
    "wire.deliver",
    "wire.gradients",
)
