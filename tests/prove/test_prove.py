"""A right set-up is proven, and each planted fault is told as what it is."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from moe_dispatch import MoEDispatchError
from moe_dispatch_testing import RankFailed
from moe_dispatch_testing.prove import Proof, Setup, look, prove, prove_all
from tests.prove import setups

ROUTERS = r"blocks\.0\.router\.weight, blocks\.1\.router\.weight and 2 more"
EXPERTS = r"blocks\.0\.experts\.up, blocks\.0\.experts\.down and 2 more"
ALL = r"blocks\.0\.router\.weight, blocks\.0\.experts\.up and 6 more"
PER_RANK = (
    r"gradient of .* differs, and that of the whole batch is not made up of those of the ranks' batches: is a part of "
    r"the "
    r"loss that is not a sum over tokens, such as an auxiliary loss, counted per rank\?"
)
FAULTS = {
    "start": [
        rf"ranks 0, 1, 2 and 3 start with different values of {ROUTERS}\.",
        rf"ranks 0 and 2, and ranks 1 and 3 start with different values of {EXPERTS}\.",
    ],
    "wrong place": [
        rf"An expert is in the wrong place: number 0 of {EXPERTS} on ranks 0 and 2 starts with the values that number "
        rf"4 has "
        r"on one process\."
    ],
    "frozen": [r"blocks\.1\.experts\.up is frozen on rank 1, and not on one process\."],
    "unheld": [
        r"head\.weight and head\.bias has a gradient and does not move, on one process either: the optimizer does not "
        r"hold "
        r"it\."
    ],
    "options": [rf"The optimizer steps {ALL} with other options on rank 2: lr 0\.02 for 0\.01\."],
    "one stack": [
        rf"Adafactor takes the stacks {EXPERTS} for one tensor each, so experts step otherwise where a rank holds "
        r"fewer\. Step them with PerExpert of moe_dispatch\.training\."
    ],
    "by rank": [
        rf"Estimating steps {ALL} by numbers that each rank finds in what it holds \(lr\)\. Use an optimizer that "
        r"looks at each parameter alone, or let ranks agree\."
    ],
    "state": [
        r"The optimizer has another state \(exp_avg, exp_avg_sq, step\) for head\.weight and head\.bias on rank 2\."
    ],
    "unreduced": [
        r"gradient of blocks\.0\.router\.weight is that of each rank alone: a reduction along copies x ep is missing "
        r"\(their "
        r"sum is right\)\."
    ],
    "wrong group": [
        rf"gradient of {ROUTERS} is that of each rank alone: a reduction along copies is missing \(their sum is "
        rf"right\)\."
    ],
    "divided": [rf"gradient of {EXPERTS} is 2\.00 times too small \(number of ranks along copies, or ep\)\."],
    "means": [
        r"loss is the mean of what each rank has alone, whatever its number of tokens \(.*; one process: 0\.38509\)\.",
        rf"gradient of {ALL} is the mean of the means of the ranks: a rank with fewer tokens counts as much as one "
        rf"with "
        r"more\. Divide the sum over tokens by the number of tokens of all ranks\.",
    ],
    "scaled": [r"Every gradient is 4\.00 times too large \(number of ranks along copies x ep\)\."],
    "missing": [r"no gradient of blocks\.1\.router\.weight on rank 3\."],
    "clipped alone": [
        r"The norm of the gradients is 0\.40\d+, 0\.40\d+ on the ranks, and 0\.40\d+ on one process: each rank clips "
        r"by its "
        r"own part\. Count each gradient once, and the parts of all ranks\."
    ],
    "clipped unseen": [r"Gradients have one factor on each rank \(1\.01, .*\): each clips by a norm of its own\."],
    "counted twice": [
        r"The norm of the gradients is 0\.805563 on the ranks, and 0\.406121 on one process: ranks clip by the sum "
        r"along copies x ep\. Count each gradient once, and the parts of all ranks\."
    ],
    "auxiliary": [
        r"auxiliary is counted on the tokens of each rank alone \(.*; one process: 4\.09803\)\.",
        PER_RANK,
    ],
    "auxiliary unseen": [PER_RANK],
    "copies apart": [
        r"After the step ranks 1 and 3 hold different values of blocks\.1\.experts\.down, though gradients are right\."
    ],
    "dropout": [
        r"The step is random: dropout in blocks\.0\.dropout \(p = 0\.5\), blocks\.1\.dropout \(p = 0\.5\)\. One "
        r"process gives "
        r"another result with another seed, so nothing can be compared\. Set it to 0 for the proof\."
    ],
}


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    return prove_all({fault: setups.setup(fault) for fault in ("", *FAULTS)}, timeout=datetime.timedelta(seconds=180))


def test_right_setup_is_proven(proofs: dict[str, Proof]) -> None:
    proof = proofs[""]
    assert proof.right, proof
    assert str(proof) == "8 parameters are those of one process"
    assert [set(numbers) for numbers in proof.numbers] == [{"loss", "norm"}] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_told_as_what_it_is(fault: str, proofs: dict[str, Proof]) -> None:
    found = proofs[fault].findings
    assert len(found) == len(FAULTS[fault]), found
    for pattern, finding in zip(FAULTS[fault], found, strict=True):
        assert re.fullmatch(pattern, finding), finding


def test_an_error_is_told_by_rank_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 2 of 4: .*setups\.py.*ArithmeticError: a mistake of the user"):
        prove(setups.setup("raises"))


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(RankFailed) as caught:
        prove(setups.setup("hangs"), timeout=datetime.timedelta(seconds=12))
    told = str(caught.value)
    assert told.startswith(
        "prove: The ranks do not come to the end in 12 seconds. Look at rank 1 first.\nrank 1: waits in step, "
    )
    assert "time.sleep(600)" in told


def test_look_does_nothing_outside() -> None:
    look()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = {'ep': 2}", r"must define build, step, batches and mesh, and has no build\."),
        (
            "build = step = batches = print\nmesh = 4",
            r"mesh must be a dictionary of names and numbers of ranks, such as \{'copies': 2, 'ep': 2\}, got 4\.",
        ),
    ],
)
def test_files_that_lack_something(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "setup.py"
    file.write_text(text)
    with pytest.raises(MoEDispatchError, match=message):
        prove(file)
    with pytest.raises(MoEDispatchError, match=r"nowhere\.py is not a file\."):
        prove(tmp_path / "nowhere.py")


def test_batches_that_do_not_fit_the_mesh() -> None:
    setup = Setup(build=print, step=print, batches=setups.batches, mesh={"ep": 4, "tp": 2})
    assert [setup.batch_number(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    wrong = Setup(build=print, step=print, batches=setups.batches, mesh={"ep": 2, "tp": 2})
    with pytest.raises(
        MoEDispatchError,
        match=r"batches\(0\) must return 2 batches, one for each rank along \['ep'\], got 4\. Name dimensions",
    ):
        wrong.batches_of(0)


def test_batches_that_cannot_be_joined() -> None:
    setup = setups.setup()
    joined = setup.joined([{"x": batch, "kind": "text"} for batch in setups.batches(0)])
    assert joined["x"].shape == (24, setups.HIDDEN)
    with pytest.raises(MoEDispatchError, match=r"define join\(batches\), because a batch holds a str that differs\."):
        setup.joined([(batch, str(number)) for number, batch in enumerate(setups.batches(0))])


def test_dtypes_and_sizes_that_are_refused() -> None:
    with pytest.raises(MoEDispatchError, match=r"dtype must be float64 or float32, got 'half'\."):
        prove(setups.setup(), dtype="half")
    with pytest.raises(MoEDispatchError, match=r"all set-ups must have one number of ranks, got \[2, 4\]\."):
        prove_all({"a": setups.setup(), "b": Setup(build=print, step=print, batches=print, mesh={"ep": 2})})  # type: ignore[arg-type]
