"""Log what a dispatcher has counted to TensorBoard or Weights & Biases, or write it in the text format of Prometheus.

Read ``dispatcher.metrics(gather=True)`` on every rank, because gathering is collective, and log on one.
"""

from __future__ import annotations

from typing import Any

from moe_dispatch import Dispatcher
from moe_dispatch.dispatchers import Metrics


def log_to_tensorboard(writer: Any, metrics: Metrics, before: Metrics, step: int) -> None:
    """Log the loads since ``before``, by layer, and the totals of padding and bytes, with a ``SummaryWriter``."""
    for layer, tokens in (metrics - before).tokens_by_layer.items():
        writer.add_scalar(f"moe/imbalance/{layer}", tokens.max() / tokens.double().mean(), step)
        writer.add_histogram(f"moe/tokens_per_expert/{layer}", tokens, step)
    writer.add_scalars("moe/rows_padded", metrics.rows_padded, step)
    writer.add_scalars("moe/bytes_sent", metrics.bytes_sent, step)


def log_to_wandb(run: Any, metrics: Metrics, before: Metrics, step: int) -> None:
    """Log the loads since ``before``, by layer, and the totals of padding and bytes, to a run of ``wandb.init``.

    ``WANDB_MODE=offline`` writes to a folder and sends nothing.
    """
    import wandb  # noqa: PLC0415 - a package that only this function needs

    values: dict[str, Any] = {}
    for layer, tokens in (metrics - before).tokens_by_layer.items():
        bars = (tokens.tolist(), list(range(len(tokens) + 1)))
        values[f"moe/imbalance/{layer}"] = tokens.max() / tokens.double().mean()
        values[f"moe/tokens_per_expert/{layer}"] = wandb.Histogram(np_histogram=bars)
    values |= {f"moe/rows_padded/{cause}": rows for cause, rows in metrics.rows_padded.items()}
    values |= {f"moe/bytes_sent/{name}": count for name, count in metrics.bytes_sent.items()}
    run.log(values, step=step)


def expert_scalars(step: Metrics) -> dict[str, float]:
    """Return the loads, the padding and the rows without a token of some steps, from the difference of two reads."""
    counts = {f"moe/rows_padded/{cause}": rows for cause, rows in step.rows_padded.items()}
    counts |= {f"moe/rows_skipped/{cause}": rows for cause, rows in step.rows_skipped.items()}
    return {"moe/imbalance": step.imbalance, "moe/rank_imbalance": step.rank_imbalance or 0.0, **counts}


def log_from_trainer(trainer: Any, dispatcher: Dispatcher) -> None:
    """Add ``expert_scalars`` to all that a ``Trainer`` of transformers logs, in TensorBoard, W&B or elsewhere."""
    from transformers import TrainerCallback  # noqa: PLC0415 - a package that only this function needs

    class ExpertLog(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.before = dispatcher.metrics(gather=True)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            now = dispatcher.metrics(gather=True)  # on every rank, as a Trainer logs
            if logs is not None:
                logs |= expert_scalars(now - self.before)
            self.before = now

    trainer.callback_handler.callbacks.insert(0, ExpertLog())  # before those that write what is logged


def lightning_callback(dispatcher: Dispatcher) -> Any:
    """Return a callback for Lightning's ``Trainer``, which logs ``expert_scalars`` with the values of the model."""
    from lightning.pytorch import Callback  # noqa: PLC0415 - a package that only this function needs

    class ExpertLog(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.before = dispatcher.metrics(gather=True)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step % trainer.log_every_n_steps == 0:
                now = dispatcher.metrics(gather=True)
                module.log_dict(expert_scalars(now - self.before))
                self.before = now

    return ExpertLog()


def prometheus_text(metrics: Metrics, rank: int) -> str:
    """Return the totals of a rank as counters. Serve the text, or write it for node_exporter's textfile collector."""
    label = f'rank="{rank}",backend="{metrics.backend}"'
    counts = {f'tokens_total{{expert="{number}"': n for number, n in enumerate(metrics.real_tokens_per_expert.tolist())}
    counts |= {f'rows_padded_total{{cause="{cause}"': rows for cause, rows in metrics.rows_padded.items()}
    counts |= {f'bytes_sent_total{{collective="{name}"': count for name, count in metrics.bytes_sent.items()}
    return "".join(f"moe_dispatch_{name},{label}}} {value}\n" for name, value in counts.items())
