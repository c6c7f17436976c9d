"""The pages under docs/ are true: links lead somewhere, code runs, errors occur, tables follow from the code."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from moe_dispatch import THD, DispatcherConfig, MoEDispatchError, Routing, build_dispatcher
from moe_dispatch.backends import Arrived, Backend, BackendOptions, Constraints, Route, registry
from moe_dispatch.backends.deep_ep import library
from moe_dispatch.config import PAD_MULTIPLES
from moe_dispatch_testing import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))
NOTE_PARTS = ["Problem", "Choices", "Rejected alternatives", "Consequences"]

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A path in backticks: it has a folder and an ending.
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|toml|txt))`")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = [target for target in _LINK.findall(_prose(page)) if not _leads_somewhere(page, target)]
    assert not dead, f"{_name(page)} links to {dead}"


def _leads_somewhere(page: Path, target: str) -> bool:
    if target.startswith("https://"):
        return True
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    return linked.exists() and (not anchor or anchor in _anchors(linked))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_files_exist(page: Path) -> None:
    missing = [path for path in _PATH.findall(_prose(page)) if not (ROOT / path).is_file()]
    assert not missing, f"{_name(page)} names {missing}"


def test_design_notes_are_numbered_without_gaps() -> None:
    numbers = [int(note.name[:4]) for note in NOTES]
    assert numbers == list(range(1, len(NOTES) + 1))
    assert len(NOTES) >= 8


@pytest.mark.parametrize("note", NOTES, ids=_name)
def test_design_note_has_its_parts(note: Path) -> None:
    text = note.read_text(encoding="utf-8")
    assert re.match(
        rf"# {note.name[:4]}: \S.*\n\nStatus: (accepted|superseded by \d{{4}}), \d{{4}}-\d\d-\d\d\.\n", text
    )
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == NOTE_PARTS


def run_page(name: str, until: str = "") -> dict[str, Any]:
    """Run the Python blocks of a page in order, up to a heading if one is given; return their namespace."""
    page = ROOT / "docs" / name
    text = page.read_text(encoding="utf-8")
    if until:
        text, found, _ = text.partition(f"\n{until}\n")
        assert found
    namespace: dict[str, Any] = {}
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        above = text.count("\n", 0, block.start(1))  # empty lines make a traceback name the line of the page
        exec(compile("\n" * above + block[1], str(page), "exec"), namespace)
    return namespace


def test_backend_of_the_page_passes_the_kit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    assert run_page("writing-a-backend.md")["report"].passed
    assert "excused: wire_float8 on 1 ranks: wire_dtypes none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "holds"),
    [
        ("balance.md", lambda names: names["balanced"].balance == "least_loaded"),
        ("deep-ep.md", lambda names: not names["emulated"]._lease._collected.alive),
        ("graph-safe.md", lambda names: names["matrices"].grad.isfinite().all()),
        ("layouts.md", lambda names: names["hidden"].shape == (20, 64)),
        ("precision.md", lambda names: names["y"].shape == (21, 64)),
        (
            "your-model.md",
            lambda names: torch.equal(names["from_map"].topk_ids, names["routing"].topk_ids.sort(1).values),
        ),
    ],
)
def test_code_of_the_page_runs(page: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    """The condition is on a name of the last block, so it tells that the blocks ran to the end."""
    torch.manual_seed(0)
    assert holds(run_page(page))


def test_code_of_the_page_on_metrics_runs() -> None:
    """What follows needs tensorboard, and is run by the integration tests."""
    assert run_page("metrics.md", until="## TensorBoard")["metrics"].bytes_sent == {}


def test_code_of_the_page_on_configuration_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {})
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    block = re.search(r"^```yaml\n# (\S+)\n.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / block[1]).write_text("\n".join(block[0].splitlines()[1:-1]), encoding="utf-8")
    assert run_page("configuration.md")["config"].backend_name == "allgather"


def test_page_on_backends_names_every_member_and_constraint() -> None:
    text = _prose(ROOT / "docs" / "writing-a-backend.md")
    # Of a pydantic class, the members are the public ones that pydantic itself does not make.
    members = [
        name
        for owner in (BackendOptions, Backend, Route)
        for name in vars(owner)
        if not name.startswith(("_", "model_"))
    ]
    assert {"open", "constraints", "restore", "combine_backward"} <= set(members)
    fields = [field.name for values in (Constraints, Arrived) for field in dataclasses.fields(values)]
    for name in [*members, *fields]:
        assert re.search(rf"`{name}\b", text), name


# Commands of pages, of which tests/test_quickstart.py runs some.
COMMANDS = ["configuration.md", "quickstart.md"]


@pytest.mark.parametrize("page", COMMANDS)
def test_shell_blocks_name_targets_files_and_extras_that_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for line in "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines():
        environment, words = _command(shlex.split(line))
        fields = {name.removeprefix("MOE_DISPATCH_").partition("__")[0].lower() for name in environment}
        assert fields <= set(DispatcherConfig.model_fields)
        match words:
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
            case ["pip", "install", "-c", "constraints.txt", "torch"]:
                pass
            case ["pip", "install", "-c", "constraints.txt", "-e", package]:
                assert package.removeprefix(".[").removesuffix("]") in extras, line
            case ["torchrun", "--nnodes", *_]:
                _check_torchrun(words[1:])
            case ["torchrun", "--nproc-per-node", _, script] | ["python", script]:
                assert f'title="{script}"' in text or (ROOT / script).is_file()
            case _:
                pytest.fail(f"no rule for {line!r}")


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


# What provokes each quoted error of a page, in the order of the page.
PROVOKED: dict[str, list[Callable[[], object]]] = {
    "graph-safe.md": [
        lambda: build_dispatcher(
            _config(backend={"name": "alltoall", "reduction": "exact"}, graph_safe=True, max_tokens_per_rank=8)
        ),
    ],
    "errors.md": [
        lambda: _config(backend="altoall"),
        lambda: build_dispatcher(_config(backend="deepep")),
        lambda: _config(top_k=9),
        lambda: run_ranks(lambda group: build_dispatcher(_config(num_experts=9), group), 2),
        lambda: run_ranks(lambda group: build_dispatcher(_config(pad_multiple=1 + 15 * group.rank()), group), 2),
        lambda: _call(tokens=6),
        lambda: _call(layout=THD([0, 6])),
        _hear_of_a_refusal,
        _differentiate_twice,
    ],
}


@pytest.mark.parametrize("page", PROVOKED)
def test_quoted_errors_are_those_that_occur(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What other tests registered, or other packages brought, would be in the list of known backends.
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_third_party", dict)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^<!-- errors -->\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    quoted = "".join(blocks).splitlines()
    assert len(quoted) == len(PROVOKED[page])
    for line, provoke in zip(quoted, PROVOKED[page], strict=True):
        with pytest.raises((ValueError, RuntimeError, ImportError), match=re.escape(line)):
            provoke()


@pytest.mark.parametrize("page", TABLES["TABLES"])
def test_tables_follow_from_the_code(page: str) -> None:
    """Where this fails: ``python docs/tables.py``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert TABLES["replaced"](page, text) == text


