"""The software versions and the config of a recording."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError, TraceError


def versions_here() -> dict[str, str]:
    """Return the versions of moe_dispatch, torch and Python."""
    from moe_dispatch import __version__  # noqa: PLC0415 - this package is part of it

    return {"moe_dispatch": __version__, "torch": torch.__version__, "python": platform.python_version()}


def config_from(fields: Mapping[str, Any], versions: Mapping[str, str], *, where: str) -> DispatcherConfig:
    """Make the config of a recording from its fields.

    Raises:
        TraceError: This version does not know a field or the backend. The error begins with ``where``, and names the
            version that made the recording.
    """
    try:
        return DispatcherConfig(**fields)
    except ConfigError as error:
        raise TraceError(
            f"{where} must be valid in this version, got a config of moe_dispatch {versions.get('moe_dispatch')}: "
            f"{error} Install that version, and the backend of the config."
        ) from error
