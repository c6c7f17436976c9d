"""Contenders as a command line names them: a peer, or one of our backends with its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch.distributed as dist

from moe_dispatch.cli.bench.by_hand import ByHand
from moe_dispatch.cli.bench.contenders import Contender, Ours
from moe_dispatch.cli.bench.floor import Floor
from moe_dispatch.cli.bench.peers import PEERS, missing_packages
from moe_dispatch.cli.bench.workload import Shape
from moe_dispatch.cli.names import NamedBackend, parse_backend
from moe_dispatch.cli.place import Place
from moe_dispatch.errors import BackendUnavailableError, ConfigError

OURS = "alltoall"
BESIDE = ("by-hand", "floor")  # its backend alone, and what cannot be saved
# What a command line can name besides our backends.
CONTENDERS: dict[str, Callable[[Shape, dist.ProcessGroup], Contender]] = {"by-hand": ByHand, "floor": Floor, **PEERS}
INSTALL = "pip install 'moe-dispatch[bench]'"
# Of graph-safe mode; they bound rows per rank, and on "alltoall" rows per pair of ranks as well.
CAPACITY_FACTORS = (1.25, 2.0, "worst")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """A contender that is not open yet.

    Attributes:
        label: as it was written, with the capacity factor in graph-safe mode.
        backend: of ours; None for what ``CONTENDERS`` makes.
        capacity_factor: of graph-safe mode; None in eager mode.
    """

    label: str
    backend: NamedBackend | None = None
    capacity_factor: float | str | None = None

    def open(self, shape: Shape, place: Place) -> Contender:
        """Fresh: nothing of earlier calls is kept. Collective.

        Raises:
            MoEDispatchError: a backend of ours cannot be used on this group or for this shape.
        """
        assert place.group is not None
        if self.backend is None:
            return CONTENDERS[self.label](shape, place.group)
        spec = self.backend.spec()
        alone = spec["name"] == "local" and place.size == 1
        fields = {"backend": spec} if self.capacity_factor is None else self._graph_safe(shape, spec)
        return Ours(shape, None if alone else place.group, None if alone else place.control, **fields)

    @property
    def bytes_are_seen(self) -> bool:
        """Whether what it sends passes torch.distributed, not a library of its own."""
        return self.backend is None or "emulate" not in self.backend.load().Options.model_fields

    def _graph_safe(self, shape: Shape, spec: dict[str, Any]) -> dict[str, Any]:
        assert self.backend is not None
        pairs = "pair_rows" in self.backend.load().Options.model_fields
        return {
            "backend": {**spec, **({"pair_rows": self.capacity_factor} if pairs else {})},
            "graph_safe": True,
            "max_tokens_per_rank": shape.tokens,
            "capacity_factor": self.capacity_factor,
            "on_overflow": None if self.capacity_factor == "worst" else "drop",
        }


def absent_peers() -> list[str]:
    """Which peers are not installed, in words."""
    return [
        f"{name} is left out, not installed: {', '.join(packages)}. {INSTALL}."
        for name in PEERS
        if (packages := missing_packages(name))
    ]


def parse_entrants(names: str | None) -> tuple[Entrant, ...]:
    """What ``--contenders`` says; by default ours, ours by hand, the floor, and the peers that are installed.

    Raises:
        ConfigError: no such contender or option, or an emulation.
        BackendUnavailableError: a peer that is not installed, or a class that cannot be imported.
    """
    here = [name for name in PEERS if not missing_packages(name)]
    texts = [OURS, *BESIDE, *here] if names is None else names.split(",")
    return tuple(map(_entrant, dict.fromkeys(texts)))


def _entrant(text: str) -> Entrant:
    if missing := missing_packages(text):
        raise BackendUnavailableError(
            f"--contenders: the packages of {text!r} must be installed, got no {', '.join(missing)}. {INSTALL}."
        )
    if text in CONTENDERS:
        return Entrant(label=text)
    backend = parse_backend(text)
    try:
        backend.spec()
    except ConfigError as error:
        raise ConfigError(f"--contenders: {error} Besides backends there are {', '.join(CONTENDERS)}.") from error
    if backend.options.get("emulate"):
        raise ConfigError(
            f"--contenders must be the real thing, got {text!r}: the times of an emulation say nothing of its library. "
            "Look at it with moe-dispatch compare."
        )
    return Entrant(label=text, backend=backend)


def graph_safe_modes(entrants: tuple[Entrant, ...]) -> tuple[Entrant, ...]:
    """Each in eager mode, then graph-safe with several capacities.

    Raises:
        ConfigError: one is not of ours.
    """
    peers = [entrant.label for entrant in entrants if entrant.backend is None]
    if peers:
        raise ConfigError(
            f"--contenders of graph-safe must be backends of moe-dispatch, got {', '.join(peers)}. "
            f"Name for example {OURS}."
        )
    return tuple(
        mode
        for entrant in entrants
        for mode in (
            entrant,
            *(
                replace(entrant, label=f"{entrant.label}, capacity {factor}", capacity_factor=factor)
                for factor in CAPACITY_FACTORS
            ),
        )
    )
