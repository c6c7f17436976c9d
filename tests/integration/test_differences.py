"""The page on where libraries differ: each row that says "test" is computed again with the installed libraries."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from moe_dispatch_testing import run_ranks
from tests.integration.megatron_core import layer
from tests.integration.needs import needs
from tests.pages import ROOT

pytestmark = [*needs("megatron"), *needs("transformers"), pytest.mark.filterwarnings("ignore")]  # of their imports
TABLES = tomllib.loads((ROOT / "docs" / "differences.toml").read_text(encoding="utf-8"))["table"]
ROWS = [(table, row) for table in TABLES for row in table["rows"] if row["run"] == "test"]
EXPERTS, TOP_K, TOKENS = 8, 2, 16


def _logits(chosen: list[tuple[int, int]]) -> Tensor:
    """Logits of which each token's two experts have all the probability."""
    return torch.full((len(chosen), EXPERTS), -60.0).scatter(1, torch.tensor(chosen), 0.0)


def _batches() -> list[Tensor]:
    even = [(token % EXPERTS, (token + 1) % EXPERTS) for token in range(TOKENS)]
    return [_logits(even), _logits([(0, 1)] * TOKENS), _logits([(0, 1)] * 8 + [(2, 3)] * 8)]


def _number(loss: Tensor) -> str:
    return f"{loss.item():.4g}"


def _counted(module: nn.Module, forward: Callable[[], Tensor], counts: Tensor) -> list[str]:
    """How often a token is counted: in training and in evaluation, with a backward and without gradients."""
    cells = []
    for mode in (True, False):
        module.train(mode)
        for with_gradients in (True, False):
            counts.zero_()
            with torch.set_grad_enabled(with_gradients):
                y = forward()
            if with_gradients:
                y.square().sum().backward()
            cells.append(f"{counts.sum().item() / TOKENS / TOP_K:g}")
    return cells


def _megatron_evaluating() -> list[str]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    bias = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    case = layer.Case(
        parallel=layer.Parallel(ep=1),
        config={"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_router_load_balancing_type": "none"} | bias,
    )

    def body(group: Any) -> list[str]:
        groups = ProcessGroupCollection()
        groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = group
        router = TopKRouter(layer.transformer_config(case), pg_collection=groups)
        nn.init.normal_(router.weight)
        x = torch.randn(TOKENS, 1, router.config.hidden_size)
        return _counted(router, lambda: router(x)[0], router.local_tokens_per_expert)

    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        return run_ranks(body, 1)[0]


def _torchtitan_evaluating() -> list[str]:
    pytest.importorskip("torchtitan")
    from tests.integration.titan import moe

    layer = moe.moe_config().build()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.tokens_per_expert_E, layer.expert_bias_E = torch.zeros(2, moe.EXPERTS)
    x = torch.randn(1, TOKENS, moe.HIDDEN)
    return _counted(layer, lambda: layer(x), layer.tokens_per_expert_E)


def _megatron_losses() -> list[str]:
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    def loss(logits: Tensor) -> Tensor:
        _, chosen = _megatron(logits, TOP_K)
        counts = chosen.sum(0)
        balanced: Tensor = switch_load_balancing_loss_func(logits.softmax(-1), counts, TOKENS, TOP_K, EXPERTS, 1.0)
        return balanced

    return [_number(loss(logits)) for logits in _batches()]


def _transformers_losses() -> list[str]:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return [_number(load_balancing_loss_func((logits,), EXPERTS, TOP_K)) for logits in _batches()]


