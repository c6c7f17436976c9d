"""Checkpoints of torch_remat keep routes, in regions too, and ``keep_routes_in`` finds them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch import Routing
from moe_dispatch.errors import ConfigError
from moe_dispatch.recompute import keep_routes_in, keep_routes_of
from tests.deep_ep_backends.vendors import HYBRID, V25
from tests.dispatchers.layer import Group, on_ranks
from tests.recompute.layer import Layer, assert_equal, gradients, layer_config, tokens

remat: Any = pytest.importorskip("torch_remat", reason="needs torch-remat")

SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 12}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "alltoall": ("alltoall", {}),
    "exact, padded": ({"name": "alltoall", "reduction": "exact"}, {"pad_multiple": 16}),
    "allgather": ("allgather", {}),
    "graph-safe": ("alltoall", SAFE),
    "float8": ("alltoall", {"wire": "float8_e4m3fn", "hidden_size": 128}),
    "float8, graph-safe": ("alltoall", {"wire": "float8_e4m3fn", "hidden_size": 128, **SAFE}),
    "deepep": (V25, {}),
    "hybridep": (HYBRID, {}),
}


class RegionLayer(Layer):
    """A layer of which a part is a region whose results are saved, so that recomputations leave it out."""

    saved = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.saved == "layer":
            y: Tensor = self._saved("layer", super().forward, x)
            remat.recompute_needs_tensor(y)
            return x + y
        if self.saved == "router":
            ids, weights = self._saved("router", self._routed, x)
            remat.recompute_needs_tensor(ids, weights)
            routing = Routing(ids, weights)
        else:
            routing = self.route(x)
        sent = self.dispatcher.dispatch(x, routing)
        if self.saved == "experts":
            rows = self._saved("experts", lambda rows: self._experts(rows, sent), sent.rows)
            remat.recompute_needs_tensor(rows)
        else:
            rows = self._experts(sent.rows, sent)
        return x + self.dispatcher.combine(rows, sent)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.route(x)
        return routing.topk_ids, routing.topk_weights

    def _experts(self, rows: Tensor, sent: Any) -> Tensor:
        return sent.grouped_mm(torch.tanh(sent.grouped_mm(rows, self.first)), self.second)  # type: ignore[no-any-return]

    @staticmethod
    def _saved(name: str, function: Any, x: Tensor) -> Any:
        return remat.region(function, name, recompute=False)(x)


def kept(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = remat.checkpoint()(keep_routes_of(layer))(x)
    return y


def passes(group: Group, config: Any, how: str, saved: str = "", calls: int = 2) -> list[Tensor]:
    layer = RegionLayer(config, group)
    layer.saved, layer.gives_ids = saved, True
    x = y = tokens(group, config.hidden_size)
    for _ in range(calls):
        y = kept(layer, y) if how == "kept" else layer(y)
    y.square().sum().backward()
    found = [y.detach(), *gradients(x, layer)]
    if config.graph_safe:
        layer.dispatcher.check()
    layer.dispatcher.close()
    return found


@pytest.mark.parametrize(
    "saved", ["", "router", "experts", "layer"], ids=["all recomputed", "router", "experts", "layer"]
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_results_have_the_bits_of_a_run_without_checkpoints(setting: str, saved: str) -> None:
    backend, fields = SETTINGS[setting]
    config = layer_config(backend, **fields)
    size = 2 if isinstance(backend, dict) and "emulate" in backend else 4
    body = partial(passes, config=config, saved=saved)
    assert_equal(on_ranks(partial(body, how="kept"), size), on_ranks(partial(body, how="plain"), size))


def test_a_recomputed_dispatch_exchanges_no_counts_and_takes_its_own_route() -> None:
    def body(group: Group, how: str) -> tuple[list[Tensor], Counter[str]]:
        layer = Layer(layer_config(), group)
        layer.noise, layer.quiet = 5.0, 1  # a router that would choose otherwise in the recomputation
        layer.gives_ids = True
        x = tokens(group)
        y = kept(layer, x) if how == "kept" else layer(x)
        before = Counter(layer.dispatcher.metrics().collectives)
        y.square().sum().backward()
        return [y.detach(), *gradients(x, layer)], Counter(layer.dispatcher.metrics().collectives) - before

    checkpointed, plain = on_ranks(partial(body, how="kept"), 4), on_ranks(partial(body, how="plain"), 4)
    assert_equal([found for found, _ in checkpointed], [found for found, _ in plain])
    # One exchange of rows each way, none of counts; before and at the end, ranks compare.
    assert [more - its for (_, more), (_, its) in zip(checkpointed, plain, strict=True)] == [
        {"dispatch": 1, "combine": 1, "recompute": 2}
    ] * 4


def test_several_live_micro_batches_keep_routes_of_their_own() -> None:
    def body(group: Group, how: str) -> list[Tensor]:
        layer = Layer(layer_config(), group)
        batches = [tokens(group, seed=seed) for seed in range(3)]
        results = [kept(layer, x) if how == "kept" else layer(x) for x in batches]
        for number in (2, 0, 1):
            results[number].square().sum().backward()
        return [*(grad for x in batches if (grad := x.grad) is not None), *gradients(batches[0], layer)]

    assert_equal(on_ranks(partial(body, how="kept"), 4), on_ranks(partial(body, how="plain"), 4))


class Model(nn.Module):
    def __init__(self, group: Group, *, checkpointed: bool) -> None:
        super().__init__()
        layers = [Layer(layer_config(), group, f"layers.{number}") for number in range(2)]
        for number, layer in enumerate(layers):
            layer.noise, layer.quiet, layer.gives_ids = 5.0, 2, True
            if checkpointed:  # as torchtitan's main branch does
                named = remat.checkpoint(region_name=f"layers.{number}", determinism_check="none")
                vars(layer)["forward"] = named(layer.forward)
        self.layers = nn.ModuleList(layers)
        if checkpointed:
            keep_routes_in(self)
            keep_routes_in(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_keep_routes_in_finds_modules_whose_forward_is_checkpointed() -> None:
    def body(group: Group, checkpointed: bool) -> list[Tensor]:
        model = Model(group, checkpointed=checkpointed)
        batches = [tokens(group, seed=seed) for seed in range(2)]
        results = [model(x) for x in batches]
        for y in reversed(results):
            y.square().sum().backward()
        return [*(grad for x in batches if (grad := x.grad) is not None), *gradients(batches[0], model)]

    assert_equal(on_ranks(partial(body, checkpointed=True), 4), on_ranks(partial(body, checkpointed=False), 4))


def test_a_checkpoint_whose_options_cannot_be_read_is_refused() -> None:
    layer = nn.Linear(2, 2)
    other = FunctionType((lambda x: x).__code__, {"__name__": "torch_remat._api"})
    vars(layer)["forward"] = other
    with pytest.raises(
        ConfigError, match=r"must hold its options as release 0\.2\.2 does, got none called function\. Wrap"
    ):
        keep_routes_in(layer)
