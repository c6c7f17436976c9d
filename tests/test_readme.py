"""README.md is true: its code runs, its errors occur, its commands exist, its tables follow from the code."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from moe_dispatch import THD, DispatcherConfig, MoEDispatchError, Routing, build_dispatcher
from moe_dispatch.backends import registry
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.config import PAD_MULTIPLES
from moe_dispatch.testing import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))

SECTIONS = [
    "What it does and what it does not do",
    "Backends",
    "Layouts",
    "Graph-safe mode",
    "Using it",
    "Writing a backend",
    "Performance",
    "Development",
]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its text, the line it begins on, and the line before the fence."""

    language: str
    text: str
    line: int
    marker: str


def blocks(language: str) -> Iterator[Block]:
    for found in re.finditer(r"^([^\n]*)\n```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        if found[2] == language:
            yield Block(
                language=language, text=found[3], line=README.count("\n", 0, found.start(3)), marker=found[1].strip()
            )


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {})
    torch.manual_seed(0)
    for block in blocks("yaml"):
        name = block.text.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    namespace: dict[str, Any] = {}
    for block in blocks("python"):  # the empty lines make a traceback name the line of README.md
        exec(compile("\n" * block.line + block.text, str(ROOT / "README.md"), "exec"), namespace)
    assert "from_map" in namespace  # the last block ran
    assert torch.equal(namespace["from_map"].topk_ids, namespace["routing"].topk_ids.sort(1).values)


def test_example_is_short_and_comes_first() -> None:
    first = next(blocks("python"))
    assert len(first.text.splitlines()) <= 10
    assert first.line < 10
    assert next(blocks("sh")).text == "make demo\nmake test\n"


def test_sections_are_in_the_order_of_the_house() -> None:
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == SECTIONS


def test_shell_blocks_name_targets_files_and_extras_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    for line in lines:
        environment, words = _command(shlex.split(line))
        assert set(environment) <= {f"MOE_DISPATCH_{field.upper()}" for field in DispatcherConfig.model_fields}
        match words:
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
            case ["pip", "install", "-e", package]:
                assert package.removeprefix(".[").removesuffix("]") in extras, line
            case ["torchrun", *arguments]:
                _check_torchrun(arguments)
            case _:
                pytest.fail(f"no rule for {line!r}")
    for target in re.findall(r"`make ([a-z]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def _command(words: list[str]) -> tuple[list[str], list[str]]:
    """Names of the variables set before a command, and the command."""
    count = next(i for i, word in enumerate(words) if "=" not in word)
    return [word.partition("=")[0] for word in words[:count]], words[count:]


def _check_torchrun(arguments: list[str]) -> None:
    parsed = get_args_parser().parse_args(arguments)
    script = ROOT / parsed.training_script
    assert parsed.nnodes == "2"
    assert script.is_file()
    for option in filter(lambda word: word.startswith("--"), parsed.training_script_args):
        assert option in script.read_text(encoding="utf-8")


def _config(**fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"backend": "alltoall", "num_experts": 8, "top_k": 2, "hidden_size": 16, **fields})


def _call(tokens: int = 5, routed: int = 5, layout: THD | None = None, group: Any = None) -> torch.Tensor:
    dispatcher = build_dispatcher(_config(), group)
    routing = Routing(torch.arange(2 * routed).view(-1, 2) % 8, torch.ones(routed, 2))
    sent = dispatcher.dispatch(torch.ones(tokens, 16, requires_grad=True), routing, layout)
    return dispatcher.combine(sent.rows, sent)


def _differentiate_twice() -> None:
    x = torch.ones(1, 16, requires_grad=True)
    dispatcher = build_dispatcher(_config())
    sent = dispatcher.dispatch(x, Routing(torch.tensor([[0, 1]]), torch.ones(1, 2)))
    torch.autograd.grad(sent.rows.sum(), x, create_graph=True)


def _hear_of_a_refusal() -> None:
    def body(group: Any) -> None:
        try:
            _call(tokens=5 + group.rank(), group=group)
        except MoEDispatchError:
            if group.rank() == 0:
                raise

    run_ranks(body, 2)


PROVOKED: list[Callable[[], object]] = [
    lambda: build_dispatcher(
        _config(backend={"name": "alltoall", "reduction": "exact"}, graph_safe=True, max_tokens_per_rank=8)
    ),
    lambda: _config(backend="altoall"),
    lambda: build_dispatcher(_config(backend="deepep")),
    lambda: _config(top_k=9),
    lambda: run_ranks(lambda group: build_dispatcher(_config(num_experts=9), group), 2),
    lambda: run_ranks(lambda group: build_dispatcher(_config(pad_multiple=1 + 15 * group.rank()), group), 2),
    lambda: _call(tokens=6),
    lambda: _call(layout=THD([0, 6])),
    _hear_of_a_refusal,
    _differentiate_twice,
]


def test_quoted_errors_are_those_that_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    # What other tests registered, or other packages brought, would be in the list of known backends.
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_third_party", dict)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    quoted = [line for block in blocks("text") if block.marker == "<!-- errors -->" for line in block.text.splitlines()]
    assert len(quoted) == len(PROVOKED)
    for line, provoke in zip(quoted, PROVOKED, strict=True):
        with pytest.raises((ValueError, RuntimeError, ImportError), match=re.escape(line)):
            provoke()


@pytest.mark.parametrize("page", TABLES["TABLES"])
def test_tables_follow_from_the_code(page: str) -> None:
    """Where this fails: ``python docs/tables.py``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert TABLES["replaced"](page, text) == text


def test_tables_need_their_place() -> None:
    with pytest.raises(ValueError, match=r"README\.md must hold <!-- backends table: docs/tables\.py -->"):
        TABLES["replaced"]("README.md", "# moe-dispatch\n")


@pytest.mark.parametrize("line", TABLES["wire_table"]().splitlines()[2:])
def test_bytes_of_the_wire_table_are_those_sent(line: str) -> None:
    """Three rows whose eight experts are all on the other rank."""
    dtype, wire, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
    shape = TABLES["SHAPE"]

    def body(group: Any) -> dict[str, int]:
        dispatcher = build_dispatcher(
            _config(
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden_size,
                wire_dtype=None if wire == "None" else wire.strip('"'),
            ),
            group,
        )
        x = torch.ones(3, shape.hidden_size, dtype=getattr(torch, dtype), requires_grad=True)
        ids = torch.arange(shape.top_k).expand(3, -1) + 32 * (1 - group.rank())
        sent = dispatcher.dispatch(x, Routing(ids, torch.ones(3, shape.top_k, requires_grad=True)))
        dispatcher.combine(sent.rows, sent).sum().backward()
        return dispatcher.metrics().bytes_sent

    for sent in run_ranks(body, 2):
        order = ("dispatch", "combine", "combine.backward", "dispatch.backward")
        assert [sent[label] for label in order] == [3 * int(number) for number in numbers]


def test_pad_multiples_are_those_of_the_config() -> None:
    for name in ("fp8", "mxfp8", "nvfp4"):
        assert f'`"{name}"` {PAD_MULTIPLES[name]}' in README
