"""The seam for calls that torch traces: to compile them, or because a mode records them. An eager call runs none of it.

The plug-in of this package is ``moe_dispatch.capabilities.compiling``. It is imported by the first such call, or by the
first look for an operator of ``torch.ops.moe_dispatch``. Eager calls work without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

import torch
from torch import Tensor
from torch._ops import _OpNamespace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.seams.plug_ins import has_code

if TYPE_CHECKING:
    from moe_dispatch.dispatched import Dispatched
    from moe_dispatch.dispatchers.channel import Lease
    from moe_dispatch.layouts import Layout
    from moe_dispatch.types import Plan, Routing

_PACKAGE = "moe_dispatch.capabilities.compiling"
_IS_INSTALLED = has_code(_PACKAGE)  # found here, because Dynamo cannot trace the search


class TracedCalls(Protocol):
    """The functions of ``moe_dispatch.capabilities.compiling.calls``, each of which takes the place of eager code."""

    def dispatch(
        self, lease: Lease, x: Tensor, routing: Routing | None, layout: Layout, plan: Plan | Layout | None
    ) -> Dispatched:
        """Run ``Dispatcher.dispatch``."""

    def dispatch_again(self, x: Tensor, again: Dispatched) -> Dispatched:
        """Run ``Dispatcher.dispatch(x, again=again)``, if ``dispatch`` of this class made ``again``."""

    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Run ``Dispatcher.combine``, if ``dispatch`` of this class made ``sent``."""

    def split(self, rows: Tensor, counts: Tensor) -> Sequence[Tensor]:
        """Split rows by expert."""

    def aligned_product(self, rows: Tensor, weights: Tensor, offs: Tensor, padding: Tensor | None) -> Tensor:
        """Multiply each expert's rows by the expert's matrix, both of them aligned as torch's grouped GEMM wants."""


def traced_calls() -> TracedCalls:
    """Return what runs the calls that torch traces.

    Raises:
        ConfigError: The plug-in is not installed.
    """
    if not _IS_INSTALLED:
        refuse_traced(
            f"{_PACKAGE} is not installed. torch.compile and selective checkpointing of a dispatcher need it. Keep "
            "dispatchers out of them, or install the whole package.",
            ConfigError,
        )
    # A statement, because Dynamo can trace neither ``import_module`` nor ``load_plug_in``.
    from moe_dispatch.capabilities.compiling import calls  # noqa: PLC0415 - an eager call never needs it

    return calls


def is_traced() -> bool:
    """Return whether a mode of torch traces the call, or a selective checkpoint, which can save results of operators.

    Then a verb calls operators. Under other modes it calls the backend directly, which saves 20 to 50 us a call.
    """
    return any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
        # Only torch's own modes for tracing (fake tensors, proxies) have this key; modes of users have none.
        or getattr(mode, "_mode_key", None) is not None
        for mode in _get_current_dispatch_mode_stack()
    )


def refuse_traced(message: str, error: type[Exception] = StateError) -> NoReturn:
    """Refuse a call that cannot be compiled, or recorded for selective checkpointing.

    Without ``fullgraph``, Dynamo gives up a frame that raises while it is traced, and traces the functions that the
    frame calls one by one. After a break of the graph, the error is raised when the call runs.

    Raises:
        Exception: Always, of type ``error``. While torch.compile traces with ``fullgraph``, it is ``Unsupported`` with
            the same message.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=message)
    raise error(message)


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context without fake tensors: the ranks exchange numbers while they build a dispatcher."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: PLC0415 - an eager layer never needs it

    return unset_fake_temporarily()


@final
class _Operators(_OpNamespace):
    """``torch.ops.moe_dispatch``. The first look for an operator imports the plug-in, which registers all of them."""

    __module__ = _OpNamespace.__module__  # part of the name of an operator in a saved program

    def __getattr__(self, name: str) -> Any:
        if _IS_INSTALLED and not name.startswith("_"):
            import_module(f"{_PACKAGE}.operators")  # waits if another thread is importing it
        return super().__getattr__(name)


torch.ops.__dict__["moe_dispatch"] = _Operators("moe_dispatch")
