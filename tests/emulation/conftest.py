"""The buffers of v1, v2 and V2.5 refuse to run while torch fills fresh memory."""

from __future__ import annotations

import pytest
import torch

from tests.deep_ep_backends.conftest import Setting as Setting
from tests.deep_ep_backends.conftest import variables as variables


@pytest.fixture(autouse=True)
def unfilled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.fixture
def filled_memory(unfilled_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
