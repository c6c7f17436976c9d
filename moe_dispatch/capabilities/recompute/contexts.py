"""Keep the routes of a checkpointed call, and take them in its recomputation.

Each checkpointed call has a ``Log``. In its forward, ``Keeping`` writes each dispatch into the log; in a
recomputation, ``Repeating`` takes the entries in order. The checkpoint holds the log, so routes live as long as the
autograd graph that needs them, and any number of forwards may be live.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_dispatch.capabilities.recompute.differences import report
from moe_dispatch.capabilities.recompute.left_out import Watch, leave_out
from moe_dispatch.capabilities.recompute.nesting import Asker, Place, asker_in, checkpoints_between, in_saved_region
from moe_dispatch.capabilities.recompute.routes import Kept, Log, dispatch_anew, dispatch_on, refuse
from moe_dispatch.capabilities.recompute.tensors import recompute_once
from moe_dispatch.dispatched import Dispatched, InFlight
from moe_dispatch.dispatchers.agreement import settle
from moe_dispatch.dispatchers.channel import Channel, Lease
from moe_dispatch.dispatchers.dispatcher import Dispatcher, bring_back, make
from moe_dispatch.errors import ConfigError, InputError, StateError
from moe_dispatch.seams.call import Call
from moe_dispatch.seams.calls import Interceptor, of_thread
from moe_dispatch.types import Plan

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_AGREED = "sizes", "num_chunks", "footprint"  # what ranks agree on in a plan
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    use_reentrant: bool = False,
    context_fn: Callable[[], Contexts] | None = None,
    only_added: bool = False,
    **kwargs: Any,
) -> Result:
    """Call a function without keeping its activations. A backward computes them again, on the routes of this call.

    This is ``torch.utils.checkpoint.checkpoint`` with ``keep_routes``, so it also takes the place of torch's function
    where a framework asks for one. The activations are computed once, even if a pipeline schedule takes the gradients
    of a stage's inputs first and those of its weights later; torch would compute them for each. Until then the pass for
    the weights finds what it needs in memory, and everything else is freed by the pass for the inputs.

    Args:
        function: What is called, on all ranks of a group or on none.
        *args: Its arguments.
        use_reentrant: Must be False.
        context_fn: As in ``keep_routes``: contexts of your own, such as those of a policy of selective checkpointing.
        only_added: As in ``keep_routes``.
        **kwargs: Options of torch's checkpoint, ``preserve_rng_state``, ``determinism_check`` and ``early_stop``, and
            keyword arguments of the function.

    Raises:
        ConfigError: ``use_reentrant`` is true. Reentrant checkpoints do not work where a backward is split.

    The backward raises InputError on every rank, or in graph-safe mode ``Dispatcher.check`` does, if a recomputation
    saves other tensors than its forward, chooses other experts, or dispatches otherwise.

    Cost: that of ``keep_routes``.
    """
    if use_reentrant:
        raise ConfigError(
            "checkpoint: use_reentrant must be False, got True. For a reentrant checkpoint, pass "
            "keep_routes_of(function) to torch.utils.checkpoint.checkpoint."
        )
    if torch.compiler.is_compiling():  # a compiled call dispatches anew
        kwargs |= {} if context_fn is None else {"context_fn": context_fn}
    else:
        kwargs["context_fn"] = partial(keep_routes, context_fn, only_added=only_added)
    result: Result = torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result


def keep_routes(context_fn: Callable[[], Contexts] | None = None, *, only_added: bool = False) -> Contexts:
    """Let a recomputed dispatch take the route of its forward. The ``context_fn`` of ``torch.utils.checkpoint``.

    A recomputation then neither exchanges counts nor waits for the device, and experts get the rows of the forward, in
    the same order. It runs once for all backward passes, as ``checkpoint`` says. The last combine of the call is left
    out, if on no rank the checkpoint saves a tensor behind it. The ids and weights that the router chooses in the
    recomputation must be those of the forward, because the backward of the router uses them. They are compared: in
    eager mode the backward raises InputError on every rank, and in graph-safe mode ``Dispatcher.check`` does.
    ``keep_ids`` gives the router the ids of the forward.

    Use it with ``use_reentrant=False``, on all ranks or on none. A dispatch that ``torch.compile`` or a policy of
    selective checkpointing records is made by an operator, and not by this function.

    Args:
        context_fn: Another function of this kind, whose contexts are entered too:
            ``context_fn=functools.partial(keep_routes, context_fn)``.
        only_added: Whether the last combine is left out in any case, because its result is only added to other tensors,
            such as a residual or a shared expert, or reshaped. Equal on all ranks. In a recomputation the result then
            is NaN. If the call saves a tensor that autograd derives from it, the backward ends with an InputError on
            every rank, or in graph-safe mode ``Dispatcher.check`` raises it. Autograd does not see a mask, an index or
            a log that is made of it, nor what compiled code or a ``torch.autograd.Function`` computes from it and
            saves. The caller promises that there is nothing of this kind: a broken promise goes unnoticed.

    Returns:
        The context of the forward and the context of its recomputations.

    Cost: a dispatch keeps its ids in 2 bytes (4 with more than 32,767 experts), its weights if the router is trained,
    the weight of each row of the experts, and its route, which the autograd graph of the forward holds anyway. A
    backward with recomputed eager dispatches ends with one small all-reduce on the control group for each channel, and
    a host sync. If the control group is on the CPU, or with ``debug``, each recomputed dispatch has a small all-reduce
    too; otherwise the first one of a backward has it without ``only_added``, which is a host sync. In graph-safe mode
    nothing waits for the device and no rank asks another one, so without ``only_added`` the last combine is repeated if
    there are several ranks. What a dispatch carried is kept too.
    """
    log = Log(only_added=only_added)
    contexts: Contexts = (_Entered(Keeping, log), _Entered(Repeating, log))
    if context_fn is None:
        return contexts
    forward, recomputation = zip(contexts, context_fn(), strict=True)
    return _Both(*forward), _Both(*recomputation)


def keep_routes_of(function: Callable[Parameters, Result], *, only_added: bool = False) -> Callable[Parameters, Result]:
    """Return a function for one checkpointed call, whose recomputation takes the routes of its forward.

    This is ``keep_routes`` for checkpoints without a ``context_fn``: ``checkpoint(keep_routes_of(layer), x,
    use_reentrant=True)``, and Megatron's ``tensor_parallel.checkpoint``. Call it anew for each checkpointed call: the
    first call of the result is the forward, and calls inside a backward are recomputations. A reentrant recomputation
    leaves the last combine out only with ``only_added``, because its forward does not show what would be saved. It does
    not see what passes through other hooks of saved tensors inside the call, such as those that offload activations.
    """
    logs: list[Log] = []

    @wraps(function, updated=())
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if logs:
            if torch._C._current_graph_task_id() == -1:
                raise StateError(
                    "keep_routes_of: its result is for one checkpointed call, got a second call outside of a backward. "
                    "Call keep_routes_of for each checkpointed call."
                )
            return _repeated(function, logs[0])(*args, **kwargs)
        log = Log(only_added=only_added)
        with _Entered(Keeping, log):
            result = function(*args, **kwargs)
        logs.append(log)
        return result

    return run


def keep_ids(topk_ids: Tensor) -> Tensor:
    """Return the ids that the router chose in the forward, if this is its recomputation; else ``topk_ids`` itself.

    Call it between the choice of the router and the look-up of its weights:

        ids = keep_ids(scores.topk(top_k).indices)
        weights = scores.gather(1, ids)

    A router that would choose otherwise in a recomputation, because of ties or of noise without a saved seed, then has
    the gradients of its forward. The weights must be those of the forward too. They are compared, and reported as ids
    are, if they differ by more than the rounding of x, ``sqrt(eps)`` of the largest weight of the row. So noise that
    reaches the weights, such as jitter of the router's input, is kept in the same way:
    ``noise = keep_ids(torch.randn_like(scores))``.

    A recomputation must call it as its forward does: as often, in the same modules, with the same shapes. Otherwise
    every rank gets an InputError, as of other ids. Outside a call that ``keep_routes`` or ``keep_routes_of``
    checkpoints, and in compiled code, nothing happens.

    Args:
        topk_ids: The ids, or noise, in any shape and dtype.

    Raises:
        InputError: ``topk_ids`` requires grad. Or the recomputation calls it otherwise than its forward, and no
            dispatch can tell the other ranks.

    Cost: the checkpoint keeps ``topk_ids``.
    """
    way = of_thread.interceptor
    if torch.compiler.is_compiling() or not isinstance(way, Way):
        return topk_ids
    if topk_ids.requires_grad:
        raise InputError(
            "keep_ids: what is kept must not require grad, got a tensor that does. Pass ids, or noise, and compute the "
            "weights from them."
        )
    return way.ids(topk_ids, asker_in(way.place, topk_ids))


class Way(Interceptor):
    """What takes the dispatches of a checkpointed call.

    Checkpoints may be nested. Then the innermost recomputation decides the route, and every forward inside of it
    records this route too. A checkpoint without ``keep_routes`` inside of one with it gets a log when it dispatches.

    Args:
        log: Log of the checkpointed call.

    Attributes:
        outer: The way that was in force before, of a checkpoint around this one.
        inner: The way of a checkpoint inside of this one, while that one runs.
        place: Where it began.
    """

    inner: Way | None = None

    def __init__(self, log: Log) -> None:
        self.log = log
        self.outer = of_thread.interceptor
        self.place = Place()

    @property
    def told(self) -> str:
        """What ranks compare of this call and of those inside of it that run."""
        return self.log.told + ("" if self.inner is None else self.inner.told)

    @abstractmethod
    def latest(self, lease: Lease) -> Kept:
        """Return the entry of the latest dispatch of a dispatcher."""

    def logs_inside(self) -> list[Log]:
        """Return the logs of the checkpoints without ``keep_routes`` that run in this one, and around its inner one."""
        found = checkpoints_between(self.place, None if self.inner is None else self.inner.place)
        for owner, name in found:
            if not hasattr(owner, "routes"):
                owner.routes = Log()
                is_reentrant = name != "recompute_fn"
                owner.routes.begin(None if is_reentrant else owner, recorded=not is_reentrant)
                setattr(owner, name, _repeated(getattr(owner, name), owner.routes))
        return [owner.routes for owner, _ in found]

    @abstractmethod
    def ids(self, topk_ids: Tensor, asker: Asker) -> Tensor:
        """Do what ``keep_ids`` says."""


@final
class _Unrecorded:
    """What takes the calls in a region whose results torch_remat saves, as recomputations leave them out."""

    dispatch, combine, settle = staticmethod(make), staticmethod(bring_back), staticmethod(settle)


@final
class Keeping(Way):
    """The forward of a checkpointed call."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        log.begin(self.place.frame if self.place.grad_enabled else None, recorded=self.place.grad_enabled)
        if self.place.grad_enabled:
            recompute_once(self.place, log)

    def dispatch(self, dispatcher: Dispatcher, call: Call) -> Dispatched | InFlight:
        if in_saved_region():
            with _in_force(self.outer):
                return (self.outer or _Unrecorded).dispatch(dispatcher, call)
        self.log.verbs += 1
        lease = dispatcher._lease
        sent: Dispatched | InFlight
        with _in_force(self.outer):
            if isinstance(self.outer, Way):
                sent, kept = self.outer.dispatch(dispatcher, call), self.outer.latest(lease)
            else:
                kept, sent = dispatch_anew(dispatcher, replace(call, repetition=self.told))
        for log in (self.log, *self.logs_inside()):
            log.add(lease, kept)
        return sent

    def combine(self, dispatcher: Dispatcher, rows: Tensor, sent: Dispatched) -> Tensor:
        if in_saved_region():
            with _in_force(self.outer):
                return (self.outer or _Unrecorded).combine(dispatcher, rows, sent)
        self.log.verbs += 1
        with _in_force(self.outer):
            y = bring_back(dispatcher, rows, sent) if self.outer is None else self.outer.combine(dispatcher, rows, sent)
        for log in (self.log, *self.logs_inside()):
            log.combined(dispatcher._lease)
        return y

    def settle(self, channel: Channel, draft: Plan, **call: Any) -> Plan:
        if in_saved_region():
            with _in_force(self.outer):
                return (self.outer or _Unrecorded).settle(channel, draft, **call)
        if (facts := call["facts"]) is not None:
            call["facts"] = {**facts, "grad mode": f"{facts['grad mode']}{self.log.told}"}
        with _in_force(self.outer):
            plan = settle(channel, draft, **call)
        agreed = {name: getattr(plan, name) for name in _AGREED}
        for log in (self.log, *self.logs_inside()):
            log.plans.setdefault(channel, []).append(agreed)
        return plan

    def latest(self, lease: Lease) -> Kept:
        return self.log.kept[lease][-1]

    def ids(self, topk_ids: Tensor, asker: Asker) -> Tensor:
        if isinstance(self.outer, Way):
            topk_ids = self.outer.ids(topk_ids, asker)
        if in_saved_region():
            return topk_ids
        kept = asker, topk_ids.clone()  # the caller may change them in place
        for log in (self.log, *self.logs_inside()):
            log.ids.append(kept)
        return topk_ids


