"""Emulated releases as modules, and the names and arguments that were recorded from the source of each release."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.emulation import RELEASES, emulated_deep_ep, imported_as_deep_ep
from moe_dispatch_testing.emulation.releases import LIKE_V1
from moe_dispatch_testing.emulation.signatures import parsed, recorded
from tests.emulation import test_elastic
from tests.emulation.tokens import make_tokens


def test_unknown_release_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"Unknown release of deep_ep 'v3'. Emulated releases: v1\.2\.1, v2-2\.1\.0, v2\.5\.0, u"
    ):
        emulated_deep_ep("v3")
    for ended in ("hybridep-0ed15b5", "hybridep-34152ae"):
        with pytest.raises(ConfigError, match=rf"{ended} is no longer supported\. Use hybridep-94a9f8f or later"):
            emulated_deep_ep(ended)


@pytest.mark.parametrize("release", [release for release in RELEASES if release not in ("v1.2.1", "v2.5.0", *LIKE_V1)])
def test_buffer_of_other_releases_is_there_to_be_imported_only(release: str) -> None:
    buffer = emulated_deep_ep(release).Buffer
    for use in (buffer, buffer.get_dispatch_config, buffer.get_combine_config, buffer.set_num_sms):
        with pytest.raises(NotImplementedError, match="is not emulated, only its newer class is"):
            use(8)


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("v1.2.1", ["deep_ep.Buffer", "deep_ep.utils.EventHandle", "deep_ep.utils.EventOverlap", "deep_ep.buffer"]),
        ("v2-2.1.0", ["deep_ep.EPHandle", "deep_ep.buffers.elastic.ElasticBuffer", "deep_ep.utils.event.EventOverlap"]),
        ("v2.5.0", ["deep_ep.EPHandle", "deep_ep.buffers.ep.EPBuffer", "deep_ep.utils.event.EventOverlap"]),
        ("uccl-da914a2", ["deep_ep.Buffer", "deep_ep.initialize_uccl", "deep_ep.utils.EventOverlap"]),
        ("rocm-92b4ae1", ["deep_ep.Buffer", "deep_ep.topk_idx_t", "deep_ep.buffer"]),
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


def methods_of(release: str) -> dict[tuple[str, str], list[str]]:
    """Recorded parameters by class and method."""
    classes = recorded(release)["classes"]
    return {(name, method): taken for name, methods in classes.items() for method, taken in methods.items()}


def written(signature: inspect.Signature) -> str:
    """A signature as text, without annotations: names, kinds and defaults."""
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(inspect.Signature(bare))


def named(module: Any, name: str) -> Any:
    """EventHandle is a class of the extension module, which v1 shows in ``deep_ep.utils`` only."""
    return getattr(module, name, None) or getattr(module.utils, name)


def differences(release: str, module: Any) -> list[str]:
    """Methods of a module's classes that do not take what the record says."""
    return [
        f"{name}.{method}"
        for (name, method), taken in methods_of(release).items()
        if written(inspect.signature(getattr(named(module, name), method))) != written(parsed(taken))
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_methods_take_what_those_of_the_release_take(release: str) -> None:
    assert recorded(release)["release"] == release
    assert len(methods_of(release)) > 5
    assert differences(release, emulated_deep_ep(release)) == []
    for name, taken in recorded(release).get("functions", {}).items():
        function = getattr(emulated_deep_ep(release).hybrid_ep_buffer, name)
        assert written(inspect.signature(function)) == written(parsed(taken))


@pytest.mark.parametrize("release", RELEASES)
def test_classes_are_those_of_the_release_and_have_no_other_public_method(release: str) -> None:
    record = recorded(release)
    assert set(record.get("names", record["classes"])) <= set(vars(emulated_deep_ep(release)))
    for name, methods in record["classes"].items():
        if name in ("Config", "EventHandle"):
            continue
        buffer = named(emulated_deep_ep(release), name)
        assert buffer.__name__ == ("ElasticEventOverlap" if (release, name) == ("v2-2.1.0", "EventOverlap") else name)
        public = {method for method in dir(buffer) if not method.startswith("_") and callable(getattr(buffer, method))}
        assert public <= set(methods), name


@pytest.mark.parametrize(
    ("release", "name", "method"),
    [
        ("v1.2.1", "Buffer", "low_latency_dispatch"),
        ("v1.2.1", "Buffer", "get_low_latency_rdma_size_hint"),
        ("uccl-da914a2", "Buffer", "reset_rdma_buffer"),
        ("rocm-92b4ae1", "Buffer", "low_latency_query_mask_buffer"),
        ("v2-2.1.0", "ElasticBuffer", "engram_fetch"),
        ("v2-2.1.0", "ElasticBuffer", "get_pp_buffer_size_hint"),
        ("v2.5.0", "EPBuffer", "print_memory_usage"),
        ("v2.5.0", "EPBuffer", "get_comm_stream"),
    ],
)
def test_what_is_not_emulated_is_refused_only_with_arguments_that_the_release_takes(
    release: str, name: str, method: str
) -> None:
    refuse, taken = getattr(getattr(emulated_deep_ep(release), name), method), methods_of(release)[name, method]
    required = [None] * len([one for one in taken if "=" not in one])
    with pytest.raises(NotImplementedError, match="not emulated"):
        refuse(*required)
    with pytest.raises(TypeError, match="missing a required argument"):
        refuse(*required[1:])


@pytest.mark.parametrize("release", ["v2-2.1.0", "v2.5.0"])
def test_objects_of_v2_hold_what_those_of_the_release_hold(release: str) -> None:
    attributes = recorded(release)["attributes"]
    buffer = test_elastic.open_buffer(None, release)
    handle = test_elastic.dispatched(buffer, make_tokens([5])[0])[3]
    assert sorted(vars(handle)) == sorted(attributes["EPHandle"])
    assert sorted(vars(buffer)) == sorted(attributes[type(buffer).__name__])


def test_the_installed_deep_ep_is_one_that_was_recorded() -> None:
    """Runs where a real deep_ep can be imported. A difference means: record its release, and emulate it."""
    try:
        installed = importlib.import_module("deep_ep")
    except Exception as error:  # its import checks NCCL, CUDA and a compiler, each in its own way
        pytest.skip(f"no deep_ep to compare with: {type(error).__name__}: {error}")
    known = [
        release for release in RELEASES if set(recorded(release)["classes"]) - {"EventHandle"} <= set(vars(installed))
    ]
    differing = {release: differences(release, installed) for release in known}
    assert any(found == [] for found in differing.values()), differing
