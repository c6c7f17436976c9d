"""docs/torch-compile.md is true: its code runs in order, and it names every operator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moe_dispatch.custom_operators import BODIES
from tests.compile.layer import needs_compiler

PAGE = Path(__file__).parent.parent.parent / "docs" / "torch-compile.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@needs_compiler
def test_code_runs_in_order() -> None:
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), namespace)
    assert namespace["y"].shape == (6, 16)


def test_every_operator_is_named() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == set(BODIES)
