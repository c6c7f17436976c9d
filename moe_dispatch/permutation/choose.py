"""Permutations by name."""

from __future__ import annotations

import difflib
import logging
from functools import cache

from moe_dispatch.errors import BackendUnavailableError, ConfigError
from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.rows import TorchPermutation
from moe_dispatch.permutation.te_rows import TransformerEnginePermutation
from moe_dispatch.permutation.triton_rows import TritonPermutation
from moe_dispatch.probing import Rejected, Usable

logger = logging.getLogger("moe_dispatch")

_CLASSES: dict[str, type[Permutation]] = {
    cls.name: cls for cls in (TorchPermutation, TritonPermutation, TransformerEnginePermutation)
}


def known_permutations() -> list[str]:
    """Every name but "auto"; the reference first."""
    return list(_CLASSES)


def probe_permutation(name: str, device_type: str) -> Usable | Rejected:
    """Whether a known permutation can move rows on devices of this type; imports what it needs. Never raises."""
    return _CLASSES[name].probe(device_type)


@cache
def choose_permutation(name: str, device_type: str) -> Permutation:
    """The permutation of a config; the same object each time, for they hold nothing of a call.

    Args:
        name: one of ``known_permutations``, honoured or refused; "auto" is Triton on CUDA devices where it can be used,
            else torch.
        device_type: of the rows it is to move.

    Raises:
        ConfigError: no such name.
        BackendUnavailableError: it cannot be used here, and why.
    """
    if name == "auto":
        return _best(device_type)
    if name not in _CLASSES:
        near = difflib.get_close_matches(name, _CLASSES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"Unknown permutation {name!r}. Known permutations: auto, {', '.join(_CLASSES)}.{hint}")
    verdict = probe_permutation(name, device_type)
    if isinstance(verdict, Rejected):
        usable = [other for other in _CLASSES if isinstance(probe_permutation(other, device_type), Usable)]
        raise BackendUnavailableError(
            f"Permutation {name!r} cannot be used here: {verdict.reason}. "
            f"Repair that, or choose one of: auto, {', '.join(usable)}."
        )
    return _CLASSES[name]()


def _best(device_type: str) -> Permutation:
    """What "auto" means; off the CPU it says why where that is not Triton, once."""
    if device_type == "cpu":
        return TorchPermutation()
    verdict = TritonPermutation.probe(device_type)
    if isinstance(verdict, Rejected):
        logger.warning("permutation=\"auto\": using 'torch'. Not triton: %s.", verdict.reason)
        return TorchPermutation()
    return TritonPermutation()
