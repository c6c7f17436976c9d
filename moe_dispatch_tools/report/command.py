"""Run ``report``: write a page about a trace or about the log of a run."""

from __future__ import annotations

from pathlib import Path

from moe_dispatch.errors import TraceError
from moe_dispatch_tools.report.run_page import run_page
from moe_dispatch_tools.report.trace_page import trace_page
from moe_dispatch_tools.traces import RunLog, Trace
from moe_dispatch_tools.traces.run_log import run_files


def write_report(source: str | Path, out: str | Path) -> Path:
    """Write a page about a trace or about the log of a run.

    Args:
        source: File of ``Trace.record``, directory of ``RunLog.record``, or directory with one trace.
        out: Directory of the page. It is created if it does not exist.

    Returns:
        The path of the page, ``out/index.html``. The page needs no other file.

    Raises:
        TraceError: The source cannot be read, lacks ranks or holds no step, or the page cannot be written.
    """
    page, path = _page(Path(source)), Path(out) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"report: {path} cannot be written: {error.strerror}. Use another directory.") from error
    return path


def _page(source: Path) -> str:
    if not source.is_dir():
        return _trace_page(source)
    if run_files(source):
        return _run_page(source)
    traces = sorted(path.name for path in source.glob("*.safetensors"))
    if len(traces) != 1:
        raise TraceError(
            f"report: {source} must hold the log of a run (rank0.jsonl and so on) or one trace, got "
            f"{', '.join(traces) or 'neither'}. Name the directory that RunLog.record wrote, or a trace."
        )
    return _trace_page(source / traces[0])


def _run_page(directory: Path) -> str:
    run = RunLog.load(directory)
    if not run.steps:
        raise TraceError(
            f"report: {directory} must hold a step of every rank, got {', '.join(map(str, run.written))} steps. Call "
            "step() at least once."
        )
    return run_page(directory.resolve().name, run)


def _trace_page(source: Path) -> str:
    trace = Trace.load(source)
    if not trace.calls:
        raise TraceError(f"report: {source} must hold a dispatch, got none. Record at least one step.")
    return trace_page(source.name, trace)
