"""The driver of ``deep_ep.HybridEPBuffer``, for all its versions. The installed signatures tell which version it is.

Source: DeepEP branch hybrid-ep, 1dddd19 (2025-11) to 94a9f8f (2026-07), and pull requests 744 and 746 (2026-09).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Set
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from moe_dispatch.backends.base import BackendContext, Constraints, MoEShape
from moe_dispatch.backends.deep_ep.buffers import BufferPool, Handle, ProcessSwitch
from moe_dispatch.backends.deep_ep.library import Library, parameters
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.permutation import round_up

if TYPE_CHECKING:
    from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions

# A kernel processes rows in chunks. These environment variables set the rows per chunk of the dispatch kernel and of
# the combine kernel. The default is 64 since permute fusion (a0d27f1, 2026-03-31), and was 128 before.
_CHUNK_VARIABLES = ("NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API", "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API")
_CHUNK, _OLD_CHUNK = 64, 128
_PREPROCESSING_VARIABLE = "NUM_OF_TOKENS_PER_CHUNK_PREPROCESSING_API"
_DOMAIN_VARIABLE = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_MOST_RANKS_PER_DOMAIN = 72
# Across domains a rank posts three messages per row and one more into a queue, which holds this many.
_MOST_MESSAGES = 65535
_SHARED_ROWS_MULTIPLE = 16  # ragged versions round ``num_of_tokens_per_rank`` up to a multiple of this


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
    chunks=(_CHUNK, _CHUNK), pads_capacity=True, ragged=True, hidden_multiple=16, spans_domains=True, fuses=True
)


def rules(cls: type[Any]) -> Rules:
    """Return the rules of a version, from the parameters of its methods and from the environment variables it reads."""
    dispatch, construct = parameters(cls.dispatch_with_permute), inspect.signature(cls.__init__).parameters
    fuses = "fuse_permute_dispatch" in dispatch
    gathers_itself = construct.get("enable_custom_allgather")
    first, second = (_number(name, _CHUNK if fuses else _OLD_CHUNK) for name in _CHUNK_VARIABLES)
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


def _number(name: str, otherwise: int) -> int:
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
            "Backend 'hybridep': with fuse_permute, capacity_factor must be \"worst\", because the fused combine hangs "
            f'if all rows of a token were dropped, got {shape.capacity_factor}. Leave fuse_permute out, or use "worst".'
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
        hidden_multiple=found.hidden_multiple,
        # Beyond max_hidden or max_local_experts a kernel needs more shared memory than there is, and does not run.
        max_hidden=None if found.fuses else 8192,
        max_local_experts=768 if found.pads_capacity else 224,
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({device}),
        group_sizes=frozenset(sizes),
        local_experts_multiple=4 // gcd(4, domain),
        idle_ranks=found.fuses,
        pads_experts=True,
        wire_dtypes=frozenset({"bfloat16"}),
        graph_safe=found.fuses,
        graph_safe_reason=(
            "the installed version reads its counts on the host; versions of 2026-04 (34152ae) or later need not"
        ),
        drop_order=None if fuse_permute else "position",
    )


def domain_of(shape: MoEShape, configured: int | None) -> int:
    """Return the ranks per NVLink domain: the option, else the library's variable, else the ranks that share a host."""
    found = configured or shape.ranks_per_node or shape.ep_size
    if configured is None and _DOMAIN_VARIABLE in os.environ:
        found = _number(_DOMAIN_VARIABLE, found)
    return min(found, shape.ep_size)


