"""What integrations refuse: versions of a framework that cannot work, spare expert slots, and quantised rows."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import moe_dispatch.integrations
from moe_dispatch import DispatcherConfig
from moe_dispatch._support import SUPPORT, Support
from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations import checks

FOLDER = Path(next(iter(moe_dispatch.integrations.__path__)))


def check(monkeypatch: pytest.MonkeyPatch, found: str) -> str:
    monkeypatch.setattr(checks, "version", lambda package: found)
    monkeypatch.setitem(SUPPORT, "megatron-core", Support(tested=("0.16.1", "0.19.2"), lowest="0.15.0", target=""))
    return checks.check_version("megatron-core")


@pytest.mark.parametrize("found", ["0.16.1", "0.17", "0.19.2", "0.19.2+cu130", "0.19.2rc1"])
def test_tested_range_is_silent(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    assert check(monkeypatch, found) == found  # warnings are errors here


@pytest.mark.parametrize("found", ["0.15.0", "0.16.0", "0.19.10", "0.20.0", "1.0"])
def test_outside_of_the_tested_range_warns_with_what_was_tested(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"not run with megatron-core {found}\. Tested versions: 0\.16\.1, 0\.19\.2\."
    ):
        assert check(monkeypatch, found) == found


def test_versions_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUPPORT, "no-such-framework", Support(tested=("1.0",), lowest="1.0", target=""))
    with pytest.raises(IntegrationError, match=r"no-such-framework is not installed\. Tested versions: 1\.0\. Install"):
        checks.check_version("no-such-framework")
    with pytest.raises(IntegrationError, match=r"megatron-core 0\.9\.3 is older than 0\.15\.0\..*Upgrade"):
        check(monkeypatch, "0.9.3")


@pytest.mark.parametrize(
    ("text", "numbers", "is_release"),
    [
        ("0.18", (0, 18), True),
        ("0.18.0rc2", (0, 18), False),
        ("0.18.0.dev3", (0, 18), False),
        ("0.18.1+cu130", (0, 18, 1), True),
        ("10.0", (10,), True),
        ("0.0", (0,), True),
        ("main", (), True),
    ],
)
def test_numbers_of_a_version(text: str, numbers: tuple[int, ...], is_release: bool) -> None:
    assert checks.parse_version(text) == (numbers, is_release)


def test_spare_slots_are_refused() -> None:
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=16)
    checks.refuse_spare_slots("register", config)
    with pytest.raises(
        ConfigError, match=r"register: this integration .* got spare_experts_per_rank=2 and balance=None\. Leave"
    ):
        checks.refuse_spare_slots("register", config.replace(spare_experts_per_rank=2))


def test_quantised_rows_are_refused() -> None:
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=32, pad_multiple=32, wire_dtype="mxfp8")
    checks.refuse_quantised_rows("register", config)
    with pytest.raises(
        ConfigError, match=r'register: .* which read no quantised rows, got deliver="quantised"\. Leave'
    ):
        checks.refuse_quantised_rows("register", config.replace(deliver="quantised"))


def test_chunks_are_refused() -> None:
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=16)
    checks.refuse_chunks("register", config)
    with pytest.raises(ConfigError, match=r"register: .* so there are no chunks, got chunk_tokens=4\. Leave"):
        checks.refuse_chunks("register", config.replace(chunk_tokens=4))


@pytest.mark.parametrize("refusal", ["refuse_spare_slots", "refuse_quantised_rows", "refuse_chunks"])
@pytest.mark.parametrize("module", ["megatron/settings.py", "torchtitan.py"])
def test_integrations_that_run_the_experts_of_a_framework_refuse_them(module: str, refusal: str) -> None:
    """The frameworks may not be installed here, so the source is read."""
    calls: list[Any] = [
        node for node in ast.walk(ast.parse((FOLDER / module).read_text())) if isinstance(node, ast.Call)
    ]
    assert any(ast.unparse(call.func) == refusal for call in calls)
