"""Layers over vendors' libraries, whose emulation runs on memory of simulated devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from tests.simulated_cuda.bytes import SETTINGS, Setting
from tests.simulated_cuda.deep_ep import deep_ep_on_devices

TOKENS, EXPERTS, TOP_K, HIDDEN = 24, 8, 2, 512
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS}
OVER_LIBRARIES = [key for key, setting in SETTINGS.items() if setting.release is not None]


def layer(setting: Setting, device: str) -> tuple[list[Tensor], list[int]]:
    """Run a layer whose experts leave NaN in padding.

    Returns:
        On the CPU: the result, the gradients of real rows and of padding, of their weights, of x and of the routing's
        weights; and the number of rows of each expert, with padding.
    """
    fields = SAFE if setting.fields else {}
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "pad_multiple": 16}
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    weights, ids = (each.to(device) for each in scores.topk(TOP_K))
    x, upstream = (torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device) for _ in range(2))
    assert setting.release is not None
    with deep_ep_on_devices(setting.release, device):
        dispatcher = build_dispatcher(DispatcherConfig(backend=setting.backend, **sizes, **fields), None)
        sent = dispatcher.dispatch(x.requires_grad_(), Routing(ids, weights.requires_grad_()))
        padded, real = sent.tokens_per_expert.tolist(), sent.real_tokens_per_expert.tolist()
        is_real = torch.zeros(len(sent.rows), dtype=torch.bool)
        is_padding, begin = is_real.clone(), 0
        for all_rows, real_rows in zip(padded, real, strict=True):
            is_real[begin : begin + real_rows] = True
            is_padding[begin + real_rows : begin + all_rows] = True
            begin += all_rows
        outputs = torch.where(is_real.to(device).unsqueeze(1), sent.rows.detach() * 2, float("nan")).requires_grad_()
        y = dispatcher.combine(outputs, sent)
        grad_rows, grad_weights = torch.autograd.grad(y, (outputs, sent.weights), upstream)
        grads = torch.autograd.grad((sent.rows, sent.weights), (x, weights), (grad_rows, grad_weights))
        dispatcher.close()
    found = [each.detach().cpu() for each in (y, grad_rows, grad_weights, *grads)]
    y, grad_rows, grad_weights, grad_x, grad_routing = found
    return [y, grad_rows[is_real], grad_rows[is_padding], grad_x, grad_weights[is_real], grad_routing], padded


@pytest.mark.parametrize("key", OVER_LIBRARIES, ids=" ".join)
def test_a_layer_on_devices_has_the_results_of_the_cpu(key: tuple[str, str]) -> None:
    """Bits of rows are equal. Gradients of weights are added in another order."""
    (mine, counts), (theirs, others) = (layer(SETTINGS[key], device) for device in ("cuda", "cpu"))
    assert counts == others
    assert all(map(torch.equal, mine[:4], theirs[:4]))
    assert not mine[2].any()
    for found, expected in zip(mine[4:], theirs[4:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
