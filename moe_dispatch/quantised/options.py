"""What a config says about the format of its rows: ``wire_dtype``, ``grad_wire_dtype`` and ``deliver``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from pydantic import BaseModel, ConfigDict

from moe_dispatch.backends.wire import wire_format
from moe_dispatch.errors import ConfigError
from moe_dispatch.quantised.formats import FORMATS, ScaledFormat

if TYPE_CHECKING:
    from moe_dispatch.backends.base import Constraints
    from moe_dispatch.config import DispatcherConfig


@final
class WireOptions(BaseModel):
    """The options of this plug-in.

    Attributes:
        dtype: Name of the format: the ``wire_dtype``.
        gradients: Whether the gradient rows of combine travel in this format too.
        deliver: Form in which experts get rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    dtype: str | None
    gradients: bool = False
    deliver: Literal["rows", "quantised"] = "rows"

    @classmethod
    def of(cls, dtype: str | None, gradients: str | None, deliver: Literal["rows", "quantised"]) -> WireOptions:
        """Return the options that ``wire_dtype``, ``grad_wire_dtype`` and ``deliver`` mean.

        Raises:
            ConfigError: The dtypes differ.
        """
        if gradients not in (None, dtype) or gradients == "bfloat16":
            raise ConfigError(
                f"grad_wire_dtype must be None or the quantised wire_dtype, got {gradients!r} beside "
                f"wire_dtype={dtype!r}."
            )
        return cls(dtype=dtype, gradients=gradients is not None, deliver=deliver)

    def check(self, config: DispatcherConfig) -> None:
        """Raise ConfigError if the options contradict each other or other fields of the config."""
        form = wire_format(self.dtype)
        rules = [
            (
                config.hidden_size % form.hidden_multiple,
                f'wire_dtype "{self.dtype}": hidden_size ({config.hidden_size}) must be a multiple of '
                f"{form.hidden_multiple}.",
            ),
        ]
        if self.deliver == "quantised":
            scaled = form if issubclass(form, ScaledFormat) else None
            rules += [
                (
                    scaled is None,
                    f'deliver="quantised" needs wire_dtype {" or ".join(map(repr, FORMATS))}, got {self.dtype!r}.',
                ),
                (
                    scaled is not None and config.pad_multiple_rows % scaled.row_multiple,
                    f'deliver="quantised": the grouped GEMMs for {self.dtype} need pad_multiple to be a multiple of '
                    f"{scaled and scaled.row_multiple}, got {config.pad_multiple_rows}.",
                ),
            ]
        for broken, rule in rules:
            if broken:
                raise ConfigError(rule)

    def check_backend(self, where: str, needs: Constraints) -> None:
        """Raise ConfigError if a backend cannot do what the options ask. The error begins with ``where``."""
        for broken, rule in (
            (
                self.gradients and needs.quantised_gradients == "no",
                "it cannot send gradients in 8 bits. Set grad_wire_dtype=None.",
            ),
            (
                not self.gradients and needs.quantised_gradients == "must",
                "its routes keep the dtype of the rows, so gradients of combine must have it too, got "
                f'wire_dtype="{self.dtype}" without grad_wire_dtype. Set grad_wire_dtype="{self.dtype}".',
            ),
            (
                self.deliver == "quantised" and not needs.delivers_quantised,
                'it cannot deliver quantised rows. Set deliver="rows", or use another backend.',
            ),
        ):
            if broken:
                raise ConfigError(f"{where}: {rule}")
