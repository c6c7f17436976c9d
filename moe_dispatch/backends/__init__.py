"""Backends: one file or folder each behind the contract of ``base``; the registry finds them by name.

To add one, subclass ``BackendOptions`` (``name``, ``constraints``, ``open``), ``Backend`` (``dispatch``) and ``Route``
(four methods). Where rows arrive by source rank, ``rank_major.RankMajorRoute`` needs two methods only. Then list it in
``registry``, or declare an entry point. ``local`` is the smallest example.
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
    Sizes,
)
from moe_dispatch.backends.registry import known_backends, load_backend, parse_backend, register_backend
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.communication import Communicator
from moe_dispatch.probing import Rejected, Usable

__all__ = [
    "PROTOCOL",
    "Arrived",
    "Backend",
    "BackendContext",
    "BackendOptions",
    "Communicator",
    "Constraints",
    "MoEShape",
    "Rejected",
    "Route",
    "SentBytes",
    "Sizes",
    "Usable",
    "Volume",
    "known_backends",
    "load_backend",
    "parse_backend",
    "register_backend",
]
