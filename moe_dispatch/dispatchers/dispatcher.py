"""The class that a model calls. An eager call goes from here to ``checks``, and then to ``autograd``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypeVar, cast, final, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from moe_dispatch.communication import Communicator, device_of
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched, InFlight, check_plain
from moe_dispatch.dispatchers import autograd, checks
from moe_dispatch.dispatchers.agreement import settle, tell_peers
from moe_dispatch.dispatchers.channel import NO_RANGE, Channel, Group, Lease, lease_channel, profiled
from moe_dispatch.dispatchers.meter import Tally
from moe_dispatch.dispatchers.names import OwnNames
from moe_dispatch.errors import ConfigError, InputError, LayoutError, StateError
from moe_dispatch.layouts import BSHD, Layout, Rows
from moe_dispatch.permutation.grouped_mm import leaves_idle_groups
from moe_dispatch.seams.call import Call
from moe_dispatch.seams.calls import load_carry, load_phases, of_thread
from moe_dispatch.seams.observers import may_be_wrapped, tell_combined, tell_started
from moe_dispatch.seams.plug_ins import load_plug_in
from moe_dispatch.seams.slots import Placement, load_slot_options
from moe_dispatch.seams.tracing import real_tensors, traced_calls
from moe_dispatch.types import Plan, Routing

if TYPE_CHECKING:
    from moe_dispatch.dispatchers.metrics import Metrics
    from moe_dispatch.dispatchers.overflow import RequiredCapacity

Result = TypeVar("Result")
Carry = Mapping[str, Tensor] | None


class Dispatcher(OwnNames):
    """Send a model's rows to their experts, and bring the results back in the shape of the input.

    There are two ways to use a Dispatcher. Call ``dispatch`` and ``combine``, and run the experts in between. Or define
    ``run_experts`` in a subclass, and call the module: it runs the whole layer. Such a subclass also overrides
    ``layout_of`` if the model's tensors are neither BSHD nor rows.

    A Dispatcher has no parameters, buffers or state-dict keys of its own, so a subclass may have a submodule
    ``experts``. It refuses names that a Dispatcher needs, such as ``config`` or ``plan``. Build one for each layer:
    dispatchers with the same config and group share a backend and its buffers. A ``with`` block closes it at its end.

    Args:
        config: The sizes of the model, and the backend.
        group: The expert-parallel group, a one-dimensional DeviceMesh, or None for one rank without torch.distributed.
        control_group: A CPU group of the same ranks, on which the ranks agree on sizes. The agreement then neither
            makes a GPU wait nor mixes with other collectives on ``group``. By default ``group`` is used.
        name: Place in the model, such as "stage 2, layers.7.mlp", in printable characters. Errors of the verbs contain
            it. It may differ between ranks.

    Raises:
        ConfigError: The config breaks a rule on this group, the name is not printable, or the configs of the ranks
            differ. Raised on every rank. Also, on this rank, for a name that a subclass must not use.
        BackendUnavailableError: The backend cannot run here.
        PeerError: Building failed on another rank.

    Cost: building is collective, with one small all-reduce on the control group. The first dispatcher of a config and
    group needs two more all-reduces, an exchange of host names, and the backend's buffers.
    """

    config: DispatcherConfig
    _lease: Lease

    def __init__(
        self,
        config: DispatcherConfig,
        group: Group = None,
        *,
        control_group: dist.ProcessGroup | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        if not isinstance(config, DispatcherConfig):
            way_out = "DispatcherConfig.load(path)" if isinstance(config, str | os.PathLike) else "a DispatcherConfig"
            way_out = "DispatcherConfig(**your_dict)" if isinstance(config, Mapping) else way_out
            raise ConfigError(f"Dispatcher: pass {way_out}, not a {type(config).__name__}.")
        with real_tensors():
            lease = lease_channel(config, group, control_group, name)
            self.__dict__.update(config=config, _lease=lease)  # past __setattr__, which refuses these names
            if config.device != "cuda" or torch.cuda.is_available():
                leaves_idle_groups(device := self._channel.device_of_rows())
                autograd.make_anchor(device)

    @property
    def name(self) -> str:
        """Place in the model, which errors, metrics and traces show. It may be set."""
        return self._lease.name

    @name.setter
    def name(self, name: str) -> None:
        self._lease.rename(name)

    def __enter__(self) -> Self:
        self._lease.enter()  # raises if closed
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._lease.release(by_hand=error is None)  # closing may be collective, and peers may have no error

    @property
    def _channel(self) -> Channel:
        """The channel of this dispatcher, open or released. Raises StateError if the dispatcher is closed."""
        return self._lease.enter(wakes=False)

    @property
    def backend_name(self) -> str:
        """Name of the backend in use; with ``backend="auto"``, the backend that was chosen."""
        return self._channel.backend_name

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The expert-parallel group; None for one rank without torch.distributed."""
        return self._channel.communicator.group

    @property
    def ep_size(self) -> int:
        """Number of ranks of the group, P."""
        return self._channel.shape.ep_size

    @property
    def ep_rank(self) -> int:
        """Number of this rank in the group. It owns experts from ``ep_rank * num_local_experts`` on."""
        return self._channel.communicator.rank

    @property
    def num_local_experts(self) -> int:
        """Number of experts that this rank owns, ``num_experts / ep_size``: no copies of experts count."""
        return self.config.num_experts // self.ep_size

    def forward(self, x: Tensor, routing: Routing, plan: Plan | Layout | None = None, *, carry: Carry = None) -> Tensor:
        """Run the whole layer, ``combine(run_experts(dispatch(x)))``; the result has the shape of x."""
        if self.config.chunks is not None and not torch.compiler.is_compiling():  # there, dispatch refuses chunks
            chunks = load_plug_in("moe_dispatch.steps.chunks", "chunks need it. Leave that out")
            y: Tensor = chunks.run_in_chunks(self, self.run_experts, x, routing, plan, carry=carry)
            return y
        sent = self.dispatch(x, routing, plan, carry=carry)
        return self.combine(self.run_experts(sent), sent)

    def run_experts(self, sent: Dispatched) -> Tensor:
        """Apply this rank's experts to ``sent.rows``; (R, D). A subclass that is called must define this method."""
        raise StateError(f"{type(self).__qualname__}.forward: define run_experts(sent) in this subclass of Dispatcher.")

    def layout_of(self, x: Tensor) -> Layout:
        """Return the layout of a tensor that was given without one: BSHD for [B, S, D], rows for [T, D].

        Override this method if the model's tensors have another layout.
        """
        return BSHD() if x.dim() == 3 else Rows()

    @final
    def plan(self, layout: Layout | None = None, *, like: Tensor | None = None) -> Plan:
        """Settle the sizes of one forward of a micro-batch. All MoE layers use the same plan.

        Args:
            layout: How the hidden states hold tokens; by default ``layout_of(like)``.
            like: Any tensor shaped like the hidden states. It is needed if the backend needs the number of rows and
                the layout does not know it.

        Raises:
            LayoutError: The layout is malformed, or does not fit ``like``.
            InputError: There are too many rows, or an argument is missing. Under ``row_counts="check"``, also if the
                numbers of rows differ between ranks.
            PeerError: The call failed on another rank.

        Cost: mostly nothing. If the backend needs equal rows or the largest row count, and ``row_counts`` is "agree" or
        "check", one all-reduce on the control group and one host sync. The all-reduce has nine integers, or nine of
        each rank and a count of invalid ids where the control group is on the device of the rows; on ``allgather`` also
        a count for each expert. A backend with buffers may grow the buffers here, which is collective.
        """
        channel = self._lease.enter("plan")
        try:
            try:
                if layout is None and like is None and self.config.infer_layout:
                    raise InputError("Dispatcher.plan: pass the layout of the batch, or like=x.")
                if like is not None and type(like) is not Tensor:
                    check_plain("Dispatcher.plan", like=like)
                if layout is not None and not isinstance(layout, Layout):
                    raise InputError(f"Dispatcher.plan: layout must be a Layout or None, {checks.no_layout(layout)}")
                draft = checks.draft_plan(channel, layout or self._inferred("plan", like), like)
            except Exception as error:
                tell_peers(channel, error, in_dispatch=False)
                raise
            return settle(channel, draft)
        except Exception as error:
            self._lease.name_in(error)
            raise

    @overload
    def dispatch(
        self,
        x: Tensor,
        routing: Routing | None = ...,
        plan: Plan | Layout | None = ...,
        *,
        again: Dispatched | None = ...,
        carry: Carry = ...,
        async_op: Literal[False] = ...,
    ) -> Dispatched: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        routing: Routing | None = ...,
        plan: Plan | Layout | None = ...,
        *,
        again: None = ...,
        carry: Carry = ...,
        async_op: Literal[True],
    ) -> InFlight: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        routing: Routing | None = ...,
        plan: Plan | Layout | None = ...,
        *,
        again: Dispatched | None = ...,
        carry: Carry = ...,
        async_op: bool,
    ) -> Dispatched | InFlight: ...
    @final
    def dispatch(
        self,
        x: Tensor,
        routing: Routing | None = None,
        plan: Plan | Layout | None = None,
        *,
        again: Dispatched | None = None,
        carry: Carry = None,
        async_op: bool = False,
    ) -> Dispatched | InFlight:
        """Send every row of x to the experts that its routing names. Collective.

        Args:
            x: The model's hidden states: floating, last dimension ``hidden_size``, any number of tokens including 0.
            routing: Ids and weights, one row for each row of ``layout.flatten(x)``.
            plan: The result of ``plan``, a layout, or None for ``layout_of(x)``. Without a plan, each call settles the
                sizes itself.
            again: The result of an earlier dispatch. x is sent along its route, without routing, plan and an exchange
                of counts.
            carry: Integers that travel with the rows, by name: int32 or int64, one for each token, in the shape of x
                without its last dimension. They arrive as ``sent.carried``. A result for ``again`` keeps them.
            async_op: Whether to return an ``InFlight`` while rows still travel. The counts have been exchanged and read
                by then, but with DeepEP V2.5 only in ``wait()``. Call ``wait()`` once on the result, on the same stream
                and in the same grad mode. If the backend cannot overlap, the rows have already arrived.

        Returns:
            Rows grouped by expert, and their counts; see ``Dispatched``. If gradients are recorded and the group has
            more than one rank, the rows require grad even if x does not, because every rank takes part in every
            backward.

        Raises:
            InputError: The tensors do not fit, or an id is outside -1..num_experts-1: on this rank only, while the
                others wait, if ranks exchange neither counts nor sizes; in graph-safe mode, ``check`` reports such ids.
                NaN weights raise only with ``debug=True``. Also if ranks differ in the dtype of x, the grad mode,
                ``carry`` or the order of their calls so far, and exchange something before rows travel; in graph-safe
                mode, ``check`` reports it.
            LayoutError: The layout or the plan does not fit x, or both are missing under ``infer_layout=False``.
            StateError: The dispatcher is closed, or the plan or ``again`` comes from another dispatcher.
            PeerError: Another rank refused its call.

        Cost: that of the backend, and without a plan also that of ``plan``.
        """
        call = Call(x=x, routing=routing, plan=plan, async_op=async_op)
        if carry is not None:
            call = load_carry().with_columns(self, call, carry, again)
        if again is not None:
            return self._dispatch_again(x, routing, plan, again)
        if self._lease.enter_unless_traced() is None:
            return traced_calls().dispatch(self._lease, x, routing, self._layout_in(plan, x), plan)
        interceptor = of_thread.interceptor
        return make(self, call) if interceptor is None else interceptor.dispatch(self, call)

    def _layout_in(self, plan: Plan | Layout | None, x: Tensor) -> Layout:
        """Return the layout of a dispatch: the plan's layout, the given layout, or the inferred layout.

        Raises:
            InputError: ``plan`` is no Plan, Layout or None.
        """
        layout = plan.layout if isinstance(plan, Plan) else self._inferred("dispatch", x) if plan is None else plan
        if not isinstance(layout, Layout):
            raise InputError(f"Dispatcher.dispatch: plan must be a Plan, a Layout or None, {checks.no_layout(layout)}")
        return layout

    def _inferred(self, verb: str, x: Tensor | None) -> Layout:
        if not self.config.infer_layout:
            raise LayoutError(
                f"Dispatcher.{verb}: a plan or a layout must be given with infer_layout=False. broadcast_layout brings "
                "the layout of a micro-batch to every rank."
            )
        return self.layout_of(cast(Tensor, x))

    def _dispatch_again(
        self, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, again: Dispatched
    ) -> Dispatched:
        if not isinstance(again, Dispatched) or again.state.lease is not self._lease:
            raise checks.wrong_result("dispatch", again)
        if routing is not None or plan is not None:
            raise InputError(
                "Dispatcher.dispatch: again=sent already has routing and plan. Pass x and again=sent only."
            )
        state = again.state
        if not isinstance(state, autograd.State):
            return traced_calls().dispatch_again(x, again)
        channel = self._lease.enter("dispatch")
        try:
            with record_function("moe_dispatch::dispatch") if profiled() else NO_RANGE:
                if type(x) is not Tensor:
                    check_plain("Dispatcher.dispatch", x=x)
                x_TD = state.layout.flatten(x)
                checks.check_again(x_TD, state.num_rows, again.in_graph.device, channel)
                arrived, state = autograd.send(channel, state, x_TD)

                def result(in_graph: Tensor, weights: None) -> Dispatched:
                    weights_R = autograd.tie(again.weights, in_graph)
                    return dataclasses.replace(again, in_graph=in_graph, weights=weights_R, state=state)

                return autograd.attach(result, arrived, None, state, (autograd.anchor(x_TD, channel), None))
        except Exception as error:
            self._lease.name_in(error)
            raise

    @final
    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Bring expert outputs back, weighted and summed over top_k. Collective.

        Args:
            rows: (R, D), floating: one output for each row of ``sent.rows``. Outputs of padding may hold any value.
                They travel in the dtype of x, because all ranks know it; outputs of another dtype are converted first.
            sent: The result of the dispatch that these rows belong to. One result can be combined several times, and
                results can be combined in any order.

        Returns:
            A tensor in the shape and the dtype of the x that was dispatched. Rows that hold no token or that no expert
            received are zero. Sums are accumulated in ``max(float32, dtype)``. ``local``, ``allgather`` and
            ``alltoall`` with ``reduction="exact"`` round only the total to the dtype of x; ``alltoall`` and ``deepep``
            also round the partial sum of each rank, and ``hybridep`` every weighted row. In float16 a partial sum above
            65504 becomes inf, also if the total is smaller.

        Raises:
            InputError: The shape, dtype or device of ``rows`` does not fit.
            StateError: The dispatcher is closed, or ``sent`` comes from another dispatcher.

        Cost: that of the backend; no host sync.
        """
        if not isinstance(sent, Dispatched) or sent.state.lease is not self._lease:
            raise checks.wrong_result("combine", sent)
        if not isinstance(sent.state, autograd.State):
            return traced_calls().combine(rows, sent)
        interceptor = of_thread.interceptor
        return bring_back(self, rows, sent) if interceptor is None else interceptor.combine(self, rows, sent)

    def place(self, placement: Placement, *, device: torch.device | str | None = None) -> None:
        """Send the rows of later dispatches to the expert slots of a placement. Collective.

        ``sent`` then has the counts of this rank's expert slots: ``tokens_per_expert``, ``offs`` and the order of rows
        follow ``placement.slots[rank]``, and an empty slot has no rows. The experts must use the weights of these
        slots; ``moe_dispatch.dispatchers.SlotWeights`` brings them. Ids of a routing remain ids of experts.

        Call it between steps: not between a forward and a backward that recomputes it. Graphs that were captured before
        follow the new placement. Other dispatchers keep theirs, also those with the same config.

        Args:
            placement: An ``ExpertPlacement``, the expert in each slot of each rank; equal on all ranks. A rank has
                ``num_experts / ep_size`` slots, and the spare ones of ``balance="manual"``.
            device: Device of the rows. It is needed only if neither the config nor the group tells it, and calls must
                not wait for a copy to the device.

        Raises:
            ConfigError: The placement does not fit the config or the group.
            InputError: The placements of the ranks differ. Raised on every rank.
            PeerError: Another rank refused its placement.

        Cost: one small all-reduce on the control group. If something is wrong, also an exchange of texts.
        """
        channel = self._lease.enter()
        try:
            load_slot_options().place(self._lease, placement, channel.device_of_rows(device))
        except Exception as error:
            self._lease.name_in(error)
            raise

    @property
    def placement(self) -> Placement | None:
        """The ``ExpertPlacement`` in force. None if every rank holds its own experts, and has no spare expert slots."""
        return None if (slots := self._lease.slots) is None else slots.placement

    def metrics(self, *, gather: bool = False) -> Metrics:
        """Return totals of this dispatcher's channel. A host sync on a GPU.

        Args:
            gather: Whether to return totals of all ranks of the group, which is collective, or of this rank only.
        """
        from moe_dispatch.dispatchers.metrics import read_metrics  # noqa: PLC0415 - calls never need it

        return read_metrics(self._lease.enter(wakes=gather), gather=gather)

    def expert_counts(self, *, every_call: bool = False) -> Tensor:
        """Return how many rows each expert has got from this layer in training. No host sync.

        A dispatch counts when the first gradient comes back to it, so each one counts once, however often activation
        checkpointing recomputes it. Forwards without a backward do not count: evaluations, passes for log-probs or of
        a reference model, and ``self_test``. Nor does a layer that no gradient reaches, or padding, or rows that were
        dropped. Replays of a CUDA graph count. The counts grow for as long as the dispatcher is open, so those of a
        step are the difference of two results, each read behind a backward.

        Args:
            every_call: Whether to count every forward, with a backward or without, as ``metrics`` does.

        Returns:
            int64 (E,), on the device of the rows. These are the rows that this rank has computed, of its own experts
            and of copies, so the sum over the ranks of the group is what the router has chosen on all of them. Add up
            all ranks that train the same experts, and you have what a balancing bias of the router needs.

        Raises:
            StateError: The dispatcher is closed; or a layer of the same config and group was compiled, because a
                compiled call does not tell its layer.

        Cost: one copy of E integers; no collective.
        """
        channel = self._channel
        preferred = torch.device(self.config.device or "cpu")
        device = device_of(channel.communicator.group, preferred)
        return channel.meter.tokens_of(self._lease.layer, device, every_call=every_call)

    def self_test(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Send random rows through identity experts, and compare the result and the gradients with the exact ones.

        The exact result is x times the sum of its weights.

        Args:
            device: Device of the rows; by default the config's device, else the CPU. If the group cannot exchange
                tensors of that device, a device that it supports is used.
            dtype: Dtype of the rows; by default float32, or bfloat16 if the backend does not carry float32.

        Raises:
            StateError: The difference is too large on some rank. Raised on every rank, with the difference.

        Cost: collective; one dispatch and combine of about 32 rows a rank, forward and backward. The metrics count
        these calls.
        """
        from moe_dispatch.dispatchers.self_test import run_self_test  # noqa: PLC0415 - other calls never need it

        preferred = torch.device(device or self.config.device or "cpu")
        run_self_test(self, device_of(self._lease.enter().communicator.group, preferred), dtype)

    def check(self) -> RequiredCapacity:
        """Report overflows, invalid ids and calls that differ between ranks. Graph-safe mode only; collective.

        Ranks must make the same calls in the same order: dispatches with the same dtype, grad mode and ``carry``, and
        the same order of micro-batches in ``combine`` and in the backward. Each call leaves a mark on the device, also
        in replays of a CUDA graph, which this method compares. Calls in ``torch.compile`` leave out which call belongs
        to which.

        Raises:
            InputError: The calls of the ranks differ; the error names the first one that does. Or a dispatch was given
                ids outside -1..num_experts-1; their slots went nowhere. Raised on every rank. The next call reports
                only what is wrong later.
            CapacityError: Rows were dropped under ``graph_safe.on_overflow="raise"``. Raised on every rank, with a
                capacity that would be enough.
            StateError: The config is not graph_safe.

        Cost: one all-reduce of ten integers and a host sync.
        """
        from moe_dispatch.dispatchers import overflow  # noqa: PLC0415

        return overflow.check(self._lease.enter())

    def required_capacity(self) -> RequiredCapacity:
        """Return the capacity that would have been enough so far. Graph-safe mode only; collective; a host sync.

        Raises:
            StateError: The config is not graph_safe. An overflow raises nothing here.
        """
        from moe_dispatch.dispatchers import overflow  # noqa: PLC0415

        return overflow.required(self._lease.enter())

    def grow(self, *, headroom: float = 1.125) -> RequiredCapacity:
        """Raise the capacity if a dispatch has overflowed. Graph-safe mode only; collective; a host sync.

        A bound that was too small becomes the need so far times ``headroom``, at most the worst case. After the
        capacity has grown, make plans and capture CUDA graphs again: older plans are refused, and older graphs keep the
        old capacity. Do not call this method between a forward and a backward that recomputes it.

        Args:
            headroom: Factor from 1 to 1024. If it differs between ranks, the largest one is used.

        Returns:
            The need so far, and whether a dispatch has overflowed. Without an overflow, the capacity stays as it is.

        Raises:
            InputError: ``headroom`` is outside 1..1024.
            StateError: The config is not graph_safe.
        """
        from moe_dispatch.dispatchers import overflow  # noqa: PLC0415

        return overflow.grow(self._lease.enter(), headroom)

    def retry_on_overflow(
        self,
        step: Callable[[], Result],
        *others: Dispatcher,
        group: dist.ProcessGroup | None = None,
        headroom: float = 1.125,
    ) -> Result:
        """Run a step; after an overflow, grow the capacity and run it again. Graph-safe mode only; collective.

        Do not use this method for replays of a CUDA graph: a graph keeps the capacity it was captured with.

        Args:
            step: Function that makes the plans and runs forward and backward of one micro-batch or batch. It may run
                several times, so it must call ``zero_grad`` itself and must not step the optimizer. The random number
                generators of the CPU and of the current CUDA device are restored before each run.
            *others: Further dispatchers that the step uses, one of each other config or group.
            group: All ranks that run the step together, if they are more than the expert-parallel group. With data
                parallelism around expert parallelism, an overflow in one expert-parallel group must rerun the step in
                all of them.
            headroom: Factor for ``grow``.

        Returns:
            The result of the last run, in which nothing overflowed. It is bit for bit the result of a run that had the
            final capacity from the start.

        Raises:
            InputError: What ``check`` reports; or ``headroom`` is outside 1..1024.
            StateError: The config of a dispatcher is not graph_safe.
            PeerError: Ranks of ``group`` outside the expert-parallel group were given invalid ids.

        Cost: one all-reduce of ten integers and one host sync a run and channel; with ``group``, one more of each a
        run.
        """
        from moe_dispatch.dispatchers import overflow  # noqa: PLC0415

        channels = {channel.name: channel for channel in (each._lease.enter() for each in (self, *others))}
        everyone = None if group is None else Communicator(group)
        return overflow.retry_on_overflow(list(channels.values()), step, everyone=everyone, headroom=headroom)

    def extra_repr(self) -> str:
        """Return the part of ``repr`` that names the backend, the sizes and the rank."""
        if (lease := self.__dict__.get("_lease")) is None:  # an error in __init__ may show a half-built module
            return ""
        config = self.config
        sizes = f"num_experts={config.num_experts}, top_k={config.top_k}, hidden_size={config.hidden_size}"
        return ", ".join([lease.description, sizes] + [f"name={self.name!r}"] * bool(self.name))

    def release(self) -> None:
        """Give back what the channel holds: buffers of libraries, symmetric memory, workspaces and process groups.

        Collective. All dispatchers of the channel, that is, with the same config and group, are released at once; a
        second call does nothing. ``moe_dispatch.dispatchers.release(model)`` releases all channels of a model.

        Parameters, configs, counters, placements, the capacity and names stay. The next dispatch or plan opens the
        channel again, on the group as it is then, which may have been destroyed and made anew: a wrapper holds the new
        group; the default group is that of the job; another group is found by its name and ranks, which are the same
        if groups are made in the same order. Otherwise pass the new group to ``reopen``. Results of dispatches, plans
        and captured graphs from before are refused.

        Raises:
            StateError: A call is in flight: rows that still travel, a dispatch without its combine, or an output that
                needs a backward. Everything stays open on all ranks.
            PeerError: A call is in flight on another rank; or a rank has not called ``release`` before the timeout of
                the group, and the error names it.
            InputError: A rank makes another call instead, and the error names it.
            ConfigError: ``moe_dispatch.capabilities.phases`` is not installed.

        Cost: a small all-reduce on the control group, and what the library needs to free its memory. Where the group
        was destroyed before, nothing is exchanged. Memory of torch stays in torch's cache: empty that if another
        process needs it.
        """
        load_phases().release_channels([self._lease])

    def reopen(self, group: Group = None, *, control_group: dist.ProcessGroup | None = None) -> None:
        """Open the channel after ``release``. Collective. The next dispatch would do it too.

        Args:
            group: A group of the same ranks, or a mesh, as for the constructor; by default the group is found as
                ``release`` says.
            control_group: The control group, as for the constructor.

        Raises:
            StateError: The dispatcher is closed; or a group is not there, or has another rank or size.
            ConfigError: The group is no process group; or the ranks differ.
            PeerError: Opening failed on another rank.

        Cost: two small all-reduces on the control group, and the buffers of the backend. Nothing if it is open.
        """
        channel = self._lease.enter(wakes=False)
        if channel.waken is not None:
            load_phases().reopen_channel(channel, self._lease.name, group, control_group)

    def close(self) -> None:
        """Give back this dispatcher's share of the channel. The last share closes the backend.

        A second call does nothing.
        """
        self._lease.release()


