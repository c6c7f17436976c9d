"""The implementations of the one-rank reorder, found by name."""

from __future__ import annotations

import logging
import pkgutil
from functools import cache

from moe_dispatch.errors import BackendUnavailableError, ConfigError, did_you_mean
from moe_dispatch.permutation.base import Permutation
from moe_dispatch.permutation.rows import TorchPermutation
from moe_dispatch.seams.plug_ins import Rejected, Usable

logger = logging.getLogger("moe_dispatch")

# Each is imported when it is asked for.
_CLASSES = {
    "torch": "moe_dispatch.permutation.rows:TorchPermutation",
    "triton": "moe_dispatch.permutation.triton_rows:TritonPermutation",
}


def _class_of(name: str) -> type[Permutation]:
    found: type[Permutation] = pkgutil.resolve_name(_CLASSES[name])
    return found


def known_permutations() -> list[str]:
    """Return the names of all implementations, the torch reference first. "auto" is not one of them."""
    return list(_CLASSES)


def probe_permutation(name: str, device_type: str) -> Usable | Rejected:
    """Return whether a known permutation can move rows on devices of this type. Never raises."""
    return _class_of(name).probe(device_type)


@cache
def choose_permutation(name: str, device_type: str) -> Permutation:
    """Return the permutation that a config names.

    A permutation keeps nothing between calls, so all callers get one cached object.

    Args:
        name: A name of ``known_permutations``, or "auto". A named permutation is used or refused, never replaced.
            "auto" is Triton on CUDA devices if Triton can be used there, else torch.
        device_type: Type of the device that holds the rows.

    Raises:
        ConfigError: The name is unknown.
        BackendUnavailableError: The named permutation cannot be used here; the text says why.
    """
    if name == "auto":
        if device_type == "cpu":
            return TorchPermutation()
        verdict = probe_permutation("triton", device_type)
        if isinstance(verdict, Usable):
            return _class_of("triton")()
        logger.warning("permutation=\"auto\": using 'torch', because 'triton' cannot be used: %s.", verdict.reason)
        return TorchPermutation()
    if name not in _CLASSES:
        raise ConfigError(
            f"Unknown permutation {name!r}. Known permutations: auto, {', '.join(_CLASSES)}."
            f"{did_you_mean(name, _CLASSES)}"
        )
    verdict = probe_permutation(name, device_type)
    if isinstance(verdict, Rejected):
        usable = [other for other in _CLASSES if isinstance(probe_permutation(other, device_type), Usable)]
        raise BackendUnavailableError(
            f"Permutation {name!r} cannot be used here: {verdict.reason}. "
            f"Repair that, or choose one of: auto, {', '.join(usable)}."
        )
    return _class_of(name)()
