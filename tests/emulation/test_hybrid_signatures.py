"""The emulated buffers have the signatures, and the handles, that were recorded from the source of each release."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from typing import Any

import pytest

from moe_dispatch.testing.emulation.hybrid import hybrid_ep_buffer, indices_to_map
from moe_dispatch.testing.emulation.hybrid.release import RELEASES
from tests.emulation.hybrid_case import (
    EVERY,
    FIRST,
    HIDDEN,
    LOCAL,
    ROWS,
    make_sources,
    open_buffer,
    run_ranks,
    sent,
)


def recorded(release: str) -> Any:
    file = resources.files("moe_dispatch.testing.emulation") / "signatures" / f"{release}.json"
    return json.loads(file.read_text())


def signature(function: Any) -> list[list[str]]:
    parameters = inspect.signature(function).parameters.values()
    return [
        [one.name, one.kind.name, *([] if one.default is inspect.Parameter.empty else [repr(one.default)])]
        for one in parameters
    ]


@EVERY
def test_methods_take_what_the_release_takes(release: str) -> None:
    ((name, methods),) = recorded(release)["classes"].items()
    buffer = hybrid_ep_buffer(release)
    assert buffer.__name__ == name
    public = {method for method in dir(buffer) if not method.startswith("_") and callable(getattr(buffer, method))}
    assert public | {"__init__"} == set(methods)
    for method, parameters in methods.items():
        assert signature(getattr(buffer, method)) == parameters, method


@EVERY
def test_indices_to_map_takes_the_same_everywhere(release: str) -> None:
    assert recorded(release)["functions"] == {"indices_to_map": signature(indices_to_map)}


@EVERY
def test_the_record_names_its_release_and_its_source(release: str) -> None:
    record = recorded(release)
    assert record["release"] == release
    assert set(record["source"]) == {"repository", "branch", "commit", "date", "file"}
    assert len(record["source"]["commit"]) == 40


@pytest.mark.parametrize("release", [name for name in RELEASES if name != FIRST])
def test_handle_fields_are_those_recorded(release: str) -> None:
    handles, facts = recorded(release)["handles"], RELEASES[release]
    # The source lists the fields of a handle in order and unpacks tuples by it; the names here are the same.
    unfused = handles["dispatch_with_permute"]
    assert list(facts.dispatch_handle) == handles["dispatch"]
    assert list(facts.permute_handle) == unfused
    assert list(facts.fused_handle) == handles["dispatch_with_permute(fuse_permute_dispatch=True)"]


@EVERY
def test_handles_hold_what_their_fields_say(release: str) -> None:
    sources = make_sources([ROWS] * 2)

    def body(group: Any) -> Any:
        buffer, source = open_buffer(release, group), sources[group.rank()]
        return (
            buffer.dispatch(source.x, routing_map=source.routing)[-1],
            sent(buffer, source, pad_multiple=16)[-1],
        )

    for plain, permuted in run_ranks(body, 2):
        names = recorded(release)["handles"]
        _check_handle(dict(zip(names["dispatch"], plain, strict=True)))
        _check_handle(dict(zip(names["dispatch_with_permute"], permuted, strict=True)))


def _check_handle(handle: dict[str, Any]) -> None:
    shapes = {
        "sparse_to_dense_map": ("torch.int32", (ROWS, 2)),
        "rdma_to_attn_map": ("torch.bool", (ROWS, 1)),
        "attn_to_rdma_map": ("torch.bool", (ROWS, 0)),
        "num_dispatched_tokens_tensor": ("torch.int32", (1,)),
        "local_expert_routing_map": ("torch.bool", (2 * ROWS, LOCAL)),
        "dense_chunk_layout": ("torch.int32", (2,)),
        "dense_to_expert_map": ("torch.int32", (2 * ROWS, LOCAL)),
        "tokens_per_expert": ("torch.int32", (LOCAL,)),
        "overflow_flag": ("torch.int32", (1,)),
    }
    for name, (dtype, shape) in shapes.items():
        if name in handle:
            assert (str(handle[name].dtype), tuple(handle[name].shape)) == (dtype, shape), name
    for name in ("num_of_tokens", "num_of_tokens_per_rank", "num_of_valid_tokens"):
        assert handle.get(name, ROWS) == ROWS
    if "config" in handle:
        assert handle["config"].hidden_dim == HIDDEN
    if "row_id_map" in handle:
        # Room for all rows that may come and one block of padding; the first release knows how many came.
        came = int(handle["num_dispatched_tokens_tensor"])
        assert handle["row_id_map"].shape[0] - 16 == (came if "config" not in handle else 2 * 512)
