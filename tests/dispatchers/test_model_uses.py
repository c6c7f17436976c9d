"""What users do to a model: copy, save, convert, freeze, tie, share and hook. A layer still computes what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from moe_dispatch import Dispatched, Dispatcher, Routing
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, Group, expert_weights, on_ranks, random_routing, small_config
from tests.dispatchers.layer import random_rows as rows_of
from tests.idle_groups import garbage_in_idle_groups

RANKS = 2
LOCAL = NUM_EXPERTS // RANKS


@final
class Layer(Dispatcher):
    def __init__(self, group: Group, **fields: Any) -> None:
        super().__init__(small_config("alltoall", **fields), group)
        own = slice(group.rank() * LOCAL, (group.rank() + 1) * LOCAL)
        self.matrices = nn.Parameter(expert_weights()[own].clone())

    def run_experts(self, sent: Dispatched) -> Tensor:
        return torch.tanh(sent.grouped_mm(sent.rows, self.matrices))


@final
class Model(nn.Module):
    """Two layers. A checkpoint, a copy or a conversion of it is one of both."""

    def __init__(self, group: Group, **fields: Any) -> None:
        super().__init__()
        self.group = (group,)  # in a tuple that a copy of the model shares
        self.first, self.second = Layer(group, **fields), Layer(group, **fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        memo[id(self.group)] = self.group
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        y: Tensor = self.second(self.first(x, routing), routing)
        return y


def batch(rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Routing]:
    return rows_of(5 + rank, seed=rank, dtype=dtype), random_routing(5 + rank, seed=rank)


def dense(x: Tensor, routing: Routing, *stacks: Tensor) -> Tensor:
    """Layers with whole stacks of matrices, (E, D, D), in float64."""
    y = x.double()
    for stack in stacks:
        outputs_EK = torch.stack([torch.tanh(y @ matrix) for matrix in stack.double()])
        chosen_TKD = outputs_EK.transpose(0, 1).gather(1, routing.topk_ids.unsqueeze(2).expand(-1, -1, HIDDEN))
        y = (chosen_TKD * routing.topk_weights.double().unsqueeze(2)).sum(1)
    return y


def whole(matrices: Tensor, group: Group) -> Tensor:
    """The matrices of all ranks."""
    parts = [torch.empty_like(matrices) for _ in range(RANKS)]
    group.allgather([parts], [matrices.detach().contiguous()]).wait()
    return torch.cat(parts)


def check(model: Any, group: Group, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5) -> None:
    """Compare the output and the gradients of the two layers with those of all experts in one place."""
    stacks = [whole(layer.matrices, group).requires_grad_() for layer in (model.first, model.second)]
    wanted = [dense(*batch(rank, dtype), *stacks) for rank in range(RANKS)]
    torch.stack([y.sum() for y in wanted]).sum().backward()
    model.zero_grad()
    x, routing = batch(group.rank(), dtype)
    y = model(x.requires_grad_(), routing)  # a full backward hook warns if no input requires grad
    y.sum().backward()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted[group.rank()], rtol=tolerance, atol=tolerance)
    own = slice(group.rank() * LOCAL, (group.rank() + 1) * LOCAL)
    for layer, stack in zip((model.first, model.second), stacks, strict=True):
        assert stack.grad is not None
        if layer.matrices.requires_grad:
            expected = stack.grad[own].double()
            torch.testing.assert_close(layer.matrices.grad.double(), expected, rtol=20 * tolerance, atol=20 * tolerance)


def deepcopy(model: Model, group: Group) -> Any:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    return twin


def average(model: Model, group: Group) -> Any:
    averaged = AveragedModel(model)
    with torch.no_grad():
        model.first.matrices.add_(1)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    return averaged.module


def load(model: Model, group: Group) -> Any:
    other = Model(group)
    with torch.no_grad():
        other.first.matrices.zero_()
    other.load_state_dict(model.state_dict())
    return other


def begin_on_meta(model: Model, group: Group) -> Any:
    with torch.device("meta"):
        other = Model(group)
    assert other.first.matrices.is_meta
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    return other


def freeze_and_thaw(model: Model, group: Group) -> Any:
    model.requires_grad_(False)
    with torch.no_grad():
        model(*batch(group.rank()))
    model.requires_grad_(True)
    return model


def freeze_the_first(model: Model, group: Group) -> Any:
    model.first.requires_grad_(False)
    return model


def evaluate(model: Model, group: Group) -> Any:
    model.eval()
    with torch.inference_mode():
        model(*batch(group.rank()))
    return model.train()


def replace_a_layer(model: Model, group: Group) -> Any:
    model.second.close()
    model.second = Layer(group)
    return model


def share_a_layer(model: Model, group: Group) -> Any:
    """Its gradient is that of both uses."""
    model.second = model.first
    shared = model.first.matrices
    stack = whole(shared, group).requires_grad_()
    torch.stack([dense(*batch(rank), stack, stack).sum() for rank in range(RANKS)]).sum().backward()
    model(*batch(group.rank())).sum().backward()
    assert stack.grad is not None
    assert shared.grad is not None
    torch.testing.assert_close(shared.grad, stack.grad[group.rank() * LOCAL :][:LOCAL].float(), rtol=1e-4, atol=1e-4)
    model.second = Layer(group)
    return model


def tie(model: Model, group: Group) -> Any:
    model.second.matrices = model.first.matrices
    return share_a_layer(model, group)


def hook(model: Model, group: Group) -> Any:
    called: list[str] = []
    model.first.register_forward_pre_hook(lambda *_: called.append("before"))
    model.first.register_forward_hook(lambda *_: called.append("after"))
    model.first.register_full_backward_hook(lambda *_: called.append("backward"))
    model.first.matrices.register_post_accumulate_grad_hook(lambda _: called.append("gradient"))
    model(batch(group.rank())[0].requires_grad_(), batch(group.rank())[1]).sum().backward()
    assert sorted(called) == ["after", "backward", "before", "gradient"]
    return model


USES: dict[str, Callable[[Model, Any], Any]] = {
    use.__name__: use
    for use in (
        deepcopy,
        average,
        load,
        begin_on_meta,
        freeze_and_thaw,
        freeze_the_first,
        evaluate,
        replace_a_layer,
        share_a_layer,
        tie,
        hook,
    )
}


@pytest.mark.parametrize("fields", [{}, {"graph_safe": True, "max_tokens_per_rank": 8}, {"chunks": 4}], ids=str)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_numbers_stay_those_of_all_experts_in_one_place(use: Callable[..., Any], fields: dict[str, Any]) -> None:
    on_ranks(lambda group: check(use(Model(group, **fields), group), group), RANKS)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_another_dtype(dtype: torch.dtype, tolerance: float) -> None:
    on_ranks(lambda group: check(Model(group).to(dtype), group, dtype, tolerance), RANKS)


def functional(group: Group) -> None:
    model = Model(group)
    given = {name: weight.detach() / 2 for name, weight in model.named_parameters()}
    stacks = [whole(weight, group) for weight in given.values()]
    y = functional_call(model, given, batch(group.rank()))
    torch.testing.assert_close(y.double(), dense(*batch(group.rank()), *stacks), rtol=1e-5, atol=1e-5)
    check(model, group)


def test_functional_call_uses_the_weights_that_it_is_given() -> None:
    on_ranks(functional, RANKS)


def test_a_twin_trains_by_itself() -> None:
    """Its step moves no weight of the original, and both may have forwards alive."""

    def body(group: Group) -> None:
        model = Model(group)
        twin = copy.deepcopy(model)
        before = model.first.matrices.detach().clone()
        y, other = model(*batch(group.rank())), twin(*batch(group.rank()))
        other.sum().backward()
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
        assert torch.equal(model.first.matrices, before)
        assert not torch.equal(twin.first.matrices, before)
        y.sum().backward()
        assert model.first.matrices.grad is not None
        for layer in (model.first, model.second):
            layer.close()
        check(twin, group)  # which has shares of its own

    on_ranks(body, RANKS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_with_experts_that_idle() -> None:
    with garbage_in_idle_groups():
        dispatcher = Dispatcher(small_config("local", graph_safe=True, max_tokens_per_rank=8))
        matrices = expert_weights().requires_grad_()

        @torch.compile(backend="aot_eager", fullgraph=True)
        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            sent = dispatcher.dispatch(x, Routing(ids, weights))
            return dispatcher.combine(sent.grouped_mm(sent.rows, matrices), sent)

        run(torch.ones(3, HIDDEN), torch.tensor([[0, 5]] * 3), torch.ones(3, 2)).sum().backward()
    assert matrices.grad is not None
    assert [index for index, grad in enumerate(matrices.grad) if grad.any()] == [0, 5]
