"""Replay the routing of a rollout in a trainer, with Ray: python examples/ray_replay.py --out out

Two rollout actors sample from a tiny mixture-of-experts model with ``generate`` of transformers. Their router rounds
its logits to bfloat16, as an engine in lower precision does. Two trainer actors hold half of the experts each. They get
the samples in another order, padded, and compute the log-probabilities of the sampled tokens with and without replay.
All else is in float64, so with replay the ratios of the probabilities are 1.

Needs the packages of the extra ``ray-example``. One process per actor, about 2 minutes on two cores.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import matplotlib
import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_dispatch import BSHD, Dispatched, Dispatcher, DispatcherConfig
from moe_dispatch.replay import RoutingTable, replayed

EXPERTS, TOP_K, HIDDEN, LAYERS, VOCABULARY = 32, 4, 64, 6, 256
PROMPT, RESPONSE, WORKERS = 12, 24, 2
CONFIG = DispatcherConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN)

Sample = dict[str, Any]


def build_model() -> Qwen3MoeForCausalLM:
    """Build the same random model in every actor, in float64."""
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(shape).double()
    model.set_experts_implementation("eager")  # the other implementations refuse float64
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):  # the norms of transformers compute in float32
                norm = nn.RMSNorm(len(child.weight), eps=1e-6, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model


class EngineRouter(nn.Module):
    """A router that chooses by logits in bfloat16, and keeps what it chose."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = F.linear(x.reshape(-1, HIDDEN), self.weight)
        ids_TK = logits_TE.bfloat16().topk(TOP_K, dim=1).indices
        weights_TK = logits_TE.softmax(1).gather(1, ids_TK)
        self.chosen.append(ids_TK)
        return logits_TE, weights_TK / weights_TK.sum(1, keepdim=True), ids_TK


class Rollout:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = build_model().eval()
        for layer in self.model.model.layers:
            layer.mlp.gate = EngineRouter(layer.mlp.gate.weight)

    def sample(self, name: str, seed: int) -> Sample:
        """Sample one sequence. Return its tokens, the log-probabilities of the response, and the routing."""
        torch.manual_seed(seed)
        routers = [layer.mlp.gate for layer in self.model.model.layers]
        for router in routers:
            router.chosen.clear()
        logits: list[Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda module, given, out: logits.append(out[0, -1]))
        prompt = torch.randint(1, VOCABULARY, (1, PROMPT - seed % 5))
        new = RESPONSE - seed % 7
        tokens = self.model.generate(
            prompt, do_sample=True, top_k=0, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
        )[0]
        hook.remove()
        response = tokens[prompt.shape[1] :]
        logprobs = torch.stack(logits).log_softmax(1).gather(1, response[:, None])[:, 0]
        # (tokens - 1, layers, top_k): the last token was never fed to the model.
        routing = torch.stack([torch.cat(router.chosen) for router in routers], 1)
        return {"name": name, "tokens": tokens, "response": len(response), "logprobs": logprobs, "routing": routing}


class ReplayedMoE(Dispatcher):
    """The MoE block of the trainer: half of the experts, and a router that replays."""

    def __init__(self, block: Any, group: dist.ProcessGroup, layer: int) -> None:
        super().__init__(CONFIG, group, name=f"layers.{layer}")
        self.layer = layer
        self.router = nn.Parameter(block.gate.weight.detach().clone())
        whole = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        up, down = (weight.chunk(self.ep_size)[self.ep_rank].transpose(1, 2).clone() for weight in whole)
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.layout = BSHD()
        self.ids_of: Any = None

    def run_experts(self, sent: Dispatched) -> Tensor:
        gate, up = sent.grouped_mm(sent.rows, self.up).chunk(2, dim=1)
        return sent.grouped_mm(F.silu(gate) * up, self.down)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        scores_TE = F.linear(x.reshape(-1, HIDDEN), self.router).softmax(1)
        routing = replayed(self.ids_of(self.layer), scores_TE, normalize=True)
        y: Tensor = super().forward(x, routing, self.layout)
        return y


