"""Where files stand: an import of a module leads down, from what a stranger reads last to what it reads first."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "moe_dispatch"
FLOORS = (
    (
        "errors",
        "versions",
        "seams.plug_ins",
        "seams.extension_points",
        "seams.options",
        "seams.group_observers",
        "seams",
    ),
    ("communication",),
    ("permutation", "layouts"),
    ("types",),
    ("dispatched", "seams.slots", "seams.observers", "seams.call", "seams.calls", "seams.tracing"),
    ("backends",),
    ("config",),
    ("dispatchers",),
    ("cuda_graphs", "capabilities", "backends.deep_ep", "backends.nccl_ep"),
    ("balance", "lean", "pipelining", "quantised", "recompute", "replay", "steps"),
    ("training", "integrations", ""),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(module: str) -> Iterator[str]:
    """Yield the modules that a module imports: at its top, in a function, or for a type only."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if name in MODULES else node.module for name in named}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


GRAPH = {module: {name for name in imports(module) if name in MODULES and name != module} for module in MODULES}


def floor_of(module: str) -> int:
    """Return the floor of a module, or that of the innermost folder that has one. KeyError: no floor has it."""
    name = module.partition(".")[2]
    while name not in FLOOR and "." in name:
        name = name.rpartition(".")[0]
    return FLOOR[name]


def test_the_top_has_no_private_files() -> None:
    assert [path.name for path in PACKAGE.glob("_*.py")] == ["__init__.py"]
    assert all(f"moe_dispatch.{name}".rstrip(".") in MODULES for name in FLOOR)


def test_few_imports_lead_up() -> None:
    up = [f"{one} -> {other}" for one in GRAPH for other in GRAPH[one] if floor_of(one) < floor_of(other)]
    assert len(up) <= 24, "\n".join(sorted(up))


def test_circles_are_small() -> None:
    reached: dict[str, set[str]] = {}
    for module in GRAPH:
        reached[module], waiting = set(), [module]
        while waiting:
            new = GRAPH[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting.extend(new)
    circles = defaultdict[frozenset[str], int](int)
    for module in GRAPH:
        circles[frozenset(other for other in reached[module] if module in reached[other])] += 1
    largest = max(circles, key=len)
    assert len(largest) <= 42, "\n".join(sorted(largest))
