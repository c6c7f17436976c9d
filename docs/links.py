"""A hook of the site: links to files outside ``docs/`` lead to the repository, if ``REPOSITORY_URL`` is set."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Turn links that lead out of ``docs/`` into links to the repository, or into the path of the file."""
    levels = page.file.src_uri.count("/") + 1

    def replaced(link: re.Match[str]) -> str:
        text, up, path = link.groups()
        if up.count("../") != levels:
            return link[0]
        if config["repo_url"]:
            return f"[{text}]({config['repo_url']}/blob/main/{path})"
        return text if path in text else f"{text} (`{path.partition('#')[0]}`)"

    return _LINK.sub(replaced, markdown)
