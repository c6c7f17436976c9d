"""torchrun on two hosts: the demo, the conformance kit, and links that are slow, lose packets, or are cut."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_dispatch_testing.kit import describe
from moe_dispatch_tools.traces import RunLog, Trace
from tests.multihost.hosts import Host, Job, Link, Result, make_hosts, missing
from tests.multihost.job import BACKENDS, KIT

ROOT = Path(__file__).parents[2]
JOB = str(Path(__file__).with_name("job.py"))
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
# The two ways of the page to start torchrun, each with HOST replaced.
C10D, STATIC = (line.replace("HOST", "host0") for line in re.findall(r"^torchrun --nnodes 2 .*$", PAGE, re.MULTILINE))
SLOW = Link(delay_ms=20, loss=0.01)
FAR = Link(delay_ms=20)
# Far below the group timeouts of these tests. Reading the notes of the ranks and ending torchrun take the rest.
WATCHDOG_S, ENDS_WITHIN_S = 5, 40

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


def start(hosts: Sequence[Host], line: str, directory: Path, **environment: str) -> Job:
    """Run a line of the page on all hosts, in a folder that has the examples as the checkout has."""
    for host in hosts:
        (directory / host.name).mkdir(parents=True)
        (directory / host.name / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Job(hosts, ["sh", "-c", line], directory, {"PATH": path, "PYTHONPATH": python_path, **environment})


def replaced(line: str, script: str) -> str:
    """The line with another script, and two ranks on each host."""
    options = shlex.split(line)[: shlex.split(line).index("examples/train_packed_text.py")]
    options[options.index("--nproc-per-node") + 1] = "2"
    return " ".join([*options, script])


def expect_success(results: Sequence[Result]) -> str:
    """Check the exit status on all hosts, and return what they wrote."""
    output = "\n".join(result.output for result in results)
    assert [result.status for result in results] == [0] * len(results), output
    return output


@pytest.mark.slow
def test_the_first_line_of_the_page_trains_the_demo(tmp_path: Path) -> None:
    with make_hosts(2) as hosts:
        results = start(hosts, C10D, tmp_path).results(400)
    expect_success(results)
    assert "8 ranks over gloo" in results[0].output
    assert "alltoall: the loss falls by" in results[0].output
    assert (tmp_path / "host0" / "out" / "train_packed_text.png").is_file()
    assert not (tmp_path / "host1" / "out").exists(), "rank 0 draws"


@pytest.mark.slow
@pytest.mark.parametrize("line", [C10D, STATIC], ids=["c10d", "static"])
def test_both_lines_find_the_other_host(line: str, tmp_path: Path) -> None:
    with make_hosts(2) as hosts:
        results = start(hosts, replaced(line, f"{JOB} steps 60 2"), tmp_path).results(90)
    assert expect_success(results).count(": 2 ranks per node") == 4
    assert "rank 3: step 1\n" in results[1].output


@pytest.mark.slow
def test_conformance_kit_over_a_slow_link(tmp_path: Path) -> None:
    with make_hosts(2, SLOW) as hosts:
        results = start(hosts, replaced(C10D, f"{JOB} kit"), tmp_path).results(240)
    passed = re.findall(r"^passed (.+) (\w+)$", expect_success(results), re.MULTILINE)
    assert sorted(passed) == sorted((describe(backend), name) for backend in BACKENDS for name in KIT)


@pytest.mark.slow
def test_two_legs_send_a_row_once_over_the_link(tmp_path: Path) -> None:
    """The link carries the bytes of the formula, with nodes found by host name or configured."""
    with make_hosts(2, Link(megabits=1000, delay_ms=1)) as hosts:
        results = start(hosts, replaced(STATIC, f"{JOB} nodes 60 5"), tmp_path).results(150)
    measured = [json.loads(line) for line in re.findall(r"measured (.*)$", expect_success(results), re.MULTILINE)]
    assert [each["legs"] for each in measured] == [{"1": 1, "2": 2, "2, configured": 2}] * 4
    payload = {name: sum(each["payload"][name] for each in measured) for name in ("1", "2")}
    link = {
        name: sum(each["link"][name] for each in measured) / 2 for name in measured[0]["link"]
    }  # two ranks, one link
    for name, nbytes in link.items():
        assert payload[name[0]] < nbytes < 1.1 * payload[name[0]]
    assert payload["2"] < 0.7 * payload["1"]
    print("seconds", measured[0]["seconds"], "bytes on both links", link, "of rows", payload)


@pytest.mark.slow
def test_gloo_needs_the_interface_where_the_own_name_is_a_loopback_address(tmp_path: Path) -> None:
    line = replaced(C10D, f"{JOB} steps 10 1")
    with make_hosts(2, own_address="127.0.1.1") as hosts:
        refused = start(hosts, line, tmp_path / "without").results(40)
        results = start(hosts, line, tmp_path / "with", GLOO_SOCKET_IFNAME="eth0").results(90)
    assert 0 not in [result.status for result in refused]
    output = refused[0].output + refused[1].output
    for quoted in ("Gloo connectFullMesh failed with", "Connection refused, remote=[127.0.1.1]"):
        assert quoted in PAGE
        assert quoted in output
    assert expect_success(results).count(": step 0\n") == 4


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_watchdog_bears_delay_and_loss(loss: float, tmp_path: Path) -> None:
    with make_hosts(2, Link(delay_ms=20, loss=loss)) as hosts:
        job = start(hosts, replaced(C10D, f"{JOB} steps 60 20"), tmp_path, MOE_DISPATCH_WATCHDOG=str(WATCHDOG_S))
        results = job.results(150)
    expect_success(results)
    assert load_log(tmp_path).tokens_SE.shape == (20, 8)


def load_log(directory: Path) -> RunLog:
    """The log of all ranks, which the hosts hold in parts. Every line of it is whole."""
    whole = directory / "whole"
    for file in directory.glob("host?/run/*.jsonl"):
        whole.mkdir(exist_ok=True)
        shutil.copy(file, whole)
        for line in file.read_text(encoding="utf-8").splitlines():
            json.loads(line)
    return RunLog.load(whole)


def cut_in_a_step(
    line: str, directory: Path, limit: float, *, sign: str = "rank 0: step 8", **environment: str
) -> tuple[list[Result], float]:
    """Cut the link of host1 after rank 0 has written a sign; return the results, and the seconds from cut to end."""
    with make_hosts(2, FAR) as hosts:
        job = start(hosts, line, directory, **environment)
        job.wait_for(sign, hosts[0], 90)
        hosts[1].cut()
        begin = time.monotonic()
        results = job.results(limit)
        seconds = time.monotonic() - begin
    print(*(f"{result.host}: status {result.status}" for result in results), f"{seconds:.1f} s after the cut")
    return results, seconds


@pytest.mark.slow
def test_watchdog_names_the_host_behind_a_cut_link(tmp_path: Path) -> None:
    line = replaced(STATIC, f"{JOB} steps 600 100000")
    results, _ = cut_in_a_step(line, tmp_path, ENDS_WITHIN_S, MOE_DISPATCH_WATCHDOG=str(WATCHDOG_S))
    assert [result.status for result in results] == [1, 1], results[0].output + results[1].output
    assert re.search(r"LostPeerError: Watchdog: .* ranks 2, 3 on host1: ", results[0].output)
    assert re.search(
        r"LostPeerError: Watchdog: .* no answer from the store of the process group on host0\. ", results[1].output
    )
    assert load_log(tmp_path).tokens_SE.shape[0] >= 8


@pytest.mark.slow
def test_timeout_of_the_group_ends_a_job_without_watchdog(tmp_path: Path) -> None:
    results, seconds = cut_in_a_step(replaced(STATIC, f"{JOB} steps 15 100000"), tmp_path, 60)
    assert [result.status for result in results] == [1, 1], results[0].output + results[1].output
    assert seconds >= 10
    assert "Timed out waiting 15000ms" in results[0].output
    assert load_log(tmp_path).tokens_SE.shape[0] >= 8


@pytest.mark.slow
def test_torchrun_with_c10d_ends_when_tcp_gives_up(tmp_path: Path) -> None:
    """Its agent on host1 asks the store on host0 without a time limit of its own."""
    assert "sysctl -w net.ipv4.tcp_retries2=8" in PAGE
    line = f"echo 5 >/proc/sys/net/ipv4/tcp_retries2; {replaced(C10D, f'{JOB} steps 5 100000')}"
    results, _ = cut_in_a_step(line, tmp_path, 90)
    assert [result.status for result in results] == [1, 1], results[0].output + results[1].output


@pytest.mark.slow
def test_demo_leaves_nothing_half_written_behind_a_cut_link(tmp_path: Path) -> None:
    """The gradients of the demo travel outside of the library, so the timeout of its group may end it: two minutes."""
    line = replaced(STATIC, "-- examples/train_packed_text.py")
    arguments = "--backend alltoall --steps 10000 --run run --trace routing.safetensors"
    limited = {"MOE_DISPATCH_WATCHDOG": str(WATCHDOG_S)}
    results, _ = cut_in_a_step(f"{line} {arguments}", tmp_path, 180, sign="step   8, loss", **limited)
    assert [result.status for result in results] == [1, 1], results[0].output + results[1].output
    assert load_log(tmp_path).tokens_SE.shape[0] >= 8
    parts = [Trace.load(path) for path in tmp_path.glob("host?/routing.rank?.safetensors")]
    assert parts, "a rank that fails writes the part of the trace that it has"
    assert all(len(part.calls) >= 16 for part in parts), "two layers"
    assert not list(tmp_path.glob("host?/routing.safetensors")), "rank 0 writes the whole trace at the end"
    assert not list(tmp_path.glob("host?/out")), "rank 0 draws at the end"
