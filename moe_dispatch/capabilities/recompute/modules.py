"""Keep routes in the checkpoints of a model that a framework has wrapped."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_dispatch.capabilities.recompute.contexts import Way, keep_routes_of
from moe_dispatch.capabilities.recompute.nesting import Asker, site_below
from moe_dispatch.errors import ConfigError
from moe_dispatch.seams.calls import of_thread

# Attributes that hold a checkpointing function: in torch's CheckpointWrapper, and in layers of transformers.
_CHECKPOINT_FUNCTIONS = ("checkpoint_fn", "_gradient_checkpointing_func")
_ROUTERS = ("router", "gate")  # what models call the module that chooses experts


def keep_routes_in(model: nn.Module, *, only_added: bool = False) -> None:
    """Let all checkpoints of a model keep routes, as ``keep_routes`` does for one.

    Call it when activation checkpointing has been applied. It finds layers in torch's ``checkpoint_wrapper``, as of
    torchtitan and NeMo Automodel, modules whose forward ``torch_remat`` checkpoints, as in torchtitan's main branch,
    and layers of transformers. A second call does nothing. For transformers,
    ``attach(model, keep_routes=True)`` also finds checkpoints that are enabled later.

    Modules called ``router`` or ``gate`` get the ids of their forwards, as by ``keep_ids``, where they call
    ``torch.topk``.

    Args:
        model: The model.
        only_added: As in ``keep_routes``, for each checkpoint.

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
                    setattr(module, name, KeepingCheckpoint(checkpoint, lambda _: only_added))
        forward = module.__dict__.get("forward")
        if isinstance(forward, KeepingForward):
            found = True
        elif (options := _options_of_remat(forward)) is not None:
            found = True
            module.forward = KeepingForward(*options, only_added=only_added)
    if not found:
        raise ConfigError(
            f"keep_routes_in: a module of the model must be checkpointed, got none in {type(model).__name__}. Apply "
            "activation checkpointing first, or pass context_fn=keep_routes to your own checkpoint."
        )
    keep_ids_in(model)


def keep_ids_in(model: nn.Module) -> None:
    """Let the routers of a model choose the experts of the forward in recomputations. A second call does nothing."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _ROUTERS and not isinstance(module.forward, KeepingRouter):
            module.forward = KeepingRouter(module.forward)


def _keeps(checkpoint: Any) -> bool:
    """Return whether a checkpointing function keeps routes, or one that it wraps."""
    while checkpoint is not None:
        if isinstance(checkpoint, KeepingCheckpoint):
            return True
        checkpoint = getattr(checkpoint, "checkpoint", None)
    return False


@final
class KeepingCheckpoint:
    """A checkpointing function whose recomputations take the routes of their forwards.

    Args:
        checkpoint: The function.
        only_added: Returns for a checkpointed function what ``keep_routes`` calls ``only_added``.
    """

    def __init__(self, checkpoint: Callable[..., Any], only_added: Callable[[Callable[..., Any]], bool]) -> None:
        self.checkpoint, self.only_added = checkpoint, only_added

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(keep_routes_of(function, only_added=self.only_added(function)), *args, **kwargs)


def _options_of_remat(forward: Any) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Return the function that ``torch_remat.checkpoint`` has wrapped, and its options; None for another forward.

    Raises:
        ConfigError: This release of torch_remat keeps them elsewhere.
    """
    if not isinstance(forward, FunctionType) or not str(forward.__globals__.get("__name__")).startswith("torch_remat."):
        return None
    kept = inspect.getclosurevars(forward).nonlocals
    names = [name for name in inspect.signature(_remat().checkpoint).parameters if name != "preserve_rng_state"]
    if missing := [name for name in ("function", *names) if name not in kept]:
        raise ConfigError(
            f"keep_routes_in: a checkpoint of torch_remat must hold its options as release 0.2.2 does, got none called "
            f"{missing[0]}. Wrap the block yourself: torch_remat.checkpoint()(keep_routes_of(block))(x)."
        )
    return kept["function"], {name: kept[name] for name in names}


def _remat() -> Any:
    return sys.modules["torch_remat"]  # there, because it has made the checkpoint


@final
class KeepingForward:
    """A forward that torch_remat checkpoints, anew for each call, so that each keeps routes of its own.

    Args:
        function: The forward without a checkpoint.
        options: Those of ``torch_remat.checkpoint``.
        only_added: As in ``keep_routes``.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], *, only_added: bool) -> None:
        self.function, self.options, self.only_added = function, options, only_added

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = keep_routes_of(self.function, only_added=self.only_added)
        return _remat().checkpoint(**self.options)(kept)(*args, **kwargs)


@final
class KeepingRouter:
    """The forward of a router, whose ``torch.topk`` returns the ids of the forward in a recomputation.

    Each ``topk`` is told from the others by its line in the router's code. A router may have some that it calls only
    where gradients are recorded, such as for an auxiliary loss. A reentrant forward has no ids for these, so they stay
    as they are.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __get__(self, router: nn.Module, _: type) -> Callable[..., Any]:
        """Bind it, if it is the method of a class."""
        return partial(self._run, router, router)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        router = getattr(self.forward, "__self__", None)
        return self._run(router if isinstance(router, nn.Module) else self, *args, **kwargs)

    def _run(self, router: object, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(of_thread.interceptor, Way):
            return self.forward(*args, **kwargs)
        with _KeptTopK(router):
            return self.forward(*args, **kwargs)


@final
class _KeptTopK(TorchFunctionMode):
    """While it is entered, ``torch.topk`` returns the ids of the forward.

    Args:
        router: Stands for the router that runs.
    """

    def __init__(self, router: object) -> None:
        super().__init__()
        self._router = weakref.ref(router)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        with torch.no_grad():
            chosen = func(*args, **(kwargs or {}))
        call = dict(zip(("input", "k", "dim"), args, strict=False)) | (kwargs or {})
        ids, way = chosen.indices, of_thread.interceptor
        if isinstance(way, Way):
            ids = way.ids(ids, Asker(self._router, site_below(_ROUTER), ids.shape, ids.dtype))
        # The forward and the recomputation do the same, so that they save the same tensors.
        return torch.return_types.topk((call["input"].gather(call.get("dim", -1), ids), ids))


_ROUTER = KeepingRouter._run.__code__
