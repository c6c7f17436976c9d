"""The emulated classes take, and hold, what was recorded from the source of their release; and so do the real ones."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from moe_dispatch_testing.emulation import RELEASES, emulated_deep_ep
from moe_dispatch_testing.emulation.signatures import parsed, recorded
from tests.emulation import elastic_case, hybrid_case
from tests.emulation.hybrid_case import HIDDEN, ROWS, make_sources
from tests.emulation.tokens import make_tokens, run_ranks


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


@hybrid_case.BEFORE_RAGGED
def test_older_releases_refuse_an_argument_that_came_later(release: str) -> None:
    buffer = hybrid_case.open_buffer(release, None)
    x = torch.zeros(16, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_of_tokens_per_rank'"):
        buffer.dispatch(x, num_of_tokens_per_rank=16)


@pytest.mark.parametrize("release", ["v2-2.1.0", "v2.5.0"])
def test_objects_of_v2_hold_what_those_of_the_release_hold(release: str) -> None:
    attributes = recorded(release)["attributes"]
    buffer = elastic_case.open_buffer(None, release)
    handle = elastic_case.dispatched(buffer, make_tokens([5])[0])[3]
    assert sorted(vars(handle)) == sorted(attributes["EPHandle"])
    assert sorted(vars(buffer)) == sorted(attributes[type(buffer).__name__])


@hybrid_case.CURRENT
def test_handles_hold_what_their_fields_say(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: Any) -> Any:
        buffer, source = hybrid_case.open_buffer(release, group), sources[group.rank()]
        return (
            buffer.dispatch(source.x, routing_map=source.routing)[-1],
            hybrid_case.sent(buffer, source, pad_multiple=16)[-1],
        )

    for plain, permuted in run_ranks(body, 2):
        names = recorded(release)["handles"]
        for names_of_call, handle in ((names["dispatch"], plain), (names["dispatch_with_permute"], permuted)):
            items = dict(zip(names_of_call, handle, strict=True))
            assert items["sparse_to_dense_map"].shape == (ROWS, 2)
            assert "overflow_flag" not in items or items["overflow_flag"].shape == (1,)


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
