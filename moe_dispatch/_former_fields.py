"""Former fields of the config, and how to write them now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from moe_dispatch._options import SHORT, spelled_out
from moe_dispatch.backends.registry import backends_with
from moe_dispatch.errors import shown

# By former field, the field and the option that took its place.
FORMER = {
    "balance_bound": ("balance", "bound"),
    "balance_min_rows": ("balance", "min_rows"),
    "spare_experts_per_rank": ("balance", "spare_experts_per_rank"),
    "wire_dtype": ("wire", "dtype"),
    "grad_wire_dtype": ("wire", "gradients"),
    "deliver": ("wire", "deliver"),
    "chunk_tokens": ("chunks", "tokens"),
    "chunk_recompute": ("chunks", "recompute"),
    "capacity_factor": ("graph_safe", "capacity_factor"),
    "on_overflow": ("graph_safe", "on_overflow"),
}


def former_field(former: str, fields: Mapping[str, Any]) -> str | None:
    """Say how to write a former field now, with all the values that were given for the same field; None for others.

    For example: ``Write balance={"name": "exact", "bound": 1.05}.``
    """
    if former not in FORMER:
        return None
    field, _ = FORMER[former]
    given = fields.get(field)
    options = {} if given is None or isinstance(given, bool) else spelled_out(field, given)
    options |= dict(_moved(field, fields))
    if field == "balance" and options:
        options = {"name": "exact" if {"bound", "min_rows"} & {*options} else "manual", **options}
    short = SHORT[field]
    if not options:
        return f"Leave out {former}."
    if field in _EXAMPLES and short not in options:
        options = {str(short): fields.get("grad_wire_dtype") or _EXAMPLES[field], **options}
    if short is not None and [*options] == [short]:
        return f"Write {field}={_written(options[short])}."
    return f"Write {field}={{{', '.join(f'{_written(name)}: {_written(value)}' for name, value in options.items())}}}."


def _moved(field: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a field that were given as former fields. Those with no effect are left out."""
    for former, (owner, option) in FORMER.items():
        if owner != field or former not in fields:
            continue
        value = fields[former]
        if former == "grad_wire_dtype":
            value = value is not None
        if (former, value) not in _WITHOUT_EFFECT:
            yield option, value


# What a mapping must have, where only a former field of its other options was given.
_EXAMPLES: dict[str, Any] = {"wire": "mxfp8", "chunks": 4096}

# Former fields with values that asked for nothing.
_WITHOUT_EFFECT = [
    *((former, None) for former in FORMER),
    ("balance_bound", 1.0),
    ("capacity_factor", "worst"),
    ("grad_wire_dtype", False),
    ("deliver", "rows"),
    ("chunk_recompute", False),
    ("spare_experts_per_rank", 0),
]


def former_variable(former: str, prefix: str) -> str | None:
    """Say which variable took the place of that of a former field, or has two underscores; None for others."""
    for field in SHORT:
        option = former.removeprefix(f"{field}_")
        known = backends_with(option) if field == "backend" else (field, option) in FORMER.values()
        if former != option and known and former not in FORMER:
            return f"Set {prefix}{field.upper()}__{option.upper()}."
    if former not in FORMER:
        return None
    field, option = FORMER[former]
    value = "=true" if former == "grad_wire_dtype" else ""
    return f"Set {prefix}{(field if option == SHORT[field] else f'{field}__{option}').upper()}{value}."


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else shown(value)
