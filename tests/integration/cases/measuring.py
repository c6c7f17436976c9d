"""How far a result is from its reference, and the code of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[3]


def relative(got: Tensor | None, want: Tensor | None) -> float:
    """The length of the difference as a part of the reference's; AssertionError where either is missing or a shape."""
    assert got is not None, "no gradient came back"
    assert want is not None
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    difference: float = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()
    return difference


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """All of them in one vector, by name."""
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def python_of(page: str) -> str:
    """The Python of a page under docs/, block after block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def run_page(page: str, **names: Any) -> dict[str, Any]:
    """Run the Python of a page, which may use some names; return all names that it knows at its end."""
    namespace: dict[str, Any] = {"__name__": page, **names}
    exec(compile(python_of(page), page, "exec"), namespace)
    return namespace
