"""``deliver="quantised"``: the bits that experts get, the gradients, and which calls and configs it works with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher, quantised
from moe_dispatch._quantisation import RECIPES, Quantised, RecipeName, quantise, widen
from moe_dispatch.backends.local import LocalOptions
from moe_dispatch.backends.rank_major import expand
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.errors import ConfigError
from moe_dispatch.types import QuantisedRows
from tests.dispatchers.layer import (
    Group,
    by_operators,
    cut_layer,
    doubled,
    expert_weights,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)

HIDDEN, TOKENS = 512, 20
CUTS = {1: [20], 2: [13, 7], 4: [9, 0, 8, 3]}
FORMS: list[tuple[Any, int]] = [
    ("local", 1),
    *((name, size) for name in ("alltoall", "allgather") for size in (1, 2, 4)),
    ({"name": "alltoall", "reduction": "exact"}, 4),
    ({"name": "alltoall", "levels": 2, "ranks_per_node": 2}, 4),
    ({"name": "alltoall", "levels": 2, "ranks_per_node": 2, "reduction": "exact"}, 4),
    *(({"name": "deepep", "emulate": release}, 2) for release in ("v1.2.1", "v2-2.1.0", "v2.5.0")),
    ({"name": "deepep", "emulate": "v2.5.0", "expand": True, "deterministic": False}, 2),
    ({"name": "deepep", "emulate": "v2.5.0", "ranks_per_node": 1, "deterministic": False}, 2),
    *(({"name": "hybridep", "emulate": release}, 2) for release in ("hybridep-34152ae", "hybridep-746")),
]
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS}


def _config(backend: Any, recipe: RecipeName | None, **fields: Any) -> DispatcherConfig:
    quantised = {} if recipe is None else {"wire_dtype": recipe, "deliver": "quantised"}
    if (
        recipe is not None
        and isinstance(backend, dict)
        and ("ranks_per_node" in backend or backend["name"] == "hybridep")
    ):
        quantised["grad_wire_dtype"] = recipe  # without it, some of them refuse
    padded = 32 if recipe is None else RECIPES[recipe].row_multiple
    return small_config(backend, **{"hidden_size": HIDDEN, "pad_multiple": padded, **quantised, **fields})


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _inputs(group: Group, size: int) -> tuple[Tensor, Routing]:
    rank = 0 if group is None else group.rank()
    way = random_routing(TOKENS)
    way.topk_ids[::6, 1] = -1
    x_TD = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16)
    return x_TD.split(CUTS[size])[rank], Routing(
        *(part.split(CUTS[size])[rank] for part in (way.topk_ids, way.topk_weights))
    )


def _expect(found: QuantisedRows | None, rows_RD: Tensor, counts: Tensor, real: Tensor, recipe: RecipeName) -> None:
    """Compare with rows that arrived unquantised and are quantised here."""
    assert found is not None
    assert found.recipe == recipe
    values, scales = quantise(rows_RD, RECIPES[recipe])
    ends, starts = counts.cumsum(0), counts.cumsum(0) - counts
    assert torch.equal(found.offs, ends.int())
    assert found.values.is_contiguous()
    assert found.scales.is_contiguous()
    assert found.values.shape == rows_RD.shape
    one = 1.0 if scales.dtype == torch.float32 else 127
    got_scales = found.scales if scales.dtype == torch.float32 else _bits(found.scales)
    for start, end, count in zip(starts.tolist(), ends.tolist(), real.tolist(), strict=True):
        some = slice(start, start + count)
        assert torch.equal(_bits(found.values[some]), _bits(values[some]))
        assert torch.equal(_bits(found.scales[some]), _bits(scales[some]))
        assert found.values[start + count : end].float().eq(0).all()
        assert got_scales[start + count : end].eq(one).all()


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("recipe", ["mxfp8", "float8_e4m3fn"])
@pytest.mark.parametrize(("backend", "size"), FORMS)
def test_rows_have_the_bits_of_rows_that_are_quantised_after_dispatch(
    backend: Any, size: int, recipe: RecipeName, fields: dict[str, Any]
) -> None:
    if fields and isinstance(backend, dict) and backend["name"] == "alltoall":
        pytest.skip("this form is not graph-safe")

    def body(group: Group) -> None:
        multiple = RECIPES[recipe].row_multiple
        plain = build_dispatcher(_config(backend, None, **{**fields, "pad_multiple": multiple}), group)
        dispatcher, (x, way) = build_dispatcher(_config(backend, recipe, **fields), group), _inputs(group, size)
        expected, sent = plain.dispatch(x, way), dispatcher.dispatch(x, way)
        _expect(sent.quantised, expected.rows, sent.tokens_per_expert, expected.real_tokens_per_expert, recipe)
        assert torch.equal(sent.tokens_per_expert, expected.tokens_per_expert)
        assert expected.quantised is None
        other = random_rows(len(x), HIDDEN, seed=3, dtype=torch.bfloat16)
        expected, again = plain.dispatch(other, again=expected), dispatcher.dispatch(other, again=sent)
        _expect(again.quantised, expected.rows, sent.tokens_per_expert, expected.real_tokens_per_expert, recipe)

    on_ranks(body, size)


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_e4m3fn"])
@pytest.mark.parametrize(("backend", "size"), FORMS)
def test_rows_that_are_widened_on_reading_give_the_bits_of_delivered_rows(
    backend: Any, size: int, recipe: RecipeName
) -> None:
    way = random_routing(TOKENS)
    x_TD, grad_TD = (random_rows(TOKENS, HIDDEN, seed=seed, dtype=torch.bfloat16) for seed in (0, 5))
    inputs = (CUTS[size], x_TD, way, grad_TD, expert_weights(8, HIDDEN, torch.bfloat16))
    delivered = cut_layer(_config(backend, recipe), *inputs)
    expected = cut_layer(_config(backend, recipe, deliver="rows"), *inputs)
    assert all(torch.equal(delivered[name], expected[name]) for name in expected)


@pytest.mark.parametrize("way_in", ["eager", "asynchronous", "operators"])
@pytest.mark.parametrize("backend", ["local", "alltoall", "allgather"])
def test_gradients_flow_through_the_edge(backend: str, way_in: str) -> None:
    size = 1 if backend == "local" else 2

    def body(group: Group) -> None:
        x, way = _inputs(group, size)
        x.requires_grad_()
        dispatcher = build_dispatcher(_config(backend, "mxfp8"), group)

        def layer(x: Tensor) -> Tensor:
            sent = dispatcher.dispatch(x, way, async_op=way_in == "asynchronous").wait()
            again = dispatcher.dispatch(3 * x, again=sent)
            return dispatcher.combine(doubled(sent.quantised), sent) + dispatcher.combine(
                doubled(again.quantised), again
            )

        y = by_operators(layer, x) if way_in == "operators" else layer(x)
        y.sum().backward()
        share = torch.where(way.topk_ids < 0, 0, way.topk_weights).sum(1, keepdim=True)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, (8 * share).to(x.dtype).expand_as(x), rtol=0.02, atol=0)
        torch.testing.assert_close(y.float(), 8 * share * x.float(), rtol=0.1, atol=0.5)

    on_ranks(body, size)


class _Last(torch.autograd.Function):
    """Stands for the last GEMM of the experts, whose backward keeps the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, sent: Dispatched, seen: list[Any]) -> Tensor:
        ctx.sent, ctx.seen = sent, seen
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = quantised.quantised_gradient(ctx.sent, grad)
        ctx.seen.append((grad, found and found.quantised))
        return grad, None, None


