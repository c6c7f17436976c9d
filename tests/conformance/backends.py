"""The backends that the suite runs: every registered name, and options that change how a backend works."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_dispatch.backends import known_backends, register_backend, registry
from moe_dispatch_testing.case import BackendSpec
from moe_dispatch_testing.strict import StrictOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_backend"

# Releases that are driven as another one is, which runs on one and two ranks too. These run on four.
OLDER_RELEASES: tuple[BackendSpec, ...] = (
    {"name": "deepep", "emulate": "uccl-da914a2"},
    {"name": "deepep", "emulate": "rocm-92b4ae1"},
    {"name": "deepep", "emulate": "v2-2.1.0"},
    {"name": "hybridep", "emulate": "hybridep-94a9f8f"},
    {"name": "hybridep", "emulate": "hybridep-94a9f8f", "fuse_permute": True},
)
# Options with which a backend runs other code. Each variant runs all scenarios, as a backend of its own.
VARIANTS: tuple[BackendSpec, ...] = (
    {"name": "alltoall", "reduction": "exact"},
    {"name": "alltoall_by_node", "ranks_per_node": 2},
    {"name": "strict", "inner": "allgather"},
    {"name": "deepep", "emulate": "v1.2.1"},
    {"name": "deepep", "emulate": "v2.5.0"},
    {"name": "deepep", "emulate": "v2.5.0", "expand": True},
    {"name": "hybridep", "emulate": "hybridep-746"},
    *OLDER_RELEASES,
)
# These run with one input layout, and graph-safe scenarios on two ranks only. The dispatcher handles layouts, so it is
# enough that our own backends run with all of them: ``allgather`` needs equal, aligned rows, as ``strict`` does.
# ``cases.py`` says which of these cases ``make test`` runs.
IN_ONE_LAYOUT: tuple[BackendSpec, ...] = ("ring", "strict", *VARIANTS)


@contextmanager
def more_backends() -> Iterator[None]:
    """Register ``strict`` and make the example package look installed; undo both at the end."""
    with tempfile.TemporaryDirectory() as folder:
        _write_metadata(Path(folder))
        sys.path[:0] = [folder, str(EXAMPLE)]
        register_backend(StrictOptions)
        try:
            yield
        finally:
            del registry._REGISTERED[StrictOptions.name]
            sys.path.remove(folder)
            sys.path.remove(str(EXAMPLE))


def _write_metadata(folder: Path) -> None:
    """Write the name and entry points of the example's pyproject.toml, as an installer does."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    target = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    target.mkdir()
    lines = [f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"]
    (target / "METADATA").write_text("".join(lines))
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {path}" for name, path in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (target / "entry_points.txt").write_text("\n".join(groups) + "\n")


with more_backends():
    # Without nodes, ``alltoall_by_node`` opens ``alltoall``.
    _NAMES = [name for name in known_backends() if name != "alltoall_by_node"]
    BACKENDS: tuple[BackendSpec, ...] = (*_NAMES, *VARIANTS)
