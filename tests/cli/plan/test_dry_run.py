"""``plan`` of a set-up in Python: the numbers of one rank alone are those of a rank among others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import run_processes
from moe_dispatch_testing.prove import load_setup
from moe_dispatch_tools.plan.dry_run import dry_run, measure
from tests.cli.conftest import Command
from tests.cli.plan import planned

FILE = Path(planned.__file__)
CALLS, LAYERS = 2, 2  # micro-batches of a step


def among_others(rank: int) -> dict[str, Any]:
    return measure(load_setup(FILE))


def test_numbers_are_those_of_real_ranks_with_even_routing() -> None:
    real = run_processes(among_others, 4)
    for rank in (0, 3):
        assert dry_run(FILE, rank=rank) == real[rank]
    (channel,) = real[3]["channels"]
    assert channel["names"] == ["layers.0", "layers.1"]
    assert channel["dispatches"] == CALLS * LAYERS
    assert channel["rows_at_experts"] == planned.ROWS * planned.TOP_K * LAYERS
    padded = planned.EXPERTS // 2 * 8 * planned.HIDDEN * 4  # bytes of the rows of one dispatch
    assert 2 * padded * LAYERS < real[3]["saved"] < 9 * padded * LAYERS  # of one micro-batch, not of both


def test_the_command_shows_them(command: Command) -> None:
    shown = command("plan", str(FILE)).out
    assert "planned.py: one step of rank 0 of 4, mesh copies 2 x ep 2, on torch's fake process group" in shown
    assert "layers.0, layers.1" in shown
    assert "autograd keeps at most" in shown
    assert json.loads(command("plan", str(FILE), "--json").out) == dry_run(FILE)


def test_options_that_a_set_up_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan: a set-up in Python says what it runs, got --ep, --set\. Chan"):
        dry_run(FILE, {"ep": 4, "nodes": None, "set": ["top_k=3"]})


def test_every_option_of_the_command_is_refused(command: Command) -> None:
    answer = command("plan", str(FILE), "--tokens", "8", "--seed", "1", "--routing", "zipf", "-b", "alltoall")
    assert answer.status != 0
    assert "got --tokens, --seed, --routing, --backends." in " ".join(answer.error.split())


def test_libraries_are_refused(tmp_path: Path) -> None:
    text = FILE.read_text().replace('backend="alltoall"', 'backend={"name": "hybridep", "emulate": True}')
    other = tmp_path / "library.py"
    other.write_text(text)
    with pytest.raises(ConfigError, match=r"got a dry run on torch's fake process group\. Use backend=\"alltoall\""):
        dry_run(other)
