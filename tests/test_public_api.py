"""What users rely on beside names, which ``test_stability`` lists."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import moe_dispatch
from moe_dispatch import Dispatched, Plan, Routing, backends, dispatchers, errors
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch.backends.alltoall_by_node.options import AllToAllByNodeOptions
from moe_dispatch.backends.base import Arrived, BackendOptions, MoEShape
from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions
from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions
from moe_dispatch.backends.local import LocalOptions
from moe_dispatch.types import Capacity, Sizes

OPTIONS: dict[type[BackendOptions], str] = {
    DeepEPOptions: """
        num_sms deterministic expand allocate_on_comm_stream ranks_per_node gin_within_node prefetch_weights emulate
    """,
    HybridEPOptions: """
        num_sms_dispatch num_sms_combine num_blocks_permute num_blocks_unpermute fuse_permute ranks_per_domain emulate
    """,
    AllToAllOptions: "reduction pair_rows",
    AllToAllByNodeOptions: "reduction ranks_per_node",
    LocalOptions: "reduction",
}
VALUES = (
    *(Routing, Plan, Dispatched, Arrived, backends.Constraints, MoEShape, Sizes, Capacity),
    *(dispatchers.RequiredCapacity, dispatchers.Metrics),
)


def test_modules_that_completion_offers() -> None:
    files = Path(moe_dispatch.__file__).parent.glob("*.py")
    public = {file.stem for file in files if not file.stem.startswith("_")}
    core = {"communication", "config", "cuda_graphs", "dispatched", "errors", "types", "versions"}
    assert public == core | {"balance", "lean", "pipelining", "quantised", "recompute", "replay"}


def test_errors_and_the_builtins_they_resemble() -> None:
    defined = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, errors.MoEDispatchError) for kind in defined)
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


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_backends(options: type[BackendOptions]) -> None:
    assert list(options.model_fields) == OPTIONS[options].split()


@pytest.mark.parametrize("value", VALUES)
def test_values_are_frozen_and_compare_if_they_hold_no_tensors(value: type) -> None:
    parameters = value.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    holds_tensors = any("Tensor" in str(field.type) for field in dataclasses.fields(value))
    assert parameters.eq != holds_tensors


def test_protocol() -> None:
    assert backends.PROTOCOL == 1
