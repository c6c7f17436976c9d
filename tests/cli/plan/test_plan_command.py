"""``moe-dispatch plan`` on a command line: what it prints, and what it refuses in one line."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch import Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.errors import InputError
from moe_dispatch_tools.placements import count_copies
from moe_dispatch_tools.traces import Trace
from tests.cli.conftest import Command
from tests.cli.plan.planned import config, mixed_ids
from tests.cli.plan.test_models import QWEN3, written
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(written(tmp_path, {**QWEN3, "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256}))


def asked(command: Command, *arguments: str, status: int = 0) -> Any:
    answer = command("plan", *arguments, "--json")
    assert answer.status == status, answer.error
    return json.loads(answer.out)


def test_options_reach_the_plan(command: Command, model: str) -> None:
    shape = ["--ep", "4", "--nodes", "2", "--tokens", "504", "--layers", "3", "--dtype", "float32"]
    more = ["--set", "pad_multiple=fp8", "--set", "wire_dtype=bfloat16"]
    found = asked(command, model, *shape, *more, "-b", "alltoall", "--routing", "zipf:0.5")
    described = {name: found["model"][name] for name in ("layers", "dtype", "pad_multiple", "wire_dtype")}
    assert described == {"layers": 3, "dtype": "float32", "pad_multiple": 16, "wire_dtype": "bfloat16"}
    assert found["cluster"] == {"ep_size": 4, "nodes": 2, "ranks_per_node": 2}
    assert found["rows_per_rank"] == 504
    assert found["routing"].startswith("zipf with exponent 0.5")
    assert [backend["name"] for backend in found["backends"]] == ["alltoall"]
    seeds = [["--seed", "1"], ["--seed", "1"], []]
    drawn = ["--tokens", "16", "--routing", "zipf", "-b", "alltoall"]
    first, same, other = (asked(command, model, *drawn, *seed) for seed in seeds)
    assert first == same
    assert first["cluster"]["ep_size"] == 8
    assert first["received"] != other["received"]


def test_graph_safe_mode_is_set(command: Command, model: str) -> None:
    room = ["--set", "graph_safe=true", "--set", "max_tokens_per_rank=64", "--set", "capacity_factor=1.4"]
    room += ["--set", "on_overflow=drop"]
    found = asked(command, model, "-b", "alltoall,hybridep", *room)
    assert (found["model"]["graph_safe"], found["rows_per_rank"]) == (True, 64)
    assert 1.4 in [one["factor"] for one in found["capacities"]]
    assert "it drops rows by position" in found["backends"][1]["refused"]
    assert "size of wire" in command("plan", model, "-b", "alltoall", *room).out
    nothing = asked(command, model, "-b", "local", *room, status=1)
    assert nothing["backends"][0]["refused"]


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
    assert found["routing"] == "run.safetensors: 1 dispatch of 1 layer in 1 step"
    sent = found["backends"][0]["sent"]["dispatch"]
    assert (sent["low"], sent["high"], 4 * sent["expected"]) == (min(measured), max(measured), sum(measured))
    own = asked(command, str(path), "-b", "alltoall,allgather")  # with the config of the trace
    assert (own["routing"], own["received"], own["model"]["name"]) == (found["routing"], found["received"], path.name)
    assert (own["model"]["layers"], own["model"]["dtype"]) == (1, "bfloat16")
    answer = command("plan", model, "--routing", str(path), "--ep", "8")
    assert answer.status == 2
    assert answer.error.startswith("Error: Trace.check: ep_size must be 4, as in the trace, got 8.")


@pytest.mark.slow
def test_the_page_shows_what_is_printed(command: Command, tmp_path: Path) -> None:
    """To write it anew: paste what this test prints where it fails."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    written(tmp_path, re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    asked_for, shown = re.findall(r"```console\n\$ moe-dispatch (.*?)\n(.*?)```", page, re.DOTALL)[0]
    with contextlib.chdir(tmp_path):
        printed = "\n".join(line.rstrip() for line in command(*asked_for.split()).out.splitlines())
    assert printed == shown.rstrip("\n")


def test_traces_that_are_refused(command: Command, model: str, tmp_path: Path) -> None:
    dispatcher = build_dispatcher(config(backend="local", hidden_size=256))
    with Trace.record(dispatcher, tmp_path / "run.safetensors"), contextlib.suppress(InputError):
        dispatcher.dispatch(torch.zeros(1, 256), Routing(torch.tensor([[0, 1, 2, 16]]), torch.ones(1, 4)))
    answer = command("plan", model, "--routing", str(tmp_path / "run.safetensors"))
    assert (answer.status, answer.out) == (2, "")
    assert "Error: plan: topk_ids must lie in -1..15, got 0..16 on rank 0 in step 0" in answer.error
    with Trace.record(dispatcher, tmp_path / "empty.safetensors"):
        pass
    answer = command("plan", model, "--ep", "1", "--routing", str(tmp_path / "empty.safetensors"))
    assert re.match(r"Error: plan: \S+ must hold a dispatch, got none\. Record at least one step\.", answer.error)


def test_copies_by_hand() -> None:
    """Experts 0 and 1 are at home on rank 0. Rank 1 has a copy of expert 0; a slot of rank 0 is empty."""
    assert count_copies(ExpertPlacement(4, ((0, 1, -1), (2, 3, 0)))) == 1
    assert count_copies(ExpertPlacement(4, ((2, 3), (1, 0)))) == 4


def test_the_placement_of_the_config_is_planned(command: Command, tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256, "moe_intermediate_size": 64}
    model = str(written(tmp_path, {**QWEN3, **sizes}))
    arguments = ["plan", model, "--ep", "4", "--tokens", "512", "--routing", "zipf", "-b", "alltoall"]
    slots = [*arguments, "--set", "spare_experts_per_rank=2"]
    balanced, exact = [*slots, "--set", "balance=least_loaded"], [*arguments, "--set", "balance=exact"]
    shown = command(*balanced).out
    assert "expert parallelism over 4 ranks, 1 node of 4; eager" in shown
    assert "a rank has 6 expert slots, 2 of them spare, filled by least_loaded in each dispatch" in shown
    assert re.search(r"^weights of \d experts, [\d.]+ kB, travel in a forward of a layer", shown, re.MULTILINE)
    without, found, other = (json.loads(command(*asked, "--json").out) for asked in (slots, balanced, exact))
    assert (without["copies"]["high"], found["expert_bytes"], found["capacities"]) == (0, 3 * 256 * 64 * 2, [])
    assert 0 < found["copies"]["expected"] <= found["copies"]["high"] <= 8
    assert found["busiest_rank"]["expected"] < 0.8 * without["busiest_rank"]["expected"]
    assert found["busiest_expert"] == without["busiest_expert"]
    assert found["backends"][0]["sent"]["balance"]["expected"] == 8 * 17 * 3
    assert other["model"]["spare_experts_per_rank"] == 4
