"""Run the conformance kit on one backend, and print its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moe_dispatch_testing import Excuse, Report, check_backend
from moe_dispatch_tools import console
from moe_dispatch_tools.names import NamedBackend


def run(backend: NamedBackend, ep_sizes: Sequence[int], *, verbose: bool, as_json: bool) -> int:
    """Run every case and print the report. The exit status is 0 if the backend conforms, otherwise 1."""
    spec = backend.spec()
    with console.progress(f"conformance of {backend.label}") as show:
        report = check_backend(spec, ep_sizes, on_case=show)
    if as_json:
        console.document({"conforms": report.conforms, "ep_sizes": list(ep_sizes), **dataclasses.asdict(report)})
    else:
        _show(report, ep_sizes, verbose=verbose)
    return 0 if report.conforms else 1


def _show(report: Report, ep_sizes: Sequence[int], *, verbose: bool) -> None:
    for case in report.passed if verbose else ():
        console.line(case, mark="ok")
    by_reason: dict[str, list[Excuse]] = {}
    for excuse in report.excused:
        by_reason.setdefault(excuse.reason, []).append(excuse)
    for reason, excused in by_reason.items():
        ranks = ", ".join(map(str, sorted({excuse.ep_size for excuse in excused})))
        scenarios = dict.fromkeys(excuse.scenario for excuse in excused)
        told = ", ".join(scenarios) if verbose else f"{len(scenarios)} scenario{'s' * (len(scenarios) > 1)}"
        console.line(f"excused by {reason}, on {ranks} {'rank' if ranks == '1' else 'ranks'}: {told}", mark="-")
    for failure in report.failed:
        console.line(f"{failure.case}: {failure.summary}", mark="failed")
        if verbose:
            console.line(failure.error)
    ranks = f"{', '.join(map(str, ep_sizes))} {'rank' if [*ep_sizes] == [1] else 'ranks'}"
    counts = f"{console.counted(len(report.passed), 'case')} passed, {len(report.failed)} failed, on {ranks}"
    verdict = "conforms" if report.conforms else "does not conform"
    console.line(f"backend {report.backend} {verdict}: {counts}", mark="ok" if report.conforms else "failed")
