"""What ``bench`` is asked for: its cases, and requests that it refuses."""

from __future__ import annotations

import re

import pytest

from moe_dispatch_tools.bench import peers, request
from tests.cli.conftest import Command


def test_layer_looks_at_other_shapes_where_none_is_given(no_peers: None) -> None:
    def shapes(**given: str) -> list[tuple[int, int, int]]:
        asked = request.make_request("layer", given, "alltoall", ranks=4, iterations=1, quick=False)
        ((_, task),) = asked.tasks
        return [(case.shape.tokens, case.shape.experts, case.shape.top_k) for case in task.cases]

    core = [(4096, 64, 8)] * 4
    assert shapes() == [*core, (64, 64, 8), (16384, 64, 8), (4096, 64, 2), (4096, 8, 8), (4096, 256, 8)]
    assert shapes(dtype="bfloat16") == core[:2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["leyer"], "SUITE must be one of layer, overhead, growth, graph-safe, got 'leyer'"),
        (["--tokens", "64,0"], "--tokens must be whole numbers above 0, separated by commas, got '64,0'"),
        (["--dtype", "float32,int8"], "--dtype must be one of bfloat16, float32, got 'int8'"),
        (["--routing", "zipf"], "--routing must be one of balanced, skewed, got 'zipf'"),
        (
            ["--experts", "10"],
            "bench: at least one .* must be possible, got 10 experts cannot be divided among 4 ranks",
        ),
        (["--experts", "4", "--top-k", "8"], "bench: .* must be possible, got top-8 of 4 experts"),
        (
            ["-c", "depep"],
            "--contenders: Unknown backend 'depep'.*Besides backends there are by-hand, floor, torchtitan",
        ),
        (["-c", "alltoall+speed=9"], "--contenders: backend 'alltoall.speed=9': speed: Extra inputs are not permitted"),
        (["-c", "hybridep+emulate=true"], "--contenders must not be emulated, got 'hybridep.emulate=true'"),
        (
            ["graph-safe", "-c", "alltoall,torchtitan"],
            "--contenders of graph-safe must be backends of .*got torchtitan",
        ),
        (["growth", "--tokens", "8,16"], "growth must start from one value of each axis, got --tokens 8,16"),
        (["--picture", "bench.jpg"], "--picture must end in .png or .svg, got 'bench.jpg'"),
        (["--save", "nowhere/bench.json"], "--save must be a file in a folder that can be written, got 'nowhere/"),
        (
            ["--against", "nowhere.json"],
            "--against must be a file that bench --save wrote, got 'nowhere.json' .No such",
        ),
    ],
)
def test_wrong_requests_are_refused(
    arguments: list[str], told: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: "here")
    answer = command("bench", *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert re.match(f"Error: {told}", answer.error), answer.error


def test_combinations_that_cannot_be_are_left_out(no_peers: None) -> None:
    axes = {"tokens": "64,128", "experts": "4,6", "top-k": "2,5", "dtype": "float32", "routing": "balanced"}
    asked = request.make_request("layer", axes, None, ranks=2, iterations=5, quick=False)
    ((ranks, task),) = asked.tasks
    shapes = [(case.shape.tokens, case.shape.experts, case.shape.top_k) for case in task.cases]
    assert shapes == [(T, E, K) for T in (64, 128) for E, K in ((4, 2), (6, 2), (6, 5))]
    assert ranks == 2
    assert [why.rpartition(": ")[2] for why in asked.left_out[2:]] == ["top-5 of 4 experts"] * 2
    quick = request.make_request("layer", {"tokens": "64,4096,512"}, None, ranks=2, iterations=5, quick=True)
    assert [case.shape.tokens for case in quick.tasks[0][1].cases[::4]] == [64, 256]
    assert quick.iterations == 2


def test_torchrun_leaves_other_numbers_of_ranks_out(monkeypatch: pytest.MonkeyPatch, no_peers: None) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = request.make_request("overhead", {}, None, ranks=4, iterations=5, quick=False)
    assert [(ranks, [case.ranks for case in task.cases]) for ranks, task in asked.tasks] == [(2, [2])]
    assert asked.left_out[-1].endswith("top-8, 1 rank is left out: torchrun started 2 ranks")
