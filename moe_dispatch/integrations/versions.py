"""Versions of frameworks: compare them, and check them against the versions that an integration has run with."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

from moe_dispatch.errors import IntegrationError


def check_version(package: str, *, tested: tuple[str, ...], lowest: str) -> str:
    """Return the installed version of a framework, and warn if it lies outside the tested versions.

    Args:
        package: The distribution, such as "megatron-core".
        tested: The versions that the integration has run with, ascending; versions between them count as tested.
        lowest: The first version with the hooks that the integration needs.

    Raises:
        IntegrationError: The framework is missing, or older than ``lowest``.
    """
    runs = f"Tested versions: {', '.join(tested)}."
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise IntegrationError(
            f"{package} must be installed, got no installation. {runs} Install {package}."
        ) from error
    numbers, *bounds = (parse_version(text)[0] for text in (found, lowest, tested[0], tested[-1]))
    if numbers < bounds[0]:
        raise IntegrationError(f"{package} must be {lowest} or later, got {found}. {runs} Upgrade {package}.")
    if not bounds[1] <= numbers <= bounds[2]:
        warnings.warn(f"moe-dispatch has not run with {package} {found}. {runs}", UserWarning, stacklevel=3)
    return found


def parse_version(text: str) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of a version without trailing zeros, and whether it is a release.

    Results compare like versions: "0.18.0rc2" gives ((0, 18), False), which is less than "0.18", ((0, 18), True). A
    text without numbers, such as "main", gives ().
    """
    numbers, rest = re.fullmatch(r"((?:\d+(?:\.\d+)*)?)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    trimmed = re.sub(r"(\.0+)+$", "", numbers)
    return tuple(map(int, trimmed.split("."))) if trimmed else (), re.match(r"\.?(a|b|rc|dev)", rest) is None
