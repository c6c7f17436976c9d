"""The 11 functions of transformer-engine's compiled part that ``ep.py`` calls, over gloo, on CPU tensors.

They keep what the headers and sources of transformer-engine and NCCL EP say, and are as strict as they may be: the
routing is nowhere but in ``handle_mem``; memory that the library does not write holds NaN; more rows than the group was
made for, or more than the buffer of a rank holds, end in ``Trapped``; a handle of a group that is gone is refused.

Source: transformer-engine d0067d0, common/include/transformer_engine/ep.h and pytorch/csrc/extensions/ep.cpp;
nccl-extensions 44d2de0, nccl_ep: the overflow policy, and the scan and permute kernels of the HT mode.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.exchange import RankExchange
from moe_dispatch_testing.host_syncs import allow_host_syncs

POISON = float("nan")
GROUPS: dict[int, dist.ProcessGroup] = {}
"""The process groups, by what stands for the pointer to their communicator."""
_numbers = itertools.count(1)


class Trapped(RuntimeError):
    """A kernel would trap here, which ends the process."""


class Settings(NamedTuple):
    """What ``ep_initialize`` is given."""

    comm_ptr: int
    group_name: str
    num_experts: int
    max_tokens_per_rank: int
    max_recv_tokens_per_rank: int
    hidden_dim: int
    max_num_sms: int
    max_token_dtype: torch.dtype
    zero_copy: bool
    num_topk: int
    drop_on_overflow: bool


class Places(NamedTuple):
    """Where the rows of a rank's experts come from: their place, and the rank, token and slot that each is from."""

    place: Tensor
    rank: Tensor
    token: Tensor
    slot: Tensor
    counts: Tensor  # rows of each expert, without padding, after drops
    padded: Tensor  # the same with padding
    total: int  # rows with padding before drops


