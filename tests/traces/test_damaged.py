"""Damaged traces and run logs: every reader ends in one named error, or reads a file whose numbers fit each other."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_dispatch import build_dispatcher
from moe_dispatch.errors import TraceError
from moe_dispatch_tools.report.command import write_report
from moe_dispatch_tools.report.sections import counts_of, run_content
from moe_dispatch_tools.traces import RunLog, Trace
from tests.dispatchers.layer import Group, on_ranks, random_routing, random_rows, small_config
from tests.traces.recorded import record_batches

Tensors = dict[str, Tensor]
Metadata = dict[str, str]
Damage = Callable[[Tensors, Metadata], object]
VALUES: list[Any] = [-1, 0, 3, 2**31, 2**62, 1.5, None, True, "x", "", [], {}, [None], ["a\nb"], {"a": -1}]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.safetensors"
    on_ranks(lambda group: record_batches(group, path), 2)
    return path


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logged") / "run"

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(), group, name="layers.0")
        with RunLog.record(dispatcher, directory) as writer:
            for step in range(3):
                dispatcher.dispatch(random_rows(5), random_routing(5, step))
                writer.step()

    on_ranks(body, 2)
    return directory


def parts_of(path: Path) -> tuple[Tensors, Metadata]:
    with safe_open(path, "pt") as file:
        return load_file(path), dict(file.metadata())


def damaged(path: Path, tmp_path: Path, damage: Damage) -> Path:
    tensors, metadata = parts_of(path)
    damage(tensors, metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "run.safetensors", metadata)
    return tmp_path / "run.safetensors"


def put(name: str, at: tuple[int, int], value: int) -> Damage:
    def damage(tensors: Tensors, metadata: Metadata) -> None:
        tensors[name][at] = value

    return damage


def said(name: str, value: Any) -> Damage:
    return lambda tensors, metadata: metadata.update({name: json.dumps(value)})


def narrowed(tensors: Tensors, metadata: Metadata) -> None:
    tensors["rank1.weights"] = tensors["rank1.weights"][:, :1]


def of_another_rank(tensors: Tensors, metadata: Metadata) -> None:
    for name in [name for name in tensors if name.startswith("rank1")]:
        tensors[name.replace("rank1", "rank-1")] = tensors.pop(name)


LAYER, STEP, DTYPES = 0, 1, 5
WRONG: dict[str, tuple[Damage, str]] = {
    "a layer without a dispatch": (said("layers", ["a", "b", "c"]), r"got dispatches of \[0, 1\] for the layers \['a'"),
    "a dispatch without a layer": (said("layers", ["a"]), r"got dispatches of \[0, 1\] for the layers \['a'\]"),
    "no layer": (said("layers", []), r"got dispatches of \[0, 1\] for the layers \[\]"),
    "a far layer": (put("rank0.calls", (0, LAYER), 9), r"numbered 0, 1, 2 and so on"),
    "a far step": (put("rank0.calls", (-1, STEP), 99), r"numbered 0, 1, 2 and so on"),
    "a negative step": (put("rank0.calls", (0, STEP), -1), r"got ValueError: a negative number in _Row\(.*step=-1"),
    "a negative dtype": (put("rank0.calls", (0, DTYPES), -1), r"a negative number in _Row\(.*dtypes=-1"),
    "needs of 0": (said("needs", {"row_multiple": 0}), r"got needs\.row_multiple of 0"),
    "three ranks": (said("ep_size", 3), r"got num_experts \(8\) that ep_size \(3\) does not divide"),
    "nodes of 3": (said("ranks_per_node", 3), r"got ranks_per_node \(3\) that does not divide ep_size \(2\)"),
    "rank -1": (of_another_rank, r"got rank -1 of 2 ranks"),
    "weights of one slot": (
        narrowed,
        r"got ids \(\d+, 2\) and weights \(\d+, 1\) for x .* with top_k 2 and hidden_size",
    ),
    "another shape": (lambda t, _: t["rank0.shapes"].copy_(t["rank0.shapes"].flip(0)), r"got ids .* for x|LayoutError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_trace_ends_in_an_error_with_the_fault(name: str, recorded: Path, tmp_path: Path) -> None:
    damage, told = WRONG[name]
    path = damaged(recorded, tmp_path, damage)
    with pytest.raises(TraceError, match=rf"Trace\.load: .* must have all parts of a trace, (?=.*({told})).*again"):
        write_report(path, tmp_path / "out")


def damages(tensors: Tensors, metadata: Metadata) -> Iterator[tuple[str, Damage]]:
    """Every key dropped or replaced, every tensor cut, repeated or of another dtype, and numbers in it replaced."""
    for name in metadata:
        yield f"without {name}", lambda _, m, name=name: m.pop(name)  # type: ignore[misc]
        yield from ((f"{name}: {value!r}", said(name, value)) for value in VALUES)
    for name in ("config", "needs", "versions"):
        fields = json.loads(metadata[name])
        for field in fields:
            rest = {key: value for key, value in fields.items() if key != field}
            yield f"{name} without {field}", said(name, rest)
            yield from ((f"{name}.{field}: {value!r}", said(name, {**fields, field: value})) for value in VALUES)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "empty": lambda t: t[:0],
        "short": lambda t: t[:-1],
        "long": lambda t: torch.cat([t, t[-1:]]),
        "flat": lambda t: t.flatten(),
        "float": lambda t: t.double(),
        "int8": lambda t: t.to(torch.int8),
        "wide": lambda t: torch.stack([t, t], -1).flatten(-2),
    }
    for name, tensor in tensors.items():
        yield f"without {name}", lambda t, _, name=name: t.pop(name)  # type: ignore[misc]
        for label, change in changes.items():
            yield f"{label} {name}", lambda t, _, name=name, change=change: t.update({name: change(t[name])})  # type: ignore[misc]
        for place in range(0, tensor.numel(), 1 if name.endswith("calls") else 9):
            for value in (-1, 0, 3, 2**31 - 1):
                yield (
                    f"{name}[{place}]={value}",
                    lambda t, _, at=(name, place), value=value: t.update(  # type: ignore[misc]
                        {at[0]: t[at[0]].flatten().index_fill(0, torch.tensor(at[1]), value).view_as(t[at[0]])}
                    ),
                )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_to_a_trace_ends_in_another_error(seed: int, recorded: Path, tmp_path: Path) -> None:
    every = list(damages(*parts_of(recorded)))
    refused = 0
    for label, damage in random.Random(seed).sample(every, 250):
        path = damaged(recorded, tmp_path, damage)
        try:
            counts, _ = counts_of(Trace.load_whole(path, "report"))
            assert (counts.tokens_CE >= 0).all(), label
            assert counts.imbalances["busiest expert"].isfinite().all(), label
        except TraceError:
            refused += 1
        except Exception as error:
            error.add_note(label)
            raise
    assert refused > 100


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_trace_is_refused(share: float, recorded: Path, tmp_path: Path) -> None:
    data = recorded.read_bytes()
    (tmp_path / "run.safetensors").write_bytes(data[: int(share * len(data))])
    with pytest.raises(TraceError, match=r"must be a complete safetensors file"):
        write_report(tmp_path / "run.safetensors", tmp_path / "out")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(inner, (*at, key))


def test_counts_of_a_log_must_grow(logged: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(logged, tmp_path / "run"))
    lines = lines_of(run / "rank1.jsonl")
    lines[2]["totals"]["tokens"] = [0] * len(lines[2]["totals"]["tokens"])
    (run / "rank1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        TraceError, match=r"must have counts that grow from step to step, got a smaller one after a lar"
    ):
        write_report(run, tmp_path / "out")
    (run / "rank1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], *lines[3:]]))
    with pytest.raises(TraceError, match=r"rank1\.jsonl, line 3 must be of step 1, got step 2\. Copy"):
        RunLog.load(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_damage_to_a_log_ends_in_another_error(
    seed: int, logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_dispatch_tools.pictures._image", lambda figure, alt: alt)  # drawing takes most of the time
    run, choose = Path(shutil.copytree(logged, tmp_path / "run")), random.Random(seed)
    refused = 0
    for _ in range(60):
        lines = lines_of(logged / "rank0.jsonl")
        line = choose.choice(lines)
        *path, last = choose.choice([at for at in leaves(line) if at])
        inner: Any = line
        for key in path:
            inner = inner[key]
        value = choose.choice([*VALUES, "drop"])
        if value == "drop":
            del inner[last]
        else:
            inner[last] = value
        (run / "rank0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        try:
            log = RunLog.load(run)
            assert log.steps, (path, last, value)
            run_content("run", log)
        except TraceError:
            refused += 1
        except Exception as error:
            error.add_note(f"{path} {last} {value!r}")
            raise
    assert refused > 20


@pytest.mark.parametrize("name", ["a$b$c", "$\\frac$", "x_$1^2", "<b>&", "ä €", "layers.0" * 30])
def test_any_printable_name_comes_back_and_is_drawn(name: str, tmp_path: Path) -> None:
    dispatcher = build_dispatcher(small_config(backend="local"), name=name)
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), RunLog.record(dispatcher, tmp_path / "run") as writer:
        dispatcher.dispatch(random_rows(5), random_routing(5))
        writer.step()
    assert Trace.load(tmp_path / "run.safetensors").layers == (name,)
    assert [*RunLog.load(tmp_path / "run").layer_tokens] == [name]
    for source in ("run.safetensors", "run"):
        assert write_report(tmp_path / source, tmp_path / "out").stat().st_size
