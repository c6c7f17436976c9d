"""Fields, rules across fields, and typed options of backends: refused when the config is made."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.backends import known_backends, load_backend
from moe_dispatch.backends.alltoall.options import AllToAllOptions
from moe_dispatch.backends.registry import BackendName
from moe_dispatch.capabilities.balance.planners import known_planners
from moe_dispatch.errors import ConfigError
from moe_dispatch.seams.slots import MANUAL, BalanceName

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"capacity": 3}, r"(?s)capacity.*Extra inputs are not permitted"),
    "another type": ({"num_experts": "8"}, r"(?s)num_experts.*valid integer"),
    "zero experts": ({"num_experts": 0}, r"(?s)num_experts.*greater than or equal to 1"),
    "top_k above experts": ({"top_k": 9}, r"top_k \(9\) must not exceed num_experts \(8\)"),
    "pad_multiple": ({"pad_multiple": "int4"}, r"(?s)pad_multiple.*'bf16', 'fp8', 'mxfp8' or 'nvfp4'.*'nvfp4' for 128"),
    "fp8 columns": ({"wire": "float8_e4m3fn"}, r"hidden_size \(64\) must be a multiple of 128"),
    "mxfp8 columns": ({"wire": "mxfp8", "hidden_size": 48}, r"hidden_size \(48\) must be a multiple of 32"),
    "static without a maximum": ({"row_counts": "static"}, r'row_counts="static" need max_tokens_per_rank'),
    "unknown backend": ({"backend": "alltoal"}, r"Unknown backend 'alltoal'. Known backends: allgather, alltoall"),
    "option of another backend": (
        {"backend": {"name": "allgather", "reduction": "exact"}},
        r"It is an option of backend 'local' or 'alltoall' or 'alltoall_by_node', and not of 'allgather'.$",
    ),
    "option beside the backend": (
        {"backend": "alltoall", "reduction": "exact"},
        r'It is an option of the backend: write backend=\{"name": "alltoall", "reduction": ...\}',
    ),
    "field below the backend": ({"backend": {"name": "alltoall", "pad_multiple": 16}}, "a field of the config itself"),
    "constraint beside constraints": ({"hidden_multiple": 16}, r"It is a constraint: write constraints=\{'hidden_"),
    "size of the group": ({"ep_size": 2}, "got 2. It follows from the group: pass that to build_dispatcher.$"),
    "self": ({"self": 2}, "self: Extra inputs are not permitted, got 2"),
    "option with a wrong value": ({"backend": {"name": "alltoall", "reduction": "slow"}}, r"(?s)'fast' or 'exact'"),
    "neither of two types": (
        {"backend": {"name": "hybridep", "emulate": "old"}},
        r"backend.emulate: .* boolean; or .*'hybridep-746', got 'old'",
    ),
    "misspelled field": ({"backnd": "local"}, r"backnd: Extra .*, got 'local'. Did you mean 'backend'\?$"),
    "misspelled option": ({"backend": {"name": "alltoall", "reductions": "exact"}}, r"Did you mean 'reduction'\?$"),
    "misspelled constraint": ({"constraints": {"max_row": 3}}, r"max_row: Extra .*, got 3. Did you mean 'max_rows'\?$"),
    "more experts than an int holds": ({"num_experts": 10**5000}, "less than 2147483648, got an integer of thousands"),
    "nested beyond Python's limit": ({"top_k": nested(5000)}, r"valid integer, got \[\[\[...\]\]\]\.$"),
    "option nested beyond Python's limit": ({"backend": {"name": "local", "reduction": nested(5000)}}, r"got \[\[\["),
    "name nested beyond Python's limit": ({"backend": {"name": nested(5000)}}, r"a mapping must have \"name\", a"),
    "watchdog no clock can count": ({"watchdog": 1e300}, r"watchdog: .* less than or equal to 1000000, got 1e\+300"),
    "watchdog that is no number": ({"watchdog": float("nan")}, "watchdog: .*, got nan"),
    "watchdog too short": ({"watchdog": 1e-300}, "watchdog: .* greater than or equal to 0.1, got 1e-300"),
    "override of no constraint": ({"constraints": {"rows": 3}}, r"(?s)rows.*Extra inputs are not permitted"),
    "override below 1": ({"constraints": {"row_multiple": 0}}, r"(?s)row_multiple.*greater than or equal to 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_config(name: str) -> None:
    fields, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        DispatcherConfig(**{**SIZES, **fields})


def test_config_is_frozen() -> None:
    config = DispatcherConfig(**SIZES)
    with pytest.raises(ConfigError, match=r"a config is frozen. Make a copy with config.replace\(top_k=...\)"):
        config.top_k = 3


@pytest.mark.parametrize(
    ("value", "rows"), [(1, 1), (256, 256), ("bf16", 1), ("fp8", 16), ("mxfp8", 32), ("nvfp4", 128)]
)
def test_pad_multiple_in_rows(value: Any, rows: int) -> None:
    assert DispatcherConfig(**SIZES, pad_multiple=value).pad_multiple_rows == rows


def test_backend_name_and_options() -> None:
    plain = DispatcherConfig(**SIZES, backend="alltoall")
    exact = DispatcherConfig(**SIZES, backend={"name": "alltoall", "reduction": "exact"})
    assert (plain.backend_name, exact.backend_name) == ("alltoall", "alltoall")
    assert plain.backend_options == AllToAllOptions(reduction="fast")
    assert exact.backend_options == AllToAllOptions(reduction="exact")


def test_constraints_from_a_mapping() -> None:
    config = DispatcherConfig.model_validate({**SIZES, "constraints": {"row_multiple": 64, "max_rows": None}})
    assert config.constraints.given() == {"row_multiple": 64}


def test_json_schema_names_every_field() -> None:
    schema = json.loads(json.dumps(DispatcherConfig.model_json_schema()))
    assert list(schema["properties"]) == list(DispatcherConfig.model_fields)
    assert schema["required"] == ["num_experts", "top_k", "hidden_size"]
    assert schema["additionalProperties"] is False


def test_an_editor_knows_the_names_that_this_package_has() -> None:
    """And any other string is accepted, because packages bring backends and planners of their own."""
    built_in = [name for name in known_backends() if load_backend(name).__module__.startswith("moe_dispatch.backends.")]
    assert {*get_args(BackendName)} == {"auto", *built_in}
    assert {*get_args(BalanceName)} == {*known_planners(), MANUAL}
    for field, names in (("backend", BackendName), ("balance", BalanceName)):
        assert {names, str} <= {*get_args(DispatcherConfig.model_fields[field].annotation)}
