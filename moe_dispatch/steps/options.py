"""The options of ``chunks``. A config loads this module, and nothing else of the folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from moe_dispatch.seams.options import Count, Options
from moe_dispatch.seams.plug_ins import require_plug_in

if TYPE_CHECKING:
    from moe_dispatch.config import DispatcherConfig

__all__ = ["ChunkOptions"]


@final
class ChunkOptions(Options):
    """The options of ``chunks``.

    Attributes:
        tokens: Largest number of rows that a rank passes to one dispatch. A layer call with more rows runs dispatch,
            experts and combine in chunks, as many on every rank. So rows and buffers have a bound that does not grow
            with the micro-batch: see ``moe_dispatch.dispatchers.run_in_chunks``. A finite capacity is per chunk, so
            chunks can drop rows that one dispatch keeps.
        recompute: Whether each chunk is computed again in the backward, so that only one chunk's rows and activations
            exist at a time. If not, the backward keeps them all, and while experts work on one chunk, the rows of the
            next one travel.
    """

    tokens: Count
    recompute: bool = False

    def check(self, config: DispatcherConfig) -> None:
        """Raise ConfigError if the plug-in that recomputations need is not installed."""
        if self.recompute:
            require_plug_in("moe_dispatch.capabilities.recompute", "chunks.recompute needs it. Leave that out")
