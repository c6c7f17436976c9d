"""Emulated releases as modules, and in the place of ``deep_ep``."""

from __future__ import annotations

import importlib
import sys

import pytest

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.emulation import RELEASES, emulated_deep_ep, imported_as_deep_ep


def test_unknown_release_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"Unknown release of deep_ep 'v3'. Emulated releases: v1\.2\.1, v2-2\.1\.0, v2\.5\.0, h"
    ):
        emulated_deep_ep("v3")
    with pytest.raises(ConfigError, match=r"HybridEP 0ed15b5 is no longer supported\. Use hybridep-34152ae or later"):
        emulated_deep_ep("hybridep-0ed15b5")


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_one_module(release: str) -> None:
    assert emulated_deep_ep(release) is emulated_deep_ep(release)
    assert "deep_ep" not in sys.modules


def test_buffers_are_told_apart_by_attributes() -> None:
    """As a probe does with the installed package."""
    found = {
        release: [name for name in ("ElasticBuffer", "EPBuffer", "HybridEPBuffer") if hasattr(module, name)]
        for release, module in ((release, emulated_deep_ep(release)) for release in RELEASES)
    }
    newer = {release: ["HybridEPBuffer"] for release in RELEASES[3:]}
    assert found == {"v1.2.1": [], "v2-2.1.0": ["ElasticBuffer"], "v2.5.0": ["EPBuffer"], **newer}
    assert [release for release in RELEASES if not hasattr(emulated_deep_ep(release), "Buffer")] == ["v2.5.0"]
    assert emulated_deep_ep("v2-2.1.0").__version__ == "2.1.0"
    assert emulated_deep_ep("v2.5.0").__version__ == "2.5.0"


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in ("v1.2.1", "v2.5.0")])
def test_buffer_of_other_releases_is_there_to_be_imported_only(release: str) -> None:
    buffer = emulated_deep_ep(release).Buffer
    for use in (buffer, buffer.get_dispatch_config, buffer.get_combine_config, buffer.set_num_sms):
        with pytest.raises(NotImplementedError, match="is not emulated, only its newer class is"):
            use(8)


@pytest.mark.parametrize(
    ("release", "names"),
    [
        (
            "v1.2.1",
            ["deep_ep.Buffer", "deep_ep.utils.EventHandle", "deep_ep.utils.EventOverlap", "deep_ep.buffer.Buffer"],
        ),
        ("v2-2.1.0", ["deep_ep.EPHandle", "deep_ep.buffers.elastic.ElasticBuffer", "deep_ep.utils.event.EventOverlap"]),
        ("v2.5.0", ["deep_ep.EPHandle", "deep_ep.buffers.ep.EPBuffer", "deep_ep.utils.event.EventOverlap"]),
        ("hybridep-94a9f8f", ["deep_ep.HybridEPBuffer", "deep_ep.hybrid_ep_buffer.indices_to_map"]),
    ],
)
def test_modules_are_found_by_import_inside_the_block_only(release: str, names: list[str]) -> None:
    with imported_as_deep_ep(release) as package:
        assert importlib.import_module("deep_ep") is package
        for name in names:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
    assert not [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]


def test_code_for_v1_imports_nothing_from_v2() -> None:
    """It wants EventOverlap from deep_ep.utils, as megatron-core's does, and v2 has it elsewhere."""
    with imported_as_deep_ep("v2-2.1.0"):
        utils = importlib.import_module("deep_ep.utils")
        assert hasattr(utils, "EventHandle")
        assert not hasattr(utils, "EventOverlap")


def test_what_was_imported_before_comes_back_also_after_an_error() -> None:

    def fail_inside() -> None:
        with imported_as_deep_ep("v2-2.1.0") as inner:
            assert importlib.import_module("deep_ep") is inner
            raise KeyError

    with imported_as_deep_ep("v1.2.1") as outer:
        with pytest.raises(KeyError):
            fail_inside()
        assert importlib.import_module("deep_ep") is outer
        assert importlib.import_module("deep_ep.buffer").Buffer is outer.Buffer
