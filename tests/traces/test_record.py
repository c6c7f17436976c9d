"""What a recording keeps, and what it costs: nothing of a step is changed by it."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch import MoEDispatchError, Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError, PeerError, StateError, TraceError
from moe_dispatch_testing import refuse_host_syncs
from moe_dispatch_tools.traces import Part, RunLog, Trace
from tests.dispatchers.layer import (
    Group,
    by_operators,
    identity_round,
    on_ranks,
    outcomes,
    random_routing,
    random_rows,
    small_config,
)
from tests.pages import run_page
from tests.ranks import run_ranks
from tests.traces.recorded import Given, batches, record_batches, run

CONFIGS = {1: small_config("local"), 2: small_config("alltoall"), 4: small_config("allgather", pad_multiple=4)}


def same_part(part: Part, given: Given) -> None:
    x, routing, layout = given
    assert part.routing.topk_ids.dtype == torch.int64
    assert torch.equal(part.routing.topk_ids, routing.topk_ids)
    assert part.routing.topk_weights.dtype == routing.topk_weights.dtype
    assert torch.equal(part.routing.topk_weights, routing.topk_weights)
    assert (part.shape, part.dtype, str(part.layout)) == (x.shape, x.dtype, str(layout))
    recorded, real = (each.valid_T(part.num_rows) for each in (part.layout, layout))
    assert (recorded is None) == (real is None)
    assert recorded is None or real is None or torch.equal(recorded, real)
    assert part.on_host


def check_batches(path: Path, size: int) -> Trace:
    trace = Trace.load(path)
    assert (trace.ep_size, trace.ranks, trace.layers) == (size, tuple(range(size)), ("layers.0", "dispatcher 1"))
    assert [(call.step, call.layer) for call in trace.calls] == [(step, layer) for step in range(7) for layer in (0, 1)]
    for call in trace.calls:
        for rank, part in enumerate(call.parts):
            same_part(part, batches(rank)[call.step])
    return trace


@pytest.mark.parametrize("size", CONFIGS)
def test_everything_comes_back(tmp_path: Path, size: int) -> None:
    path = tmp_path / "made" / "run.safetensors"
    on_ranks(lambda group: record_batches(group, path, CONFIGS[size]), size)
    trace = check_batches(path, size)
    assert trace.config == CONFIGS[size]
    assert trace.backend_name == CONFIGS[size].backend
    assert trace.needs.equal_rows == (size == 4)
    assert list(tmp_path.rglob("*.*")) == [path], "nothing else is left"
    assert path.stat().st_mode & 0o077 == (tmp_path / "made").stat().st_mode & 0o066, "others may read it"


def test_tokens_are_those_that_experts_saw_and_results_are_those_without_a_recording(tmp_path: Path) -> None:
    """Not rows that are no tokens, nor slots of -1, nor an expert's second slot of one row."""

    def body(group: Group) -> Tensor:
        dispatcher, given = build_dispatcher(CONFIGS[2], group), batches(group.rank())
        plain = [run(dispatcher, each) for each in given]
        seen = []
        with Trace.record(dispatcher, tmp_path / "run.safetensors"):
            for (x, routing, layout), expected in zip(given, plain, strict=True):
                sent = dispatcher.dispatch(x, routing, layout)
                seen.append(sent.real_tokens_per_expert)
                assert torch.equal(dispatcher.combine(sent.rows, sent), expected)
        return torch.stack(seen)

    seen = torch.cat(run_ranks(body, 2), 1)
    assert torch.equal(Trace.load(tmp_path / "run.safetensors").tokens_per_expert(), seen)
    assert seen.sum() > 20


def test_steps_are_bounded_for_each_dispatcher(tmp_path: Path) -> None:
    """A call that one rank does not record is not in the trace: a block may be left early by a ``break``."""
    path = tmp_path / "run.safetensors"
    run_ranks(lambda group: record_batches(group, path, CONFIGS[2], steps=3 - group.rank()), 2)
    trace = Trace.load(path)
    assert [(call.layer, call.step) for call in trace.calls] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert (trace.steps, trace.max_rows) == (2, 10)
    same_part(trace.calls[3].parts[1], batches(1)[1])


def test_what_is_changed_afterwards_is_recorded_as_it_was(tmp_path: Path) -> None:
    dispatcher, (x, routing, layout) = build_dispatcher(CONFIGS[1]), batches(0)[0]
    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        dispatcher.dispatch(x, routing, layout)
        for tensor in (routing.topk_ids, routing.topk_weights, *layout.metadata):
            tensor.zero_()
        dispatcher.close()  # the demo's model does so before its training returns
    same_part(Trace.load(tmp_path / "run.safetensors").calls[0].parts[0], batches(0)[0])


