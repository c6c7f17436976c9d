"""The page on the command shows what the command prints: held against it, but for the numbers."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_dispatch_testing import SCENARIOS, kit
from moe_dispatch_tools.names import parse_backend
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```sh\nmoe-dispatch ([^\n]*)\n```\n[^`]*?```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# So few that they take seconds, and all kinds of excuses are among them, more than once.
FEW = ("skewed", "wire_bfloat16", "wire_float8", "skewed_graph_safe", "balanced_graph_safe")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the example of a backend installed."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_backend")
    monkeypatch.chdir(ROOT)


def without_numbers(text: str) -> str:
    """One line, with # for each number: where lines break depends on them."""
    return re.sub(r"[\s─]+", " ", re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", text)).strip()


@pytest.fixture
def few_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SCENARIOS", tuple(one for one in SCENARIOS if one.name in FEW))


@pytest.mark.usefixtures("few_scenarios")
@pytest.mark.parametrize(
    ("arguments", "output"),
    [pytest.param(*shown, marks=[pytest.mark.slow] if shown[0] != "doctor" else [], id=shown[0]) for shown in SHOWN],
)
def test_output_on_the_page(arguments: str, output: str, command: Command) -> None:
    if torch.cuda.is_available() or find_spec("deep_ep") is not None:
        pytest.skip("the page was made without")
    answer = command(*shlex.split(arguments), env={"COLUMNS": "80"})
    assert answer.status == 0, answer.error
    pattern = ".*".join(re.escape(without_numbers(part)) for part in output.split("[...]"))
    assert re.fullmatch(pattern, without_numbers(answer.out)), without_numbers(answer.out)


def test_numbers_of_check() -> None:
    """``check`` runs few scenarios above, so its numbers are counted here."""
    assert [arguments.split()[0] for arguments, _ in SHOWN] == ["doctor", "check", "prove", "compare"]
    arguments, output = next(shown for shown in SHOWN if shown[0].startswith("check"))
    ring = parse_backend(arguments.split()[1]).load().name
    scenarios: dict[str, set[str]] = defaultdict(set)
    for excuse in kit.excuses(ring):
        scenarios[excuse.reason].add(excuse.scenario)
    counted = [*map(len, scenarios.values()), len(list(kit.conformance_cases(ring)))]
    assert [int(number) for number in re.findall(r"(\d+) (?:scenarios|cases)", output)] == counted
