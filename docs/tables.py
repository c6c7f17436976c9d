"""The tables of README.md that follow from the code. ``python docs/tables.py`` writes them; a test compares them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from moe_dispatch.backends import Backend, Constraints, MoEShape, known_backends, load_backend
from moe_dispatch.backends.base import WireDtype, listed_sizes
from moe_dispatch.backends.wire import id_dtype_for, packet, row_format

README = Path(__file__).parent.parent / "README.md"
# Constraints may depend on sizes; these are the table's example.
SHAPE = MoEShape(num_experts=64, top_k=8, hidden_size=4096, ep_size=8, pad_multiple=1, ranks_per_node=8)


def backends_table() -> str:
    """What each backend of this package needs and offers, from its ``Constraints`` and options."""
    classes = [
        cls for cls in map(load_backend, known_backends()) if cls.__module__.startswith("moe_dispatch.backends.")
    ]
    lines = [["", *(f"`{cls.name}`" for cls in classes)]]
    for title, cell in _ROWS:
        lines.append([title, *(cell(cls, cls.constraints(SHAPE, cls.Options())) for cls in classes)])
    return _markdown(lines)


def wire_table() -> str:
    """Bytes of one row on ``alltoall``, per ``wire_dtype``, for the example sizes."""
    hidden, top_k = SHAPE.hidden_size, SHAPE.top_k
    lines = [["model", "`wire_dtype`", "dispatch", "combine", "gradient of combine", "gradient of dispatch"]]
    for dtype in (torch.float32, torch.bfloat16):
        for wire in (None, *get_args(WireDtype)):
            narrow: WireDtype | None = None if wire is None else "bfloat16"
            out, back = row_format(dtype, hidden, wire), row_format(dtype, hidden, narrow)
            sizes = [
                packet(out, top_k, torch.float32, id_dtype_for(SHAPE.num_experts)).stride,
                packet(back, top_k, None).stride,
                back.nbytes,
                packet(back, top_k, torch.float32).stride,
            ]
            lines.append([str(dtype).removeprefix("torch."), f"`{wire!r}`".replace("'", '"'), *map(str, sizes)])
    return _markdown(lines)


def replaced(text: str) -> str:
    """A README with its tables as they should be."""
    for name, table in (("backends", backends_table()), ("wire", wire_table())):
        begin, end = f"<!-- {name} table: docs/tables.py -->\n", f"<!-- end of {name} table -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"README.md must hold {begin.strip()} and {end}, got none. Put them where the table goes.")
        text = f"{before}{begin}{table}{end}{after}"
    return text


def _listed(values: Sequence[object] | frozenset[object] | None, none: str = "any") -> str:
    return none if values is None else ", ".join(sorted(str(value).removeprefix("torch.") for value in values))


def _how(cls: type[Backend], needs: Constraints) -> str:
    sentence = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return sentence.partition(": ")[2].rstrip(".")


def _sizes(cls: type[Backend], needs: Constraints) -> str:
    return "any" if needs.group_sizes is None else listed_sizes(needs.group_sizes)


def _rows_per_rank(cls: type[Backend], needs: Constraints) -> str:
    equal = "made equal" if needs.equal_rows else "any, may differ"
    multiple = f", a multiple of {needs.row_multiple}" if needs.row_multiple > 1 else ""
    return equal + multiple + (f", at most {needs.max_rows}" if needs.max_rows is not None else "")


def _hidden(cls: type[Backend], needs: Constraints) -> str:
    multiple = "any" if needs.hidden_multiple == 1 else f"a multiple of {needs.hidden_multiple}"
    return multiple if needs.max_hidden is None else f"{multiple}, at most {needs.max_hidden}"


def _wires(cls: type[Backend], needs: Constraints) -> str:
    return ", ".join(["`None`", *(f'`"{wire}"`' for wire in sorted(needs.wire_dtypes))])


def _options(cls: type[Backend], needs: Constraints) -> str:
    fields = cls.Options.model_json_schema().get("properties", {})
    return ", ".join(f"`{name}`" + _choices(field) for name, field in fields.items()) or "none"


def _choices(field: dict[str, Any]) -> str:
    """The values an option can have, where they are few."""
    return f" ({', '.join(map(repr, field['enum']))})".replace("'", '"') if "enum" in field else ""


def _graph_safe(cls: type[Backend], needs: Constraints) -> str:
    return "yes" if needs.graph_safe else f"no: {needs.graph_safe_reason}"


_Cell = Callable[[type[Backend], Constraints], str]
_ROWS: tuple[tuple[str, _Cell], ...] = (
    ("how", _how),
    ("ep_size", _sizes),
    ("rows per rank", _rows_per_rank),
    ("hidden size", _hidden),
    ("top_k", lambda cls, needs: "any" if needs.max_top_k is None else f"at most {needs.max_top_k}"),
    ("dtypes", lambda cls, needs: _listed(needs.dtypes, "float64, float32, bfloat16, float16")),
    ("devices", lambda cls, needs: _listed(needs.devices)),
    ("`wire_dtype`", _wires),
    ("rows per expert padded by", lambda cls, needs: "its library" if needs.pads_experts else "this package"),
    ("options", _options),
    ("exchanges counts in every dispatch", lambda cls, needs: "yes" if needs.exchanges_counts else "no"),
    ("graph-safe", _graph_safe),
    ("`torch.compile(fullgraph=True)`", lambda cls, needs: "yes" if needs.compilable else "no"),
    ("backward", lambda cls, needs: "yes" if needs.differentiable else "no"),
)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
