"""A small mixture-of-experts language model over bytes, on packed sequences.

Dimensions: ``T`` bytes of this rank, ``D`` hidden size, ``H`` heads, ``C`` columns of a head, ``F`` hidden size of an
expert, ``E`` experts, ``L`` experts of this rank, ``R`` rows that reach them, ``K`` top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dispatch import THD, Dispatched, Dispatcher, DispatcherConfig, Plan, Routing
from packed_text.documents import NUM_TOKENS

NUM_BYTES = 256
ROTARY_BASE = 10_000.0

Group = dist.ProcessGroup | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of the model that the config of its dispatchers does not hold."""

    num_layers: int = 2
    num_heads: int = 4
    expert_hidden: int = 128

    @property
    def hidden_multiple(self) -> int:
        """The multiple that ``hidden_size`` must be: rotary positions need an even number of columns per head."""
        return 2 * self.num_heads


class SwiGLUExperts(Dispatcher):
    """The experts of this rank, and the dispatcher that brings them rows; a call runs the whole layer.

    Every rank draws the weights of all experts and keeps its own. So the model is the same on any number of ranks.
    """

    def __init__(self, config: DispatcherConfig, group: Group, hidden: int, name: str) -> None:
        super().__init__(config, group, name=name)
        up_EDF = torch.randn(config.num_experts, config.hidden_size, 2 * hidden) * config.hidden_size**-0.5
        down_EFD = torch.randn(config.num_experts, hidden, config.hidden_size) * hidden**-0.5
        self.up_LDF = nn.Parameter(up_EDF.chunk(self.ep_size)[self.ep_rank].clone())
        self.down_LFD = nn.Parameter(down_EFD.chunk(self.ep_size)[self.ep_rank].clone())

    def run_experts(self, sent: Dispatched) -> Tensor:
        """Apply each expert to its rows: (R, D) to (R, D)."""
        value_RF, gate_RF = sent.grouped_mm(sent.rows, self.up_LDF).chunk(2, dim=1)
        return sent.grouped_mm(F.silu(gate_RF) * value_RF, self.down_LFD)


class MoE(nn.Module):
    """A router and its experts."""

    def __init__(self, config: DispatcherConfig, group: Group, shape: ModelShape, name: str) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = SwiGLUExperts(config, group, shape.expert_hidden, name)

    def forward(self, x_TD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Run the layer. Collective.

        Returns:
            The output (T, D), and the load, float32 (2, E): how many slots of this rank chose each expert, and the sum
            of its probabilities.
        """
        probs_TE = self.router(x_TD).float().softmax(dim=1)
        weights_TK, ids_TK = probs_TE.topk(self.top_k, dim=1)
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, ids_TK, 1.0)
        load_2E = torch.stack((chosen_TE.sum(dim=0), probs_TE.sum(dim=0)))
        return self.experts(x_TD, Routing(ids_TK, weights_TK), plan), load_2E


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a pack. Rotary positions start at 0 in each sequence."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        """Mix the rows of each sequence: (T, D) to (T, D)."""
        q_THC, k_THC, v_THC = self.qkv(x_TD).view(len(x_TD), 3, self.num_heads, -1).unbind(1)
        q_THC, k_THC = sequences.rotate(q_THC), sequences.rotate(k_THC)
        parts = [part_THC.split(sequences.lengths) for part_THC in (q_THC, k_THC, v_THC)]
        # One call per sequence: on a CPU, one call with a block-diagonal mask would compute the masked blocks too.
        mixed_THC = torch.cat([_attend(q, k, v) for q, k, v in zip(*parts, strict=True)])
        y_TD: Tensor = self.out(mixed_THC.flatten(1))
        return y_TD


def _attend(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor) -> Tensor:
    """Apply causal attention to one sequence."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q_THC, k_THC, v_THC))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Lengths and rotary angles of the sequences of a pack. They are made once per step, for all layers.

    Attributes:
        lengths: Number of bytes of each sequence.
        cos_TC: Cosines of the rotary angles, float32 (T, C/2).
        sin_TC: Sines of the rotary angles, float32 (T, C/2).
    """

    lengths: list[int]
    cos_TC: Tensor
    sin_TC: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, columns: int, device: torch.device) -> Sequences:
        """Compute them from the ``cu_seqlens`` of a pack, on the CPU."""
        lengths: list[int] = cu_seqlens.diff().tolist()
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        frequencies = ROTARY_BASE ** -(torch.arange(0, columns, 2) / columns)
        angles = (positions_T.unsqueeze(1) * frequencies).to(device)
        return cls(lengths=lengths, cos_TC=angles.cos(), sin_TC=angles.sin())

    def rotate(self, x_THC: Tensor) -> Tensor:
        """Turn each pair (i, i + C/2) of columns by the angle of its row."""
        first, second = x_THC.chunk(2, dim=2)
        cos, sin = self.cos_TC.unsqueeze(1), self.sin_TC.unsqueeze(1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=2)


class Block(nn.Module):
    """Attention, then experts. Each is applied to the normalised stream, and its output is added to the stream."""

    def __init__(self, config: DispatcherConfig, group: Group, shape: ModelShape, name: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = PackedAttention(config.hidden_size, shape.num_heads)
        self.moe_norm = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(config, group, shape, name=f"{name}.moe")

    def forward(self, x_TD: Tensor, sequences: Sequences, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return the output (T, D) and the load of ``MoE``. Collective."""
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), sequences)
        y_TD, load_2E = self.moe(self.moe_norm(x_TD), plan)
        return x_TD + y_TD, load_2E


class ByteLanguageModel(nn.Module):
    """A model that predicts the next byte. Its weights come from torch's default generator."""

    def __init__(self, config: DispatcherConfig, group: Group, shape: ModelShape = ModelShape()) -> None:
        super().__init__()
        self.columns = config.hidden_size // shape.num_heads
        self.embedding = nn.Embedding(NUM_TOKENS, config.hidden_size)
        blocks = [Block(config, group, shape, name=f"blocks.{number}") for number in range(shape.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, NUM_BYTES, bias=False)

    def forward(self, tokens_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (T, 256) and the loads of this rank, float32 (layers, 2, E). Collective."""
        plan = self.dispatchers[0].plan(THD(cu_seqlens))  # one plan serves all layers
        sequences = Sequences.of(cu_seqlens, self.columns, tokens_T.device)
        x_TD, loads = self.embedding(tokens_T), []
        for block in self.blocks:
            x_TD, load_2E = block(x_TD, sequences, plan)
            loads.append(load_2E)
        return self.head(self.norm(x_TD)), torch.stack(loads)

    @property
    def dispatchers(self) -> list[SwiGLUExperts]:
        """The dispatcher of each layer. They share one channel."""
        return [module for module in self.modules() if isinstance(module, SwiGLUExperts)]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every rank has a copy of: all but the experts'. Their gradients must be summed."""
        sharded = {id(parameter) for dispatcher in self.dispatchers for parameter in dispatcher.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sharded]

    def close(self) -> None:
        """Close the dispatchers. Collective."""
        for dispatcher in self.dispatchers:
            dispatcher.close()
