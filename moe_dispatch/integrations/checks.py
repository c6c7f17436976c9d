"""What integrations refuse: frameworks that are missing or too old, spare expert slots, quantised rows, and chunks."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moe_dispatch.backends.wire import wire_format
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.seams.options import spelled_out
from moe_dispatch.versions import SUPPORT


def check_version(package: str) -> str:
    """Return the installed version of a framework, and warn if it lies outside the tested versions.

    Args:
        package: The distribution, a key of ``SUPPORT`` with a lowest version.

    Raises:
        IntegrationError: The framework is missing, or older than the lowest version that is served.
    """
    tested, lowest = SUPPORT[package].tested, SUPPORT[package].lowest
    assert lowest is not None
    runs = f"Tested versions: {', '.join(tested)}."
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise IntegrationError(f"{package} is not installed. {runs} Install {package}.") from error
    numbers, *bounds = (parse_version(text)[0] for text in (found, lowest, tested[0], tested[-1]))
    if numbers < bounds[0]:
        raise IntegrationError(f"{package} {found} is older than {lowest}. {runs} Upgrade {package}.")
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


def checked_options(*, num_experts: int = 1, top_k: int = 1, **options: Any) -> DispatcherConfig:
    """Return a config with sizes of the model that are not known yet, which checks all other fields.

    Raises:
        ConfigError: An option is unknown or wrong.
    """
    wire = options.get("wire")
    fits = wire_format(None if wire is None else spelled_out("wire", wire).get("dtype")).hidden_multiple
    fields = {**options, "num_experts": num_experts, "top_k": top_k, "hidden_size": fits}
    return DispatcherConfig.load(environment={}, **fields)


def refuse_spare_slots(where: str, config: DispatcherConfig) -> None:
    """Refuse spare expert slots. The experts of a framework are those that a rank owns, without copies.

    Raises:
        ConfigError: The config has spare expert slots.
    """
    if config.slot_options is not None:
        raise ConfigError(
            f"{where}: this integration runs the experts that a rank owns, so it has no spare expert slots, got "
            f"balance={config.balance!r}. Leave it out, or call a Dispatcher with SlotWeights."
        )


def refuse_quantised_rows(where: str, config: DispatcherConfig) -> None:
    """Refuse ``wire.deliver="quantised"``. The experts of a framework compute in the dtype of the model.

    Raises:
        ConfigError: The config delivers quantised rows.
    """
    if config.wire_options is not None and config.wire_options.delivers_quantised:
        raise ConfigError(
            f"{where}: this integration hands rows to the framework's experts, which read no quantised rows, got "
            'wire.deliver="quantised". Leave wire.deliver out.'
        )


def refuse_chunks(where: str, config: DispatcherConfig, instead: str = "use smaller micro-batches") -> None:
    """Refuse ``chunks``. A framework that calls the verbs and the experts itself does so once for all rows.

    Args:
        where: Name of the caller, which the error shows.
        config: Config of the dispatcher.
        instead: The other way that the error recommends.

    Raises:
        ConfigError: The config has ``chunks``.
    """
    if config.chunks is not None:
        raise ConfigError(
            f"{where}: the framework runs its experts once for all rows of a call, so there are no chunks, got "
            f"chunks={config.chunks!r}. Leave chunks out, and {instead}."
        )