def test_tables_need_their_place() -> None:
    with pytest.raises(ValueError, match=r"docs/backends\.md must hold <!-- backends table: docs/tables\.py -->"):
        TABLES["replaced"]("docs/backends.md", "# Backends\n")


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
    text = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    for name in ("fp8", "mxfp8", "nvfp4"):
        assert f'`"{name}"` {PAD_MULTIPLES[name]}' in text


def test_every_page_is_once_in_the_navigation() -> None:
    listed = re.findall(
        r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed) == pages


@pytest.mark.parametrize(
    ("page", "target", "on_the_site"),
    [
        ("backends.md", "../README.md#backends", "https://example.org/blob/main/README.md#backends"),
        ("design/0001.md", "../../Makefile", "https://example.org/blob/main/Makefile"),
        ("design/0001.md", "../backends.md", "../backends.md"),
        ("backends.md", "errors.md#known-gaps", "errors.md#known-gaps"),
    ],
)
def test_links_out_of_docs_lead_to_the_repository(page: str, target: str, on_the_site: str) -> None:
    hook = runpy.run_path(str(ROOT / "docs" / "links.py"))["on_page_markdown"]
    of_page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    written = hook(f"See [it]({target}).", page=of_page, config={"repo_url": "https://example.org"})
    assert written == f"See [it]({on_the_site})."
