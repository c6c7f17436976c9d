"""The log of a run: what the dispatcher counted step by step, also where a run crashed, and what cannot be read."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import MoEDispatchError, Routing, Rows, build_dispatcher
from moe_dispatch.balance import ExpertPlacement
from moe_dispatch.dispatchers import Metrics
from moe_dispatch.errors import PeerError, StateError, TraceError
from moe_dispatch_testing import count_collectives
from moe_dispatch_tools.traces import RunLog
from tests.dispatchers.layer import Group, on_ranks, outcomes, random_routing, random_rows, small_config

STEPS = 4
ROOM: dict[str, Any] = {"graph_safe": {"capacity_factor": 0.8, "on_overflow": "drop"}, "max_tokens_per_rank": 20}


def log_run(
    group: Group, directory: Path, backend: str = "alltoall", crash_at: int | None = None, **fields: Any
) -> list[Metrics]:
    """Two layers; step by step the totals of this rank, those before the first included."""
    rank = 0 if group is None else group.rank()
    first, second = (build_dispatcher(small_config(backend, pad_multiple=4, **fields), group, name=n) for n in "ab")

    def train(step: int) -> None:
        for seed, layer in enumerate((first, second)):
            rows = 5 + 2 * rank + 3 * step
            layout = Rows(num_real=rows - 2)
            way = random_routing(rows, seed=100 * step + 10 * rank + seed)
            x = random_rows(rows).requires_grad_()
            sent = layer.dispatch(x, Routing(way.topk_ids // (1 + step % 2), way.topk_weights), layout)
            layer.combine(sent.rows, sent).sum().backward()

    train(9 % STEPS)  # counted before the log begins
    with RunLog.record(first, directory) as log:
        seen = [first.metrics()]
        for step in range(STEPS):
            train(step)
            if step == crash_at and rank == 1:
                raise ArithmeticError("planted")
            log.step()
            seen.append(first.metrics())
    return seen


SAFE = {"graph_safe": True, "max_tokens_per_rank": 20}


@pytest.mark.parametrize(
    ("backend", "fields", "size"),
    [("alltoall", {}, 1), ("alltoall", SAFE, 2), ("allgather", {}, 4), ("allgather", SAFE, 2)],
)
def test_steps_are_what_the_dispatcher_counted(backend: str, fields: dict[str, Any], size: int, tmp_path: Path) -> None:
    seen = on_ranks(lambda group: log_run(group, tmp_path / "run", backend, **fields), size)
    log = RunLog.load(tmp_path / "run")
    assert (log.steps, log.ep_size, log.written) == (STEPS, size, (STEPS,) * size)
    assert (log.name, log.backend_name, log.config) == ("a", backend, small_config(backend, pad_multiple=4, **fields))
    for step in range(STEPS):
        expected = [after_minus_before(of_rank[step], of_rank[step + 1]) for of_rank in seen]
        assert log.tokens_SE[step].tolist() == [count for tokens, _, _ in expected for count in tokens]
        for rank, (_, rows, sent) in enumerate(expected):
            assert {cause: int(counts[step, rank]) for cause, counts in log.rows.items()} == rows
            assert {label: int(counts[step, rank]) for label, counts in log.sent.items()} == {
                label: sent.get(label, 0) for label in log.sent
            }
            assert all(label in log.sent for label, nbytes in sent.items() if nbytes)
        assert log.dispatches_SP[step].tolist() == [2] * size
        for name in "ab":
            rows_P = [of[step + 1].tokens_by_layer[name] - of[step].tokens_by_layer[name] for of in seen]
            assert log.layer_tokens[name][step].tolist() == torch.stack(rows_P).sum(0).tolist()
            assert log.layer_received[name][step].tolist() == [int(rows.sum()) for rows in rows_P]
    assert sum(int(counts.sum()) for counts in log.sent.values()) > 0 or size == 1
    assert int(log.rows["cut" if not fields else "masked"].sum()) == 2 * 2 * STEPS * size


def test_rows_count_for_experts_before_and_after_a_placement(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        dispatcher = build_dispatcher(small_config(top_k=1), group)
        routing = Routing(torch.tensor([[0], [5]]), torch.ones(2, 1))
        with RunLog.record(dispatcher, tmp_path / "run") as log:
            for placement in (None, ExpertPlacement(8, ((5, 6, 7, 4), (3, 2, 1, 0)))):
                if placement is not None:
                    dispatcher.place(placement)
                dispatcher.dispatch(random_rows(2), routing)
                log.step()

    on_ranks(body, 2)
    log = RunLog.load(tmp_path / "run")
    assert log.tokens_SE.tolist() == [[2, 0, 0, 0, 0, 2, 0, 0]] * 2
    assert log.received_SP.tolist() == [[2, 2], [2, 2]], "the ranks exchange their experts"
    assert log.layer_tokens[""].equal(log.tokens_SE)
    assert log.layer_received[""].equal(log.received_SP)


def after_minus_before(before: Metrics, after: Metrics) -> tuple[list[int], dict[str, int], dict[str, int]]:
    rows = {**after.rows_padded, **after.rows_skipped}
    earlier = {**before.rows_padded, **before.rows_skipped}
    tokens = after.real_tokens_per_expert - before.real_tokens_per_expert
    sent = Counter(after.bytes_sent)
    sent.subtract(before.bytes_sent)
    return tokens.tolist(), {cause: rows[cause] - earlier[cause] for cause in rows}, dict(sent)


def test_overflow_is_in_the_log(tmp_path: Path) -> None:
    def body(group: Group) -> Any:
        dispatcher = build_dispatcher(small_config(pad_multiple=4, **ROOM), group)  # shares the channel of the run's
        log_run(group, tmp_path / "run", **ROOM)
        return dispatcher.required_capacity()

    needed = on_ranks(body, 2)[0]
    log = RunLog.load(tmp_path / "run")
    assert log.needed_SP is not None
    assert log.room_S is not None
    assert log.room_S.tolist() == [32] * STEPS  # 0.8 * 20 rows * top-2
    assert int(log.needed_SP[-1].max()) == needed.rows
    assert (log.needed_SP.diff(dim=0) >= 0).all()
    assert needed.overflowed == bool((log.needed_SP.amax(1) > log.room_S).any())
    assert log.pairs_room_S is not None
    assert log.pairs_room_S.tolist() == [20] * STEPS  # the worst case
    eager = on_ranks(lambda group: log_run(group, tmp_path / "eager"), 2)
    assert len(eager) == 2
    assert RunLog.load(tmp_path / "eager").needed_SP is None
    on_ranks(lambda group: log_run(group, tmp_path / "gathered", "allgather", **ROOM), 2)
    assert RunLog.load(tmp_path / "gathered").pairs_room_S is None


def test_a_step_is_local(tmp_path: Path) -> None:
    """Ranks may log as often as they like: no collective is in it."""

    def body(group: Group) -> int:
        assert group is not None
        dispatcher = build_dispatcher(small_config(), group)
        with RunLog.record(dispatcher, tmp_path / "run") as log, count_collectives() as found:
            for _ in range(1 + group.rank()):
                log.step()
        return len(found.calls)

    assert on_ranks(body, 2) == [0, 0]
    log = RunLog.load(tmp_path / "run")
    assert (log.steps, log.written) == (1, (1, 2))


def test_a_run_that_crashes_leaves_its_steps(tmp_path: Path) -> None:
    found = outcomes(lambda group: log_run(group, tmp_path / "run", crash_at=2), 2, seconds=0.5)
    assert isinstance(found[1], ArithmeticError)
    assert not isinstance(found[0], list)
    log = RunLog.load(tmp_path / "run")
    assert (log.steps, log.written) == (2, (3, 2))


@pytest.mark.parametrize("keep", [-1, -20])
def test_last_line_that_was_cut_off_is_left_out(keep: int, tmp_path: Path) -> None:
    log_run(None, tmp_path / "run", "local")
    whole, path = RunLog.load(tmp_path / "run"), tmp_path / "run" / "rank0.jsonl"
    path.write_bytes(path.read_bytes()[:keep])
    cut = RunLog.load(tmp_path / "run")
    assert cut.written == (STEPS - 1,)
    assert torch.equal(cut.tokens_SE, whole.tokens_SE[:-1])


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logged") / "run"
    on_ranks(lambda group: log_run(group, directory), 2)
    return directory


@pytest.fixture
def copy(logged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(logged, tmp_path / "run"))


Damage = Callable[[Path], object]


def header(rank: int, **values: Any) -> Damage:
    """Set fields in the header of a rank's file."""

    def change(run: Path) -> None:
        first, *lines = (path := run / f"rank{rank}.jsonl").read_text().splitlines(keepends=True)
        path.write_text("".join([json.dumps({**json.loads(first), **values}) + "\n", *lines]))

    return change


