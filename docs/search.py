"""A hook of the site: its search finds guides first, and leaves out what only those who change the library read."""

from __future__ import annotations

from typing import Any

# By the beginning of a page's path; the first that fits holds. A weight of 0 leaves the page out.
WEIGHTS = {
    "design/": 0.0,
    "reference/moe_dispatch.permutation.": 0.0,
    "reference/moe_dispatch.backends.wire.": 0.0,
    "reference/moe_dispatch.backends.rank_major.": 0.0,
    "reference": 0.3,
    "examples": 0.3,
    "changelog": 0.1,
    "writing-a-backend": 0.5,
    "questions": 2.0,
    "": 1.0,
}


def on_page_markdown(_markdown: str, *, page: Any, **_: Any) -> None:
    """Give the page its weight, as a ``search`` of its front matter would."""
    weight = next(weight for beginning, weight in WEIGHTS.items() if page.file.src_uri.startswith(beginning))
    page.meta["search"] = {"boost": weight} if weight else {"exclude": True}
