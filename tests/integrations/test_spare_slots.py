"""Integrations refuse spare expert slots, which their experts cannot fill."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moe_dispatch.integrations
from moe_dispatch import DispatcherConfig
from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.spare_slots import refuse_spare_slots

FOLDER = Path(next(iter(moe_dispatch.integrations.__path__)))


def test_spare_slots_are_refused() -> None:
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=16)
    refuse_spare_slots("register", config)
    with pytest.raises(ConfigError, match=r"register: spare_experts_per_rank must be 0, because .*, got 2\. Leave it"):
        refuse_spare_slots("register", config.replace(spare_experts_per_rank=2))


@pytest.mark.parametrize("module", ["megatron/settings.py", "torchtitan.py", "transformers/experts.py"])
def test_every_integration_refuses_them(module: str) -> None:
    """The frameworks may not be installed here, so the source is read."""
    calls = [node for node in ast.walk(ast.parse((FOLDER / module).read_text())) if isinstance(node, ast.Call)]
    assert any(ast.unparse(call.func) == "refuse_spare_slots" for call in calls)