build_dispatcher = Dispatcher
"""Build a Dispatcher to call ``dispatch`` and ``combine`` on."""


def make(dispatcher: Dispatcher, call: Call) -> Dispatched | InFlight:
    """Make a dispatch: check it, start to send, and receive the rows."""
    lease, channel, x = dispatcher._lease, dispatcher._lease.channel, call.x
    try:
        with record_function("moe_dispatch::dispatch") if profiled() else NO_RANGE:
            try:
                checked = checks.check_call(channel, call, dispatcher._layout_in)
                routing, layout = checked.routing, checked.plan.layout
                wide = torch.promote_types(checked.x_TD.dtype, torch.float32)  # the accumulation dtype
                weights_TK = routing.topk_weights.to(wide)
                if not weights_TK.requires_grad:
                    weights_TK = autograd.anchor(weights_TK, channel)
                ids_TK, asks = routing.topk_ids, not channel.config.graph_safe
                permutation = channel.context.permutations[type(ids_TK), ids_TK.device.type]
                ids_TK, weights_TK = permutation.merge_slots(ids_TK, weights_TK, asks=asks)
            except Exception as error:
                tell_peers(channel, error, in_dispatch=True, x=x, has_sizes=isinstance(call.plan, Plan))
                raise
            request = autograd.Request(
                x_TD=checked.x_TD,
                ids_TK=ids_TK,
                weights_TK=weights_TK,
                plan=checked.plan,
                real_rows=checked.real_rows,
                valid_T=checked.valid_T,
                slots=lease.slots,
                grad_enabled=torch.is_grad_enabled(),
                repetition=call.repetition,
                columns=call.columns,
                wants_weights=routing.topk_weights.requires_grad,
                lease=lease,
                layer=lease.layer,
            )
            with torch.no_grad():
                departed = autograd.start(channel, request, async_op=call.async_op)
                if channel.observers or routing.drift is not None:
                    tell_started(channel, lease, x, routing, layout)
            arrive = partial(receive, lease, departed, layout, x.shape, checked.x_TD, weights_TK, call.trains)
            if not call.async_op:
                return arrive()
            placement = None if departed.assigned is None else departed.assigned.placement
            return InFlight(placement=placement, finish=once(lease, arrive, x.device))
    except Exception as error:
        dispatcher._lease.name_in(error)
        raise


