from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.backends import more_backends


@pytest.fixture(autouse=True, scope="package")
def backends_of_the_suite() -> Iterator[None]:
    """Make the strict backend and the example package known to the tests of this folder only."""
    with more_backends():
        yield
