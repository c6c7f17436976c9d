"""The command as a whole: its help, its errors, what it imports."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import moe_dispatch_tools
from moe_dispatch import __version__
from moe_dispatch.backends import known_backends
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import RankFailed
from moe_dispatch_tools import console
from moe_dispatch_tools.app import app
from moe_dispatch_tools.place import Place
from moe_dispatch_tools.ranks import Send, num_ranks, on_ranks
from tests.cli.conftest import Command
from tests.cli.processes import hearing_interrupts, members, wait_for

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "check", "plan", "compare", "prove", "report")


def start(*arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """The real thing, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "moe_dispatch_tools", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The config of a model of transformers."""
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 256, "num_hidden_layers": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_moe", "torch_dtype": "bfloat16", **sizes}))
    return str(path)


def test_version_and_help(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.match(rf"moe-dispatch {re.escape(__version__)}, Python [\d.]+, torch \d", command("--version").out)
    answer = command("--help")
    assert answer.status == 0
    assert all(re.search(rf"^  {name} ", answer.out, re.MULTILINE) for name in COMMANDS)
    assert "--install-completion" in answer.out
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        pages = [command(*name, "--help").out for name in ([], *([name] for name in COMMANDS))]
        assert not re.findall(r"\w+-$", "\n".join(pages), re.MULTILINE), "no word breaks at its hyphen"
    for name in COMMANDS:
        examples = re.findall(rf"^ *(moe-dispatch {name}.*)$", command(name, "--help").out, re.MULTILINE)
        assert len(examples) >= 3
        assert all(example.count("moe-dispatch") == 1 for example in examples), "one a line"


def test_tables_fit_a_line_and_name_their_rows_again(
    command: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = command("plan", model, "--tokens", "64").out
    rows = [line for line in out.splitlines() if line.startswith(" ")]
    assert max(map(len, rows)) <= 60
    assert max(map(len, re.findall(r"^Mean of one micro-batch .*|^Graph-safe mode: .*", out, re.MULTILINE))) <= 60
    assert sum(line.startswith(" allgather ") for line in rows) == 3, "what is sent in two tables, and sizes"
    assert all(word in out for word in ("forward", "backward", "max step", "other"))


def test_command_that_takes_time_says_so_on_a_terminal(model: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-m", "moe_dispatch_tools", "plan", model, "--tokens", "64", "-b", "alltoall"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        timeout=100,
    )
    os.close(theirs)
    assert "count the rows" in os.read(ours, 10_000).decode()
    os.close(ours)
    assert b"count the rows" not in process.stdout


def test_command_that_takes_time_says_so_in_a_log_too(command: Command, model: str) -> None:
    answer = command("plan", model, "--tokens", "64", "-b", "alltoall", "--json")
    assert answer.error == "count the rows of dispatches ...\n"
    assert answer.out.startswith("{")


@pytest.mark.usefixtures("third_party")
def test_shell_completes_choices() -> None:
    """Also the backends of other packages, which are not imported."""
    for words, expected in {
        "": COMMANDS,
        "doctor --backend ": known_backends(),
        "doctor -b r": ("reef",),
        "check a": ("allgather", "alltoall", "alltoall_by_node"),
        "plan c.yaml -b alltoall,": [f"alltoall,{name}" for name in known_backends() if name != "alltoall"],
        "compare c.yaml --backends lo": ("local",),
    }.items():
        assert completions(words) == [*expected]


def completions(words: str) -> list[str]:
    """Complete the last word, as bash asks for it."""
    typed = ["moe-dispatch", *words.split(" ")]
    asked = {"COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    answer = CliRunner().invoke(app, prog_name="moe-dispatch", env={**asked, "_MOE_DISPATCH_COMPLETE": "complete_bash"})
    return answer.stdout.split()


HELP = """
import contextlib, io, os, sys
from moe_dispatch_tools import main

