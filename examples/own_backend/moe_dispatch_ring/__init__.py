"""The backend ``ring``. moe-dispatch finds it through the entry point of this package."""

from moe_dispatch_ring.backend import RingOptions

__all__ = ["RingOptions"]
