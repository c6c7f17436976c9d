"""Engines of DeepSpeed with AutoEP, trained on ranks: through AutoEP's own transport, through ours, and as one process.

A rank calls ``compared``, ``exchanged`` and so on with DeepSpeed's real package. Losses are sums over tokens, so ranks
may have batches of any length.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.idle_groups import garbage_in_idle_groups
from tests.integration.steps import difference, planted
from tests.integration.transformers.models import LAYERS, TOP_K, VOCABULARY, build
from tests.pages import run_page

STEPS, FEW = 20, 5
LENGTHS = (14, 9, 23, 5)  # of the batches, by rank
TOKENS = 50  # by which the loss is divided
BELOW_PEFT = r"base_model\.model\.model\.layers\.\d+\.mlp"  # AutoEP's own pattern has no such prefix
RATE, MOMENTUM = 2.0, 0.9  # so that weights change by more than bfloat16 rounds
BALANCED: dict[str, Any] = {"balance": {"name": "exact", "min_rows": 0}}  # copies also for these few rows

Weights = dict[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A training run. ``backend`` is None for AutoEP's own transport; ``fields`` are those of our config.

    With ``empty`` the last rank has no tokens at all, for which attention is cut out of the model: that of transformers
    fails for an empty batch. With ``together`` a step has one backward for all its micro-batches.
    """

    family: str = "qwen3_moe"
    stage: int = 1
    ep: int = 2
    backend: Any = "alltoall"
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    micro_batches: int = 1
    together: bool = False
    checkpoint: bool = False
    reentrant: bool = False
    empty: bool = False
    adapters: bool = False  # those of PEFT on the attention; all else is frozen
    dtype: torch.dtype = torch.float32
    bucket: int = 500_000_000  # numbers that ZeRO reduces at once
    garbage: bool = False  # whether experts call a grouped GEMM that leaves garbage for idle ones, as on Blackwell
    steps: int = STEPS
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def theirs(self) -> Case:
        return dataclasses.replace(self, backend=None, fields={}, checkpoint=False, reentrant=False, garbage=False)


@contextmanager
def idle_experts_get_garbage() -> Iterator[None]:
    """A block in which AutoEP's loop over experts, which it takes on a CPU, is a grouped GEMM as on Blackwell."""
    from deepspeed.moe import ep_experts

    def grouped(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor, *activation: Any) -> Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        gate, up = (torch._grouped_mm(x, weight.transpose(1, 2), offs=offs) for weight in (w1, w3))
        return torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)

    with mock.patch.object(ep_experts, "_run_experts_for_loop", grouped), garbage_in_idle_groups():
        yield


@contextmanager
def on_cpu(ranks: int) -> Iterator[None]:
    """A block in which DeepSpeed runs on a CPU without compiling its own operators."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # The attribute deepspeed.comm.torch is torch itself.
    with (
        mock.patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", return_value=None),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank())}),
    ):
        deepspeed.init_distributed("gloo", verbose=False)
        yield


@final
class NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


def model_of(case: Case) -> Any:
    model = build(case.family, **dict(case.changes))
    if case.empty:
        for layer in model.model.layers:
            layer.self_attn = NoAttention()
    if case.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.reentrant})
        if case.reentrant:
            model.enable_input_require_grads()
    return with_adapters(model).train() if case.adapters else model.train()


def with_adapters(model: Any, **targets: Any) -> Any:
    """The model in PEFT, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    adapted = get_peft_model(model, LoraConfig(r=4, **(targets or {"target_modules": ["q_proj", "v_proj"]})))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:  # as initialised, it is 0
                parameter.normal_(0, 0.2)
    return adapted


def engine_of(case: Case) -> Any:
    """The engine of a new model, with dispatchers of ours if the case has a backend."""
    import deepspeed

    from moe_dispatch.integrations.deepspeed import use_moe_dispatch

    model = model_of(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings_of(case))
    before = identities(engine)
    if case.backend is not None:
        engine.ours = use_moe_dispatch(engine, backend=case.backend, **case.fields)
    engine.untouched = identities(engine) == before
    return engine