@final
class HybridDriver:
    """The driver of HybridEP. Its buffers are made for a number of rows per rank. No method is differentiable.

    Cost: one host sync per ``send``, in which the library waits for the counts; none with ``room``. The other methods
    have none, except ``close``.
    """

    def __init__(self, library: Library, context: BackendContext, options: HybridEPOptions) -> None:
        shape, cls, knobs = context.shape, library.module.HybridEPBuffer, options.knobs
        found = rules(cls)
        self._cls = cls
        self._ragged = found.ragged
        self._communicator = context.communicator
        self.domain = domain_of(shape, options.ranks_per_domain)
        # A version that detects its domains may know more than host names tell, so it is not told the domain. But if
        # the variable is set already, it is set anew: the library fails if the variable is larger than the group.
        is_configured = options.ranks_per_domain is not None
        self._sets_domain = is_configured or not found.fuses or _DOMAIN_VARIABLE in os.environ
        _refuse_unknown(cls, knobs.keys() - parameters(cls.__init__))
        self._arguments = {"hidden_dim": shape.hidden_size, "num_local_experts": shape.num_local_experts, **knobs}
        # Always given: the default of early versions is 0, and their kernel divides by it.
        self._dispatch_arguments: dict[str, Any] = {"pad_multiple": shape.pad_multiple}
        self._combine_arguments: dict[str, Any] = dict(self._dispatch_arguments)
        if shape.graph_safe:
            self._dispatch_arguments["non_blocking"] = True
        if options.fuse_permute:
            _refuse_unknown(cls, {"fuse_permute_dispatch"} - parameters(cls.dispatch_with_permute))
            variables = (*_CHUNK_VARIABLES, _PREPROCESSING_VARIABLE)
            chunks = (*found.chunks, _number(_PREPROCESSING_VARIABLE, _CHUNK))
            if len(set(chunks)) > 1:
                raise ConfigError(
                    "Backend 'hybridep': fuse_permute needs equal chunks in all kernels, got "
                    f"{chunks[0]} (dispatch), {chunks[1]} (combine) and {chunks[2]} (preprocessing). Set "
                    f"{', '.join(variables)} to one number."
                )
            self._dispatch_arguments["fuse_permute_dispatch"] = True
            self._combine_arguments["fuse_unpermute_combine"] = True
        self._pool = BufferPool("hybridep", self._make, most_rows=context.most_rows, multiple=lcm(*found.chunks))

    def _make(self, rows: int) -> Any:
        # The constructor's parameter for the domain is deprecated and never read. Only the variable sets the domain.
        with _domain_variable.at(str(self.domain)) if self._sets_domain else nullcontext():
            buffer = self._cls(group=self._communicator.group, max_num_of_tokens_per_rank=rows, **self._arguments)
        taken = getattr(buffer, "num_of_hybrid_ep_ranks_per_nvlink_domain", self.domain)
        if taken != self.domain:
            raise ConfigError(
                f"Backend 'hybridep': the library found {taken} ranks per NVLink domain, but the constraints are for "
                f"{self.domain}. Set the option ranks_per_domain={taken}."
            )
        return buffer

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows per rank. All ranks pass the same number."""
        self._pool.reserve(max(rows, 1))

    def send(
        self, rows_TD: Tensor, map_TE: Tensor, probs_TE: Tensor, *, group_max_rows: int | None, room: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """Send each row once to each NVLink domain and rank that needs it, and copy it there to its experts.

        Args:
            rows_TD: bfloat16 (T, D).
            map_TE: bool (T, E), True if the row goes to the expert.
            probs_TE: float32 (T, E), the weights of these pairs, 0 elsewhere.
            group_max_rows: Largest number of rows that any rank brings. Only ragged versions need it.
            room: R in graph-safe mode, a multiple of ``pad_multiple``; None in eager mode. If more rows are needed, the
                last expert-major rows are dropped, so the experts with the highest ids lose rows first.

        Returns:
            - The rows of each expert by source rank, then by row, then zero padding, bfloat16 (R, D).
            - Their probabilities, float32 (R,): exactly the bits that were sent, and +0.0 on padding.
            - Number of rows of each local expert with padding and without dropped rows, int64 (L,), on the CPU.
            - The handle of this dispatch, for combine and the backwards.

            With ``room`` the numbers are on the device, and rows behind those of the last expert may hold anything.
        """
        pooled = self._pool.current
        sizes = {"num_of_tokens_per_rank": round_up(group_max_rows or 1, _SHARED_ROWS_MULTIPLE)} if self._ragged else {}
        if room is not None:
            sizes["num_permuted_tokens"] = room
        rows_RD, probs_R, _, padded_L, handle = pooled.buffer.dispatch_with_permute(
            hidden=rows_TD, routing_map=map_TE, probs=probs_TE, **sizes, **self._dispatch_arguments
        )
        if rows_RD is None:
            raise StateError(
                f"Backend 'hybridep': every rank must receive a row, got none on rank {self._communicator.rank}. The "
                "installed version cannot combine without rows. Install a version of 2026-04 (34152ae) or later."
            )
        return rows_RD, probs_R, padded_L, Handle(pooled=pooled, raw=handle)

    def send_again(self, rows_TD: Tensor, num_grouped: int, handle: Handle) -> Tensor:
        """Send other rows the way of an earlier dispatch: (R, D), with the R of that dispatch. No host sync.

        The backward of combine runs it too.
        """
        rows_RD: Tensor = handle.buffer.dispatch_with_permute(
            hidden=rows_TD, handle=handle.raw, num_permuted_tokens=num_grouped, **self._dispatch_arguments
        )[0]
        return rows_RD

    def combine(self, rows_RD: Tensor, probs_R: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Send expert rows back and add them, without weights.

        Args:
            rows_RD: bfloat16 (R, D).
            probs_R: float32 (R,), one value per expert row, sent back with the rows; None for no values.
            handle: Handle of the dispatch.

        Returns:
            The summed rows, (T, D), and the values, (T, E), or None.
        """
        summed: tuple[Tensor, Tensor | None] = handle.buffer.combine_with_unpermute(
            hidden=rows_RD, probs=probs_R, handle=handle.raw, **self._combine_arguments
        )
        return summed

    def close(self) -> None:
        """Release the buffers when no kernel uses the memory of another rank any more.

        Collective. A second call does nothing.
        """
        if self._pool.closed:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._communicator.max([0], label="close")
        self._pool.close()


def overflow_flag(handle: Handle) -> Tensor:
    """Return whether a dispatch with ``room`` dropped rows, bool () on the device.

    In every version with such a flag, it is the last tensor of the handle. Only a dispatch without a host sync writes
    it.
    """
    flag: Tensor = [part for part in handle.raw if isinstance(part, Tensor)][-1]
    return flag.view(()) != 0


def _refuse_unknown(cls: type[Any], unknown: Set[str]) -> None:
    if unknown:
        raise ConfigError(
            f"Backend 'hybridep': the installed {cls.__name__} must have {', '.join(sorted(unknown))}, got a version "
            "without. Leave the option out, or install a later version."
        )


def _write_domain(value: str | None) -> None:
    os.environ.pop(_DOMAIN_VARIABLE, None)
    if value is not None:
        os.environ[_DOMAIN_VARIABLE] = value


_domain_variable = ProcessSwitch(_DOMAIN_VARIABLE, lambda: os.environ.get(_DOMAIN_VARIABLE), _write_domain)
