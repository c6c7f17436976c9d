"""Subclasses of Dispatcher: a submodule may be called experts, and names that would hide or be hidden are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch import Dispatched, Dispatcher
from moe_dispatch.errors import InputError
from tests.dispatchers.layer import HIDDEN, NUM_EXPERTS, random_routing, random_rows, small_config


class MoE(Dispatcher):
    def __init__(self) -> None:
        super().__init__(small_config("local"))
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_EXPERTS))

    def run_experts(self, sent: Dispatched) -> Tensor:
        return sent.per_expert(self.experts)


def expected(moe: MoE, x: Tensor) -> Tensor:
    routing, y = random_routing(len(x)), torch.zeros_like(x)
    for slot in range(routing.topk_ids.shape[1]):
        for row, (index, weight) in enumerate(
            zip(routing.topk_ids[:, slot].tolist(), routing.topk_weights[:, slot], strict=True)
        ):
            y[row] += weight * moe.experts[index](x[row])
    return y


def test_experts_is_a_submodule_with_the_usual_keys() -> None:
    moe, other = MoE(), MoE()
    assert isinstance(moe.experts, nn.ModuleList)
    assert list(moe.state_dict())[:2] == ["experts.0.weight", "experts.0.bias"]
    other.load_state_dict(moe.state_dict())
    x = random_rows(6)
    for layer in (moe, other, copy.deepcopy(moe)):
        torch.testing.assert_close(layer(x, random_routing(6)), expected(moe, x))


def test_experts_as_a_submodule_compiles() -> None:
    moe, x = MoE(), random_rows(6)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, random_routing(6)), expected(moe, x))


def test_method_experts_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Old defines a method experts, which .* does not call\. Rename it to run_exp"):
        type("Old", (Dispatcher,), {"__qualname__": "Old", "experts": lambda self, sent: sent.rows})


@pytest.mark.parametrize("name", ["run_experts", "dispatch", "combine", "layout_of", "forward", "metrics", "config"])
def test_submodules_and_parameters_need_names_of_their_own(name: str) -> None:
    moe = MoE()
    for value in (nn.Linear(2, 2), nn.Parameter(torch.zeros(2))):
        with pytest.raises(InputError, match=rf"MoE\.{name}: a submodule or parameter must have a name .*Choose anoth"):
            setattr(moe, name, value)
    assert f"{name}.weight" not in moe.state_dict()
    x = random_rows(6)
    torch.testing.assert_close(moe(x, random_routing(6)), expected(moe, x))


def test_attributes_that_are_no_submodules_are_left_alone() -> None:
    moe = MoE()
    moe.name, moe.calls = "layers.7", 0
    assert "name='layers.7'" in repr(moe)
