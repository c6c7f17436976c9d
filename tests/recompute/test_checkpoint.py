"""A checkpoint that recomputes once, also where a pipeline schedule splits the backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from moe_dispatch import Routing
from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError
from moe_dispatch.recompute import checkpoint
from tests.dispatchers.layer import Group, on_ranks, outcomes, raises_everywhere
from tests.recompute.layer import WIDTH, D, E, K, assert_equal, tokens
from tests.recompute.passes import WAYS, Block, Live, Passes, Way, counted

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
Case = Callable[[Way, Block, Tensor], Tensor]


def whole_block(way: Way, block: Block, x: Tensor) -> Tensor:
    return way(block, x)


def by_keyword(way: Way, block: Block, x: Tensor) -> Tensor:
    return way(lambda scale, *, x: block(x * scale), torch.tensor(1.5), x=x)


def to_the_end(way: Way, block: Block, x: Tensor) -> Tensor:
    return way(block, x, early_stop=False)


def nested(way: Way, block: Block, x: Tensor) -> Tensor:
    return way(lambda x: way(block, x.sin()).tanh(), x)


def three_deep(way: Way, block: Block, x: Tensor) -> Tensor:
    return way(lambda x: way(lambda x: way(block, x.sin()).exp(), x.cos()).sin(), x)


def in_bfloat16(way: Way, block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return way(lambda x: block(x).float(), x)


def by_policy(way: Way, block: Block, x: Tensor) -> Tensor:
    """Products are saved, and so is the dispatch, which operators make."""
    saved = [torch.ops.aten.mm.default, torch.ops.moe_dispatch.dispatch.default]

    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return way(block, x, context_fn=partial(create_selective_checkpoint_contexts, policy))


def halves(way: Way, block: Block, x: Tensor) -> Tensor:
    return way(block.last, way(block.first, x))


CASES: list[Case] = [whole_block, by_keyword, to_the_end, nested, three_deep, in_bfloat16, by_policy, halves]


def stepped(
    group: Group, case: Case, how: str, fields: dict[str, Any], *, split: bool = True
) -> tuple[list[Tensor], int, int]:
    """Train with three micro-batches that are live together.

    Returns:
        All gradients; how often the block has run; and the number of exchanges in the last passes of the micro-batches.
    """
    block = Block(group, **fields)
    micro_batches = [tokens(group, seed=seed) for seed in range(3)]
    passes = [Passes(block, x, case(WAYS[how], block, x)) for x in micro_batches]
    if split:
        for each in (passes[1], passes[0], passes[2]):
            each.inputs()
    with counted(block) as exchanged:
        for each in (passes[2], passes[0], passes[1]):
            each.weights() if split else each.whole()
    if block.layer.dispatcher.config.graph_safe:
        block.layer.dispatcher.check()
    block.layer.dispatcher.close()
    grads = [each.grad for each in (*micro_batches, *block.parameters()) if each.grad is not None]
    assert len(grads) == 3 + 5
    return grads, block.runs, exchanged.total()


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("case", CASES)
def test_a_split_backward_recomputes_as_often_as_a_whole_one(case: Case, fields: dict[str, Any]) -> None:
    """Gradients have the bits of a run without checkpoints, and the pass for weights exchanges nothing."""

    def body(group: Group, how: str, split: bool) -> tuple[list[Tensor], int, int]:
        return stepped(group, case, how, fields, split=split)

    wanted, found = (on_ranks(partial(body, how=how, split=True), 2) for how in ("plain", "once"))
    whole, torchs = (on_ranks(partial(body, how=how, split=False), 2) for how in ("once", "torch"))
    assert_equal([grads for grads, *_ in found], [grads for grads, *_ in wanted])
    assert_equal([grads for grads, *_ in whole], [grads for grads, *_ in torchs])
    for (_, runs, exchanges), (_, wholes, _), (_, its, _) in zip(found, whole, torchs, strict=True):
        assert (runs, wholes, exchanges) == (its, its, 0)


def test_dropout_in_micro_batches_whose_passes_alternate() -> None:
    """A recomputation draws as its forward did, also under autocast, and leaves the generator alone."""

    def run(how: str) -> list[Tensor]:
        block = Block(None, dropout=0.3, backend="local")
        xs = [tokens(None, seed=seed) for seed in range(3)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            passes = [Passes(block, x, in_bfloat16(WAYS[how], block, x)) for x in xs]
            for number in (1, 2, 0):
                passes[number].inputs()
            for number in (0, 1, 2):
                passes[number].weights()
            draw = torch.rand(3)
        block.layer.dispatcher.close()
        assert block.runs == (3 if how == "plain" else 6)
        return [draw, *[x.grad for x in xs], *[p.grad for p in block.parameters()]]  # type: ignore[list-item]

    assert_equal([run("once")], [run("plain")])


def test_a_weight_that_is_used_twice() -> None:
    """The pass for it goes through what is between its two uses, so this is computed once more, and right."""

    def case(way: Way, block: Block, x: Tensor) -> Tensor:
        return way(lambda x: block.last(block(x)), x)

    def body(group: Group, how: str) -> tuple[list[Tensor], int, int]:
        return stepped(group, case, how, {})

    wanted, found = (on_ranks(partial(body, how=how), 2) for how in ("plain", "once"))
    assert_equal([grads for grads, *_ in found], [grads for grads, *_ in wanted])
    assert [runs for _, runs, _ in found] == [3 * 3] * 2


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_graph_that_is_kept(split: bool) -> None:
    """A second backward through the same graph recomputes again, as with torch's checkpoint."""

    def body(group: Group, how: str) -> tuple[list[Tensor], int]:
        block, x = Block(group), tokens(group)
        y = WAYS[how](block, x)
        grads = list[Tensor]()
        for factor in (1.0, 2.0):
            if split:
                grads += torch.autograd.grad(y, x, torch.full_like(y, factor), retain_graph=True)
            else:
                y.backward(torch.full_like(y, factor), retain_graph=factor == 1.0)
        y.sum().backward() if split else None
        block.layer.dispatcher.close()
        return [*grads, x.grad, *[each.grad for each in block.parameters()]], block.runs  # type: ignore[list-item]

    wanted, torchs, found = (on_ranks(partial(body, how=how), 2) for how in ("plain", "torch", "once"))
    assert_equal([grads for grads, _ in found], [grads for grads, _ in wanted])
    assert [runs for _, runs in found] == [runs for _, runs in torchs]


