"""A hook of the site: links to files outside ``docs/`` lead to the repository."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\]\(((?:\.\./)+)([^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Turn links that lead out of ``docs/`` into links to the repository."""
    levels = page.file.src_uri.count("/") + 1

    def replaced(link: re.Match[str]) -> str:
        leads_out = link[1].count("../") == levels
        return f"]({config['repo_url']}/blob/main/{link[2]})" if leads_out else link[0]

    return _LINK.sub(replaced, markdown)
