"""Balanced experts of torchtitan under its own FSDP: gradients of the whole model on one rank, each counted once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moe_dispatch.errors import ConfigError, StateError
from tests.integration.deep_ep_users.dense import TOLERANCE
from tests.integration.jobs import Check, require, run_checks
from tests.integration.needs import needs
from tests.integration.steps import FAULTS, difference, planted, train
from tests.integration.titan.moe import EXPERT_WEIGHTS, HIDDEN, RANKS, built, dims_of, moe_config, parallel

pytestmark = [
    *needs("torchtitan"),
    # The router asks for an autocast that a CPU does not have, and torch's compiler uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*CPU [Aa]utocast", "ignore:.*torch.jit.script_method:DeprecationWarning"),
]

LAYERS, MICRO_BATCHES, STEPS = 2, 2, 9
# A rank without tokens, and another one with most of them.
TOKENS = (5, 0, 33, 12)
BALANCE: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """How ranks are divided, and the options of ``use_moe_dispatch``."""

    ep: int
    replicate: int = 1
    options: tuple[tuple[str, Any], ...] = tuple(BALANCE.items())
    recompute: bool = False


STATIC = (("graph_safe", True), ("max_tokens_per_rank", 40))
CASES = {
    "ep 4": Case(ep=4),
    "ep 4, not balanced": Case(ep=4, options=()),
    "ep 4, graph-safe": Case(ep=4, options=(("balance", "exact"), *STATIC)),
    "ep 2 x fsdp 2": Case(ep=2),
    "ep 2 x replicas 2, recomputed": Case(ep=2, replicate=2, recompute=True),
    "ep 2 x fsdp 2, chunks recomputed": Case(ep=2, options=(("chunks", {"tokens": 8, "recompute": True}),)),
    "ep 4, in chunks, recomputed": Case(ep=4, options=(*BALANCE.items(), ("chunks", 8)), recompute=True),
}
TRAINED = ("ep 4, not balanced", "ep 4")


@final
class Block(nn.Module):
    """A block of which torchtitan shards the experts apart. It uses its layer twice."""

    moe_enabled = True

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x_BLD: Tensor) -> Tensor:
        for _ in range(2):
            x_BLD = x_BLD + self.moe(x_BLD)
        return x_BLD


@final
class Decoder(nn.Module):
    """What ``apply_fsdp_to_decoder`` reads of a model."""

    enable_weight_tying = False
    tok_embeddings = norm = lm_head = None

    def __init__(self, config: Any, shard: Any = lambda moe: None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in range(LAYERS):
            moe = built(config)
            shard(moe)
            # The first layer sends all rows to two experts of one rank, the second layer sends most rows to one expert.
            with torch.no_grad():
                moe.expert_bias_E[: 2 - number] = 1.0
            self.layers[str(number)] = Block(moe)

    def forward(self, x_BLD: Tensor) -> Tensor:
        for block in self.layers.values():
            x_BLD = block(x_BLD)
        return x_BLD


def batch(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Tokens of a rank in a micro-batch, and the gradient of its output."""
    generator = torch.Generator().manual_seed(10 * micro + rank)
    x_BLD, upstream_BLD = torch.randn(2, 1, TOKENS[rank], HIDDEN, generator=generator)
    return x_BLD, upstream_BLD / HIDDEN


def accumulate(model: Any, members: range) -> None:
    for micro in range(MICRO_BATCHES):
        drawn = [batch(member, micro) for member in members]
        x_BLD, upstream_BLD = (torch.cat(tensors, 1) for tensors in zip(*drawn, strict=True))
        model(x_BLD).backward(upstream_BLD)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("._checkpoint_wrapped_module", ""): tensor for name, tensor in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in parameters(model).items():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


@functools.cache
def whole() -> dict[str, Tensor]:
    """Gradients of torchtitan's own model with all experts and all tokens on one rank."""
    model = Decoder(moe_config())
    accumulate(model, range(RANKS))
    return gradients(model)


@contextmanager
def built_model(case: Case) -> Iterator[Any]:
    """A model that torchtitan has sharded. Its code runs in the block."""
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    from moe_dispatch.integrations.torchtitan import use_moe_dispatch

    dims, config = dims_of(dp=RANKS // case.replicate, ep=case.ep, replicate=case.replicate), moe_config()
    use_moe_dispatch(config, backend="alltoall", **dict(case.options))
    replicas = ["dp_replicate"] if case.replicate > 1 else []
    with parallel(config, dims, enable_sp=False):
        model: Any = Decoder(config, lambda moe: moe.parallelize(dims))
        if case.recompute:
            FullAC(FullAC.Config()).apply(model)
        apply_fsdp_to_decoder(
            model,
            dims.get_mesh([*replicas, "fsdp"]),
            torch.float32,
            torch.float32,
            pp_enabled=False,
            reshard_after_forward_policy="always",
            ep_degree=case.ep,
            edp_mesh=dims.get_mesh([*replicas, "efsdp"]),
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        yield model


def sharded(
    rank: int, case: Case, *, steps: int = 0
) -> tuple[dict[str, Tensor], Counter[str], list[float], dict[str, str]]:
    """Gradients, calls of hooks of parameters, losses of the steps that follow, and how the state dict is sharded."""
    with built_model(case) as model:
        hooks: Counter[str] = Counter()
        for name, parameter in parameters(model).items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update([name]))
        accumulate(model, range(rank, rank + 1))
        found, calls = gradients(model), Counter(hooks)
        for number, block in enumerate(model.layers.values()):
            dispatcher = block.moe.routed_experts.token_dispatcher.dispatcher
            busiest = dispatcher.metrics(gather=True).rank_imbalance
            assert busiest is not None
            if "balance" in dict(case.options):
                assert busiest < 1.1, f"layer {number} is not balanced"
            else:
                assert busiest > 1.5, f"layer {number} is balanced by its router"
        losses = trained(model, rank, steps)
    state = {
        name: f"{tensor.shape}, {getattr(tensor, 'placements', None)}" for name, tensor in model.state_dict().items()
    }
    return found, calls, losses, state


def trained(model: nn.Module, rank: int, steps: int) -> list[float]:
    def loss_of(step: int) -> Tensor:
        x_BLD, target_BLD = batch(rank, step % MICRO_BATCHES)
        loss: Tensor = (model(x_BLD) - target_BLD).square().sum() / HIDDEN
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.004)
    optimizer.zero_grad()
    return train(optimizer, steps, loss_of)


