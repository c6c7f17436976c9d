"""Copies of experts in V2.5: the exchange of their weights and gradients by ``EPBuffer``, and ``BufferAllocator``.

Source: deep_ep/buffers/ep.py and allocator.py, csrc/buffers/ep.hpp, csrc/kernels/ep/reduce_grads.hpp,
deep_ep/include/deep_ep/impls/ep and the README of V2.5 (2.5.0, commit def8651 for the C++ files).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from moe_dispatch.permutation.strides import dense
from moe_dispatch_testing.emulation.elastic_rows import aligned
from moe_dispatch_testing.emulation.events import EPEventOverlap, EventHandle
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, require, require_cpu
from moe_dispatch_testing.host_syncs import allow_host_syncs

BLOCK_BYTES = 2 * 2**20
"""The bytes of a buffer, and of each tensor that a plan allocates, are a multiple of this."""
EXPERT_BYTES = 32
"""The bytes of one expert are a multiple of this, as the README says. For weights the code asserts only 16."""
_MOST_TENSORS = 16
_NUM_SMS = 24  # what the emulation recommends


@final
class BufferAllocator:
    """A plan of tensors in the memory of a buffer. They are on the device "meta" until the buffer is made."""

    def __init__(self) -> None:
        self.alignment = BLOCK_BYTES
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert not self.materialized, "A materialized allocation plan cannot be changed"
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes += aligned(tensor.nbytes, self.alignment)
        return tensor

    def materialize(self, storage: Tensor) -> None:
        assert not self.materialized, "An allocation plan can only be materialized once"
        assert storage.dtype == torch.uint8
        assert storage.numel() == self.num_bytes
        for tensor, offset in self.allocations:
            found = storage[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, found)
        self.materialized = True


class ExpertCopies:
    """The methods of ``EPBuffer`` for redundant experts. All ranks are in one NVLink domain.

    Results are written when the event of a call is waited for, which is the latest moment that the release allows.
    """

    runtime: Any
    num_ranks: int
    rank_idx: int

    def lb_get_theoretical_num_sms(self) -> int:
        return _NUM_SMS

    @allow_host_syncs()
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Sequence[Tensor] | Tensor,
        expert_weights: Sequence[Tensor] | Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
    ) -> EPEventOverlap:
        """Write the weights of each expert into the slots of other ranks that the mapping gives it.

        Slots without an expert, which the mapping marks with -1, keep what they hold.
        """
        slots, own = _listed(redundant_expert_weights), _listed(expert_weights)
        exchange = self.runtime.exchange
        with exchange.entrance("EPBuffer.lb_prefetch_weights") as entry:
            fits = 0 < len(own) == len(slots) <= _MOST_TENSORS
            require(fits, f"weights must be 1 to {_MOST_TENSORS} pairs of tensors, got {len(slots)} and {len(own)}")
            entry.same = self._checked(slots, own, redundancy_mapping)
        num_own, homes = len(own[0]), redundancy_mapping // len(own[0])
        wanted = [redundancy_mapping[rank][homes[rank] == self.rank_idx].long() % num_own for rank in range(len(homes))]
        found = [exchange.rows([_as_bytes(one)[experts] for experts in wanted]) for one in own]

        def write() -> None:
            for one, by_home in zip(slots, found, strict=True):
                for home, rows in enumerate(by_home):
                    _as_bytes(one)[homes[self.rank_idx] == home] = rows

        return _deferred(write)

    @allow_host_syncs()
    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
    ) -> EPEventOverlap:
        """Add the gradients of copies to those of the experts at home, in float32, in an order that is not defined.

        The kernel adds atomically, so the order differs from run to run. Here it is a random one.
        """
        exchange, slots, own = self.runtime.exchange, redundant_expert_grads, expert_grads
        with exchange.entrance("EPBuffer.lb_reduce_grads") as entry:
            for one in (slots, own):
                fits = one.dtype == torch.float32 and one.dim() == 2
                require(fits, f"gradients must be float32 and 2-D, got {one.dtype} of shape {tuple(one.shape)}")
            entry.same = self._checked([slots], [own], redundancy_mapping)
        num_own, homes = len(own), redundancy_mapping // len(own)
        arrived = exchange.rows([slots[homes[self.rank_idx] == rank] for rank in range(len(homes))])
        experts = [redundancy_mapping[rank][homes[rank] == self.rank_idx] % num_own for rank in range(len(homes))]
        pairs = list(zip(torch.cat(experts).tolist(), torch.cat(arrived), strict=True))

        def write() -> None:
            for index in torch.randperm(len(pairs), generator=self.runtime.generator).tolist():
                expert, grad = pairs[index]
                own[expert] += grad

        return _deferred(write)

    def _checked(self, slots: Sequence[Tensor], own: Sequence[Tensor], mapping: Tensor) -> dict[str, Any]:
        """Check the arguments of both methods, and return what must be equal on all ranks."""
        require_cpu(*slots, *own, mapping)
        fits = mapping.dtype == torch.int32 and mapping.dim() == 2 and mapping.is_contiguous()
        require(fits, f"redundancy_mapping must be contiguous int32 (P, S), got {mapping.dtype} {tuple(mapping.shape)}")
        require(len(mapping) == self.num_ranks, f"the mapping must have {self.num_ranks} rows, got {len(mapping)}")
        num_slots, num_own = mapping.shape[1], len(own[0])
        require(num_own > 0, "every rank must have experts of its own")
        sizes = []
        for slot, one in zip(slots, own, strict=True):
            require(slot.is_contiguous() and one.is_contiguous(), "tensors of experts must be contiguous")
            rule = f"tensors must have {num_slots} slots and {num_own} experts, got {len(slot)} and {len(one)}"
            require(len(slot) == num_slots and len(one) == num_own, rule)
            per_slot, nbytes = slot.nbytes // max(num_slots, 1), one.nbytes // num_own
            fits = nbytes % EXPERT_BYTES == 0 and (not num_slots or per_slot == nbytes)
            require(fits, f"an expert and its slot must have equal bytes, a multiple of {EXPERT_BYTES}, got {nbytes}")
            region = self.runtime.lb_storage
            begin = slot.data_ptr() - region.data_ptr()
            inside = not slot.nbytes or 0 <= begin <= region.nbytes - slot.nbytes
            require(
                inside, "redundant tensors must lie in the region of lb_allocation_plan_or_num_bytes", EmulatedAbort
            )
            sizes.append(nbytes)
        low, high = (int(mapping.min()), int(mapping.max())) if mapping.numel() else (-1, -1)
        rule = f"the mapping must have experts below {self.num_ranks * num_own}, or -1, got {low} to {high}"
        require(low >= -1 and high < self.num_ranks * num_own, rule, EmulatedAbort)
        homes = mapping // num_own
        keeps_out = not bool((homes == torch.arange(self.num_ranks).unsqueeze(1)).any())
        require(keeps_out, "a rank's own experts must not be in its redundant slots", EmulatedAbort)
        return {"redundancy_mapping": mapping.tolist(), "bytes of an expert": sizes, "experts of a rank": num_own}


def _listed(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    return dense(tensor.detach()).view(len(tensor), tensor.nbytes // (len(tensor) * tensor.itemsize)).view(torch.uint8)


def _deferred(write: Any) -> EPEventOverlap:
    event = EPEventOverlap(EventHandle())
    event.register_hook_after_wait(write)
    return event
