"""The buffer class of each emulated release of HybridEP."""

from __future__ import annotations

import functools

from moe_dispatch_testing.emulation.hybrid.buffer import HybridBuffer
from moe_dispatch_testing.emulation.hybrid.call import indices_to_map
from moe_dispatch_testing.emulation.hybrid.release import RELEASES
from moe_dispatch_testing.emulation.signatures import narrowed, recorded

__all__ = ["hybrid_ep_buffer", "indices_to_map"]

_NEWEST = "hybridep-746"
# Methods of HybridBuffer whose signatures were different before the newest release: fewer parameters, other defaults.
_CHANGED = ("__init__", "dispatch", "dispatch_with_permute")


@functools.cache
def hybrid_ep_buffer(release: str) -> type:
    """Return the buffer class of a release, one of those in ``RELEASES``."""
    parameters = recorded(release)["classes"]["HybridEPBuffer"]
    changed = () if release == _NEWEST else _CHANGED
    methods = {name: narrowed(getattr(HybridBuffer, name), parameters[name]) for name in changed}
    return type("HybridEPBuffer", (HybridBuffer,), {"release": RELEASES[release], **methods})
