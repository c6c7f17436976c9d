"""The rules of the versions of ``deep_ep.HybridEPBuffer``. The installed signatures tell which version it is.

Source: DeepEP branch hybrid-ep, 94a9f8f (2026-07), and pull requests 744 and 746 (2026-09).
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from math import gcd
from typing import Any, final

import torch

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.backends.capacity import GraphSafeSupport
from moe_dispatch.backends.deep_ep.library import parameters
from moe_dispatch.backends.wire import ALL_WIRES, WireSupport
from moe_dispatch.errors import ConfigError

# A kernel processes rows in chunks. These environment variables set the rows per chunk of the dispatch kernel and of
# the combine kernel.
CHUNK_VARIABLES = ("NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API", "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API")
CHUNK = 64
DOMAIN_VARIABLE = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_MOST_RANKS_PER_DOMAIN = 72
# Across domains a rank posts three messages per row and one more into a queue, which holds this many.
_MOST_MESSAGES = 65535


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of one version of the library.

    Attributes:
        chunks: Rows per chunk of the dispatch kernel and of the combine kernel.
        ragged: Whether each rank may bring its own number of rows. If so, all ranks pass the same
            ``num_of_tokens_per_rank``, and no rank brings more rows than that.
    """

    chunks: tuple[int, int]
    ragged: bool

    @property
    def most_rows(self) -> int:
        """Most rows per rank across domains: the largest multiple of the combine chunk whose messages fit the queue."""
        chunk = self.chunks[1]
        return (_MOST_MESSAGES - 1) // 3 // chunk * chunk


# The rules of pull requests 744 and 746, the newest supported releases. Tables show them where the library is missing.
NEWEST = Rules(chunks=(CHUNK, CHUNK), ragged=True)


def is_supported(cls: type[Any]) -> bool:
    """Return whether a version is 94a9f8f or later, which changed the default of this parameter to False.

    Versions before it, such as 34152ae, want whole chunks of rows from every rank. The earliest lack the parameter.
    """
    gathers_itself = inspect.signature(cls.__init__).parameters.get("enable_custom_allgather")
    return gathers_itself is not None and gathers_itself.default is False


def rules(cls: type[Any]) -> Rules:
    """Return the rules of a version, from the parameters of its methods and from the environment variables it reads."""
    first, second = (number(name, CHUNK) for name in CHUNK_VARIABLES)
    return Rules(chunks=(first, second), ragged="num_of_tokens_per_rank" in parameters(cls.dispatch_with_permute))


def number(name: str, otherwise: int) -> int:
    """Return the number that an environment variable holds, or another number if it is not set."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"Backend 'hybridep': {name} must be a positive number, got {text!r}. Correct or unset it.")
    return int(text)


def constraints(found: Rules, device: str, shape: MoEShape, domain: int, *, fuse_permute: bool = False) -> Constraints:
    """Return the constraints of a version for a group whose NVLink domains hold ``domain`` consecutive ranks each.

    Raises:
        ConfigError: ``fuse_permute`` is combined with a capacity that may drop rows.
    """
    if fuse_permute and shape.capacity_factor != "worst":
        raise ConfigError(
            "Backend 'hybridep': with fuse_permute, graph_safe.capacity_factor must be \"worst\", because the fused "
            f"combine hangs if all rows of a token were dropped, got {shape.capacity_factor}. Leave fuse_permute out, "
            'or use "worst".'
        )
    several, aligned = domain < shape.ep_size, 4 // gcd(4, domain)
    sizes = range(domain, shape.ep_size + 1, domain) if several else range(1, _MOST_RANKS_PER_DOMAIN + 1)
    return Constraints(
        # The copy engine moves 16 bytes at once, and the map of a row has 4 bytes for each rank of the domain.
        row_multiple=1 if found.ragged else aligned,
        min_rows=0 if found.ragged else 1,
        equal_rows=not found.ragged,
        group_max=True,
        max_rows=found.most_rows if several else None,
        # The library moves 8-bit rows in pieces of 512 bytes.
        hidden_multiple=512 if shape.wire_dtype not in (None, "bfloat16") else 16,
        max_local_experts=768,  # with more, a kernel needs more shared memory than there is, and does not run
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({device}),
        group_sizes=frozenset(sizes),
        local_experts_multiple=aligned,
        pads_experts=True,
        # A handle keeps the dtype of its dispatch, so gradients must have it too.
        wire=WireSupport(dtypes=ALL_WIRES, gradients="must", delivers=True),
        graph_safe=GraphSafeSupport(drop_order=None if fuse_permute else "position"),
    )


def domain_of(shape: MoEShape, configured: int | None) -> int:
    """Return the ranks per NVLink domain: the option, else the library's variable, else the ranks that share a host."""
    found = configured or shape.ranks_per_node or shape.ep_size
    if configured is None and DOMAIN_VARIABLE in os.environ:
        found = number(DOMAIN_VARIABLE, found)
    return min(found, shape.ep_size)
