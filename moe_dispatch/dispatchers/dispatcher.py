"""The Dispatcher: what a model calls. Its work is done in ``verbs``; see the package for who does what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, cast, final, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch.communication import Communicator, device_of
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers import overflow, verbs
from moe_dispatch.dispatchers.autograd import State, profiler_range
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.ddp import DDPWatch
from moe_dispatch.dispatchers.metrics import Metrics, read_metrics
from moe_dispatch.dispatchers.opening import Group, lease_channel
from moe_dispatch.dispatchers.overflow import RequiredCapacity
from moe_dispatch.dispatchers.planning import Draft, draft_plan, settle
from moe_dispatch.dispatchers.self_test import run_self_test
from moe_dispatch.errors import ConfigError, InputError, LayoutError, StateError
from moe_dispatch.layouts import BSHD, Layout, Rows
from moe_dispatch.types import Dispatched, InFlight, Plan, Routing

Result = TypeVar("Result")


@final
class _Naming:
    """Adds the dispatcher's name to errors raised inside the block; costs nothing while there are none."""

    def __init__(self, name: str) -> None:
        self._note = f"In the dispatcher {name!r}." if name else ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._note:
            error.add_note(self._note)


class Dispatcher(nn.Module):
    """Sends a model's rows to their experts and brings the results back in the shape that came in.

    Use it as it is (``dispatch``, ``combine``), or subclass it and define ``run_experts``, and ``layout_of`` where a
    model's tensors are neither BSHD nor rows; then calling it does the whole layer. It has no parameters, buffers or
    state-dict keys of its own, so a subclass may have a submodule ``experts``. One per layer is light: what layers
    share is opened once per config and group.

    Args:
        config: what the model needs, and the backend.
        group: the expert-parallel group, a one-dimensional DeviceMesh, or None for one rank without torch.distributed.
        control_group: a CPU group of the same ranks for size agreement, so that it neither makes a GPU wait nor
            interleaves with other collectives on ``group``.
        name: where it sits in the model, as "stage 2, layers.7.mlp"; errors of its verbs say it. Ranks may differ.

    Raises:
        ConfigError: a rule the config breaks on this group, or ranks whose configs differ; on every rank alike.
        BackendUnavailableError: the backend cannot run here.
        PeerError: building failed on another rank.

    Cost: building is collective: one small all-reduce on the control group; the first of its config and group takes two
    more and an exchange of host names, and whatever the backend's buffers take.
    """

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
            way_out = "DispatcherConfig(**your_dict)" if isinstance(config, dict) else "DispatcherConfig.load(path)"
            raise ConfigError(
                f"Dispatcher: config must be a DispatcherConfig, got {type(config).__name__}. Pass {way_out}."
            )
        self.config = config
        self.name = name
        self._naming = _Naming(name)
        self._ddp_watch = DDPWatch()
        self._lease = lease_channel(config, group, control_group, name)

    @property
    def _channel(self) -> Channel:
        """What this dispatcher shares with others; StateError once it is closed."""
        return self._lease.channel

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("dispatch", "combine", "plan"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__qualname__} overrides Dispatcher.{name}, which is final. Override run_experts or "
                    "layout_of."
                )
        if callable(cls.__dict__.get("experts")):
            raise TypeError(
                f"{cls.__qualname__} defines a method experts, which the Dispatcher does not call. Rename it to "
                "run_experts; experts is free for a submodule."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would store it, but reading the attribute would still find the method.
        if isinstance(value, (nn.Module, nn.Parameter)) and (hasattr(Dispatcher, name) or name in ("config", "name")):
            raise InputError(
                f"{type(self).__qualname__}.{name}: a submodule or parameter must have a name that Dispatcher does not "
                f"use, got {type(value).__name__}. Choose another name, such as experts."
            )
        super().__setattr__(name, value)

    @property
    def backend_name(self) -> str:
        """The backend in use; what "auto" chose."""
        return self._channel.backend_name

    def forward(self, x: Tensor, routing: Routing, plan: Plan | Layout | None = None) -> Tensor:
        """Run the whole layer, ``combine(run_experts(dispatch(x)))``; the result has the shape of x."""
        sent = self.dispatch(x, routing, plan)
        return self.combine(self.run_experts(sent), sent)

    def run_experts(self, sent: Dispatched) -> Tensor:
        """Apply this rank's experts to ``sent.rows``; (R, D). A subclass that is called defines it."""
        raise StateError(
            f"{type(self).__qualname__}.forward: run_experts(sent) must be defined, got the base class's. "
            "Subclass Dispatcher and define it, or call dispatch and combine yourself."
        )

    def layout_of(self, x: Tensor) -> Layout:
        """The layout of a tensor given without one: [B, S, D] is BSHD, [T, D] is rows; override for others."""
        return BSHD() if x.dim() == 3 else Rows()

    @final
    def plan(self, layout: Layout | None = None, *, like: Tensor | None = None) -> Plan:
        """Settle the sizes of one micro-batch forward, for every layer of it.

        Args:
            layout: how the hidden states hold tokens; by default ``layout_of(like)``.
            like: any tensor shaped like the hidden states; needed where the layout does not know its row count and the
                backend needs it.

        Raises:
            LayoutError, InputError: what is given does not fit; PeerError: nor did it on another rank.

        Cost: nothing, or where the backend needs equal rows or the largest count, under ``row_counts`` "agree" or
        "check", one all-reduce of five integers on the control group and one host sync. A backend with buffers may
        grow them here, which is collective.
        """
        verbs.refuse_tracing("plan")

        def check(channel: Channel) -> Draft:
            if layout is None and like is None and self.config.infer_layout:
                raise InputError(
                    "Dispatcher.plan: a layout or like=x is needed, got neither. Pass the layout of the batch."
                )
            return draft_plan(channel, layout or self._inferred("plan", like), like)

        with self._naming:
            _ = self._channel  # raises where closed
            settled = settle(lambda: self._channel, check)
            assert settled is not None
            return settled

    @overload
    def dispatch(
        self,
        x: Tensor,
        routing: Routing | None = ...,
        plan: Plan | Layout | None = ...,
        *,
        again: Dispatched | None = ...,
        async_op: Literal[False] = ...,
    ) -> Dispatched: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        routing: Routing | None = ...,
        plan: Plan | Layout | None = ...,
        *,
        again: Dispatched | None = ...,
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
        async_op: bool = False,
    ) -> Dispatched | InFlight:
        """Send every row of x to the experts its routing names. Collective.

        Args:
            x: the model's hidden states, any count of tokens, also none; floating, last dimension ``hidden_size``.
            routing: ids and weights, one row per row of ``layout.flatten(x)``.
            plan: from ``plan``; or a layout, or nothing (``layout_of(x)``): then sizes are settled here, in each call.
            again: send x the way of an earlier dispatch, without routing, plan or an exchange of counts.
            async_op: return while rows travel, once counts are exchanged and read; ``wait()`` on the result completes
                it, called once, on the same stream and in the same grad mode. A backend that cannot overlap is done.

        Returns:
            Expert-major rows and their counts; see ``Dispatched``. On more than one rank they require grad wherever
            gradients are recorded, whatever x does: every rank takes part in every backward.

        Raises:
            InputError, LayoutError: the tensors do not fit, an id is outside -1..num_experts-1 (graph-safe: see
            ``check``), or ranks that exchange something before rows travel differ in the dtype of x or in grad mode;
            StateError: closed, or another dispatcher's plan or state; PeerError: another rank refused its call.

        Cost: that of the backend, and of ``plan`` where none is given.
        """
        if again is not None:
            return self._dispatch_again(x, routing, plan, again)
        if verbs.uses_operators(self._lease):
            return verbs.dispatch_by_operator(self._lease, x, routing, plan, lambda: self._inferred("dispatch", x))
        with self._naming, profiler_range("dispatch"):
            infer = partial(self._inferred, "dispatch", x)
            return verbs.dispatch(self._lease, x, routing, plan, infer, async_op=async_op, name=self.name)

    def _inferred(self, verb: str, x: Tensor | None) -> Layout:
        if not self.config.infer_layout:
            raise LayoutError(
                f"Dispatcher.{verb}: a plan or a layout must be given with infer_layout=False, got None. Bring the "
                "layout of the micro-batch to every rank of every pipeline stage, as broadcast_layout does."
            )
        return self.layout_of(cast(Tensor, x))

    def _dispatch_again(
        self, x: Tensor, routing: Routing | None, plan: Plan | Layout | None, again: Dispatched
    ) -> Dispatched:
        state = self._state(again, "dispatch")
        if routing is not None or plan is not None:
            raise InputError(
                "Dispatcher.dispatch: again=sent already has routing and plan, got more. Pass x and again=sent only."
            )
        if state.route is None:
            return verbs.dispatch_again(x, again)
        with self._naming, profiler_range("dispatch"):
            return verbs.dispatch_again(x, again)

    def _state(self, sent: Dispatched, verb: str) -> State:
        channel = self._channel  # raises where closed
        if not isinstance(sent, Dispatched):
            raise InputError(
                f"Dispatcher.{verb}: sent must be a Dispatched, got {type(sent).__name__}. "
                "Pass what dispatch returned, after wait() where async_op=True."
            )
        if sent.state.lease is not self._lease:
            raise StateError(
                f"Dispatcher.{verb}: sent must come from this dispatcher, got that of another one "
                f"(this is on channel {channel.name}). Combine with the dispatcher that dispatched."
            )
        state: State = sent.state
        if state.route is not None:
            verbs.refuse_tracing(verb)
        return state

    @final
    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Bring expert outputs back, weighted and summed over top_k. Collective.

        Args:
            rows: (R, D), floating; where ``sent.rows`` is padding it may hold anything.
            sent: of the dispatch these rows belong to; may be used more than once, in any order.

        Returns:
            The shape of the x that was dispatched, in the dtype of ``rows``; zero where a row is no token or went
            nowhere. Sums are accumulated in ``max(float32, dtype)`` and rounded once.

        Raises:
            InputError: rows of another shape or device; StateError: closed, or a state of another dispatcher.

        Cost: that of the backend; no host sync.
        """
        state = self._state(sent, "combine")
        if state.route is None:
            return verbs.combine(rows, sent)
        with self._naming, profiler_range("combine"):
            self._ddp_watch.look(rows, self._channel.communicator.group)
            return verbs.combine(rows, sent)

    def metrics(self, *, gather: bool = False) -> Metrics:
        """Totals of this dispatcher's channel: local, a host sync on a GPU; with ``gather`` collective, the group's."""
        return read_metrics(self._channel, gather=gather)

    def self_test(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Send random rows through identity experts: x times the weight sum must come back, and so the gradients.

        Args:
            device: where the rows are; by default the config's device, else the CPU, or what the group can carry.
            dtype: of the rows; by default float32, or bfloat16 where the backend carries nothing else.

        Raises:
            StateError: it does not on some rank; on every rank alike, with the difference.

        Cost: collective; one dispatch and combine of about 32 rows a rank, forward and backward. They count in metrics.
        """
        preferred = torch.device(device or self.config.device or "cpu")
        run_self_test(self, device_of(self._channel.communicator.group, preferred), dtype)

    def check(self) -> RequiredCapacity:
        """Hear of overflows and invalid ids of all dispatches of all ranks. Graph-safe; collective; a host sync.

        Raises:
            InputError: a dispatch was given ids outside -1..num_experts-1, whose slots went nowhere; on every rank
                alike. It is raised once: the next call only tells of dispatches since then.
            CapacityError: rows were dropped under ``on_overflow="raise"``; on every rank alike, with what would fit.
            StateError: the config is not graph_safe.
        """
        return overflow.check(self._channel)

    def required_capacity(self) -> RequiredCapacity:
        """What would have been enough so far; never raises for an overflow. Graph-safe; collective; a host sync."""
        return overflow.required(self._channel)

    def grow(self, *, headroom: float = 1.125) -> RequiredCapacity:
        """Make room for what was needed so far, times ``headroom`` where it was short, up to the worst case.

        Plans made before are refused from now on, and CUDA graphs captured before still have the old room: capture
        them again. Not between a forward and a backward that recomputes it. Graph-safe; collective; a host sync. Where
        ranks give other headrooms, the largest counts.

        Returns:
            What was needed, and whether it had overflowed; without an overflow nothing changes.

        Raises:
            InputError: ``headroom`` outside 1..1024. StateError: the config is not graph_safe.
        """
        return overflow.grow(self._channel, headroom)

    def retry_on_overflow(
        self,
        step: Callable[[], Result],
        *others: Dispatcher,
        group: dist.ProcessGroup | None = None,
        headroom: float = 1.125,
    ) -> Result:
        """Run a step, and again with more room as long as it overflowed.

        Args:
            step: forward and backward of one micro-batch or batch, plans included. It may run several times, so it does
                its own ``zero_grad`` and leaves the optimizer alone; the random number generators of the CPU and of
                the current CUDA device are put back before each run. What it returns is returned.
            *others: dispatchers of other configs or groups that it uses; those that share a channel need no naming.
            group: all ranks that run the step together, where these are more than the expert-parallel group: with data
                parallelism around it, an overflow in one expert-parallel group must rerun the step in all.
            headroom: as for ``grow``.

        Returns:
            The result of the run that had room from its start to its end: bit for bit that of a run with as much room
            from the start.

        Raises:
            InputError: invalid ids, as in ``check``; PeerError: on ranks of ``group`` only.

        Cost: one all-reduce of four integers and one host sync a run, and one more of each with ``group``. Graph-safe;
        collective. Not for replays of a CUDA graph: those keep the room they were captured with.
        """
        channels = {dispatcher._channel.name: dispatcher._channel for dispatcher in (self, *others)}
        everyone = None if group is None else Communicator(group)
        return overflow.retry_on_overflow(list(channels.values()), step, everyone=everyone, headroom=headroom)

    def extra_repr(self) -> str:
        """Describe the dispatcher in ``repr``: backend, sizes and place in the group."""
        if (lease := self.__dict__.get("_lease")) is None:  # an error of __init__ may show a half-built module
            return ""
        config = self.config
        sizes = f"num_experts={config.num_experts}, top_k={config.top_k}, hidden_size={config.hidden_size}"
        return ", ".join([lease.description, sizes] + [f"name={self.name!r}"] * bool(self.name))

    def close(self) -> None:
        """Give up this dispatcher's share of the channel; the last one closes the backend. May be called twice."""
        self._lease.release()


def build_dispatcher(
    config: DispatcherConfig,
    group: Group = None,
    *,
    control_group: dist.ProcessGroup | None = None,
    name: str = "",
) -> Dispatcher:
    """A Dispatcher to call ``dispatch`` and ``combine`` on; arguments and errors as for the class."""
    return Dispatcher(config, group, control_group=control_group, name=name)
