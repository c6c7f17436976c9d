"""Fields that are a short value or a mapping with options: their defaults and their errors."""

from __future__ import annotations

from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.backends.capacity import GraphSafeOptions
from moe_dispatch.backends.wire import WireOptions
from moe_dispatch.capabilities.balance.options import EplbOptions, ExactOptions, LeastLoadedOptions, ManualOptions
from moe_dispatch.errors import ConfigError
from moe_dispatch.quantised import QuantisedOptions
from moe_dispatch.steps.options import ChunkOptions

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 128}
SAFE: dict[str, Any] = {"max_tokens_per_rank": 4}


@pytest.mark.parametrize(
    ("field", "value", "options"),
    [
        ("balance", None, None),
        ("balance", "exact", ExactOptions(bound=1.0, min_rows=None, spare_experts_per_rank=None)),
        ("balance", "manual", ManualOptions(spare_experts_per_rank=1)),
        ("balance", "eplb", EplbOptions(num_groups=None, spare_experts_per_rank=1)),
        ("balance", "least_loaded", LeastLoadedOptions(bound=1.05, spare_experts_per_rank=1)),
        ("wire", None, None),
        ("wire", "bfloat16", WireOptions(dtype="bfloat16")),
        ("wire", "mxfp8", QuantisedOptions(dtype="mxfp8", gradients=False, deliver="rows")),
        ("chunks", None, None),
        ("chunks", 4, ChunkOptions(tokens=4, recompute=False)),
        ("graph_safe", False, None),
        ("graph_safe", True, GraphSafeOptions(capacity_factor="worst", on_overflow=None)),
    ],
)
def test_the_options_of_a_short_value(field: str, value: Any, options: Any) -> None:
    config = DispatcherConfig(**SIZES, **SAFE, **{field: value})
    assert getattr(config, field) == value
    accessor = {"balance": "slot_options", "chunks": "chunk_options"}.get(field, f"{field}_options")
    assert getattr(config, accessor) == options
    assert getattr(config, accessor) is getattr(config, accessor)
    assert config.canonical[field] == (options and options.model_dump())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelled option": ({"balance": {"name": "exact", "bond": 1}}, r"balance\.bond: .* Did you mean 'bound'\?$"),
    "a misspelled option of chunks": ({"chunks": {"token": 4}}, r"chunks\.token: .* Did you mean 'tokens'\?"),
    "a misspelled option of the wire": (
        {"wire": {"dtype": "mxfp8", "gradient": True}},
        r"wire\.gradient: .* Did you mean 'gradients'\?",
    ),
    "a misspelled option of graph_safe": (
        {"graph_safe": {"on_overflows": "drop"}},
        r"graph_safe\.on_overflows: .* Did you mean 'on_overflow'\?",
    ),
    "a wrong value": ({"balance": {"name": "exact", "bound": 0.9}}, r"balance\.bound: .* greater than or equal to 1"),
    "no name": (
        {"balance": {"bound": 1.1}},
        r'balance: a mapping must have "name", a string, got .* "exact", \.\.\.\}\.',
    ),
    "no tokens": ({"chunks": {"recompute": True}}, r"chunks\.tokens: Field required, got nothing"),
    "no dtype": (
        {"wire": {"gradients": True}},
        r'wire: a mapping must have "dtype", a string, got .* "mxfp8", \.\.\.\}\.',
    ),
    "an unknown format": ({"wire": "mxfp9"}, r"Unknown wire 'mxfp9'\. Did you mean 'mxfp8'\? Known"),
    "no number": ({"chunks": True}, r"chunks: Input should be a valid integer; .*, got True"),
    "an option of another planner": (
        {"balance": {"name": "eplb", "bound": 1.1}},
        r"balance\.bound: Extra inputs are not permitted, got 1\.1",
    ),
    "a field below an option": (
        {"balance": {"name": "exact", "top_k": 2}},
        r"balance\.top_k: .* It is a field of the config itself, beside 'balance'",
    ),
    "an unknown planner": ({"balance": "exat"}, r"Unknown planner 'exat'\. .* Did you mean 'exact'\?"),
    "nearly manual": ({"balance": {"name": "manul"}}, r"Unknown planner 'manul'\. .* Did you mean 'manual'\?"),
    "a rule of the wire": (
        {"wire": {"dtype": "bfloat16", "gradients": True}},
        r"wire\.gradients: Extra inputs are not permitted, got True",
    ),
    "rows that are not quantised": (
        {"wire": {"dtype": "bfloat16", "deliver": "quantised"}},
        r"wire\.deliver: Extra inputs are not permitted, got 'quantised'",
    ),
    "a planner on the host": (
        {"balance": "eplb", "graph_safe": True, "max_tokens_per_rank": 4},
        r'balance must be "exact" or "manual" with graph_safe, got \'eplb\': it plans on the host',
    ),
    "groups of experts": (
        {"balance": {"name": "eplb", "num_groups": 3}},
        r"balance\.num_groups must divide num_experts \(8\), got 3",
    ),
    "a copy that is not made": (
        {"balance": {"name": "exact", "min_rows": 8}, "graph_safe": True, "max_tokens_per_rank": 4},
        r"balance\.min_rows must be left out with graph_safe, got 8: without a copy",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_has_the_path_of_the_option(name: str) -> None:
    fields, told = WRONG[name]
    with pytest.raises(ConfigError, match=told):
        DispatcherConfig(**SIZES, **fields)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("BALANCE_BOUND", "BALANCE__BOUND"),
        ("CHUNKS_TOKENS", "CHUNKS__TOKENS"),
        ("GRAPH_SAFE_CAPACITY_FACTOR", "GRAPH_SAFE__CAPACITY_FACTOR"),
        ("BACKEND_REDUCTION", "BACKEND__REDUCTION"),
    ],
)
def test_a_variable_with_one_underscore_is_refused_with_the_right_one(wrong: str, right: str) -> None:
    told = rf"MOE_DISPATCH_{wrong}: no such field\. Set MOE_DISPATCH_{right}\.$"
    with pytest.raises(ConfigError, match=told):
        DispatcherConfig.load(environment={f"MOE_DISPATCH_{wrong}": "2"}, **SIZES)


