"""Subclasses of Dispatcher: a submodule may be called experts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moe_dispatch import Dispatched, Dispatcher
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
