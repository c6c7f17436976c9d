"""Every test here needs Axolotl; it is looked for by its distribution, since this folder has its name too.

``make integration`` runs this folder in an environment of its own, with the transformers that Axolotl pins.
"""

from __future__ import annotations

import multiprocessing
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.integration.conftest import PRELOADED


def _missing() -> bool:
    try:
        version("axolotl")
    except PackageNotFoundError:
        return True
    if multiprocessing.get_start_method(allow_none=True) == "forkserver":
        multiprocessing.set_forkserver_preload([*PRELOADED, "trl", "datasets", "peft", "bitsandbytes"])
    return False


MISSING = _missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "axolotl":
            item.add_marker(pytest.mark.integration)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason="needs axolotl 0.21.0: make integration installs it"))
