"""A small mixture-of-experts language model over bytes, on packed sequences.

Dimensions: ``T`` bytes of this rank, ``D`` hidden, ``H`` heads, ``C`` columns of a head, ``F`` hidden of an expert,
``E`` experts, ``L`` of them on this rank, ``R`` rows these see, ``K`` top_k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Plan, Routing
from moe_dispatch.cli.place import Place
from moe_dispatch.dispatchers.metrics import Metrics
from packed_text.documents import NUM_TOKENS

NUM_BYTES = 256
ROTARY_BASE = 10_000.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes that the dispatcher's config does not hold."""

    num_layers: int = 2
    num_heads: int = 4
    expert_hidden: int = 128

    @property
    def hidden_multiple(self) -> int:
        """Every head has an even number of columns: rotary positions turn pairs of them."""
        return 2 * self.num_heads


class SwiGLUExperts(Dispatcher):
    """This rank's experts, and the way to the others': calling it is the whole layer.

    Every rank draws the weights of all experts and keeps its own, so that a model is the same on any number of ranks.
    """

    def __init__(self, config: DispatcherConfig, place: Place, hidden: int) -> None:
        super().__init__(config, place.group, control_group=place.control)
        local, width = config.num_experts // place.size, config.hidden_size
        own = slice(place.rank * local, (place.rank + 1) * local)
        up = torch.randn(config.num_experts, width, 2 * hidden) * width**-0.5
        down = torch.randn(config.num_experts, hidden, width) * hidden**-0.5
        self.up_LDF = nn.Parameter(up[own].clone())
        self.down_LFD = nn.Parameter(down[own].clone())

    def experts(self, sent: Dispatched) -> Tensor:
        """Each expert's rows through its weights: (R, D) to (R, D)."""
        offs = sent.offs
        value_RF, gate_RF = F.grouped_mm(sent.rows, self.up_LDF, offs=offs).chunk(2, dim=1)
        return F.grouped_mm(F.silu(gate_RF) * value_RF, self.down_LFD, offs=offs)


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self, config: DispatcherConfig, place: Place, shape: ModelShape) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = SwiGLUExperts(config, place, shape.expert_hidden)

    def forward(self, x_TD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """The layer. Collective.

        Returns:
            (T, D), and float32 (2, E): how many slots of this rank chose each expert, and the sum of its probabilities.
        """
        probs_TE = self.router(x_TD).float().softmax(dim=1)
        weights_TK, ids_TK = probs_TE.topk(self.top_k, dim=1)
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, ids_TK, 1.0)
        load_2E = torch.stack((chosen_TE.sum(dim=0), probs_TE.sum(dim=0)))
        return self.experts(x_TD, Routing(ids_TK, weights_TK), plan), load_2E


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a pack, with rotary positions that start anew in each."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        """(T, D) to (T, D)."""
        q_THC, k_THC, v_THC = self.qkv(x_TD).view(len(x_TD), 3, self.num_heads, -1).unbind(1)
        q_THC, k_THC = sequences.rotate(q_THC), sequences.rotate(k_THC)
        parts = [part_THC.split(sequences.lengths) for part_THC in (q_THC, k_THC, v_THC)]
        # One call per sequence rather than a block-diagonal mask: on a CPU the masked-out blocks would be computed too.
        mixed_THC = torch.cat([_attend(q, k, v) for q, k, v in zip(*parts, strict=True)])
        y_TD: Tensor = self.out(mixed_THC.flatten(1))
        return y_TD


def _attend(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor) -> Tensor:
    """Causal attention of one sequence."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q_THC, k_THC, v_THC))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """What attention needs to know of a pack: made once per step, for all layers.

    Attributes:
        lengths: bytes of each sequence.
        cos_TC: float32 (T, C/2), cosines of the rotary angles; ``sin_TC`` the sines.
    """

    lengths: list[int]
    cos_TC: Tensor
    sin_TC: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, columns: int, device: torch.device) -> Sequences:
        """From the pack's cu_seqlens, on the CPU."""
        lengths: list[int] = cu_seqlens.diff().tolist()
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        frequencies = ROTARY_BASE ** -(torch.arange(0, columns, 2) / columns)
        angles = (positions_T.unsqueeze(1) * frequencies).to(device)
        return cls(lengths=lengths, cos_TC=angles.cos(), sin_TC=angles.sin())

    def rotate(self, x_THC: Tensor) -> Tensor:
        """Turn each pair (i, i + C/2) of columns by its row's angle."""
        first, second = x_THC.chunk(2, dim=2)
        cos, sin = self.cos_TC.unsqueeze(1), self.sin_TC.unsqueeze(1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=2)


class Block(nn.Module):
    """Attention, then experts, each on the normed stream and added to it."""

    def __init__(self, config: DispatcherConfig, place: Place, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = PackedAttention(config.hidden_size, shape.num_heads)
        self.moe_norm = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(config, place, shape)

    def forward(self, x_TD: Tensor, sequences: Sequences, plan: Plan) -> tuple[Tensor, Tensor]:
        """(T, D), and the load of ``MoE``."""
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), sequences)
        y_TD, load_2E = self.moe(self.moe_norm(x_TD), plan)
        return x_TD + y_TD, load_2E


class ByteLanguageModel(nn.Module):
    """Predicts the next byte. Draws its weights from torch's default generator."""

    def __init__(self, config: DispatcherConfig, place: Place, shape: ModelShape = ModelShape()) -> None:
        super().__init__()
        self.columns = config.hidden_size // shape.num_heads
        self.embedding = nn.Embedding(NUM_TOKENS, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, place, shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, NUM_BYTES, bias=False)

    def forward(self, tokens_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, (T, 256), and this rank's loads, float32 (layers, 2, E). Collective."""
        plan = self.dispatchers[0].plan(THD(cu_seqlens))  # sizes are settled once, for all layers
        sequences = Sequences.of(cu_seqlens, self.columns, tokens_T.device)
        x_TD, loads = self.embedding(tokens_T), []
        for block in self.blocks:
            x_TD, load_2E = block(x_TD, sequences, plan)
            loads.append(load_2E)
        return self.head(self.norm(x_TD)), torch.stack(loads)

    @property
    def dispatchers(self) -> list[SwiGLUExperts]:
        """Of each layer; they share one channel."""
        return [module for module in self.modules() if isinstance(module, SwiGLUExperts)]

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of which every rank holds its own part; their gradients are complete without any exchange."""
        for dispatcher in self.dispatchers:
            yield from dispatcher.parameters()

    def replicated_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that every rank holds alike; their gradients must be summed over ranks."""
        sharded = {id(parameter) for parameter in self.expert_parameters()}
        return (parameter for parameter in self.parameters() if id(parameter) not in sharded)

    def close(self) -> Metrics:
        """Close the dispatchers. Collective.

        Returns:
            What they counted in their lives, over all ranks.
        """
        metrics = self.dispatchers[0].metrics(gather=True)  # one channel, one count
        for dispatcher in self.dispatchers:
            dispatcher.close()
        return metrics
