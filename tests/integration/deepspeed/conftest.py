"""Every test here needs DeepSpeed; it is looked for by its distribution, since this folder has its name too.

``make integration`` runs this folder in an environment of its own, with a transformers that DeepSpeed works with.
"""

from __future__ import annotations

import multiprocessing
import os
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.integration.conftest import PRELOADED

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")


def _missing() -> bool:
    try:
        version("deepspeed")
    except PackageNotFoundError:
        return True
    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        models = [f"transformers.models.{family}.modeling_{family}" for family in ("mixtral", "deepseek_v3")]
        multiprocessing.set_forkserver_preload([*PRELOADED, "deepspeed", *models])
    return False


MISSING = _missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "deepspeed":
            item.add_marker(pytest.mark.integration)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason="needs deepspeed 0.19.8: make integration installs it"))
