"""The layouts that adapters of quantised rows make, against the formulas of the libraries, and their gradients."""

from __future__ import annotations

import gc
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_dispatch import Dispatched, build_dispatcher, quantised
from moe_dispatch.errors import InputError, StateError
from tests.dispatchers.layer import expert_weights, random_routing, random_rows, small_config
from tests.pages import ROOT

EXPERTS, HIDDEN, TOKENS = 8, 256, 90
Fields = dict[str, Any]
MXFP8: Fields = {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32}
GRADIENTS: Fields = {
    "wire": {"dtype": "mxfp8", "gradients": True, "deliver": "quantised"},
    "pad_multiple": 32,
    "weights": "experts",
}
FLOAT8: Fields = {"wire": {"dtype": "float8_e4m3fn", "deliver": "quantised"}, "pad_multiple": 128}
SAFE: Fields = {"graph_safe": True, "max_tokens_per_rank": TOKENS}


def _sent(x: Tensor | None = None, **fields: Any) -> Dispatched:
    hidden = fields.pop("hidden_size", HIDDEN)
    x = random_rows(TOKENS, hidden, dtype=torch.bfloat16) if x is None else x
    way = random_routing(len(x))
    way.topk_ids[way.topk_ids == 3] = 4  # expert 3 gets no row
    sent: Dispatched = build_dispatcher(small_config("local", hidden_size=hidden, **fields)).dispatch(x, way)
    return sent


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _groups(sent: Dispatched) -> list[slice]:
    return [
        slice(end - count, end) for end, count in zip(sent.offs.tolist(), sent.tokens_per_expert.tolist(), strict=True)
    ]


