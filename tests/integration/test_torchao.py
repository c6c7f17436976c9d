"""Quantised rows in torchao: its quantisation on the CPU, its swizzle, and its emulated grouped GEMM."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing, build_dispatcher, quantised
from moe_dispatch.capabilities.quantised.formats import Mxfp8, quantise
from tests.dispatchers.layer import Group, expert_weights, on_ranks, random_routing, random_rows, small_config
from tests.pages import ROOT

with warnings.catch_warnings():  # what torchao 0.18 does when it is imported
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao")
    from torchao.prototype.moe_training import mxfp8_grouped_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
    from torchao.prototype.mx_formats.utils import to_blocked
    from torchao.quantization.quantize_.common import KernelPreference

EMULATED: dict[str, Any] = {"kernel_preference": KernelPreference.EMULATED, "wgrad_with_hp": True}
EXPERTS, HIDDEN, WIDTH, TOKENS = 8, 256, 64, 40
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS}
CUTS = {1: [40], 2: [23, 17], 4: [9, 0, 28, 3]}
FORMS: list[tuple[Any, int]] = [
    ("local", 1),
    *((name, size) for name in ("alltoall", "allgather") for size in (1, 2, 4)),
    ({"name": "alltoall", "reduction": "exact"}, 4),
    ({"name": "alltoall_by_node", "ranks_per_node": 2}, 4),
]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _dequantised(values: Tensor, scales: Tensor, *, out_dtype: torch.dtype, scale_block_size: int) -> Tensor:
    blocks = values.float().view(len(values), -1, scale_block_size)
    return (blocks * scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)).view(values.shape).to(out_dtype)


def _examples() -> dict[str, str]:
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    return dict(re.findall(r'^```python title="(.*?)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL))


def _special(dtype: torch.dtype) -> Tensor:
    rows = torch.randn(12, 64).to(dtype)
    values = [0.0, -0.0, 1e-40, -1e-40, 2.0**-127, 448 * 2.0**-127, 2.0**-118, torch.finfo(dtype).max]
    for row, value in enumerate(values):
        rows[row] = value
    rows[8, 3], rows[9, 3], rows[10, 3] = math.inf, -math.inf, math.nan
    return rows


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchao's emulation widens rows in the backward by a kernel for GPUs."""
    monkeypatch.setattr(mxfp8_grouped_mm, "triton_mxfp8_dequant_dim0", _dequantised)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "wide", "special", "bits"])
