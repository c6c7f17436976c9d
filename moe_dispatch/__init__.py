"""moe-dispatch: alignment and token movement for mixture-of-experts layers.

A model hands over any number of tokens in any layout and gets back a tensor of the same shape; which backend moved them
is a string in a config.
"""

from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

__all__ = [
    "BSHD",
    "SBHD",
    "THD",
    "Dispatched",
    "Dispatcher",
    "DispatcherConfig",
    "Masked",
    "MoEDispatchError",
    "Plan",
    "Routing",
    "Rows",
    "build_dispatcher",
    "capture",
]

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig
    from moe_dispatch.cuda_graphs import capture
    from moe_dispatch.dispatched import Dispatched
    from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
    from moe_dispatch.errors import MoEDispatchError
    from moe_dispatch.layouts import BSHD, SBHD, THD, Masked, Rows
    from moe_dispatch.types import Plan, Routing
else:
    # Names are imported on first use. So the command can show its help, and complete words in a shell, without
    # importing torch, which takes more than a second.
    _MODULES = {
        "moe_dispatch.config": ("DispatcherConfig",),
        "moe_dispatch.dispatchers": ("Dispatcher", "build_dispatcher"),
        "moe_dispatch.cuda_graphs": ("capture",),
        "moe_dispatch.errors": ("MoEDispatchError",),
        "moe_dispatch.layouts": ("BSHD", "SBHD", "THD", "Masked", "Rows"),
        "moe_dispatch.dispatched": ("Dispatched",),
        "moe_dispatch.types": ("Plan", "Routing"),
    }

    def __getattr__(name):
        """Import a public name."""
        from importlib import import_module  # noqa: PLC0415

        for module, names in _MODULES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        """List the public names, imported or not, and no module that was imported."""
        return [*__all__, "__version__"]
