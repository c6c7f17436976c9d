"""A run of transformers' ``Trainer``: on ranks of torchrun with our dispatchers, in one process without them.

    torchrun --nproc-per-node 2 -m tests.integration.transformers.trained_by_trainer FOLDER

Rank 0 writes what is logged to ``FOLDER/logged.json``.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register
from tests.pages import ROOT

LENGTH, ROWS_PER_STEP, STEPS = 12, 8, 4


def _rows() -> list[dict[str, torch.Tensor]]:
    """Sequences of 6 to 12 tokens, so that ranks get unequal numbers of them."""
    drawn, rows = torch.Generator().manual_seed(1), []
    for number in range(ROWS_PER_STEP * STEPS):
        ids, real = torch.randint(64, (LENGTH,), generator=drawn), torch.arange(LENGTH) < 6 + number % 7
        rows.append({"input_ids": ids, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)})
    return rows


def train(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return what ``Trainer`` logs in each step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
    options = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS_PER_STEP // ranks,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    if ranks > 1:
        register(config_for(model.config, backend="alltoall"), group=dist.group.WORLD)
        model.set_experts_implementation("moe_dispatch")
        attach(model)
    logged: list[dict[str, Any]] = []

    class Writer(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_args: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs:
                logged.append({name: float(value) for name, value in logs.items()})

    trainer = Trainer(model=model, args=options, train_dataset=_rows(), callbacks=[Writer()])
    if ranks > 1:
        example = runpy.run_path(str(ROOT / "examples" / "log_metrics.py"))
        example["log_from_trainer"](trainer, next(iter(dispatchers_of(model).values())))
    trainer.train()
    return logged


def main() -> None:
    """Train on the ranks of torchrun."""
    dist.init_process_group("gloo")
    logged = train(Path(sys.argv[1]), dist.get_world_size())
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "logged.json").write_text(json.dumps(logged), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
