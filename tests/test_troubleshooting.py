"""docs/troubleshooting.md is true: it has a section for each code of an error, and the errors it quotes are raised."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import BSHD, THD, DispatcherConfig, Masked, MoEDispatchError, Routing, Rows, build_dispatcher
from moe_dispatch.backends import registry
from moe_dispatch.backends.deep_ep import library
from moe_dispatch_testing import run_ranks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("moe_dispatch*/**/*.py"))

Call = Callable[[], object]


def quoted(title: str) -> list[str]:
    """The lines of a section's text block."""
    blocks: list[str] = re.findall(r"^```text\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    return blocks[0].splitlines()


def _config(**fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"backend": "alltoall", "num_experts": 8, "top_k": 2, "hidden_size": 16, **fields})


def _dispatch(tokens: int = 5, routed: int = 5, layout: Any = None, group: Any = None, **fields: Any) -> object:
    dispatcher = build_dispatcher(_config(**fields), group)
    routing = Routing(torch.arange(2 * routed).view(-1, 2) % 8, torch.ones(routed, 2))
    return dispatcher.dispatch(torch.ones(tokens, 16), routing, layout)


def _dispatch_with_an_old_plan() -> None:
    dispatcher = build_dispatcher(_config())
    routing = Routing(torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
    dispatcher.dispatch(torch.ones(5, 16), routing, dispatcher.plan(like=torch.ones(6, 16)))


def _overflow() -> None:
    config = _config(
        backend="local", graph_safe={"capacity_factor": 0.5, "on_overflow": "raise"}, max_tokens_per_rank=4
    )
    dispatcher = build_dispatcher(config)
    dispatcher.dispatch(torch.ones(4, 16), Routing(torch.arange(8).view(4, 2), torch.ones(4, 2)))
    dispatcher.check()


def _hear_of_a_refusal() -> None:
    def body(group: Any) -> None:
        try:
            _dispatch(tokens=5 + group.rank(), group=group)
        except MoEDispatchError:
            if group.rank() == 0:
                raise

    run_ranks(body, 2)


def _differentiate_twice() -> None:
    x = torch.ones(1, 16, requires_grad=True)
    sent = build_dispatcher(_config()).dispatch(x, Routing(torch.tensor([[0, 1]]), torch.ones(1, 2)))
    torch.autograd.grad(sent.rows.sum(), x, create_graph=True)


def _use_a_closed_dispatcher() -> None:
    dispatcher = build_dispatcher(_config())
    dispatcher.close()
    dispatcher.plan(Rows())


def _run_backwards_in_another_order() -> None:
    def body(group: Any) -> None:
        dispatcher = build_dispatcher(_config(graph_safe=True, max_tokens_per_rank=4), group)
        routing = Routing(torch.tensor([[0, 7]]), torch.ones(1, 2))
        calls = [dispatcher.dispatch(torch.ones(1, 16), routing) for _ in range(2)]
        results = [dispatcher.combine(sent.rows, sent) for sent in calls]
        for result in results if group.rank() else reversed(results):
            result.sum().backward()
        dispatcher.check()

    run_ranks(body, 2)


def _build_emulated(**fields: Any) -> None:
    deepep = {"name": "deepep", "emulate": "v1.2.1"}
    run_ranks(lambda group: build_dispatcher(_config(backend=deepep, wire="bfloat16", **fields), group), 2)


PROVOKED: dict[str, list[Call]] = {
    "MD01": [lambda: _config(backend="altoall")],
    "MD02": [lambda: build_dispatcher(_config(backend="deepep")), lambda: _config(backend="ours")],
    "MD03": [lambda: run_ranks(lambda group: build_dispatcher(_config(pad_multiple=1 + 15 * group.rank()), group), 2)],
    "MD04": [lambda: _dispatch(tokens=6)],
    "MD05": [lambda: _build_emulated(hidden_size=384), lambda: _build_emulated(hidden_size=8192)],
    "MD06": [
        lambda: _dispatch(layout=THD([0, 6])),
        lambda: build_dispatcher(_config()).plan(BSHD([4, 1]), like=torch.ones(2, 3, 16)),
        lambda: _dispatch(layout=Rows(6)),
        lambda: _dispatch(layout=Masked(torch.ones(4, dtype=torch.bool))),
        _dispatch_with_an_old_plan,
    ],
    "MD07": [_overflow],
    "MD08": [_hear_of_a_refusal],
    "MD09": [_differentiate_twice],
    "MD10": [_use_a_closed_dispatcher],
    "MD11": [_run_backwards_in_another_order],
}


def test_each_coded_error_of_the_sources_is_quoted_in_the_section_of_its_code() -> None:
    coded = {title: len(quoted(title)) for title in SECTIONS if title.startswith("MD")}
    assert Counter(re.findall(r"\[(MD\d\d)\]\"", SOURCES)) == Counter(coded)
    assert sorted(coded) == sorted(PROVOKED) == [f"MD{number:02}" for number in range(1, len(coded) + 1)]


@pytest.mark.parametrize("code", PROVOKED)
def test_quoted_errors_are_raised(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What other tests registered, or other packages brought, would be in the list of known backends.
    broken = EntryPoint("ours", "not_there:Options", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_third_party", lambda: {"ours": broken} if code == "MD02" else {})
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    for line, provoke in zip(quoted(code), PROVOKED[code], strict=True):
        assert line.endswith(f" [{code}]")
        with pytest.raises(MoEDispatchError) as caught:
            provoke()
        text = re.escape(line).replace("<name>", r"\S+")
        assert re.fullmatch(text, str(caught.value)), caught.value


def test_a_rank_that_leaves_a_backward_out_shows_as_the_quoted_timeout() -> None:
    def body(group: Any) -> None:
        dispatcher = build_dispatcher(_config(), group)
        x = torch.ones(1, 16, requires_grad=True)
        sent = dispatcher.dispatch(x, Routing(torch.tensor([[0, 1]]), torch.ones(1, 2)))
        y = dispatcher.combine(sent.rows, sent)
        if group.rank() == 0:
            y.sum().backward()

    (symptom,) = quoted("The job hangs")
    with pytest.raises(RuntimeError, match=symptom):
        run_ranks(body, 2, timeout=datetime.timedelta(seconds=0.5))
