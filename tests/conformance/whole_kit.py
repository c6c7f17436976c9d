"""The cases of the conformance kit that ``make test`` leaves out. Run by ``make kit``; the two together run all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.cases import chosen_cases


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in chosen_cases(short=False)])
def test_conforms(run: Callable[[], None]) -> None:
    run()
