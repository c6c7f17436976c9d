"""``hybridep``: the kernels of NVIDIA's HybridEP move rows, group them by expert and pad them."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from collections.abc import Set
from contextlib import nullcontext
from functools import cache, partial
from math import lcm
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, final

import torch
from pydantic import PositiveInt
from torch import Tensor

from moe_dispatch.backends.base import Arrived, BackendContext, Constraints, MoEShape
from moe_dispatch.backends.deep_ep import hybrid_rules
from moe_dispatch.backends.deep_ep.buffers import Handle, LibraryBackend, environment_switch, unfilled
from moe_dispatch.backends.deep_ep.expert_major import ExpertMajorRoute
from moe_dispatch.backends.deep_ep.hybrid_rules import CHUNK, CHUNK_VARIABLES, DOMAIN_VARIABLE
from moe_dispatch.backends.deep_ep.library import Library, LibraryOptions, lacking_nvcc, parameters
from moe_dispatch.backends.deep_ep.rank_rows import Payload, pack
from moe_dispatch.backends.footprint import expert_major
from moe_dispatch.communication import read_host
from moe_dispatch.errors import ConfigError
from moe_dispatch.permutation.index import round_up, running_total
from moe_dispatch.types import Capacity, Sizes

Release = Literal["hybridep-94a9f8f", "hybridep-744", "hybridep-746"]

_PREPROCESSING_VARIABLE = "NUM_OF_TOKENS_PER_CHUNK_PREPROCESSING_API"
_SHARED_ROWS_MULTIPLE = 16  # ragged versions round ``num_of_tokens_per_rank`` up to a multiple of this
_domain_variable = environment_switch(DOMAIN_VARIABLE)
_cache_variable = environment_switch("HYBRID_EP_CACHE_DIR")
_making_folder = threading.Lock()


def _lacking_toolkit(version: str) -> str | None:
    """Return why the library cannot compile its kernels, which it does at the first dispatch; or None."""
    home = Path(os.environ.get("CUDA_HOME", "/"))  # the library looks nowhere else
    reason = lacking_nvcc(version, home / "bin" / "nvcc")
    has_runtime = any(any(home.glob(f"{folder}/libcudart*")) for folder in ("lib*", "lib/*", "targets/*/lib"))
    if reason is None and not has_runtime:
        return f"deep_ep {version} links its kernels with libcudart, which is not in {home}/lib64"
    return reason


@final
class HybridEPOptions(LibraryOptions):
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

    def features(self, library: Library) -> tuple[str, ...]:
        found = hybrid_rules.rules(library.module.HybridEPBuffer)
        return ("ragged rows" if found.ragged else "equal rows",)

    def lacking(self, library: Library) -> str | None:
        cls = getattr(library.module, "HybridEPBuffer", None)
        if cls is None and not hasattr(library.module, "HybridEpBuffer"):  # the spelling of 0ed15b5
            return f"{library.named} has no HybridEPBuffer: it is not built from the branch hybrid-ep"
        if cls is None or not hybrid_rules.is_supported(cls):
            return (
                f"{library.named} is HybridEP 34152ae or another commit before 94a9f8f, whose support has ended; "
                "install commit 94a9f8f or a later one of DeepEP's branch hybrid-ep"
            )
        return None if library.emulated else _lacking_toolkit(library.version)

    def constraints(self, shape: MoEShape) -> Constraints:
        found, device, library = hybrid_rules.NEWEST, "cuda", self.library()
        if isinstance(library, Library):  # otherwise only for tables: before any other use, ``probe`` refuses
            found, device = hybrid_rules.rules(library.module.HybridEPBuffer), library.device
        domain = hybrid_rules.domain_of(shape, self.ranks_per_domain)
        return hybrid_rules.constraints(found, device, shape, domain, fuse_permute=self.fuse_permute)

    def footprint(self, shape: MoEShape, sizes: Sizes, rows: int, dtype: torch.dtype) -> dict[str, int]:
        return expert_major(shape, sizes, rows, values=4 * rows * shape.num_experts, maps=5 * rows * shape.num_experts)

    def open_with(self, library: Library, context: BackendContext) -> HybridEP:
        return HybridEP(library, context, self)


@final
class HybridEP(LibraryBackend):
    """HybridEP (``HybridEPBuffer``). It groups rows by expert and pads them on the device.

    Rows travel in bfloat16, or in 8 bits to experts and in the backward of combine, and weights as dense float32
    probabilities. The library's combine only adds, so this class multiplies the outputs by their weights before, in
    float32.

    In graph-safe mode the capacity sets the size of the library's buffer, padding included. Rows are dropped only if
    the padded rows do not fit. So with little padding, a few more rows than ``capacity.rows`` may arrive. The library
    reports that it dropped rows, but not how many. After a drop, the reported demand is therefore the smallest that is
    possible, and several rounds of ``grow`` may be needed.

    Cost: one host sync per dispatch (the counts), none in ``again=``, combine or a backward. In graph-safe mode none at
    all.

    Source: DeepEP branch hybrid-ep, 94a9f8f, and pull requests 744 and 746.
    """

    name = "hybridep"

    def __init__(self, library: Library, context: BackendContext, options: HybridEPOptions) -> None:
        shape, cls, knobs = context.shape, library.module.HybridEPBuffer, options.knobs
        found = hybrid_rules.rules(cls)
        super().__init__(context, multiple=lcm(*found.chunks))
        self._class, self._ragged = cls, found.ragged
        self._domain = hybrid_rules.domain_of(shape, options.ranks_per_domain)
        is_configured = options.ranks_per_domain is not None
        source = "configured" if is_configured else "detected"
        self.details = f"{self._domain} ranks per NVLink domain ({source})"
        # The library detects its domains and may know more than host names tell, so it is not told the domain. But if
        # the variable is set already, it is set anew: the library fails if the variable is larger than the group.
        self._sets_domain = is_configured or DOMAIN_VARIABLE in os.environ
        _refuse_unknown(cls, knobs.keys() - parameters(cls.__init__))
        self._arguments = {"hidden_dim": shape.hidden_size, "num_local_experts": shape.num_local_experts, **knobs}
        if shape.wire_dtype not in (None, "bfloat16"):
            self._arguments["use_fp8"] = True
        self._arguments["load_cached_kernels"] = True  # otherwise each buffer compiles all of its kernels again
        self._dispatch_arguments: dict[str, Any] = {"pad_multiple": shape.pad_multiple}
        self._combine_arguments: dict[str, Any] = dict(self._dispatch_arguments)
        if shape.graph_safe:
            self._dispatch_arguments["non_blocking"] = True
        if options.fuse_permute:
            chunks = (*found.chunks, hybrid_rules.number(_PREPROCESSING_VARIABLE, CHUNK))
            if len(set(chunks)) > 1:
                raise ConfigError(
                    "Backend 'hybridep': fuse_permute needs equal chunks in all kernels, got "
                    f"{chunks[0]} (dispatch), {chunks[1]} (combine) and {chunks[2]} (preprocessing). Set "
                    f"{', '.join((*CHUNK_VARIABLES, _PREPROCESSING_VARIABLE))} to one number."
                )
            self._dispatch_arguments["fuse_permute_dispatch"] = True
            self._combine_arguments["fuse_unpermute_combine"] = True

    def make(self, rows: int) -> Any:
        # The constructor's parameter for the domain is deprecated and never read. Only the variable sets the domain.
        domain = _domain_variable.at(str(self._domain)) if self._sets_domain else nullcontext()
        with _making_folder:
            folder = _fresh_folder()
        with domain, _cache_variable.at(folder):
            group = self.context.communicator.library_group
            buffer = self._class(group=group, max_num_of_tokens_per_rank=rows, **self._arguments)
        taken = getattr(buffer, "num_of_hybrid_ep_ranks_per_nvlink_domain", self._domain)
        if taken != self._domain:
            raise ConfigError(
                f"Backend 'hybridep': the library found {taken} ranks per NVLink domain, but the constraints are for "
                f"{self._domain}. Set the option ranks_per_domain={taken}."
            )
        return buffer

    def close(self) -> None:
        """Release the buffers when no kernel uses the memory of another rank any more."""
        if self._buffers:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if not self.context.communicator.is_gone:
                self.context.communicator.max([0], label="close")
        super().close()

    def bytes_of(self, buffer: Any) -> int:
        """Return the bytes of the registered rows and probabilities of a domain, which the library does not tell."""
        shape = self.context.shape
        return self.rows * self._domain * (2 * shape.hidden_size * 2 + 4 * shape.num_experts)

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        """Send each row once to each NVLink domain and rank that needs it, and copy it there to its experts.

        The library returns the rows of each expert by source rank, then by row, then zero padding; their probabilities,
        which are exactly the bits that were sent, and +0.0 on padding; and the number of rows of each local expert,
        with padding and without dropped rows. In graph-safe mode this number is on the device, the last expert-major
        rows are dropped if more are needed, and rows behind those of the last expert may hold anything.
        """
        map_TE, probs_TE = _dense(ids_TK, _marked(weights_TK), self.context.shape.num_experts)
        capacity, given = sizes.capacity, dict(self._dispatch_arguments)
        if self._ragged:  # all ranks pass the same number
            given["num_of_tokens_per_rank"] = round_up(sizes.group_max_rows or 1, _SHARED_ROWS_MULTIPLE)
        if capacity is not None:
            given["num_permuted_tokens"] = capacity.buffer_rows
        with unfilled():
            hidden, probs_R, scales, padded_L, raw = self.buffer().dispatch_with_permute(
                **_given(pack(rows_TD, self.context.shape.wire_dtype)), routing_map=map_TE, probs=probs_TE, **given
            )
        handle = Handle(place=self.place, raw=raw)
        on_host = None if capacity is not None else tuple(read_host(padded_L))
        padded_L = padded_L.to(rows_TD.device, torch.int64, non_blocking=True)
        is_real_R, edges = (probs_R != 0) | torch.signbit(probs_R), running_total(padded_L)
        # The real rows of each expert, counted without a host sync.
        real_L = running_total(is_real_R).index_select(0, edges).diff()
        if capacity is not None:  # behind the last expert, probabilities are anything
            is_real_R &= torch.arange(len(is_real_R), device=is_real_R.device) < edges[-1]
        route = ExpertMajorRoute(
            context=self.context,
            spread=partial(self.send_again, num_grouped=len(is_real_R), handle=handle),
            collect=partial(self.combine, ids_TK=ids_TK, handle=handle),
            is_real=lambda: is_real_R,
        )
        rows_RD = route.delivered(self._payload(hidden, scales), rows_TD.dtype)
        return Arrived(
            rows=rows_RD,
            weights=(probs_R + 0.0).to(weights_TK.dtype),  # -0.0 becomes 0.0 again
            tokens_per_expert=padded_L,
            real_tokens_per_expert=real_L,
            tokens_per_expert_list=on_host,
            route=route,
            demand=None if capacity is None else _demand(real_L, _overflowed(raw), capacity),
        )

    def send_again(self, rows: Payload, *, num_grouped: int, handle: Handle) -> Payload:
        """Send other rows the way of an earlier dispatch: (R, D), with the R of that dispatch. No host sync.

        The backward of combine runs it too.
        """
        with unfilled():
            hidden, _, scales, *_ = self.buffer(handle.place).dispatch_with_permute(
                **_given(rows), handle=handle.raw, num_permuted_tokens=num_grouped, **self._dispatch_arguments
            )
        return self._payload(hidden, scales)

    def _payload(self, hidden: Tensor, scales: Tensor | None) -> Payload:
        """Return what arrived with the dtypes that ``pack`` gives."""
        if scales is None:
            return hidden
        is_float32 = self.context.shape.wire_dtype == "float8_e4m3fn"
        return hidden.view(torch.float8_e4m3fn), scales if is_float32 else scales.view(torch.int32)

    def combine(
        self, rows_RD: Tensor, values_R: Tensor | None, *, ids_TK: Tensor, handle: Handle
    ) -> tuple[Tensor, Tensor | None]:
        """Send expert rows back and add them, without weights. No host sync.

        Args:
            rows_RD: bfloat16 (R, D).
            values_R: float32 (R,), one value per expert row, sent back with the rows; None for no values.
            ids_TK: The expert id of each slot. It finds the value of a slot in the library's (T, E).
            handle: Handle of the dispatch.

        Returns:
            The summed rows, (T, D), and the values, (T, K), or None.
        """
        with unfilled():
            rows_TD, values_TE = self.buffer(handle.place).combine_with_unpermute(
                hidden=rows_RD, probs=values_R, handle=handle.raw, **self._combine_arguments
            )
        if values_TE is None:
            return rows_TD, None
        return rows_TD, torch.where(ids_TK < 0, 0, values_TE.gather(1, ids_TK.clamp(min=0)))


def _given(rows: Payload) -> dict[str, Tensor]:
    """Return the arguments for rows. The library takes 8-bit rows as uint8, and scales of any kind as float32."""
    if isinstance(rows, Tensor):
        return {"hidden": rows}
    return {"hidden": rows[0].view(torch.uint8), "scaling_factor": rows[1].view(torch.float32)}


def _overflowed(raw: Any) -> Tensor:
    """Return whether a graph-safe dispatch dropped rows, bool () on the device.

    In every version with such a flag, it is the last tensor of the handle. Only a dispatch without a host sync writes
    it.
    """
    flag: Tensor = [part for part in raw if isinstance(part, Tensor)][-1]
    return flag.view(()) != 0


def _refuse_unknown(cls: type[Any], unknown: Set[str]) -> None:
    if unknown:
        raise ConfigError(
            f"Backend 'hybridep': the installed {cls.__name__} must have {', '.join(sorted(unknown))}, got a version "
            "without. Leave the option out, or install a later version."
        )


@cache
def _fresh_folder() -> str:
    """Make the folder in which the buffers of this process share compiled kernels. It is removed at exit.

    The library keeps kernels by process id. These ids repeat in containers, so an old folder may have kernels of
    another build.
    """
    parent = os.environ.get(_cache_variable.name)
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    folder = mkdtemp(prefix="hybridep-", dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
