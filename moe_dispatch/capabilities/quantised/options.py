"""The options of ``wire``, for every format but "bfloat16"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from moe_dispatch.backends.wire import WireOptions, wire_format
from moe_dispatch.capabilities.quantised.formats import FORMATS, ScaledFormat
from moe_dispatch.errors import ConfigError

if TYPE_CHECKING:
    from moe_dispatch.backends.base import Constraints
    from moe_dispatch.config import DispatcherConfig


@final
class QuantisedOptions(WireOptions):
    """The options of ``wire="float8_e4m3fn"``, ``wire="mxfp8"`` and formats of other packages.

    Attributes:
        dtype: Format in which rows travel between ranks. "float8_e4m3fn" and "mxfp8" quantise the rows of dispatch to
            float8_e4m3fn numbers, the first with one float32 scale for every 128 columns, the second with one power of
            two (e8m0) for every 32. The rows of combine, and gradients, then travel in bfloat16. The gradient of the
            quantisation is the identity (straight-through).
        gradients: Whether the gradient rows of combine travel in this format too. With ``deliver="quantised"`` and
            ``weights="experts"``, ``quantised_gradient`` of ``moe_dispatch.quantised`` has them as they travelled.
        deliver: Form in which experts get rows. "rows" widens them to the model's dtype. "quantised" leaves them as
            they travelled, in ``sent.quantised``, for a grouped GEMM that takes such rows; ``sent.rows`` are widened
            when they are read. ``pad_multiple`` must be a multiple of what their GEMMs need: 32 for "mxfp8", 128 for
            "float8_e4m3fn".
    """

    gradients: bool = False
    deliver: Literal["rows", "quantised"] = "rows"

    @property
    def of_gradients(self) -> str | None:
        return self.dtype if self.gradients else None

    @property
    def delivers_quantised(self) -> bool:
        return self.deliver == "quantised"

    def check(self, config: DispatcherConfig) -> None:
        form = wire_format(self.dtype)
        if config.hidden_size % form.hidden_multiple:
            raise ConfigError(
                f'wire "{self.dtype}": hidden_size ({config.hidden_size}) must be a multiple of {form.hidden_multiple}.'
            )
        if not self.delivers_quantised:
            return
        if not issubclass(form, ScaledFormat):
            raise ConfigError(
                f'wire.deliver="quantised" needs wire.dtype {" or ".join(map(repr, FORMATS))}, got {self.dtype!r}.'
            )
        if config.pad_multiple_rows % form.row_multiple:
            raise ConfigError(
                f'wire.deliver="quantised": the grouped GEMMs for "{self.dtype}" need pad_multiple to be a multiple of '
                f"{form.row_multiple}, got {config.pad_multiple_rows}."
            )

    def check_backend(self, where: str, needs: Constraints) -> None:
        for broken, rule in (
            (
                self.gradients and needs.wire.gradients == "no",
                "it cannot send gradients in 8 bits. Leave wire.gradients out.",
            ),
            (
                not self.gradients and needs.wire.gradients == "must",
                "its routes keep the dtype of the rows, so gradients of combine must have it too. Set "
                f'wire={{"dtype": "{self.dtype}", "gradients": True}}.',
            ),
            (
                self.delivers_quantised and not needs.wire.delivers,
                "it cannot deliver quantised rows. Leave wire.deliver out, or use another backend.",
            ),
        ):
            if broken:
                raise ConfigError(f"{where}: {rule}")
