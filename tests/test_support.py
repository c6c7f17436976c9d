"""The list of supported versions says what the build, the matrix and the emulation use."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from moe_dispatch.backends.deep_ep import deepep, hybridep
from moe_dispatch.integrations.checks import parse_version
from moe_dispatch.versions import SUPPORT

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_metadata_asks_for_the_lowest_versions() -> None:
    assert PROJECT["requires-python"] == f">={SUPPORT['Python'].lowest}"
    assert f"torch>={SUPPORT['torch'].lowest}" in PROJECT["dependencies"]
    assert tuple(line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line) == (
        SUPPORT["Python"].tested
    )


def test_matrix_has_every_tested_python_and_torch() -> None:
    cells = runpy.run_path(str(ROOT / "tests" / "matrix" / "run.py"))["CELLS"]
    named = [re.fullmatch(r"torch-(\S+)-py(\S+)", cell.name) for cell in cells]
    ran = [found.groups() for found in named if found is not None]
    assert tuple(dict.fromkeys(torch for torch, _ in ran)) == SUPPORT["torch"].tested
    assert tuple(sorted({python for _, python in ran})) == SUPPORT["Python"].tested


@pytest.mark.parametrize("name", ["torch", "megatron-core", "transformers", "torchtitan", "deepspeed"])
def test_pinned_version_is_a_tested_one(name: str) -> None:
    assert PINNED[name] in SUPPORT[name].tested


def test_makefile_installs_tested_versions() -> None:
    installed = dict(
        re.findall(r"([a-z-]+)==([\d.]+)", MAKEFILE.partition("--target .frameworks")[2].partition("@")[0])
    )
    assert installed == {
        name: SUPPORT[name].tested[-1] for name in ("megatron-bridge", "verl", "areal", "ms-swift", "nemo-automodel")
    }
    assert re.search(rf"^MEGATRON_VERSION := {SUPPORT['megatron-core'].tested[0]}$", MAKEFILE, re.MULTILINE)
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert {known.target for known in SUPPORT.values()} <= targets


def test_makefile_installs_the_transformer_engine_whose_python_is_run() -> None:
    (installed,) = re.findall(r"--target .frameworks/te transformer-engine==(\S+)", MAKEFILE)
    assert (installed,) == SUPPORT["transformer-engine"].emulated


def test_options_name_the_emulated_releases() -> None:
    others = SUPPORT["UCCL-EP"].emulated + SUPPORT["ROCm DeepEP"].emulated
    assert get_args(deepep.Release) == SUPPORT["DeepEP"].emulated + others
    assert get_args(hybridep.Release) == SUPPORT["HybridEP"].emulated


def test_versions_ascend() -> None:
    for known in SUPPORT.values():
        numbers = [parse_version(version)[0] for version in (known.lowest or "0", *known.tested)]
        assert not known.tested or numbers == sorted(numbers)