def _last(outputs: Tensor, sent: Dispatched, seen: list[Any]) -> Tensor:
    result: Tensor = _Last.apply(outputs, sent, seen)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
@pytest.mark.parametrize("recipe", ["mxfp8", "float8_e4m3fn"])
@pytest.mark.parametrize(("backend", "size"), FORMS)
def test_gradients_of_combine_have_the_bits_of_gradients_that_are_quantised_after_they_travelled(
    backend: Any, size: int, recipe: RecipeName, fields: dict[str, Any]
) -> None:
    if fields and isinstance(backend, dict) and backend["name"] == "alltoall":
        pytest.skip("this form is not graph-safe")
    multiple = RECIPES[recipe].row_multiple

    def body(group: Group) -> None:
        x, way = _inputs(group, size)
        upstream = random_rows(len(x), HIDDEN, seed=5, dtype=torch.bfloat16)
        found = []
        for narrow in (None, recipe):
            config = _config(backend, narrow, weights="experts", **{**fields, "pad_multiple": multiple})
            dispatcher, seen = build_dispatcher(config.replace(grad_wire_dtype=narrow), group), list[Any]()
            sent = dispatcher.dispatch(x.clone().requires_grad_(), way)
            dispatcher.combine(_last(sent.rows, sent, seen), sent).backward(upstream)
            found.append((sent, *seen[0]))
        (sent, plain, nothing), (_, grad, arrived) = found
        assert nothing is None
        _expect(arrived, plain, sent.tokens_per_expert, sent.real_tokens_per_expert, recipe)
        assert arrived.edge is grad
        some = slice(int(sent.offs[-1]))
        assert torch.equal(grad[some], widen(Quantised(arrived.values, arrived.scales), grad.dtype)[some])

    on_ranks(body, size)