@pytest.mark.parametrize(
    ("variables", "field", "value"),
    [
        ({"BALANCE": "exact"}, "balance", "exact"),
        ({"BALANCE": "exact", "BALANCE__BOUND": "1.05"}, "balance", {"name": "exact", "bound": 1.05}),
        ({"BALANCE__NAME": "exact", "BALANCE__MIN_ROWS": "0"}, "balance", {"name": "exact", "min_rows": 0}),
        ({"WIRE": "mxfp8", "WIRE__GRADIENTS": "true"}, "wire", {"dtype": "mxfp8", "gradients": True}),
        ({"CHUNKS": "4096", "CHUNKS__RECOMPUTE": "true"}, "chunks", {"tokens": 4096, "recompute": True}),
        ({"GRAPH_SAFE__ON_OVERFLOW": "drop"}, "graph_safe", {"on_overflow": "drop"}),
        ({"GRAPH_SAFE": "true", "GRAPH_SAFE__ON_OVERFLOW": "drop"}, "graph_safe", {"on_overflow": "drop"}),
    ],
)
def test_a_variable_sets_one_option(variables: dict[str, str], field: str, value: Any) -> None:
    environment = {f"MOE_DISPATCH_{name}": text for name, text in variables.items()}
    config = DispatcherConfig.load(environment=environment, max_tokens_per_rank=4, **SIZES)
    assert getattr(config, field) == value


def test_a_variable_cannot_set_an_option_of_a_mode_that_is_off() -> None:
    environment = {"MOE_DISPATCH_GRAPH_SAFE": "false", "MOE_DISPATCH_GRAPH_SAFE__CAPACITY_FACTOR": "1.5"}
    with pytest.raises(
        ConfigError, match="GRAPH_SAFE__CAPACITY_FACTOR: graph_safe has no options, because it is False"
    ):
        DispatcherConfig.load(environment=environment, **SIZES)
