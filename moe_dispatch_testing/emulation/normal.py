"""v1.2.1's ``deep_ep.Buffer`` in normal mode: high-throughput dispatch and combine.

Source: deep_ep/buffer.py, csrc/deep_ep.cpp, csrc/kernels/intranode.cu and internode.cu of v1.2.1.
"""

from __future__ import annotations

import functools
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch_testing.emulation.arguments import X, pack_rows, unpack_bias, unpack_rows, unpacked
from moe_dispatch_testing.emulation.config import COMBINE_QUEUES, DISPATCH_QUEUES, NVL_PEERS, Config
from moe_dispatch_testing.emulation.events import EventHandle, EventOverlap
from moe_dispatch_testing.emulation.exchange import RankExchange, require_one_dispatch
from moe_dispatch_testing.emulation.memory import grown, stacked, take, torch_fills_memory, uninitialised
from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang, require, require_cpu
from moe_dispatch_testing.emulation.signatures import follow_release, recorded
from moe_dispatch_testing.host_syncs import allow_host_syncs

_DISPATCH, _COMBINE = "Buffer.dispatch", "Buffer.combine"
# Numbers of nodes with kernels: csrc/kernels/launch.cuh:62-71 of v1.2.1, ep/include/ep_launch.cuh of UCCL, and
# csrc/kernels/launch.cuh of ROCm/DeepEP, where 9 nodes have no default configuration.
_NODE_COUNTS = {"v1.2.1": (2, 4, 8, 16, 18, 20), "uccl-da914a2": (2, 3, 4, 8, 16), "rocm-92b4ae1": (2, 4, 8, 16)}