def test_only_the_gradient_that_combine_sent_back_is_quantised() -> None:
    """None where something lies between the GEMM and combine, or where the gradient was not asked for."""

    def found(config: DispatcherConfig, between: Any = lambda rows, sent: rows, way_in: str = "eager") -> bool:
        dispatcher, seen = build_dispatcher(config), list[Any]()
        x, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_(), random_routing(TOKENS)

        def layer(x: Tensor) -> Tensor:
            sent = dispatcher.dispatch(x, way)
            rows = sent.rows if sent.quantised is None else doubled(sent.quantised)
            return dispatcher.combine(between(_last(rows, sent, seen), sent), sent)

        (by_operators(layer, x) if way_in == "operators" else layer(x)).sum().backward()
        assert not seen[0][0][0].isnan().any()
        return seen[0][1] is not None

    def added_in_place(rows: Tensor, sent: Dispatched) -> Tensor:
        rows.register_hook(lambda grad: grad.add_(1))
        return rows

    config = _config("local", "mxfp8", weights="experts", grad_wire_dtype="mxfp8")
    assert found(config)
    assert not found(config.replace(weights="combine"))
    assert not found(config.replace(grad_wire_dtype=None))
    assert not found(config.replace(deliver="rows"))
    assert not found(config, lambda rows, sent: rows * sent.weights.unsqueeze(1).to(rows.dtype))
    assert not found(config, added_in_place)
    assert found(config, way_in="operators")


@pytest.mark.parametrize("weights", ["combine", "experts"])
def test_a_gradient_row_takes_half_the_bytes(weights: Any) -> None:
    def body(group: Group) -> None:
        x, way = _inputs(group, 2)
        sent_bytes = []
        for narrow in (None, "mxfp8"):
            config = _config("alltoall", "mxfp8", weights=weights).replace(grad_wire_dtype=narrow)
            dispatcher = build_dispatcher(config, group)
            sent = dispatcher.dispatch(x.clone().requires_grad_(), way)
            dispatcher.combine(sent.rows, sent).sum().backward()
            sent_bytes.append(dispatcher.metrics().bytes_sent["combine.backward"])
        assert sent_bytes[1] / sent_bytes[0] == (HIDDEN + HIDDEN // 32) / (2 * HIDDEN)

    on_ranks(body, 2)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no quantised wire": (
        "local",
        {"wire_dtype": "bfloat16"},
        "deliver=\"quantised\" needs wire_dtype 'float8_e4m3fn' or 'mxfp8', got 'bfloat16'",
    ),
    "padding for mxfp8": (
        "local",
        {"wire_dtype": "mxfp8", "pad_multiple": 16},
        "the grouped GEMMs for mxfp8 need pad_multiple to be a multiple of 32, got 16",
    ),
    "padding for float8": (
        "local",
        {"wire_dtype": "float8_e4m3fn", "pad_multiple": 32},
        "need pad_multiple to be a multiple of 128, got 32",
    ),
    "another gradient": (
        "local",
        {"wire_dtype": "mxfp8", "pad_multiple": 32, "grad_wire_dtype": "float8_e4m3fn"},
        r"must be None or the quantised wire_dtype, got 'float8_e4m3fn' beside wire_dtype='mxfp8'",
    ),
}


