"""The rules of all versions of ``deep_ep.HybridEPBuffer``. The installed signatures tell which version it is.

Source: DeepEP branch hybrid-ep, 1dddd19 (2025-11) to 94a9f8f (2026-07), and pull requests 744 and 746 (2026-09).
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, final

import torch

from moe_dispatch.backends.base import Constraints, MoEShape
from moe_dispatch.backends.capacity import GraphSafeSupport
from moe_dispatch.backends.deep_ep.library import parameters
from moe_dispatch.backends.wire import ALL_WIRES, WireSupport
from moe_dispatch.errors import ConfigError

# A kernel processes rows in chunks. These environment variables set the rows per chunk of the dispatch kernel and of
# the combine kernel. The default is 64 since permute fusion (a0d27f1, 2026-03-31), and was 128 before.
CHUNK_VARIABLES = ("NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API", "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API")
CHUNK, _OLD_CHUNK = 64, 128
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
        pads_capacity: Whether the library rounds its buffers up to whole chunks. If so, the rows of a rank need only be
            aligned for the copy engine.
        ragged: Whether each rank may bring its own number of rows. If so, all ranks pass the same
            ``num_of_tokens_per_rank``, and no rank brings more rows than that.
        hidden_multiple: Number of which the hidden size of bfloat16 rows must be a multiple.
        spans_domains: Whether a group may have several NVLink domains.
        fuses: Whether the version has permute fusion (a0d27f1). Such a version serves one rank, finds its NVLink
            domains itself if its environment variable is not set, and lets a rank receive no row. It can also dispatch
            without a host sync, and then says on the device if it dropped rows.
    """

    chunks: tuple[int, int]
    pads_capacity: bool
    ragged: bool
    hidden_multiple: int
    spans_domains: bool
    fuses: bool

    def row_multiple(self, domain: int) -> int:
        """Return the multiple of the rows per rank if ``domain`` ranks share an NVLink domain."""
        if self.ragged:
            return 1
        return 4 // gcd(4, domain) if self.pads_capacity else lcm(*self.chunks)

    @property
    def most_rows(self) -> int:
        """Most rows per rank across domains: the largest multiple of the combine chunk whose messages fit the queue."""
        chunk = self.chunks[1]
        return (_MOST_MESSAGES - 1) // 3 // chunk * chunk


# The rules of pull requests 744 and 746, the newest supported releases. Tables show them where the library is missing.
NEWEST = Rules(
    chunks=(CHUNK, CHUNK), pads_capacity=True, ragged=True, hidden_multiple=16, spans_domains=True, fuses=True
)


def rules(cls: type[Any]) -> Rules:
    """Return the rules of a version, from the parameters of its methods and from the environment variables it reads."""
    dispatch, construct = parameters(cls.dispatch_with_permute), inspect.signature(cls.__init__).parameters
    fuses = "fuse_permute_dispatch" in dispatch
    gathers_itself = construct.get("enable_custom_allgather")
    first, second = (number(name, CHUNK if fuses else _OLD_CHUNK) for name in CHUNK_VARIABLES)
    return Rules(
        chunks=(first, second),
        # 94a9f8f changed the default to False, two commits after 4214430 (#638), the first that pads capacities.
        pads_capacity=fuses and gathers_itself is not None and gathers_itself.default is False,
        ragged="num_of_tokens_per_rank" in dispatch,
        hidden_multiple=16 if "non_blocking" in dispatch else 512,  # relaxed with 83e0d15 (2025-12-03)
        spans_domains="ib_dev_name_list" not in construct,  # 1dddd19 takes only full buffers across domains
        # Idle ranks came with 34152ae, the second version with this signature. The flag of dropped rows came before,
        # with a484936, but versions between them were not studied.
        fuses=fuses,
    )


def number(name: str, otherwise: int) -> int:
    """Return the number that an environment variable holds, or another number if it is not set."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"Backend 'hybridep': {name} must be a positive number, got {text!r}. Correct or unset it.")
    return int(text)


def constraints(found: Rules, device: str, shape: MoEShape, domain: int, *, fuse_permute: bool = False) -> Constraints:
    """Return the constraints of a version for a group whose NVLink domains hold ``domain`` consecutive ranks each.

    Raises:
        ConfigError: The group has several domains and this version serves only one; or ``fuse_permute`` is combined
            with a capacity that may drop rows.
    """
    if fuse_permute and shape.capacity_factor != "worst":
        raise ConfigError(
            "Backend 'hybridep': with fuse_permute, graph_safe.capacity_factor must be \"worst\", because the fused "
            f"combine hangs if all rows of a token were dropped, got {shape.capacity_factor}. Leave fuse_permute out, "
            'or use "worst".'
        )
    several = domain < shape.ep_size
    if several and not found.spans_domains:
        raise ConfigError(
            f"Backend 'hybridep': the installed version serves groups within one NVLink domain, got {shape.ep_size} "
            f"ranks, {domain} per domain. Install a later version, or use smaller groups."
        )
    least = 1 if found.fuses else 2
    sizes = range(domain, shape.ep_size + 1, domain) if several else range(least, _MOST_RANKS_PER_DOMAIN + 1)
    return Constraints(
        row_multiple=found.row_multiple(domain),
        min_rows=0 if found.ragged else 1,
        equal_rows=not found.ragged,
        group_max=True,
        max_rows=found.most_rows if several else None,
        # The library moves 8-bit rows in pieces of 512 bytes.
        hidden_multiple=512 if shape.wire_dtype not in (None, "bfloat16") else found.hidden_multiple,
        # Beyond max_hidden or max_local_experts a kernel needs more shared memory than there is, and does not run.
        max_hidden=None if found.fuses else 8192,
        max_local_experts=768 if found.pads_capacity else 224,
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({device}),
        group_sizes=frozenset(sizes),
        local_experts_multiple=4 // gcd(4, domain),
        idle_ranks=found.fuses,
        pads_experts=True,
        # A handle keeps the dtype of its dispatch, so gradients must have it too.
        wire=WireSupport(dtypes=ALL_WIRES, gradients="must", delivers=True),
        graph_safe=GraphSafeSupport(drop_order=None if fuse_permute else "position") if found.fuses else None,
        graph_safe_reason=(
            "the installed version reads its counts on the host; versions of 2026-04 (34152ae) or later need not"
        ),
    )


def domain_of(shape: MoEShape, configured: int | None) -> int:
    """Return the ranks per NVLink domain: the option, else the library's variable, else the ranks that share a host."""
    found = configured or shape.ranks_per_node or shape.ep_size
    if configured is None and DOMAIN_VARIABLE in os.environ:
        found = number(DOMAIN_VARIABLE, found)
    return min(found, shape.ep_size)
