"""Keep routes in the checkpoints of a model that a framework has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

from moe_dispatch.errors import ConfigError
from moe_dispatch.recompute.contexts import keep_routes_of

# Attributes that hold a checkpointing function: in torch's CheckpointWrapper, and in layers of transformers.
_CHECKPOINT_FUNCTIONS = ("checkpoint_fn", "_gradient_checkpointing_func")


def keep_routes_in(model: nn.Module) -> None:
    """Let all checkpoints of a model keep routes, as ``keep_routes`` does for one.

    Call it when activation checkpointing has been applied. It finds layers in torch's ``checkpoint_wrapper``, as of
    torchtitan and NeMo Automodel, and those of transformers. A second call does nothing. For transformers,
    ``attach(model, keep_routes=True)`` also finds checkpoints that are enabled later.

    Raises:
        ConfigError: No module of the model is checkpointed.
    """
    found = False
    for module in model.modules():
        for name in _CHECKPOINT_FUNCTIONS:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None:
                found = True
                if not _keeps(checkpoint):
                    setattr(module, name, KeepingCheckpoint(checkpoint))
    if not found:
        raise ConfigError(
            f"keep_routes_in: a module of the model must be checkpointed, got none in {type(model).__name__}. Apply "
            "activation checkpointing first, or pass context_fn=keep_routes to your own checkpoint."
        )


def _keeps(checkpoint: Any) -> bool:
    """Return whether a checkpointing function keeps routes, or one that it wraps."""
    while checkpoint is not None:
        if isinstance(checkpoint, KeepingCheckpoint):
            return True
        checkpoint = getattr(checkpoint, "checkpoint", None)
    return False


@final
class KeepingCheckpoint:
    """A checkpointing function whose recomputations take the routes of their forwards."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(keep_routes_of(function), *args, **kwargs)
