"""The page on replay: its code runs, and its check of NeMo-RL's traces tells right ids from wrong ones."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tests.pages import run_page


def test_code_of_the_page_runs() -> None:
    torch.manual_seed(0)
    names = run_page("replay.md")
    assert names["metrics"].slots_replayed["layers.0"] == 9 * 2  # the tokens of both sequences but the last ones
    table = names["table"]
    ids = torch.cat([names["output"]["uid-1"], torch.full((1, 3, 2), -1)]).int()
    record: dict[str, Any] = {
        "key": "uid-1",
        "valid_length": 4,
        "routed_experts": {"valid_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()},
    }
    assert names["agrees"](table, record)
    assert not names["agrees"](table, {**record, "key": "uid-0"})
