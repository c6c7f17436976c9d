"""Small layers of these tests multiply the copies of one expert at a time, as large ones do."""

import pytest

from moe_dispatch.capabilities.lean import packets


@pytest.fixture(autouse=True)
def _by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "AT_ONCE_BYTES", 0)
