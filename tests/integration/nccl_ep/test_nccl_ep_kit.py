"""The conformance kit on ``nccl_ep``, with every scenario that its constraints allow, over the released ``ep.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from moe_dispatch_testing import Ranks
from moe_dispatch_testing.case import run_case
from moe_dispatch_testing.differences import run_each_manner
from moe_dispatch_testing.kit import backend_cases, difference_settings, excuses
from tests.integration.nccl_ep.double import SOURCE, installed, requires_wheel

pytestmark = requires_wheel
RANKS = Ranks()


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    with installed():
        yield


def cases() -> Iterator[Any]:
    """In one layout, as the dispatcher handles layouts; and ranks that differ."""
    if not SOURCE.is_file():
        return
    with installed():
        for case in backend_cases("nccl_ep"):
            if case.input_layout == ("thd_with_gaps_on_device" if "with_" in case.scenario.schedule else "bshd"):
                yield pytest.param(partial(run_case, "nccl_ep", case, RANKS), id=case.id)
        for setting in difference_settings("nccl_ep"):
            yield pytest.param(partial(run_each_manner, "nccl_ep", setting, RANKS), id=f"ranks_differ-{setting}")


@pytest.mark.parametrize("run", [*cases()])
def test_conforms(run: Callable[[], None]) -> None:
    run()


def test_only_one_rank_and_8_bit_rows_are_excused() -> None:
    found = list(excuses("nccl_ep"))
    assert {one.reason for one in found if one.ep_size == 1} == {"group_sizes 2 to 64"}
    others = {one for one in found if one.ep_size > 1}
    assert {one.reason for one in others} == {"wire.dtypes bfloat16"}
    assert all(re.search("float8|mxfp8|quantised", one.scenario) for one in others)
