"""A hook of the site: examples and the changelog become pages, and links to other files lead to the repository.

The latter needs ``REPOSITORY_URL``; without it, a link becomes the path of the file.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# File of the repository -> page of the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.py"))},
}
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)\s]*)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File, InclusionLevel  # noqa: PLC0415 - tests of this file need no mkdocs

    for path, text in pages().items():
        level = InclusionLevel.NOT_IN_NAV if path.startswith("examples/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, path, content=text, inclusion=level))
    return files


def pages() -> dict[str, str]:
    """Return the text of each page: the changelog, the examples, and a list of these."""
    made, listed = {}, []
    for source, path in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            docstring, text = _example(source, text)
            listed.append(f"- [`{posixpath.basename(source)}`]({path}): {docstring.splitlines()[0]}")
        made[path] = text.replace("](docs/", "](")
    return {**made, "examples.md": "# Examples\n\n" + "\n".join(listed) + "\n"}


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Turn links that lead out of ``docs/`` into links to a page, to the repository, or into the path of the file."""
    here = page.file.src_uri

    def replaced(link: re.Match[str]) -> str:
        text, up, target = link.groups()
        if up.count("../") != here.count("/") + 1:
            return link[0]
        path, sharp, anchor = target.partition("#")
        if path in PAGES:
            return f"[{text}]({posixpath.relpath(PAGES[path], posixpath.dirname(here) or '.')}{sharp}{anchor})"
        if config["repo_url"]:
            return f"[{text}]({config['repo_url']}/blob/main/{target})"
        return text if target in text else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def _example(source: str, text: str) -> tuple[str, str]:
    """Return the docstring of a program, and a page with it above the code."""
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    code = "\n".join(text.splitlines()[tree.body[0].end_lineno :]).strip()
    name = posixpath.basename(source)
    return docstring, f'# {name}\n\n{docstring}\n\n```python title="{source}"\n{code}\n```\n'
