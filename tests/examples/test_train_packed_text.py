"""The demo: end to end with few steps; and each of its claims, in a test that fails when the claim is false."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import convert_model
import train_packed_text
from moe_dispatch import DispatcherConfig
from moe_dispatch_tools.traces import RunLog, Trace
from packed_text.documents import Pack, batches, join
from packed_text.model import ByteLanguageModel
from packed_text.report import STEPS_TO_JUDGE, check_runs
from packed_text.training import Run, compute_gradients
from tests.cli.processes import hearing_interrupts, members, wait_for
from tests.examples.conftest import Variables
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_packed_text.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SMALL = DispatcherConfig(backend="local", num_experts=4, top_k=2, hidden_size=32, pad_multiple=8)


def demo(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """The script in a process group of its own, stderr with stdout."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it wrote, once it has ended with 0."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def table_row(output: str, backend: str) -> list[float]:
    """First and last loss, tokens/s, MB sent in a step, two kinds of padded rows; NaN where there is no number."""
    found = re.search(rf"^{backend} +(\d.+?)$", output, re.MULTILINE)
    assert found, output
    return [float("nan") if word in ("-", "emulated") else float(word.replace(",", "")) for word in found[1].split()]


@pytest.mark.slow
def test_all_backends_are_trained_and_compared(tmp_path: Path) -> None:
    output = finish(demo("--all", "--ranks", "2", "--steps", "4", cwd=tmp_path))
    alltoall, allgather, deepep, hybridep, local = (table_row(output, name) for name in train_packed_text.ALL)
    assert alltoall[:2] == allgather[:2] == local[:2]
    assert local[1] < local[0]
    assert local[3] == 0 < alltoall[3] < allgather[3]
    assert alltoall[4] == local[4] == 0 < allgather[4]
    assert alltoall[5] == allgather[5] == local[5] > 0
    assert deepep[0] == pytest.approx(local[0], rel=1e-3)
    assert hybridep[0] == pytest.approx(local[0], rel=1e-3)
    assert deepep[4] == hybridep[4] == 0, "each rank brings its own rows"
    assert output.count("has the losses of local") == 4
    assert output.count("starts with the loss of local") == 2
    assert output.count("runs on the emulation of deep_ep") == 2
    assert (tmp_path / train_packed_text.PICTURE).read_bytes().startswith(PNG_SIGNATURE)


def test_backend_alone_is_trained_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "local", "--ranks", "2", "--steps", "2", "--trace", "run.safetensors", "--run", "run"]
    with contextlib.chdir(tmp_path):
        assert train_packed_text.main(arguments) == 0
    output = capsys.readouterr().out
    assert "local: no expert stays idle" in output
    assert "alltoall" not in output
    trace, run = Trace.load(tmp_path / "run.safetensors"), RunLog.load(tmp_path / "run")
    assert [(call.step, call.layer) for call in trace.calls] == [(0, 0), (0, 1), (1, 0), (1, 1)], "forward only"
    data = batches(ranks=2, bytes_per_rank=320, max_length=768, seed=2024)
    tokens = [sum(map(len, packs)) for packs in itertools.islice(data, 2)]
    assert trace.calls[0].parts[0].num_rows == tokens[0]
    assert run.tokens_SE.sum(1).tolist() == [2 * run.config.top_k * count for count in tokens], "both layers"


def backends_of(*arguments: str) -> list[str]:
    options = train_packed_text._parser().parse_args(arguments)
    return [task.config.backend_name for task in train_packed_text.make_tasks(options)]


def test_backend_comes_from_the_option_the_environment_or_the_file(tmp_path: Path, variables: Variables) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("num_experts: 4\ntop_k: 1\nhidden_size: 16\nbackend: {name: alltoall, reduction: exact}\n")
    assert backends_of() == ["alltoall", "local"]
    assert backends_of("--all") == ["alltoall", "allgather", "deepep", "hybridep", "local"]
    assert backends_of("--all", "--ranks", "3") == ["alltoall", "allgather", "hybridep", "local"]
    assert backends_of("--config", str(file)) == ["alltoall"]
    variables(MOE_DISPATCH_BACKEND="allgather")
    assert backends_of("--config", str(file)) == ["allgather"]
    assert backends_of("--config", str(file), "--backend", "local") == ["local"]
    assert backends_of("--all") == ["alltoall", "allgather", "deepep", "hybridep", "local"]


