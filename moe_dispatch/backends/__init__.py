"""Backends. Each fulfils the contract of ``base``, and the registry finds it by name. Other files are shared by them.

To add a backend, subclass ``BackendOptions`` (``name``, ``constraints``, ``open``), ``Backend`` (``dispatch``) and
``Route`` (four methods). If rows arrive ordered by source rank, subclass ``rank_major.RankMajorRoute`` instead of
``Route``, which needs only two methods. Then list the backend in ``registry``, or declare an entry point. ``local`` is
the smallest example.
"""

from moe_dispatch.backends.base import (
    PROTOCOL,
    Arrived,
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    Route,
)
from moe_dispatch.backends.capacity import GraphSafeSupport
from moe_dispatch.backends.registry import known_backends, load_backend, parse_backend, register_backend
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.backends.wire import WireSupport
from moe_dispatch.communication import Communicator
from moe_dispatch.seams.plug_ins import Rejected, Usable
from moe_dispatch.types import Sizes

__all__ = [
    "PROTOCOL",
    "Arrived",
    "Backend",
    "BackendContext",
    "BackendOptions",
    "Communicator",
    "Constraints",
    "GraphSafeSupport",
    "MoEShape",
    "Rejected",
    "Route",
    "SentBytes",
    "Sizes",
    "Usable",
    "Volume",
    "WireSupport",
    "known_backends",
    "load_backend",
    "parse_backend",
    "register_backend",
]
