"""Run everything that needs a GPU, step by step, and write a report after each: ``make gpu``.

A step that fails or hangs does not take the next one down. A run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu.first_hour.steps import Step, steps

ROOT = Path(__file__).parents[3]
MISSING = (
    "the Python packages that the tests need: pip install pydantic pytest, or make gpu-wheels where there is a network"
)
_PATIENCE = 5  # how much longer a step may take on simulated devices
_TAIL = 4000  # characters of a step's output in the report


def main() -> int:
    """Run the steps. Return 1 if one failed or ran out of time."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first_hour", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "simulated", "cpu"], default="cuda")
    out, sources = os.environ.get("OUT") or ROOT / "out" / "gpu", os.environ.get("SOURCES") or None
    parser.add_argument("--out", type=Path, default=out, help="folder of the report")
    parser.add_argument("--sources", type=Path, default=sources, help="folder with sources of libraries to build")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps alone")
    parser.add_argument("--again", action="store_true", help="run steps again that the report has")
    parser.add_argument("--dry", action="store_true", help="collect the tests of a step, but run none")
    parser.add_argument("--minutes", type=float, default=45, help="time for all steps of this run")
    chosen = parser.parse_args()
    chosen.out = chosen.out.absolute()
    chosen.out.mkdir(parents=True, exist_ok=True)
    known = steps(chosen.sources and chosen.sources.absolute())
    if unknown := {*(chosen.only or ())} - {step.name for step in known}:
        parser.error(f"--only: no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in known)}")
    report = _begin(chosen.out / "report.json", chosen.device)
    end = time.monotonic() + 60 * chosen.minutes
    for step in known:
        done = report["steps"].get(step.name, {}).get("status") not in (None, "not run", "collected")
        if (chosen.only and step.name not in chosen.only) or (done and not chosen.again):
            continue
        broken = report["steps"].get(f"build-{step.library}", {}).get("status", "passed") != "passed"
        if broken and not step.source:
            entry = {"status": "skipped", "reason": f"{step.library} was not built"}
        else:
            entry = _run(step, chosen.device, chosen.out, end - time.monotonic(), dry=chosen.dry)
        report["steps"][step.name] = {"shows": step.shows, **entry}
        _write(report, chosen.out)
        print(f"{step.name}: {_summary(report['steps'][step.name])}", flush=True)
    print(f"The report is {chosen.out / 'report.md'}.")
    return int(any(found["status"] in ("failed", "timed out") for found in report["steps"].values()))


def _begin(path: Path, device: str) -> dict[str, Any]:
    """Return the report so far if it is of this commit and device; otherwise a new one."""
    about = {"commit": _commit(), "device": device}
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        if all(report[name] == value for name, value in about.items()):
            return report
    return {**about, "began": time.strftime("%Y-%m-%d %H:%M:%S"), "steps": {}}


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _run(step: Step, device: Any, out: Path, left: float, *, dry: bool) -> dict[str, Any]:
    """Run one step. Return its entry of the report."""
    limit = min(step.seconds * (_PATIENCE if device == "simulated" else 1), left)
    if limit < 1:
        return {"status": "not run", "reason": "no time was left"}
    begin, log = time.monotonic(), out / f"{step.name}.log"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if step.library:
        paths.insert(0, str(out / "built" / step.library))
    environment = {"TORCH_CUDA_ARCH_LIST": "9.0", **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OUT": str(out)}
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command(device, out, dry=dry),
            cwd=step.source or ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
    text = log.read_text(errors="replace")
    entry: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1), "limit": round(limit)}
    if code is None:
        return {**entry, "status": "timed out", "output": text[-_TAIL:]}
    if code:
        return {**entry, "status": "failed", "exit": code, "output": text[-_TAIL:]}
    if step.source:
        return {**entry, "status": "passed"}
    if step.tests:
        closing = _closing_line(text)
        status = next((status for status in ("passed", "collected") if f" {status}" in closing), "skipped")
        return {**entry, "status": status, "closing": closing}
    # Libraries may warn when the process ends.
    values = next(line for line in reversed(text.splitlines()) if line.startswith("{"))
    return {**entry, "status": "passed", "values": json.loads(values)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _closing_line(text: str) -> str:
    """Return the last line of pytest that counts tests."""
    found = re.findall(
        r"^=*\s*([\d/]+ (?:passed|skipped|failed|deselected|error|tests? collected).*?)\s*=*$", text, re.MULTILINE
    )
    return found[-1] if found else "no tests ran"


def _summary(entry: dict[str, Any]) -> str:
    told = entry.get("closing") or entry.get("reason") or ""
    return ", ".join(filter(None, [entry["status"], told, f"{entry['seconds']} s" if "seconds" in entry else ""]))


def _write(report: dict[str, Any], out: Path) -> None:
    """Write both reports. A run that is killed meanwhile leaves the old ones."""
    for name, text in (("report.json", json.dumps(report, indent=1)), ("report.md", _page(report))):
        part = out / f"{name}.part"
        part.write_text(text + "\n")
        part.replace(out / name)


def _page(report: dict[str, Any]) -> str:
    lines = [
        "# The first hour on a GPU",
        "",
        f"Commit {report['commit']}, device {report['device']}, begun {report['began']}.",
        "",
        "| step | shows | result |",
        "|---|---|---|",
        *(f"| {name} | {entry['shows']} | {_summary(entry)} |" for name, entry in report["steps"].items()),
    ]
    for name, entry in report["steps"].items():
        if "values" in entry:
            lines += ["", f"## {name}", "", "| what | value |", "|---|---|"]
            lines += [f"| {key} | {value} |" for key, value in entry["values"].items()]
        elif "output" in entry:
            lines += ["", f"## {name}: {entry['status']}", "", "```", entry["output"].rstrip(), "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        import pydantic  # noqa: F401
        import pytest  # noqa: F401
    except ImportError as error:
        sys.exit(f"python -m tests.gpu.first_hour must find {MISSING}, got: {error}.")
    sys.exit(main())
