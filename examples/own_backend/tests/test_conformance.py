"""The conformance kit of moe-dispatch checks the backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_dispatch.backends import known_backends
from moe_dispatch_testing import conformance_cases

torch.set_num_threads(1)  # ranks are threads of this process


def test_is_found_by_its_entry_point() -> None:
    assert "ring" in known_backends()


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in conformance_cases("ring")])
def test_conforms(run: Callable[[], None]) -> None:
    run()
