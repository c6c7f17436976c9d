"""Backends as a plan sees them: needs and bytes, without a process group, also of libraries that are not here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

import torch

from moe_dispatch.backends.base import Backend, BackendContext, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.volume import Volume, Wire
from moe_dispatch.cli.names import NamedBackend
from moe_dispatch.communication import Communicator
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import check_buffers, check_group, check_max_rows
from moe_dispatch.errors import BackendUnavailableError, ConfigError, MoEDispatchError
from moe_dispatch.probing import Usable

# What is planned where deep_ep is not installed: the releases whose rules this package knows and emulates.
_RELEASES = {"deepep": ("v1.2.1", "v2-2.1.0"), "hybridep": ("hybridep-94a9f8f",)}
_AGREED_BYTES = 3 * 8  # a dispatcher's agreement on row counts: three int64


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A backend with options.

    Attributes:
        label: its name, with the release where that is not installed.
        rules: where its needs are known from.
        cls: the class.
        options: its options.
        needs: its constraints, with what the config overrides; None where it could not say.
        refused: why the config cannot be used with it on this group; None where it can.
    """

    label: str
    rules: str
    cls: type[Backend] | None
    options: BackendOptions
    needs: Constraints | None
    refused: str | None

    def wire(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> Wire | None:
        """What it sends."""
        assert self.cls is not None
        return self.cls.wire_bytes(shape, self.options, volume, dtype)

    def footprint(self, shape: MoEShape, rows: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of a graph-safe dispatch of so many rows, as ``Plan.bytes`` tells them."""
        assert self.cls is not None
        assert self.needs is not None
        assert shape.max_tokens_per_rank is not None
        context = BackendContext(shape=shape, communicator=Communicator(None), needs=self.needs)
        sizes = self.needs.sizes(shape.max_tokens_per_rank)
        sizes = dataclasses.replace(sizes, capacity=self.cls.capacity(shape, self.options))
        return self.cls(context, self.options).footprint(sizes, rows, dtype)

    def agreement_bytes(self, config: DispatcherConfig, ep_size: int) -> int:
        """What a rank sends to agree on the rows of a micro-batch."""
        assert self.needs is not None
        agrees = self.needs.equal_rows or self.needs.group_max
        if not agrees or config.graph_safe or config.row_counts not in (None, "agree", "check"):
            return 0
        return 2 * _AGREED_BYTES * (ep_size - 1) // ep_size


def candidates(named: NamedBackend, config: DispatcherConfig, shape: MoEShape, rows: int) -> list[Candidate]:
    """A backend, or the releases of it that can be planned without it.

    Args:
        named: a name and options.
        config: what is asked of it, but for its backend.
        shape: of the group.
        rows: the most that a rank brings.

    Raises:
        ConfigError: there is no such backend, or no such option.
    """
    try:
        cls = named.load()
    except BackendUnavailableError as error:  # a third party's package
        return [_unknown(named.label, None, BackendOptions(), str(error))]
    spec = named.spec()
    options = cls.Options.model_validate(named.options)
    try:
        config = config.replace(backend=spec)
    except ConfigError as error:  # an option that does not fit the config
        return [_unknown(named.label, cls, options, str(error))]
    verdict = cls.probe(options)
    if isinstance(verdict, Usable):
        return [_known(named.label, verdict.version, cls, options, config, shape, rows)]
    absent = f"not usable here: {verdict.reason}"
    planned = [
        _known(
            f"{named.label} {release.removeprefix(cls.name + '-')}",
            f"rules of {release}; {absent}",
            *(cls, options.model_copy(update={"emulate": release}), config, shape, rows),
            device="cuda",
        )
        for release in _RELEASES.get(cls.name, ())
    ]
    return planned or [_unknown(named.label, cls, options, absent)]


def _unknown(name: str, cls: type[Backend] | None, options: BackendOptions, reason: str) -> Candidate:
    return Candidate(label=name, rules="", cls=cls, options=options, needs=None, refused=reason)


def _known(
    label: str,
    rules: str,
    cls: type[Backend],
    options: BackendOptions,
    config: DispatcherConfig,
    shape: MoEShape,
    rows: int,
    *,
    device: str | None = None,
) -> Candidate:
    """A candidate whose rules are known, and whether it meets them; ``device`` is what the emulation stands for."""
    needs, refused = None, None
    try:
        needs = dataclasses.replace(cls.constraints(shape, options), **config.constraints.given())
        if device is not None:
            needs = dataclasses.replace(needs, devices=frozenset({device}))
        check_group(config, cls.name, shape, needs)
        if config.graph_safe:
            check_buffers(cls.name, cls.capacity(shape, options))
        check_max_rows(f"Backend {cls.name!r}", needs.padded(rows), needs)
    except MoEDispatchError as error:
        refused = str(error)
    return Candidate(label=label, rules=rules, cls=cls, options=options, needs=needs, refused=refused)
