"""A stand-in for transformer_engine.pytorch.triton.permutation: the recorded arguments of a version, torch inside.

It has never been held against the real library on a GPU. What it does is read from that library's kernels: sums in
float32 in the order of the table, rounded into the dtype of the rows; products rounded into the gradient's; rows that
nobody writes are left undefined (NaN here); an empty launch is refused, as CUDA refuses it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("te_signatures.json").read_text())
VERSIONS: list[str] = list(RECORDED["versions"])
NAN = float("nan")
# Arguments that we have no use for.
UNUSED = {"pad_offsets", "probs", "scale", "scale_hidden_dim", "permuted_probs"}


def stand_in(version: str) -> tuple[ModuleType, list[str]]:
    """The module of a version, and a list that grows with the name of every function called."""
    module, calls = ModuleType(RECORDED["module"]), list[str]()
    for name, arguments in RECORDED["versions"][version]["functions"].items():
        setattr(module, name, _with_arguments(arguments.split(), _FUNCTIONS[name], calls))
    return module, calls


def _with_arguments(names: list[str], function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments  # a TypeError where the arguments are not the recorded ones
        assert bound["num_tokens"] > 0
        for name in UNUSED & set(bound):
            assert bound.pop(name) is None, name
        calls.append(function.__name__)
        return function(**bound)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    table = torch.full((num_tokens, 2 * num_experts + 1), -7, dtype=torch.int32)
    position = routing_map.t().reshape(-1).cumsum(0).view(num_experts, num_tokens).t() - 1
    for token in range(num_tokens):
        experts = routing_map[token].nonzero().view(-1).flip(0)  # theirs sorts positions from the last to the first
        table[token, : len(experts)] = position[token, experts].int()
        table[token, num_experts : num_experts + len(experts)] = experts.int()
        table[token, -1] = len(experts)
    return table


def _pairs(row_id_map: Tensor, num_experts: int) -> list[list[tuple[int, int]]]:
    """By token, (position, expert) in the order of the table."""
    assert row_id_map.dtype == torch.int32
    assert row_id_map.shape[1] == 2 * num_experts + 1
    rows = row_id_map.tolist()
    return [list(zip(row[: row[-1]], row[num_experts : num_experts + row[-1]], strict=True)) for row in rows]


def permute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int
) -> tuple[Tensor, None, None]:
    assert inp.shape == (num_tokens, hidden_size)
    out = inp.new_full((num_out_tokens, hidden_size), NAN)
    for token, pairs in enumerate(_pairs(row_id_map, num_experts)):
        for position, _ in pairs:
            out[position] = inp[token]
    return out, None, None


def unpermute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None, num_tokens: int, num_experts: int, hidden_size: int
) -> tuple[Tensor, None]:
    out = torch.zeros(num_tokens, hidden_size)
    for token, pairs in enumerate(_pairs(row_id_map, num_experts)):
        for position, expert in pairs:
            weight = 1 if merging_probs is None else merging_probs[token, expert].float()
            out[token] += inp[position, :hidden_size].float() * weight
    return out.to(inp.dtype), None


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    assert fwd_output_grad.shape == (num_tokens, hidden_size)
    act_grad = fwd_output_grad.new_full((num_out_tokens, hidden_size), NAN)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    for token, pairs in enumerate(_pairs(row_id_map, num_experts)):
        gradient = fwd_output_grad[token].float()
        for position, expert in pairs:
            act_grad[position] = gradient * merging_probs[token, expert].float()
            probs_grad[token, expert] = gradient @ fwd_input[position].float()
    return act_grad, probs_grad


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
    )
}
