"""The versions of a framework: tested, untested, too old, missing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from moe_dispatch.errors import IntegrationError
from moe_dispatch.integrations import versions


def check(monkeypatch: pytest.MonkeyPatch, found: str) -> str:
    def installed(package: str) -> Any:
        return found

    monkeypatch.setattr(versions, "version", installed)
    return versions.check_version("megatron-core", tested=("0.16.1", "0.19.2"), lowest="0.15.0")


@pytest.mark.parametrize("found", ["0.16.1", "0.17", "0.19.2", "0.19.2+cu130", "0.19.2rc1"])
def test_tested_range_is_silent(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(monkeypatch, found) == found


@pytest.mark.parametrize("found", ["0.15.0", "0.16.0", "0.19.10", "0.20.0", "1.0"])
def test_outside_of_the_tested_range_warns_with_what_was_tested(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"not run with megatron-core {found}\. Tested versions: 0\.16\.1, 0\.19\.2\."
    ):
        assert check(monkeypatch, found) == found


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IntegrationError, match=r"megatron-core must be 0\.15\.0 or later, got 0\.9\.3\..*Upgrade"):
        check(monkeypatch, "0.9.3")


def test_missing() -> None:
    with pytest.raises(IntegrationError, match=r"no-such-framework must be installed, got no installation\..*Install"):
        versions.check_version("no-such-framework", tested=("1.0",), lowest="1.0")


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
    assert versions.parse_version(text) == (numbers, is_release)