class Trainer:
    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, address: str, rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
        assert dist.group.WORLD is not None
        self.group, self.model = dist.group.WORLD, build_model()
        for number, layer in enumerate(self.model.model.layers):
            layer.mlp = ReplayedMoE(layer.mlp, self.group, number)
        self.blocks = [layer.mlp for layer in self.model.model.layers]

    def compare(self, samples: list[Sample], *, replay: bool, step: int) -> dict[str, Any]:
        """Compute log-probabilities and their gradient, in two micro-batches.

        Returns:
            Logarithms of the ratios by sample, the routing that was used, and the size of the routers' gradient.
        """
        table = RoutingTable({s["name"]: s["routing"] for s in samples}, num_experts=EXPERTS, last_missing=True)
        table.check(CONFIG, num_layers=LAYERS, group=self.group)
        log_ratios: dict[str, Tensor] = {}
        with RoutingTable.record(self.blocks) as recording:
            for batch in (samples[1::2], samples[::2]):
                recording.micro_batch([sample["name"] for sample in batch])
                log_ratios |= self._log_ratios(table, batch, replay=replay, step=step)
        torch.cat(list(log_ratios.values())).exp().sum().backward()
        if replay:
            table.check_used()
        gradient = sum(float(block.router.grad.abs().sum()) for block in self.blocks)
        used = recording.table()
        return {
            "log_ratios": {name: values.detach() for name, values in log_ratios.items()},
            "routing": {name: used.entries(name) for name in used.lengths},
            "gradient": gradient,
        }

    def _log_ratios(self, table: RoutingTable, batch: list[Sample], *, replay: bool, step: int) -> dict[str, Tensor]:
        lengths = [len(sample["tokens"]) for sample in batch]
        width = max(lengths) + 3  # padded further than needed, as trainers do
        tokens = torch.stack([F.pad(sample["tokens"], (0, width - len(sample["tokens"]))) for sample in batch])
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        layout, shape = BSHD(lengths), (*tokens.shape, HIDDEN)
        cut = table.cut(layout, [sample["name"] for sample in batch], like=shape, step=step, group=self.group)
        unknown = torch.full((tokens.numel(), TOP_K), -2)
        for block in self.blocks:
            block.layout = layout
            block.ids_of = cut.routing_for if replay else lambda layer: unknown
        logits = self.model(input_ids=tokens, attention_mask=mask).logits.double()
        found = {}
        for row, sample in enumerate(batch):
            first, end = lengths[row] - sample["response"], lengths[row]
            logprobs = logits[row, first - 1 : end - 1].log_softmax(1)
            chosen = logprobs.gather(1, sample["tokens"][first:, None])[:, 0]
            found[sample["name"]] = chosen - sample["logprobs"]
        return found

    def leave(self) -> None:
        dist.destroy_process_group()


def run(num_samples: int) -> dict[str, dict[str, Any]]:
    """Sample, then compare with and without replay. Return the results of both trainers together."""
    actor = ray.remote(num_cpus=1)
    rollouts = [actor(Rollout).remote() for _ in range(WORKERS)]
    trainers = [actor(Trainer).remote() for _ in range(WORKERS)]
    address = ray.get(trainers[0].address.remote())
    joined = [trainer.join.remote(address, rank) for rank, trainer in enumerate(trainers)]
    samples = ray.get([rollouts[i % WORKERS].sample.remote(f"sample-{i}", i) for i in range(num_samples)])
    ray.get(joined)
    routing = {sample["name"]: sample["routing"] for sample in samples}
    results = {}
    for step, (kind, replay) in enumerate({"with replay": True, "without replay": False}.items()):
        halves = [samples[rank::WORKERS][::-1] for rank in range(WORKERS)]
        pairs = zip(trainers, halves, strict=True)
        parts = ray.get([trainer.compare.remote(half, replay=replay, step=step) for trainer, half in pairs])
        used = {name: ids for part in parts for name, ids in part["routing"].items()}
        differs = torch.cat([_differs(used[name][:-1], routing[name]) for name in routing])
        results[kind] = {
            "drift_L": differs.double().mean((0, 2)),
            "log_ratios": torch.cat([v for part in parts for v in part["log_ratios"].values()]),
            "gradient": min(part["gradient"] for part in parts),
        }
    ray.get([trainer.leave.remote() for trainer in trainers])
    return results


def _differs(used: Tensor, wanted: Tensor) -> Tensor:
    """Return which slots of the rollout, (S, L, K), the trainer did not use."""
    return ~(wanted.unsqueeze(3) == used.unsqueeze(2)).any(3)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the drift of each layer, and the ratios of all tokens."""
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - after the choice of the backend

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for (kind, result), color in zip(results.items(), ("tab:blue", "tab:red"), strict=True):
        left.plot(range(LAYERS), 100 * result["drift_L"], "o-", color=color, label=kind)
        off = (result["log_ratios"].exp() - 1).abs().sort().values.clamp(min=1e-17)
        right.semilogy(torch.linspace(0, 100, len(off)), off, color=color, label=kind)
    left.set(
        xlabel="MoE layer", ylabel="% of slots", title="Slots routed otherwise than in the rollout", ylim=(-0.1, None)
    )
    right.set(xlabel="% of tokens", ylabel="|ratio - 1|", title="Ratio of the probabilities at step 0")
    left.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    ray.init(num_cpus=2 * WORKERS, include_dashboard=False, logging_level="error")
    results = run(given.samples)
    ray.shutdown()
    for kind, result in results.items():
        off = float((result["log_ratios"].exp() - 1).abs().max())
        print(
            f"{kind}: {100 * float(result['drift_L'].mean()):.1f} % of the slots differ from the rollout, "
            f"the ratios differ from 1 by at most {off:.1e}, {len(result['log_ratios'])} tokens"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    draw(results, given.out / "replay.png")
    assert not results["with replay"]["drift_L"].any()
    assert float((results["with replay"]["log_ratios"].exp() - 1).abs().max()) < 1e-12
    assert results["with replay"]["gradient"] > 0


if __name__ == "__main__":
    main()
