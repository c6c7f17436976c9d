"""v1's Buffer between nodes of 8 ranks: csrc/deep_ep.cpp:642-1046 and csrc/kernels/internode.cu of v1.2.1."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.testing.emulation.config import NVL_PEERS, Config
from moe_dispatch.testing.emulation.normal import checks as checks
from moe_dispatch.testing.emulation.normal import rdma as rdma
from moe_dispatch.testing.emulation.normal.calls import Asynchrony, Received, Recipients, Sent
from moe_dispatch.testing.emulation.normal.handles import InternodeHandle
from moe_dispatch.testing.emulation.normal.memory import require_met, require_true_counts
from moe_dispatch.testing.emulation.normal.moves import bring_back, move, tokens_for
from moe_dispatch.testing.emulation.normal.rdma import KERNEL
from moe_dispatch.testing.emulation.normal.rows import summed
from moe_dispatch.testing.emulation.normal.runtime import COMBINE, DISPATCH, Runtime
from moe_dispatch.testing.emulation.refusals import EmulatedAbort, device_assert, host_assert, require_cpu


@final
class InternodeRuntime(Runtime):
    """Groups of 16 ranks and more, the first 8 of them in one node, and so on."""

    def __init__(
        self, group: dist.ProcessGroup, *, num_nvl_bytes: int, num_rdma_bytes: int, num_qps_per_rank: int
    ) -> None:
        super().__init__(group, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self._num_qps_per_rank = num_qps_per_rank

    def dispatch(
        self,
        sent: Sent,
        to: Recipients,
        config: Config,
        asynchrony: Asynchrony,
        *,
        expert_alignment: int,
        num_worst_tokens: int,
    ) -> Received:
        num_experts = to.tokens_per_expert.numel()
        with self.exchange.entrance(DISPATCH) as entry:
            to_nodes = _check_counts(to, self.num_ranks)
            self._check_dispatch(sent, to.is_token_in_rank, config, asynchrony)
            checks.check_topk(sent, num_experts, line=725, kernel=f"{KERNEL}:408")
            self._check_launch(sent, config)
            require_true_counts(to)
            entry.same = {"layout": [*sent.layout(), *config.layout(), num_experts], "use of a handle": False}
            entry.told = [to.tokens_per_rank.tolist(), to.tokens_per_expert.tolist(), to_nodes.tolist()]
        per_rank, per_expert, per_node = (list(told) for told in zip(*entry.everyone, strict=True))
        counts = torch.tensor(per_rank)
        tokens = tokens_for(to.is_token_in_rank)
        num_rows = int(counts[:, self.exchange.rank].sum())
        experts_per_rank = num_experts // self.num_ranks
        arrived = move(self.exchange, sent, tokens, experts_per_rank=experts_per_rank, num_rows=num_rows)
        # A token crosses to a node once, and arrives there at the rank with its sender's number within a node.
        node, place = divmod(self.exchange.rank, NVL_PEERS)
        of_nodes = torch.tensor(per_node)[place::NVL_PEERS, node]
        handle = InternodeHandle.of_dispatch(
            to.is_token_in_rank, counts[:, self.exchange.rank], of_nodes, num_channels=config.num_channels
        )
        return Received(
            x=arrived.x,
            scales=arrived.scales,
            topk_idx=arrived.topk_idx,
            topk_weights=arrived.topk_weights,
            tokens_per_expert_list=self.aligned_rows(per_expert, expert_alignment),
            handle=handle.as_tuple(),
        )

    def cached_dispatch(
        self, sent: Sent, handle: tuple[Tensor, ...], config: Config, asynchrony: Asynchrony
    ) -> tuple[Tensor, Tensor | None]:
        route = InternodeHandle.of(handle)
        with self.exchange.entrance(DISPATCH) as entry:
            self._check_dispatch(sent, route.is_token_in_rank, config, asynchrony)
            route.check_for_dispatch(self.num_ranks, config.num_channels)
            self._check_launch(sent, config)
            entry.same = {"layout": [*sent.layout(), *config.layout(), 0], "use of a handle": True}
            entry.told = [route.is_token_in_rank.sum(0).tolist(), route.received()]
        _require_met(DISPATCH, *zip(*entry.everyone, strict=True))
        tokens = tokens_for(route.is_token_in_rank)
        arrived = move(self.exchange, sent, tokens, experts_per_rank=0, num_rows=sum(route.received()))
        return arrived.x, arrived.scales

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None,
        biases: list[Tensor],
        config: Config,
        asynchrony: Asynchrony,
    ) -> tuple[Tensor, Tensor | None]:
        """Summed in float32 and rounded on each node, and the same again at home (internode.cu:1217-1358)."""
        route = InternodeHandle.of(handle)
        num_tokens = route.is_token_in_rank.shape[0]
        with self.exchange.entrance(COMBINE) as entry:
            require_cpu(COMBINE, x, topk_weights, *biases)
            checks.check_config(config, 943)
            checks.check_matrix(x, "x.", 946)
            checks.check_row_bytes(x, "hidden", 957)
            route.check_for_combine(self.num_ranks, config.num_channels)
            asynchrony.check(970)
            _require_rows(x, sum(route.received()))
            checks.check_combined_weights(topk_weights, x.shape[0], line=987, kernel=f"{KERNEL}:1393")
            rdma.check_combine_queues(config, self.num_ranks)
            num_topk = 0 if topk_weights is None else topk_weights.shape[1]
            self._check_buffers(x, config, num_scales=0, num_topk_idx=0, num_topk_weights=num_topk, line=1205)
            checks.check_biases(biases, x, num_tokens, rows="num_combined_tokens", line=1016)
            host_assert(x.dtype == torch.bfloat16, "type == CUDA_R_16BF", f"{KERNEL}:1859")
            rdma.require_rdma_ranks(self.num_ranks)
            device_assert(x.shape[1] % 256 == 0, "hidden_int4 % 32 == 0", f"{KERNEL}:1250", f"hidden is {x.shape[1]}")
            entry.same = {"layout": [x.shape[1], num_topk, *config.layout()]}
            entry.told = [route.is_token_in_rank.sum(0).tolist(), route.received()]
        _require_met(COMBINE, *zip(*entry.everyone, strict=True))
        came_from = tokens_for(route.is_token_in_rank)

        def of_nodes(rows: Tensor) -> list[Tensor]:
            arrived = bring_back(self.exchange, rows, route.received())
            nodes = [slice(first, first + NVL_PEERS) for first in range(0, self.num_ranks, NVL_PEERS)]
            width = rows.shape[1]
            sums = [summed(arrived[n], came_from[n], num_tokens, start=[], width=width) for n in nodes]
            return [total.to(rows.dtype) for total in sums]

        combined = sum((part.float() for part in [*biases, *of_nodes(x)]), torch.zeros(num_tokens, x.shape[1]))
        if topk_weights is None:
            return combined.to(x.dtype), None
        return combined.to(x.dtype), sum(of_nodes(topk_weights), torch.zeros(num_tokens, topk_weights.shape[1]))

    def _check_dispatch(self, sent: Sent, in_rank: Tensor, config: Config, asynchrony: Asynchrony) -> None:
        """csrc/deep_ep.cpp:669-756, and what is not checked there: the flags."""
        require_cpu(DISPATCH, sent.x, sent.scales, sent.topk_idx, sent.topk_weights, in_rank)
        checks.check_config(config, 669)
        checks.check_matrix(sent.x, "x.", 697)
        checks.check_row_bytes(sent.x, "x.size(1)", 698)
        checks.check_scales(sent, line=742)
        asynchrony.check(756)
        if in_rank.dtype != torch.bool or in_rank.shape != (sent.x.shape[0], self.num_ranks):
            raise EmulatedAbort(
                f"{DISPATCH}: is_token_in_rank must be bool and a row for each row of x, got {in_rank.dtype} of "
                f"{tuple(in_rank.shape)}. Between nodes that is not checked, and the kernel reads past its end."
            )

    def _check_launch(self, sent: Sent, config: Config) -> None:
        rdma.require_rdma_ranks(self.num_ranks)
        topk, scales = sent.num_topk, sent.num_scales
        self._check_buffers(
            sent.x, config, num_scales=scales, num_topk_idx=topk, num_topk_weights=topk, line=339, is_dispatch=True
        )
        rdma.check_queue_pairs(config, self._num_qps_per_rank)

    def _check_buffers(
        self,
        x: Tensor,
        config: Config,
        *,
        num_scales: int,
        num_topk_idx: int,
        num_topk_weights: int,
        line: int,
        is_dispatch: bool = False,
    ) -> None:
        num_bytes = rdma.row_bytes(
            x.shape[1] * x.element_size(),
            num_scales=num_scales,
            num_topk_idx=num_topk_idx,
            num_topk_weights=num_topk_weights,
        )
        nvl = [self.num_nvl_bytes, *self.nvl_bytes_of_peers]
        rdma.check_buffers(num_bytes, config, self.num_ranks, nvl=nvl, rdma=self.rdma_bytes_of_peers, line=line)
        rule = "num_bytes_per_token + sizeof(uint64_t) <= kNumTMABytesPerWarp"
        source = f"{KERNEL}:453" if is_dispatch else f"{KERNEL}:1448"
        device_assert(num_bytes + 8 <= 16384, rule, source, f"a row has {num_bytes} bytes")


def _check_counts(to: Recipients, num_ranks: int) -> Tensor:
    """csrc/deep_ep.cpp:680, :691-693 and :709-715; the counts of nodes."""
    per_node = to.tokens_per_rdma_rank
    checks.check_size(per_node is not None, "num_tokens_per_rdma_rank.has_value()", 680)
    assert per_node is not None
    require_cpu(DISPATCH, to.tokens_per_rank, per_node, to.tokens_per_expert)
    checks.check_int32(to.tokens_per_rank, "num_tokens_per_rank->", 691)
    checks.check_int32(per_node, "num_tokens_per_rdma_rank->", 692)
    checks.check_int32(to.tokens_per_expert, "num_tokens_per_expert->", 693)
    sizes = to.tokens_per_rank.shape == (num_ranks,)
    checks.check_size(sizes, "num_tokens_per_rank->size(0) == num_ranks", 712)
    nodes = per_node.shape == (num_ranks // NVL_PEERS,)
    checks.check_size(nodes, "num_tokens_per_rdma_rank->size(0) == num_rdma_ranks", 713)
    experts = "num_tokens_per_expert->size(0)"
    num_experts = to.tokens_per_expert.numel()
    checks.check_size(num_experts % num_ranks == 0, f"{experts} % num_ranks == 0", 714)
    # NUM_MAX_LOCAL_EXPERTS is 1024, but a block of 512 threads counts the experts of a node.
    checks.check_size(num_experts // num_ranks <= 1024, f"{experts} / num_ranks <= NUM_MAX_LOCAL_EXPERTS", 715)
    per_node_experts = num_experts // (num_ranks // NVL_PEERS)
    device_assert(per_node_experts <= 512, "num_rdma_experts <= num_threads", f"{KERNEL}:191")
    return per_node


def _require_rows(x: Tensor, num_rows: int) -> None:
    """Between nodes nothing compares the rows of x with the handle."""
    if x.shape[0] != num_rows:
        raise EmulatedAbort(
            f"{COMBINE}: x must have the {num_rows} rows that dispatch gave, got {x.shape[0]}. Between nodes that is "
            "not checked, and the kernel reads past its end."
        )


def _require_met(where: str, sent: tuple[list[int], ...], received: tuple[list[int], ...]) -> None:
    """(P, P) rows from rank to rank, as the flags of senders and the handles of receivers have them."""
    require_met(where, [list(row) for row in sent], [list(column) for column in zip(*received, strict=True)])
