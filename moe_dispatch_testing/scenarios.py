"""The scenarios that every backend must pass. Add a scenario together with a planted bug that only it catches."""

from __future__ import annotations

import dataclasses

from moe_dispatch_testing.scenario import DtypeName, Scenario

_DTYPES: tuple[DtypeName, ...] = ("float64", "float32", "bfloat16", "float16")

_EAGER: tuple[Scenario, ...] = (
    # Where tokens go.
    Scenario(name="balanced", routing="balanced", row_counts=("agree", "static"), input_layouts="all"),
    Scenario(name="skewed", routing="skewed"),
    Scenario(name="one_expert", routing="last_expert", pad_multiple=16),
    Scenario(name="idle_ranks", routing="first_half", pad_multiple=16),
    Scenario(name="idle_ranks_detached", routing="first_half", skips_empty=True),
    Scenario(name="top_1", top_k=1),
    Scenario(name="top_all", top_k=8),
    Scenario(name="duplicates", routing="duplicates", pad_multiple=16),
    Scenario(name="nowhere", routing="nowhere", pad_multiple=16),
    Scenario(name="nowhere_detached", routing="nowhere", skips_empty=True),
    Scenario(
        name="partly_nowhere",
        routing="partly_nowhere",
        pad_multiple=16,
        row_counts=("agree", "static"),
        input_layouts="all",
    ),
    Scenario(name="one_expert_per_rank", num_experts=4, top_k=2),
    Scenario(name="many_experts", num_experts=96, top_k=6, pad_multiple=16),
    # How many tokens there are.
    Scenario(name="one_token", tokens=(1,)),
    Scenario(name="one_token_on_one_rank", tokens=(0, 0, 0, 1), pad_multiple=16),
    Scenario(name="rank_without_tokens", tokens=(6, 9, 0, 5), row_counts=("agree", "static"), input_layouts="all"),
    Scenario(name="one_rank_with_tokens", tokens=(0, 0, 0, 11), row_counts=("agree", "static")),
    Scenario(name="no_tokens", tokens=(0,), row_counts=("agree", "assume", "check", "static")),
    Scenario(name="equal_tokens", tokens=(12,), row_counts=("agree", "assume", "check", "static")),
    Scenario(name="unequal_tokens", tokens=(3, 40, 1, 17)),
    Scenario(name="many_tokens", tokens=(300, 170, 290, 300), pad_multiple=16),
    # Rounding.
    *(Scenario(name=dtype, dtype=dtype, pad_multiple=16, routing="duplicates") for dtype in _DTYPES),
    *(Scenario(name=f"{dtype}_experts", dtype=dtype, weights="experts", pad_multiple=16) for dtype in _DTYPES),
    Scenario(name="wire_bfloat16", wire_dtype="bfloat16", pad_multiple=16),
    Scenario(name="wire_bfloat16_float64", wire_dtype="bfloat16", dtype="float64"),
    Scenario(name="wire_float8", wire_dtype="float8_e4m3fn", hidden=256, pad_multiple=16),
    Scenario(name="wire_float8_bfloat16", wire_dtype="float8_e4m3fn", hidden=128, dtype="bfloat16"),
    Scenario(name="wire_mxfp8", wire_dtype="mxfp8", hidden=96, pad_multiple=32),
    Scenario(name="wire_mxfp8_bfloat16", wire_dtype="mxfp8", hidden=64, dtype="bfloat16"),
    Scenario(
        name="quantised_mxfp8",
        wire_dtype="mxfp8",
        deliver="quantised",
        hidden=64,
        pad_multiple=32,
        dtype="bfloat16",
        routing="partly_nowhere",
        schedule="sent_again",
    ),
    Scenario(name="quantised_float8", wire_dtype="float8_e4m3fn", deliver="quantised", hidden=128, pad_multiple=128),
    Scenario(name="gradients_mxfp8", wire_dtype="mxfp8", grad_wire_dtype="mxfp8", hidden=64, dtype="bfloat16"),
    Scenario(
        name="gradients_float8",
        wire_dtype="float8_e4m3fn",
        grad_wire_dtype="float8_e4m3fn",
        deliver="quantised",
        weights="experts",
        hidden=128,
        pad_multiple=128,
    ),
    # Padding of experts.
    Scenario(name="pad_16", pad_multiple=16),
    Scenario(name="pad_128", pad_multiple=128),
    Scenario(name="pad_16_unpoisoned", pad_multiple=16, poisons_padding=False),
    Scenario(name="pad_16_weights_by_experts", pad_multiple=16, weights="experts", routing="partly_nowhere"),
    # Calls and gradients.
    Scenario(
        name="changing_tokens", tokens=(5, 0, 70, 9), schedule="three_calls", pad_multiple=16, input_layouts="all"
    ),
    Scenario(name="backward_one_by_one", schedule="three_calls_backward_one_by_one", pad_multiple=16),
    Scenario(name="layout_given", schedule="with_layout"),
    Scenario(name="nothing_given", schedule="with_nothing"),
    Scenario(name="strided", schedule="strided", pad_multiple=16),
    Scenario(name="asynchronous", schedule="asynchronous", pad_multiple=16),
    Scenario(name="two_in_flight", schedule="two_in_flight", pad_multiple=16),
    Scenario(name="combined_twice", schedule="combined_twice", pad_multiple=16),
    Scenario(name="sent_again", schedule="sent_again", pad_multiple=16),
    Scenario(name="sent_again_detached", schedule="sent_again", routing="first_half", skips_empty=True),
    Scenario(name="checkpointed", schedule="checkpointed", pad_multiple=16),
    Scenario(name="checkpointed_reentrant", schedule="checkpointed_reentrant", pad_multiple=16),
    Scenario(name="on_routes", schedule="checkpointed_on_routes", pad_multiple=16, input_layouts="all"),
    Scenario(name="on_routes_reentrant", schedule="checkpointed_reentrant_on_routes", pad_multiple=16),
    Scenario(
        name="on_routes_quantised",
        schedule="checkpointed_on_routes",
        wire_dtype="float8_e4m3fn",
        deliver="quantised",
        hidden=128,
        pad_multiple=128,
    ),
    Scenario(
        name="in_chunks", tokens=(5, 0, 20, 9), schedule="in_chunks", chunk_tokens=8, row_counts=("agree", "static")
    ),
    Scenario(name="chunks_recomputed", schedule="in_chunks", chunk_tokens=4, chunk_recompute=True, pad_multiple=16),
    Scenario(name="x_without_grad", requires_grad=frozenset({"weights"}), pad_multiple=16),
    Scenario(name="weights_without_grad", requires_grad=frozenset({"x"}), pad_multiple=16),
    Scenario(name="inputs_without_grad", requires_grad=frozenset(), pad_multiple=16),
    Scenario(name="experts_only", requires_grad=frozenset(), routing="first_half", skips_empty=True),
    Scenario(name="no_grad", requires_grad=frozenset(), pad_multiple=16, inference=True),
    Scenario(name="debug", debug=True, pad_multiple=16, routing="partly_nowhere"),
    # Expert slots.
    Scenario(name="placed", spare=2, pad_multiple=16, routing="skewed"),
    Scenario(name="placed_partly_nowhere", spare=1, routing="partly_nowhere", schedule="two_in_flight"),
    Scenario(name="placed_duplicates", spare=4, routing="duplicates", weights="experts", schedule="checkpointed"),
    Scenario(name="placed_on_routes", spare=4, routing="duplicates", schedule="checkpointed_on_routes"),
)

_INPUT_LAYOUTS = {False: ("bshd",), True: ("thd_with_gaps_on_device",)}


def _graph_safe(scenario: Scenario) -> Scenario:
    """Return the graph-safe version of a scenario. It runs in fewer layouts, because rows are only masked, never cut.

    A schedule that dispatches without a plan needs a layout with lengths on the device. If the lengths were on the
    host, dispatch would read them to check the layout, which is a host sync.
    """
    without_plan = scenario.schedule in ("with_layout", "with_nothing")
    return dataclasses.replace(
        scenario,
        name=f"{scenario.name}_graph_safe",
        graph_safe=True,
        row_counts=("static",),
        input_layouts=("bshd", "thd_with_gaps_on_device")
        if scenario.input_layouts == "all"
        else _INPUT_LAYOUTS[without_plan],
    )


# A scenario with ``debug=True`` has no graph-safe version, because debug checks read values from the device.
SCENARIOS: tuple[Scenario, ...] = (*_EAGER, *(_graph_safe(scenario) for scenario in _EAGER if not scenario.debug))
"""The scenarios of the conformance kit: first the eager scenarios, then their graph-safe versions."""