def settings_of(case: Case) -> dict[str, Any]:
    """The config of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1 if case.together else case.micro_batches,
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": case.bucket,
            "stage3_param_persistence_threshold": 0,  # by default ZeRO 3 would not free parameters as small as ours
        },
        "zero_allow_untested_optimizer": True,  # SGD: its steps show the scale of gradients, unlike those of Adam
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}},
        "bf16": {"enabled": case.dtype == torch.bfloat16},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": case.ep,
            "preset_model": case.family,
            "use_grouped_mm": False,  # whose activation is a kernel for GPUs
            **({"moe_layer_pattern": BELOW_PEFT} if case.adapters else {}),
        },
    }


def loss_of(case: Case, model: Any, step: int, micro_batch: int, rank: int) -> Tensor:
    length = LENGTHS[rank] + (step + 3 * micro_batch) % 5
    seed = (step * 7 + micro_batch) * 11 + rank
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    if case.empty and rank == dist.get_world_size() - 1:
        ids = ids[:0]
    logits = model(input_ids=ids).logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / TOKENS


def take_steps(case: Case, engine: Any, steps: range) -> list[float]:
    """The losses of each step, summed over ranks and micro-batches."""
    losses, rank = [], dist.get_rank()
    for step in steps:
        total = torch.zeros(())
        waiting = []
        for micro_batch in range(case.micro_batches):
            loss = loss_of(case, engine, step, micro_batch, rank)
            total += loss.detach()
            if case.together:
                waiting.append(loss)
                continue
            engine.backward(loss)
            engine.step()
        if waiting:
            engine.backward(torch.stack(waiting).sum())
            engine.step()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def weights_of(engine: Any) -> Weights:
    """The weights of this rank, with the names and shapes of the dense model; of the experts, those of this rank."""
    import deepspeed

    found: Weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name.replace(".mlp.router.gate.", ".mlp.gate.")] = parameter.detach().float().clone()
    for name in [name for name in found if name.endswith(".experts.w1")]:
        path = name.removesuffix("w1")
        gate, up, down = (found.pop(f"{path}{weight}") for weight in ("w1", "w3", "w2"))
        found |= {f"{path}gate_up_proj": torch.cat([gate, up], dim=1), f"{path}down_proj": down}
    return found


def share_of(weights: Weights, ep: int) -> Weights:
    """The weights of a dense model, of the experts those of this rank."""
    rank = dist.get_rank() % ep
    return {name: weight.chunk(ep)[rank] if ".mlp.experts." in name else weight for name, weight in weights.items()}


@final
@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: list[float]
    weights: Weights
    same_parameters: bool = True
    counts: Mapping[str, float] = field(default_factory=dict)


def trained(case: Case) -> Trained:
    with idle_experts_get_garbage() if case.garbage else nullcontext():
        engine = engine_of(case)
        before = identities(engine)
        losses = take_steps(case, engine, range(case.steps))
    return Trained(
        losses=losses,
        weights=weights_of(engine),
        same_parameters=engine.untouched and identities(engine) == before,
        counts={} if case.backend is None else counts_of(engine),
    )


def identities(engine: Any) -> Any:
    """Of all parameters, by name, and of what the optimizer steps; keys of the state dict."""
    stepped = [id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]]
    return (
        {name: id(parameter) for name, parameter in engine.module.named_parameters()},
        stepped,
        list(engine.module.state_dict()),
    )


def counts_of(engine: Any) -> dict[str, float]:
    dispatchers = list(engine.ours.values())
    assert len(dispatchers) == LAYERS
    slots = torch.stack([dispatcher.expert_counts().sum() for dispatcher in dispatchers]).sum()
    dist.all_reduce(slots)
    return {"slots": float(slots), "fetches": dispatchers[0].metrics().collectives.get("weights", 0)}


@cache
def theirs(case: Case) -> Trained:
    return trained(case)


@cache
def dense(case: Case) -> Trained:
    """One process that trains on the batches of all ranks."""
    micro_batches, together, steps = case.micro_batches, case.together, case.steps
    model, ranks = model_of(case), dist.get_world_size()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)
    divisor = ranks * (1 if together else micro_batches)  # DeepSpeed takes means over ranks and micro-batches
    losses = []
    for step in range(steps):
        total = 0.0
        for micro_batch in range(micro_batches):
            for rank in range(ranks):
                loss = loss_of(case, model, step, micro_batch, rank)
                (loss / divisor).backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Trained(losses=losses, weights={name: weight.detach() for name, weight in model.named_parameters()})


def tokens_of(case: Case) -> int:
    """That all ranks route in a run, in one layer."""
    ranks = dist.get_world_size() - case.empty
    return sum(
        LENGTHS[rank] + (step + 3 * micro_batch) % 5
        for step in range(case.steps)
        for micro_batch in range(case.micro_batches)
        for rank in range(ranks)
    )


def compared(case: Case, rank: int) -> dict[str, Any]:
    """Ours beside AutoEP's own path, and, unless it rounds to bfloat16, beside one process."""
    want = theirs(case.theirs)
    got = trained(case)
    start = share_of(dict(model_of(case).named_parameters()), case.ep)
    result = {
        "losses": _apart(got.losses, want.losses),
        "updates": difference(_less(got.weights, start), _less(want.weights, start)),
        "updates_in_norm": _apart_in_norm(_less(got.weights, start), _less(want.weights, start)),
        "same_parameters": got.same_parameters,
        "slots": got.counts["slots"] == LAYERS * TOP_K * tokens_of(case),
        "fetches": got.counts["fetches"],
    }
    if case.dtype == torch.float32:
        one = dense(dataclasses.replace(case.theirs, stage=0, bucket=0, ep=1))
        result["losses_of_one"] = _apart(got.losses, one.losses)
        result["updates_of_one"] = difference(_less(got.weights, start), _less(share_of(one.weights, case.ep), start))
    return result


