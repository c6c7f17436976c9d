"""Print a line for each public name and each of its members: ``python tests/signatures.py``.

The file of a release, ``tests/signatures-0.1.0.txt``, holds these lines as they were then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from griffe import Alias, Attribute, Class, Function, GriffeLoader, ModulesCollection, Object

from docs.stability import PUBLIC

ROOT = Path(__file__).parent.parent


@cache
def modules() -> ModulesCollection:
    """Read the three packages. Nothing is imported, so integrations need not be installed."""
    loader = GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in ("moe_dispatch", "moe_dispatch_testing", "moe_dispatch_tools"):
        loader.load(package)
    return loader.modules_collection


def lines() -> list[str]:
    """Return the lines of all public names."""
    found, first = [], dict[str, str]()
    for module, names in PUBLIC.items():
        for name in (*names.stable, *names.experimental):
            word = "stable" if name in names.stable else "experimental"
            obj = modules()[f"{module}.{name}"]
            target, public = obj.final_target if obj.is_alias else obj, f"{module}.{name}"
            if first.setdefault(target.path, public) == public:
                found += [f"{word} {line}" for line in _described(target, public)]
            else:
                found.append(f"{word} {public}: {first[target.path]}")
    return sorted(found)


def unannounced(before: Iterable[str], after: Iterable[str], news: str) -> list[str]:
    """Return the lines of the last release that changed against the rules.

    Args:
        before: The lines of the last release.
        after: The lines of today.
        news: The section of the CHANGELOG on the coming release. It must name what changed, in backticks.
    """
    gone = sorted(set(before) - set(after))
    stable_today = {_name(line) for line in after if line.startswith("stable ")}
    found = []
    for line in gone:
        name = _name(line)
        last = name.rpartition(".")[2]
        if not re.search(rf"`[\w.]*\b{re.escape(last)}\b[^`]*`", news):
            found.append(f"the CHANGELOG does not name it: {line}")
        elif name not in stable_today and line.startswith("stable ") and "deprecated " not in line:
            found.append(f"it was not deprecated in the last release: {line}")
    return found


def _name(line: str) -> str:
    """Return the qualified name that a line describes."""
    return re.sub(r"^(stable|experimental) (deprecated )?", "", line).partition("(")[0].partition(":")[0]


def _described(obj: Object | Alias, name: str) -> Iterator[str]:
    mark = "deprecated " if any("deprecated(" in str(d.value) for d in getattr(obj, "decorators", ())) else ""
    if isinstance(obj, Function):
        yield f"{mark}{name}{obj.signature(return_type=True).removeprefix(obj.name)}"
    elif isinstance(obj, Class):
        yield f"{mark}{name}({', '.join(str(base) for base in obj.bases)})"
        for member in obj.members.values():
            shown = not member.name.startswith("_") or member.name in ("__init__", "__call__")
            of_instances = member.is_attribute and getattr(member, "annotation", None) is None
            if shown and not of_instances and not member.is_alias:
                yield from _described(member, f"{name}.{member.name}")
    elif isinstance(obj, Attribute):
        value = "" if obj.value is None else f" = {obj.value}"
        yield f"{mark}{name}: {obj.annotation}{value}"


if __name__ == "__main__":
    print("\n".join(lines()))
