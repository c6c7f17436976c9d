"""What is shipped: the files of the sdist, the metadata, and the commands that install an extra."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from moe_dispatch.versions import how_to_install

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# hatchling adds these files to every sdist.
ADDED = {".gitignore", "LICENSE", "README.md", "pyproject.toml"}


def test_sdist_has_every_tracked_file() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    patterns = [
        pattern.removeprefix("/") for pattern in PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    ]
    assert {"mkdocs.yml", "moe_dispatch", "moe_dispatch_testing", "moe_dispatch_tools", "tests"} <= tracked
    assert not {name for name in tracked - ADDED if not any(Path(name).match(pattern) for pattern in patterns)}


def test_no_text_names_an_address_of_a_repository_that_does_not_exist() -> None:
    """Where this project lives is not decided: the site gets ``REPOSITORY_URL``, and the metadata name no address."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    ours = re.compile(r"https?://[\w./-]*moe[-_]dispatch", re.IGNORECASE)
    texts = ((path, (ROOT / path).read_bytes().decode("utf-8", "replace")) for path in listed)
    assert not [path for path, text in texts if ours.search(text)]


def test_extra_is_installed_from_the_checkout(tmp_path: Path) -> None:
    assert how_to_install("cli") == f"In {ROOT}, run: pip install -e '.[cli]'."
    (tmp_path / "moe_dispatch").mkdir()
    assert how_to_install("cli", tmp_path) == "Run: pip install 'moe-dispatch[cli]'.", "site-packages"


def test_commands_name_extras_that_exist_and_no_page_names_an_index() -> None:
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    sources = [*ROOT.glob("moe_dispatch*/**/*.py"), *(ROOT / "examples").glob("*.py")]
    used = {
        name for path in sources for name in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", path.read_text("utf-8"))
    }
    assert used == {"bench", "cli", "trace", "yaml"}
    assert used <= extras
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *sources]
    told = {path.name for path in pages if re.search(r"pip install '?moe-dispatch", path.read_text("utf-8"))}
    assert told <= {"versions.py", "CHANGELOG.md"}
