"""The backend ``ring``, found by moe-dispatch through this package's entry point."""

from moe_dispatch_ring.backend import RingOptions

__all__ = ["RingOptions"]
