"""Log what a dispatcher has counted to TensorBoard or Weights & Biases, or write it in the text format of Prometheus.

Read ``dispatcher.metrics(gather=True)`` on every rank, because gathering is collective, and log on one.
"""

from __future__ import annotations

from typing import Any

from moe_dispatch.dispatchers import Metrics


def log_to_tensorboard(writer: Any, metrics: Metrics, before: Metrics, step: int) -> None:
    """Log the loads since ``before``, by layer, and the totals of padding and bytes, with a ``SummaryWriter``."""
    for layer, total in metrics.tokens_by_layer.items():
        tokens = total - before.tokens_by_layer.get(layer, 0)
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
    for layer, total in metrics.tokens_by_layer.items():
        tokens = total - before.tokens_by_layer.get(layer, 0)
        bars = (tokens.tolist(), list(range(len(tokens) + 1)))
        values[f"moe/imbalance/{layer}"] = tokens.max() / tokens.double().mean()
        values[f"moe/tokens_per_expert/{layer}"] = wandb.Histogram(np_histogram=bars)
    values |= {f"moe/rows_padded/{cause}": rows for cause, rows in metrics.rows_padded.items()}
    values |= {f"moe/bytes_sent/{name}": count for name, count in metrics.bytes_sent.items()}
    run.log(values, step=step)


def prometheus_text(metrics: Metrics, rank: int) -> str:
    """Return the totals of a rank as counters. Serve the text, or write it for node_exporter's textfile collector."""
    label = f'rank="{rank}",backend="{metrics.backend}"'
    counts = {f'tokens_total{{expert="{number}"': n for number, n in enumerate(metrics.real_tokens_per_expert.tolist())}
    counts |= {f'rows_padded_total{{cause="{cause}"': rows for cause, rows in metrics.rows_padded.items()}
    counts |= {f'bytes_sent_total{{collective="{name}"': count for name, count in metrics.bytes_sent.items()}
    return "".join(f"moe_dispatch_{name},{label}}} {value}\n" for name, value in counts.items())