def call(*arguments):
    sys.argv = ["moe-dispatch", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    return out.getvalue()

assert all("Options:" in call(*name.split(), "--help") for name in ("", *NAMES))
os.environ |= {"_MOE_DISPATCH_COMPLETE": "complete_bash", "COMP_WORDS": "moe-dispatch doctor -b ", "COMP_CWORD": "3"}
assert "alltoall" in call()
assert {"torch", "matplotlib"}.isdisjoint(sys.modules), "help and completion are slow"
""".replace("NAMES", repr(COMMANDS))
RANKS = """
import importlib, sys
import moe_dispatch_tools.doctor.self_tests, moe_dispatch_tools.compare.measurement

assert {"typer", "rich", "matplotlib"}.isdisjoint(sys.modules), "a rank loads packages of the command line"
sys.argv = ["moe-dispatch", "report", "run.safetensors"]
for missing in moe_dispatch_tools.EXTRA:
    for name in [name for name in sys.modules if name.partition(".")[0] == "moe_dispatch_tools"]:
        del sys.modules[name]
    sys.modules[missing] = None
    assert importlib.import_module("moe_dispatch_tools").main() == 2
    del sys.modules[missing]
"""


def errors_of(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


def test_help_and_completion_import_neither_torch_nor_matplotlib() -> None:
    assert errors_of(HELP) == ""


@pytest.mark.slow
def test_ranks_load_no_package_of_the_command_line_and_a_missing_one_is_named() -> None:
    for missing, told in zip(moe_dispatch_tools.EXTRA, errors_of(RANKS).splitlines(), strict=True):
        pattern = (
            rf"Error: moe-dispatch needs {missing}.*, which is not installed\. In .*, run: pip install -e '\.\[cli\]'\."
        )
        assert re.fullmatch(pattern, told)


# MODEL is a file with 16 experts and top-4.
REFUSED = [
    ("doctor -b altoall", r"Unknown backend 'altoall'\. Known backends: .*Did you mean 'alltoall'\?"),
    ("doctor -b alltoall+reduction=exact", r"must be a name without options, .* Write --backend alltoall, or"),
    ("check altoall", r"Unknown backend 'altoall'\. .*Did you mean 'alltoall'\?"),
    ("check no_such_package:B", r"importing 'no_such_package' raised ModuleNotFoundError"),
    ("check tests.cli.planted:None", r"'None' of tests.cli.planted must be a subclass of .*Options, got None"),
    ("check tests.cli.planted:Tensor", r"must be a subclass of .*BackendOptions, got <class 'torch.Tensor'>"),
    ("check alltoall+reduction", r"options must be written NAME\+OPTION=VALUE, got 'reduction'"),
    ("check alltoall+speed=2", r"speed: Extra inputs.*Its options: reduction, pair_rows"),
    ("check local --ep 1,zero", r"--ep must be whole numbers from 1 on, .* got '1,zero'"),
    ("compare MODEL --dtype float8", r"--dtype must be one of .*, got 'float8'"),
    ("compare MODEL --routing zipf", r"--routing must be one of .*, got 'zipf'"),
    ("compare MODEL --mode eager,fast", r"--mode must be one of .*, got 'fast'"),
    ("compare MODEL -b alltoall,depep", r"Unknown backend 'depep'.*Did you mean 'deepep'\?"),
    ("compare MODEL -b alltoall+graph_safe.capacity_factor=0", r"capacity_factor"),
    ("compare MODEL -b alltoall,transformers", r"The peer 'transformers' is not installed"),
    ("compare MODEL -b alltoall+balance.bound=1.1", r'balance: a mapping must have "name"'),
    ("compare MODEL -b alltoall+balance=x+balance.spare_experts_per_rank=1", r"Unknown planner 'x'"),
    ("compare MODEL --tokens 64,-1", r"--tokens must be whole numbers from 0 on, .* got '64,-1'"),
    ("compare MODEL --picture compare.jpg", r"--picture must .*end in .png or .svg, got 'compare.jpg'"),
    ("compare MODEL --picture nowhere/now.png", r"--picture must be a file in a folder that can be written"),
    ("plan MODEL", r"the number of rows of a rank is not given"),
    (
        "plan MODEL --tokens 4 --set pad=3",
        r"--set must be FIELD=VALUE or FIELD.OPTION=VALUE, got 'pad=3'\. Fields: backend, ",
    ),
    ("plan MODEL --tokens 4 --set top_k", r"--set must be FIELD=VALUE or .*, got 'top_k'"),
    ("plan MODEL --tokens 4 --routing none.safetensors", r"none.safetensors must be an existing"),
    ("plan MODEL --tokens 4 --ep 8 --nodes 3", r"plan: ep \(8\) must be divisible by nodes \(3\)"),
    ("plan MODEL --tokens 4 -b altoall", r"Unknown backend 'altoall'"),
    ("report out/run/rank0.jsonl", r"report: pass the directory of the run, out/run, not the file of one rank"),
    ("plan MODEL --tokens 4 --ep 3", r"num_experts \(16\) must be divisible by ep_size \(3\)"),
    ("plan MODEL --tokens 4 -b alltoall+balance=exact", r"balance: Extra inputs are not permitted"),
]


@pytest.mark.usefixtures("no_peers")
@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_wrong_requests_are_refused(words: str, told: str, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"num_experts": 16, "top_k": 4, "hidden_size": 64}')
    answer = command(*words.replace("MODEL", str(model)).split())
    assert (answer.status, answer.out) == (2, "")
    assert answer.error.startswith(("Error: ", "CONFIG is", "random")), "nothing begins before it is refused"
    assert re.search(f"^Error: .*{told}", answer.error, re.MULTILINE), answer.error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("doctor --bakend alltoall", "--bakend"),
        ("check alltoall --ep 1 --ep=2", "--ep is given more than once. Write --ep 1,2.\n"),
        ("compare -b local --backends alltoall", "given more than once. Write --backends local,alltoall.\n"),
        ("doctor -b local --backend alltoall --ranks 1", "--backend is given more than once.\n"),
        ("plan config.json --ep 1 --ep 2", "--ep is given more than once.\n"),
    ],
)
def test_wrong_usage_and_options_given_twice_are_refused(words: str, told: str, command: Command) -> None:
    answer = command(*words.split())
    assert (answer.status, answer.out) == (2, "")
    assert told in answer.error


@pytest.mark.slow
def test_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal's group."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("processes are counted in /proc")
    config = tmp_path / "config.json"
    config.write_text('{"num_experts": 4, "top_k": 2, "hidden_size": 32}')
    with hearing_interrupts():
        process = start("compare", "-b", "alltoall", str(config), "--ranks", "2", "--steps", "100000")
    try:
        wait_for(lambda: len(members(process.pid)) >= 3 or process.poll() is not None, seconds=240)
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=240)
        assert (process.returncode, out, error) == (130, "", "Error: interrupted, all ranks are ended.\n")
        wait_for(lambda: not members(process.pid))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


UNDER_TORCHRUN = """
from moe_dispatch_tools.ranks import PeerFailed, on_ranks, this_rank
from moe_dispatch_testing import RankFailed

def body(place, send):
    send(place.rank)
    if place.size == 2 and place.rank == 1:
        raise ArithmeticError("planted on rank 1")
    place.sum(__import__("torch").ones(1))

try:
    on_ranks(body, 2, lambda message: print("heard", message, flush=True))
except RankFailed as failure:
    print("told", str(failure).replace("\\n", " "), flush=True)
except PeerFailed:
    print("silent on", this_rank(), flush=True)
"""


def raising_rank(place: Place, send: Send) -> None:
    if place.rank == 1:
        raise ArithmeticError("planted on rank 1")
    place.sum(torch.ones(1))


@pytest.mark.slow
def test_rank_of_torchrun_that_fails_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = sorted(finished.stdout.splitlines())
    assert [line.split()[0] for line in lines] == ["heard", "silent", "told"], finished.stdout
    assert lines[0] == "heard 0"
    assert lines[1] == "silent on 0"
    assert lines[2].startswith("told rank 1 of 2: Traceback")
    assert lines[2].strip().endswith("ArithmeticError: planted on rank 1")


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the variables that an operator of Kubernetes sets in a pod, and further ones. Ranks wait for 0.2 s."""
    monkeypatch.setattr("moe_dispatch_tools.place.TIMEOUT", timedelta(seconds=0.2))

    def set_all(**environment: str) -> None:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **environment}.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("environment", "kind", "told"),
    [
        ({"LOCAL_RANK": "1"}, ConfigError, "must be set together, got only LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "2"}, ConfigError, "got only LOCAL_WORLD_SIZE"),
        ({}, RankFailed, r"rank 0 of 2 cannot join .*MASTER_ADDR expected, but not set\. Start .*; or unset RANK"),
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, RankFailed, "rank 1 of 2 cannot join the"),
    ],
)
def test_rank_in_a_pod_that_meets_nobody(
    environment: dict[str, str], kind: type[Exception], told: str, in_a_pod: Callable[..., None]
) -> None:
    in_a_pod(**environment)
    assert num_ranks(4) == 2
    with pytest.raises(kind, match=told):
        on_ranks(raising_rank, 4, on_message=lambda message: None)


@pytest.mark.slow
def test_doctor_in_two_pods(in_a_pod: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    in_a_pod(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "moe_dispatch_tools", "doctor", "-b", "alltoall", "--json"]
    pods = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    (out, error), others = [pod.communicate(timeout=300) for pod in pods]
    assert ([pod.returncode for pod in pods], others[0]) == ([0, 0], ""), (error, others)
    assert [backend["self_test"]["ranks"] for backend in json.loads(out)["backends"]] == [2]


def test_what_follows_a_break_stands_below_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console.line("alltoall: " + "graph-safe mode and " * 6, mark="ok", indent=2, wrap=True)
    console.line("on 2 ranks: " + "supports torch.compile; " * 4, indent=11, wrap=True)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("  ok     alltoall: graph-safe mode")
    assert {len(line) - len(line.lstrip()) for line in rest[:2]} == {9}
    assert {len(line) - len(line.lstrip()) for line in rest[3:]} == {11}
    assert max(map(len, [first, *rest])) <= 60
