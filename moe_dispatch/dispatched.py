"""What a dispatch returns: the rows that this rank's experts work on, and how experts work on them.

The names of tensors are those of ``moe_dispatch.types``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from moe_dispatch.errors import InputError, StateError
from moe_dispatch.permutation.grouped_mm import grouped_mm
from moe_dispatch.seams.slots import Placement
from moe_dispatch.seams.tracing import traced_calls

if TYPE_CHECKING:
    from moe_dispatch.capabilities.lean.packets import Packets
    from moe_dispatch.capabilities.quantised.rows import QuantisedRows


def check_plain(where: str, **arguments: object) -> None:
    """Refuse what is no tensor, and DTensors.

    A call compares types first, and comes here only with a type that is not ``Tensor``, such as a Parameter.

    Raises:
        InputError: An argument is no tensor, or is a DTensor. The error begins with ``where``.
    """
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{where}: {name} must be a Tensor, got {type(value).__name__}.")
        if hasattr(value, "to_local"):  # importing the class would take time
            raise InputError(
                f"{where}: {name} must be the tensor of this rank, got a {type(value).__name__}. Pass its to_local()."
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Dispatched:
    """The rows that this rank's experts work on, and the state that ``combine`` needs to bring them back.

    Under a placement, the experts of a rank are its expert slots: L is their number, and all counts are those of slots.

    Attributes:
        in_graph: ``rows`` where only their shape, dtype, device and place in the autograd graph matter. Not to be read:
            with ``wire.deliver="quantised"`` it is the edge of ``quantised``, and with ``packets`` it has no memory.
        tokens_per_expert: int64 (L,) on the device, rows of each expert with padding. An expert without tokens has 0.
        real_tokens_per_expert: int64 (L,) on the device, rows of each expert without padding. They are the counts of
            this dispatch: with ``chunks`` those of one chunk, under a placement those of one slot.
        host_counts: ``tokens_per_expert`` on the host, if the dispatch had a host sync anyway; otherwise None, as in
            graph-safe mode.
        weights: float32 (R,), or float64 for float64 rows; 0 on padding. They are part of the autograd graph.
        pad_multiple: The rows of each expert are padded to a multiple of this number. Experts must not pad again.
        placement: The expert in each expert slot of each rank, an ``ExpertPlacement``; None if every rank holds its own
            experts only. Under ``balance="exact"`` it is an ``ExactPlacement``; ``placement.read()`` has the same on
            the host.
        state: Private state of the dispatcher and the backend.
        quantised: The rows as they travelled, with ``wire.deliver="quantised"``; else None.
        packets: The rows as they arrived, with ``deliver="packets"``; else None.
        carried: What ``carry`` gave the tokens, by name: int32 or int64 (R,) in the order of ``rows``, -1 on padding.
            None without ``carry``.
    """

    in_graph: Tensor
    tokens_per_expert: Tensor
    real_tokens_per_expert: Tensor
    host_counts: tuple[int, ...] | None
    weights: Tensor
    pad_multiple: int
    placement: Placement | None
    state: Any
    quantised: QuantisedRows | None = None
    packets: Packets | None = None
    carried: Mapping[str, Tensor] | None = None

    def __repr__(self) -> str:
        rows_RD = self.in_graph
        rows = f"{str(rows_RD.dtype).removeprefix('torch.')} {tuple(rows_RD.shape)} on {rows_RD.device}"
        return f"Dispatched(rows={rows}, host_counts={self.host_counts}, pad_multiple={self.pad_multiple})"

    @property
    def rows(self) -> Tensor:
        """The rows, (R, D) in the model's dtype, grouped by expert.

        Each expert has its real rows, in the order of source rank and token, and then its zero padding. With
        ``wire.deliver="quantised"`` they are widened on the first read, and kept; with ``deliver="packets"`` they are
        copied to their experts then, and kept.
        """
        if self.packets is not None:
            return self.packets.rows(self.in_graph)
        return self.in_graph if self.quantised is None else self.quantised.rows

    @property
    def tokens_per_expert_list(self) -> tuple[int, ...] | None:
        """``tokens_per_expert`` on the host; None in graph-safe mode.

        Raises:
            StateError: The call is in a compiled region, where counts stay on the device.

        Cost: nothing if ``host_counts`` is known, as after every eager dispatch. After a compiled dispatch, and in
        selective checkpointing, one host sync.
        """
        if self.host_counts is not None or self._graph_safe:
            return self.host_counts
        if torch.compiler.is_compiling():
            raise StateError(
                "Dispatched.tokens_per_expert_list: counts stay on the device in a compiled region. sent.per_expert "
                "and sent.grouped_mm compile. Or use torch.compiler.disable."
            )
        return tuple(self.tokens_per_expert.tolist())

    @property
    def _graph_safe(self) -> bool:
        graph_safe = bool(self.state.lease.enter().config.graph_safe)
        return graph_safe

    @property
    def offs(self) -> Tensor:
        """The end of each expert's rows: inclusive sums of ``tokens_per_expert``, int32 (L,).

        ``torch._grouped_mm`` takes them as ``offs``.

        Raises:
            InputError: This rank has more rows than int32 counts. In graph-safe mode, building the dispatcher raises.
        """
        most, rows = torch.iinfo(torch.int32).max, sum(self.host_counts or ())
        if rows > most:
            raise InputError(
                f"Dispatched.offs: a rank must have at most {most} rows, because offs is int32, got {rows}. Use "
                "tokens_per_expert, or set chunks."
            )
        return self.tokens_per_expert.cumsum(0, dtype=torch.int32)

    @property
    def cu_tokens_per_expert(self) -> Tensor:
        """``offs`` with a leading 0, int32 (L+1,)."""
        return torch.nn.functional.pad(self.offs, (1, 0))

    def grouped_mm(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply each expert's rows by the expert's matrix: a grouped GEMM over ``offs``.

        Args:
            rows: (R, D), ``sent.rows`` or the result of an earlier step of the experts.
            weights: (L, D, H), a matrix for each of this rank's experts, in the dtype of ``rows``. Under autocast,
                rows and weights are converted to its dtype.

        Returns:
            (R, H), differentiable in rows and weights. In graph-safe mode, rows behind those of the last expert may
            hold any value.

        Raises:
            InputError: The shape or the dtype of ``rows`` or ``weights`` does not fit.

        Cost: that of ``torch.nn.functional.grouped_mm``, without another host sync. If a row of D or H columns is not a
        multiple of 16 bytes, both operands are copied with padding. float64 takes L products of all rows. With a
        ``pad_multiple`` above 1, the backward copies ``rows`` and the gradient of the result, with zeros on padding,
        and frees the copies at once; with ``weights`` that need no gradient it does not. A compiled region copies
        ``rows`` and the result in the forward.
        """
        if not (type(rows) is Tensor and type(weights) is Tensor):
            check_plain("Dispatched.grouped_mm", rows=rows, weights=weights)
        device = rows.device.type
        # torch 2.10 cannot compile the question whether a kind of device has autocast.
        has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
        if has_autocast and torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            rows, weights = rows.to(dtype), weights.to(dtype)
        num_experts, num_rows = self.tokens_per_expert.shape[0], self.in_graph.shape[0]
        fits = rows.dim() == 2 and weights.dim() == 3 and weights.shape[:2] == (num_experts, rows.shape[1])
        fits = fits and rows.dtype == weights.dtype and rows.is_floating_point()
        # In a compiled region row counts are symbols, which cannot be compared.
        if not fits or (not torch.compiler.is_compiling() and rows.shape[0] != num_rows):
            raise InputError(
                f"Dispatched.grouped_mm: rows must be floating (R={num_rows}, D) and weights (L={num_experts}, D, H) "
                f"in the same dtype, got {rows.dtype} {tuple(rows.shape)} and {weights.dtype} {tuple(weights.shape)}."
                f"{self._slots_advice}{_matrices_advice(rows, weights, num_experts)}"
            )
        return grouped_mm(rows, weights, self.offs, self._padding)

    def per_expert(self, functions: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """Apply a function to each expert's rows, and put the results together.

        Args:
            functions: L functions, one for each of this rank's experts, in order; for example an ``nn.ModuleList``.
                Each function receives the rows of its expert, (n, D), and returns n rows. n may be 0.

        Returns:
            (R, H), for ``combine``.

        Raises:
            InputError: The number of functions is not L.
            StateError: The config is graph_safe, so only the device knows how many rows each expert has.

        Cost: that of ``tokens_per_expert_list``. In a compiled region an operator copies the rows and reads the counts
        on the host.
        """
        num_experts = self.tokens_per_expert.shape[0]
        if not isinstance(functions, Iterable):
            raise InputError(
                f"Dispatched.per_expert: pass one function for each of {num_experts} experts, as an nn.ModuleList or a "
                f"list, got one {type(functions).__name__}."
            )
        applied = list(functions)
        if len(applied) != num_experts:
            raise InputError(
                f"Dispatched.per_expert: got {len(applied)} functions for {num_experts} experts.{self._slots_advice}"
            )
        if self._graph_safe:
            raise StateError("Dispatched.per_expert: with graph_safe only the device has the counts. Use grouped_mm.")
        if torch.compiler.is_compiling():
            parts = traced_calls().split(self.rows, self.tokens_per_expert)
        else:
            parts = self.rows.split(self.tokens_per_expert_list)
        outputs = [function(rows) for function, rows in zip(applied, parts, strict=True)]
        if others := {type(output).__name__ for output in outputs if not isinstance(output, Tensor)}:
            raise InputError(f"Dispatched.per_expert: functions must return tensors, got {', '.join(sorted(others))}.")
        return torch.cat(outputs)

    @property
    def _padding(self) -> Tensor | None:
        """The number of padding rows of each expert, int64 (L,); None if there are none."""
        return None if self.pad_multiple == 1 else self.tokens_per_expert - self.real_tokens_per_expert

    @property
    def _slots_advice(self) -> str:
        return "" if self.placement is None else " Rows are grouped by expert slots: run experts with SlotWeights."

    def wait(self) -> Dispatched:
        """Return this value, so that code for ``async_op=True`` also runs with ``async_op=False``."""
        return self


def _matrices_advice(rows: Tensor, weights: Tensor, num_experts: int) -> str:
    """Say what to do with matrices that are transposed, or those of all ranks; starts with a space."""
    if weights.dim() != 3 or rows.dim() != 2:
        return ""
    count, width, transposed = weights.shape
    advice = ""
    if count > num_experts:
        advice = " Pass the matrices of this rank's experts only, L of all."
    if width != rows.shape[1] == transposed:
        advice += " nn.Linear stores (H, D): pass weights.transpose(1, 2)."
    return advice


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlight:
    """A dispatch whose rows may still be on their way; ``dispatch(..., async_op=True)`` returns it.

    Attributes:
        placement: As in ``Dispatched``.
        finish: Function behind ``wait``.
    """

    placement: Placement | None
    finish: Callable[[], Dispatched]

    def wait(self) -> Dispatched:
        """Wait for the rows and return them. Call once: the autograd graph of the dispatch starts here."""
        return self.finish()

    if not TYPE_CHECKING:  # a type checker shall refuse such attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse what only ``Dispatched`` has."""
            advice = f". Call wait(), which returns a Dispatched with {name}." if hasattr(Dispatched, name) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")