def test_asynchronous_dispatches_are_recorded(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(CONFIGS[2], group)
        with Trace.record(dispatcher, tmp_path / "run.safetensors"):
            sent = [dispatcher.dispatch(random_rows(3), random_routing(3, seed), async_op=True) for seed in (1, 2)]
            for each in reversed(sent):
                each.wait()

    on_ranks(body, 2)
    ids = [call.parts[1].routing.topk_ids for call in Trace.load(tmp_path / "run.safetensors").calls]
    assert torch.equal(torch.stack(ids), torch.stack([random_routing(3, seed).topk_ids for seed in (1, 2)]))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_recorded_again(tmp_path: Path, use_reentrant: bool) -> None:
    dispatcher, x = build_dispatcher(CONFIGS[1]), random_rows(4).requires_grad_()
    calls = []

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        return run(dispatcher, (x, random_routing(4), dispatcher.layout_of(x)))

    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        for _ in range(2):
            checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 4
    assert [call.step for call in Trace.load(tmp_path / "run.safetensors").calls] == [0, 1]


def test_graph_safe_steps_stay_without_host_syncs(tmp_path: Path) -> None:
    config = small_config("local", graph_safe=True, max_tokens_per_rank=20)
    dispatcher, (x, routing, layout) = build_dispatcher(config), batches(0)[0]
    plan = dispatcher.plan(layout, like=x)  # lengths on the host are read here
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), refuse_host_syncs() as found:
        dispatcher.dispatch(x, routing, plan)
    assert found == []
    trace = Trace.load(tmp_path / "run.safetensors")
    same_part(trace.calls[0].parts[0], batches(0)[0])
    assert not trace.cuts(trace.calls[0].parts[0]), "graph-safe rows are masked"


def test_call_that_a_rank_refused_is_on_no_rank(tmp_path: Path) -> None:
    """Counted on one rank only, it would shift all later calls of that rank against its peers'."""

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(CONFIGS[2], group)
        with Trace.record(dispatcher, tmp_path / "run.safetensors"):
            with pytest.raises(Exception, match=r"hidden size 8|rank 1 refused"):
                dispatcher.dispatch(random_rows(3, 16 if group.rank() == 0 else 8), random_routing(3, 1))
            dispatcher.dispatch(random_rows(3), random_routing(3, 2))

    run_ranks(body, 2)
    (call,) = Trace.load(tmp_path / "run.safetensors").calls
    for part in call.parts:
        assert torch.equal(part.routing.topk_ids, random_routing(3, 2).topk_ids)


def test_error_leaves_what_each_rank_has(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(CONFIGS[2], group)
        with Trace.record(dispatcher, path):
            run(dispatcher, batches(group.rank())[0])
            if group.rank() == 1:
                raise ArithmeticError("loss is NaN")

    peer, failed = outcomes(body, 2, seconds=0.5)
    assert isinstance(failed, ArithmeticError)
    for rank, error in enumerate((peer, failed)):
        own = tmp_path / f"run.rank{rank}.safetensors"
        assert f"The part of this rank is in {own}." in error.__notes__
        trace = Trace.load(own)
        assert (trace.ranks, trace.ep_size) == ((rank,), 2)
        same_part(trace.calls[0].parts[0], batches(rank)[0])
        with pytest.raises(TraceError, match=rf"here: \S+ must hold all 2 ranks, got rank {rank}\. Record a run"):
            Trace.load_whole(own, "here")
    assert not path.exists()


def test_nothing_recorded(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(CONFIGS[1])
    with Trace.record(dispatcher, tmp_path / "run.safetensors"):
        dispatcher.dispatch(random_rows(3), random_routing(3), again=None)
        sent = dispatcher.dispatch(random_rows(0), Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)))
        dispatcher.dispatch(random_rows(0), again=sent)
    trace = Trace.load(tmp_path / "run.safetensors")
    assert [call.parts[0].num_rows for call in trace.calls] == [3, 0], "not again=sent, which has no routing of its own"
    with Trace.record(dispatcher, tmp_path / "empty.safetensors"):
        pass
    empty = Trace.load(tmp_path / "empty.safetensors")
    assert (empty.calls, empty.steps, empty.max_rows, empty.layers) == ((), 0, 0, ())


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
        (lambda tensors, _: tensors["rank0.calls"].fill_(-1), "ValueError: a negative number"),
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


class Odd(Rows):  # type: ignore[misc]
    """A layout of somebody else's."""


def test_layout_of_somebody_else(tmp_path: Path) -> None:
    dispatcher = build_dispatcher(LOCAL)
    dispatcher.dispatch(random_rows(3), random_routing(3), Odd())
    with (
        Trace.record(dispatcher, tmp_path / "run.safetensors"),
        pytest.raises(InputError, match=r"a trace cannot hold a Odd\. Flatten x"),
    ):
        dispatcher.dispatch(random_rows(3), random_routing(3), Odd())
    assert Trace.load(tmp_path / "run.safetensors").calls == ()


@pytest.mark.parametrize("how", [pytest.param("compiled", marks=pytest.mark.slow), "selective"])
def test_calls_that_go_through_operators(tmp_path: Path, how: str) -> None:
    """Also those that were compiled before the recording began."""
    dispatcher, routing = build_dispatcher(LOCAL), random_routing(3)

    def layer(x: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, routing, Rows())
        return dispatcher.combine(sent.rows, sent)

    x = random_rows(3).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    run = compiled if how == "compiled" else partial(by_operators, layer)
    run(x)
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), pytest.raises(StateError, match="calls inside torch"):
        run(x)
    run(x).sum().backward()


def test_code_of_the_page_runs_and_the_reference_has_all_of_the_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trace, log = inspect.getdoc(Trace), inspect.getdoc(RunLog)
    assert trace is not None
    assert log is not None
    with contextlib.chdir(tmp_path):
        namespace = run_page("cli.md")
    assert namespace["trace"].steps == 3  # the blocks ran to the end
    with safe_open(tmp_path / "out" / "run.safetensors", framework="pt") as file:
        for name in [*file.metadata(), *(key.replace("rank0", "rank{r}") for key in file.keys())]:  # noqa: SIM118
            assert f"`{name}`" in trace, name
    for kind, text in ((Trace, trace), (RunLog, log)):
        for item in dataclasses.fields(kind):
            assert f"\n    {item.name}: " in text, item.name
    assert namespace["run"].steps == 3
