"""``hybridep``: the kernels of NVIDIA's HybridEP move rows, group them by expert and pad them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from pydantic import PositiveInt
from torch import Tensor

from moe_dispatch.backends.base import Arrived, Backend, BackendContext, BackendOptions, Constraints, MoEShape
from moe_dispatch.backends.deep_ep import hybrid_driver as hybrid
from moe_dispatch.backends.deep_ep.buffers import Handle
from moe_dispatch.backends.deep_ep.expert_major import ExpertMajorRoute
from moe_dispatch.backends.deep_ep.hybrid_driver import HybridDriver
from moe_dispatch.backends.deep_ep.library import Library, find_library, openable, probed, report_open
from moe_dispatch.backends.volume import SentBytes, Volume, payload
from moe_dispatch.communication import read_host
from moe_dispatch.permutation import running_total
from moe_dispatch.probing import Rejected, Usable
from moe_dispatch.types import Capacity, Sizes

Release = Literal["hybridep-34152ae", "hybridep-94a9f8f", "hybridep-744", "hybridep-746"]


@final
class HybridEPOptions(BackendOptions):
    """Options of ``hybridep``. None stands for the library's default.

    Attributes:
        num_sms_dispatch: Number of streaming multiprocessors for the dispatch kernel.
        num_sms_combine: Number of streaming multiprocessors for the combine kernel.
        num_blocks_permute: Number of blocks of the permute kernel.
        num_blocks_unpermute: Number of blocks of the unpermute kernel.
        fuse_permute: Whether to permute inside the dispatch kernel, and back inside the combine kernel.
        ranks_per_domain: Number of consecutive ranks of the group in one NVLink domain. None takes the number from the
            library's environment variable if it is set, else the number of ranks that share a host.
        emulate: Whether to run on the emulation of ``deep_ep``, on CPU tensors. True emulates the newest release; the
            name of a release emulates that release.
    """

    name = "hybridep"

    num_sms_dispatch: PositiveInt | None = None
    num_sms_combine: PositiveInt | None = None
    num_blocks_permute: PositiveInt | None = None
    num_blocks_unpermute: PositiveInt | None = None
    fuse_permute: bool = False
    ranks_per_domain: PositiveInt | None = None
    emulate: bool | Release = False

    @property
    def release(self) -> str | None:
        """Name of the release to emulate; None for the installed library."""
        return "hybridep-746" if self.emulate is True else self.emulate or None

    @property
    def knobs(self) -> dict[str, int]:
        """The numbers that are set, by the names of the library's parameters."""
        given = {
            "num_sms_dispatch_api": self.num_sms_dispatch,
            "num_sms_combine_api": self.num_sms_combine,
            "num_blocks_permute": self.num_blocks_permute,
            "num_blocks_unpermute": self.num_blocks_unpermute,
        }
        return {name: number for name, number in given.items() if number is not None}

    def probe(self) -> Usable | Rejected:
        def features(library: Library) -> tuple[str, ...]:
            found = hybrid.rules(library.module.HybridEPBuffer)
            return ("ragged rows" if found.ragged else f"chunks of {' and '.join(map(str, found.chunks))} rows",)

        return probed(self._library, features)

    def constraints(self, shape: MoEShape) -> Constraints:
        found, device, library = hybrid.NEWEST, "cuda", self._library()
        if isinstance(library, Library):  # otherwise only for tables: before any other use, ``probe`` refuses
            found, device = hybrid.rules(library.module.HybridEPBuffer), library.device
        domain = hybrid.domain_of(shape, self.ranks_per_domain)
        return hybrid.constraints(found, device, shape, domain, fuse_permute=self.fuse_permute)

    def wire_bytes(self, shape: MoEShape, volume: Volume, dtype: torch.dtype) -> SentBytes:
        row_bytes = shape.hidden_size * torch.bfloat16.itemsize
        return payload(volume, out_bytes=row_bytes, back_bytes=row_bytes, row_dtypes=(torch.bfloat16,))

    def open(self, context: BackendContext) -> Backend:
        library = openable(self.name, self._library(), context.communicator)
        driver = HybridDriver(library, context, self)
        source = "detected" if self.ranks_per_domain is None else "configured"
        report_open(self.name, library, context.communicator, f"{driver.domain} ranks per NVLink domain ({source})")
        return HybridEP(context, driver)

    def _library(self) -> Library | Rejected:
        found = find_library(self.release)
        if isinstance(found, Rejected) or hasattr(found.module, "HybridEPBuffer"):
            return found
        if hasattr(found.module, "HybridEpBuffer"):  # the spelling of 0ed15b5
            return Rejected(
                f"deep_ep {found.version} is HybridEP 0ed15b5, whose support has ended; install 34152ae or later"
            )
        return Rejected(f"deep_ep {found.version} has no HybridEPBuffer: it is not built from the branch hybrid-ep")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HybridRoute(ExpertMajorRoute):
    """The route of one dispatch through HybridEP. It calls the library with the saved handle.

    Attributes:
        driver: Driver of the open library.
        handle: Opaque handle of the library, whose length differs between versions.
        ids_TK: int64 (T, K), the expert id of each slot. It finds the gradient of a slot in the library's (T, E).
        is_real_R: bool (R,), False on padding. Behind the last expert's rows it may hold anything.
    """

    driver: HybridDriver
    handle: Handle
    ids_TK: Tensor
    is_real_R: Tensor

    @property
    def is_real(self) -> Tensor:
        return self.is_real_R

    def spread(self, rows_TD: Tensor) -> Tensor:
        return self.driver.send_again(rows_TD, len(self.is_real_R), self.handle)

    def collect(self, rows_RD: Tensor, values_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows_TD, values_TE = self.driver.combine(rows_RD, values_R, self.handle)
        if values_TE is None:
            return rows_TD, None
        return rows_TD, torch.where(self.ids_TK < 0, 0, values_TE.gather(1, self.ids_TK.clamp(min=0)))


@final
class HybridEP(Backend):
    """HybridEP (``HybridEPBuffer``). It groups rows by expert and pads them on the device.

    Rows travel in bfloat16, and weights as dense float32 probabilities. The library's combine only adds, so this class
    multiplies the outputs by their weights before, in float32.

    In graph-safe mode the capacity sets the size of the library's buffer, padding included. Rows are dropped only if
    the padded rows do not fit. So with little padding, a few more rows than ``capacity.rows`` may arrive. The library
    reports that it dropped rows, but not how many. After a drop, the reported demand is therefore the smallest that is
    possible, and several rounds of ``grow`` may be needed.

    Cost: one host sync per dispatch (the counts), none in ``again=``, combine or a backward. In graph-safe mode none at
    all.

    Source: DeepEP branch hybrid-ep, 1dddd19 to 94a9f8f, and pull requests 744 and 746.
    """

    collective_close = True

    def __init__(self, context: BackendContext, driver: HybridDriver) -> None:
        super().__init__(context)
        self.driver = driver

    def reserve(self, sizes: Sizes) -> None:
        rows = sizes.padded_rows if sizes.padded_rows is not None else sizes.group_max_rows
        if rows is not None:
            self.driver.reserve(rows)

    def close(self) -> None:
        self.driver.close()

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        map_TE, probs_TE = _dense(ids_TK, _marked(weights_TK), self.context.shape.num_experts)
        capacity = sizes.capacity
        rows_RD, probs_R, padded_L, handle = self.driver.send(
            rows_TD.bfloat16().contiguous(),
            map_TE,
            probs_TE,
            group_max_rows=sizes.group_max_rows,
            room=None if capacity is None else capacity.buffer_rows,
        )
        on_host = None if capacity is not None else tuple(read_host(padded_L))
        padded_L = padded_L.to(rows_TD.device, torch.int64, non_blocking=True)
        is_real_R = (probs_R != 0) | torch.signbit(probs_R)
        # The real rows of each expert, counted without a host sync.
        real_L = running_total(is_real_R).index_select(0, running_total(padded_L)).diff()
        return Arrived(
            rows=rows_RD.to(rows_TD.dtype),
            weights=(probs_R + 0.0).to(weights_TK.dtype),  # -0.0 becomes 0.0 again
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=on_host,
            route=HybridRoute(driver=self.driver, handle=handle, ids_TK=ids_TK, is_real_R=is_real_R),
            demand=None if capacity is None else _demand(real_L, hybrid.overflow_flag(handle), capacity),
        )


def _marked(weights_TK: Tensor) -> Tensor:
    """Return float32 weights in which +0.0 became -0.0, so that the receiver can tell real rows from padding.

    The library delivers the bits of probabilities unchanged, and +0.0 on padding. Nothing else tells the receiver how
    many rows of an expert are real. For example, the weights [0.7, 0.0] are sent as [0.7, -0.0].
    """
    weights_TK = weights_TK.float()
    return torch.where(weights_TK == 0, -0.0, weights_TK)


def _dense(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the map, bool (T, E), and the probabilities, float32 (T, E), that the library takes.

    A row must not name an expert twice. With 3 experts, the ids [2, -1] and weights [0.5, 0.1] of a row become the map
    [False, False, True] and the probabilities [0, 0, 0.5].
    """
    columns_TK = torch.where(ids_TK < 0, num_experts, ids_TK)
    probs = weights_TK.new_zeros(len(ids_TK), num_experts + 1).scatter_(1, columns_TK, weights_TK)
    chosen = torch.zeros(probs.shape, dtype=torch.bool, device=ids_TK.device).scatter_(1, columns_TK, True)
    return chosen[:, :num_experts].contiguous(), probs[:, :num_experts].contiguous()


def _demand(real_L: Tensor, overflowed: Tensor, capacity: Capacity) -> Tensor:
    """Return the demand of ``Arrived.demand``, int64 (2,). It exceeds ``capacity.rows`` exactly if rows were dropped.

    The library counts only the rows that fitted. If rows were dropped, there was at least one more.
    """
    arrived = real_L.sum()
    needed = torch.where(overflowed, (arrived + 1).clamp(min=capacity.rows + 1), arrived.clamp(max=capacity.rows))
    return torch.stack([needed, torch.zeros_like(needed)])