def to_blocked(scales: Tensor) -> Tensor:
    """One by one, as cuBLAS documents it: blocks of 128 x 4 in row-major order, each in 32 lines of 16 bytes."""
    rows, columns = (-(-size // multiple) * multiple for size, multiple in zip(scales.shape, (128, 4), strict=True))
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (row // 128) * (columns // 4) + column // 4
            within = (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            out[block * 512 + within] = scales.view(torch.uint8)[row, column]
    return out


@pytest.mark.parametrize("fields", [MXFP8, {**MXFP8, "pad_multiple": 128}, {**MXFP8, **SAFE}], ids=str)
def test_scales_of_each_expert_are_in_the_blocks_that_torch_documents(fields: Fields) -> None:
    sent = _sent(**fields)
    assert sent.quantised is not None
    scales = sent.quantised.scales
    aligned = sent.pad_multiple == 128
    got = quantised.blocked_scales(scales, sent.offs, aligned=aligned)
    assert got.shape[1] == HIDDEN // 32
    assert got.shape[0] % 128 == 0
    parts = [to_blocked(scales[some]) for some in _groups(sent) if some.stop > some.start]
    expected = torch.cat(parts)
    assert torch.equal(_bits(got).view(-1)[: expected.numel()], _bits(expected).view(-1))
    rest = _bits(got).view(-1)[expected.numel() :]
    if "graph_safe" not in fields:  # otherwise the scales of slack follow
        assert rest.eq(0).all()


def test_blocks_are_filled_up_with_zeros() -> None:
    for rows, columns in ((32, 5), (200, 7), (128, 4)):
        scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        got = quantised.blocked_scales(scales, torch.tensor([rows], dtype=torch.int32))
        expected = _bits(to_blocked(scales)).view(-1)
        assert got.shape[1] == -(-columns // 4) * 4
        assert torch.equal(_bits(got).view(-1)[: expected.numel()], expected)


@pytest.mark.parametrize("fields", [MXFP8, {**MXFP8, **SAFE}], ids=["eager", "graph-safe"])
def test_torch_accepts_the_arguments(fields: Fields) -> None:
    """A meta kernel checks dtypes, strides and the sizes of scales. The kernel itself needs a GPU."""
    arguments = quantised.torch_arguments(_sent(**fields), expert_weights(EXPERTS, HIDDEN, torch.bfloat16)[:, :, :96])
    inspect.signature(F.scaled_grouped_mm).bind(**arguments)  # type: ignore[attr-defined]
    a, b, scale_a, scale_b = (arguments[name].to("meta") for name in ("mat_a", "mat_b", "scale_a", "scale_b"))
    # The operator behind scaled_grouped_mm has no meta kernel; its predecessor takes the same tensors.
    out = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=arguments["offs"].to("meta"))
    assert (out.shape, out.dtype) == ((a.shape[0], 96), torch.bfloat16)
    with pytest.raises(RuntimeError, match="scale"):
        torch._scaled_grouped_mm(a, b, scale_a, scale_b[:, :-1], offs=arguments["offs"].to("meta"))


def _packed(scales: Tensor) -> Tensor:
    """DeepGEMM's int32 for each row and four columns of e8m0: the first column in the lowest byte."""
    wide = F.pad(scales.view(torch.uint8).long(), (0, -scales.shape[1] % 4)).view(len(scales), -1, 4)
    return (wide * torch.tensor([1, 1 << 8, 1 << 16, 1 << 24])).sum(2).to(torch.int32)


@pytest.mark.parametrize("fields", [{**MXFP8, "pad_multiple": 128}, FLOAT8], ids=["SM100", "SM90"])
def test_scales_for_deep_gemm_are_mn_major_and_aligned(fields: Fields) -> None:
    sent = _sent(**fields)
    rows = sent.quantised
    assert rows is not None
    values, scales = quantised.deep_gemm_pair(sent)
    assert values is rows.values
    expected = _packed(rows.scales) if rows.recipe == "mxfp8" else rows.scales
    assert torch.equal(scales, expected)
    assert scales.dtype == (torch.int32 if rows.recipe == "mxfp8" else torch.float32)
    assert scales.stride() == (1, -(-len(values) // 4) * 4)


@pytest.mark.parametrize("fields", [FLOAT8, {**FLOAT8, **SAFE}], ids=["eager", "graph-safe"])
def test_layouts_for_deep_gemm(fields: Fields) -> None:
    sent = _sent(**fields)
    layout, ends = quantised.deep_gemm_layout(sent), quantised.deep_gemm_layout(sent, psum=True)
    expected = torch.full((len(sent.in_graph),), -1, dtype=torch.int32)
    for expert, (some, real) in enumerate(zip(_groups(sent), sent.real_tokens_per_expert.tolist(), strict=True)):
        expected[some.start : some.start + real] = expert
        assert int(ends[expert]) == some.start + real
    assert torch.equal(layout, expected)
    assert (layout.dtype, ends.dtype) == (torch.int32, torch.int32)


# Parameters of GroupedTensor of transformer-engine d0067d0, and those that have no default.
NEEDED = {"shape", "dtype", "num_tensors"}
PARAMETERS = NEEDED | {
    *("shapes", "quantizer", "data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "scale"),
    *("columnwise_amax", "first_dims", "last_dims", "tensor_offsets", "offsets", "scale_inv_offsets"),
    *("columnwise_scale_inv_offsets", "requires_grad", "stride", "with_gemm_swizzled_scales"),
}


class _GroupedTensor(torch.Tensor):
    """Keeps its parameters."""

    given: dict[str, Any]

    def __new__(cls, shape: tuple[int, int], dtype: torch.dtype, **more: Any) -> _GroupedTensor:
        made: _GroupedTensor = torch.Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype))
        made.given = {"shape": shape, "dtype": dtype, **more}
        return made


def test_transformer_engine_gets_the_parameters_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for package in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"):
        module(package)
    module("transformer_engine.pytorch.tensor.grouped_tensor", GroupedTensor=_GroupedTensor)
    module(
        "transformer_engine.pytorch.tensor.mxfp8_tensor",
        MXFP8Quantizer=lambda fp8_dtype, *, rowwise=True, columnwise=True: (fp8_dtype, rowwise, columnwise),
    )
    module("transformer_engine_torch", DType=SimpleNamespace(kFloat8E4M3="e4m3"))
    x = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    sent = _sent(x, **{**MXFP8, "pad_multiple": 128})
    rows, made = sent.quantised, quantised.te_grouped_tensor(sent)
    assert rows is not None
    assert isinstance(made, _GroupedTensor)
    assert (made.shape, made.dtype, made.requires_grad) == (rows.values.shape, torch.bfloat16, True)
    given = made.given
    assert given.keys() >= NEEDED
    assert given.keys() <= PARAMETERS
    assert given["quantizer"] == ("e4m3", True, False)
    assert given["num_tensors"] == EXPERTS
    assert torch.equal(given["data"], _bits(rows.values).view(-1))
    assert torch.equal(given["scale_inv"], _bits(rows.scales).view(-1))
    assert given["first_dims"].tolist() == sent.tokens_per_expert.tolist()
    assert given["tensor_offsets"].tolist() == [0, *(HIDDEN * sent.offs.long()).tolist()]
    assert given["with_gemm_swizzled_scales"] is False


def _by_hand(sent: Dispatched, weights: Tensor) -> Tensor:
    """What a kernel computes: the products of values and scales, in the dtype of the weights."""
    assert sent.quantised is not None
    rows = sent.quantised
    blocks = rows.values.float().view(*rows.scales.shape, -1) * rows.scales.float().unsqueeze(-1)
    return sent.grouped_mm(blocks.view(rows.values.shape).to(weights.dtype), weights)


@pytest.mark.parametrize(
    ("fields", "width"),
    [(MXFP8, 64), (FLOAT8, 60), ({**MXFP8, **SAFE}, 60)],  # 60: 120 bytes, which torch's grouped GEMM does not take
    ids=["mxfp8", "float8", "graph-safe"],
)
def test_a_gemm_without_a_backward_gets_the_gradients_of_the_widened_rows(fields: Fields, width: int) -> None:
    found = []
    for run in (
        lambda sent, w: quantised.grouped_gemm(sent, w, _by_hand),
        lambda sent, w: sent.grouped_mm(sent.rows, w),
    ):
        x = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        weights = expert_weights(EXPERTS, HIDDEN, torch.bfloat16)[:, :, :width].contiguous().requires_grad_()
        sent = _sent(x, **fields)
        y = run(sent, weights)
        unused_R1 = (quantised.deep_gemm_layout(sent) < 0).unsqueeze(1)
        y.backward(torch.ones_like(y).masked_fill_(unused_R1, float("nan")))  # nothing may read it there
        assert x.grad is not None
        assert weights.grad is not None
        assert not weights.grad.isnan().any()
        found.append([y[: sent.offs[-1]], x.grad, weights.grad])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
    assert found[0][1].abs().sum() > 0


def test_a_gemm_without_rows_has_gradients() -> None:
    x = random_rows(0, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weights = expert_weights(EXPERTS, HIDDEN, torch.bfloat16).requires_grad_()
    quantised.grouped_gemm(_sent(x, **MXFP8), weights, lambda sent, w: sent.grouped_mm(sent.rows, w)).sum().backward()
    assert weights.grad is not None
    assert not weights.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_change_widened_rows_in_place(dtype: torch.dtype) -> None:
    x = random_rows(TOKENS, HIDDEN, dtype=dtype).requires_grad_()
    sent = _sent(x, **MXFP8)
    expected = sent.rows.detach() > 0
    sent.rows.relu_()[: sent.offs[-1]].sum().backward()
    assert x.grad is not None
    assert x.grad.sum() == expected.sum()


def _live_bytes(dtype: torch.dtype) -> int:
    gc.collect()
    with warnings.catch_warnings():  # some objects warn when they are asked for their class
        warnings.simplefilter("ignore")
        live = [each for each in gc.get_objects() if type(each) is Tensor and each.dtype == dtype]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in live}.values())


@pytest.mark.parametrize("reads", ["grouped_gemm", "gradient_as"])
def test_widened_rows_do_not_wait_for_the_backward(reads: str) -> None:
    weights = expert_weights(EXPERTS, HIDDEN, torch.bfloat16).requires_grad_()
    x = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    sent = _sent(x, **GRADIENTS)
    before = _live_bytes(torch.bfloat16)
    if reads == "grouped_gemm":  # ``sent`` lives on
        y = quantised.grouped_gemm(sent, weights, lambda sent, w: sent.rows.new_empty(len(sent.in_graph), 0))
    else:
        y = quantised.gradient_as(
            sent, sent.rows.new_empty(len(sent.in_graph), 0, requires_grad=True), quantised.mx_tensor
        )
        del sent
        assert _live_bytes(torch.float8_e4m3fn) == 0  # the backward does not need them
    assert y.requires_grad
    assert _live_bytes(torch.bfloat16) == before


def test_backwards_that_cannot_work_are_refused() -> None:
    x = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weights = expert_weights(EXPERTS, HIDDEN, torch.bfloat16).requires_grad_()
    y = quantised.grouped_gemm(_sent(x, **MXFP8), weights, _by_hand)
    with pytest.raises(StateError, match=r"grouped_gemm: double backward is not supported\. Use create_graph=False"):
        torch.autograd.grad(y.square().sum(), weights, create_graph=True)
    with pytest.raises(StateError, match="gradient_as: the gradient is not what combine sent back"):
        _gradient_as(_sent(x, **GRADIENTS)).sum().backward()


def test_rows_that_were_first_read_in_inference_mode_still_train() -> None:
    x = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weights = expert_weights(EXPERTS, HIDDEN, torch.bfloat16).requires_grad_()
    sent = _sent(x, **MXFP8)
    with torch.inference_mode():
        assert sent.rows.is_inference()
    with torch.no_grad():
        assert not sent.rows.is_inference()
    sent.grouped_mm(sent.rows, weights)[: sent.offs[-1]].sum().backward()
    assert weights.grad is not None


def _gradient_as(sent: Dispatched) -> Tensor:
    return quantised.gradient_as(sent, sent.rows, quantised.mx_tensor)


def _torch_arguments(*shape: int) -> Callable[[Dispatched], Any]:
    return lambda sent: quantised.torch_arguments(sent, torch.ones(shape))


DOUBLES = torch.ones(8, HIDDEN, 32, dtype=torch.float64)
NARROW: Fields = {**MXFP8, "pad_multiple": 128, "hidden_size": 160}


@pytest.mark.parametrize(
    ("fields", "adapter", "told"),
    [
        ({"pad_multiple": 32}, quantised.deep_gemm_pair, 'the rows are not quantised. Set wire.deliver="quantised"'),
        (FLOAT8, _torch_arguments(8, HIDDEN, 32), "must be 'mxfp8', got"),
        (MXFP8, quantised.deep_gemm_pair, "pad_multiple must be a multiple of 128, got 32"),
        (MXFP8, _torch_arguments(4, HIDDEN, 32), r"\(8, 256\), got \(4,"),
        (MXFP8, _torch_arguments(8, 64, 32), r"\(8, 256\), got \(8, 64,"),
        (MXFP8, lambda sent: quantised.grouped_gemm(sent, DOUBLES, _by_hand), "or float32, got float64"),
        ({**MXFP8, "weights": "experts"}, _gradient_as, "with wire.gradients=True and .*, got False"),
        ({**GRADIENTS, "weights": "combine"}, _gradient_as, r'and weights="experts", got .*combine'),
        (NARROW, quantised.te_grouped_tensor, "hidden_size must be a multiple of 128, got 160"),
        (MXFP8, lambda sent: quantised.deep_gemm_layout(sent, psum=True), "psum needs pad_multiple=128"),
    ],
)
def test_rows_that_a_gemm_does_not_take_are_refused(fields: Fields, adapter: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        adapter(_sent(**fields))


def test_the_examples_of_the_page_call_what_there_is() -> None:
    """They need the libraries, so only torchao's run, in tests/integration."""
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    examples = re.findall(r'^```python title="(.*?)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    assert examples
    for title, code in examples:
        compile(code, title, "exec")
        for name in re.findall(r"quantised\.(\w+)\(", code):
            assert callable(getattr(quantised, name))
