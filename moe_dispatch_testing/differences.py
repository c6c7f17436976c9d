"""Ranks that differ: what one rank may do otherwise than its peer, and what both of them then come to.

In use, ranks are rarely alike: one has no tokens, one has frozen experts, one offloads activations. ``run_pair`` runs
one layer on two ranks, each in a ``Manner`` of its own, and compares outputs and gradients with a dense layer. The
conformance kit runs ``run_each_manner``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_dispatch.backends import Constraints, parse_backend
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatched import Dispatched
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch.types import Routing
from moe_dispatch_testing.case import BackendSpec, poisoned_memory
from moe_dispatch_testing.ranks import Ranks
from moe_dispatch_testing.reference import ConformanceError, expect_close, expect_equal
from moe_dispatch_testing.scenario import Batch, Scenario

MOST_TOKENS = 40
_PLAIN = Scenario(name="differences", tokens=(MOST_TOKENS,))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How one rank runs a step of the layer. The defaults are those of a rank that trains everything.

    Attributes:
        tokens: T, the number of its tokens.
        frozen: Which of "x", "weights" and "experts" require no grad.
        detached: Whether its experts return outputs without a history.
        output_dtype: Dtype to which its experts convert their outputs; None leaves them.
        hooks: Whether hooks of saved tensors copy what its autograd saves, as activation offloading does.
        autocast: Whether its experts run under autocast to bfloat16.
        retain_graph: Whether its backward keeps the graph.
        recorded: Whether it records gradients at all.
        carries: Name of what travels with its rows; None for nothing.
        keeps_routes: Whether it recomputes the layer on the routes of its forward.
    """

    tokens: int = 6
    frozen: frozenset[str] = frozenset()
    detached: bool = False
    output_dtype: torch.dtype | None = None
    hooks: bool = False
    autocast: bool = False
    retain_graph: bool = False
    recorded: bool = True
    carries: str | None = None
    keeps_routes: bool = False


MANNERS: dict[str, Manner] = {
    "trains everything": Manner(),
    "no tokens": Manner(tokens=0),
    "no tokens, constant weights": Manner(tokens=0, frozen=frozenset({"weights"})),
    "many tokens": Manner(tokens=MOST_TOKENS),
    "constant x": Manner(frozen=frozenset({"x"})),
    "constant weights": Manner(frozen=frozenset({"weights"})),
    "constant x and weights": Manner(frozen=frozenset({"x", "weights"})),
    "frozen experts": Manner(frozen=frozenset({"experts"})),
    "nothing requires grad": Manner(frozen=frozenset({"x", "weights", "experts"})),
    "detached outputs": Manner(detached=True),
    "outputs in float64": Manner(output_dtype=torch.float64),
    "outputs in bfloat16": Manner(output_dtype=torch.bfloat16),
    "hooks that copy": Manner(hooks=True),
    "autocast": Manner(autocast=True),
    "retain_graph": Manner(retain_graph=True),
    "no_grad": Manner(recorded=False),
    "carries": Manner(carries="start"),
    "carries another": Manner(carries="other"),
    "keeps routes": Manner(keeps_routes=True),
}
"""Manners by name. All pairs give the gradients of the dense layer, but for those that ``refusal`` names."""

SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph_safe": {"graph_safe": True},
    "chunks": {"chunks": 16},
    "chunks, recomputed": {"chunks": {"tokens": 16, "recompute": True}},
    "balanced": {"balance": {"name": "exact", "min_rows": 0}},
    "balanced, graph_safe": {"balance": "exact", "graph_safe": True},
}
"""Fields of the config in which the pairs are run, by name."""