WORLD = {"RANK": "0", "WORLD_SIZE": "2"}
REFUSED: list[tuple[Any, list[str], dict[str, str], str]] = [
    (train_packed_text, ["--backend", "altoall"], {}, "Unknown backend 'altoall'"),
    (train_packed_text, ["--config", "missing.yaml"], {}, "missing.yaml"),
    (train_packed_text, [], {"MOE_DISPATCH_HIDDEN_SIZE": "30"}, "hidden_size must be a multiple of 8, got 30"),
    (train_packed_text, ["--ranks", "3"], WORLD, r"--ranks must be torchrun's WORLD_SIZE \(2\), got 3"),
    (convert_model, ["--ranks", "0"], {}, r"--ranks must be 1 or more, got 0"),
    (convert_model, ["--ranks", "3"], WORLD, r"--ranks must be torchrun's WORLD_SIZE \(2\), got 3"),
    (convert_model, ["--ranks", "1", "--backend", "altoall"], {}, "Unknown backend 'altoall'"),
]


@pytest.mark.parametrize(("script", "arguments", "environment", "message"), REFUSED)
def test_wrong_requests_are_refused(
    script: Any, arguments: list[str], environment: dict[str, str], message: str, variables: Variables, capsys: Any
) -> None:
    variables(**environment)
    assert script.main(arguments) == 1
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize("ranks", [2, 7])
def test_packs_of_a_batch_differ_in_length_and_are_the_same_for_all(ranks: int) -> None:
    def first(count: int) -> list[list[Any]]:
        data = batches(ranks=ranks, bytes_per_rank=300, max_length=512, seed=5)
        return list(itertools.islice(data, count))

    for mine, theirs in zip(first(15), first(15), strict=True):
        assert len({len(part) for part in mine}) == ranks
        assert min(map(len, mine)) >= 300
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(mine, theirs, strict=True))


