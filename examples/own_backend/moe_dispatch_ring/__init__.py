"""The backend ``ring``, found by moe-dispatch through this package's entry point."""

from moe_dispatch_ring.backend import Ring

__all__ = ["Ring"]