def pairs(shift: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the manners of the two ranks: all pairs, or each manner once on each rank, with a partner by ``shift``."""
    names = [*MANNERS]
    if shift is None:
        yield from combinations_with_replacement(names, 2)
    else:
        yield from ((name, names[(at + shift) % len(names)]) for at, name in enumerate(names))


def refusal(config: DispatcherConfig, first: Manner, second: Manner) -> str | None:
    """Return a part of the error that both ranks must raise; None if they come to the gradients of the dense layer."""
    if (recorded := _recorded_apart(first, second)) or first.carries != second.carries:
        if config.graph_safe:
            return "ranks must make the same calls in the same order"
        return f"Ranks disagree on {'grad mode' if recorded else 'carry'}"
    return "parameter 0 of SlotWeights" if _frozen_apart(config, first, second) else None


def _frozen_apart(config: DispatcherConfig, first: Manner, second: Manner) -> bool:
    return config.balance is not None and ("experts" in first.frozen) != ("experts" in second.frozen)


def _recorded_apart(first: Manner, second: Manner) -> bool:
    return first.recorded != second.recorded or (first.recorded and first.keeps_routes != second.keeps_routes)


def is_run(config: DispatcherConfig, first: Manner, second: Manner) -> bool:
    """Return whether a pair has one outcome on all ranks.

    A rank that records no gradients, or carries something else, is seen by its peers only if the call exchanges
    something before rows travel, or in ``check`` of graph-safe mode. There the rows of all ranks must have the same
    number of bytes, or the transport fails. In graph-safe mode with balance, the backward waits for a rank with frozen
    experts. With balance, the experts of one rank may run as copies on the other, so the dense layer does not know
    whose outputs are detached; and weights travel too, which no rank expects that records no gradients.
    """
    needs, balanced = _needs(config.backend), config.balance is not None
    if needs.carries == "no" and (first.carries or second.carries):
        return False
    if balanced and (first.keeps_routes or second.keeps_routes):
        return False
    if config.graph_safe and _frozen_apart(config, first, second):
        return False
    if _recorded_apart(first, second) or first.carries != second.carries:
        if config.graph_safe:
            same_bytes = (first.carries is None) == (second.carries is None)
            return same_bytes and not (balanced and first.recorded != second.recorded)
        return needs.exchanges_counts or needs.equal_rows
    return not (config.balance is not None and (first.detached or second.detached))


def run_pair(backend: BackendSpec, setting: str, names: tuple[str, str], ranks: Ranks) -> bool:
    """Run the layer on two ranks in two manners. Return whether the pair was run; see ``is_run``.

    Args:
        backend: Name of the backend, or a mapping with its name and options.
        setting: Name in ``SETTINGS``.
        names: The manners of rank 0 and rank 1, names in ``MANNERS``.
        ranks: Ranks that run as threads.

    Raises:
        ConformanceError: A result is wrong, or only one rank refuses. A note names the rank.
    """
    manners = (MANNERS[names[0]], MANNERS[names[1]])
    scenario = _scenario(backend)
    config = DispatcherConfig.load(
        environment={},
        backend=backend,
        num_experts=scenario.num_experts,
        top_k=scenario.top_k,
        hidden_size=scenario.hidden,
        wire=scenario.wire,
        pad_multiple=4,
        max_tokens_per_rank=MOST_TOKENS if "graph_safe" in SETTINGS[setting] else None,
        **SETTINGS[setting],
    )
    if not is_run(config, *manners):
        return False
    told, batches = refusal(config, *manners), _batches(scenario, manners)
    expected = None if told else _dense(scenario, batches, manners)

    def body(group: dist.ProcessGroup) -> list[Tensor | None]:
        rank, dispatcher = group.rank(), Dispatcher(config, group)
        try:
            found = _layer(dispatcher, group, scenario, batches[rank], manners[rank])
        except InputError as error:
            if told is None or told not in str(error):
                raise
            return []
        finally:
            dispatcher.close()
        expect_equal("the refusal", None, told)
        return found

    with poisoned_memory():
        found = ranks.run(body, 2)
    if expected is not None:
        _compare(found, expected, scenario, manners)
    return True


def _scenario(backend: BackendSpec) -> Scenario:
    return _PLAIN.fitted(_needs(backend))


def _needs(backend: BackendSpec, scenario: Scenario = _PLAIN) -> Constraints:
    options = parse_backend(backend)
    assert options is not None
    return options.constraints(scenario.shape(2))


def _batches(scenario: Scenario, manners: Sequence[Manner]) -> list[Batch]:
    return [
        dataclasses.replace(scenario, tokens=(manner.tokens,), seed=rank).batches(1)[0]
        for rank, manner in enumerate(manners)
    ]


def _apply(sent: Dispatched, matrix_LWW: Tensor, bias_LD: Tensor) -> Tensor:
    """Apply experts in the dtype of the rows. A row of zeros does not stay zero."""
    blocks = sent.rows.unflatten(1, (-1, matrix_LWW.shape[1]))
    counts = sent.tokens_per_expert.tolist()
    *parts, slack = blocks.split([*counts, len(blocks) - sum(counts)])
    mixed = [part @ matrix for part, matrix in zip(parts, matrix_LWW, strict=True)]
    biases = [bias.expand(count, -1) for count, bias in zip(counts, bias_LD, strict=True)]
    outputs = torch.tanh(torch.cat(mixed).flatten(1) + torch.cat(biases).to(mixed[0].dtype))
    return torch.cat([outputs, torch.full_like(slack.flatten(1), float("nan"), dtype=outputs.dtype)])


def _layer(
    dispatcher: Dispatcher, group: dist.ProcessGroup, scenario: Scenario, batch: Batch, manner: Manner
) -> list[Tensor | None]:
    """Run one step on one rank. Return y and the gradients of x, the weights and the parameters of own experts."""
    rank, dtype = group.rank(), scenario.torch_dtype
    own = [
        each.chunk(2)[rank].to(dtype).requires_grad_("experts" not in manner.frozen) for each in _parameters(scenario)
    ]
    x = batch.x_TD.to(dtype).requires_grad_("x" not in manner.frozen)
    weights = batch.weights_TK.float().requires_grad_("weights" not in manner.frozen)

    carry = None if manner.carries is None else {manner.carries: _starts(x.detach())}

    def run(sent: Dispatched, *stacked: Tensor) -> Tensor:
        if carry is not None and dispatcher.config.balance is None:
            _expect_carried(sent)
        with torch.autocast("cpu", torch.bfloat16, enabled=manner.autocast):
            outputs = _apply(sent, *stacked)
        outputs = outputs.detach() if manner.detached else outputs
        return outputs if manner.output_dtype is None else outputs.to(manner.output_dtype)

    def call() -> Tensor:
        routing, config = Routing(batch.ids_TK, weights), dispatcher.config
        if config.chunks is not None:
            from moe_dispatch.dispatchers import run_in_chunks  # noqa: PLC0415 - the kit works without it

            return run_in_chunks(dispatcher, lambda sent: run(sent, *own), x, routing, carry=carry)
        sent = dispatcher.dispatch(x, routing, carry=carry)
        if config.balance is None:
            return dispatcher.combine(run(sent, *own), sent)
        from moe_dispatch.dispatchers import SlotWeights  # noqa: PLC0415 - the kit works without it

        landed, outputs = SlotWeights(dispatcher).run(sent, run, *own)
        return dispatcher.combine(outputs, landed)

    copies: AbstractContextManager[Any] = nullcontext()
    if manner.hooks:
        copies = torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor)
    with torch.set_grad_enabled(manner.recorded), copies:
        y = _recomputed(call) if manner.keeps_routes else call()
    if dispatcher.config.graph_safe:  # before the backward, in which the bytes of one rank may be others
        dispatcher.check()
    expect_equal("dtype of y", y.dtype, dtype)
    if manner.recorded:
        y.backward(batch.upstream_TD.to(dtype), retain_graph=manner.retain_graph)
    return [y.detach(), x.grad, weights.grad, *(each.grad for each in own)]


def _recomputed(call: Callable[[], Tensor]) -> Tensor:
    from moe_dispatch.recompute import keep_routes  # noqa: PLC0415 - the kit works without it

    y: Tensor = checkpoint(call, use_reentrant=False, context_fn=keep_routes)
    return y


def _starts(rows: Tensor) -> Tensor:
    """Return the bits of the first number of each row, int32, as bfloat16 has it after any way."""
    return rows[:, 0].bfloat16().view(torch.int16).int()


def _expect_carried(sent: Dispatched) -> None:
    """Each row carries its own first number, and -1 on padding."""
    assert sent.carried is not None
    (carried,) = sent.carried.values()
    counts = zip(sent.real_tokens_per_expert.tolist(), sent.tokens_per_expert.tolist(), strict=True)
    is_real = torch.cat([torch.arange(padded) < real for real, padded in counts])
    expected = torch.where(is_real, _starts(sent.rows.detach()[: len(is_real)]), -1)
    expect_equal("what rows carry", carried[: len(is_real)].tolist(), expected.tolist())


def _parameters(scenario: Scenario) -> tuple[Tensor, Tensor]:
    experts = scenario.experts()
    return experts.matrix_EWW, experts.bias_ED


def _dense(scenario: Scenario, batches: Sequence[Batch], manners: Sequence[Manner]) -> list[list[Tensor]]:
    """Compute the results of both ranks without a dispatcher, in float64."""
    leaves, local = scenario.experts().leaves(), scenario.num_experts // 2
    found = []
    for batch in batches:
        x, weights = batch.x_TD.clone().requires_grad_(), batch.weights_TK.clone().requires_grad_()
        y = torch.zeros_like(x)
        for expert in range(scenario.num_experts):
            output = leaves.apply(expert, x)
            if manners[expert // local].detached:
                output = output.detach()
            y = y + torch.where(batch.ids_TK == expert, weights, 0).sum(1, keepdim=True) * output
        y.backward(batch.upstream_TD)
        found.append([y.detach(), _gradient(x), _gradient(weights)])
    of_experts = [_gradient(each).chunk(2) for each in (leaves.matrix_EWW, leaves.bias_ED)]
    return [[*of_rank, *(each[rank] for each in of_experts)] for rank, of_rank in enumerate(found)]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _compare(
    found: list[list[Tensor | None]], expected: list[list[Tensor]], scenario: Scenario, manners: Sequence[Manner]
) -> None:
    rounds = any(one.autocast or one.output_dtype is torch.bfloat16 for one in manners)
    tolerance = 5e-2 if rounds or scenario.tolerance > 1e-3 else 1e-5
    for rank, (got, wanted, manner) in enumerate(zip(found, expected, manners, strict=True)):
        wants = {"x": {"x"}, "weights": {"weights"}, "experts' matrices": {"experts"}, "experts' biases": {"experts"}}
        for number, (what, of) in enumerate({"y": set[str](), **wants}.items()):
            tensor = got[number]
            if what != "y" and (not manner.recorded or of & manner.frozen):
                expect_equal(f"gradient of {what} on rank {rank}, which requires none", tensor, None)
            elif tensor is None:
                if what.startswith("experts") and manner.detached:
                    continue
                raise ConformanceError(f"gradient of {what} on rank {rank}: missing")
            else:
                label = what if what == "y" else f"gradient of {what}"
                expect_close(f"{label} on rank {rank}", tensor, wanted[number], tolerance)


def settings_of(backend: BackendSpec) -> list[str]:
    """Return the names of the settings that a backend supports."""
    needs = _needs(backend, dataclasses.replace(_PLAIN, graph_safe=True))
    return [name for name, fields in SETTINGS.items() if needs.graph_safe or "graph_safe" not in fields]


def run_each_manner(backend: BackendSpec, setting: str, ranks: Ranks) -> None:
    """Run each manner on rank 0, with the first partner that ``is_run`` takes. Each setting begins with another one.

    Raises:
        ConformanceError: A result is wrong, or some manners have no partner.
    """
    names, shift = [*MANNERS], 1 + 3 * [*SETTINGS].index(setting)
    count = 0
    for at, name in enumerate(names):
        partners = [names[(at + shift + other) % len(names)] for other in range(len(names))]
        count += any(_run_noted(backend, setting, (name, partner), ranks) for partner in partners)
    expect_equal("most manners were run", count >= len(MANNERS) - 4, True)


def run_pairs(backend: BackendSpec, setting: str, ranks: Ranks, shift: int | None = None) -> int:
    """Run pairs of manners, as ``pairs`` gives them, and return how many there were; see ``run_pair``."""
    return sum(_run_noted(backend, setting, names, ranks) for names in pairs(shift))


def _run_noted(backend: BackendSpec, setting: str, names: tuple[str, str], ranks: Ranks) -> bool:
    try:
        return run_pair(backend, setting, names, ranks)
    except Exception as error:
        error.add_note(f"rank 0: {names[0]}; rank 1: {names[1]}")
        raise
