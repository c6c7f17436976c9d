"""Unequal numbers of steps: a rank that is done answers the calls of the others until all ranks are done.

Inside the context, each exchange begins with a message: an all-reduce (MAX) of what comes next. A rank that is done
adds nothing to the message, and so learns which part it must take. It sends no rows, but its experts work for the
others. ``_Session`` holds what the ranks of one context share; ``_Control``, ``_Backend`` and ``_Route`` stand in for
the objects of the channels and send the messages, so calls outside of the context pass through nothing of this file.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor

from moe_dispatch._observers import CollectiveObserver, observers_of
from moe_dispatch.backends.base import Arrived, Backend, Route
from moe_dispatch.communication import (
    Communicator,
    Work,
    control_device,
    raise_alike,
    raise_told,
    ranks_by_value,
    read_host,
    text_of,
)
from moe_dispatch.dispatchers.autograd import Departed
from moe_dispatch.dispatchers.channel import Channel, open_channels, standing_in
from moe_dispatch.dispatchers.checks import ROW_DTYPES, check_combine
from moe_dispatch.dispatchers.dispatcher import Dispatcher, receive
from moe_dispatch.dispatchers.meter import is_recomputation
from moe_dispatch.errors import ConfigError, InputError, LostPeerError, MoEDispatchError, PeerError, StateError
from moe_dispatch.layouts import Rows
from moe_dispatch.types import Dispatched, Sizes

Experts = Callable[[Dispatched], Tensor]

_of_thread = threading.local()
_NOTHING = -(2**61)  # what a rank adds to a maximum that it does not take part in
_TRACED = "join: calls inside torch.compile and selective checkpointing are not answered."
_DTYPES = sorted(ROW_DTYPES, key=str)
_ANSWERED = ("sizes", "debug", "refusal")  # labels of what a dispatch exchanges on the control group
# The first number of a message: what comes next. A rank that fails says so in place of its next exchange, and the
# highest number wins.
_REFUSE, _MAX, _RESERVE, _START, _FINISH, _COMBINE, _COMBINE_BACKWARD, _DISPATCH_BACKWARD, _TEXTS, _FAILED = range(10)
_FOLLOWING = (_FINISH, _COMBINE, _COMBINE_BACKWARD, _DISPATCH_BACKWARD)  # the start of a dispatch
_NAMES = {
    _REFUSE: "a refused call in place of {}",
    _MAX: "the exchange of sizes before {}",
    _RESERVE: "the growth of buffers before {}",
    _START: "{}",
    _FINISH: "the wait() of {}",
    _COMBINE: "the combine of {}",
    _COMBINE_BACKWARD: "the backward of the combine of {}",
    _DISPATCH_BACKWARD: "the backward of {}",
    _TEXTS: "a refused call",
}


@contextmanager
def join(layers: Iterable[Dispatcher] | Mapping[Dispatcher, Experts]) -> Iterator[None]:
    """Let the ranks of an expert-parallel group make different numbers of calls in a ``with`` block. Collective.

    A rank that leaves the block waits until all ranks leave it. Meanwhile it answers each dispatch, combine and
    backward of the others without rows of its own, and runs its experts, whose gradients it collects. While they last,
    the calls of all other ranks must be the same, as always. What begins with a dispatch in the block must end in the
    block: ``wait``, combine and backward.

    Only the exchanges of the dispatchers are answered. What averages gradients, as DDP does, or gathers parameters, as
    FSDP does, must be outside of the block, or in a context of its own such as ``torch.distributed.algorithms.Join``.

    Args:
        layers: All open dispatchers of the group. Each defines ``run_experts``; or they are given with the function
            that runs the experts of this rank. It must contain no collectives. It runs under the autocast that was on
            at the dispatch.

    Raises:
        ConfigError: A layer is no dispatcher; or the block is inside of another join; or the layers are incomplete or
            of several groups; or a config has ``graph_safe`` or expert slots. Raised on every rank that does not raise
            another error; what is no dispatcher, only where it is passed.
        InputError: The layers or their order differ between ranks; or ranks make different calls in the block, and the
            error has each call with its ranks. Raised on every rank.
        StateError: A dispatcher is closed; or a call in the block is compiled, sends rows ``again``, differentiates one
            dispatch twice, or is another collective of this library on the group, such as ``metrics(gather=True)``.
        LostPeerError: Another rank has failed in the block. The error has its number, its last call and its error.
        PeerError: Another rank refused its call, or its layers.

    Cost: one all-reduce of 21 integers on the control group before each exchange in the block, with a host sync on a
    GPU-only group; before an error, also an exchange of texts. Nothing outside of the block. A rank that is done does
    not recompute: it keeps what its experts need until the backward.

    Source: the manner of use is that of ``torch.distributed.algorithms.Join``.
    """
    if getattr(_of_thread, "is_joined", False):  # other ranks may be done, so the outer join tells them
        raise ConfigError("join: this block is inside of another join. Pass all layers to one join.")
    listed = [*layers] if isinstance(layers, Iterable) else [layers]
    for layer in listed:
        if not (isinstance(layers, Iterable) and isinstance(layer, Dispatcher)):
            raise ConfigError(
                f"join: layers must be dispatchers, in a list or as the keys of a mapping, got {type(layer).__name__}"
                f"{'' if isinstance(layers, Iterable) else ' alone'}. Pass join([dispatcher, ...])."
            )
    session = _Session(layers if isinstance(layers, Mapping) else {layer: layer.run_experts for layer in listed})
    with session.block():
        try:
            yield
            while session.answer():
                pass
        except BaseException as error:
            if not session.in_exchange:
                with suppress(Exception):  # the error of this rank matters more
                    session.fail(error)
            raise


class _FreshTensor(torch.autograd.Function):
    """Return the memory of a leaf as a tensor that is not a leaf, so that experts may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.new_empty(0).set_(
            leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride()
        )  # a view of a leaf may not be changed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@final
