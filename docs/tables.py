"""Generate the tables in the documentation from the code: ``python docs/tables.py``. A test compares them."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from docs.stability import EXPERIMENTAL_FIELDS, PUBLIC
from moe_dispatch.backends import BackendOptions, Constraints, MoEShape, known_backends, load_backend
from moe_dispatch.backends.base import listed_sizes
from moe_dispatch.backends.capacity import capacity_of
from moe_dispatch.backends.wire import WireDtype, id_dtype_for, packet_format, row_format
from moe_dispatch.versions import SUPPORT
from tests.simulated_cuda import bytes as budget_of_bytes
from tests.simulated_cuda.floor import VERBS

ROOT = Path(__file__).parent.parent
_PACKAGE = "moe_dispatch.backends."
# Constraints may depend on sizes. The tables use these sizes.
SHAPE = MoEShape(num_experts=64, top_k=8, hidden_size=4096, ep_size=8, pad_multiple=1, ranks_per_node=8)


def backends_table() -> str:
    """Return the needs and offers of each built-in backend, from its ``Constraints`` and options."""
    ours = [options for options in map(load_backend, known_backends()) if options.__module__.startswith(_PACKAGE)]
    lines = [["", *(f"`{options.name}`" for options in ours)]]
    for title, cell in _ROWS:
        lines.append([title, *(cell(options, options().constraints(SHAPE)) for options in ours)])
    return _markdown(lines)


def wire_table() -> str:
    """Return the bytes of one row on ``alltoall`` for each ``wire``, for the example sizes."""
    hidden, top_k = SHAPE.hidden_size, SHAPE.top_k
    lines = [["model", "`wire`", "dispatch", "combine", "gradient of combine", "gradient of dispatch"]]
    for dtype in (torch.float32, torch.bfloat16):
        for wire in (None, *get_args(WireDtype)):
            narrow: WireDtype | None = None if wire is None else "bfloat16"
            out, back = row_format(dtype, hidden, wire), row_format(dtype, hidden, narrow)
            sizes = [
                packet_format(out, top_k, torch.float32, id_dtype_for(SHAPE.num_experts)).stride,
                packet_format(back, top_k, None).stride,
                back.nbytes,
                packet_format(back, top_k, torch.float32).stride,
            ]
            lines.append([str(dtype).removeprefix("torch."), f"`{wire!r}`".replace("'", '"'), *map(str, sizes)])
    return _markdown(lines)


def capacity_table() -> str:
    """Return the buffer sizes that capacity factors lead to, for the example sizes and several group sizes."""
    lines = [["ranks", "factor", "rows", "R", "`pair_rows`", "rows given to experts, MB", "sent and received, MB"]]
    for ep_size in (8, 32):
        for factor in (1.0, 1.25, "worst"):
            sizes: dict[str, Any] = {
                "ep_size": ep_size,
                "pad_multiple": 16,
                "max_tokens_per_rank": 4096,
                "graph_safe": True,
            }
            shape = dataclasses.replace(SHAPE, **sizes, capacity_factor=factor)
            room = capacity_of(shape, pair_factor=factor)
            assert room.pair_rows is not None
            row = row_format(torch.bfloat16, shape.hidden_size)
            form = packet_format(row, shape.top_k, torch.float32, id_dtype_for(shape.num_experts), note=True)
            wire = 2 * ep_size * room.pair_rows * form.stride
            numbers = [str(room.rows), str(room.buffer_rows), str(room.pair_rows)]
            given = room.buffer_rows * row.nbytes
            lines.append([str(ep_size), str(factor), *numbers, f"{given / 1e6:.0f}", f"{wire / 1e6:.0f}"])
    return _markdown(lines)


def budget_table() -> str:
    """Return the budget of launches, copies and syncs of each verb, which ``make simgpu`` holds the verbs against."""
    budget = json.loads((ROOT / "tests" / "simulated_cuda" / "budget.json").read_text(encoding="utf-8"))
    lines = [["backend", "mode", "layout", *(f"`{verb}`" for verb in VERBS)]]
    for row in dict.fromkeys(key.rsplit(" ", 1)[0] for key in budget):
        cells = ("/".join(map(str, budget[f"{row} {verb}"].values())) for verb in VERBS)
        backend, mode, layout = row.split()
        lines.append([f"`{backend}`", mode, layout, *cells])
    return _markdown(lines)


def bytes_table() -> str:
    """Return the budget of bytes of each verb in multiples of its floor, with the multiple that is aimed at."""
    lines, budget = [["backend", "mode", *(f"`{verb}`" for verb in VERBS)]], budget_of_bytes.read()
    for (backend, mode), setting in budget_of_bytes.SETTINGS.items():
        multiples = budget[f"{backend} {mode}"]
        cells = (
            f"{multiples[verb]:.2f}" + ("" if aim is None else f" ({aim:.2f})")
            for verb, aim in zip(VERBS, setting.aims, strict=True)
        )
        lines.append([f"`{backend}`", mode, *cells])
    for backend, mode in budget_of_bytes.MANY_RANKS:
        lines.append([f"`{backend}`", mode, f"{budget[f'{backend} {mode}']['dispatch']:.2f}", "", "", ""])
    return _markdown(lines)


def support_table() -> str:
    """Return the versions of other software that are served, from the list that integrations check against."""
    lines = [["software", "tested", "emulated", "refused", "what runs it"]]
    for name, known in SUPPORT.items():
        refused = known.refused or (f"below {known.lowest}" if known.lowest else "")
        told = (", ".join(known.tested), ", ".join(known.emulated), refused)
        lines.append([name, *(cell or "-" for cell in told), f"`make {known.target}`"])
    return _markdown(lines)


def stability_table() -> str:
    """Return the experimental names of each module."""
    lines = [["module", "experimental", "stable"]]
    for module, names in ((module, names) for module, names in PUBLIC.items() if names.stable):
        loose = ", ".join(f"`{name}`" for name in names.experimental)
        if module == "moe_dispatch":
            fields = ", ".join(f"`{name}`" for name in EXPERIMENTAL_FIELDS)
            loose += f", the fields {fields} of `DispatcherConfig`"
        some = "all others" if names.experimental else "all"
        lines.append([f"`{module}`", loose or "none", some])
    return _markdown([*lines, ["all other modules of this page", "all", "none"]])


def differences_tables() -> str:
    """Return a section for each question of docs/differences.toml."""
    sections = []
    for table in tomllib.loads((ROOT / "docs" / "differences.toml").read_text(encoding="utf-8"))["table"]:
        lines = [["", *table["columns"], "run"]]
        for row in table["rows"]:
            run = row["run"]
            how = run if run in ("test", "once") else f"[script](../findings/{run}.sh)"
            lines.append([row["software"], *row["cells"], how])
        sections.append("\n\n".join(filter(None, [f"## {table['question']}", table["note"], _markdown(lines)])))
    return "\n".join(sections)


# The tables of each page, by name.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/backends.md": {"backends": backends_table},
    "docs/tuning.md": {"wire": wire_table},
    "docs/graph-safe.md": {"capacity": capacity_table},
    "docs/differences.md": {"differences": differences_tables},
    "docs/reference.md": {"stability": stability_table},
    "docs/hardware.md": {"support": support_table, "bytes": bytes_table},
    "tests/simulated_cuda/README.md": {"budget": budget_table},
}


def replaced(page: str, text: str) -> str:
    """Return the text of a page with its tables generated anew."""
    for name, table in ((name, make()) for name, make in TABLES[page].items()):
        begin, end = f"<!-- {name} table: docs/tables.py -->\n", f"<!-- end of {name} table -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"{page} must hold {begin.strip()} and {end}, got none. Put them where the table goes.")
        text = f"{before}{begin}{table}{end}{after}"
    return text


def _listed(values: Sequence[object] | frozenset[object] | None, none: str = "any") -> str:
    return none if values is None else ", ".join(sorted(str(value).removeprefix("torch.") for value in values))


def _sizes(options: type[BackendOptions], needs: Constraints) -> str:
    return "any" if needs.group_sizes is None else listed_sizes(needs.group_sizes)


def _rows_per_rank(options: type[BackendOptions], needs: Constraints) -> str:
    equal = "made equal" if needs.equal_rows else "any, may differ"
    multiple = f", a multiple of {needs.row_multiple}" if needs.row_multiple > 1 else ""
    return equal + multiple + (f", at most {needs.max_rows}" if needs.max_rows is not None else "")


def _hidden(options: type[BackendOptions], needs: Constraints) -> str:
    multiple = "any" if needs.hidden_multiple == 1 else f"a multiple of {needs.hidden_multiple}"
    return multiple if needs.max_hidden is None else f"{multiple}, at most {needs.max_hidden}"


def _wires(options: type[BackendOptions], needs: Constraints) -> str:
    return ", ".join(["`None`", *(f'`"{wire}"`' for wire in sorted(needs.wire.dtypes))])


def _options(options: type[BackendOptions], needs: Constraints) -> str:
    fields = options.model_json_schema().get("properties", {})
    return ", ".join(f"`{name}`" + _choices(field) for name, field in fields.items()) or "none"


def _choices(field: dict[str, Any]) -> str:
    """Return the values that an option can have, if it is an enumeration."""
    return f" ({', '.join(map(repr, field['enum']))})".replace("'", '"') if "enum" in field else ""


def _graph_safe(options: type[BackendOptions], needs: Constraints) -> str:
    return "yes" if needs.graph_safe else f"no: {needs.graph_safe_reason}"


_Cell = Callable[[type[BackendOptions], Constraints], str]
_ROWS: tuple[tuple[str, _Cell], ...] = (
    ("ep_size", _sizes),
    ("rows per rank", _rows_per_rank),
    ("hidden size", _hidden),
    ("top_k", lambda options, needs: "any" if needs.max_top_k is None else f"at most {needs.max_top_k}"),
    ("dtypes", lambda options, needs: _listed(needs.dtypes, "float64, float32, bfloat16, float16")),
    ("devices", lambda options, needs: _listed(needs.devices)),
    ("`wire`", _wires),
    ("rows per expert padded by", lambda options, needs: "its library" if needs.pads_experts else "this package"),
    ("options", _options),
    ("graph-safe", _graph_safe),
    ("`torch.compile(fullgraph=True)`", lambda options, needs: "yes" if needs.compilable else "no"),
)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"


if __name__ == "__main__":
    for page in TABLES:
        path = ROOT / page
        path.write_text(replaced(page, path.read_text(encoding="utf-8")), encoding="utf-8")
