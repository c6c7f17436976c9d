"""A hook of the site: pages link to files of the checkout, which the site does not hold; it names them instead."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ become the path, in code."""
    depth = page.file.src_uri.count("/")

    def named(link: re.Match[str]) -> str:
        leads_out = link[2].startswith("../" * (depth + 1))
        return f"{link[1]} (`{link[2].removeprefix('../' * (depth + 1))}`)" if leads_out else link[0]

    return _LINK.sub(named, markdown)
