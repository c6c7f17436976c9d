"""The page on the command shows what the command prints: held against it, but for the numbers."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_dispatch_testing import SCENARIOS, kit
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
ALL_SHOWN = re.findall(r"^```sh\nmoe-dispatch ([^\n]*)\n```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BENCHES = [shown for shown in ALL_SHOWN if shown[0].startswith("bench")]
SHOWN = [shown for shown in ALL_SHOWN if shown not in BENCHES]
# Facts of a machine, and contenders that these tests do without.
ELSEWHERE = re.compile(r"[a-z ]+: | torchtitan | transformers ")
# So few that they take seconds, and all kinds of excuses are among them, more than once.
FEW = ("skewed", "wire_bfloat16", "wire_float8", "skewed_graph_safe", "balanced_graph_safe")


def without_numbers(text: str) -> str:
    """One line, with # for each number: where lines break depends on them."""
    return re.sub(r"[\s─]+", " ", re.sub(r"\d[\d.]*(e[+-]\d+)?", "#", text)).strip()


@pytest.mark.parametrize(("arguments", "output"), SHOWN, ids=[arguments.split()[0] for arguments, _ in SHOWN])
def test_output_on_the_page(arguments: str, output: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() or find_spec("deep_ep") is not None:
        pytest.skip("the page was made without")
    monkeypatch.setattr(kit, "SCENARIOS", tuple(one for one in SCENARIOS if one.name in FEW))
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_backend")
    monkeypatch.chdir(ROOT)
    answer = command(*shlex.split(arguments))
    assert answer.status == 0
    assert without_numbers(answer.out) == without_numbers(output)


@pytest.mark.usefixtures("peak_of_threads")
def test_output_of_bench_on_the_page(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a small layer and without the peers: every paragraph of the page that is not about them."""
    monkeypatch.chdir(tmp_path)
    for arguments, output in BENCHES:  # in their order: one saves the file that another compares with
        words = shlex.split(arguments.replace("64,1024", "8,16").replace(",transformers", "")) + shlex.split(
            "--ranks 2 --hidden 32 --experts 4"
        )
        contenders = [] if "-c" in words else ["-c", "alltoall,by-hand,floor"]
        answer = command(*words, "--top-k", "2", *contenders)
        assert answer.status == 0, answer
        printed, paragraphs = without_numbers(_undecided(answer.out)), paragraphs_of(_undecided(output))
        assert len(paragraphs) > 1
        assert [paragraph for paragraph in paragraphs if paragraph not in printed] == []


def _undecided(output: str) -> str:
    """Leave out the verdicts on two runs, which depend on chance, and the times of a peer in lines of several times."""
    alone = re.sub(r", transformers [\d.]+ ms$", " ms", output, flags=re.MULTILINE)
    return re.sub(r" (slower|faster|no difference seen) *$", " #", alone, flags=re.MULTILINE)


def paragraphs_of(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line != "..." and not ELSEWHERE.match(line)]
    flat = [without_numbers(paragraph) for paragraph in re.split(r"\n\s*\n", "\n".join(lines))]
    return [paragraph for paragraph in flat if paragraph and "torchtitan" not in paragraph]


def test_page_shows_every_command() -> None:
    assert [arguments.split()[0] for arguments, _ in ALL_SHOWN] == ["doctor", "check", "compare", *["bench"] * 3]
