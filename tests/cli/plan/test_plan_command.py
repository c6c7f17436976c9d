"""``moe-dispatch plan`` on a command line: what it prints, and what it refuses in one line."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch_testing import run_ranks
from moe_dispatch_tools.traces import Trace
from tests.cli.conftest import Command
from tests.cli.plan.planned import config, mixed_ids
from tests.cli.plan.test_models import QWEN3, written

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(written(tmp_path, {**QWEN3, "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256}))


def asked(command: Command, *arguments: str, status: int = 0) -> Any:
    answer = command("plan", *arguments, "--json")
    assert answer.status == status, answer.error
    return json.loads(answer.out)


def test_the_real_command(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_dispatch_tools", "plan", model, "--ep", "16", "--tokens", "64"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "qwen3_moe: 16 experts, top 4, hidden size 256, 48 layers with experts, bfloat16" in done.stdout
    assert "expert parallelism over 16 ranks, 2 nodes of 8; eager mode" in done.stdout
    assert re.search(r"^ alltoall +bfloat16 +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^- +local: Backend 'local': ep_size must be one of 1, got 16\.", done.stdout, re.MULTILINE)
    assert "deepep v1.2.1: planned by the rules of v1.2.1; not usable here" in done.stdout
    assert "* Rows only" in done.stdout


def test_options_reach_the_plan(command: Command, model: str) -> None:
    shape = [
        "--ep",
        "4",
        "--nodes",
        "2",
        "--batch",
        "2",
        "--seq",
        "1001",
        "--tp",
        "2",
        "--cp",
        "2",
        "--sequence-parallel",
    ]
    more = ["--layers", "3", "--dtype", "float32", "--set", "pad_multiple=fp8", "--set", "wire_dtype=bfloat16"]
    found = asked(command, model, *shape, *more, "-b", "alltoall", "--routing", "zipf:0.5", "--capacity-factor", "1.7")
    described = {name: found["model"][name] for name in ("layers", "dtype", "pad_multiple", "wire_dtype")}
    assert described == {"layers": 3, "dtype": "float32", "pad_multiple": 16, "wire_dtype": "bfloat16"}
    assert found["cluster"] == {"ep_size": 4, "nodes": 2, "ranks_per_node": 2, "flop_per_byte": None}
    assert (found["sequences"]["multiple"], found["sequences"]["rows_per_rank"]) == (16, 504)
    assert found["routing"].startswith("zipf with exponent 0.5")
    assert [backend["name"] for backend in found["backends"]] == ["alltoall"]
    assert [one["factor"] for one in found["capacities"]] == [1.7, "worst"]
    other = asked(command, model, "--tokens", "64", "--routing", "zipf", "--seed", "1", "-b", "alltoall")
    same = asked(command, model, "--tokens", "64", "--routing", "zipf", "--seed", "1", "-b", "alltoall")
    assert other == same
    assert other["cluster"]["ep_size"] == 8
    assert (
        other["received"] != asked(command, model, "--tokens", "64", "--routing", "zipf", "-b", "alltoall")["received"]
    )


def test_graph_safe_takes_its_fields_along(command: Command, model: str) -> None:
    room = ["--graph-safe", "--set", "capacity_factor=1.4", "--set", "on_overflow=drop"]
    found = asked(command, model, "--tokens", "64", "-b", "alltoall,hybridep", *room)
    assert found["model"]["graph_safe"]
    assert 1.4 in [one["factor"] for one in found["capacities"]]
    assert "it drops rows by position" in found["backends"][1]["refused"]
    answer = command("plan", model, "--tokens", "64", "-b", "alltoall", *room)
    assert "MB: the buffers that graph-safe mode allocates." in " ".join(answer.out.split())


def test_status_1_where_nothing_can_be_used(command: Command, model: str) -> None:
    assert asked(command, model, "--tokens", "64", "-b", "local", status=1)["backends"][0]["refused"]


def test_options_of_the_config_belong_to_its_backend(command: Command, tmp_path: Path) -> None:
    text = '{"backend": {"name": "alltoall", "reduction": "exact"}, "num_experts": 16, "top_k": 4, "hidden_size": 64}'
    own = written(tmp_path, text, "own.yaml")
    found = asked(command, str(own), "--tokens", "64", "--ep", "2")
    plans = {backend["name"]: backend for backend in found["backends"]}
    fast = asked(command, str(own), "--tokens", "64", "--ep", "2", "-b", "alltoall")["backends"][0]
    assert plans["alltoall"]["sent"]["combine"]["expected"] > 1.5 * fast["sent"]["combine"]["expected"]


def test_a_trace_is_planned_as_it_ran(command: Command, model: str, tmp_path: Path) -> None:
    ids, path = mixed_ids(4), tmp_path / "run.safetensors"
    given = config(backend="alltoall", hidden_size=256)

    def body(group: dist.ProcessGroup) -> int:
        dispatcher = build_dispatcher(given, group)
        mine = ids[group.rank()]
        with Trace.record(dispatcher, path):
            x = torch.randn(len(mine), 256, dtype=torch.bfloat16).requires_grad_()
            sent = dispatcher.dispatch(x, Routing(mine, torch.rand(mine.shape)), Rows(num_real=len(mine) - 3))
            dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics().bytes_sent["dispatch"]

    measured = run_ranks(body, 4)
    found = asked(command, model, "--routing", str(path), "-b", "alltoall,allgather")
    assert found["cluster"]["ep_size"] == 4
    assert found["routing"] == "run.safetensors: 1 dispatches of 1 layers in 1 steps"
    sent = found["backends"][0]["sent"]["dispatch"]
    assert (sent["low"], sent["high"], 4 * sent["expected"]) == (min(measured), max(measured), sum(measured))
    answer = command("plan", model, "--routing", str(path), "--ep", "8")
    assert answer.status == 2
    assert answer.error.startswith("Error: Trace.check: ep_size must be 4, as in the trace, got 8.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Error: plan: the rows of a rank must be 1 or more, got none. Give --tokens"),
        (["--tokens", "4", "--set", "pad=3"], "Error: --set must be FIELD=VALUE, got 'pad=3'. Fields: backend, "),
        (["--tokens", "4", "--set", "top_k"], "Error: --set must be FIELD=VALUE, got 'top_k'."),
        (
            ["--tokens", "4", "--routing", "none.safetensors"],
            "Error: Trace.load: none.safetensors must be an existing file",
        ),
        (["--tokens", "4", "--ep", "3"], "Error: num_experts (16) must be divisible by ep_size (3)."),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, command: Command, model: str) -> None:
    answer = command("plan", model, *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.error.startswith(message)


def test_the_page_shows_what_is_printed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it anew: paste what this test prints where it fails."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    written(tmp_path, re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    asked_for, shown = re.findall(r"```console\n\$ moe-dispatch (.*?)\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    printed = "\n".join(line.rstrip() for line in command(*asked_for.split()).out.splitlines())
    assert printed == shown.rstrip("\n")


@pytest.mark.parametrize("rows", [(5, 0), (0, 0)], ids=["one rank", "all ranks"])
def test_a_trace_may_hold_dispatches_without_a_token(
    rows: tuple[int, int], command: Command, model: str, tmp_path: Path
) -> None:
    given, path = config(backend="alltoall", hidden_size=256), tmp_path / "run.safetensors"

    def body(group: dist.ProcessGroup) -> None:
        dispatcher = build_dispatcher(given, group)
        with Trace.record(dispatcher, path):
            for count in (4, rows[group.rank()]):
                ids = torch.arange(4).expand(count, -1)  # all of them on the first rank
                dispatcher.dispatch(torch.zeros(count, 256), Routing(ids, torch.ones(ids.shape)))

    run_ranks(body, 2)
    found = asked(command, model, "--routing", str(path), "-b", "alltoall")
    assert found["received"]["expected"] == 4 * (4 + 4 + sum(rows)) / 4
    assert (found["received"]["low"], found["received"]["high"]) == (0, 32)


def test_a_trace_of_a_wrong_router_is_refused(command: Command, model: str, tmp_path: Path) -> None:
    dispatcher = build_dispatcher(config(backend="local", hidden_size=256))
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), contextlib.suppress(InputError):
        dispatcher.dispatch(torch.zeros(1, 256), Routing(torch.tensor([[0, 1, 2, 16]]), torch.ones(1, 4)))
    answer = command("plan", model, "--routing", str(tmp_path / "run.safetensors"))
    assert (answer.status, answer.out) == (2, "")
    assert "Error: plan: topk_ids must lie in -1..15, got 0..16 on rank 0 in step 0" in answer.error
