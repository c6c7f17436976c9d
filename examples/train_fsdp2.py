r"""Train a mixture-of-experts language model on real text, with FSDP2 and expert parallelism: a file to copy.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py --ep 2 --checkpoint out/saved --tensorboard out/events
    torchrun --nproc-per-node 2 examples/train_fsdp2.py --checkpoint out/saved --steps 40  # goes on, on other ranks
    torchrun --nproc-per-node 8 examples/train_fsdp2.py --backend deepep                   # another library
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --balance '{"name": "exact", "min_rows": 0}'

The last one gives every rank the same number of rows, with copies of experts also for the few rows of this model, for
which a copy does not pay. Variables such as MOE_DISPATCH_BACKEND=deepep set what the options leave out.

The text is what CPython ships for `help()`, as bytes. Documents lie one after another in packs of 256 rows, and what
remains of a pack is padding: it goes to no expert and counts in no loss. A step takes 8 packs on any number of ranks,
so its loss does not depend on the ranks, the backend or a resume, up to rounding. With Python
3.11 it falls in steps 2 and 3, which are mostly tables drawn in ASCII, and jumps back in step 4.

Ranks are a table of `copies` x `ep`. The ranks of a row hold all experts, and those of a column hold the same ones.

Dimensions: T rows of a pack, D hidden size, H heads, C columns of a head, F columns of an expert, E experts, L experts
of this rank, R rows that they get, K top_k.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
from collections.abc import Iterator
from itertools import count, islice, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Plan, Routing
from moe_dispatch.dispatchers import Metrics, SlotWeights
from moe_dispatch.lean import first_mm, last_mm, swiglu
from moe_dispatch.recompute import keep_routes
from moe_dispatch.training import Setup

LAYERS, HIDDEN, HEADS, INNER, EXPERTS, TOP_K = 2, 256, 4, 128, 8, 2
ROWS, PACKS, BEGIN, VOCABULARY = 256, 8, 256, 257  # rows of a pack, packs of a step; 256 stands before a document
LEARNING_RATE, MAX_NORM, AUXILIARY, SEED = 2e-3, 1.0, 0.01, 0


# ---- the model ----


class Experts(Dispatcher):
    """The routed experts of one layer. A call pads, dispatches, runs them, combines and trims: (T, D) to (T, D)."""

    def __init__(self, config: DispatcherConfig, mesh: DeviceMesh, name: str) -> None:
        super().__init__(config, mesh["ep"].get_group(), name=name)
        self.slot_weights = SlotWeights(self)  # brings the weights of copies with balance="exact"; else does nothing
        self.gate_up = own_experts(torch.randn(EXPERTS, HIDDEN, 2 * INNER) * HIDDEN**-0.5, mesh["ep"])
        self.down = own_experts(torch.randn(EXPERTS, INNER, HIDDEN) * INNER**-0.5, mesh["ep"])

    def run_experts(self, sent: Dispatched) -> Any:
        """Apply SwiGLU to the rows of each expert: (R, D) to (R, D)."""
        return self.slot_weights.run(sent, mlp, own_part(self.gate_up), own_part(self.down))[1]


def mlp(part: Dispatched, gate_up_LDF: Tensor, down_LFD: Tensor) -> Any:
    """Save the rows as they arrived, with `deliver="packets"`, and the first product."""
    return last_mm(part, first_mm(part, gate_up_LDF), down_LFD, activation=swiglu)


def own_experts(weight: Tensor, ep: DeviceMesh) -> nn.Parameter:
    """Keep the part (L, ...) of (E, ...) that belongs to this rank, as a DTensor, which checkpoints can join."""
    part = weight.chunk(ep.size())[ep.get_local_rank()].contiguous()
    return nn.Parameter(DTensor.from_local(part.to(ep.device_type), ep, [Shard(0)]))


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a parameter or of its gradient."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


class MoE(nn.Module):
    """A router, its experts, and a shared expert that sees every row."""

    def __init__(self, config: DispatcherConfig, mesh: DeviceMesh, name: str) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(config, mesh, name)
        self.shared_gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.shared_down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x_TD: Tensor, plan: Plan, real_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the auxiliary loss of Switch Transformer (arXiv:2101.03961), times the real tokens."""
        probabilities_TE = self.router(x_TD).softmax(dim=1, dtype=torch.float32)
        weights_TK, ids_TK = probabilities_TE.topk(TOP_K, dim=1)
        routing = Routing(ids_TK, weights_TK / weights_TK.sum(dim=1, keepdim=True))
        gate, up = self.shared_gate_up(x_TD).chunk(2, dim=1)
        y_TD = self.experts(x_TD, routing, plan) + self.shared_down(F.silu(gate) * up)
        # Rows of padding have probabilities too. They must not count, or the loss would balance padding.
        chosen_E = torch.zeros_like(probabilities_TE).scatter(1, ids_TK, 1.0)[real_T].mean(dim=0) / TOP_K
        auxiliary = EXPERTS * (chosen_E * probabilities_TE[real_T].sum(dim=0)).sum()
        return y_TD, auxiliary


