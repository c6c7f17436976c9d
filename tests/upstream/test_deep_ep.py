"""DeepEP's own test files, run on the emulation. They need a clone of DeepEP, and are skipped without one.

DEEP_EP_SOURCE names the clone, for example ``git clone --mirror https://github.com/deepseek-ai/DeepEP``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dispatch_testing.emulation.signatures import recorded

VARIABLE = "DEEP_EP_SOURCE"
ELASTIC = (
    "--num-tokens=16",
    "--hidden=512",
    "--num-topk=4",
    "--num-experts=16",
    "--skip-perf-test",
    "--test-first-only",
)
HYBRID = {
    "HIDDEN_DIM": "512",
    "MAX_NUM_OF_TOKENS_PER_RANK": "128",
    "NUM_TOKENS_PER_RANK": "128",
    "TOPK": "4",
    "NUM_LOCAL_EXPERTS": "8",
}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "v1.2.1": ("tests/test_intranode.py", ("--num-tokens=32", "--hidden=256", "--num-topk=4", "--num-experts=16")),
    "v2-2.1.0": ("tests/elastic/test_ep.py", ELASTIC),
    "v2.5.0": ("tests/ep/test_ep.py", ELASTIC),
    "hybridep-94a9f8f": ("tests/test_hybrid_ep.py", ()),
    "hybridep-746": ("tests/test_ragged_hybrid_ep.py", ()),
}


def checked_out(release: str, folder: Path) -> None:
    """Write the files of a release's commit to a folder, or skip the test."""
    source = os.environ.get(VARIABLE)
    if not source:
        pytest.skip(f"{VARIABLE} names no clone of DeepEP")
    commit = recorded(release)["source"]["commit"]
    git = ["git", "-C", source]
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"the clone of DeepEP has no commit {commit[:10]}")
    archive = subprocess.run([*git, "archive", commit, "tests", "deep_ep"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


@pytest.mark.parametrize("release", CASES)
def test_test_file_of_deep_ep_passes(release: str, tmp_path: Path) -> None:
    checked_out(release, tmp_path)
    file, arguments = CASES[release]
    try:
        compile((tmp_path / file).read_text(), file, "exec")
    except SyntaxError as error:
        pytest.skip(f"{file} of {release} needs a later Python: {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment = {**os.environ, **HYBRID, "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.upstream.on_cpu",
                *(str(tmp_path), release, file, str(rank), "--num-processes=2", *arguments),
            ],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-3000:] for text in told)
