"""What tests of ``bench`` share."""

from __future__ import annotations

import pytest

from moe_dispatch_tools.bench import peers


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