class Block(nn.Module):
    """Attention inside each document, then experts."""

    def __init__(self, config: DispatcherConfig, mesh: DeviceMesh, name: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = MoE(config, mesh, name)

    def forward(self, x_TD: Tensor, seen_TT: Tensor, plan: Plan, real_T: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norms[0](x_TD)).view(len(x_TD), 3, HEADS, -1).permute(1, 2, 0, 3)  # each (H, T, C)
        mixed_HTC = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen_TT)[0]
        x_TD = x_TD + self.out(mixed_HTC.transpose(0, 1).flatten(1))
        y_TD, auxiliary = self.moe(self.norms[1](x_TD), plan, real_T)
        return x_TD + y_TD, auxiliary


class LanguageModel(nn.Module):
    """Predict the next byte of each document of a pack."""

    def __init__(self, config: DispatcherConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(ROWS, HIDDEN)
        self.blocks = nn.ModuleList([Block(config, mesh, f"blocks.{number}") for number in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens_T: Tensor, layout: THD) -> tuple[Tensor, Tensor]:
        """Return the logits (T, V) and the auxiliary loss of all layers, a sum over the real tokens."""
        document_T, place_T = layout.positions((ROWS, HIDDEN)).to(tokens_T.device)
        real_T = document_T >= 0
        # One mask keeps the example short. At real sizes, give `layout.cu_seqlens` to a kernel for packed attention.
        seen_TT = (document_T[:, None] == document_T) & (place_T[:, None] >= place_T)
        x_TD = self.tokens(tokens_T) + self.places(place_T.clamp(min=0))
        plan = self.dispatchers[0].plan(layout, like=x_TD)  # one for all layers
        auxiliary = x_TD.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            # The backward computes the block again. keep_routes sends its rows on the routes of the forward, without
            # another combine, because the block only adds the result of the experts to other tensors.
            keep = functools.partial(keep_routes, only_added=True)
            x_TD, of_block = checkpoint(block, x_TD, seen_TT, plan, real_T, use_reentrant=False, context_fn=keep)
            auxiliary = auxiliary + of_block
        return self.head(self.norm(x_TD)), auxiliary

    @property
    def dispatchers(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]


# ---- its ranks ----


def shard(model: LanguageModel, mesh: DeviceMesh, dtype: torch.dtype) -> FSDPModule:
    """Shard experts over the ranks that hold the same ones, and everything else over all ranks."""
    return Setup(mesh).shard(
        model,
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        router_policy=MixedPrecisionPolicy(param_dtype=torch.float32),
        blocks=[module for module in model.modules() if isinstance(module, Block)],
    )


# ---- the data ----


def packs() -> Iterator[tuple[Tensor, Tensor, THD]]:
    """Yield tokens (T,), targets (T,) that are -100 on padding, and the layout, without end and alike on every rank."""
    documents: list[bytes] = []
    for number in count():
        epoch = random.Random(SEED + number).sample(sorted(topics), len(topics))
        for text in (topics[name].encode() for name in epoch):
            for start in range(0, len(text), ROWS):
                document = text[start : start + ROWS]
                if sum(map(len, documents)) + len(document) > ROWS:
                    yield packed(documents)
                    documents = []
                documents.append(document)


def packed(documents: list[bytes]) -> tuple[Tensor, Tensor, THD]:
    tokens_T, targets_T = torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS,), -100)
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0).tolist()
    for document, (start, end) in zip(documents, pairwise(ends), strict=True):
        tokens_T[start:end] = torch.tensor([BEGIN, *document[:-1]])
        targets_T[start:end] = torch.tensor(list(document))
    # The padding behind the last document belongs to it in `cu_seqlens_padded`.
    return tokens_T, targets_T, THD(ends, [*ends[:-1], ROWS])


# ---- the training ----


