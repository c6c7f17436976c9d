"""What examples/train_fsdp2.py writes for TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.fsdp2_losses import losses
from tests.integration.needs import needs

pytestmark = [*needs("tensorboard"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_scalars_of_each_step_are_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed = losses(2, "--ep", "2", "--steps", "3", "--tensorboard", str(tmp_path), "--log-every", "1")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert written["loss"] == pytest.approx(list(printed.values()), abs=1e-5)
    assert all(1.0 <= value < 8.0 for value in written["experts/busiest_over_mean"])
    assert written["experts/slots_dropped"] == [0.0] * 3
    assert written["experts/rows_padded"] == [0.0] * 3, "pad_multiple is 1, and alltoall adds no rows"
    assert len(written["gradient_norm"]) == 3
    assert min(written["gradient_norm"]) > 0.1


def test_metrics_are_read_every_few_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses(2, "--steps", "5", "--tensorboard", str(tmp_path), "--log-every", "2")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("experts/slots_dropped")] == [2, 4]
    assert [event.value for event in events.Scalars("experts/slots_dropped")] == [0.0, 0.0], "of both steps"
