"""What is refused when a trace is recorded, read and used, and in which words."""

from __future__ import annotations

import builtins
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_dispatch import MoEDispatchError, Rows, build_dispatcher
from moe_dispatch.errors import InputError, PeerError, StateError, TraceError
from moe_dispatch.layouts import Layout
from moe_dispatch_tools.traces import Trace
from tests.dispatchers.layer import identity_round, outcomes, random_routing, random_rows, small_config
from tests.traces.recorded import record_batches

LOCAL = small_config("local")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record_batches(None, tmp_path / "run.safetensors", LOCAL)
    return tmp_path / "run.safetensors"


def changed(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], Any]) -> Path:
    """A copy whose tensors and metadata were changed in place."""
    with safe_open(path, framework="pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    change(tensors, metadata)
    copy = path.with_name("changed.safetensors")
    save_file(tensors, copy, metadata)
    return copy


def set_item(values: dict[str, Any], key: str, value: Any) -> None:
    values[key] = value


def test_files_that_are_no_traces(tmp_path: Path, recorded: Path) -> None:
    (tmp_path / "config.yaml").write_text("backend: alltoall\n" * 20)
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(recorded.read_bytes()[:-1])
    save_file({"weight": torch.zeros(2)}, tmp_path / "model")
    for name, told in {
        "none": "must be an existing file, got no file",
        ".": "must be an existing file, got a directory",
        "config.yaml": "must be a complete safetensors file",
        "empty": "must be a complete safetensors file",
        "short": "must be a complete safetensors file, got an error: .*again",
        "model": "must be a trace of format 1, got another safetensors file",
    }.items():
        with pytest.raises(TraceError, match=told):
            Trace.load(tmp_path / name)


def of_another_version(_: Any, metadata: dict[str, str]) -> None:
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), "invented_later": 1})
    metadata["versions"] = json.dumps({"moe_dispatch": "7.0"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda _, metadata: set_item(metadata, "moe_dispatch_trace", "0"), "format 1, got format 0"),
        (lambda _, metadata: set_item(metadata, "moe_dispatch_trace", "2"), "got format 2, of a newer moe-dispatch"),
        (of_another_version, r"got a config of moe_dispatch 7\.0: .*invented_later"),
        (lambda tensors, _: tensors.pop("rank0.weights"), "KeyError: 'rank0.weights'"),
        (lambda tensors, _: tensors.clear(), "IndexError"),
        (lambda _, metadata: metadata.pop("layers"), "layers: Field required"),
        (lambda _, metadata: set_item(metadata, "needs", "{"), "needs: Invalid JSON"),
        (lambda _, metadata: set_item(metadata, "config", "[" * 100_000), "config: Invalid JSON: recursion limit"),
        (lambda _, metadata: set_item(metadata, "layers", '["a\\u0000b", "c"]'), "layers.0: String should match"),
        (lambda _, metadata: set_item(metadata, "ep_size", "many"), "ep_size: Input should be a valid integer"),
        (lambda tensors, _: set_item(tensors, "rank0.ids", tensors["rank0.ids"][:-1].clone()), "RuntimeError"),
        (lambda tensors, _: tensors["rank0.layouts"].fill_(77), "JSONDecodeError"),
        (lambda tensors, _: set_item(tensors, "rank0.calls", torch.zeros(2, 5, dtype=torch.int64)), "TypeError"),
        (lambda tensors, _: tensors["rank0.calls"].fill_(-1), "RuntimeError"),
        (lambda tensors, _: set_item(tensors, "rankx.ids", tensors.pop("rank0.ids")), "ValueError"),
    ],
)
def test_file_that_lacks_parts_or_is_of_another_version(recorded: Path, change: Callable[..., Any], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        Trace.load(changed(recorded, change))


def test_needs_of_another_version_are_left_out(recorded: Path) -> None:
    needs = json.dumps({"row_multiple": 64, "invented_later": 1})
    trace = Trace.load(changed(recorded, lambda _, metadata: set_item(metadata, "needs", needs)))
    assert trace.needs.row_multiple == 64


@pytest.mark.parametrize("missing", ["safetensors.torch", "numpy"])
def test_missing_package(recorded: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    plain = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return plain(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    dispatcher, package = build_dispatcher(LOCAL), missing.partition(".")[0]
    for verb, action in (
        ("load", lambda: Trace.load(recorded)),
        ("record", lambda: Trace.record(dispatcher, recorded).__enter__()),
    ):
        with pytest.raises(TraceError, match=rf"Trace.{verb}: {package} is not installed\. .* -e '\.\[trace\]'"):
            action()


def test_config_that_does_not_fit(recorded: Path) -> None:
    trace = Trace.load(recorded)
    trace.check(small_config("allgather", hidden_size=32, pad_multiple=16, max_tokens_per_rank=8), ep_size=1)
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"num_experts": 16}, 1, "num_experts must be 8, as in the trace, got 16"),
        ({"top_k": 1}, 1, "top_k must be 2, as in the trace, got 1"),
        ({}, 4, "ep_size must be 1, as in the trace, got 4"),
        ({"max_tokens_per_rank": 7}, 1, "must be at least 8, the rows of the trace, got 7"),
    ]
    for fields, ep_size, told in wrong:
        with pytest.raises(TraceError, match=told):
            trace.check(small_config(**fields), ep_size=ep_size)


