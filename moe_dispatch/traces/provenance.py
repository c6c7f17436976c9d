"""What a recording says of where it comes from: versions, and the config that must be known where it is read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError, TraceError


def versions_here() -> dict[str, str]:
    """Of moe_dispatch, torch and Python."""
    from moe_dispatch import __version__  # noqa: PLC0415 - this package is part of it

    return {"moe_dispatch": __version__, "torch": torch.__version__, "python": platform.python_version()}


def config_from(fields: Mapping[str, Any], versions: Mapping[str, str], *, where: str) -> DispatcherConfig:
    """The config that a recording was made with.

    Args:
        fields: of the config.
        versions: of ``versions_here`` there.
        where: begins the error message, with the file.

    Raises:
        TraceError: this version does not know it, or not the backend that it names.
    """
    try:
        return DispatcherConfig(**fields)
    except ConfigError as error:
        raise TraceError(
            f"{where} must be known to this version, got one of moe_dispatch {versions.get('moe_dispatch')}: {error} "
            "Install that version, and the backend that it names."
        ) from error