def faulty(rank: int, case: Case) -> list[dict[str, Tensor]]:
    """Gradients if those of copies are lost on their way home, and if they are counted twice."""
    found = []
    for fault in FAULTS:
        with planted(fault):
            found.append(sharded(rank, case)[0])
    return found


@functools.cache
def all_results() -> dict[str, list[Any]]:
    steps = dict.fromkeys(TRAINED, STEPS)
    checks: dict[str, Check] = {
        name: functools.partial(sharded, case=case, steps=steps.get(name, 0)) for name, case in CASES.items()
    }
    return run_checks(checks | {"planted": functools.partial(faulty, case=CASES["ep 2 x fsdp 2"])}, RANKS)


def results(name: str) -> list[Any]:
    return require(all_results()[name])


@pytest.mark.parametrize("name", CASES)
def test_reduced_gradients_are_those_of_the_whole_model_and_hooks_run_once_in_a_backward(name: str) -> None:
    for found, calls, *_ in results(name):
        assert difference(found, whole()) <= TOLERANCE  # torchtitan's experts compute in bfloat16
        assert calls == dict.fromkeys(whole(), MICRO_BATCHES)


def test_the_comparison_sees_gradients_of_copies_that_are_lost_or_counted_twice() -> None:
    for of_rank in results("planted"):
        for found in of_rank:
            assert difference(found, whole()) > TOLERANCE


def test_losses_are_those_without_balance_and_checkpoints_too() -> None:
    _, _, plain, names = results("ep 4, not balanced")[0]
    _, _, balanced, same = results("ep 4")[0]
    assert plain[-1] < 0.9 * plain[0]
    assert balanced == pytest.approx(plain, rel=1e-3)
    assert same == names
    assert sum(weight in name for name in names for weight in EXPERT_WEIGHTS) == len(EXPERT_WEIGHTS) * LAYERS


def test_other_routed_experts_are_refused_with_spare_slots() -> None:
    from torchtitan.models.common.moe import RoutedExperts

    from moe_dispatch.integrations.torchtitan import MoEDispatchTokenDispatcher, moe_dispatch_override, use_moe_dispatch

    @dataclass(kw_only=True, slots=True)
    class OtherConfig(RoutedExperts.Config):  # type: ignore[misc]
        pass

    theirs = moe_config().routed_experts
    other = OtherConfig(inner_experts=theirs.inner_experts, token_dispatcher=theirs.token_dispatcher)
    with pytest.raises(ConfigError, match=r"spare expert slots must be RoutedExperts, got .*OtherConfig\. Leave"):
        moe_dispatch_override(other, chunks=8)
    config = moe_config()
    use_moe_dispatch(config, backend="local", balance="exact")
    balanced = config.routed_experts
    use_moe_dispatch(config, backend="local", balance="exact")
    assert type(config.routed_experts) is type(balanced)
    dispatcher = MoEDispatchTokenDispatcher(balanced.token_dispatcher)
    with pytest.raises(ConfigError, match=r"RoutedExperts: this integration runs the experts that a rank owns"):
        dispatcher.dispatch(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(8))
    use_moe_dispatch(config, backend="local", chunks=8)
    dispatcher = MoEDispatchTokenDispatcher(config.routed_experts.token_dispatcher)
    with pytest.raises(ConfigError, match=r"got chunks=8\. .* give it to use_moe_dispatch or moe_dispatch_over"):
        dispatcher.dispatch(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(8))


def test_selective_checkpointing_is_refused() -> None:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    from moe_dispatch.integrations.torchtitan import use_moe_dispatch

    config = moe_config()
    use_moe_dispatch(config, **BALANCE)
    model = Decoder(config)
    SelectiveAC(SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])).apply(model)
    with pytest.raises(StateError, match="selective checkpointing"):
        accumulate(model, range(2))


def test_one_rank_with_balance_is_their_local_dispatcher() -> None:
    from moe_dispatch.integrations.torchtitan import use_moe_dispatch

    config = moe_config()
    use_moe_dispatch(config, **BALANCE)
    model = Decoder(config)
    accumulate(model, range(RANKS))
    assert difference(gradients(model), whole()) <= TOLERANCE
