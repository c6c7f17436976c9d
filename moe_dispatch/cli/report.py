"""``moe-dispatch report``: what a trace came to, as a page that opens anywhere."""

from __future__ import annotations

from pathlib import Path

from moe_dispatch.cli.history import History, history_of, other_shares, recorded_share
from moe_dispatch.cli.page import Table, number, render
from moe_dispatch.errors import TraceError
from moe_dispatch.traces import Trace


def write_report(source: str | Path, out: str | Path) -> Path:
    """Write a page on a trace.

    Args:
        source: what ``Trace.record`` wrote.
        out: a directory, made where there is none.

    Returns:
        The page, ``out/index.html``: one file that needs no other.

    Raises:
        TraceError: the trace cannot be read, lacks ranks or holds no dispatch; the page cannot be written; matplotlib
            is missing.
    """
    trace = Trace.load(source)
    if not trace.calls:
        raise TraceError(f"report: {source} must hold a dispatch, got none. Record at least one step.")
    page, path = _page(Path(source).name, history_of(trace)), Path(out) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"report: {path} cannot be written: {error.strerror}. Use another directory.") from error
    return path


def _page(name: str, history: History) -> str:
    try:  # here, because matplotlib takes a second, and is optional
        from moe_dispatch.cli import costs, loads_over_time  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise TraceError(f"report: {error.name} is missing. Install moe-dispatch[cli].") from error
    recorded, others = recorded_share(history), other_shares(history)
    sections = [
        loads_over_time.load_section(history),
        loads_over_time.imbalance_section(history),
        costs.padding_section(history, [recorded, *others]),
        costs.bytes_section(history, recorded, others),
        costs.overflow_section(history),
    ]
    return render(f"Routing of {name}", [_summary(history)], _facts(history), sections)


def _summary(history: History) -> str:
    worst = int(history.imbalance_C.argmax())
    where = f"{history.trace.layers[history.layer_C[worst]]}, step {int(history.step_C[worst])}"
    return (
        f"The busiest expert got {float(history.imbalance_C.mean()):.2f} times the mean of all experts on average, and "
        f"{float(history.imbalance_C[worst]):.2f} times at worst ({where})."
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
