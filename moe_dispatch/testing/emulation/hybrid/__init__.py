"""The buffer class of each emulated release of HybridEP."""

from __future__ import annotations

from moe_dispatch.errors import ConfigError
from moe_dispatch.testing.emulation.hybrid.ragged import BufferOf744
from moe_dispatch.testing.emulation.hybrid.release_0ed15b5 import HybridEpBuffer
from moe_dispatch.testing.emulation.hybrid.routing import indices_to_map
from moe_dispatch.testing.emulation.hybrid.uniform import BufferOf94a9f8f, BufferOf34152ae

__all__ = ["hybrid_ep_buffer", "indices_to_map"]

_CURRENT = (BufferOf34152ae, BufferOf94a9f8f, BufferOf744)
for _buffer in _CURRENT:
    _buffer.__name__ = _buffer.__qualname__ = "HybridEPBuffer"

_CLASSES: dict[str, type] = {"hybridep-0ed15b5": HybridEpBuffer} | {buffer.release.name: buffer for buffer in _CURRENT}


def hybrid_ep_buffer(release: str) -> type:
    """The class of that release, under its name there: HybridEpBuffer in 0ed15b5, HybridEPBuffer later.

    Raises:
        ConfigError: no such release.
    """
    if release not in _CLASSES:
        raise ConfigError(f"Unknown release of HybridEP {release!r}. Emulated releases: {', '.join(sorted(_CLASSES))}.")
    return _CLASSES[release]
