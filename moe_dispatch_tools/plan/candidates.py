"""Backends of a plan: their needs and their bytes, without a process group and without their libraries."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

import torch

from moe_dispatch.backends.base import BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.volume import SentBytes, Volume
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import check_buffers, check_group, check_max_rows
from moe_dispatch.errors import BackendUnavailableError, ConfigError, MoEDispatchError
from moe_dispatch.probing import Usable
from moe_dispatch_tools.names import NamedBackend

# Releases to plan if deep_ep is not installed. This package emulates them, so it knows their rules.
_RELEASES = {"deepep": ("v1.2.1", "v2.5.0"), "hybridep": ("hybridep-746",)}
_AGREED_INTEGERS = 7  # int64 with which dispatchers agree on row counts


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A backend with options, or a release of its library.

    Attributes:
        label: Name of the backend, with the release if its library is not installed.
        rules: Source of its rules: an installed version, or a release.
        options: Options of the backend; None if it cannot be imported.
        device: Device that a release runs on; None for an installed backend.
        needs: Constraints of the backend, with the overrides of the config; None if the backend raised an error.
        refused: Why the backend cannot run this config on this group; None if it can.
    """

    label: str
    rules: str = ""
    options: BackendOptions | None = None
    device: str | None = None
    needs: Constraints | None = None
    refused: str | None = None

    def wire(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes | None:
        """Return the bytes that the backend sends; None if it cannot say."""
        assert self.options is not None
        return self.options.wire_bytes(shape, volume, dtype)

    def footprint(self, shape: MoEShape, rows: int, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes that a graph-safe dispatch of ``rows`` rows allocates, by purpose."""
        assert self.options is not None
        assert self.needs is not None
        assert shape.max_tokens_per_rank is not None
        sizes = dataclasses.replace(self.needs.sizes(shape.max_tokens_per_rank), capacity=self.options.capacity(shape))
        return self.options.footprint(shape, sizes, rows, dtype)

    def agreement_bytes(self, config: DispatcherConfig, shape: MoEShape) -> int:
        """Return the bytes that a rank sends to agree on the row counts of a micro-batch, on a group of one device."""
        assert self.needs is not None
        agrees = self.needs.equal_rows or self.needs.group_max
        if not agrees or config.graph_safe or config.row_counts_policy not in ("agree", "check"):
            return 0
        integers = _AGREED_INTEGERS
        if self.needs.counts_with_sizes and config.balance is None:  # those of each rank, and sums of counts
            integers = _AGREED_INTEGERS * shape.ep_size + 1 + shape.num_experts
        return 2 * 8 * integers * (shape.ep_size - 1) // shape.ep_size


def candidates(named: NamedBackend, config: DispatcherConfig, shape: MoEShape, rows: int) -> list[Candidate]:
    """Return a backend if its library is installed, and else the known releases of its library.

    Args:
        named: Name and options of the backend.
        config: Config for any backend.
        shape: Sizes of the group.
        rows: Largest number of rows of a rank.

    Raises:
        ConfigError: There is no such backend or option.
    """
    try:
        cls = named.load()
    except BackendUnavailableError as error:  # the package of a third party
        return [Candidate(label=named.label, refused=str(error))]
    spec = named.spec()
    options = cls.model_validate(named.options)
    found = Candidate(label=named.label, options=options)
    try:
        config = config.replace(backend=spec)
    except ConfigError as error:  # an option that does not fit the config
        return [dataclasses.replace(found, refused=str(error))]
    verdict = options.probe()
    if isinstance(verdict, Usable):
        return [_checked(dataclasses.replace(found, rules=verdict.version), config, shape, rows)]
    absent = f"not usable here: {verdict.reason}"
    releases = [
        dataclasses.replace(
            found,
            label=f"{named.label} {release.removeprefix(cls.name + '-')}",
            rules=f"rules of {release}; {absent}",
            options=options.model_copy(update={"emulate": release}),
            device="cuda",
        )
        for release in _RELEASES.get(cls.name, ())
    ]
    return [_checked(release, config, shape, rows) for release in releases] or [
        dataclasses.replace(found, refused=absent)
    ]


def _checked(candidate: Candidate, config: DispatcherConfig, shape: MoEShape, rows: int) -> Candidate:
    """Add the constraints of a candidate. Add the error if the config does not meet them."""
    options, needs, refused = candidate.options, None, None
    assert options is not None
    try:
        needs = dataclasses.replace(options.constraints(shape), **config.constraints.given())
        if candidate.device is not None:
            needs = dataclasses.replace(needs, devices=frozenset({candidate.device}))
        check_group(config, options.name, shape, needs)
        if config.graph_safe:
            check_buffers(options.name, options.capacity(shape))
        check_max_rows(f"Backend {options.name!r}", needs.padded(rows), needs)
    except MoEDispatchError as error:
        refused = str(error)
    return dataclasses.replace(candidate, needs=needs, refused=refused)
