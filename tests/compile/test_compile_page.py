"""docs/torch-compile.md is true: its code runs in order, and it names every operator."""

from __future__ import annotations

import re

import pytest

from moe_dispatch.seams.tracing import traced_calls
from tests.compile.layer import needs_compiler, operator_names
from tests.pages import ROOT, run_page


@pytest.mark.slow
@needs_compiler
def test_code_runs_in_order() -> None:
    assert run_page("torch-compile.md")["y"].shape == (6, 16)


def test_every_operator_is_named() -> None:
    traced_calls()
    text = (ROOT / "docs" / "torch-compile.md").read_text(encoding="utf-8")
    named = text.partition("`torch.ops.moe_dispatch` are ")[2].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", named)) == operator_names()