def line(rank: int, at: int, text: str) -> Damage:
    """Replace a line of a rank's file."""

    def change(run: Path) -> None:
        lines = (path := run / f"rank{rank}.jsonl").read_text().splitlines(keepends=True)
        lines[at] = text
        path.write_text("".join(lines))

    return change


def emptied(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


NO_LINE = r"rank\d\.jsonl, line {} must be a line of RunLog\.record, got "
CONFIG = small_config().model_dump()
DIGITS = '{"step": 0, "totals": {"dispatches": ' + "9" * 5000
WRONG: dict[str, tuple[Damage, str]] = {
    "none": (shutil.rmtree, r"must be an existing directory, got none"),
    "empty": (emptied, r"must hold rank0\.jsonl and so on, got none"),
    "missing": (lambda run: (run / "rank0.jsonl").unlink(), r"must hold all 2 ranks, got rank 1"),
    "mixed": (header(1, run="another"), r"one run, got rank0\.jsonl of run \w{16} and rank1\.jsonl of rank 1 of run"),
    "torn header": (lambda run: (run / "rank1.jsonl").write_text('{"moe_dis'), "must begin with a header, got 9 char"),
    "other file": (line(1, 0, '{"loss": 3}\n'), NO_LINE.format(1) + r"moe_dispatch_run: Field required"),
    "other format": (header(0, moe_dispatch_run=2), r"must have format 1, got format 2, of a newer moe-dispatch"),
    "format 0": (header(0, moe_dispatch_run=0), NO_LINE.format(1) + "moe_dispatch_run: Input should be 1"),
    "damaged": (line(0, 2, '": 1}\n'), NO_LINE.format(3) + r"text: Invalid JSON"),
    "nested": (line(0, 2, "[" * 100_000 + "\n"), NO_LINE.format(3) + "text: Invalid JSON: recursion limit exceeded"),
    "without totals": (line(1, 4, '{"step": 3}\n'), NO_LINE.format(5) + r"totals: Field required\."),
    "a billion ranks": (header(0, ep_size=10**9), r"must hold all 1000000000 ranks, got rank 0, 1\. Copy"),
    "a text as number": (header(0, ep_size="2"), NO_LINE.format(1) + "ep_size: Input should be a valid integer"),
    "5000 digits": (line(0, 1, DIGITS), NO_LINE.format(2)),
    "NUL in a name": (header(0, name="a\0"), r"got name: String should match pattern"),
    "other experts": (header(0, config={**CONFIG, "num_experts": 10**9}), r"must have counts of 1000000000 experts"),
    "other version": (header(0, config={"new": 1}, versions={"moe_dispatch": "9.0"}), r"moe_dispatch 9\.0: [\s\S]*new"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read(name: str, copy: Path) -> None:
    change, told = WRONG[name]
    change(copy)
    with pytest.raises(TraceError, match=told):
        RunLog.load(copy)


def test_a_directory_takes_one_run(tmp_path: Path) -> None:
    """On all ranks alike, and nothing is left of the ranks that could have."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank1.jsonl").write_text("mine")
    refused, own = outcomes(lambda group: log_run(group, tmp_path / "run"), 2)
    assert isinstance(refused, PeerError)
    assert isinstance(own, TraceError)
    told = r"RunLog\.record: \S+rank1\.jsonl must not exist, got an existing file\. Use a new directory for each run"
    for error in (refused, own):
        with pytest.raises(MoEDispatchError, match=told):
            raise error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rank1.jsonl"]
    assert (tmp_path / "run" / "rank1.jsonl").read_text() == "mine"


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dispatcher = build_dispatcher(small_config("local"))
    with (
        pytest.raises(TraceError, match=r"rank0\.jsonl must be in a directory that can be written, got .*\. Use"),
        RunLog.record(dispatcher, tmp_path / "file" / "run"),
    ):
        pass
    with RunLog.record(dispatcher, tmp_path / "run") as log:
        pass
    with pytest.raises(TraceError, match=r"RunWriter\.step: \S+ must be open, on a disk with free space, got: I/O"):
        log.step()
    dispatcher.close()
    with pytest.raises(StateError, match="must be open"), RunLog.record(dispatcher, tmp_path / "closed"):
        pass
    assert not (tmp_path / "closed").exists()
