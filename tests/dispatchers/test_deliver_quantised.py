"""``wire.deliver="quantised"``: the bits that experts get, the gradients, and which calls and configs it works with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher, quantised
from moe_dispatch.backends.rank_major import expand
from moe_dispatch.backends.wire import WireDtype
from moe_dispatch.capabilities.quantised.formats import FORMATS, quantise
from moe_dispatch.capabilities.quantised.rows import QuantisedRows, widen
from moe_dispatch.dispatchers import SlotWeights
from moe_dispatch.errors import ConfigError
from tests.dispatchers.layer import (
    Group,
    by_operators,
    doubled,
    expert_weights,
    local_part,
    on_ranks,
    random_routing,
    random_rows,
    small_config,
)

HIDDEN, TOKENS = 512, 20
EXPERTS = expert_weights(8, HIDDEN, torch.bfloat16)
CUTS = {1: [20], 2: [13, 7], 4: [9, 0, 8, 3]}
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS}
EAGER: dict[str, Any] = {}
MXFP8: WireDtype = "mxfp8"
FLOAT8: WireDtype = "float8_e4m3fn"
ALLTOALL, V2 = {"name": "alltoall"}, {"name": "deepep", "emulate": "v2.5.0"}
BY_NODE = {**ALLTOALL, "name": "alltoall_by_node", "ranks_per_node": 2}
# Backend, number of ranks, recipe, mode. The conformance kit has all scenarios of quantised rows.
FORMS: list[tuple[Any, int, WireDtype, dict[str, Any]]] = [
    ("local", 1, MXFP8, EAGER),
    ("local", 1, FLOAT8, SAFE),
    ("alltoall", 2, FLOAT8, SAFE),
    ("alltoall", 4, MXFP8, EAGER),
    ("allgather", 2, FLOAT8, EAGER),
    ("allgather", 4, MXFP8, SAFE),
    ({**ALLTOALL, "reduction": "exact"}, 4, MXFP8, EAGER),
    (BY_NODE, 4, FLOAT8, EAGER),
    ({**BY_NODE, "reduction": "exact"}, 4, MXFP8, EAGER),
    ({"name": "deepep", "emulate": "v1.2.1"}, 2, MXFP8, SAFE),
    ({"name": "deepep", "emulate": "v2-2.1.0"}, 2, FLOAT8, EAGER),
    ({**V2, "expand": True, "deterministic": False}, 2, MXFP8, EAGER),
    ({**V2, "ranks_per_node": 1, "deterministic": False}, 2, MXFP8, SAFE),
    ({"name": "hybridep", "emulate": "hybridep-94a9f8f"}, 2, FLOAT8, SAFE),
    ({"name": "hybridep", "emulate": "hybridep-746"}, 2, MXFP8, EAGER),
]


def _config(
    backend: Any, recipe: WireDtype | None, *, gradients: bool = False, deliver: str = "quantised", **fields: Any
) -> DispatcherConfig:
    wire = None if recipe is None else {"dtype": recipe, "gradients": gradients, "deliver": deliver}
    padded = 32 if recipe is None else FORMATS[recipe].row_multiple
    return small_config(backend, wire=wire, **{"hidden_size": HIDDEN, "pad_multiple": padded, **fields})


def _with_wire(config: DispatcherConfig, **options: Any) -> DispatcherConfig:
    """Return a copy of a config with other options of the wire."""
    assert isinstance(config.wire, dict)
    return config.replace(wire={**config.wire, **options})


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


def _expect(found: QuantisedRows | None, rows_RD: Tensor, counts: Tensor, real: Tensor, recipe: WireDtype) -> None:
    """Compare with rows that arrived unquantised and are quantised here."""
    assert found is not None
    assert found.recipe == recipe
    values, scales = quantise(rows_RD, FORMATS[recipe])
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


@pytest.mark.parametrize(("backend", "size", "recipe", "fields"), FORMS)
def test_rows_have_the_bits_of_rows_that_are_quantised_after_dispatch(
    backend: Any, size: int, recipe: WireDtype, fields: dict[str, Any]
) -> None:
    """So have rows that are sent again, and the gradient of combine. What is read of them is widened."""
    given = {**fields, "pad_multiple": FORMATS[recipe].row_multiple, "weights": "experts"}

    def body(group: Group) -> None:
        x, way = _inputs(group, size)
        other, upstream = (random_rows(len(x), HIDDEN, seed=seed, dtype=torch.bfloat16) for seed in (3, 5))
        found: list[Any] = []
        for narrow in (None, recipe):
            config = _config(backend, narrow, gradients=True, **given)
            dispatcher, seen = build_dispatcher(config, group), list[Any]()
            sent = dispatcher.dispatch(x.clone().requires_grad_(), way)
            again = dispatcher.dispatch(other, again=sent)
            dispatcher.combine(_last(sent.rows, sent, seen), sent).backward(upstream)
            found.append((sent, again, *seen[0]))
        (plain, plain_again, plain_grad, nothing), (sent, again, grad, arrived) = found
        assert plain.quantised is nothing is None
        assert torch.equal(sent.tokens_per_expert, plain.tokens_per_expert)
        for of, rows in ((sent.quantised, plain.rows), (again.quantised, plain_again.rows), (arrived, plain_grad)):
            _expect(of, rows.detach(), plain.tokens_per_expert, plain.real_tokens_per_expert, recipe)
        assert arrived.edge is grad
        some = slice(int(sent.offs[-1]))
        for of, rows in ((sent.quantised, sent.rows), (arrived, grad)):
            assert torch.equal(rows[some], widen((of.values, of.scales), rows.dtype)[some])
        delivered = build_dispatcher(_config(backend, recipe, gradients=True, **given, deliver="rows"), group)
        assert torch.equal(delivered.dispatch(x, way).rows[some], sent.rows[some])

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

    config = _config("local", "mxfp8", weights="experts", gradients=True)
    assert found(config)
    assert not found(config.replace(weights="combine"))
    assert not found(_with_wire(config, gradients=False))
    assert not found(_with_wire(config, deliver="rows"))
    assert not found(config, lambda rows, sent: rows * sent.weights.unsqueeze(1).to(rows.dtype))
    assert not found(config, added_in_place)
    assert found(config, way_in="operators")


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"dtype": "bfloat16"}, 1, "wire.deliver: Extra inputs are not permitted, got 'quantised'"),
    ({"dtype": MXFP8}, 16, 'for "mxfp8" need pad_multiple to be a multiple of 32, got 16'),
    ({"dtype": FLOAT8}, 32, "need pad_multiple to be a multiple of 128, got 32"),
]


@pytest.mark.parametrize(("wire", "pad_multiple", "told"), REFUSED)
def test_configs_that_cannot_deliver_are_refused(wire: dict[str, Any], pad_multiple: int, told: str) -> None:
    wire = {**wire, "deliver": "quantised"}
    with pytest.raises(ConfigError, match=told):
        build_dispatcher(small_config("local", hidden_size=HIDDEN, pad_multiple=pad_multiple, wire=wire))


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
    arrived = quantise(x, FORMATS["mxfp8"])
    with _Passes(TOKENS * HIDDEN) as passes:
        expand(sent.state.route, arrived, torch.bfloat16)
    assert passes.seen == ["index_select", "index_fill_"], "the second one writes padding only"
    plain = build_dispatcher(_config("local", "mxfp8", deliver="rows")).dispatch(x, way)
    with _Passes(TOKENS * HIDDEN) as passes:
        rows = expand(plain.state.route, arrived, torch.bfloat16)
        assert isinstance(rows, Tensor)
        quantise(rows, FORMATS["mxfp8"])
    assert len(passes.seen) >= 5


def test_gradient_rows_that_arrive_quantised_are_copied_once() -> None:
    config = _config("local", "mxfp8", deliver="rows", weights="experts", gradients=True)
    x, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16), random_routing(TOKENS)
    route = build_dispatcher(config).dispatch(x, way).state.route
    with _Passes(TOKENS * HIDDEN) as passes:
        route.combine_backward(x, None, None)
    assert passes.seen.count("index_select") == 1


def test_a_copy_of_the_result_has_the_same_rows() -> None:
    x, way = random_rows(TOKENS, HIDDEN, dtype=torch.bfloat16), random_routing(TOKENS)
    sent = build_dispatcher(_config("local", "mxfp8")).dispatch(x, way)
    copied = copy.copy(sent)
    assert copied.in_graph is sent.in_graph
    assert torch.equal(copied.rows, sent.rows)


@pytest.mark.parametrize("fields", [{"balance": {"name": "exact", "min_rows": 0}}, SAFE], ids=["eager", "graph-safe"])
def test_copies_of_balanced_experts_get_their_part_of_rows_and_gradient(fields: dict[str, Any]) -> None:
    """In eager mode own experts and copies run apart, each on a part."""
    config = _config("alltoall", "mxfp8", weights="experts", gradients=True, **{"balance": "exact", **fields})

    def run(group: Group, config: DispatcherConfig) -> tuple[list[Tensor], list[int], int]:
        dispatcher, (x, way), seen = build_dispatcher(config, group), _inputs(group, 2), list[int]()
        way.topk_ids.clamp_(max=2)  # only the first rank's experts are named
        leaves = x.requires_grad_(), local_part(EXPERTS, group)

        def experts(part: Dispatched, weights: Tensor) -> Tensor:
            outputs = part.grouped_mm(part.rows, weights)
            if config.wire_options is not None and not config.wire_options.delivers_quantised:
                assert part.quantised is None
                return outputs
            assert part.quantised is not None
            assert part.quantised.values.shape == part.quantised.edge.shape == part.rows.shape
            return quantised.gradient_as(part, outputs, taken)

        def taken(found: Dispatched) -> Tensor:
            assert found.quantised is not None
            arrived = found.quantised.values, found.quantised.scales
            assert torch.equal(widen(arrived, found.in_graph.dtype), found.in_graph)
            seen.append(len(found.in_graph))
            return found.in_graph

        sent, outputs = SlotWeights(dispatcher).run(dispatcher.dispatch(x, way), experts, leaves[1])
        y = dispatcher.combine(outputs, sent)
        y.backward(random_rows(len(x), HIDDEN, seed=5, dtype=x.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], seen, len(sent.in_graph)

    def body(group: Group) -> int:
        (expected, nothing, _), (got, seen, rows) = run(group, _with_wire(config, deliver="rows")), run(group, config)
        assert len(got) == 3
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
        assert (nothing, sum(seen)) == ([], rows)
        return len(seen)

    assert on_ranks(body, 2)[1] == (1 if fields is SAFE else 2)
