"""Marks of a file of integration tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

INSTALLED_BY = {
    "megatron": "megatron-core: install moe-dispatch[megatron]",
    "torchtitan": "torchtitan: install moe-dispatch[bench]",
    "transformers": "transformers: install moe-dispatch[bench]",
    "tensorboard": "tensorboard, which torchtitan brings",
}


def needs(package: str) -> list[pytest.MarkDecorator]:
    """An integration test, skipped where the package is missing."""
    missing = find_spec(package) is None
    return [pytest.mark.integration, pytest.mark.skipif(missing, reason=f"needs {INSTALLED_BY[package]}")]