def _library(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function as a kernel would run: outside autograd, and free to read its tensors."""

    @functools.wraps(function)
    def run(*args: Any, **given: Any) -> Any:
        with allow_host_syncs(), torch.no_grad():
            return function(*args, **given)

    return run


class StandIn:
    """``transformer_engine_torch`` of one process, with the functions of NCCL EP only.

    Attributes:
        bootstraps: The settings of each group that was made.
        pads_counts: Whether ``tokens_per_expert`` has the padding of experts, as in nccl-extensions 44d2de0. Its
            document of the overflow policy has counts without.
        skips_negative: Whether ids below 0 go nowhere.
    """

    DType = SimpleNamespace(kFloat8E4M3="e4m3")

    def __init__(self) -> None:
        self.bootstraps: list[Settings] = []
        self.pads_counts = True
        self.skips_negative = True
        self._settings: Settings | None = None
        self._layer: tuple[int, int] | None = None
        self._number = 0

    def ep_zero_copy_supported(self) -> bool:
        return False

    def ep_get_zero_copy(self) -> bool:
        return False

    @_library
    def ep_initialize(self, *values: Any) -> None:
        settings = Settings(*values)
        assert self._settings is None, "ep_initialize called twice without ep_finalize"
        group = GROUPS[settings.comm_ptr]
        assert settings.group_name
        assert settings.max_tokens_per_rank > 0
        assert settings.num_topk > 0
        assert settings.num_experts % group.size() == 0
        assert settings.hidden_dim * settings.max_token_dtype.itemsize % 16 == 0, "max_token_bytes % 16"
        most = settings.max_recv_tokens_per_rank
        assert most >= 0
        assert not (settings.drop_on_overflow and most == 0)
        assert most == 0 or most >= settings.max_tokens_per_rank, "HT mode requires recv >= dispatch tokens per rank"
        self._exchange = RankExchange(group)
        with self._exchange.entrance("ep_initialize") as entry:
            entry.same = {**settings._asdict(), "comm_ptr": 0, "max_token_dtype": str(settings.max_token_dtype)}
        self._settings, self._layer, self._number = settings, None, next(_numbers)
        self.bootstraps.append(settings)

    def ep_finalize(self) -> None:
        self._settings = None

    def ep_handle_mem_size(self, top_k: int, alignment: int = 0) -> int:
        settings = self._open
        assert 0 < top_k <= settings.num_topk
        ranks = self._exchange.size
        return 8 * (1 + ranks + ranks * settings.max_tokens_per_rank * top_k)

    @_library
    def ep_prepare(
        self,
        handle_mem: Tensor,
        topk_idx: Tensor,
        tokens_per_expert: Tensor,
        top_k: int,
        dispatch_output_per_expert_alignment: int,
        total_recv_tokens: Tensor,
    ) -> None:
        settings, alignment = self._open, dispatch_output_per_expert_alignment
        layer = (top_k, alignment)
        assert self._layer in (None, layer), f"EP prepare {layer} disagrees with process-wide cached {self._layer}"
        self._layer = layer
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype in (torch.int32, torch.int64)
        assert topk_idx.shape[1] == top_k
        assert tokens_per_expert.dtype == total_recv_tokens.dtype == torch.int64
        assert handle_mem.dtype == torch.uint8
        assert len(handle_mem) == self.ep_handle_mem_size(top_k, alignment)
        assert len(topk_idx) > 0, "nothing says that a rank may bring no row"
        with self._entrance("ep_prepare"):
            if len(topk_idx) > settings.max_tokens_per_rank:
                raise Trapped(f"{len(topk_idx)} tokens, the group is made for {settings.max_tokens_per_rank}")
        ids = torch.full((settings.max_tokens_per_rank, top_k), -1)
        ids[: len(topk_idx)] = topk_idx if self.skips_negative else topk_idx.clamp(min=0)
        memory = handle_mem.view(torch.int64)
        memory[0] = self._number
        ranks = self._exchange.size
        memory[1 : 1 + ranks] = self._gathered(torch.tensor([len(topk_idx)]))[:, 0]
        memory[1 + ranks :] = self._gathered(ids).flatten()
        mine = self._places(handle_mem, self._exchange.rank)
        most = settings.max_recv_tokens_per_rank
        if most and mine.total > most and not settings.drop_on_overflow:
            raise Trapped(f"padded EM slots {mine.total} > max_recv_tokens_per_rank {most}")
        tokens_per_expert.copy_(mine.padded if self.pads_counts else mine.counts)
        total_recv_tokens.fill_(mine.total)

    @_library
    def ep_dispatch(
        self,
        handle_mem: Tensor,
        topk_idx: Tensor,
        tokens: Tensor,
        topk_weights: Tensor,
        recv_tokens: Tensor,
        recv_topk_weights: Tensor,
        tokens_scale_inv: None = None,
        recv_scale_inv: None = None,
    ) -> None:
        assert tokens_scale_inv is recv_scale_inv is None
        assert topk_idx.shape == topk_weights.shape
        assert len(tokens) == len(topk_idx)
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert len(recv_topk_weights) == len(recv_tokens)
        with self._entrance("ep_dispatch"):
            pass
        self._spread(handle_mem, tokens, recv_tokens)
        self._spread(handle_mem, topk_weights.unsqueeze(2), recv_topk_weights.unsqueeze(1), by_slot=True)

    @_library
    def ep_prepare_and_dispatch(
        self,
        handle_mem: Tensor,
        topk_idx: Tensor,
        tokens: Tensor,
        topk_weights: Tensor,
        tokens_per_expert: Tensor,
        total_recv_tokens: Tensor,
        top_k: int,
        alignment: int,
        recv_tokens: Tensor | None = None,
        recv_topk_weights: Tensor | None = None,
        recv_scale_inv: None = None,
        tokens_scale_inv: None = None,
    ) -> list[Tensor]:
        is_eager = self._open.max_recv_tokens_per_rank == 0
        assert is_eager == (recv_tokens is None)
        self.ep_prepare(handle_mem, topk_idx, tokens_per_expert, top_k, alignment, total_recv_tokens)
        if recv_tokens is None or recv_topk_weights is None:
            rows = int(total_recv_tokens)
            recv_tokens, recv_topk_weights = tokens.new_empty(rows, tokens.shape[1]), topk_weights.new_empty(rows)
        self.ep_dispatch(handle_mem, topk_idx, tokens, topk_weights, recv_tokens, recv_topk_weights)
        return [recv_tokens, recv_topk_weights]

    @_library
    def ep_combine(self, handle_mem: Tensor, expert_out: Tensor, result: Tensor) -> None:
        with self._entrance("ep_combine"):
            pass
        self._collect(handle_mem, expert_out, result)

    @_library
    def ep_dispatch_bwd(
        self,
        handle_mem: Tensor,
        grad: Tensor,
        g_recv_topk_weights: Tensor,
        grad_tokens: Tensor,
        grad_topk_weights: Tensor,
    ) -> None:
        assert g_recv_topk_weights.is_contiguous()
        assert len(g_recv_topk_weights) == len(grad)
        assert g_recv_topk_weights.dtype == grad_topk_weights.dtype == torch.float32
        assert len(grad_tokens) == len(grad_topk_weights)
        with self._entrance("ep_dispatch_bwd"):
            pass
        self._collect(handle_mem, grad, grad_tokens)
        self._collect(handle_mem, g_recv_topk_weights.unsqueeze(1), grad_topk_weights.unsqueeze(2), by_slot=True)

    @_library
    def ep_combine_bwd(
        self,
        handle_mem: Tensor,
        grad: Tensor,
        grad_expert_out: Tensor,
        grad_scale_inv: None = None,
        grad_expert_out_scale_inv: None = None,
    ) -> None:
        assert grad_scale_inv is grad_expert_out_scale_inv is None
        with self._entrance("ep_combine_bwd"):
            pass
        self._spread(handle_mem, grad, grad_expert_out)

    @property
    def _open(self) -> Settings:
        assert self._settings is not None, "EPBackend not initialized"
        return self._settings

    @contextmanager
    def _entrance(self, where: str) -> Iterator[None]:
        assert self._settings is not None, "EPBackend not initialized"
        with self._exchange.entrance(where) as entry:
            entry.same = {"group": self._settings.group_name}
            yield

    def _gathered(self, mine: Tensor) -> Tensor:
        """A tensor of equal shape on all ranks, of all ranks: (P, ...)."""
        raw = mine.contiguous().view(torch.uint8).flatten()
        out = torch.empty(self._exchange.size * len(raw), dtype=torch.uint8)
        self._exchange._communicator.all_gather(out, raw, label="stand-in")
        return out.view(mine.dtype).view(self._exchange.size, *mine.shape)

    def _routing(self, handle_mem: Tensor) -> tuple[list[int], Tensor]:
        """Rows of each rank, and ids (P, most tokens, K), from the memory of a handle."""
        settings, memory, ranks = self._open, handle_mem.view(torch.int64), self._exchange.size
        assert memory[0] == self._number, "the handle is of a group that is gone: its memory is laid out otherwise"
        tokens = memory[1 : 1 + ranks].tolist()
        return tokens, memory[1 + ranks :].view(ranks, settings.max_tokens_per_rank, -1)

    def _places(self, handle_mem: Tensor, rank: int) -> Places:
        """What arrives at the experts of a rank, expert by expert, by source rank and token."""
        settings = self._open
        assert self._layer is not None
        _, ids = self._routing(handle_mem)
        alignment, most = max(self._layer[1], 1), settings.max_recv_tokens_per_rank
        local = settings.num_experts // self._exchange.size
        mine = ids - rank * local
        taken = ((mine >= 0) & (mine < local)).nonzero()  # by source rank, token and slot
        expert = mine[tuple(taken.T)]
        order = torch.argsort(expert, stable=True)
        taken, expert = taken[order], expert[order]
        counts = torch.bincount(expert, minlength=local)
        padded = -(-counts // alignment) * alignment
        first = padded.cumsum(0) - padded
        place = first[expert] + torch.arange(len(expert)) - (counts.cumsum(0) - counts)[expert]
        total = int(padded.sum())
        if most:
            # A row for each token that arrives is staged first, then expert rows are made: both hold ``most`` rows.
            arrived = torch.zeros(ids.shape[:2], dtype=torch.bool)
            arrived[taken[:, 0], taken[:, 1]] = True
            staged = arrived.flatten().cumsum(0).view(arrived.shape) - 1
            kept = (place < most) & (staged[taken[:, 0], taken[:, 1]] < most)
            place, taken = place[kept], taken[kept]
            room = (most - first).clamp(min=0)
            counts, padded = counts.minimum(room), padded.minimum(room)
        rank_of, token_of, slot_of = taken.T
        return Places(place, rank_of, token_of, slot_of, counts, padded, total)

    def _spread(self, handle_mem: Tensor, rows: Tensor, out: Tensor, *, by_slot: bool = False) -> None:
        """Copy rows, or with ``by_slot`` one value for each of their slots, to the expert rows of all ranks."""
        settings = self._open
        tokens, _ = self._routing(handle_mem)
        assert out.is_contiguous() or by_slot
        assert len(rows) == tokens[self._exchange.rank]
        mine = self._places(handle_mem, self._exchange.rank)
        end = int(mine.padded.sum())
        assert len(out) >= (settings.max_recv_tokens_per_rank or end), "the recv buffer is too small"
        sent = rows.new_full((settings.max_tokens_per_rank, *rows.shape[1:]), POISON)
        sent[: len(rows)] = rows
        everyone = self._gathered(sent)
        out.fill_(0 if settings.drop_on_overflow else POISON)
        out[:end] = 0
        source = (mine.rank, mine.token, mine.slot) if by_slot else (mine.rank, mine.token)
        out[mine.place] = everyone[source]

    def _collect(self, handle_mem: Tensor, rows: Tensor, out: Tensor, *, by_slot: bool = False) -> None:
        """Add up the expert rows of each token in float32, or with ``by_slot`` bring the value of each slot back."""
        tokens, _ = self._routing(handle_mem)
        me, ranks = self._exchange.rank, self._exchange.size
        assert rows.is_contiguous() or by_slot
        assert len(out) == tokens[me]
        places = [self._places(handle_mem, rank) for rank in range(ranks)]
        assert len(rows) >= int(places[me].padded.sum())
        longest = max(int(one.padded.sum()) for one in places)
        sent = rows.new_full((longest, *rows.shape[1:]), POISON)
        sent[: min(longest, len(rows))] = rows[:longest]
        everyone = self._gathered(sent)
        sums = torch.zeros(out.shape, dtype=torch.float32)
        for rank, one in enumerate(places):
            ours = one.rank == me
            values = everyone[rank][one.place[ours]].float()
            at = (one.token[ours], one.slot[ours]) if by_slot else (one.token[ours],)
            # The expert rows of a token on one rank are added there, and rounded before they travel.
            on_rank = torch.zeros(out.shape, dtype=torch.float32).index_put_(at, values, accumulate=True)
            sums += on_rank.to(out.dtype).float()
        out.copy_(sums)
