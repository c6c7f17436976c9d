"""What integrations refuse: versions of a framework that cannot work, spare expert slots, and quantised rows."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations import checks
from tests.integrations.conftest import Install

FRAMEWORK, TESTED = "megatron-core", r"Tested versions: 0\.16\.1, 0\.19\.2\."


@pytest.mark.parametrize("found", ["0.16.1", "0.17", "0.18.1", "0.19.2", "0.19.2+cu130", "0.19.2rc1"])
def test_tested_range_is_silent(install: Install, found: str) -> None:
    install(FRAMEWORK, found)
    assert checks.check_version(FRAMEWORK) == found  # warnings are errors here


@pytest.mark.parametrize("found", ["0.16.0", "0.19.10", "0.20.0", "1.0"])
def test_outside_of_the_tested_range_warns_with_what_was_tested(install: Install, found: str) -> None:
    install(FRAMEWORK, found)
    with pytest.warns(UserWarning, match=rf"not run with megatron-core {found}\. {TESTED}"):
        assert checks.check_version(FRAMEWORK) == found


def test_versions_that_cannot_work_are_refused(install: Install) -> None:
    with pytest.raises(IntegrationError, match=rf"megatron-core is not installed\. {TESTED} Install"):
        checks.check_version(FRAMEWORK)
    install(FRAMEWORK, "0.9.3")
    with pytest.raises(IntegrationError, match=r"megatron-core 0\.9\.3 is older than 0\.16\.0\..*Upgrade"):
        checks.check_version(FRAMEWORK)


@pytest.mark.parametrize(
    ("refuse", "changes", "told"),
    [
        (
            checks.refuse_spare_slots,
            {"balance": {"name": "manual", "spare_experts_per_rank": 2}},
            "got balance={'name': 'manual', 'spare_experts_per_rank': 2}",
        ),
        (checks.refuse_spare_slots, {"balance": "exact"}, "got balance='exact'"),
        (
            checks.refuse_quantised_rows,
            {"wire": {"dtype": "mxfp8", "deliver": "quantised"}},
            'got wire.deliver="quantised"',
        ),
        (checks.refuse_chunks, {"chunks": 4}, "got chunks=4"),
    ],
)
def test_what_experts_of_a_framework_cannot_do_is_refused(
    refuse: Callable[[str, DispatcherConfig], None], changes: dict[str, Any], told: str
) -> None:
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=32, pad_multiple=32, wire="mxfp8")
    refuse("register", config)
    with pytest.raises(ConfigError, match=rf"register: .* {told}\. Leave"):
        refuse("register", config.replace(**changes))


def test_a_megatron_without_a_part_is_refused_in_one_sentence(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FRAMEWORK, "0.19.2")
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    place = Path(checks.__file__).with_name("megatron") / "core.py"
    text = rf"megatron-core 0\.19\.2 lacks a part that this integration needs: .*tensor_parallel.*\. {TESTED} Install"
    with pytest.raises(IntegrationError, match=text):
        runpy.run_path(str(place))
