"""``moe-dispatch report``: what a trace or a run came to, as a page that opens anywhere."""

from __future__ import annotations

from pathlib import Path

from moe_dispatch.cli.history import History, history_of, other_shares, recorded_share
from moe_dispatch.cli.page import Table, number, render
from moe_dispatch.errors import TraceError
from moe_dispatch.traces import RunLog, Trace
from moe_dispatch.traces.run_reading import run_files


def write_report(source: str | Path, out: str | Path) -> Path:
    """Write a page on a trace, or on the log of a run.

    Args:
        source: what ``Trace.record`` wrote, the directory that ``RunLog.record`` wrote to, or one with a trace in it.
        out: a directory, made where there is none.

    Returns:
        The page, ``out/index.html``: one file that needs no other.

    Raises:
        TraceError: the source cannot be read, lacks ranks or holds no step; the page cannot be written; matplotlib is
            missing.
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
            f"report: {source} must hold the log of a run, rank0.jsonl and its like, or one trace, got "
            f"{', '.join(traces) or 'neither'}. Name the directory given to RunLog.record, or a trace."
        )
    return _trace_page(source / traces[0])


def _run_page(directory: Path) -> str:
    run = RunLog.load(directory)
    if not run.steps:
        raise TraceError(
            f"report: {directory} must hold a step of every rank, got {', '.join(map(str, run.written))} steps. Call "
            "step() at least once."
        )
    try:  # here, because matplotlib takes a second, and is optional
        from moe_dispatch.cli.run_report import run_page  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return run_page(directory.resolve().name, run)


def _missing(error: ModuleNotFoundError) -> TraceError:
    return TraceError(f"report: {error.name} is missing. Install moe-dispatch[cli].")


def _trace_page(source: Path) -> str:
    trace = Trace.load(source)
    if not trace.calls:
        raise TraceError(f"report: {source} must hold a dispatch, got none. Record at least one step.")
    history = history_of(trace)
    try:  # here, because matplotlib takes a second, and is optional
        from moe_dispatch.cli import costs, loads_over_time  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    recorded, others, timeline = recorded_share(history), other_shares(history), history.timeline
    sections = [
        loads_over_time.load_section(timeline),
        loads_over_time.imbalance_section(timeline),
        costs.padding_section(history, [recorded, *others]),
        costs.bytes_section(history, recorded, others),
        costs.overflow_section(history),
    ]
    return render(f"Routing of {source.name}", [_summary(history)], _facts(history), sections)


def _summary(history: History) -> str:
    imbalance_C = history.timeline.imbalance_C
    worst = int(imbalance_C.argmax())
    where = f"{history.trace.layers[history.layer_C[worst]]}, step {int(history.step_C[worst])}"
    return (
        f"The busiest expert got {float(imbalance_C.mean()):.2f} times the mean of all experts on average, and "
        f"{float(imbalance_C[worst]):.2f} times at worst ({where})."
    )


def _facts(history: History) -> Table:
    trace, config = history.trace, history.trace.config
    rows = [
        ("backend", trace.backend_name),
        ("ranks", str(trace.ep_size)),
        ("experts", str(config.num_experts)),
        ("top_k", str(config.top_k)),
        ("hidden_size", str(config.hidden_size)),
        ("pad_multiple", str(config.pad_multiple)),
        ("graph_safe", str(config.graph_safe)),
        ("dispatchers", str(len(trace.layers))),
        ("steps", str(trace.steps)),
        ("tokens dispatched", number((history.kept_CP - history.masked_CP).sum())),
        *((f"{name} version", version) for name, version in trace.versions.items()),
    ]
    return Table(caption="What was recorded", headings=("", "value"), rows=rows)
