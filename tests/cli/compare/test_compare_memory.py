"""What ``compare`` counts of the memory of a step, held against what each contender must save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch_tools.compare import contenders
from tests.cli.conftest import Command
from tests.cli.test_command import start

TOKENS, TOP_K, HIDDEN, WIDTH = 48, 4, 64, 16
PLAIN, LEAN = "alltoall", "alltoall+deliver=packets"


def saved(
    command: Command, folder: Path, backends: str, *more: str, ranks: int = 2, tokens: int = TOKENS
) -> dict[str, dict[str, Any]]:
    """The outcomes of one step of SwiGLU experts in float32, by name."""
    file = folder / "config.json"
    file.write_text(json.dumps({"num_experts": 8, "top_k": TOP_K, "hidden_size": HIDDEN}))
    shape = ["--ranks", str(ranks), "--tokens", str(TOKENS), "--steps", "1", "--rounds", "1", "--dtype", "float32"]
    answer = command("compare", "-b", backends, str(file), *shape, "--mode", "eager", *more, "--json")
    assert answer.status == 0, answer
    return {one["backend"]: one for one in json.loads(answer.out)["cases"][0]["outcomes"]}


def test_saved_bytes_are_those_of_the_tensors_of_a_layer(command: Command, tmp_path: Path) -> None:
    """One rank, so every number is known. Padding and weights of slots are a few bytes for each row."""
    lean = "local+deliver=packets"
    outcomes = saved(command, tmp_path, f"local,{lean},floor", "--expert-width", str(WIDTH), ranks=1)
    rows, column = TOKENS * TOP_K, 4 * TOKENS * TOP_K
    few = 12 * rows + 8 * 8 * 4
    # Rows, the first product, silu(gate), the activation and the outputs.
    whole = column * (HIDDEN + 2 * WIDTH + WIDTH + WIDTH + HIDDEN)
    assert whole <= outcomes["local"]["saved_bytes"] <= whole + few
    assert whole - column * HIDDEN <= outcomes["floor"]["saved_bytes"] <= whole + few
    # x itself, and the first product.
    kept = 4 * TOKENS * HIDDEN + column * 2 * WIDTH
    assert kept <= outcomes[lean]["saved_bytes"] <= kept + few


def test_packets_save_a_third_on_two_ranks(command: Command, tmp_path: Path) -> None:
    outcomes = saved(command, tmp_path, f"{PLAIN},{LEAN}", "--expert-width", str(WIDTH))
    assert all(one["agrees"] for one in outcomes.values())
    assert outcomes[LEAN]["saved_bytes"] <= 0.40 * outcomes[PLAIN]["saved_bytes"]


def test_an_expert_that_keeps_its_rows_is_noticed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that read the rows of a dispatch and let autograd save them are not lean, whatever their config says."""

    def reading(part: Any, matrix: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = part.grouped_mm(part.rows, matrix)
        return product

    monkeypatch.setattr(contenders, "first_mm", reading)
    outcomes = saved(command, tmp_path, f"{PLAIN},{LEAN}", "--expert-width", str(WIDTH))
    assert outcomes[LEAN]["saved_bytes"] > 0.45 * outcomes[PLAIN]["saved_bytes"]


@pytest.mark.slow
def test_the_peak_has_the_memory_of_the_pool() -> None:
    """A contender that is still open must not lend its memory: the peak would be below what autograd saves."""
    sizes = ["--set", "num_experts=8", "--set", "top_k=4", "--set", "hidden_size=256", "--expert-width", str(WIDTH)]
    shape = ["--ranks", "2", "--tokens", "2048", "--steps", "1", "--rounds", "1", "--mode", "eager"]
    process = start("compare", "-b", f"{PLAIN},{LEAN},floor", *shape, *sizes, "--json")
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    for one in json.loads(out)["cases"][0]["outcomes"]:
        assert one["peak_bytes"] > 1.2 * one["saved_bytes"], one["backend"]


@pytest.mark.parametrize(("how", "most"), [("weights=experts", 0.85), ("balance=exact", 0.40)])
def test_experts_on_packets_run_with_other_fields(how: str, most: float, command: Command, tmp_path: Path) -> None:
    """Weights that experts apply stand between the products, so the activation is saved, before and after them."""
    outcomes = saved(command, tmp_path, f"{PLAIN},{LEAN}", "--expert-width", str(WIDTH), "--set", how)
    assert outcomes[LEAN]["saved_bytes"] < most * outcomes[PLAIN]["saved_bytes"]


def test_the_table_has_ratios_to_the_first_line(command: Command, tmp_path: Path) -> None:
    shape = ["--ranks", "1", "--tokens", "16", "--steps", "1", "--rounds", "1", "--mode", "eager"]
    sizes = ["--set", "num_experts=8", "--set", "top_k=4", "--set", "hidden_size=64", "--expert-width", "16"]
    answer = command("compare", "-b", "local,local+deliver=packets", *shape, *sizes)
    assert answer.status == 0, answer
    memory = answer.out[answer.out.index("ratio  ratio") :]
    lines = [line.split() for line in memory.splitlines() if "eager" in line]
    assert [line[0] for line in lines] == ["local", "local+deliver=packets"]
    assert lines[0][4:] == ["1.00", "1.00"]
    assert 0 < float(lines[1][4]) < 0.5
