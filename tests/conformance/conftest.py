from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.backends import more_backends


@pytest.fixture(autouse=True, scope="package")
def backends_of_the_suite() -> Iterator[None]:
    """Make the strict backend and the example package known to the tests of this folder only."""
    with more_backends():
        yield


@pytest.fixture
def nothing_planted() -> Iterator[None]:
    """Take out at the end what a test planted into the small layer of planted.py."""
    from tests.conformance.planted import PLACES, groups, harmless, planted

    yield
    planted.update(dict.fromkeys(PLACES, harmless))
    groups.clear()