@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """A dispatch of the others that this rank answers.

    Attributes:
        number: Number of the layer.
        rows: Tp, the rows of padding that this rank sends.
        autocast: Context of the experts, with the autocast of the others.
        arrive: Function that waits for the rows.
        leaves: The arrived rows and weights as leaves of autograd; None before.
        route: Route of the dispatch.
        outputs: Outputs of the experts; None before.
        grad_R: Gradient of the weights from the backward of combine.
    """

    number: int
    rows: int
    autocast: AbstractContextManager[Any]
    arrive: Callable[[], Dispatched]
    leaves: tuple[Tensor, Tensor] | None = None
    route: Route | None = None
    outputs: Tensor | None = None
    grad_R: Tensor | None = None


@final
class _Session:
    """What the stand-ins of one context share.

    Attributes:
        is_open: Whether the block still runs.
        failed: Text about ranks that have failed, so that no rank waits for another; empty if there are none.
        in_exchange: Whether this rank is in a collective that all ranks make. Otherwise they wait for its next message.
        count: Number of dispatches so far, equal on all ranks.
        began: Number of dispatches up to the last one of this rank's own.
        routes: The calls of this rank that are under way, or that a backward may still need, by number of the dispatch.
    """

    def __init__(self, experts: Mapping[Dispatcher, Experts]) -> None:
        self.is_open, self.in_exchange, self.failed = True, False, ""
        self.count = self.began = 0
        self._guard = _Guard(self)
        self._last: tuple[Sequence[int], int | None] = (), None
        self.routes: weakref.WeakValueDictionary[int, _Route] = weakref.WeakValueDictionary()
        self._calls: dict[int, _Call] = {}
        self._leases = [dispatcher._lease for dispatcher in experts]
        self._given, self._experts = experts, list(experts.values())
        if not self._leases:
            raise ConfigError("join: there are no layers. Pass the dispatchers of the MoE layers.")
        self._channels = [lease.opened for lease in self._leases]
        self.control = max(self._channels, key=lambda channel: channel.users > 0).control
        raise_alike(self.control, self._problem(), facts=self._facts(), of_call=True, label="join")

    def _facts(self) -> dict[str, Any]:
        told = [f"{lease.opened.config.digest[:12]} {lease.number}" for lease in self._leases]
        return {"the layers of join, each as config and number": ", ".join(told)}

    def _problem(self) -> MoEDispatchError | None:
        for dispatcher, experts in self._given.items():
            if getattr(experts, "__func__", None) is Dispatcher.run_experts:
                return ConfigError(
                    f"join: {type(dispatcher).__name__} does not define run_experts. Define it, or pass "
                    "join({dispatcher: function, ...})."
                )
        try:
            configs = [lease.enter().config for lease in self._leases]
        except StateError as closed:
            return closed
        group = self.control.group
        num_open = sum(each.users for each in open_channels(group) if each.control.group is group)
        for broken, rule in (
            (any(each.control.group is not group for each in self._channels), "all layers must have one group."),
            (
                any(config.graph_safe for config in configs),
                "sizes must be exchanged, got graph_safe=True. Give each rank as many steps.",
            ),
            (
                any(config.slot_options is not None for config in configs)
                or any(lease.slots is not None for lease in self._leases),
                "experts must stay at home, got balance=. Leave it out.",
            ),
            (
                group is not None and num_open != len(configs),
                f"pass all {num_open} open dispatchers of the group, got {len(configs)}. Close unused ones.",
            ),
        ):
            if broken:
                return ConfigError(f"join: {rule}")
        return None

    def _stand_in(self, channel: Channel, number: int | None) -> Channel:
        """Return a copy of the channel whose exchanges are announced."""
        joined = copy.copy(channel)
        joined.control = cast(Communicator, _Control(self, channel.control, number))
        joined.backend = _Backend(self, channel.backend, number)
        return joined

    @contextmanager
    def block(self) -> Iterator[None]:
        """Announce the exchanges of the dispatchers inside. A dispatcher that was closed there closes at the end."""
        by_lease = {lease: self._stand_in(lease.opened, number) for number, lease in enumerate(self._leases)}
        groups = {link.group for each in self._channels for link in (each.communicator, each.control)} - {None}
        with standing_in(by_lease, refusal=_TRACED):
            for group in groups:
                observers_of(group).append(self._guard)
            _of_thread.is_joined = True
            try:
                yield
            finally:
                self.is_open = _of_thread.is_joined = False
                for group in groups:
                    observers_of(group).remove(self._guard)
                self._calls.clear()

    def agree(
        self, *message: int, layer: int | None = None, mark: int = _NOTHING, failure: str = ""
    ) -> tuple[list[int], int, int]:
        """Tell the others what comes next, and learn it from them. Collective.

        Args:
            *message: The exchange, the number of the dispatch, and up to seven numbers more; nothing if this rank is
                done.
            layer: Number of the layer that calls, if it is known.
            mark: Mark of a dispatch.
            failure: Text of the error of this rank if it has failed.

        Returns:
            The message of the ranks that are not done; the highest mark; and the number of the oldest dispatch that a
            rank may still differentiate. Without a message, all ranks are done.

        Raises:
            LostPeerError: Another rank has failed, in this exchange or before.
            InputError: Ranks go on with different exchanges, or some go on with a dispatch of a rank that is done.
                Raised on every rank.
        """
        decides = bool(message) and message[0] != _REFUSE  # a rank that is done or refuses follows the others
        padded = [*message, *[0 if decides else _NOTHING] * (9 - len(message))]
        told = [*padded, *(-number if decides else _NOTHING for number in padded)]
        oldest = min(self.routes, default=self.count) if message else -_NOTHING
        if self.failed:
            raise LostPeerError(self.failed)
        self.in_exchange = True
        began = _NOTHING if message else self.began
        *found, mark, oldest, began = self.control.max([*told, mark, -oldest, began], label="join")
        high, low = found[:9], [-number for number in found[9:]]
        differ = high[0] > _REFUSE and high != low
        if differ or high[0] == _FAILED or (high[0] in _FOLLOWING and high[1] < began):
            mine = [message, self.began, failure or self._name(message, layer), self._details(message)]
            error = self._error(self.control.gather_json(mine, label="join"), differ=differ)
            if not failure:
                self.in_exchange = False
                raise error
        self.in_exchange = False
        if high[0] != _NOTHING:
            self._last = message or high, layer
        return high if high[0] != _NOTHING else [], mark, -oldest

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed. Collective."""
        last = self._name(*self._last)
        self.agree(_FAILED, failure=f"failed {f'after {last}' if last else 'before its first call'}: {text_of(error)}")

    def _name(self, message: Sequence[int], layer: int | None) -> str:
        """Return what a person calls the exchange of a message; empty for a rank that is done."""
        if not message:
            return ""
        of_layer = "" if layer is None else f" ({self._leases[layer].name!r})"
        return _NAMES[message[0]].format(f"dispatch {message[1] + 1} of the block") + of_layer

    def _details(self, message: Sequence[int]) -> str:
        """Return what may differ between calls of the same name."""
        numbers = message[3:6] if message and message[0] == _START else ()
        return "".join(f", {'no autocast' if number < 0 else _DTYPES[number]}" for number in numbers)

    def _error(self, told: Sequence[tuple[Sequence[int], int, str, str]], *, differ: bool) -> MoEDispatchError:
        """Return an error that names ranks and calls, from the message, ``began``, name and details of each rank."""
        calls = {rank: tuple(message) for rank, (message, *_) in enumerate(told) if message}
        if failed := {rank: told[rank][2] for rank, call in calls.items() if call == (_FAILED,)}:
            self.failed = "join: " + "; ".join(f"{ranks} {text}" for text, ranks in ranks_by_value(failed).items())
            return LostPeerError(self.failed)
        first = {call: rank for rank, call in reversed(calls.items())}  # names of layers may differ between ranks
        names = {call: told[rank][2] for call, rank in first.items()}
        if len({*names.values()}) < len(names):
            names = {call: names[call] + told[rank][3] for call, rank in first.items()}
        ranks_at = ranks_by_value(calls)
        same = "Make the same calls on all ranks until one is done."
        if differ:
            kinds = {call[0] for call in ranks_at}
            if kinds & {*_FOLLOWING} and kinds - {*_FOLLOWING}:
                same += " A loop over chunks needs as many on every rank: let chunks cut the micro-batches."
            made = "; ".join(f"{names[call]} on {ranks}" for call, ranks in ranks_at.items())
            return InputError(f"join: ranks make different calls: {made}. {same}")
        ((call, ranks),) = ranks_at.items()
        left = ranks_by_value({rank: 0 for rank, (its, began, *_) in enumerate(told) if not its and began > call[1]})
        return InputError(f"join: {left[0]} left the block before {names[call]}, the next call of {ranks}. {same}")

    @contextmanager
    def exchange(self, *message: int, layer: int | None, mark: int = _NOTHING) -> Iterator[None]:
        """Announce an exchange of this rank's call, which follows in the block."""
        if not self.is_open:
            raise StateError(
                "join: the block of this dispatch has ended. Call wait(), combine and backward in the block."
            )
        self.agree(*message, layer=layer, mark=mark)
        self.in_exchange = True
        yield
        self.in_exchange = False

    def answer(self) -> bool:
        """Take part in the next exchange of the others. Return whether there was one."""
        message, mark, oldest = self.agree()
        for number in [number for number in self._calls if number < oldest]:
            del self._calls[number]
        if not message:
            return False
        what, serial, *numbers = message
        if what in _FOLLOWING:
            call = self._calls[serial]
            self._last = message, call.number
            self._go_on(what, call, serial)
            return True
        self.in_exchange = True
        with torch.no_grad():
            if what == _MAX:
                self._answer_max(*numbers[:2])
            elif what == _TEXTS:
                told = self.control.gather_json(None, label="join")
                self.in_exchange = False
                raise_told(told, of_call=True)
            elif what == _RESERVE:
                self._channels[numbers[0]].backend.reserve(_sizes(numbers[1:3]))
            elif what == _REFUSE:
                channel = self._channels[numbers[0]]
                channel.backend.refuse(channel.device_of_rows())
            else:
                self._start(*numbers[:7], mark=mark)
        self.in_exchange = False
        return True

    def _answer_max(self, num_values: int, num_sums: int) -> None:
        nothing = [_NOTHING] * num_values
        if not num_sums:
            self.control.max(nothing, label="sizes")
            return
        assert self.control.group is not None
        sums = torch.zeros(num_sums, dtype=torch.int64, device=control_device(self.control.group))
        self.control.max_and_sum(nothing, [sums], label="sizes")

    def _start(
        self,
        number: int,
        dtype: int,
        weights_dtype: int,
        autocast: int,
        padded: int,
        largest: int,
        recomputed: int,
        *,
        mark: int,
    ) -> None:
        """Start a dispatch without rows, or with padding where ranks bring equal numbers."""
        lease, channel = self._leases[number], self._channels[number]
        lease.shared.announce(lease.name)
        sizes, device, serial = _sizes((padded, largest)), channel.device_of_rows(), self.count
        self.count += 1
        rows = channel.needs.brought(0, sizes)
        ids = torch.full((rows, channel.config.top_k), -1, device=device)
        x = torch.zeros(rows, channel.config.hidden_size, dtype=_DTYPES[dtype], device=device)
        weights = torch.zeros(ids.shape, dtype=_DTYPES[weights_dtype], device=device)
        marks = [torch.tensor(mark, device=device)] if channel.needs.exchanges_counts else []
        try:
            started = channel.backend.start(x, ids, weights, sizes, *marks)
        except LostPeerError:
            raise
        except PeerError:  # the ranks that call exchange texts next
            return
        departed = Departed(
            channel=channel,
            arrive=partial(channel.backend.finish, started),
            padded=rows,
            real_rows=None,
            given_TK=ids,
            outcome=ids.new_zeros(()),
            unread=None,
            valid_T=None,
            assigned=None,
            layer=lease.layer,
            recomputed=bool(recomputed),
        )
        self._calls[serial] = _Call(
            number=number,
            rows=rows,
            autocast=nullcontext() if autocast < 0 else torch.autocast(device.type, _DTYPES[autocast]),
            arrive=partial(receive, lease, departed, Rows(), x.shape, x, weights),
        )

    def _go_on(self, what: int, call: _Call, serial: int) -> None:
        """Take part in what follows on the start of a dispatch. Experts run when the exchange is over.

        So the others learn of an error of the experts at their next message.
        """
        if what == _FINISH:
            sent = self._finish(call)
            with torch.enable_grad(), call.autocast:
                outputs = self._experts[call.number](sent)
                outputs = check_combine(outputs, sent.in_graph, self._channels[call.number])
            call.outputs = outputs
            return
        assert call.leaves is not None
        assert call.route is not None
        assert call.outputs is not None
        config, leaves = self._channels[call.number].config, call.leaves
        weights = leaves[1].detach() if config.weights == "combine" else None
        outputs = call.outputs.detach()
        self.in_exchange = True
        with torch.no_grad():
            if what == _COMBINE:
                call.route.combine(outputs, weights)
            elif what == _COMBINE_BACKWARD:
                zeros = outputs.new_zeros(call.rows, config.hidden_size)
                kept = None if weights is None else outputs
                grad_RD, call.grad_R = call.route.combine_backward(zeros, kept, weights)
            else:
                grad_RD, grad_R = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
                call.route.dispatch_backward(grad_RD, grad_R if call.grad_R is None else grad_R + call.grad_R)
                del self._calls[serial]
        self.in_exchange = False
        if what == _COMBINE_BACKWARD and call.outputs.requires_grad:
            torch.autograd.backward(call.outputs, grad_RD)

    def _finish(self, call: _Call) -> Dispatched:
        """Wait for the rows, and return what the experts get."""
        self.in_exchange = True
        with torch.no_grad():
            sent = call.arrive()
        self.in_exchange = False
        call.route = sent.state.route
        call.leaves = sent.in_graph.requires_grad_(), sent.weights.requires_grad_()
        with torch.enable_grad():
            rows, weights = (_FreshTensor.apply(leaf) for leaf in call.leaves)  # type: ignore[no-untyped-call]
        return dataclasses.replace(sent, rows=rows, weights=weights)