@final
class Repeating(Way):
    """A recomputation of a checkpointed call. It starts at the first entry of the log.

    Attributes:
        next: The number of dispatches so far of each dispatcher.
        next_plan: The number of plans so far on each channel.
        next_ids: The number of calls of ``keep_ids`` so far that were as in the forward.
        combines: The number of combines so far.
        reports: The dispatchers whose ranks compare at the end of the backward what they have found.
        problem: The error of a call of ``keep_ids`` that was not as in the forward.
        decides: Whether dispatches get their routes from this way, and not from one inside of it for the same call.
        watch: What watches the result of a combine that was left out; None without ``only_added``.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.next, self.next_plan = Counter[Lease](), Counter[Channel]()
        self.next_ids = self.combines = 0
        self.reports: list[Lease] = []
        self.problem: InputError | None = None
        self.decides = True
        if isinstance(self.outer, Repeating):  # its log is of the same call
            self.outer.decides = False
        self.watch = Watch() if log.only_added else None

    def dispatch(self, dispatcher: Dispatcher, call: Call) -> Dispatched | InFlight:
        lease = dispatcher._lease
        all_kept, number = self.log.kept.get(lease, []), self.next[lease]
        self.next[lease] += 1
        self.log.repeated += 1
        with _in_force(None):
            if number >= len(all_kept):
                return refuse(self.log, lease, f"more than {number}")
            kept = all_kept[number]
            for log in self.logs_inside():
                log.add(lease, kept)
            sent = dispatch_on(self.log, kept, dispatcher, call, problem_before=self.problem)
            self.reports.append(lease)
            return sent

    def combine(self, dispatcher: Dispatcher, rows: Tensor, sent: Dispatched) -> Tensor:
        self.combines += 1
        self.log.repeated += 1
        lease = sent.state.lease
        with _in_force(None):
            if self.log.leaves_out and self.combines == self.log.combines:
                if self.watch is not None and not self.next[lease]:
                    # No dispatch of this call lets ranks compare at the end what they have found.
                    report(lease, sent.weights.new_zeros(2, dtype=torch.int64), self.problem)
                    self.reports.append(lease)
                y = leave_out(dispatcher, rows, sent, self.watch)
            else:
                y = bring_back(dispatcher, rows, sent)
        for log in self.logs_inside():
            log.combined(dispatcher._lease)
        return y

    def settle(self, channel: Channel, draft: Plan, **call: Any) -> Plan:
        number, kept = self.next_plan[channel], self.log.plans.get(channel, [])
        self.next_plan[channel] += 1
        agreed = kept[number] if number < len(kept) else None
        for log in self.logs_inside():
            log.plans.setdefault(channel, []).append(agreed)
        if agreed is not None:
            return replace(draft, settled=True, **agreed)
        with _in_force(None):
            return settle(channel, draft, **call)

    def latest(self, lease: Lease) -> Kept:
        return self.log.kept[lease][self.next[lease] - 1]

    def ids(self, topk_ids: Tensor, asker: Asker) -> Tensor:
        number, its = self.next_ids, self.log.ids
        if number < len(its) and its[number][0] == asker:
            self.next_ids, topk_ids = number + 1, its[number][1]
        elif not self._asks_only_with_gradients(asker):
            wanted = f"be that of its forward, {its[number][0]}" if number < len(its) else f"follow {number} at most"
            self.refuse(f"call {number + 1} in a recomputation must {wanted}, got {asker}", topk_ids.device)
        for log in self.logs_inside():
            log.ids.append((asker, topk_ids))
        return topk_ids.clone()

    def _asks_only_with_gradients(self, asker: Asker) -> bool:
        """Return whether the router chooses here only where gradients are recorded, so not in a reentrant forward.

        Megatron's routers do so for auxiliary losses.
        """
        if not asker.site or self.log.recorded or not self.place.grad_enabled:
            return False
        return all((other.router, other.site) != (asker.router, asker.site) for other, _ in self.log.ids)

    def refuse(self, text: str, device: torch.device) -> None:
        """Tell all ranks of a call of ``keep_ids`` that is not that of the forward, with the dispatches of this way."""
        if self.problem is None:
            self.problem = InputError(f"keep_ids: {text}. Checkpoint a function that does the same each time.")
            for lease in self.reports:
                report(lease, torch.zeros(2, dtype=torch.int64, device=device), self.problem)

    def end(self) -> None:
        """Compare the calls with those of the forward, when the recomputation has ended by itself."""
        if self.decides:
            for lease, all_kept in self.log.kept.items():
                if self.next[lease] < len(all_kept):
                    refuse(self.log, lease, f"{self.next[lease]} of {len(all_kept)}")
        if self.decides and self.next_ids < (number := len(self.log.ids)):
            text = f"a recomputation must make all {number} calls of its forward, got {self.next_ids}"
            self.refuse(text, self.log.ids[0][1].device)
        if self.problem is not None and not self.reports:
            raise self.problem


def _repeated(function: Callable[Parameters, Result], log: Log) -> Callable[Parameters, Result]:
    """Return a function whose calls are recomputations on the routes of a log."""

    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _Entered(Repeating, log):
            return function(*args, **kwargs)

    return run


@contextmanager
def _in_force(interceptor: Interceptor | None) -> Iterator[None]:
    """Put an interceptor in force for a dispatch, and hide the dispatch from policies of selective checkpointing.

    They compare the operations of a recomputation with those of its forward, and a dispatch on a kept route has others.
    """
    before, of_thread.interceptor = of_thread.interceptor, interceptor
    modes = []
    if torch._C._len_torch_dispatch_stack() and any(map(_is_of_policy, _get_current_dispatch_mode_stack())):
        modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        for mode in reversed(modes):
            if not _is_of_policy(mode):
                _push_mode(mode)
    try:
        yield
    finally:
        of_thread.interceptor = before
        if modes:
            for _ in range(torch._C._len_torch_dispatch_stack()):
                _pop_mode()
            for mode in reversed(modes):
                _push_mode(mode)


def _is_of_policy(mode: object) -> bool:
    return isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))


@final
class _Entered(AbstractContextManager[None]):
    """A context that may be entered several times, one after the other, with a new way each time."""

    def __init__(self, way: type[Keeping | Repeating], log: Log) -> None:
        self._way, self._log = way, log

    def __enter__(self) -> None:
        way = self._way(self._log)
        if isinstance(way, Repeating) and way.watch is not None:
            way.watch.__enter__()
        of_thread.interceptor = way
        if isinstance(way.outer, Way):
            way.outer.inner = way

    def __exit__(self, *error: object) -> None:
        way = of_thread.interceptor
        assert isinstance(way, Way)
        of_thread.interceptor = outer = way.outer
        if isinstance(outer, Way):
            outer.inner = None
        if not isinstance(way, Repeating):
            return
        if way.watch is not None:
            way.watch.__exit__()
        if error[0] is None:
            way.end()


@final
class _Both(AbstractContextManager[None]):
    """Two contexts, entered together. They may be entered several times, one after the other."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
