"""What a probe finds: whether something optional can be used on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Usable:
    """It can run here."""

    version: str
    features: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Rejected:
    """It cannot run here, and why, in one sentence without a full stop."""

    reason: str
