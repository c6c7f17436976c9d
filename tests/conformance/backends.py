"""The backends that the suite runs: every name the registry knows here, and options that make a backend another one."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_dispatch.backends import known_backends, register_backend, registry
from moe_dispatch.testing import Strict
from moe_dispatch.testing.case import BackendSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_backend"

# Options under which a backend takes another way; each is held to all scenarios as a backend of its own.
VARIANTS: tuple[BackendSpec, ...] = (
    {"name": "alltoall", "reduction": "exact"},
    {"name": "strict", "inner": "allgather"},
    {"name": "deepep", "emulate": "v1.2.1"},
    {"name": "deepep", "emulate": "v2-2.1.0"},
    {"name": "deepep", "emulate": "v2-2.1.0", "expand": True},
    {"name": "hybridep", "emulate": "hybridep-94a9f8f"},
    {"name": "hybridep", "emulate": "hybridep-94a9f8f", "fuse_permute": True},
    {"name": "hybridep", "emulate": "hybridep-34152ae"},
    {"name": "hybridep", "emulate": "hybridep-0ed15b5"},
    {"name": "hybridep", "emulate": "hybridep-744"},
)
# Forms are the dispatcher's business: our backends run in all of them, and ``strict`` for whoever wants equal, aligned
# rows. Variants and the emulated libraries run in one, and graph-safe on two ranks only.
IN_ONE_FORM: tuple[BackendSpec, ...] = ("ring", *VARIANTS)


@contextmanager
def more_backends() -> Iterator[None]:
    """Inside, ``strict`` is registered, and the example package looks installed; other tests see neither."""
    with tempfile.TemporaryDirectory() as folder:
        _write_metadata(Path(folder))
        sys.path[:0] = [folder, str(EXAMPLE)]
        register_backend(Strict)
        try:
            yield
        finally:
            del registry._REGISTERED[Strict.name]
            sys.path.remove(folder)
            sys.path.remove(str(EXAMPLE))


def _write_metadata(folder: Path) -> None:
    """What an installer writes of the example's pyproject.toml: its name and its entry points."""
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
    BACKENDS: tuple[BackendSpec, ...] = (*known_backends(), *VARIANTS)