def bring_back(dispatcher: Dispatcher, rows: Tensor, sent: Dispatched) -> Tensor:
    """Make a combine: check it, and bring the rows back."""
    channel = dispatcher._lease.enter("combine")
    try:
        with record_function("moe_dispatch::combine") if profiled() else NO_RANGE:
            if not isinstance(rows, Tensor) and hasattr(rows, "brought_back"):
                return rows.brought_back(channel, sent)
            rows = checks.check_combine(rows, sent.in_graph, channel)
            if channel.observers or may_be_wrapped(sent.state.lease, rows):
                tell_combined(channel, sent.state.lease, rows)
            weights_R = autograd.anchor(sent.weights, channel)
            y: Tensor = autograd.Combine.apply(rows, weights_R, sent.state, channel)  # type: ignore[no-untyped-call]
            if not y.requires_grad:
                sent.state.tally.end()
            return y
    except Exception as error:
        dispatcher._lease.name_in(error)
        raise


def receive(
    lease: Lease,
    departed: autograd.Departed,
    layout: Layout,
    shape: torch.Size,
    x_TD: Tensor,
    weights_TK: Tensor,
    trains: bool,
) -> Dispatched:
    """Wait for the rows of a dispatch, and attach them to the rows and weights that were sent."""
    with torch.no_grad():
        arrived = autograd.finish(departed)
    real_L = arrived.real_tokens_per_expert
    if torch.is_grad_enabled():  # the caller may change its tensor before the backward, for example all-reduce it
        real_L = real_L.clone()
    experts_L = None if departed.assigned is None else departed.assigned.experts_L
    tally = Tally(lease, real_L, experts_L, trains=trains)
    state = autograd.State(
        lease=lease,
        layout=layout,
        shape=shape,
        num_rows=x_TD.shape[0],
        real_rows=departed.real_rows,
        padded=departed.padded,
        # On several ranks ``anchor`` has made the weights require grad.
        wants_weights=weights_TK.requires_grad and arrived.wants_weights,
        route=arrived.route,
        number=departed.number,
        tally=tally,
    )
    result = partial(
        Dispatched,
        tokens_per_expert=arrived.tokens_per_expert,
        real_tokens_per_expert=arrived.real_tokens_per_expert,
        host_counts=arrived.tokens_per_expert_list,
        pad_multiple=departed.channel.shape.pad_multiple,
        placement=None if departed.assigned is None else departed.assigned.placement,
        state=state,
    )
    sent = autograd.attach(result, arrived.rows, arrived.weights, state, (x_TD, weights_TK))
    return sent if departed.columns is None else departed.columns.attach(sent)


def once(lease: Lease, complete: Callable[[], Dispatched], device: torch.device) -> Callable[[], Dispatched]:
    """Return a function that calls ``complete`` once, on the current stream, and only while the dispatcher is open."""
    waiting = [complete]  # emptied by the call, so that a kept InFlight does not hold the sent tensors
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait() -> Dispatched:
        lease.enter()  # raises if closed
        if stream is not None and (current := torch.cuda.current_stream(device)) != stream:  # nothing orders the two
            raise StateError(
                f"Dispatcher.dispatch: wait() must run on the stream of the dispatch, {stream}, not on {current}. Let "
                "the other stream wait for that one."
            )
        if not waiting:
            raise StateError("Dispatcher.dispatch: wait() was called twice. Keep the result of the first call.")
        return waiting.pop()()

    return wait