class NormalBuffer:
    """Emulates high-throughput dispatch and combine over a process group of CPU ranks.

    A group of 2, 4 or 8 ranks is one node. A larger group has nodes of 8 ranks. Low-latency mode is not emulated.

    ``runtime`` stands for the C++ object. It is None after ``destroy``, so that a later call fails as in the release. A
    buffer that is garbage-collected without ``destroy`` frees nothing and prints nothing.
    """

    num_sms: int = 20
    node_counts: tuple[int, ...] = ()
    ids_dtype: torch.dtype = torch.int64  # ``topk_idx_t`` of builds after v1.2.1, which may be int32

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
        is_intranode: bool | None = None,
        use_fabric: bool = False,
        enable_shrink: bool = False,
    ) -> None:
        if group is None:
            raise ValueError("Buffer: the emulation needs a ProcessGroup, got None. Pass it as group.")
        if low_latency_mode:
            raise NotImplementedError("Buffer: low-latency mode is not emulated. Use dispatch and combine.")
        self.rank = group.rank()
        self.group = group
        self.group_size = group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        _refuse_fill()
        self.runtime = _NormalRuntime(group, num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, self.node_counts)

    def destroy(self) -> None:
        """Free the buffer. All ranks must call this, because they meet in a barrier."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.runtime.exchange.barrier("Buffer.destroy")
        self.runtime = None  # type: ignore[assignment]  # as in the release: a later call raises AttributeError

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        NormalBuffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in DISPATCH_QUEUES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(NormalBuffer.num_sms, *DISPATCH_QUEUES[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in COMBINE_QUEUES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(NormalBuffer.num_sms, *COMBINE_QUEUES[num_ranks])

    @allow_host_syncs()
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count this rank's tokens for each rank, node and expert. No exchange.

        An id outside 0..E-1, such as -1, is not counted. An expert that a token names twice is counted twice.

        Returns:
            The number of tokens for each rank, int32 (P,); for each node, or None within one node; for each expert,
            int32 (E,). Then the flags that say which token goes to which rank, bool (T, P), and an event.
        """
        event = _event(previous_event, async_finish, allocate_on_comm_stream)
        _check_ids(topk_idx)
        require(num_experts % self.group_size == 0, f"{num_experts} experts do not divide by the number of ranks")
        topk_idx, size = topk_idx.detach(), self.group_size
        is_known = (topk_idx >= 0) & (topk_idx < num_experts)
        per_expert = torch.bincount(topk_idx[is_known], minlength=num_experts).to(torch.int32)
        owner = torch.where(is_known, topk_idx // (num_experts // size), size)
        in_rank = torch.zeros(len(topk_idx), size + 1, dtype=torch.bool).scatter_(1, owner, True)
        in_rank = in_rank[:, :size].contiguous()
        per_node = None
        if self.runtime.nodes > 1:
            per_node = in_rank.view(len(topk_idx), self.runtime.nodes, NVL_PEERS).any(2).sum(0, dtype=torch.int32)
        return in_rank.sum(0, dtype=torch.int32), per_node, per_expert, in_rank, event

    @allow_host_syncs()
    def dispatch(
        self,
        x: X,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[X, Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None, EventOverlap]:
        """Send each token once to each rank that ``is_token_in_rank`` names. Rows arrive by source rank, then token.

        With ``handle``, rows go to the same ranks as in the dispatch that made the handle, and only rows are returned.
        """
        config = self.get_dispatch_config(self.group_size) if config is None else config
        event = _event(previous_event, async_finish, allocate_on_comm_stream)
        rows, scales = unpack_rows(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            again = self.runtime.dispatch_again(rows, scales, handle, config)
            return pack_rows(*again), None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        if self.runtime.nodes > 1:
            assert num_worst_tokens == 0, "Internode dispatch does not support `num_worst_tokens > 0`"
            assert num_tokens_per_rdma_rank is not None
        received, ids, weights, counts, made = self.runtime.dispatch(
            (rows, scales, topk_idx, topk_weights),
            (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank),
            config,
            alignment=expert_alignment,
            worst=num_worst_tokens,
        )
        return received, ids, weights, counts, made, event

    @allow_host_syncs()
    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Send rows back to their source ranks, and add them up there in float32, without weights.

        ``topk_weights`` are sent back and added up in the same way.
        """
        config = self.get_combine_config(self.group_size) if config is None else config
        event = _event(previous_event, async_finish, allocate_on_comm_stream)
        return *self.runtime.combine(x, topk_weights, unpack_bias(bias), handle, config), event


def _event(previous: EventOverlap | None, is_async: bool, on_comm_stream: bool) -> EventOverlap:
    """Check the arguments about streams and events, which have no effect on a CPU. Return the event of the call."""
    _refuse_fill()
    waits = getattr(previous, "event", None) is not None
    require(not on_comm_stream or (waits and is_async), "allocate_on_comm_stream needs previous_event and async_finish")
    return EventOverlap(EventHandle() if is_async else None)


def _refuse_fill() -> None:
    """Refuse to run while torch fills fresh memory. The release does not check it: see its issues 589 and 600."""
    setting = "torch.utils.deterministic.fill_uninitialized_memory"
    require(not torch_fills_memory(), f"{setting} must be off in deterministic mode, got on", EmulatedAbort)


@functools.cache
def buffer_class(release: str) -> type[NormalBuffer]:
    """Return the class ``Buffer`` of v1.2.1, or of another library that has this class, with its parameters."""
    own = {"node_counts": _NODE_COUNTS[release], "__doc__": NormalBuffer.__doc__, "__module__": __name__}
    return follow_release(release, type("Buffer", (NormalBuffer,), own))


@final
class _NormalRuntime:
    """The buffers of one rank. Every method is collective and works outside autograd."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        nvl_bytes: int,
        rdma_bytes: int,
        num_qps_per_rank: int,
        node_counts: tuple[int, ...],
    ) -> None:
        self.exchange = RankExchange(group)
        self._rank, self._size = self.exchange.rank, self.exchange.size
        self.nodes = max(1, self._size // NVL_PEERS)
        self._num_qps = num_qps_per_rank
        names = recorded("v1.2.1")["handles"]
        self._names = names["dispatch" if self.nodes == 1 else "internode_dispatch"]
        with self.exchange.entrance("Buffer") as entry:
            in_nodes = self._size % NVL_PEERS == 0 and self.nodes in node_counts
            *most, last = map(str, node_counts)
            rule = f"a group must have 2, 4 or 8 ranks, or {', '.join(most)} or {last} nodes of 8 ranks"
            require(self._size in (2, 4, 8) or in_nodes, f"{rule}, got {self._size} ranks")
            require(nvl_bytes % 128 == rdma_bytes % 128 == 0, "the bytes of a buffer must be a multiple of 128")
            require(rdma_bytes == 0 or self.nodes > 1, f"num_rdma_bytes must be 0 within a node, got {rdma_bytes}")
            entry.told = [nvl_bytes, rdma_bytes]
        self._smallest = [min(told) for told in zip(*entry.everyone, strict=True)]

    def dispatch(
        self,
        sent: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
        layout: tuple[Tensor, Tensor, Tensor],
        config: Config,
        *,
        alignment: int,
        worst: int,
    ) -> tuple[X, Tensor | None, Tensor | None, list[int], tuple[Tensor, ...]]:
        """RankExchange the counts, then send the rows (T, D), their scales, ids and weights (T, K)."""
        x, scales, ids, weights = sent
        per_rank, per_expert, in_rank = layout
        num_experts = per_expert.numel()
        with self.exchange.entrance(_DISPATCH) as entry:
            self._check_rows(x, scales, in_rank, config)
            require_cpu(per_rank, per_expert)
            counts = "num_tokens_per_rank and num_tokens_per_expert"
            require(per_rank.dtype == per_expert.dtype == torch.int32, f"{counts} must be int32")
            # The kernel has 128 threads within a node and 512 across nodes, one for each expert.
            most = 128 if self.nodes == 1 else 512 // NVL_PEERS
            experts = f"num_experts must be a multiple of the number of ranks, and at most {most} per rank"
            require(
                num_experts % self._size == 0 and num_experts // self._size <= most, f"{experts}, got {num_experts}"
            )
            _check_topk(x, ids, weights)
            require(not worst or ids is not None, "num_worst_tokens needs topk_idx")
            flagged = in_rank.sum(0, dtype=torch.int32).tolist()
            same = f"num_tokens_per_rank must count is_token_in_rank, got {per_rank.tolist()} for {flagged}"
            require(flagged == per_rank.tolist(), same, EmulatedAbort)
            entry.same = {"layout": [*_sizes(x, scales, ids), *config.layout(), num_experts], "use of a handle": False}
            entry.told = [flagged, per_expert.tolist(), worst]
        all_per_rank, all_per_expert, capacities = (list(told) for told in zip(*entry.everyone, strict=True))
        rows_PP = torch.tensor(all_per_rank)
        self._require_capacity(rows_PP.sum(0).tolist(), capacities)
        num_rows = worst or int(rows_PP[:, self._rank].sum())
        tokens = _tokens_for(in_rank)
        received = pack_rows(
            self._moved(x, tokens, num_rows), None if scales is None else self._moved(scales, tokens, num_rows)
        )
        handle = self._handle(in_rank, rows_PP, num_rows, config.num_channels)
        expert_rows = torch.tensor(all_per_expert).view(self._size, self._size, -1)[:, self._rank].sum(0)
        expert_rows_list = [] if worst else (-(-expert_rows // alignment) * alignment).tolist()
        if ids is None or weights is None:
            return received, None, None, expert_rows_list, handle
        first = self._rank * (num_experts // self._size)
        ids, weights = self._moved(ids, tokens), self._moved(weights, tokens)
        is_here = (ids >= first) & (ids < first + num_experts // self._size)
        local, weights = torch.where(is_here, ids - first, -1), torch.where(is_here, weights, 0.0)
        # Behind the last received row, the kernel writes -1 to the ids and nothing to the other tensors.
        tail = local.new_full((num_rows - len(local), local.shape[1]), -1)
        return received, torch.cat([local, tail]), grown(weights, num_rows), expert_rows_list, handle

    def dispatch_again(
        self, x: Tensor, scales: Tensor | None, handle: tuple[Tensor, ...], config: Config
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows to the same ranks as the dispatch that made the handle. Send no ids, weights or counts."""
        kept = unpacked(self._names, handle)
        in_rank = kept["is_token_in_rank"]
        with self.exchange.entrance(_DISPATCH) as entry:
            self._check_rows(x, scales, in_rank, config)
            self._check_channels(kept, config)
            entry.same = {"layout": [*_sizes(x, scales, None), *config.layout()], "use of a handle": True}
            entry.told = [in_rank.sum(0).tolist(), self._rows_from(kept)]
        require_one_dispatch(_DISPATCH, entry.everyone)
        tokens = _tokens_for(in_rank)
        num_rows = len(kept["recv_src_idx" if self.nodes == 1 else "recv_src_meta"])
        return self._moved(x, tokens, num_rows), None if scales is None else self._moved(scales, tokens, num_rows)

    def combine(
        self, x: Tensor, weights: Tensor | None, biases: list[Tensor], handle: tuple[Tensor, ...], config: Config
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back to their source ranks, and add them up there in float32, in the order of ranks.

        Within a node, the sums are rounded once. Between nodes, each node rounds its sum before it sends it, and the
        source rank rounds again (csrc/kernels/intranode.cu:805-871, internode.cu:1217-1358).
        """
        kept = unpacked(self._names, handle)
        in_rank = kept["is_token_in_rank"]
        num_tokens, num_rows = len(in_rank), len(kept["recv_src_idx" if self.nodes == 1 else "recv_src_meta"])
        with self.exchange.entrance(_COMBINE) as entry:
            require_cpu(x, weights, *biases)
            self._check_channels(kept, config)
            bf16_rows = x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16
            require(bf16_rows, f"x must be contiguous bfloat16 rows, got {x.dtype} of shape {tuple(x.shape)}")
            require(len(x) == num_rows, f"x must have the {num_rows} rows that dispatch returned, got {len(x)}")
            # Later than the release, abba6ad (#413) allows other widths. In the release, lanes wait for lanes.
            width = f"the width of rows must be a multiple of 256 in combine, got {x.shape[1]}"
            require(x.shape[1] % 256 == 0, width, EmulatedHang)
            if weights is not None:
                fits = weights.dtype == torch.float32 and weights.dim() == 2 and len(weights) == num_rows
                require(fits, f"topk_weights must be float32 with {num_rows} rows")
            for bias in biases:
                fits = bias.dtype == x.dtype and bias.shape == (num_tokens, x.shape[1])
                require(fits, f"a bias must be bfloat16 {(num_tokens, x.shape[1])}, got {tuple(bias.shape)}")
            self._check_memory(x, config)
            top_k = 0 if weights is None else weights.shape[1]
            entry.same = {"layout": [x.shape[1], top_k, *config.layout()]}
            entry.told = [in_rank.sum(0).tolist(), self._rows_from(kept)]
        require_one_dispatch(_COMBINE, entry.everyone)
        tokens, back = _tokens_for(in_rank), self._rows_from(kept)

        def added(rows: Tensor, biases: list[Tensor]) -> Tensor:
            arrived = self.exchange.rows(rows.detach()[: sum(back)].split(back))
            total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32)
            for bias in biases:
                total += bias.float()
            for first in range(0, self._size, NVL_PEERS):
                of_node = total if self.nodes == 1 else torch.zeros_like(total)
                for rank in range(first, min(first + NVL_PEERS, self._size)):
                    of_node[tokens[rank]] += arrived[rank].float()
                if self.nodes > 1:
                    total += of_node.to(rows.dtype).float()
            return total.to(rows.dtype)

        return added(x, biases), None if weights is None else added(weights, [])

    def _check_rows(self, x: Tensor, scales: Tensor | None, in_rank: Tensor, config: Config) -> None:
        require_cpu(x, scales, in_rank)
        require(x.dim() == 2 and x.is_contiguous(), f"x must be contiguous and 2-D, got shape {tuple(x.shape)}")
        row_bytes = x.shape[1] * x.element_size()
        width = f"a row must have a multiple of 32 bytes below {2**14}, got {x.shape[1]} of {x.dtype}"
        require(row_bytes % 32 == 0 and row_bytes < 2**14, width, EmulatedAbort)
        if scales is not None:
            fits = x.element_size() == 1 and scales.dim() == 2 and len(scales) == len(x)
            types = scales.dtype in (torch.float32, torch.int32)
            require(fits and types, "scales must be float32 or int32 with a row for each float8 row of x")
        fits = in_rank.dtype == torch.bool and in_rank.shape == (len(x), self._size)
        shape = f"is_token_in_rank must be bool {(len(x), self._size)}"
        require(fits, f"{shape}, got {in_rank.dtype} of shape {tuple(in_rank.shape)}")
        enough = self._num_qps >= config.num_sms or self._num_qps == config.num_channels
        queues = f"num_qps_per_rank must be {config.num_sms} or more between nodes, got {self._num_qps}"
        require(self.nodes == 1 or enough, queues, EmulatedAbort)
        self._check_memory(x, config)

    def _check_memory(self, x: Tensor, config: Config) -> None:
        require(config.num_sms % 2 == 0, f"the number of SMs must be even, got {config.num_sms}")
        row_bytes = x.shape[1] * x.element_size()
        needed = (config.nvl_bytes(row_bytes, self._size), config.rdma_bytes(row_bytes, self._size))
        for kind, least, smallest in zip(("nvl", "rdma"), needed, self._smallest, strict=True):
            rule = f"num_{kind}_bytes must be {least} or more on every rank, got {smallest} on one rank"
            hint = f"Use the larger get_{kind}_buffer_size_hint of the dispatch config and the combine config"
            require(smallest >= least, f"{rule}. {hint}", EmulatedAbort)

    def _check_channels(self, kept: dict[str, Tensor], config: Config) -> None:
        made = kept["channel_prefix_matrix" if self.nodes == 1 else "gbl_channel_prefix_matrix"].shape[1]
        rule = f"the config must have the {made} channels of the config that made the handle"
        require(made == config.num_channels, f"{rule}, got {config.num_channels}")

    def _require_capacity(self, rows: list[int], capacities: list[int]) -> None:
        """Refuse more rows than ``num_worst_tokens``. The kernel of the receiver would write them all."""
        for receiver, (needed, capacity) in enumerate(zip(rows, capacities, strict=True)):
            rule = f"num_worst_tokens ({capacity}) must hold every row that rank {receiver} receives, got {needed}"
            kind = EmulatedAbort if receiver == self._rank else EmulatedHang
            require(capacity == 0 or needed <= capacity, rule, kind)

    def _handle(self, in_rank: Tensor, rows_PP: Tensor, num_rows: int, num_channels: int) -> tuple[Tensor, ...]:
        """Make a handle: the flags of the sent tokens, and prefix sums of the received rows.

        The other tensors stay uninitialised, because only kernels read them.
        """

        def empty(*shape: int) -> Tensor:
            return uninitialised(shape, torch.int32)

        prefix_PP = rows_PP.cumsum(0).to(torch.int32)
        made = {
            "is_token_in_rank": in_rank,
            "rank_prefix_matrix": prefix_PP,
            "channel_prefix_matrix": empty(self._size, num_channels),
            "recv_channel_prefix_matrix": empty(self._size, num_channels),
            "recv_src_idx": empty(num_rows),
            "send_head": empty(len(in_rank), self._size),
            "rdma_channel_prefix_matrix": empty(self.nodes, num_channels),
            "gbl_channel_prefix_matrix": empty(self._size, num_channels),
            "recv_rdma_channel_prefix_matrix": empty(self.nodes, num_channels),
            "recv_rdma_rank_prefix_sum": empty(self.nodes),
            "recv_gbl_channel_prefix_matrix": empty(self._size, num_channels),
            "recv_gbl_rank_prefix_sum": prefix_PP[:, self._rank].contiguous(),
            "recv_src_meta": uninitialised((num_rows, 8), torch.uint8),
            "send_rdma_head": empty(len(in_rank), self.nodes),
            "send_nvl_head": empty(num_rows, NVL_PEERS),
        }
        return tuple(made[name] for name in self._names)

    def _rows_from(self, kept: dict[str, Tensor]) -> list[int]:
        """Return the number of rows received from each rank."""
        if self.nodes == 1:
            ends = kept["rank_prefix_matrix"][:, self._rank].long()
        else:
            ends = kept["recv_gbl_rank_prefix_sum"].long()
        rows: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return rows

    def _moved(self, rows: Tensor, tokens: list[Tensor], num_rows: int | None = None) -> Tensor:
        """Send ``rows[tokens[p]]`` to rank p. Return the received rows, with uninitialised rows up to ``num_rows``."""
        arrived = stacked(self.exchange.rows([take(rows, index) for index in tokens]))
        return arrived if num_rows is None else grown(arrived, num_rows)


def _check_ids(ids: Tensor) -> None:
    require_cpu(ids)
    fits = ids.dtype == NormalBuffer.ids_dtype and ids.dim() == 2 and ids.is_contiguous()
    expected = str(NormalBuffer.ids_dtype).removeprefix("torch.")
    require(fits, f"topk_idx must be contiguous {expected} (T, K), got {ids.dtype} of shape {tuple(ids.shape)}")


def _check_topk(x: Tensor, ids: Tensor | None, weights: Tensor | None) -> None:
    require((ids is None) == (weights is None), "topk_idx and topk_weights must be given together")
    if ids is None or weights is None:
        return
    _check_ids(ids)
    require_cpu(weights)
    fits = weights.dtype == torch.float32 and weights.shape == ids.shape and len(ids) == len(x)
    require(fits, "topk_weights must be float32 with the shape of topk_idx, and a row for each row of x")
    require(ids.shape[1] <= 32, f"top-k must be at most 32, got {ids.shape[1]}", EmulatedAbort)


def _sizes(x: Tensor, scales: Tensor | None, ids: Tensor | None) -> list[object]:
    """Return the sizes that must be the same on all ranks, because queue addresses depend on them."""
    return [str(x.dtype), x.shape[1], 0 if ids is None else ids.shape[1], 0 if scales is None else scales.shape[1]]


def _tokens_for(in_rank: Tensor) -> list[Tensor]:
    """List the tokens that go to each rank in ascending order, from flags (T, P)."""
    return [column.nonzero().flatten() for column in in_rank.unbind(1)]