def gradients_after(
    model: ByteLanguageModel, part: Pack, num_tokens: int, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """A large balance, so that an error in its sum over ranks shows."""
    compute_gradients(model, part, num_tokens, group, balance=1.0)
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_gradients_of_two_ranks_are_those_of_the_union(backend: str) -> None:
    packs = next(batches(ranks=2, bytes_per_rank=64, max_length=256, seed=3))
    num_tokens = sum(map(len, packs))
    reference = ByteLanguageModel(SMALL, None)
    expected = gradients_after(reference, join(packs), num_tokens, None)

    def body(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        model = ByteLanguageModel(SMALL.replace(backend=backend), group)
        load(model, reference, group)
        return gradients_after(model, packs[group.rank()], num_tokens, group)

    found = run_ranks(body, 2)
    assert expected.keys() == found[0].keys() == found[1].keys()
    for name, gradient in expected.items():
        parts = [ranks_gradients[name] for ranks_gradients in found]
        whole = torch.cat(parts) if parts[0].shape != gradient.shape else parts[0]
        torch.testing.assert_close(whole, gradient, rtol=1e-4, atol=1e-6, msg=f"gradient of {name}")


def load(model: ByteLanguageModel, whole: ByteLanguageModel, group: dist.ProcessGroup) -> None:
    """Copy weights from a model that holds all experts; threads share one random generator, so seeds do not help."""
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = values[name]
            parameter.copy_(value if value.shape == parameter.shape else value.chunk(group.size())[group.rank()])


def run_like(backend: str, losses: list[float], tokens: Any = None, wire: str | None = None) -> Run:
    costs: dict[str, Any] = {"bytes_per_step": 1e6, "rows_padded": {"rank": 0, "expert": 4}, "tokens_per_second": 1e3}
    tokens = tokens or [[[3, 5], [4, 4]]] * len(losses)
    of_run: dict[str, Any] = {"backend": backend, "wire": wire, "emulated": False, "ranks": 2}
    return Run(**of_run, losses=losses, tokens_per_expert=tokens, **costs)


FALLING = [5.0 - 0.1 * step for step in range(STEPS_TO_JUDGE)]


def failed_claims(*runs: Run) -> list[str]:
    return [check.claim for check in check_runs(runs) if check.passed is False]


def scaled(step: int, factor: float) -> list[float]:
    return [*FALLING[:step], FALLING[step] * factor, *FALLING[step + 1 :]]


FLAT = [5.0 - 0.04 * step for step in range(STEPS_TO_JUDGE)]
IDLE = [[[3, 5], [4, 4]]] * (STEPS_TO_JUDGE // 2) + [[[3, 5], [8, 0]]] * (STEPS_TO_JUDGE // 2)
OTHER = ["alltoall on 2 ranks has the losses of local"]
CHECKED: list[tuple[Run, list[str]]] = [
    (run_like("alltoall", FALLING), []),
    (run_like("alltoall", scaled(7, 1 + 2e-4)), OTHER),
    (run_like("alltoall", scaled(7, float("nan"))), OTHER),
    # A bfloat16 wire may differ more, but not at the start.
    (run_like("deepep", scaled(7, 1.06), wire="bfloat16"), []),
    (run_like("deepep", scaled(7, 1.12), wire="bfloat16"), ["deepep on 2 ranks has the losses of local"]),
    (run_like("deepep", scaled(0, 1.002), wire="bfloat16"), ["deepep starts with the loss of local"]),
]


@pytest.mark.parametrize(("run", "claims"), CHECKED)
def test_check_compares_with_local(run: Run, claims: list[str]) -> None:
    assert failed_claims(run, run_like("local", FALLING)) == claims


def test_check_sees_a_loss_that_does_not_fall_and_an_expert_that_falls_idle() -> None:
    assert failed_claims(run_like("local", FLAT)) == ["local: the loss falls by at least 30%"]
    assert failed_claims(run_like("local", FALLING, IDLE)) == ["local: no expert stays idle"]
    assert failed_claims(run_like("local", FLAT[:2])) == [], "few steps are not judged"


def test_failed_check_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = run_like("local", [5.0] * STEPS_TO_JUDGE)
    monkeypatch.setattr(train_packed_text, "train", lambda *arguments: flat)
    with contextlib.chdir(tmp_path):
        assert train_packed_text.main(["--backend", "local"]) == 1
    assert "failed local: the loss falls" in capsys.readouterr().out


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The script in the middle of its work: its ranks are there."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("processes are counted in /proc")
    with hearing_interrupts():
        process = demo("--ranks", "2", "--steps", "1000", "--backend", "alltoall", cwd=tmp_path)
    try:
        # The script, the server that forks its ranks, the resource tracker of multiprocessing, and two ranks.
        wait_for(lambda: len(members(process.pid)) >= 5 or process.poll() is not None)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_interrupt_ends_all_ranks(running_demo: subprocess.Popen[str]) -> None:
    """Ctrl-C reaches every process of the terminal's group."""
    os.killpg(running_demo.pid, signal.SIGINT)
    output, _ = running_demo.communicate(timeout=60)
    assert running_demo.returncode == 130, output
    assert "interrupted, all ranks are ended" in output
    assert "Traceback" not in output
    wait_for(lambda: not members(running_demo.pid))


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_parent(running_demo: subprocess.Popen[str]) -> None:
    running_demo.kill()
    wait_for(lambda: not members(running_demo.pid))


@pytest.mark.slow
def test_missing_packages_are_named() -> None:
    run = "import sys; sys.modules['matplotlib'] = None; import train_packed_text; sys.exit(train_packed_text.main())"
    finished = subprocess.run(
        [sys.executable, "-c", run, "--backend", "local"],
        cwd=SCRIPT.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert re.search(r"matplotlib is missing.*pip install -e '\.\[dev\]'", finished.stderr)