def more(block: Block, x: Tensor) -> Tensor:
    for _ in range(40):  # as many as the forward has saved, before the dispatch
        x = x.sin()
    return block.last(block.first(x))


def fewer(block: Block, x: Tensor) -> Tensor:
    return block.first(x + 0.5)


def others(block: Block, x: Tensor) -> Tensor:
    y = block.first(x)
    return torch.tanh(torch.cat([y, y]) @ block.behind)[: len(y)]


def fewer_in_front(block: Block, x: Tensor) -> Tensor:
    return block.last(block.layer(x))


DIFFERENT = {"more": more, "fewer": fewer, "others": others, "fewer in front": fewer_in_front}
SAVES = "must save the tensors of its forward, got "


@pytest.mark.parametrize("fields", [{}, SAFE, {"debug": True}], ids=["eager", "graph-safe", "debug"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_rank_that_saves_other_tensors_in_a_recomputation(name: str, split: bool, fields: dict[str, Any]) -> None:
    """All ranks take part in all exchanges, and then raise."""

    def body(group: Group) -> None:
        block, x = Block(group, **fields), tokens(group)

        def function(x: Tensor) -> Tensor:
            differs = group.rank() == 1 and torch._C._current_graph_task_id() != -1
            return DIFFERENT[name](block, x) if differs else block(x)

        passes = Passes(block, x, checkpoint(function, x))
        try:
            try:
                passes.inputs() if split else passes.whole()
            except RuntimeError as error:
                raise error.__cause__ or error from None  # torch's pipelines add what they were doing
            if split:
                passes.weights()
            if "graph_safe" in fields:
                block.layer.dispatcher.check()
        finally:
            block.layer.dispatcher.close()

    found = outcomes(body, 2)
    raises_everywhere(found, MoEDispatchError, "'layers.1' " + SAVES)
    assert isinstance(found[1], InputError)


def test_a_rank_that_skips_a_dispatch_in_a_recomputation() -> None:
    def body(group: Group) -> None:
        block, x = Block(group), tokens(group)

        def function(x: Tensor) -> Tensor:
            if group.rank() == 1 and torch._C._current_graph_task_id() != -1:
                return x.sin()
            return block(block(x))

        try:
            checkpoint(function, x).sum().backward()
        finally:
            block.layer.dispatcher.close()

    text = "must make the dispatches of its forward, got 0 of 2."
    raises_everywhere(outcomes(body, 2), MoEDispatchError, text)


def test_other_tensors_where_nothing_is_dispatched() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() if torch._C._current_graph_task_id() == -1 else x.view(1, -1).sin()[0]

    with pytest.raises(InputError, match=r"checkpoint: a recomputation must save .*, got float32 \(1, 6\) on cpu in"):
        checkpoint(function, torch.randn(6, requires_grad=True)).sum().backward()


def test_memory_of_passes() -> None:
    """A whole backward needs no more than torch's, but for the kept routes; behind a pass for inputs, the rest is free.

    Until its pass, a weight needs the input and the gradient of its product. No tensor waits for the garbage collector.
    """
    num_tokens = 1000
    routes = num_tokens * K * (2 + 4 + 4)

    def run(how: str, *, split: bool) -> tuple[int, int]:
        block, x = Block(None, dropout=0.3, backend="local"), torch.randn(num_tokens, D, requires_grad=True)
        gc.collect()
        gc.disable()
        with Live() as live:
            passes = Passes(block, x, WAYS[how](block, x))
            passes.inputs() if split else passes.whole()
            del passes.x, passes.y, x
            left = live.bytes
            if split:
                passes.weights()
        gc.enable()
        block.layer.dispatcher.close()
        return live.peak, left

    peak, base = run("once", split=False)
    torchs, its_base = run("torch", split=False)
    assert peak <= torchs + routes
    assert base <= its_base
    peak, left = run("once", split=True)
    plains, its_left = run("plain", split=True)
    rows = K * num_tokens
    inputs = 3 * num_tokens * D + rows * D + rows * WIDTH  # x, those of the router and the last layer, of both experts
    gradients = 3 * num_tokens * D + num_tokens * E + rows * WIDTH + rows * D  # that of x is in x.grad
    order = 8 * (3 * rows + num_tokens)  # that of the rows, in the route
    assert peak <= plains + routes
    assert left - base <= 4 * (inputs + gradients) + order + routes < its_left - base


def test_graphs_that_are_dropped() -> None:
    """Before, between and behind the passes, nothing is left of a graph, without the garbage collector."""

    def count(until: int) -> list[int]:
        block, found = Block(None, backend="local"), []
        gc.collect()
        gc.disable()
        for _ in range(4):
            x = tokens(None)
            passes = Passes(block, x, checkpoint(block, x))
            for part in (passes.inputs, passes.weights)[:until]:
                part()
            del passes, x
            found.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
        gc.enable()
        block.layer.dispatcher.close()
        return found

    for until in range(3):
        found = count(until)
        assert found[1] == found[-1]


def test_saved_tensors_that_are_read_without_a_backward() -> None:
    block, x = Block(None, backend="local"), tokens(None)
    y = checkpoint(block, x)
    saved = y.grad_fn._saved_result  # type: ignore[union-attr]
    torch.testing.assert_close(saved, y, rtol=0, atol=0)
    y.sum().backward()
    assert block.runs == 2
    block.layer.dispatcher.close()


def test_a_backward_inside_of_a_checkpointed_function() -> None:
    def function(block: Block, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(x.sin().cos().sum(), x)
        return block(x * slope)

    def run(how: str) -> list[Tensor]:
        block, x = Block(None, backend="local"), tokens(None)
        WAYS[how](function, block, x).sum().backward()
        block.layer.dispatcher.close()
        return [x.grad, *[each.grad for each in block.parameters()]]  # type: ignore[list-item]

    assert_equal([run("once")], [run("plain")])


def test_in_the_place_of_torchs_checkpoint() -> None:
    """A framework's wrapper calls it with torch's options."""

    def run(wrapped: bool) -> list[Tensor]:
        block, x = Block(None, backend="local"), tokens(None)
        call = checkpoint_wrapper(block, checkpoint_fn=checkpoint, preserve_rng_state=False) if wrapped else block
        passes = Passes(block, x, call(x))
        passes.inputs()
        passes.weights()
        block.layer.dispatcher.close()
        assert block.runs == 1 + wrapped
        return [x.grad, *[each.grad for each in block.parameters()]]  # type: ignore[list-item]

    assert_equal([run(True)], [run(False)])


def test_a_reentrant_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint: use_reentrant must be False, got True\. For a reentrant"):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)


def test_without_gradients() -> None:
    """Nothing is kept in an evaluation."""
    block, x = Block(None, backend="local"), tokens(None)
    with torch.no_grad():
        y = checkpoint(block, x)
        assert torch.equal(y, block(x))
    assert not y.requires_grad
    block.layer.dispatcher.close()


def test_in_compiled_code() -> None:
    """A compiled call dispatches anew in its recomputation."""
    block, x = Block(None, backend="local", **SAFE), tokens(None)

    def layer(x: Tensor) -> Tensor:
        weights, ids = (x @ block.layer.gate).softmax(1).topk(K, 1)
        sent = block.layer.dispatcher.dispatch(x, Routing(ids, weights))
        return block.layer.dispatcher.combine(sent.rows.sin(), sent)

    wanted = torch.autograd.grad(layer(x).sum(), x)
    compiled = torch.compile(lambda x: checkpoint(layer, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), wanted)
    block.layer.dispatcher.close()
