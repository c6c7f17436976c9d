"""Models whose routers replay a table, and the same models with routers that are forced to the table's experts.

The forced routers know nothing of RoutingReplay. A hook of the test computes their weights from their logits, by the
formula of each family as it is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.integrations.transformers import RoutingReplay, dispatchers_of
from moe_dispatch.layouts import Masked
from moe_dispatch.replay import Cut, RoutingTable
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, EXPERTS, HIDDEN, TOP_K, Batch, build
from tests.integration.transformers.ranks import Case, load
from tests.integration.transformers.wiring import Gradients, gradients, loss_of, targets

Weights = Callable[[Any, Tensor, Tensor], Tensor]  # router, logits (T, E), ids (T, K) -> weights (T, K)
SCALE = 2.5  # of the weights, in every config that has one


def softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.softmax(1).gather(1, ids)


def sigmoid(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.sigmoid().gather(1, ids)


def softmax_of_chosen(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(1, ids).softmax(1)


def normed(weights: Weights, scale: float = 1.0) -> Weights:
    def divided(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
        chosen = weights(router, logits, ids)
        return scale * chosen / chosen.sum(1, keepdim=True)

    return divided


def scaled(weights: Weights) -> Weights:
    return lambda router, logits, ids: SCALE * weights(router, logits, ids)


def gemma4(router: Any, probabilities: Tensor, ids: Tensor) -> Tensor:
    chosen, scale = probabilities.gather(1, ids), router.per_expert_scale[ids]
    return chosen / chosen.sum(1, keepdim=True) * torch.as_tensor(scale)


WEIGHTS: dict[str, Weights] = {
    "afmoe": normed(sigmoid, SCALE),
    "aria_text": softmax_of_chosen,
    "beam": normed(sigmoid),
    "cohere2_moe": softmax_of_chosen,
    "deepseek_v2": scaled(softmax),
    "deepseek_v3": normed(sigmoid, SCALE),
    "ernie4_5_moe": normed(softmax),
    "gemma4_text": gemma4,
    "glm4_moe": normed(sigmoid, SCALE),
    "gpt_oss": softmax_of_chosen,
    "granitemoe": softmax_of_chosen,
    "hunyuan_v1_moe": normed(softmax),
    "hy_v3": normed(sigmoid, SCALE),
    "jamba": softmax,
    "kolibri1": sigmoid,
    "laguna": normed(sigmoid),
    "lfm2_moe": normed(sigmoid, SCALE),
    "minimax_m2": normed(sigmoid),
    "mixtral": normed(softmax),
    "olmoe": softmax,
    "qwen2_moe": softmax,
    "qwen3_5_moe_text": normed(softmax),
    "qwen3_moe": normed(softmax),
}


def double(family: str) -> Any:
    """The model in float64, for which transformers has only the loop over experts."""
    model = build(family, dtype=torch.float64).train()
    model.set_experts_implementation("eager")
    model.config.use_cache = False  # a recomputed layer would write to the cache again
    return model


def draw_table(layers: int) -> RoutingTable:
    """Ids that no router would choose, for all batches. The first and the last position of a sequence are unknown."""
    generator = torch.Generator().manual_seed(3)
    sequences = {}
    for number, batch in enumerate(BATCHES):
        for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
            ids = torch.rand(max(length - 1, 0), layers, EXPERTS, generator=generator).argsort(2)[:, :, :TOP_K]
            ids[:1] = -1
            sequences[f"{number}.{row}"] = ids
    return RoutingTable(sequences, num_experts=EXPERTS, last_missing=True)


def cut_of(table: RoutingTable, number: int, step: int = 0) -> Cut:
    mask = BATCHES[number].attention_mask
    return table.cut(Masked(mask.flatten() != 0), names_of(number), like=(*mask.shape, HIDDEN), step=step)


def names_of(number: int) -> list[str]:
    return [f"{number}.{row}" for row in range(len(BATCHES[number].attention_mask))]


def differences(recorded_SLK: Tensor, replayed_SLK: Tensor) -> int:
    """Ids that were replayed and are not those that were recorded, and entries that were not recorded."""
    known = replayed_SLK != -2
    return int((recorded_SLK != replayed_SLK)[known].sum()) + int((recorded_SLK < 0).sum())


def experts_of(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "_apply_gate")]


def routers_of(model: Any) -> list[Any]:
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in experts_of(model)]
    return [owner.gate if hasattr(owner, "gate") else owner.router for owner in owners]


@contextmanager
def forced(model: Any, weights: Weights, table: RoutingTable, number: int) -> Iterator[list[int]]:
    """Force the routers to the table's ids in the block. The result counts slots: drifted, replayed."""
    mask, counts = BATCHES[number].attention_mask != 0, [0, 0]

    def force(layer: int) -> Callable[..., Any]:
        ids_BSK = torch.full((*mask.shape, TOP_K), -2)
        for row, real in enumerate(mask):
            ids_BSK[row][real] = table.entries(f"{number}.{row}")[:, layer]

        def hook(router: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits, old, own = output[0].view(-1, EXPERTS), output[1], output[2].view(-1, TOP_K)
            known = ids_BSK.view(-1, TOP_K) >= 0
            ids = torch.where(known, ids_BSK.view(-1, TOP_K), own)
            counts[0] += int((known & ~(ids.unsqueeze(2) == own.unsqueeze(1)).any(2)).sum())
            counts[1] += int(known.sum())
            return output[0], weights(router, logits, ids).to(old.dtype).view(old.shape), ids.view(output[2].shape)

        return hook

    handles = [router.register_forward_hook(force(layer)) for layer, router in enumerate(routers_of(model))]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def dense(family: str, table: RoutingTable, numbers: tuple[int, ...]) -> tuple[float, Gradients, list[int]]:
    """Loss, gradients and counts of the forced model over all batches."""
    model, total, counts = double(family), 0.0, [0, 0]
    for number in numbers:
        with forced(model, WEIGHTS[family], table, number) as seen:
            loss = loss_of(model, BATCHES[number], targets(*chosen(numbers)))
        loss.backward()
        total += loss.item()
        counts = [before + new for before, new in zip(counts, seen, strict=True)]
    return total, gradients(model), counts


def chosen(numbers: tuple[int, ...]) -> tuple[Batch, ...]:
    return tuple(BATCHES[number] for number in numbers)


def replay_losses(model: Any, table: RoutingTable, numbers: tuple[int, ...], *, step: int = 0) -> list[Tensor]:
    """One forward for each batch, each in a block of its own. No backward has run yet."""
    replay = RoutingReplay(model)
    losses = []
    for number in numbers:
        with replay.micro_batch(cut_of(table, number, step)):
            losses.append(loss_of(model, BATCHES[number], targets(*chosen(numbers))))
    return losses


def drift_of(model: Any, *, gather: bool = False) -> list[int]:
    """The slots that drifted and those that were replayed, over all layers."""
    metrics = next(iter(dispatchers_of(model).values())).metrics(gather=gather)
    return [sum(metrics.slots_drifted.values()), sum(metrics.slots_replayed.values())]


TWO = (1, 3)  # padding on the left, and holes


def on_two_ranks(case: Case, rank: int) -> dict[str, float]:
    """Errors of loss and gradients of the sharded model that replays, in float32, and of its counts."""
    numbers = TWO[: case.mesh.fsdp]
    model = load(case).train()
    model.config.use_cache = False
    if case.checkpoint:
        model.activation_checkpointing_enable()
    table = draw_table(len(experts_of(model)))
    before = drift_of(model, gather=True)
    mine = numbers[case.mesh.batch_of(rank)]
    with RoutingTable.record(list(dispatchers_of(model).values())) as recording:
        recording.micro_batch(names_of(mine))
        with RoutingReplay(model).micro_batch(cut_of(table, mine)):
            loss = loss_of(model, BATCHES[mine], targets(*chosen(numbers)))
    recorded = recording.table()
    (loss * case.mesh.fsdp).backward()  # FSDP takes the mean over batches
    total = loss.detach().clone()
    dist.all_reduce(total)
    wanted, wanted_gradients, counts = dense(case.family, table, numbers)
    after = drift_of(model, gather=True)
    return {
        "loss": abs(total.item() / case.mesh.tp / wanted - 1),
        "gradients": difference(gradients(model), wanted_gradients),
        "drifted": after[0] - before[0] - counts[0],
        "replayed": after[1] - before[1] - counts[1],
        "recorded": sum(differences(recorded.entries(name), table.entries(name)) for name in names_of(mine)),
    }
