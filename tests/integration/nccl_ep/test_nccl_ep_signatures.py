"""The recorded signatures are those of the wheel, and the stand-in takes the calls that the wheel makes."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

from moe_dispatch.backends.nccl_ep.library import NAMES, lacking
from tests.integration.nccl_ep.double import SOURCE, VERSION, load, requires_wheel
from tests.integration.nccl_ep.stand_in import StandIn

pytestmark = requires_wheel
RECORDED = Path(__file__).parents[2] / "backends" / "nccl_ep_signatures.json"
"""Of ``ep.py``: parameters of the public functions with their defaults, and calls of the compiled part. To record them
anew, run this file."""


def recorded() -> dict[str, Any]:
    module = load()
    parameters = {
        name: {
            one.name: None if one.default is inspect.Parameter.empty else str(one.default)
            for one in inspect.signature(getattr(module, name)).parameters.values()
        }
        for name in NAMES
    }
    calls = {
        (node.func.attr, len(node.args), tuple(str(keyword.arg) for keyword in node.keywords))
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "tex"
        and node.func.attr.startswith("ep_")
    }
    return {
        "version": VERSION,
        "parameters": parameters,
        "calls": [[name, positional, [*keywords]] for name, positional, keywords in sorted(calls)],
    }


def test_the_wheel_has_the_recorded_signatures() -> None:
    assert json.loads(RECORDED.read_text()) == recorded()
    assert not lacking(load())


def test_the_stand_in_takes_every_call_of_the_wheel() -> None:
    for name, positional, keywords in recorded()["calls"]:
        inspect.signature(getattr(StandIn(), name)).bind(*range(positional), **dict.fromkeys(keywords))
    assert len({name for name, *_ in recorded()["calls"]}) == 11


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(recorded(), indent=1) + "\n")