def _megatron(logits: Tensor, top_k: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """Megatron's probabilities and its map, both (tokens, experts)."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    probabilities, chosen = topk_routing_with_score_function(logits, top_k, **settings)
    return probabilities, chosen


def _span(ids: list[int]) -> str:
    return f"{ids[0]} to {ids[-1]}" if ids == list(range(ids[0], ids[0] + len(ids))) and len(ids) > 2 else _listed(ids)


def _listed(numbers: list[Any]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _megatron_capacity() -> list[str]:
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    probabilities, chosen = _megatron(torch.zeros(64, EXPERTS), 1, use_pre_softmax=True)
    kept = []
    for policy in ("position", "probs"):
        _, left = apply_router_token_dropping(probabilities, chosen, 1, 1.0, policy, False)
        kept.append(_span(left.any(1).nonzero().flatten().tolist()))
    return kept


def _torch_ties() -> list[str]:
    return [_listed(torch.zeros(experts).topk(top_k).indices.tolist()) for experts, top_k in ((8, 2), (64, 8))]


def _megatron_ties() -> list[str]:
    maps = [_megatron(torch.zeros(1, experts), top_k)[1] for experts, top_k in ((8, 2), (64, 8))]
    return [_span(chosen[0].nonzero().flatten().tolist()) for chosen in maps]


def _extremes() -> list[Tensor]:
    infinity = float("inf")
    return [torch.full((1, 8), -200.0), torch.full((1, 8), -infinity), torch.tensor([[infinity] * 2 + [0.0] * 6])]


def _weights(weights: Tensor) -> str:
    return "NaN" if weights.isnan().all() else _listed([round(weight, 6) for weight in weights.flatten().tolist()])


def _megatron_weights(score_function: str) -> list[str]:
    cells = []
    for logits in _extremes():
        weights, chosen = _megatron(logits, TOP_K, score_function=score_function)
        cells.append(_weights(weights[chosen]))
    return cells


def _router_weights(router: nn.Module) -> list[str]:
    """The weights of a router of transformers by its logits: a weight of (experts, 1) on the input 1."""
    cells = []
    for logits in _extremes():
        router.weight = nn.Parameter(logits.T.clone())
        with torch.no_grad():
            cells.append(_weights(router(torch.ones(1, 1))[1]))
    return cells


def _mixtral_weights() -> list[str]:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    config = SimpleNamespace(num_experts_per_tok=TOP_K, num_local_experts=EXPERTS, hidden_size=1)
    return _router_weights(MixtralTopKRouter(config))


def _deepseek_weights() -> list[str]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"hidden_size": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_group": 1, "topk_group": 1}
    return _router_weights(
        DeepseekV3TopkRouter(DeepseekV3Config(**sizes, norm_topk_prob=True, routed_scaling_factor=1.0))
    )


def _scale_bytes(mode: str) -> list[str]:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    blocks = torch.ones(7, 32)
    blocks[:, 0] = torch.tensor([447.0, 448.0, 480.0, 496.0, 512.0, float("inf"), float("nan")])
    scales, _ = to_mx(blocks, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode[mode])
    return [str(byte) for byte in scales.view(torch.uint8).flatten().tolist()]


def _stack_against_matrices(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> str:
    """How far ten steps of a stack of eight experts end from those of eight matrices, by norm of the update."""
    ends = []
    for stacked in (True, False):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(8, 16, 32, generator=generator) * 0.02
        parameters = [nn.Parameter(part.clone()) for part in ([start] if stacked else start)]
        steps = optimizer(parameters)
        for _ in range(10):
            gradients = torch.randn(8, 16, 32, generator=generator) * torch.logspace(-2, 0, 8)[:, None, None]
            for parameter, gradient in zip(parameters, [gradients] if stacked else gradients, strict=True):
                parameter.grad = gradient.clone()
            steps.step()
        held = [parameter.detach() for parameter in parameters]
        ends.append((held[0] if stacked else torch.stack(held)) - start)
    return f"{((ends[0] - ends[1]).norm() / ends[1].norm()).item():.1%}".replace("%", " %").replace("0.0 %", "0")


def _idle_moves(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """How far an expert of a stack moves whose gradient is always zero, in parts of its largest weight."""
    start = torch.full((2, 4, 4), 0.5)
    stack = nn.Parameter(start.clone())
    steps = optimizer([stack])
    for _ in range(10):
        stack.grad = torch.stack([torch.ones(4, 4), torch.zeros(4, 4)])
        steps.step()
    return ((stack.detach() - start)[1].abs().max() / 0.5).item()


def _adamw() -> list[str]:
    optimizer = torch.optim.AdamW
    decayed = 1 - (1 - 1e-3 * 1e-2) ** 10
    assert _idle_moves(optimizer) == pytest.approx(decayed, rel=1e-2)
    return [_stack_against_matrices(optimizer), "decays"]


def _adafactor() -> list[str]:
    optimizer = torch.optim.Adafactor
    assert _idle_moves(optimizer) == 0
    return [_stack_against_matrices(optimizer), "rests"]


def _muon() -> list[str]:
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.ones(2, 4, 4))])
    weight, lengths = nn.Parameter(torch.zeros(8, 8)), list[float]()
    steps = torch.optim.Muon([weight], weight_decay=0.0)
    weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(600):
        before = weight.detach().clone()
        steps.step()
        lengths.append((weight.detach() - before).norm().item())
        weight.grad = torch.zeros(8, 8)
    at_full_size = sum(length > lengths[0] / 2 for length in lengths[1:])
    return ["ValueError", f"of its own matrix: moves on at full size for about {round(at_full_size, -2)} steps"]


COMPUTED: dict[tuple[str, str], Callable[[], list[str]]] = {
    ("evaluating", "megatron-core 0.19.2"): _megatron_evaluating,
    ("evaluating", "torchtitan 0.3.0"): _torchtitan_evaluating,
    ("losses", "megatron-core 0.19.2, `aux_loss`, `global_aux_loss`"): _megatron_losses,
    ("losses", "transformers 5.23.0, 5.24.0, `load_balancing_loss_func`"): _transformers_losses,
    ("capacity", "megatron-core 0.19.2"): _megatron_capacity,
    ("ties", "torch 2.13.0, `topk`, so most routers"): _torch_ties,
    ("ties", "megatron-core 0.19.2"): _megatron_ties,
    ("weights", "megatron-core 0.19.2, sigmoid"): partial(_megatron_weights, "sigmoid"),
    ("weights", "megatron-core 0.19.2, softmax"): partial(_megatron_weights, "softmax"),
    ("weights", "transformers 5.23.0, 5.24.0, DeepSeek-V3, sigmoid"): _deepseek_weights,
    ("weights", "transformers 5.23.0, 5.24.0, Mixtral, softmax"): _mixtral_weights,
    **{
        ("scales", f"torchao 0.18.0, {mode}"): partial(_scale_bytes, mode)
        for mode in ("FLOOR", "EVEN", "RCEIL", "CEIL")
    },
    ("optimizers", "torch 2.13.0, AdamW"): _adamw,
    ("optimizers", "torch 2.13.0, Adafactor"): _adafactor,
    ("optimizers", "torch 2.13.0, Muon"): _muon,
}


def test_every_row_that_says_test_is_computed() -> None:
    assert {(table["name"], row["software"]) for table, row in ROWS} == set(COMPUTED)


@pytest.mark.parametrize("key", COMPUTED, ids=lambda key: f"{key[0]}-{key[1].partition(' ')[0]}")
def test_a_row_is_what_the_installed_library_does(key: tuple[str, str]) -> None:
    (row,) = [row for table, row in ROWS if (table["name"], row["software"]) == key]
    assert COMPUTED[key]() == row["cells"]


@pytest.mark.parametrize("package", ["megatron-core", "transformers", "torchao", "torch"])
def test_the_installed_version_is_one_of_the_page(package: str) -> None:
    installed = version(package).partition("+")[0]
    computed = [software for _, software in COMPUTED if software.startswith(f"{package} ")]
    assert computed
    assert all(installed in software for software in computed)