@final
class _Guard(CollectiveObserver):
    """Refuses the collectives of a group that were not announced."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    def collective(self, label: str, nbytes: int, tensor: Tensor, start: Callable[[Any], Work], options: Any) -> Work:
        if not self._session.in_exchange:
            raise StateError(
                f"join: a rank that is done does not answer {label!r}. Make this call outside of the block."
            )
        return start(options)


def _flat(sizes: Sizes) -> list[int]:
    return [-1 if number is None else number for number in (sizes.padded_rows, sizes.group_max_rows)]


def _sizes(numbers: Sequence[int]) -> Sizes:
    padded, largest = (None if number < 0 else number for number in numbers)
    return Sizes(padded_rows=padded, group_max_rows=largest)


@final
class _Control:
    """Stands in for the control communicator of a channel."""

    def __init__(self, session: _Session, inner: Communicator, number: int | None) -> None:
        self._session, self._inner, self._number = session, inner, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _announced(self, label: str, *message: int) -> AbstractContextManager[None]:
        if label not in _ANSWERED:
            return nullcontext()  # which is refused
        what, *numbers = message
        return self._session.exchange(what, self._session.count, *numbers, layer=self._number)

    def max(self, values: Sequence[int], *, label: str) -> list[int]:
        with self._announced(label, _MAX, len(values)):
            return self._inner.max(values, label=label)

    def max_and_sum(self, values: Sequence[int], sums: Sequence[Tensor], *, label: str) -> list[int]:
        with self._announced(label, _MAX, len(values), sum(map(len, sums))):
            return self._inner.max_and_sum(values, sums, label=label)

    def gather_json(self, value: Any, *, label: str) -> list[Any]:
        """Exchange texts of a refused call. A rank that is done has None."""
        with self._announced(label, _TEXTS):
            return self._inner.gather_json(value, label=label)


@final
class _Backend(Backend):
    """Stands in for the backend of a channel, in the calls of one dispatcher."""

    def __init__(self, session: _Session, inner: Backend, number: int | None) -> None:
        super().__init__(inner.context)
        self._session, self._inner, self._number = session, inner, number
        self.brings_copies = inner.brings_copies

    def _announced(self, what: int, *numbers: int, mark: int = _NOTHING) -> AbstractContextManager[None]:
        message = what, self._session.count, self._number or 0, *numbers
        return self._session.exchange(*message, layer=self._number, mark=mark)

    def reserve(self, sizes: Sizes) -> None:
        if type(self._inner).reserve is not Backend.reserve:
            with self._announced(_RESERVE, *_flat(sizes)):
                self._inner.reserve(sizes)

    def dispatch(self, *arguments: Any) -> Arrived:
        return self.finish(self.start(*arguments))

    def start(
        self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes, mark: Tensor | None = None
    ) -> _Route:
        session, device = self._session, rows_TD.device.type
        dtypes = [_DTYPES.index(tensor.dtype) for tensor in (rows_TD, weights_TK)]
        autocast = _DTYPES.index(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else -1
        told = _NOTHING if mark is None else read_host(mark.view(1))[0]
        again = is_recomputation()
        with self._announced(_START, *dtypes, autocast, *_flat(sizes), again, mark=told):
            serial = session.count
            session.began = session.count = serial + 1
            started = self._inner.start(rows_TD, ids_TK, weights_TK, sizes, *([] if mark is None else [mark]))
        return _Route(session, started, serial, self._number)

    def finish(self, started: _Route) -> Arrived:
        with self._session.exchange(_FINISH, started.serial, layer=self._number):
            arrived = self._inner.finish(started.inner)
        started.inner = arrived.route
        return dataclasses.replace(arrived, route=started)

    def refuse(self, device: torch.device) -> None:
        with self._announced(_REFUSE):  # while others may start a dispatch
            self._session.count += 1
            self._inner.refuse(device)


@final
class _Route(Route):
    """Stands in for a dispatch that has started, and then for its route.

    Attributes:
        inner: What the backend has started; then its route.
        serial: Number of the dispatch.
    """

    __slots__ = ("__weakref__", "_layer", "_session", "_told", "inner", "serial")

    def __init__(self, session: _Session, inner: Any, serial: int, layer: int | None) -> None:
        self._session, self.inner, self.serial, self._layer = session, inner, serial, layer
        self._told: set[int] = set()  # the backwards of this route so far
        session.routes[serial] = self

    def send(self, rows_TD: Tensor) -> NoReturn:
        raise StateError("join: dispatch(again=...) is not answered. Dispatch with the routing instead.")

    def combine(self, rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
        with self._session.exchange(_COMBINE, self.serial, layer=self._layer):
            return cast(Route, self.inner).combine(rows_RD, weights_R)

    def combine_backward(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        self._only_once(_COMBINE_BACKWARD, "combined twice. Only one backward of combine is answered.")
        with self._session.exchange(_COMBINE_BACKWARD, self.serial, layer=self._layer):
            return cast(Route, self.inner).combine_backward(grad_TD, rows_RD, weights_R)

    def dispatch_backward(self, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self._only_once(_DISPATCH_BACKWARD, "differentiated twice. Only one backward of dispatch is answered.")
        with self._session.exchange(_DISPATCH_BACKWARD, self.serial, layer=self._layer):
            return cast(Route, self.inner).dispatch_backward(grad_RD, grad_R)

    def _only_once(self, what: int, rule: str) -> None:
        if what in self._told:
            raise StateError(f"join: a dispatch was {rule}")
        self._told.add(what)
