"""What a compiled call refuses: its operators, when they run, with eager's errors; tracing, what cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_dispatch import BSHD, Routing, Rows
from moe_dispatch.errors import ConfigError, InputError, StateError
from tests.compile.layer import Layer, dispatcher_for, layer_of, tensors

compiled = partial(torch.compile, fullgraph=True, backend="eager")


WRONG: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
    "hidden": (lambda x, ids, w: (x[:, :8], ids, w), "x has hidden size 8, the config has 16"),
    "rows": (lambda x, ids, w: (x[:9], ids, w), "x has 9 tokens but routing has 10"),
    "ids": (lambda x, ids, w: (x, ids.int(), w), "topk_ids must be torch.int64"),
    "weights": (lambda x, ids, w: (x, ids, w.detach().long()), "topk_weights must be a floating dtype"),
    "lengths": (lambda x, ids, w: (x, ids, w[:5]), r"must be \(T, top_k=2\), got \(10, 2\) and \(5, 2\)"),
    "slots": (lambda x, ids, w: (x, ids[:, :1], w[:, :1]), r"must be \(T, top_k=2\), got \(10, 1\)"),
    "dtype": (lambda x, ids, w: (x.detach().long(), ids, w), "x must be torch.bfloat16"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors_are_refused_as_in_eager_mode(what: str) -> None:
    wrong, text = WRONG[what]
    run = layer_of(dispatcher_for())
    for function in (run, compiled(run)):
        given = [x.detach().requires_grad_(x.requires_grad) for x in wrong(*tensors(10, 0, torch.float32))]
        with pytest.raises(InputError, match=text):
            function(*given)


def test_wrong_expert_rows_are_refused() -> None:
    run = compiled(layer_of(dispatcher_for(), lambda sent: sent.rows[:3]))
    with pytest.raises(InputError, match=r"Dispatcher.combine: rows must be floating \(\d+, 16\)"):
        run(*tensors(10, 0, torch.float32))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, of its own tracing
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepep", {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32}),
        ("deepep", {}),
        ("hybridep", {}),
    ],
)
def test_backends_that_cannot_be_compiled(name: str, fields: dict[str, Any]) -> None:
    run = layer_of(dispatcher_for({"name": name, "emulate": True}, hidden_size=256, **fields))
    x, ids, weights = tensors(10, 0, torch.bfloat16)
    inputs = x.detach().repeat(1, 16), ids, weights
    run(*inputs)
    with pytest.raises(ConfigError, match=rf"torch\.compile needs a backend whose state is tensors, got '{name}'"):
        compiled(run)(*inputs)


def test_backend_that_cannot_be_compiled_runs_where_compiling_is_disabled() -> None:
    dispatcher = dispatcher_for("alltoall")
    inputs = [tensor.detach() for tensor in tensors(10, 0, torch.float32)]
    run = torch.compiler.disable(layer_of(dispatcher))
    assert torch.equal(torch.compile(lambda *args: run(*args) * 2, backend="eager")(*inputs), run(*inputs) * 2)


def test_closed_dispatcher() -> None:
    dispatcher = dispatcher_for("local", max_tokens_per_rank=77)  # a channel of its own
    run, inputs = compiled(layer_of(dispatcher)), tensors(10, 0, torch.float32)
    y = run(*inputs)
    dispatcher.close()
    with pytest.raises(StateError, match=r"channel 'local-.*' is not open"):
        run(*inputs)
    with pytest.raises(StateError, match="is not open"):
        y.sum().backward()


def test_double_backward_of_operators() -> None:
    layer = Layer(dispatcher_for(), torch.float32)
    x, ids, weights = tensors(10, 0, torch.float32)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.moe_dispatch.dispatch.default])
    y = checkpoint(layer, x, ids, weights, use_reentrant=False, context_fn=contexts)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(StateError, match="double backward is not supported"):
        gradient.sum().backward()


UNTRACEABLE: dict[str, Callable[..., Any]] = {
    "plan": lambda d, sent, x, r: d.dispatch(x, r, d.plan(like=x)).rows,
    "eager": lambda d, sent, x, r: d.combine(sent.rows, sent),
    "again": lambda d, sent, x, r: d.dispatch(x, again=sent).rows,
    "routing": lambda d, sent, x, r: d.dispatch(x, x).rows,
    "layout": lambda d, sent, x, r: d.dispatch(x, r, BSHD()).rows,
}
# Not beside the calls, because the error shows the line of the call.
TEXTS = {
    "plan": "Dispatcher.plan: compile both verbs",
    "eager": "Dispatcher.combine: compile both verbs",
    "again": "Dispatcher.dispatch: compile both verbs",
    "routing": "pass Routing",
    # torch 2.10 shows the parts of this text, each with its kind; later versions show the text.
    "layout": r"x must be .*\[B, S, D\]",
}


@pytest.mark.parametrize("what", UNTRACEABLE)
def test_what_cannot_be_traced_says_what_to_do(what: str) -> None:
    dispatcher, call = dispatcher_for(), UNTRACEABLE[what]
    x, ids, weights = tensors(10, 0, torch.float32)
    sent = dispatcher.dispatch(x, Routing(ids, weights))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=TEXTS[what]):
        compiled(lambda *args: call(dispatcher, sent, args[0], Routing(*args[1:])))(x, ids, weights)


# A condition of torch._check that is false ends in an internal error in torch 2.10, with the text of the refusal.
REFUSALS = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.InternalTorchDynamoError)


def test_plans_that_do_not_fit() -> None:
    dispatcher, inputs = dispatcher_for(), tensors(10, 0, torch.float32)
    run = layer_of(dispatcher)
    for plan, text in (
        (dispatcher_for("alltoall").plan(like=inputs[0]), "of another config or group"),
        (dispatcher.plan(like=inputs[0][:5]), "the plan is for another number of tokens"),
        (dispatcher.plan(Rows(5)), "for a compiled region, make the plan with"),
    ):
        torch._dynamo.reset()
        with pytest.raises(REFUSALS, match=text):
            compiled(run)(*inputs, plan)
