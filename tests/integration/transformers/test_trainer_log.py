"""``log_from_trainer`` and ``lightning_callback`` of examples/log_metrics.py: loads of experts beside the losses."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from tests.integration.needs import needs
from tests.pages import ROOT, run_command

EXPERTS, HIDDEN = 4, 8
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "log_metrics.py"))


class Model(nn.Module):
    """A layer of experts behind a router, with the loss as its output."""

    def __init__(self) -> None:
        super().__init__()
        config = DispatcherConfig(num_experts=EXPERTS, top_k=1, hidden_size=HIDDEN, pad_multiple=4)
        self.dispatcher = build_dispatcher(config, name="layers.0")
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = x.view(-1, HIDDEN)
        ids = torch.zeros(len(x), 1, dtype=torch.int64)  # all rows to expert 0: 4 times the mean
        sent = self.dispatcher.dispatch(x, Routing(ids, torch.ones(len(x), 1)))
        return {"loss": self.dispatcher.combine(sent.rows * self.scale, sent).square().mean()}


ROWS: Any = [{"x": torch.ones(3, HIDDEN), "labels": torch.zeros(1)} for _ in range(8)]


class TestTrainer:
    pytestmark = needs("transformers")

    @pytest.mark.filterwarnings("ignore")
    def test_trainer_logs_what_a_step_has_counted(self, tmp_path: Path) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        seen: list[dict[str, Any]] = []

        class Writer(TrainerCallback):  # type: ignore[misc]
            def on_log(self, *args: Any, logs: dict[str, Any], **_: Any) -> None:
                seen.append(dict(logs))

        model = Model()
        options = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            max_steps=4,
            logging_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        trainer = Trainer(model=model, args=options, train_dataset=ROWS, callbacks=[Writer()])
        EXAMPLE["log_from_trainer"](trainer, model.dispatcher)
        trainer.train()
        logged = [logs for logs in seen if "loss" in logs]
        assert [logs["moe/imbalance"] for logs in logged] == [4.0, 4.0]
        assert [logs["moe/rows_padded/expert"] for logs in logged] == [2, 2], "one row in each of two steps"

    @pytest.mark.filterwarnings("ignore")
    def test_trainer_on_two_ranks_trains_as_in_one_process(self, tmp_path: Path) -> None:
        from tests.integration.transformers import trained_by_trainer

        program = trained_by_trainer.__name__
        ran = run_command(f"torchrun --standalone --nproc-per-node 2 -m {program} {tmp_path}")
        assert ran.returncode == 0, ran.stderr
        on_ranks = json.loads((tmp_path / "logged.json").read_text(encoding="utf-8"))
        alone = trained_by_trainer.train(tmp_path, 1)
        assert len(on_ranks) == len(alone) == trained_by_trainer.STEPS
        for got, want in zip(on_ranks, alone, strict=True):
            for name in ("loss", "grad_norm"):
                assert got[name] == pytest.approx(want[name], rel=1e-5), name
            assert got["moe/imbalance"] >= got["moe/rank_imbalance"] >= 1
            assert got["moe/rows_skipped/cut"] > 0, "padding is not sent"


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_what_a_step_has_counted(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    seen: list[tuple[int, float]] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(batch["x"])["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Reader(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if "moe/rows_padded/expert" in trainer.callback_metrics:
                seen.append((trainer.global_step, trainer.callback_metrics["moe/rows_padded/expert"].item()))

    module = Module()
    trainer = lightning.Trainer(
        max_steps=4,
        log_every_n_steps=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EXAMPLE["lightning_callback"](module.model.dispatcher), Reader()],
    )
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=1))
    assert dict(seen)[2] == dict(seen)[4] == 2.0, "one row in each of two steps"
