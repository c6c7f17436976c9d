"""Run ``report``: write a page about a trace or about the log of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from moe_dispatch.errors import TraceError
from moe_dispatch_tools.report.sections import run_content, trace_content
from moe_dispatch_tools.traces import RunLog, Trace


def write_report(source: str | Path, out: str | Path) -> Path:
    """Write a page about a trace or about the log of a run.

    Args:
        source: File of ``Trace.record``, or directory of ``RunLog.record``.
        out: Directory of the page. It is created if it does not exist.

    Returns:
        The path of the page, ``out/index.html``. The page needs no other file.

    Raises:
        TraceError: The source cannot be read, lacks ranks or holds no step, or the page cannot be written.
    """
    page, path = render(_content(Path(source))), Path(out) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"report: {path} cannot be written: {error.strerror}. Use another directory.") from error
    return path


def render(content: dict[str, Any]) -> str:
    """Render the page as one HTML file that loads no other file and has no scripts.

    Args:
        content: The title, paragraphs (``intro``), ``settings`` by name, and ``sections``. A section has a heading,
            paragraphs, pictures, and tables whose cells are texts and numbers.
    """
    environment = Environment(
        loader=PackageLoader("moe_dispatch_tools", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    return environment.get_template("page.html").render(content).lstrip() + "\n"


def _cell(value: str | float | None) -> str:
    """Format a cell: counts with narrow no-break spaces between groups of three digits, others with four digits."""
    if value is None:
        return "-"
    if isinstance(value, int) or (isinstance(value, float) and value >= 1000):
        return f"{int(value):,}".replace(",", "\u202f")
    return value if isinstance(value, str) else f"{value:.4g}"


def _content(source: Path) -> dict[str, Any]:
    if source.is_dir():
        run = RunLog.load(source)
        if not run.steps:
            raise TraceError(
                f"report: {source} must hold a step of every rank, got {', '.join(map(str, run.written))} steps. Call "
                "step() at least once."
            )
        return run_content(source.resolve().name, run)
    if source.match("rank*.jsonl"):
        raise TraceError(f"report: pass the directory of the run, {source.parent}, not the file of one rank, {source}.")
    return trace_content(source.name, Trace.load_whole(source, "report"))
