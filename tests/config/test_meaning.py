"""Two configs are equal exactly if they mean the same, however they are written."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.config import ConstraintOverrides
from moe_dispatch.errors import ConfigError

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 4}
FINITE: dict[str, Any] = {**SAFE, "graph_safe": {"on_overflow": "raise", "capacity_factor": 1}}
ALLTOALL = {"name": "alltoall", "reduction": "fast", "pair_rows": "worst"}

# Each entry lists fields that mean the same; no two entries mean the same.
MEANINGS: dict[str, list[dict[str, Any]]] = {
    "auto": [{}, {"backend": "auto"}, {"backend": {"name": "auto"}}, {"row_counts": "agree"}, {"pad_multiple": "bf16"}],
    "alltoall": [
        {"backend": "alltoall"},
        {"backend": {"name": "alltoall"}},
        *({"backend": dict(options)} for options in itertools.permutations(ALLTOALL.items())),
        {"backend": "alltoall", "row_counts": "agree"},
        {"backend": "alltoall", "constraints": {}},
        {"backend": "alltoall", "constraints": {"max_rows": None}},
    ],
    "exact": [
        {"backend": {"name": "alltoall", "reduction": "exact"}},
        {"backend": {"reduction": "exact", "pair_rows": "worst", "name": "alltoall"}},
    ],
    "another backend": [{"backend": "local"}, {"backend": {"name": "local", "reduction": "fast"}}],
    "the same option of another backend": [{"backend": {"name": "local", "reduction": "exact"}}],
    "padded": [{"pad_multiple": "fp8"}, {"pad_multiple": 16}],
    "padded to more": [{"pad_multiple": "mxfp8"}, {"pad_multiple": 32}],
    "check": [{"row_counts": "check"}],
    "static": [{"row_counts": "static", "max_tokens_per_rank": 4}],
    "bounded": [{"max_tokens_per_rank": 4}, {"max_tokens_per_rank": 4, "row_counts": "agree"}],
    "graph-safe": [
        SAFE,
        {**SAFE, "row_counts": "static"},
        {**SAFE, "graph_safe": {}},
        {**SAFE, "graph_safe": {"capacity_factor": "worst"}},
        {**SAFE, "graph_safe": {"on_overflow": None}},
    ],
    "finite": [FINITE, {**SAFE, "graph_safe": {"capacity_factor": 1.0, "on_overflow": "raise"}}],
    "finite pairs": [
        {**FINITE, "backend": {"name": "alltoall", "pair_rows": 1}},
        {**FINITE, "backend": {"name": "alltoall", "pair_rows": 1.0}},
    ],
    "drop": [{**SAFE, "graph_safe": {"capacity_factor": 1, "on_overflow": "drop"}}],
    "debug": [{"debug": True}],
    "balanced": [
        {"balance": "exact"},
        {"balance": {"name": "exact"}},
        {"balance": {"bound": 1, "name": "exact", "min_rows": None, "spare_experts_per_rank": None}},
    ],
    "nearly balanced": [{"balance": {"name": "exact", "bound": 1.05}}],
    "placed": [{"balance": "manual"}, {"balance": {"name": "manual", "spare_experts_per_rank": 1}}],
    "planned": [{"balance": "eplb"}, {"balance": {"name": "eplb", "spare_experts_per_rank": 1}}],
    "another planner": [{"balance": "least_loaded"}],
    "chunks": [{"chunks": 4}, {"chunks": {"tokens": 4}}, {"chunks": {"tokens": 4, "recompute": False}}],
    "chunks recomputed": [{"chunks": {"tokens": 4, "recompute": True}}],
    "wire": [{"wire": "mxfp8"}, {"wire": {"dtype": "mxfp8"}}, {"wire": {"deliver": "rows", "dtype": "mxfp8"}}],
    "narrow gradients": [{"wire": {"dtype": "mxfp8", "gradients": True}}],
    "overrides": [{"constraints": {"max_rows": 64}}, {"constraints": ConstraintOverrides(max_rows=64)}],
    "other overrides": [{"constraints": {"max_rows": 65}}],
    "sizes": [{"constraints": {"group_sizes": [1, 2]}}, {"constraints": {"group_sizes": (1, 2)}}],
}


@pytest.mark.parametrize("name", MEANINGS)
def test_configs_that_mean_the_same_are_equal(name: str) -> None:
    one, *others = (DispatcherConfig(**{**SIZES, **fields}) for fields in MEANINGS[name])
    for other in (one.replace(), *others):
        assert other == one
        assert (hash(other), other.digest, other.canonical) == (hash(one), one.digest, one.canonical)
    assert len({one, *others}) == 1


def test_configs_that_differ_are_not_equal() -> None:
    configs = [DispatcherConfig(**{**SIZES, **fields[0]}) for fields in MEANINGS.values()]
    for one, other in itertools.combinations(configs, 2):
        assert one != other
    assert len({config.digest for config in configs}) == len(configs)
    assert configs[0] != "auto"


@pytest.mark.parametrize(
    ("field", "written", "option"),
    [
        ("backend", {"name": "alltoall"}, {"reduction": "exact"}),
        ("balance", {"name": "exact"}, {"bound": 2}),
        ("wire", {"dtype": "mxfp8"}, {"gradients": True}),
        ("chunks", {"tokens": 4}, {"recompute": True}),
    ],
)
def test_what_the_caller_changes_later_does_not_count(field: str, written: Any, option: dict[str, Any]) -> None:
    config, before = DispatcherConfig(**SIZES, **{field: written}), dict(written)
    written |= option
    assert getattr(config, field) == before
    assert config == DispatcherConfig(**SIZES, **{field: before})
    assert config != DispatcherConfig(**SIZES, **{field: written})


@pytest.mark.parametrize("fields", [fields[-1] for fields in MEANINGS.values()], ids=[*MEANINGS])
def test_copies_by_pickle_and_deepcopy(fields: dict[str, Any]) -> None:
    config = DispatcherConfig(**{**SIZES, **fields})
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config  # now with the options and the digest, which were asked for


def test_a_copy_is_validated_and_has_a_digest_of_its_own() -> None:
    config = DispatcherConfig(**SIZES, backend="alltoall", constraints=ConstraintOverrides(max_rows=7))
    before = config.digest, config.canonical, config.backend_options  # each is kept once it was asked for
    copied = config.model_copy(update={"top_k": 3, "backend": "local"})
    assert (copied.top_k, copied.backend_name, copied.constraints.max_rows) == (3, "local", 7)
    assert copied == DispatcherConfig(**{**SIZES, "top_k": 3}, backend="local", constraints={"max_rows": 7})
    assert copied.digest != config.digest
    assert copied.canonical["top_k"] == 3
    assert (config.digest, config.canonical, config.backend_options) == before
    assert config.model_copy() == config.model_copy(deep=True) == config.replace() == config
    with pytest.raises(ConfigError, match=r"top_k \(9\) must not exceed num_experts \(8\)"):
        config.model_copy(update={"top_k": 9})
