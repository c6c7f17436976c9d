"""The six phases of Megatron's token dispatchers, implemented with a Dispatcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import build_dispatcher
from moe_dispatch.errors import ConfigError, StateError
from moe_dispatch.integrations.megatron.core import get_align_size_for_quantization
from moe_dispatch.integrations.megatron.overlap import put_in_place, stand_in, use_on_current_stream
from moe_dispatch.integrations.megatron.settings import dispatcher_config, overlaps
from moe_dispatch.layouts import SBHD, Layout, Rows
from moe_dispatch.types import Plan, Routing


@final
class MegatronDispatcher:
    """The ``token_dispatcher`` of an MoE layer. Its constructor takes the arguments of Megatron's token dispatchers.

    Args:
        num_local_experts: Number of experts of this expert-parallel rank.
        local_expert_indices: Ids of these experts, consecutive.
        config: TransformerConfig of the layer.
        pg_collection: Groups of the layer. ``ep``, ``expt_tp`` and ``tp_ep`` are used.
        backend: Backend, as in a DispatcherConfig.
        control_group: CPU group of the ranks of ``tp_ep``, as for a Dispatcher.
        name: Path of the layer in the model, which errors show.
        **given: Further fields of a DispatcherConfig, such as ``graph_safe`` and ``max_tokens_per_rank``.

    Under expert tensor parallelism, the Dispatcher runs over the ranks of ``tp_ep``. It treats each part of an expert
    as an expert. Every token goes to all parts of each of its experts, and combine sums the outputs of the parts.

    Megatron's signatures do not pass on all values from phase to phase. So this object keeps the ids from
    ``dispatch_preprocess`` to ``token_dispatch``, and the Dispatched from ``token_dispatch`` to ``token_combine``. It
    keeps nothing after ``token_combine``, so micro-batches and recomputation do not disturb each other.

    Under ``overlap_moe_expert_parallel_comm``, autograd connects the phases only by the tensors that they return.

    Raises:
        ConfigError: A setting is not supported, or experts and groups do not fit. Other errors are a Dispatcher's.

    Cost: construction is collective over ``tp_ep``.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any,
        *,
        backend: str | Mapping[str, Any] = "alltoall",
        control_group: dist.ProcessGroup | None = None,
        name: str = "",
        **given: Any,
    ) -> None:
        # Attributes with the names that Megatron's dispatchers use.
        self.ep_group, self.tp_group, self.tp_ep_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.tp_ep
        self._local_experts, self._etp_size = num_local_experts, self.tp_group.size()
        self._overlaps = overlaps(config)
        quantised = getattr(config, "fp8", None) or getattr(config, "fp4", None)
        pad_multiple = int(get_align_size_for_quantization(config)) if quantised else 1
        ours = dispatcher_config(config, backend, etp_size=self._etp_size, pad_multiple=pad_multiple, given=given)
        self._check_ranks(local_expert_indices, config.num_moe_experts)
        self.top_k: int = config.moe_router_topk
        self.dispatcher = build_dispatcher(ours, self.tp_ep_group, control_group=control_group, name=name)
        self.shared_experts: Any = None
        # For CUDA graphs that end after dispatch_preprocess: tensors to keep. Megatron sets the second attribute.
        self.cudagraph_attrs = ["topk_ids"]
        self.valid_cudagraph_attrs: list[str] | None = None
        self.topk_ids: Tensor | None = None
        self.plans: dict[str, Plan] | None = None
        self.drift: Tensor | None = None  # of the routing of this micro-batch, if it is replayed
        self.has_slot_experts = False  # whether the experts of the layer run on expert slots
        self._hidden_states: Tensor | None = None  # if phases overlap: the tensor that a stand-in stands for
        self._sent: Dispatched | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the routing map, bool (T, E), and its probabilities into ids and weights (T, K * parts per expert).

        Nothing is exchanged. Hidden states, [S/TP, B, D], are returned unchanged.
        """
        routing = Routing.from_map(routing_map, probs, top_k=self.top_k)
        self.topk_ids, weights_TK = self._to_all_parts(routing.topk_ids, routing.topk_weights)
        if self._overlaps:
            self._hidden_states, hidden_states = hidden_states.detach(), stand_in(hidden_states)
        return hidden_states, weights_TK

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to their experts. Return the rows (R, D) that arrive, and their weights (R,)."""
        if self.topk_ids is None:
            raise _out_of_order("token_dispatch", "dispatch_preprocess", "no ids")
        if self.shared_experts is not None:
            # Shared experts compute on their own stream while rows travel on the current stream.
            self.shared_experts.pre_forward_comm(hidden_states)
        if self._hidden_states is not None:
            use_on_current_stream(self._hidden_states, self.topk_ids, probs, self.drift)
            hidden_states, self._hidden_states = put_in_place(hidden_states, self._hidden_states), None
        routing = Routing(self.topk_ids, probs, self.drift)
        self.topk_ids = self.drift = None
        sent = self._sent = self.dispatcher.dispatch(hidden_states, routing, self._plan(hidden_states))
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(sent.rows)
        if self._overlaps:
            # Experts weigh, so combine needs no weights. Attached ones would lead its backward into that of dispatch.
            self._sent = dataclasses.replace(sent, in_graph=sent.rows.detach(), weights=sent.weights.detach())
            return stand_in(sent.rows), sent.weights
        return sent.rows, sent.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, rows per expert with padding, and weights. In eager mode, rows per expert are on the host."""
        sent = self.in_flight("dispatch_postprocess")
        if self.dispatcher.config.slot_options is not None and not self.has_slot_experts:
            raise StateError(
                "MegatronDispatcher.dispatch_postprocess: balance needs experts that run on expert slots, got a "
                "dispatcher that was set by hand. Call convert on the layer."
            )
        if self._overlaps:
            use_on_current_stream(sent.rows, probs, sent.tokens_per_expert)
            hidden_states = put_in_place(hidden_states, sent.rows)
        on_host = sent.host_counts
        counts_L = sent.tokens_per_expert if on_host is None else torch.tensor(on_host, device="cpu")
        return hidden_states, counts_L, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the outputs of experts unchanged, because ``combine`` takes expert-major rows."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Send the outputs of experts back, and sum them for each token: [S/TP, B, D]."""
        sent, self._sent = self.in_flight("token_combine"), None
        if hasattr(self.shared_experts, "wait_current_stream"):
            # The second half of the shared experts must not compete with the routed experts for the device. 0.16 has no
            # such call.
            self.shared_experts.wait_current_stream()
        output = self.dispatcher.combine(hidden_states, sent)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Add the output of the shared experts."""
        return hidden_states if self.shared_experts is None else hidden_states + self.shared_experts.get_output()

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Set shared experts, for ``moe_shared_expert_overlap``. Their phases run between the phases of this object."""
        self.shared_experts = shared_experts

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Return None, because experts allocate their own outputs. Megatron 0.19 calls this method."""
        return None, None

    def close(self) -> None:
        """Close the Dispatcher."""
        self.dispatcher.close()

    def in_flight(self, phase: str) -> Dispatched:
        """Return the result of ``token_dispatch``. ``phase`` is the name of the caller."""
        if self._sent is None:
            raise _out_of_order(phase, "token_dispatch", "nothing in flight")
        return self._sent

    def _to_all_parts(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat each slot for every part of its expert. The parts are on neighbouring ranks of ``tp_ep``."""
        if self._etp_size == 1:
            return ids_TK, weights_TK
        local, parts = self._local_experts, torch.arange(self._etp_size, device=ids_TK.device)
        holder_TK = ids_TK.div(local, rounding_mode="floor") * self._etp_size
        ids_TKP = (holder_TK.unsqueeze(2) + parts) * local + (ids_TK % local).unsqueeze(2)
        ids_TKP = torch.where(ids_TK.unsqueeze(2) >= 0, ids_TKP, -1)
        return ids_TKP.flatten(1), weights_TK.unsqueeze(2).expand_as(ids_TKP).flatten(1)

    def _plan(self, hidden_states: Tensor) -> Plan | Layout:
        """Return the plan that the layers of a micro-batch share, or the layout if they share no plan."""
        layout = SBHD() if hidden_states.dim() == 3 else Rows()
        if self.plans is None:
            return layout
        key = f"{self.dispatcher.config.digest} {id(self.tp_ep_group)}"
        if key not in self.plans:
            self.plans[key] = self.dispatcher.plan(layout, like=hidden_states)
        return self.plans[key]

    def _check_ranks(self, indices: Sequence[int], num_experts: int) -> None:
        ep_size, ep_rank = self.ep_group.size(), self.ep_group.rank()
        if num_experts % ep_size:
            raise ConfigError(
                f"MegatronDispatcher: num_moe_experts ({num_experts}) must be divisible by the expert-parallel size "
                f"({ep_size}). Use {-(-num_experts // ep_size) * ep_size} experts or another size."
            )
        first = ep_rank * (num_experts // ep_size)
        if list(indices) != list(range(first, first + num_experts // ep_size)):
            raise ConfigError(
                f"MegatronDispatcher: rank {ep_rank} of {ep_size} must hold {num_experts // ep_size} "
                f"experts from {first} on, got {list(indices)}. Use Megatron's own placement."
            )
        number = ep_rank * self._etp_size + self.tp_group.rank()
        if self.tp_ep_group.size() != ep_size * self._etp_size or self.tp_ep_group.rank() != number:
            raise ConfigError(
                f"MegatronDispatcher: this rank must be {number} of {ep_size * self._etp_size} in tp_ep (ranks of "
                f"expt_tp are neighbours there), got {self.tp_ep_group.rank()} of {self.tp_ep_group.size()}. Use "
                "Megatron's own groups."
            )


def _out_of_order(phase: str, before: str, got: str) -> StateError:
    return StateError(
        f"MegatronDispatcher.{phase}: {before} must come before it, got {got}. Call the phases in order, each once."
    )
