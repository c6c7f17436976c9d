"""The auxiliary loss of docs/your-model.md on ranks with unequal parts of packed sequences, against one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import THD, Masked, Rows
from tests.pages import relative, run_page
from tests.ranks import run_ranks

EXPERTS, TOP_K, HIDDEN = 8, 2, 16


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("your-model.md", until="## Groups and overlap")


def router_and_tokens(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x_TD = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    x_TD += torch.linspace(-2, 2, count, dtype=torch.float64).unsqueeze(1)  # parts choose other experts
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator, dtype=torch.float64) / 4
    return x_TD, weight.requires_grad_()


def loss_of(page: dict[str, Any], x_TD: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    scores = (x_TD @ weight.T).softmax(1)
    loss: Tensor = page["balance_loss"](scores, scores.topk(TOP_K).indices, *arguments)
    return loss


@pytest.mark.parametrize("parts", [(3, 9), (1, 0, 11, 4), (5, 5)], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_shares_of_unequal_parts_are_the_loss_of_all_tokens(
    page: dict[str, Any], parts: tuple[int, ...], padding: int
) -> None:
    count = sum(parts)
    x_TD, weight = router_and_tokens(count)
    want = loss_of(page, x_TD, weight, Rows())
    want.backward()
    ends = torch.tensor([0, *parts]).cumsum(0).tolist()
    bounds = list(pairwise(ends))

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        rank = group.rank()
        begin, end = bounds[rank]
        own = weight.detach().clone().requires_grad_()
        part = torch.cat([x_TD[begin:end], torch.full((padding * rank, HIDDEN), 5.0, dtype=torch.float64)])
        real = torch.arange(len(part)) < end - begin
        share = loss_of(page, part, own, Masked(real), group)
        share.backward()
        assert own.grad is not None
        return share.detach(), own.grad

    shares, gradients = zip(*run_ranks(body, len(parts)), strict=True)
    torch.testing.assert_close(sum(shares), want.detach())
    assert relative(torch.stack(gradients).sum(0), weight.grad) < 1e-12


def test_a_zigzag_shard_of_packed_sequences_balances_them_all(page: dict[str, Any]) -> None:
    """Sequences of 5 and 8 tokens, padded to 8 each: under context parallelism the ranks hold 7 and 6 tokens."""
    packed = THD([0, 5, 13], [0, 8, 16])
    x_TD, weight = router_and_tokens(16)
    loss_of(page, x_TD, weight, packed).backward()
    rows = [torch.tensor([0, 1, 6, 7, 8, 9, 14, 15]), torch.tensor([2, 3, 4, 5, 10, 11, 12, 13])]

    def body(group: dist.ProcessGroup) -> Tensor:
        own = weight.detach().clone().requires_grad_()
        loss_of(page, x_TD[rows[group.rank()]], own, packed.shard(group.rank(), 2, "zigzag"), group).backward()
        assert own.grad is not None
        return own.grad

    assert relative(torch.stack(run_ranks(body, 2)).sum(0), weight.grad) < 1e-12
