"""``compare``: differences that it must see, costs that are known, and how it answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig
from moe_dispatch.backends import known_backends
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing.input_layouts import INPUT_LAYOUTS
from moe_dispatch_testing.rank_context import LayerCall
from moe_dispatch_testing.reference import reference
from moe_dispatch_tools.compare import measurement, peers, workload
from moe_dispatch_tools.compare.command import MODES, make_workloads
from moe_dispatch_tools.compare.contenders import Peer, RowFunction, run_layer
from moe_dispatch_tools.compare.display import draw
from moe_dispatch_tools.compare.floor import Floor
from moe_dispatch_tools.compare.measurement import Task, Variant
from moe_dispatch_tools.compare.workload import Workload, make_material
from moe_dispatch_tools.names import parse_backend
from moe_dispatch_tools.place import Place
from tests.cli.conftest import Command
from tests.cli.test_command import start
from tests.ranks import run_ranks

FIELDS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "pad_multiple": 16}
PHASES = ["dispatch", "experts", "combine", "backward"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path)


def written(folder: Path, **fields: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**FIELDS, **fields}))
    return str(path)


def asked(command: Command, *arguments: object, status: int = 0) -> dict[str, Any]:
    """What ``--json`` says."""
    answer = command("compare", *map(str, arguments), "--json")
    assert answer.status == status, answer
    report: dict[str, Any] = json.loads(answer.out)
    return report


def compared(command: Command, *arguments: str, status: int = 0) -> dict[str, Any]:
    """What is said of few tokens on two ranks."""
    return asked(command, *arguments, "--ranks", "2", "--tokens", "16", "--steps", "2", "--rounds", "2", status=status)


def outcome(report: dict[str, Any], backend: str, mode: str = "eager") -> dict[str, Any]:
    """Return the result of a backend in the only case."""
    (case,) = report["cases"]
    (found,) = [one for one in case["outcomes"] if (one["backend"], one["mode"]) == (backend, mode)]
    return dict(found)


def test_backends_agree_in_both_modes_and_cost_what_they_cost(command: Command, config: str) -> None:
    report = compared(command, "-b", "alltoall,allgather", config, "--dtype", "float32")
    (case,) = report["cases"]
    assert (case["agree"], case["tokens"], case["transport"]) == (True, [16, 14], "gloo")
    assert [(one["backend"], one["mode"]) for one in case["outcomes"]] == [
        (backend, mode) for backend in ("alltoall", "allgather") for mode in MODES
    ]
    for one in case["outcomes"]:
        assert one["agrees"]
        assert list(one["from_reference"]) == ["y", "x", "weights", "experts"]
        assert 0 < max(one["from_reference"].values()) < case["tolerance"] == 2e-6
        assert list(one["bytes_sent"]) == PHASES
        assert list(one["milliseconds"]) == [*PHASES, "total", "processor"]
        assert (len(one["rounds"]), one["milliseconds"]["total"] > 0) == (2, True)
    alltoall, allgather = outcome(report, "alltoall"), outcome(report, "allgather")
    assert set(alltoall["from_first"].values()) == {0.0}
    assert alltoall["ratio"] == [1.0] * 3
    assert 0 < allgather["ratio"][1] <= allgather["ratio"][2]
    assert alltoall["rows_padded"]["rank"] == 0
    assert allgather["rows_padded"]["rank"] == 2, "14 tokens are made 16"
    assert alltoall["rows_padded"]["expert"] == allgather["rows_padded"]["expert"] > 0
    assert 0 < sum(alltoall["bytes_sent"].values()) < sum(allgather["bytes_sent"].values())
    rows = 2 * 16 * 64 * 4  # of both ranks; gathered and reduce-scattered, forward and backward
    assert allgather["bytes_sent"]["combine"] == rows
    assert 4 * rows < sum(allgather["bytes_sent"].values()) < 4.5 * rows


def test_wrong_backend_and_one_that_cannot_run_are_told(command: Command, config: str) -> None:
    """What cannot run counts as a failure only if it was named."""
    (everything,) = compared(command, config, "--mode", "eager")["cases"]
    assert everything["agree"]
    assert [one["backend"] for one in everything["outcomes"]] == known_backends()
    halved = "tests.cli.planted:Halved"
    report = compared(command, "-b", f"alltoall,{halved}", config, "--mode", "eager", status=1)
    assert outcome(report, "alltoall")["agrees"]
    wrong = outcome(report, halved)
    assert not wrong["agrees"]
    assert wrong["from_reference"]["y"] == pytest.approx(0.5, rel=0.05)
    assert wrong["from_first"]["y"] == pytest.approx(0.5, rel=0.05)
    report = compared(command, "-b", "alltoall,local", config, "--mode", "eager", status=1)
    assert outcome(report, "alltoall")["agrees"]
    assert outcome(report, "local")["refused"].startswith("Backend 'local': ep_size must be one of 1, got 2.")


def test_other_ranks_of_torchrun_leave_the_answer_to_the_first(command: Command, config: str) -> None:
    shape = ["--tokens", "4", "--steps", "1", "--rounds", "1", "--mode", "eager"]
    rank_1 = {"RANK": "1", "WORLD_SIZE": "2"}
    answer = command("compare", "-b", "tests.cli.planted:Halved", config, *shape, env=rank_1)
    assert (answer.status, answer.out, answer.error) == (0, "", "")


def test_config_is_honoured_and_a_mode_that_its_backend_lacks_is_no_failure(command: Command, tmp_path: Path) -> None:
    exact = {"name": "alltoall", "reduction": "exact"}
    file = written(tmp_path, backend=exact, row_counts="check", weights="experts")
    report = compared(command, file, "--dtype", "float32")
    assert report["cases"][0]["tokens"] == [16, 16], "equal counts are promised"
    assert (report["config"]["weights"], report["config"]["row_counts"]) == ("experts", "check")
    assert report["cases"][0]["agree"]
    name = report["cases"][0]["outcomes"][0]["backend"]
    assert "graph_safe is not possible" in outcome(report, name, "graph-safe")["refused"], "with the option of the file"
    compared(command, file, "--mode", "graph-safe", status=1)


def test_graph_safe_has_room_for_the_worst_routing(command: Command, tmp_path: Path) -> None:
    room = {"graph_safe": {"capacity_factor": 0.5, "on_overflow": "drop"}, "max_tokens_per_rank": 4}
    report = compared(command, "-b", "alltoall", written(tmp_path, **room), "--routing", "skewed")
    assert report["cases"][0]["agree"], "nothing is dropped"


def test_dtype_that_a_backend_does_not_carry_is_told(command: Command, config: str) -> None:
    arguments = "-b", "hybridep+emulate=true", config, "--mode", "eager"
    refused = outcome(compared(command, *arguments, "--dtype", "float32", status=1), arguments[1])["refused"]
    assert 'Set wire="bfloat16"' in refused
    emulated = outcome(compared(command, *arguments), arguments[1])
    assert emulated["agrees"]
    assert (emulated["emulated"], emulated["bytes_sent"], emulated["host_syncs"]) == (True, None, None)
    assert (emulated["rounds"], emulated["peak_bytes"]) == ([], None)


def test_emulation_is_refused_where_ranks_have_gpus() -> None:
    """Before its group, which is NCCL's there, is used."""
    backend = parse_backend("hybridep+emulate=true")
    variant = Variant(label=backend.label, backend=backend, mode="eager")
    task = Task(config=DispatcherConfig(**FIELDS), variants=(variant,), workloads=(Workload(),))
    material = make_material(Workload(), task.config, rank=0, ranks=2)
    with pytest.raises(ConfigError, match=r"an emulation needs CPU tensors, .* on ranks with GPUs"):
        measurement._open(variant, task, Place(device=torch.device("cuda"), group=cast(Any, None)), material, ())


