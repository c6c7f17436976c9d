"""moe-dispatch: alignment and token movement for mixture-of-experts layers.

A model hands over any number of tokens in any layout and gets back a tensor of the same shape; which backend moved them
is a string in a config.
"""

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import Dispatcher, build_dispatcher
from moe_dispatch.dispatchers.capture import capture
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.layouts import BSHD, SBHD, THD, Masked, Rows
from moe_dispatch.types import Dispatched, Plan, Routing

__version__ = "0.1.0.dev0"

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