def _less(weights: Weights, start: Weights) -> Weights:
    """By how much weights have changed. A weight that is not trained shows in this, and hardly in the weights."""
    return {name: weight - start[name].detach().float() for name, weight in weights.items()}


def _apart_in_norm(got: Weights, want: Weights) -> float:
    """The largest difference of a tensor, as a part of its norm."""
    return max(float((got[name] - weight).norm() / weight.norm().clamp_min(1e-6)) for name, weight in want.items())


def _apart(got: list[float], want: list[float]) -> float:
    assert len(got) == len(want)
    return max(abs(a / b - 1) for a, b in zip(got, want, strict=True))


def with_fault(case: Case, fault: str, rank: int) -> float:
    """How far weights are from AutoEP's if gradients of copies are lost or counted twice."""
    with planted(fault):
        start = share_of(dict(model_of(case).named_parameters()), case.ep)
        return difference(_less(trained(case).weights, start), _less(theirs(case.theirs).weights, start))


def exchanged(case: Case, folder: str, rank: int) -> dict[str, float]:
    """A run that changes to another transport at a checkpoint, both ways, beside one that does not change."""
    half, whole = range(5), range(5, 10)
    apart = {}
    want = dataclasses.replace(case.theirs, steps=len(half) + len(whole))
    straight = theirs(want)
    for name, first, second in (("to ours", case.theirs, case), ("to theirs", case, case.theirs)):
        engine = engine_of(first)
        take_steps(first, engine, half)
        path = f"{folder}/{case.stage} {name}"
        engine.save_checkpoint(path)
        dist.barrier()
        engine = engine_of(second)
        with torch.no_grad():  # so that nothing but the checkpoint can bring the weights
            for parameter in engine.module.parameters():
                parameter.zero_()
        loaded, _ = engine.load_checkpoint(path)
        assert loaded is not None
        losses = take_steps(second, engine, whole)
        apart[f"{name}: losses"] = _apart(losses, straight.losses[len(half) :])
        apart[f"{name}: weights"] = difference(weights_of(engine), straight.weights)
    return apart


def evaluated(case: Case, mode: Callable[[], AbstractContextManager[Any]], rank: int) -> str:
    """The first sentence of what a step raises after a step and an evaluation; nothing if it trains."""
    engine = engine_of(case)
    take_steps(case, engine, range(1))
    engine.eval()
    with mode():
        loss_of(case, engine, 1, 0, rank)
    engine.train()
    try:
        take_steps(case, engine, range(1))
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return ""


def page(rank: int) -> list[int]:
    """The recipe of the page, as it stands: what each layer has counted on this rank."""
    case = Case()
    ids = torch.randint(VOCABULARY, (1, LENGTHS[rank]), generator=torch.Generator().manual_seed(rank))
    names = run_page(
        "integrations/deepspeed.md",
        model=model_of(case),
        config=settings_of(case),
        batch={"input_ids": ids, "labels": ids},
    )
    return [int(counts.sum()) for counts in names["counts"].values()]
