"""Which versions of a framework its integration has run with."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

from moe_dispatch.errors import IntegrationError


def check_version(package: str, *, tested: tuple[str, ...], lowest: str) -> str:
    """The installed version of a framework.

    Args:
        package: the distribution, as "megatron-core".
        tested: the versions that the integration has run with, ascending; those between count as good.
        lowest: the first version that has the hooks it uses.

    Raises:
        IntegrationError: it is missing, or older than ``lowest``.

    Warns:
        UserWarning: it is older than the first tested version or newer than the last; it goes on with it.
    """
    runs = f"Tested are {', '.join(tested)}."
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise IntegrationError(f"{package} must be installed, got none. {runs} Install {package}.") from error
    if _release(found) < _release(lowest):
        raise IntegrationError(f"{package} must be {lowest} or later, got {found}. {runs} Upgrade {package}.")
    if not _release(tested[0]) <= _release(found) <= _release(tested[-1]):
        warnings.warn(f"moe-dispatch has not run with {package} {found}. {runs}", UserWarning, stacklevel=3)
    return found


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers: "0.19.2rc1" counts as 0.19.2."""
    parts = ("".join(takewhile(str.isdigit, part)) for part in text.split("+")[0].split("."))
    return tuple(int(part) for part in takewhile(bool, parts))