def test_the_bits_are_those_of_rceil(kind: str, dtype: torch.dtype) -> None:
    rows = torch.randn(300, 128)
    if kind == "wide":
        rows *= torch.exp2(torch.randint(-140, 120, (300, 4)).float()).repeat_interleave(32, 1)
    rows = _special(dtype) if kind == "special" else rows.to(dtype)
    if kind == "bits":
        rows = torch.randint(0, 256, (300, 32 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    values, scales = quantise(rows, Mxfp8)
    their_scales, their_values = to_mx(rows, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(_bits(scales), _bits(their_scales))
    is_nan = their_values.float().isnan()  # of which the sign depends on the processor
    assert torch.equal(_bits(values)[~is_nan], _bits(their_values)[~is_nan])
    assert values.float()[is_nan].isnan().all()


def test_the_swizzle_is_theirs() -> None:
    scales = torch.randint(0, 255, (256, 12), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = quantised.blocked_scales(scales, torch.tensor([256], dtype=torch.int32), aligned=True)
    assert torch.equal(_bits(got).view(-1), _bits(to_blocked(scales)).view(-1))


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize(("backend", "size"), FORMS)
def test_dispatch_then_emulated_gemm_equals_quantising_after_dispatch(
    backend: Any, size: int, fields: dict[str, Any]
) -> None:
    """Outputs and gradients, bit for bit: the rows of a plain dispatch are quantised by torchao itself."""
    if fields and not isinstance(backend, str):
        pytest.skip("this form is not graph-safe")
    x_TD, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16), random_routing(TOKENS)
    weights_EHD = expert_weights(EXPERTS, HIDDEN, torch.bfloat16)[:, :WIDTH]
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "pad_multiple": "mxfp8", **fields}

    def body(group: Group) -> None:
        rank = 0 if group is None else group.rank()
        routing = Routing(*(part.split(CUTS[size])[rank] for part in (way.topk_ids, way.topk_weights)))
        found = []
        for delivers in (True, False):
            wire = {"wire": {"dtype": "mxfp8", "deliver": "quantised"}} if delivers else {}
            x = x_TD.split(CUTS[size])[rank].clone().requires_grad_()
            weights = weights_EHD.chunk(size)[rank].clone().requires_grad_()
            sent = build_dispatcher(small_config(backend, **sizes, **wire), group).dispatch(x, routing)
            if delivers:
                rows = quantised.mx_tensor(sent, kernel_preference=KernelPreference.EMULATED)
                assert isinstance(rows, MXTensor)
            else:
                rows = sent.rows
            y = mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm(rows, weights.transpose(1, 2), sent.offs, **EMULATED)
            y = y[: int(sent.offs[-1])]
            y.backward(random_rows(len(y), WIDTH, seed=5, dtype=torch.bfloat16))
            found.append((y, x.grad, weights.grad))
        (y, grad_x, grad_weights), (other_y, other_x, other_weights) = found
        assert torch.equal(y, other_y)
        assert grad_x is not None
        assert grad_x.abs().sum() > 0 or not len(grad_x)
        # The plain dispatch sends gradients in bfloat16 too, because the model is bfloat16.
        assert torch.equal(grad_x, other_x)
        # Its weights are multiplied by rows that were not rounded.
        torch.testing.assert_close(grad_weights, other_weights, rtol=0.1, atol=0.5)

    on_ranks(body, size)


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_gemm_gets_the_gradient_as_it_travelled(size: int) -> None:
    """Bit for bit what it computes if it quantises the gradient of a plain dispatch itself."""
    x_TD, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16), random_routing(TOKENS)
    weights_EHD = expert_weights(EXPERTS, HIDDEN, torch.bfloat16)
    names: dict[str, Any] = {"quantised": quantised, "KernelPreference": KernelPreference}
    exec(_examples()["torchao, last GEMM"], names)
    narrow = {"wire": {"dtype": "mxfp8", "gradients": True, "deliver": "quantised"}}

    def body(group: Group) -> None:
        rank = 0 if group is None else group.rank()
        routing = Routing(*(part.split(CUTS[size])[rank] for part in (way.topk_ids, way.topk_weights)))
        found = []
        for fields in ({}, narrow):
            config = small_config("alltoall", hidden_size=HIDDEN, pad_multiple="mxfp8", weights="experts", **{**fields})
            dispatcher, weights = (
                build_dispatcher(config, group),
                weights_EHD.chunk(size)[rank].clone().requires_grad_(),
            )
            x = x_TD.split(CUTS[size])[rank].clone().requires_grad_()
            sent = dispatcher.dispatch(x, routing)
            hidden = random_rows(len(sent.in_graph), HIDDEN, seed=3, dtype=torch.bfloat16).requires_grad_()
            y = mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm(hidden, weights.mT, sent.offs, **EMULATED)
            if fields:
                y = names["with_quantised_gradient"](sent, y)
            dispatcher.combine(y, sent).backward(random_rows(len(x), HIDDEN, seed=5, dtype=torch.bfloat16))
            found.append((hidden.grad, weights.grad))
        (grad, grad_weights), (other, other_weights) = found
        assert grad is not None
        assert other is not None
        assert torch.equal(grad, other)
        assert grad.abs().sum() > 0
        # torchao multiplies the hidden rows by the widened gradient here, and by one that was not rounded there.
        assert grad_weights is not None
        assert other_weights is not None
        assert (grad_weights - other_weights).norm() < 0.04 * other_weights.norm()

    with mock.patch.object(mxfp8_grouped_mm, "_compute_dgrad", wraps=mxfp8_grouped_mm._compute_dgrad) as computed:
        on_ranks(body, size)
    given = [type(call.args[0]) for call in computed.call_args_list]
    assert given.count(MXTensor) == given.count(Tensor) == size


def test_the_example_of_the_page_runs() -> None:
    code = _examples()
    x = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    names: dict[str, Any] = {"group": None, "x": x, "routing": random_routing(TOKENS), "quantised": quantised}
    names["w"] = expert_weights(EXPERTS, HIDDEN, torch.bfloat16)
    exec("from moe_dispatch import DispatcherConfig, build_dispatcher", names)
    exec(code["torchao"], names)
    exec(code["all"], names)
    names["y"].sum().backward()
    assert names["y"].shape == x.shape
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
