"""A hook of the site: each public name has a page of its own, and ``reference.md`` lists them by module.

``reference.md`` asks for names in mkdocstrings' own form (``::: module`` and ``members:``), so the page is complete
without this hook, but 33,000 words long.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import griffe
from mkdocs.structure.files import File, InclusionLevel

INDEX = "reference.md"
_BLOCK = re.compile(r"^::: ([\w.]+)\n    options:\n      members: \[(.*)\]$", re.MULTILINE)


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each name that ``reference.md`` asks for."""
    for module, names in _BLOCK.findall(files.get_file_from_path(INDEX).content_string):
        for name in names.split(", "):
            # The second line names the module, which people copy.
            text = f"# {name}\n\n`from {module} import {name}`{_contents(module, name)}\n\n::: {module}.{name}\n"
            page = File.generated(config, _path(module, name), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn the blocks of ``reference.md`` into lists of links."""
    return _BLOCK.sub(_links, markdown) if page.file.src_uri == INDEX else markdown


def _path(module: str, name: str) -> str:
    return f"reference/{module}.{name}.md"


def _links(block: re.Match[str]) -> str:
    module, names = block.groups()
    lines = [f"- [`{name}`]({_path(module, name)}){_summary(module, name)}" for name in names.split(", ")]
    return f"`{module}`:\n\n" + "\n".join(lines)


def _contents(module: str, name: str) -> str:
    """Return links to the members that the page of a class shows: those with a docstring."""
    public = _object(module, name).members.values()
    shown = [member.name for member in public if member.docstring and not member.name.startswith("_")]
    links = " · ".join(f"[`{member}`](#{module}.{name}.{member})" for member in shown)
    return f"\n\nContents: {links}" if links else ""


def _summary(module: str, name: str) -> str:
    """Return the first sentence of a docstring, after a colon."""
    docstring = _object(module, name).docstring
    return f": {docstring.value.splitlines()[0]}" if docstring else ""


def _object(module: str, name: str) -> Any:
    return _package(module.partition(".")[0])[f"{module}.{name}".partition(".")[2]]


@functools.cache
def _package(name: str) -> Any:
    return griffe.load(name, resolve_aliases=True)