def _enter(group: Any, path: Path, **options: Any) -> None:
    dispatcher = build_dispatcher(small_config("alltoall"), group)
    with Trace.record(dispatcher, path, **options):
        identity_round(dispatcher)


def test_a_closed_dispatcher_and_two_recordings_of_a_channel(tmp_path: Path) -> None:
    first, second, closed = (build_dispatcher(LOCAL) for _ in range(3))
    closed.close()
    with pytest.raises(StateError, match="the dispatcher must be open, got a closed one"):
        Trace.record(closed, tmp_path / "c.safetensors").__enter__()
    with (
        Trace.record(first, tmp_path / "a.safetensors"),
        pytest.raises(StateError, match="only one block must record a channel at a time, got another block"),
        Trace.record(second, tmp_path / "b.safetensors"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("path", "options", "wrong", "kind", "text"),
    [
        ("file/run.safetensors", {}, 0, TraceError, "must be in a directory that can be written, got "),
        ("folder", {}, 0, TraceError, "folder must be a file, got a directory"),
        ("run.safetensors", {"steps": 0}, 1, InputError, "steps must be 1 or more, got 0"),
    ],
)
def test_wrong_on_one_rank_is_told_on_all(
    tmp_path: Path, path: str, options: dict[str, Any], wrong: int, kind: type[Exception], text: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def body(group: dist.ProcessGroup) -> None:
        _enter(group, tmp_path / path, **(options if group.rank() == wrong else {}))

    results = outcomes(body, 2)
    assert isinstance(results[wrong], kind)
    assert isinstance(results[1 - wrong], PeerError)
    for error in results:
        with pytest.raises(MoEDispatchError, match=text):
            raise error
    assert f"rank {wrong} refused: " in str(results[1 - wrong])


@pytest.mark.parametrize("becomes", ["a folder", "a file in place of its folder"])
def test_file_that_cannot_be_written_in_the_end(tmp_path: Path, becomes: str) -> None:
    path = tmp_path / "runs" / "run.safetensors"

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(small_config("alltoall"), group)
        with Trace.record(dispatcher, path):
            identity_round(dispatcher)
            if group.rank() == 0 and becomes == "a folder":
                (path / "full").mkdir(parents=True)
            elif group.rank() == 0:
                path.parent.rmdir()
                path.parent.touch()

    written, peer = outcomes(body, 2)
    assert isinstance(written, TraceError)
    assert isinstance(peer, PeerError)
    assert re.search(r"run.safetensors cannot be written: .* Use another path\.", str(written))
    assert [entry.name for entry in tmp_path.rglob(".run*")] == []


@dataclasses.dataclass(frozen=True)
class Odd(Layout):
    """A layout of somebody else's."""

    metadata = ()
    all_real = True

    def rows_of(self, shape: Any) -> int:
        return int(shape[0])

    def known_rows(self) -> int | None:
        return None

    known_real = known_rows

    def nothing(self, *arguments: Any, **options: Any) -> Any:
        return None

    grid = sequence_dim = mask = check_rows = check_shard = shard_rows = nothing
    num_sequences = all_positions = nothing


def test_layout_of_somebody_else(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(LOCAL)
    dispatcher.dispatch(random_rows(3), random_routing(3), Odd())
    with (
        Trace.record(dispatcher, tmp_path / "run.safetensors"),
        pytest.raises(InputError, match=r"a trace cannot hold a Odd\. Flatten x"),
    ):
        dispatcher.dispatch(random_rows(3), random_routing(3), Odd())
    assert Trace.load(tmp_path / "run.safetensors").calls == ()


def _selectively(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.moe_dispatch.dispatch.default])

    saved: Tensor = checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)
    return saved


@pytest.mark.parametrize("how", [pytest.param("compiled", marks=pytest.mark.slow), "selective"])
def test_calls_that_go_through_operators(tmp_path: Path, how: str) -> None:
    """Also those that were compiled before the recording began."""
    dispatcher, routing = build_dispatcher(LOCAL), random_routing(3)

    def layer(x: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, routing, Rows())
        return dispatcher.combine(sent.rows, sent)

    x = random_rows(3).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    run = compiled if how == "compiled" else lambda x: _selectively(layer, x)
    run(x)
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), pytest.raises(StateError, match="calls inside torch"):
        run(x)
    run(x).sum().backward()