@pytest.mark.parametrize(("backend", "fields", "told"), REFUSED.values(), ids=REFUSED)
def test_configs_that_cannot_deliver_are_refused(backend: Any, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_dispatcher(small_config(backend, **{"hidden_size": HIDDEN, "deliver": "quantised", **fields}))


@pytest.mark.parametrize(
    ("needs", "fields", "told"),
    [
        ({"delivers_quantised": False}, {"deliver": "rows"}, 'it cannot deliver quantised rows. Set deliver="rows"'),
        (
            {"quantised_gradients": "no"},
            {"grad_wire_dtype": None},
            "it cannot send gradients in 8 bits. Set grad_wire_dtype=",
        ),
    ],
)
def test_a_backend_that_only_widens_is_refused(
    needs: dict[str, Any], fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No backend of this package takes a quantised wire without the rest; one of another package may."""
    given = LocalOptions.constraints
    monkeypatch.setattr(LocalOptions, "constraints", lambda self, shape: replace(given(self, shape), **needs))
    config = _config("local", "mxfp8", grad_wire_dtype="mxfp8")
    with pytest.raises(ConfigError, match=f"Backend 'local': {told}"):
        build_dispatcher(config)
    build_dispatcher(config.replace(**fields))


class _Passes(TorchDispatchMode):
    """Counts operators that write at least as many numbers as the rows have, views and new memory left out."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.seen = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        writes = schema.is_mutable or all(out.alias_info is None for out in schema.returns)
        is_large = isinstance(result, Tensor) and result.numel() >= self.size
        if writes and is_large and not schema.name.startswith("aten::empty"):
            self.seen.append(schema.name.removeprefix("aten::"))
        return result


def test_one_pass_over_rows_lies_between_the_wire_and_the_experts() -> None:
    """By hand it takes more: rows are widened, copied to their experts, and quantised again."""
    torch.use_deterministic_algorithms(False)  # which fills new memory; conftest.py restores it
    dispatcher = build_dispatcher(_config("local", "mxfp8"))
    x, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16), random_routing(TOKENS)
    sent = dispatcher.dispatch(x, way)
    arrived = quantise(x, RECIPES["mxfp8"])
    with _Passes(TOKENS * HIDDEN) as passes:
        expand(sent.state.route, arrived, torch.bfloat16)
    assert passes.seen == ["index_select", "index_fill_"], "the second one writes padding only"
    plain = build_dispatcher(_config("local", "mxfp8", deliver="rows")).dispatch(x, way)
    with _Passes(TOKENS * HIDDEN) as passes:
        rows = expand(plain.state.route, arrived, torch.bfloat16)
        assert isinstance(rows, Tensor)
        quantise(rows, RECIPES["mxfp8"])
    assert len(passes.seen) >= 5


def test_gradient_rows_that_arrive_quantised_are_copied_once() -> None:
    config = _config("local", "mxfp8", deliver="rows", weights="experts", grad_wire_dtype="mxfp8")
    x, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16), random_routing(TOKENS)
    route = build_dispatcher(config).dispatch(x, way).state.route
    with _Passes(TOKENS * HIDDEN) as passes:
        route.combine_backward(x, None, None)
    assert passes.seen.count("index_select") == 1


@pytest.mark.parametrize("fields", [{}, SAFE], ids=["eager", "graph-safe"])
def test_copies_of_balanced_experts_get_their_part_of_the_quantised_rows(fields: dict[str, Any]) -> None:
    """In eager mode own experts and copies run apart, each on a part."""

    def body(group: Group) -> list[Tensor]:
        found = []
        for deliver in ("quantised", "rows"):
            config = _config("alltoall", "mxfp8", deliver=deliver, balance="exact", **fields)
            dispatcher = build_dispatcher(config if fields else config.replace(balance_min_rows=0), group)
            x, way = _inputs(group, 2)
            way.topk_ids.clamp_(max=2)  # only the first rank's experts are named
            x.requires_grad_()
            weights = expert_weights(8, HIDDEN, torch.bfloat16).chunk(2)[group.rank()].clone().requires_grad_()

            def experts(part: Dispatched, *given: Tensor) -> Tensor:
                assert (part.quantised is None) == (deliver == "rows")  # noqa: B023
                if part.quantised is not None:
                    assert part.quantised.values.shape == part.quantised.edge.shape == part.rows.shape
                return part.grouped_mm(part.rows, given[0])

            sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, way), experts, weights)
            y = dispatcher.combine(outputs, sent)
            y.sum().backward()
            assert x.grad is not None
            assert weights.grad is not None
            found.append([y.detach(), x.grad, weights.grad])
        assert all(torch.equal(got, expected) for got, expected in zip(*found, strict=True))
        return found[0]

    on_ranks(body, 2)


@pytest.mark.parametrize("fields", [{"balance_min_rows": 0}, SAFE], ids=["eager", "graph-safe"])
def test_copies_of_balanced_experts_get_their_part_of_the_quantised_gradient(fields: dict[str, Any]) -> None:
    def body(group: Group) -> int:
        config = _config("alltoall", "mxfp8", weights="experts", grad_wire_dtype="mxfp8", balance="exact", **fields)
        dispatcher, (x, way), seen = build_dispatcher(config, group), _inputs(group, 2), list[int]()
        way.topk_ids.clamp_(max=2)  # only the first rank's experts are named

        def experts(part: Dispatched, _weights: Tensor) -> Tensor:
            return quantised.gradient_as(part, 2 * part.rows, lambda found: taken(part, found))

        def taken(part: Dispatched, found: Dispatched) -> Tensor:
            assert found.quantised is not None
            assert found.edge.shape == part.edge.shape
            assert torch.equal(
                widen(Quantised(found.quantised.values, found.quantised.scales), found.edge.dtype), found.edge
            )
            seen.append(len(found.edge))
            return found.edge

        weights = expert_weights(8, HIDDEN, torch.bfloat16).chunk(2)[group.rank()].clone().requires_grad_()
        sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x.requires_grad_(), way), experts, weights)
        dispatcher.combine(outputs, sent).backward(random_rows(len(x), HIDDEN, seed=5, dtype=x.dtype))
        assert sum(seen) == len(sent.edge)
        return len(seen)

    assert on_ranks(body, 2)[1] == (1 if fields is SAFE else 2)
