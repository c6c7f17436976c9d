"""What the tests of docs/migration.md share: the code of the page by its title, and the experts that it calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
EXPERTS, TOP_K = 8, 2


def run_block(title: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code block with this title, such as "After: Megatron"; return its names."""
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(rf'^```python title="{title}"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    exec(compile(code, f"{PAGE} ({title})", "exec"), names)
    return names


@final
class Layer:
    """The experts of one rank: each is ``tanh(rows @ matrix)``."""

    def __init__(self, rank: int, ranks: int, *, hidden: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(99)
        matrices_EDD = torch.randn(EXPERTS, hidden, hidden, generator=generator) / hidden**0.5
        self.matrices_LDD = matrices_EDD.chunk(ranks)[rank].to(dtype).requires_grad_()

    @staticmethod
    def inputs(rank: int, tokens: int, *, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, ids and float32 weights of one rank."""
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
        return x, ids, torch.rand(tokens, TOP_K, generator=generator)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.matrices_LDD[index])

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([self.expert(index, part) for index, part in enumerate(parts)])

    def dense(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What a layer with all experts on one rank computes, summed in float32."""
        y = torch.zeros(x.shape)
        for index in range(EXPERTS):
            weight_T1 = (weights * (ids == index)).sum(1, keepdim=True)
            y = y + self.expert(index, x).float() * weight_T1
        return y.to(x.dtype)

    def names(self) -> dict[str, Any]:
        """The names that the code of the pages expects."""
        return {
            "expert": self.expert,
            "experts": self.experts,
            "num_experts": EXPERTS,
            "hidden_size": self.matrices_LDD.shape[1],
        }


def largest_error(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if not got.numel():
        return 0.0
    return float((got - want).detach().abs().max() / want.detach().abs().max())
