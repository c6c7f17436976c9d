"""Make constraints.txt: the versions that pip chooses together for everything that the Makefile installs.

    make constraints                                  # keep all versions that still fit, add what is new, drop the rest
    make constraints ARGS="--upgrade transformers"    # let pip choose these again, and what they need
    make constraints ARGS="--upgrade all"             # let pip choose everything again but what is held back

Nothing is installed. pip resolves with the Python that runs this file, which should be the lowest that is supported.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "constraints.txt"
# What the Makefile installs, in one resolution.
REQUIREMENTS = (".[dev,docs,bench,ray-example]", "build", "hatchling", "twine", "hjson", "ninja", "py-cpuinfo")
# Packages that pip cannot resolve with the others: their newest release is asked for by name. deepspeed needs the last
# three of REQUIREMENTS.
ALONE = ("deepspeed", "megatron-core")
# Not upgraded by "all": builds of other packages belong to them.
HELD = ("torch", "torchao", "triton")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parsed(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the comments of a constraints file, and its versions by name."""
    comments = [line for line in text.splitlines() if line.startswith("#")]
    pins = dict(line.split("==", 1) for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return comments, {canonical(name): version.split("+")[0] for name, version in pins.items()}


def kept(pins: dict[str, str], upgrade: Iterable[str]) -> dict[str, str]:
    """Return the versions that pip must take again."""
    names = {canonical(name) for name in upgrade}
    if unknown := names - pins.keys() - {"all"}:
        raise SystemExit(f"constraints: constraints.txt must have the packages to upgrade, got {', '.join(unknown)}.")
    if "all" in names:
        names |= pins.keys() - set(HELD)
    return {name: version for name, version in pins.items() if name not in names}


def chosen(report: str) -> dict[str, str]:
    """Return the versions by name in the report of a dry run of pip."""
    installs = [each["metadata"] for each in json.loads(report)["install"]]
    found = {canonical(each["name"]): each["version"].split("+")[0] for each in installs}
    return {name: found[name] for name in found if name not in ("moe-dispatch", "setuptools")}


def newest(index: str) -> str:
    """Return the newest release in what ``pip index versions`` prints."""
    return re.search(r"\((.+?)\)", index).group(1)  # type: ignore[union-attr]


def text_of(comments: list[str], pins: dict[str, str]) -> str:
    return "\n".join([*comments, *(f"{name}=={pins[name]}" for name in sorted(pins))]) + "\n"


def _pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", nargs="*", default=[], metavar="NAME", help="packages to choose again, or all")
    comments, before = parsed(FILE.read_text(encoding="utf-8"))
    keep = kept(before, parser.parse_args().upgrade)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        constraints.write(text_of([], {name: keep[name] for name in keep if name not in ALONE}))
        constraints.flush()
        dry = ("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", "--constraint")
        after = chosen(_pip(*dry, constraints.name, *REQUIREMENTS))
    for name in ALONE:
        after[name] = keep.get(name) or newest(_pip("index", "versions", "--ignore-requires-python", name))
    FILE.write_text(text_of(comments, after), encoding="utf-8")
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'new')} -> {after.get(name, 'dropped')}")


if __name__ == "__main__":
    main()
