"""Public names and config fields, frozen: a change here is a change for every user."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

import moe_dispatch
from moe_dispatch import Dispatched, DispatcherConfig, Plan, Routing, backends, dispatchers, errors, layouts, replay
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch.backends.base import Arrived, BackendOptions, MoEShape
from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions
from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions
from moe_dispatch.backends.local import LocalOptions
from moe_dispatch.config import ConstraintOverrides
from moe_dispatch.types import Capacity, Sizes

PACKAGE = """
    BSHD Dispatched Dispatcher DispatcherConfig Masked MoEDispatchError Plan Routing Rows SBHD THD
    build_dispatcher capture
"""
BACKENDS = """
    Arrived Backend BackendContext BackendOptions Communicator Constraints MoEShape PROTOCOL Rejected Route Sizes
    Usable Volume SentBytes known_backends load_backend parse_backend register_backend
"""
LAYOUTS = """
    BSHD Layout Masked Rows SBHD Shard ShardKind THD broadcast_layout bshd_to_thd
    padded_length sequence_multiple shard_for_context_parallel thd_to_bshd unshard_from_context_parallel
"""
REPLAY = "Cut Recording RoutingTable SequenceId replayed"
DISPATCHERS = "Dispatcher Metrics RequiredCapacity SlotWeights build_dispatcher"
ERRORS = (
    "BackendUnavailableError CapacityError ConfigError InputError IntegrationError LayoutError LostPeerError "
    "MoEDispatchError PeerError StateError TraceError"
)

CONFIG_FIELDS = """
    backend num_experts top_k hidden_size spare_experts_per_rank balance balance_bound balance_min_rows
    pad_multiple weights wire_dtype row_counts max_tokens_per_rank infer_layout
    graph_safe capacity_factor on_overflow permutation device watchdog debug constraints
"""
CONSTRAINTS = """
    row_multiple equal_rows group_max min_rows max_rows hidden_multiple max_hidden dtypes devices max_top_k
    group_sizes group_sizes_hint local_experts_multiple max_local_experts idle_ranks pads_experts exchanges_counts
    counts_with_sizes
    wire_dtypes graph_safe graph_safe_reason drop_order compilable differentiable
"""
VALUES: dict[type, str] = {
    Routing: "topk_ids topk_weights drift",
    Plan: "layout num_rows real_rows valid_T num_sent sizes settled owner footprint",
    Dispatched: "rows tokens_per_expert real_tokens_per_expert host_counts weights pad_multiple placement state",
    Arrived: "rows weights tokens_per_expert real_tokens_per_expert tokens_per_expert_list route demand",
    backends.Constraints: CONSTRAINTS,
    MoEShape: """
        num_experts top_k hidden_size ep_size pad_multiple wire_dtype max_tokens_per_rank ranks_per_node graph_safe
        capacity_factor planned_rows
    """,
    Sizes: "padded_rows group_max_rows capacity tokens_per_expert",
    Capacity: "rows buffer_rows pair_rows",
    dispatchers.RequiredCapacity: "rows pair_rows capacity_factor pair_factor overflowed invalid_ids",
    dispatchers.Metrics: """
        backend dispatches real_tokens_per_expert imbalance rank_imbalance rows_padded rows_skipped bytes_sent
        collectives expert_copies slots_replayed slots_drifted
    """,
}


@pytest.mark.parametrize(
    ("module", "names"),
    [(moe_dispatch, PACKAGE), (backends, BACKENDS), (layouts, LAYOUTS), (dispatchers, DISPATCHERS), (replay, REPLAY)],
    ids=["package", "backends", "layouts", "dispatchers", "replay"],
)
def test_public_names(module: object, names: str) -> None:
    exported: Sequence[str] = module.__all__  # type: ignore[attr-defined]
    assert sorted(exported) == sorted(names.split())
    assert all(hasattr(module, name) for name in exported)


def test_modules_that_completion_offers() -> None:
    files = Path(moe_dispatch.__file__).parent.glob("*.py")
    public = {file.stem for file in files if not file.stem.startswith("_")}
    assert public == {"communication", "config", "errors", "types", "watchdog"}


def test_errors_and_the_builtins_they_resemble() -> None:
    defined = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert sorted(defined) == ERRORS.split()
    assert all(issubclass(kind, errors.MoEDispatchError) for kind in defined.values())
    resembles = {
        errors.ConfigError: ValueError,
        errors.InputError: ValueError,
        errors.LayoutError: errors.InputError,
        errors.BackendUnavailableError: ImportError,
        errors.IntegrationError: ImportError,
        errors.TraceError: ValueError,
        errors.StateError: RuntimeError,
        errors.PeerError: RuntimeError,
        errors.LostPeerError: errors.PeerError,
        errors.CapacityError: RuntimeError,
    }
    for kind, builtin in resembles.items():
        assert issubclass(kind, builtin)


def test_config_fields() -> None:
    assert list(DispatcherConfig.model_fields) == CONFIG_FIELDS.split()
    assert list(ConstraintOverrides.model_fields) == [
        "row_multiple",
        "max_rows",
        "hidden_multiple",
        "max_hidden",
        "max_top_k",
        "group_sizes",
        "local_experts_multiple",
        "max_local_experts",
    ]
    assert list(DeepEPOptions.model_fields) == [
        "num_sms",
        "deterministic",
        "expand",
        "allocate_on_comm_stream",
        "ranks_per_node",
        "gin_within_node",
        "prefetch_weights",
        "emulate",
    ]
    assert list(HybridEPOptions.model_fields) == [
        "num_sms_dispatch",
        "num_sms_combine",
        "num_blocks_permute",
        "num_blocks_unpermute",
        "fuse_permute",
        "ranks_per_domain",
        "emulate",
    ]
    assert list(AllToAllOptions.model_fields) == ["reduction", "pair_rows", "levels", "ranks_per_node"]
    assert list(LocalOptions.model_fields) == ["reduction"]
    assert list(BackendOptions.model_fields) == []


def test_config_defaults() -> None:
    config = DispatcherConfig(num_experts=2, top_k=1, hidden_size=4)
    assert config.model_dump() == {
        "backend": "auto",
        "num_experts": 2,
        "top_k": 1,
        "hidden_size": 4,
        "spare_experts_per_rank": 0,
        "balance": None,
        "balance_bound": 1.0,
        "balance_min_rows": None,
        "pad_multiple": 1,
        "weights": "combine",
        "wire_dtype": None,
        "row_counts": None,
        "max_tokens_per_rank": None,
        "infer_layout": True,
        "graph_safe": False,
        "capacity_factor": "worst",
        "on_overflow": None,
        "permutation": "auto",
        "device": None,
        "watchdog": None,
        "debug": False,
        "constraints": dict.fromkeys(ConstraintOverrides.model_fields),
    }


def test_methods_of_dispatched() -> None:
    fields = {field.name for field in dataclasses.fields(Dispatched)}
    public = [name for name in vars(Dispatched) if not name.startswith("_") and name not in fields]
    assert public == ["tokens_per_expert_list", "offs", "cu_tokens_per_expert", "grouped_mm", "per_expert", "wait"]


@pytest.mark.parametrize("value", VALUES)
def test_fields_of_frozen_values(value: type) -> None:
    assert [field.name for field in dataclasses.fields(value)] == VALUES[value].split()
    parameters = value.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    holds_tensors = any("Tensor" in str(field.type) for field in dataclasses.fields(value))
    assert parameters.eq != holds_tensors


def test_protocol() -> None:
    assert backends.PROTOCOL == 1
