"""The six phases of Megatron's token dispatchers, on a Dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.dispatchers import build_dispatcher
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.megatron.core import get_align_size_for_quantization
from moe_dispatch.integrations.megatron.settings import dispatcher_config
from moe_dispatch.layouts import SBHD, Layout, Rows
from moe_dispatch.types import Dispatched, Plan, Routing


@final
class MegatronDispatcher:
    """Stands where Megatron's ``token_dispatcher`` stands in an MoE layer; constructed like one.

    Args:
        num_local_experts: experts of this expert-parallel rank.
        local_expert_indices: their ids, consecutive.
        config: the layer's TransformerConfig.
        pg_collection: its groups, of which ``ep``, ``expt_tp`` and ``tp_ep`` are read.
        backend: as in a DispatcherConfig.
        control_group: as of a Dispatcher, over the ranks of ``tp_ep``.
        name: where it sits in the model; errors say it.
        **given: further fields of a DispatcherConfig, such as ``graph_safe`` and ``max_tokens_per_rank``.

    Under expert tensor parallelism the Dispatcher's ranks are those of ``tp_ep``, and a part of an expert is an expert
    to it: every token goes to all parts of each of its experts, and their outputs are summed on the way back.

    Between phases it keeps what their signatures do not carry on: the ids, from ``dispatch_preprocess`` to
    ``token_dispatch``, and what that sent, up to ``token_combine``. Then it is empty again, so micro-batches in flight
    and recomputation are no concern of it.

    Raises:
        ConfigError: a setting that is not supported, or experts and groups that do not fit.
        As for a Dispatcher.

    Cost: building is collective over ``tp_ep``, as for a Dispatcher.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any,
        *,
        backend: str | dict[str, Any] = "alltoall",
        control_group: dist.ProcessGroup | None = None,
        name: str = "",
        **given: Any,
    ) -> None:
        # The groups by the names that Megatron's dispatchers have for them.
        self.ep_group, self.tp_group, self.tp_ep_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.tp_ep
        self._local_experts, self._etp_size = num_local_experts, self.tp_group.size()
        ours = dispatcher_config(
            config, backend, etp_size=self._etp_size, pad_multiple=_pad_multiple(config), given=given
        )
        self._check_places(local_expert_indices, config.num_moe_experts)
        self.top_k: int = config.moe_router_topk
        self.dispatcher = build_dispatcher(ours, self.tp_ep_group, control_group=control_group, name=name)
        self.shared_experts: Any = None
        # Tensors to carry on where a CUDA graph ends after dispatch_preprocess, and which of them Megatron has found.
        self.cudagraph_attrs = ["topk_ids"]
        self.valid_cudagraph_attrs: list[str] | None = None
        self.topk_ids: Tensor | None = None
        self.plans: dict[str, Plan] | None = None
        self._sent: Dispatched | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The router's choice as ids and weights. Nothing is exchanged.

        Args:
            hidden_states: [S/TP, B, D].
            routing_map: bool (T, E).
            probs: (T, E).

        Returns:
            The hidden states, and the weights, (T, K times expert-tensor-parallel ranks).
        """
        routing = Routing.from_map(routing_map, probs, top_k=self.top_k)
        self.topk_ids, weights_TK = self._to_all_parts(routing.topk_ids, routing.topk_weights)
        return hidden_states, weights_TK

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to their experts: (R, D), and their weights, (R,)."""
        if self.topk_ids is None:
            raise StateError(
                "MegatronDispatcher.token_dispatch: dispatch_preprocess must come before it, got no ids. Call the "
                "phases in order, each once."
            )
        if self.shared_experts is not None:
            # Shared experts compute on a stream of their own while rows travel on this one.
            self.shared_experts.pre_forward_comm(hidden_states)
        routing, self.topk_ids = Routing(self.topk_ids, probs), None
        sent = self._sent = self.dispatcher.dispatch(hidden_states, routing, self._plan(hidden_states))
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(sent.rows)
        return sent.rows, sent.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, rows per expert with padding, weights; counts are on the host in eager mode, as experts read them."""
        sent = self._in_flight("dispatch_postprocess")
        on_host = sent.tokens_per_expert_list
        counts_L = sent.tokens_per_expert if on_host is None else torch.tensor(on_host, device="cpu")
        return hidden_states, counts_L, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Expert outputs as they are: ``combine`` takes them expert-major."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Bring expert outputs back and sum them: [S/TP, B, D]."""
        sent, self._sent = self._in_flight("token_combine"), None
        if hasattr(self.shared_experts, "wait_current_stream"):
            # Their second half is not to compete with the routed experts for the device; 0.16 has no such call.
            self.shared_experts.wait_current_stream()
        output = self.dispatcher.combine(hidden_states, sent)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Add what the shared experts made meanwhile."""
        return hidden_states if self.shared_experts is None else hidden_states + self.shared_experts.get_output()

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Drive these shared experts' phases between its own, for ``moe_shared_expert_overlap``."""
        self.shared_experts = shared_experts

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """None: experts allocate their own outputs (asked for by 0.19)."""
        return None, None

    def close(self) -> None:
        """Give up the Dispatcher."""
        self.dispatcher.close()

    def _in_flight(self, phase: str) -> Dispatched:
        if self._sent is None:
            raise StateError(
                f"MegatronDispatcher.{phase}: token_dispatch must come before it, got nothing in flight. Call the "
                "phases in order, each once."
            )
        return self._sent

    def _to_all_parts(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Each slot once for every part of its expert; ranks of ``tp_ep`` that hold one expert are neighbours."""
        if self._etp_size == 1:
            return ids_TK, weights_TK
        local, parts = self._local_experts, torch.arange(self._etp_size, device=ids_TK.device)
        holder_TK = ids_TK.div(local, rounding_mode="floor") * self._etp_size
        ids_TKP = (holder_TK.unsqueeze(2) + parts) * local + (ids_TK % local).unsqueeze(2)
        ids_TKP = torch.where(ids_TK.unsqueeze(2) >= 0, ids_TKP, -1)
        return ids_TKP.flatten(1), weights_TK.unsqueeze(2).expand_as(ids_TKP).flatten(1)

    def _plan(self, hidden_states: Tensor) -> Plan | Layout:
        """The plan that this layer shares with others of a micro-batch, or the layout where it shares none."""
        layout = SBHD() if hidden_states.dim() == 3 else Rows()
        if self.plans is None:
            return layout
        key = f"{self.dispatcher.config.digest} {id(self.tp_ep_group)}"
        if key not in self.plans:
            self.plans[key] = self.dispatcher.plan(layout, like=hidden_states)
        return self.plans[key]

    def _check_places(self, indices: Sequence[int], num_experts: int) -> None:
        ep_size, ep_rank = self.ep_group.size(), self.ep_group.rank()
        if num_experts % ep_size:
            raise ConfigError(
                f"MegatronDispatcher: num_moe_experts ({num_experts}) must be divisible by the expert-parallel size "
                f"({ep_size}). Use {-(-num_experts // ep_size) * ep_size} experts or another size."
            )
        first = ep_rank * (num_experts // ep_size)
        if list(indices) != list(range(first, first + num_experts // ep_size)):
            raise ConfigError(
                f"MegatronDispatcher: rank {ep_rank} of {ep_size} must hold the experts from {first} on, "
                f"{num_experts // ep_size} of them, got {list(indices)}. Use Megatron's own placement."
            )
        place = ep_rank * self._etp_size + self.tp_group.rank()
        if self.tp_ep_group.size() != ep_size * self._etp_size or self.tp_ep_group.rank() != place:
            raise ConfigError(
                f"MegatronDispatcher: this rank must be {place} of {ep_size * self._etp_size} in tp_ep (ranks of "
                f"expt_tp are neighbours there), got {self.tp_ep_group.rank()} of {self.tp_ep_group.size()}. Use "
                "Megatron's own groups."
            )


def _pad_multiple(config: Any) -> int:
    """What Megatron's experts round the rows of each to, in this version and precision."""
    quantised = getattr(config, "fp8", None) or getattr(config, "fp4", None)
    return int(get_align_size_for_quantization(config)) if quantised else 1
