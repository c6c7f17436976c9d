"""Check the wheel and the sdist in ``dist/``, and use the wheel as somebody who has no checkout: ``make release``.

For each pair of Python and torch (the lowest, the pinned and the highest that are supported), the wheel is installed
into an environment in a temporary folder. There run the import, the quickstart of the README on two ranks, ``doctor``,
and the conformance kit. What the programs print goes to ``out/release``.
"""

from __future__ import annotations

import argparse
import datetime
import email
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import moe_dispatch
from moe_dispatch.versions import SUPPORT
from tests.matrix.run import NotRun, find_python, last_line, run

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "out" / "release"
VERSION = moe_dispatch.__version__
WHEEL = ROOT / "dist" / f"moe_dispatch-{VERSION}-py3-none-any.whl"
SDIST = ROOT / "dist" / f"moe_dispatch-{VERSION}.tar.gz"
PINNED = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)[1]  # type: ignore[index]
PAIRS = (
    (SUPPORT["Python"].tested[0], SUPPORT["torch"].tested[0]),
    (f"{sys.version_info.major}.{sys.version_info.minor}", PINNED),
    (SUPPORT["Python"].tested[-1], SUPPORT["torch"].tested[-1]),
)
LARGEST_WHEEL = 1_000_000  # bytes
CONFORMS = (
    ("local", "1"),
    *((backend, "1,2") for backend in ("alltoall", "allgather")),
    *((f"{backend}+emulate=true", "2") for backend in ("deepep", "hybridep")),
)
IMPORT = """
import sys, time
begin = time.perf_counter()
import moe_dispatch
seconds = time.perf_counter() - begin
assert "torch" not in sys.modules, "import moe_dispatch imports torch"
assert "site-packages" in moe_dispatch.__file__, moe_dispatch.__file__
print(f"import moe_dispatch {moe_dispatch.__version__}: {1000 * seconds:.0f} ms, without torch")
"""


def faults() -> list[str]:
    """Return what is wrong with the version, the CHANGELOG and the two archives."""
    with zipfile.ZipFile(WHEEL) as wheel:
        names = wheel.namelist()
        info = f"moe_dispatch-{VERSION}.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        licence = wheel.read(f"{info}/licenses/LICENSE") if f"{info}/licenses/LICENSE" in names else b""
    with tarfile.open(SDIST) as sdist:
        shipped = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    needs = {need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need}
    section = re.search(
        r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    packages = {"moe_dispatch", "moe_dispatch_testing", "moe_dispatch_tools"}
    checks = {
        f"the newest section of the CHANGELOG must be [{VERSION}] with a date": section is not None
        and (section[1] == VERSION or ".dev" in VERSION)
        and datetime.date.fromisoformat(section[2]) <= datetime.datetime.now(datetime.UTC).date(),
        "the wheel must hold the three packages and nothing else": {name.partition("/")[0] for name in names}
        == {*packages, info},
        "the wheel must hold neither tests nor docs": not [n for n in names if re.search(r"(^|/)(tests|docs)/", n)],
        "the wheel must hold the licence": licence == (ROOT / "LICENSE").read_bytes(),
        "the metadata must name the version": metadata["Version"] == VERSION,
        "the wheel must say that it has types": "moe_dispatch/py.typed" in names,
        "the metadata must name the licence": metadata["License-Expression"] == "Apache-2.0",
        "the metadata must name the lowest Python": metadata["Requires-Python"] == f">={SUPPORT['Python'].lowest}",
        "without an extra, torch and pydantic are needed, and nothing else": needs
        == {f"torch>={SUPPORT['torch'].lowest}", "pydantic>=2"},
        f"the wheel must have at most {LARGEST_WHEEL} bytes": WHEEL.stat().st_size <= LARGEST_WHEEL,
        "the sdist must hold the packages, the tests, the docs and the Makefile": {
            *packages,
            "tests",
            "docs",
            "Makefile",
        }
        <= shipped,
    }
    return [told for told, holds in checks.items() if not holds]


def use(python: str, torch: str, options: argparse.Namespace) -> str:
    """Install the wheel with one pair of Python and torch, use it, and return the last line."""
    log = LOGS / f"py{python}-torch{torch}.log"
    log.unlink(missing_ok=True)
    interpreter = find_python(python, options.python)
    with tempfile.TemporaryDirectory(prefix="moe-dispatch-release-") as folder:
        outside = Path(folder)
        with tarfile.open(SDIST) as sdist:
            sdist.extractall(outside, filter="data")
        quickstart = outside / "quickstart.py"
        shutil.copy(outside / SDIST.name.removesuffix(".tar.gz") / "examples" / "quickstart.py", quickstart)
        binaries = outside / "env" / "bin"
        pip = [str(binaries / "python"), "-m", "pip"]
        steps = [
            [interpreter, "-m", "venv", str(outside / "env")],
            [*pip, "install", "--no-cache-dir", f"torch=={torch}"],
            [*pip, "install", f"{WHEEL}[cli]"],
            [*pip, "check"],
            [str(binaries / "python"), "-c", IMPORT],
            [str(binaries / "torchrun"), "--nproc-per-node", "2", str(quickstart)],
            [str(binaries / "moe-dispatch"), "doctor"],
            *([str(binaries / "moe-dispatch"), "check", name, "--ep", sizes] for name, sizes in CONFORMS),
        ]
        for step in steps:
            if run(step, log, options.minutes, cwd=outside):
                raise NotRun(f"{' '.join(step[1:4]).splitlines()[0]}: {last_line(log)} See {log.relative_to(ROOT)}.")
    return next(line for line in log.read_text("utf-8").splitlines() if line.startswith("import moe_dispatch "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a pair's name, such as py3.11")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to use; may be repeated")
    parser.add_argument("--minutes", type=float, default=20, help="time limit of each command (default: 20)")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # what runs below must not see the checkout
    pairs = [(python, torch) for python, torch in PAIRS if options.only in f"py{python} torch {torch}"]
    if not pairs:
        parser.error(f"--only {options.only} must be part of a pair's name, such as py{PAIRS[0][0]}")
    wrong = faults()
    print("\n".join(wrong) or f"{WHEEL.name}: {WHEEL.stat().st_size} bytes; {SDIST.name}: {SDIST.stat().st_size} bytes")
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = bool(wrong)
    for python, torch in pairs:
        try:
            told = f"{use(python, torch, options)}; quickstart, doctor, kit: passed"
        except NotRun as error:
            failed, told = True, f"failed: {error}"
        print(f"py{python} torch {torch}: {told}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