@pytest.mark.parametrize("wire", [None, "mxfp8"])
def test_reference_in_parts_is_the_reference(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = wire and {"dtype": wire, "gradients": True}
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=64, wire=options)
    scenario = Workload(tokens=9, dtype="float64").scenario(config, 2)
    batch, experts = scenario.batches(2)[0], scenario.experts()
    monkeypatch.setattr(workload, "_REFERENCE_NUMBERS", 3 * experts.bias_ED.numel())
    whole, layout = reference(batch, experts, wire, wire), INPUT_LAYOUTS["rows"](len(batch.x_TD))
    parts = workload.Step(scenario, experts, layout, lambda: batch).expected()
    for name, expected in {"y": whole.y_TD, "x": whole.grad_x_TD, "weights": whole.grad_weights_TK}.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-12, atol=1e-13)
    gradients = torch.cat([whole.grad_matrix_EWW.flatten(), whole.grad_bias_ED.flatten()])
    torch.testing.assert_close(parts["experts"], gradients, rtol=1e-12, atol=1e-13)


def test_difference_is_relative_and_no_number_is_infinitely_far() -> None:
    expected = torch.tensor([2.0, -4.0])
    assert measurement.relative_difference(torch.tensor([2.0, -3.0]), expected) == 0.25
    assert measurement.relative_difference(torch.tensor([2.0, float("nan")]), expected) == float("inf")
    assert measurement.relative_difference(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    assert measurement.relative_difference(torch.empty(0), torch.empty(0)) == 0.0


def few(*, ranks: int = 2, tokens: str = "8", mode: str = "eager") -> list[str]:
    shape = ["--ranks", str(ranks), "--tokens", tokens, "--mode", mode]
    return [*shape, "--steps", "1", "--rounds", "2", "--dtype", "float32"]


@pytest.fixture
def unpadded(tmp_path: Path) -> str:
    return written(tmp_path, pad_multiple=1)


def test_floor_computes_the_layer_and_sends_as_few_bytes(command: Command, unpadded: str) -> None:
    report = compared(command, "-b", "alltoall,floor", unpadded, "--dtype", "float32,bfloat16", "--routing", "skewed")
    assert [(case["dtype"], case["tokens"]) for case in report["cases"]] == [
        ("float32", [16, 16]),
        ("bfloat16", [16, 16]),
    ]
    for case in report["cases"]:
        ours, _, floor = case["outcomes"]
        assert floor["agrees"]
        assert floor["bytes_sent"] == ours["bytes_sent"]
        assert (floor["mode"], floor["overhead_ms"], floor["rows_padded"]) == ("eager", 0, None)
        assert ours["overhead_ms"] is not None


class Halving(Peer):
    """Planted: a peer that loses half."""

    def __init__(self, config: DispatcherConfig, group: Any) -> None:
        super().__init__(config, group)
        self.floor = Floor(config, group)

    def prepare(self, call: LayerCall) -> None:
        self.floor.prepare(call)

    def layer(self, call: LayerCall, experts: RowFunction) -> Tensor:
        return self.floor.layer(call, experts) / 2


def test_wrong_peer_is_seen(command: Command, unpadded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: SimpleNamespace(origin="here"))
    monkeypatch.setitem(peers.PEERS, "torchtitan", Halving)
    monkeypatch.delitem(peers.PEERS, "transformers")
    report = compared(command, "-b", "alltoall", "--peers", unpadded, "--mode", "eager", status=1)
    assert [one["backend"] for one in report["cases"][0]["outcomes"]] == ["alltoall", "floor", "torchtitan"]
    assert outcome(report, "torchtitan")["from_reference"]["y"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.usefixtures("no_peers")
def test_missing_peers_are_named(command: Command, unpadded: str) -> None:
    answer = command("compare", "--peers", unpadded, "-b", "alltoall", *few())
    assert answer.status == 0
    assert "torchtitan is left out, not installed: torchtitan, spmd_types, tyro, triton. In " in answer.out
    assert re.search(r"transformers is left out, not installed: transformers\. In .*'\.\[bench\]'\.", answer.out)


@pytest.mark.parametrize("wrong", [("--routing", "duplicates"), ("--dtype", "float64")])
def test_peers_refuse_what_only_ours_can(wrong: tuple[str, ...], command: Command, unpadded: str) -> None:
    report = compared(command, "-b", "alltoall,floor", unpadded, "--mode", "eager", *wrong, status=1)
    assert outcome(report, "alltoall")["agrees"]
    assert "floor needs float32 or bfloat16, tokens that each name top_k" in outcome(report, "floor")["refused"]


def test_floor_makes_its_memory_before_the_clock_starts() -> None:
    def body(group: Any) -> bool:
        config = DispatcherConfig(num_experts=4, top_k=2, hidden_size=32)
        step = make_material(Workload(equal=True), config, rank=group.rank(), ranks=2).steps[0]
        call, floor = step.call(torch.device("cpu")), Floor(config, group)
        floor.prepare(call)
        run_layer(floor, call, lambda: None)
        first, second = (floor.timed(call, lambda: None) for _ in range(2))
        return first.data_ptr() == second.data_ptr()

    assert run_ranks(body, 2) == [True, True]


def test_without_a_config_there_are_sizes(command: Command) -> None:
    report = asked(command, *few(), "--set", "num_experts=4", "--set", "top_k=2", "--set", "hidden_size=32")
    assert (report["config"]["num_experts"], report["config"]["hidden_size"]) == (4, 32)
    assert [one["backend"] for one in report["cases"][0]["outcomes"]] == ["alltoall"]


def test_small_capacity_drops_rows_and_is_no_failure(command: Command, unpadded: str) -> None:
    tight = "alltoall+graph_safe.capacity_factor=0.5"
    answer = command("compare", "-b", f"alltoall,{tight}", unpadded, *few(tokens="32"), "--routing", "skewed")
    assert answer.status == 0, answer
    assert re.search(rf" {re.escape(tight)} +graph-safe .* dropped rows", answer.out)


def test_every_combination_is_a_case() -> None:
    workloads, ranks = make_workloads(tokens="8,16,8", dtype="float32,bfloat16", routing="uniform,skewed")
    assert len({(one.tokens, one.dtype, one.routing) for one in workloads}) == len(workloads) == 8
    assert ranks == 4


def test_cases_are_printed_as_they_end(command: Command, unpadded: str) -> None:
    """A rank fails in the second case; the first case is there all the same."""
    answer = command("compare", "-b", "tests.cli.planted:Raising", unpadded, *few(ranks=1, tokens="8,16"))
    assert (answer.status, answer.error) == (2, "Error: a rank of 1: planted in dispatch\n")
    assert "ok     all agree with the reference" in answer.out


def times(scale: float) -> dict[str, Any]:
    """Return the results of two ranks in two rounds, of 1, 2 and 3 times the scale; one of them is the slowest."""
    ranks = [[[scale, 0.0, 2 * scale, 3 * scale, of], [scale, 0.0, 2 * scale, 3 * scale, of]] for of in (5.0, 7.0)]
    ranks[0][0][3] = 0.0
    found = measurement._empty(Variant(label=f"{scale:g}", mode="eager")) | {"received": [2, 4]}
    outcomes = [found | {"rounds": rounds, "peak_bytes": 3 + rank} for rank, rounds in enumerate(ranks)]
    outcomes[1] |= {"received": [6, 4], "from_reference": {**found["from_reference"], "x": 0.25}}
    return measurement._joined(outcomes, 0.1)


def test_ranks_are_joined_by_the_slowest_and_the_furthest() -> None:
    joined = times(2.0)
    assert joined["milliseconds"] == {
        **{"dispatch": 2.0, "experts": 0.0, "combine": 4.0, "backward": 6.0},
        **{"total": 12.0, "processor": 7.0},
    }
    assert (joined["agrees"], joined["from_reference"]["x"], joined["peak_bytes"]) == (False, 0.25, 4)
    assert (joined["peak_rows"], joined["imbalance"]) == (6, 1.25)


def test_picture_has_the_totals_of_the_table(tmp_path: Path) -> None:
    """They are medians too, so the medians of the phases do not add up to them: 10 and 14, but 12 and 11."""
    medians = {"a": (4.0, 2.0, 1.0, 5.0, 10.0), "b": (3.0, 2.0, 1.0, 5.0, 14.0)}
    outcomes = [
        {
            "backend": name,
            "mode": "eager",
            "rounds": [[1.0]],
            "milliseconds": dict(zip((*PHASES, "total"), of, strict=True)),
        }
        for name, of in medians.items()
    ]
    draw([{"case": "a case", "outcomes": outcomes}], tmp_path / "compare.svg")
    labels = re.findall(r">(\d\d\.\d)<", (tmp_path / "compare.svg").read_text())
    assert labels == ["10.0", "14.0"]


@pytest.mark.slow
def test_command_starts_ranks_counts_their_syncs_measures_memory_and_draws(unpadded: str, tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    process = start(
        "compare", "-b", "alltoall,floor", unpadded, *few(mode="eager,graph-safe"), "--picture", str(picture), "--json"
    )
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    report = json.loads(out)
    assert outcome(report, "alltoall")["host_syncs"] >= 1
    assert outcome(report, "alltoall", "graph-safe")["host_syncs"] == 0
    for one in report["cases"][0]["outcomes"]:
        assert one["peak_bytes"] >= 2 * 8 * 64 * 4, "what it gives and what it got"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
