"""The cases of the conformance kit that ``make test`` and ``make slow`` leave out. ``make kit`` runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.cases import chosen_cases


@pytest.mark.parametrize("run", list(chosen_cases(short=False)))
def test_conforms(run: Callable[[], None]) -> None:
    run()
