"""examples/log_metrics.py with the metrics of docs/tuning.md: TensorBoard and W&B have them, Prometheus could."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_dispatch import Routing
from tests.integration.needs import needs
from tests.pages import ROOT, run_page

SAMPLE = re.compile(r'moe_dispatch_(\w+)_total\{\w+="\w[\w.]*",rank="0",backend="alltoall"\} (\d+)')

pytestmark = [
    *needs("tensorboard"),
    pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb, which torchtitan brings"),
]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder into which TensorBoard and W&B write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path


def test_code_runs_in_order(offline: Path) -> None:
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    namespace = run_page("tuning.md")
    example = runpy.run_path(str(ROOT / "examples" / "log_metrics.py"))
    dispatcher, before = namespace["dispatcher"], namespace["metrics"]
    sent = dispatcher.dispatch(namespace["x"], Routing(namespace["topk_ids"], torch.rand(40, 2)))
    dispatcher.combine(sent.rows, sent)
    metrics = dispatcher.metrics(gather=True)
    with SummaryWriter("runs") as writer:
        example["log_to_tensorboard"](writer, metrics, before, step=100)
    with wandb.init(project="moe") as run:
        example["log_to_wandb"](run, metrics, before, step=100)
    wandb.teardown()  # a finished run may still be in the buffers of the process that writes the file
    events = EventAccumulator(str(offline / "runs")).Reload()
    tokens = metrics.real_tokens_per_expert // 2  # of the second of two steps that are alike
    assert events.Scalars("moe/imbalance/layers.0.mlp")[0].value == pytest.approx(metrics.imbalance)
    assert events.Histograms("moe/tokens_per_expert/layers.0.mlp")[0].histogram_value.sum == float(tokens.sum())
    check_wandb(offline, metrics, tokens)
    lines = example["prometheus_text"](metrics, rank=0).splitlines()
    found = [match for line in lines if (match := SAMPLE.fullmatch(line))]
    assert len(found) == len(lines)
    total = sum(int(match[2]) for match in found if match[1] == "tokens")
    assert total == int(metrics.real_tokens_per_expert.sum()) == 160 - 2 * repeated(namespace["topk_ids"])


def check_wandb(folder: Path, metrics: Any, tokens: torch.Tensor) -> None:
    """The folder of the offline run has the step with all values."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    steps = []
    for written in journal(path):
        record = Record()
        record.ParseFromString(written)
        if record.WhichOneof("record_type") == "history":
            values = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            steps.append(values)
    (values,) = steps
    assert values["_step"] == 100
    assert values["moe/imbalance/layers.0.mlp"] == pytest.approx(metrics.imbalance)
    assert values["moe/tokens_per_expert/layers.0.mlp/values"] == tokens.tolist()
    assert {name: values[f"moe/rows_padded/{name}"] for name in metrics.rows_padded} == metrics.rows_padded
    assert {name: values[f"moe/bytes_sent/{name}"] for name in metrics.bytes_sent} == metrics.bytes_sent


def journal(path: Path) -> Iterator[bytes]:
    """The records of a file of W&B: blocks of 32 KiB, in which each part has a checksum, a length and a kind."""
    written, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(written):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(written[place + 4 : place + 6], "little"), written[place + 6]
        record += written[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def repeated(ids_TK: torch.Tensor) -> int:
    """Rows that name one expert in both slots, which are merged."""
    return int((ids_TK[:, 0] == ids_TK[:, 1]).sum())