def train(given: argparse.Namespace) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    ep = given.ep or size
    if PACKS % size or size % ep:
        raise SystemExit(f"{size} ranks must divide {PACKS} packs, and --ep {ep} must divide the ranks")
    mesh = init_device_mesh(device.type, (size // ep, ep), mesh_dim_names=("copies", "ep"))
    chosen = {name: getattr(given, name) for name in ("backend", "balance") if name in given}
    config = DispatcherConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, deliver="packets", **chosen)
    # Every rank draws all experts and keeps its part. Experts of a real size are too large for that: draw only those of
    # the rank, each from a seed of its own, or load them from a checkpoint.
    torch.manual_seed(SEED)
    model = LanguageModel(config, mesh).to(device)
    dispatchers = model.dispatchers
    sharded = shard(model, mesh, getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    setup = Setup(mesh)
    first = restore(given.checkpoint, setup.state(model, optimizer))
    if first and rank == 0:
        print(f"resumed from step {first}{': nothing to do, give more --steps' * (first >= given.steps)}", flush=True)
    writer = tensorboard_writer(given.tensorboard) if given.tensorboard and rank == 0 else None
    stream = islice(packs(), first * PACKS, None)
    before, num_logged = dispatchers[0].metrics(gather=True), 0  # of all layers, which share a channel
    for step in range(first, given.steps):
        batch = [next(stream) for _ in range(PACKS)]
        num_real = sum(int((targets_T >= 0).sum()) for _, targets_T, _ in batch)
        total = torch.zeros((), device=device)
        mine = batch[rank::size]
        for number, (tokens_T, targets_T, layout) in enumerate(mine):
            sharded.set_requires_gradient_sync(number == len(mine) - 1)
            logits, auxiliary = model(tokens_T.to(device), layout)
            loss = F.cross_entropy(logits.float(), targets_T.to(device), reduction="sum")
            # FSDP averages over the ranks, so the sum over tokens is multiplied by their number.
            ((loss + AUXILIARY * auxiliary) * (size / num_real)).backward()
            total += loss.detach() / num_real
        setup.reduce(model)
        norm = setup.clip(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        num_logged += num_real
        values = {"loss": total.item(), "gradient_norm": norm.item()}
        if given.tensorboard and (step + 1) % given.log_every == 0:  # reading metrics is collective
            now = dispatchers[0].metrics(gather=True)
            values |= scalars(now - before, num_logged)
            before, num_logged = now, 0
        if rank == 0:
            print(f"step {step + 1}, loss {values['loss']:.5f}", flush=True)
        for name, value in values.items():
            if writer is not None:
                writer.add_scalar(name, value, step + 1)
        if given.checkpoint is not None and (step + 1 == given.steps or (step + 1) % given.save_every == 0):
            save(given.checkpoint, setup.state(model, optimizer), step + 1)
    if writer is not None:
        writer.close()
    for dispatcher in dispatchers:
        dispatcher.close()


def scalars(steps: Metrics, num_real: int) -> dict[str, float]:
    """Return loads of experts, dropped slots and padding, of all ranks and layers in steps of ``num_real`` rows."""
    return {
        "experts/busiest_over_mean": steps.imbalance,
        "experts/slots_dropped": LAYERS * TOP_K * num_real - steps.real_tokens_per_expert.sum().item(),
        "experts/rows_padded": sum(steps.rows_padded.values()),
    }


def save(folder: Path, state: Stateful, step: int) -> None:
    dcp.save({"training": state, "step": step}, checkpoint_id=folder / f"step-{step:06}")


def restore(folder: Path | None, state: Stateful) -> int:
    """Load the last checkpoint of a folder, of any number of ranks. Return its step, or 0 without one."""
    found = [] if folder is None else sorted(folder.glob("step-*/.metadata"))  # which is written last
    if not found:
        return 0
    loaded: dict[str, Any] = {"training": state, "step": 0}
    dcp.load(loaded, checkpoint_id=found[-1].parent)
    step: int = loaded["step"]
    return step


def tensorboard_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - a package that only --tensorboard needs

    return SummaryWriter(folder)


def name_or_options(text: str) -> str | dict[str, Any] | None:
    """Return a name, or options as JSON, such as ``{"name": "alltoall", "reduction": "exact"}``; None for "none"."""
    return None if text == "none" else json.loads(text) if text.startswith("{") else text


@record  # so that torchrun's last lines show the error of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    left_out = argparse.SUPPRESS
    parser.add_argument("--backend", type=name_or_options, default=left_out, help="a name, or options as JSON")
    parser.add_argument("--balance", type=name_or_options, default=left_out, help="the same, or none")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; by default all")
    parser.add_argument("--steps", type=int, default=20, help="the last step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="to compute in")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints; the last has one")
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two reads of the metrics of experts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
