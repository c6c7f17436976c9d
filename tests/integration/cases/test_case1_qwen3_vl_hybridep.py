"""Case 1: Qwen3-VL on HybridEP whose rules want whole chunks of rows. NVIDIA-NeMo/Megatron-Bridge#3294.

Reported: tp 1, ep 8, pp 1, micro-batch 4, flex dispatcher on hybridep. The step pads sequences to 16, so rows come in
multiples of 64, and chunks of 128 do not divide them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import BSHD, Dispatched, Dispatcher, DispatcherConfig, Routing
from moe_dispatch.errors import LayoutError
from moe_dispatch.layouts import padded_length, sequence_multiple
from moe_dispatch_testing import Ranks
from tests.emulation.hybrid_case import make_sources, open_buffer, returned, sent
from tests.emulation.tokens import outcome
from tests.integration.needs import needs
from tests.pages import relative, run_page

pytestmark = needs("transformers")

EP_SIZE, MICRO_BATCH, CHUNK, FP8_ROWS = 8, 4, 128, 16
LENGTHS = (135, 87, 121, 43)
REPORTED = "MAX_NUM_OF_TOKENS_PER_RANK must be multiple of NUM_OF_TOKENS_PER_CHUNK"
# Megatron-Bridge's recipes asked for chunks of 128 (#3135) when the default had become 64.
APRIL, JULY = "hybridep-34152ae", "hybridep-94a9f8f"
ASKED = {"NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "128"}
ASKED_FOR = pytest.mark.parametrize("variables", [ASKED], indirect=True, ids=["asked for"])
EXPERTS, TOP_K, HIDDEN = 16, 4, 512

on_ranks = partial(Ranks(timedelta(seconds=60)).run, size=EP_SIZE)


@pytest.fixture(autouse=True)
def variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a test's parameter says in the environment of its ranks, which are threads of this process."""
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)


# By hand: the calls that Megatron's flex dispatcher makes, with the rows that the step gives it


def by_hand(rows: int) -> Callable[[dist.ProcessGroup], str]:
    sources = make_sources([rows] * EP_SIZE)

    def body(group: dist.ProcessGroup) -> str:
        buffer = open_buffer(APRIL, group, rows=rows)

        def round_trip() -> None:
            expert_rows, probs, _, _, handle = sent(buffer, sources[group.rank()], pad_multiple=1)
            returned(buffer, expert_rows, handle, probs)

        return outcome(round_trip)

    return body


@ASKED_FOR
def test_by_hand_it_fails_as_reported() -> None:
    rows = MICRO_BATCH * padded_length(max(LENGTHS), FP8_ROWS)
    assert rows % 64 == 0
    for told in on_ranks(by_hand(rows)):
        assert told.startswith("RuntimeError: Failed to compile the code"), told
        assert REPORTED in told


@ASKED_FOR
def test_by_hand_it_works_on_sequences_padded_to_their_multiple() -> None:
    multiple = sequence_multiple(batch_size=MICRO_BATCH, fp8=True, row_multiple=CHUNK)
    rows = MICRO_BATCH * padded_length(max(LENGTHS), multiple)
    assert rows == MICRO_BATCH * padded_length(max(LENGTHS), multiple, 150) == 640
    assert on_ranks(by_hand(rows)) == ["returned"] * EP_SIZE


def test_a_forced_length_does_not_bypass_the_rule() -> None:
    """Review of #3294: round the pipeline's seq_length up, or refuse it with both numbers."""
    multiple = sequence_multiple(batch_size=MICRO_BATCH, row_multiple=CHUNK)
    for seq_length in range(max(LENGTHS), 300):
        assert MICRO_BATCH * padded_length(max(LENGTHS), multiple, seq_length) % CHUNK == 0
    with pytest.raises(LayoutError, match=r"seq_length \(128\) must be at least the length \(135\)"):
        padded_length(max(LENGTHS), multiple, seq_length=128)


# Through the dispatcher: the model's own MoE block, its experts divided among the ranks


class Qwen3VLExperts(Dispatcher):
    """A rank's part of the experts of the model's block."""

    def __init__(self, config: DispatcherConfig, group: dist.ProcessGroup, block: Any) -> None:
        super().__init__(config, group)
        held = config.num_experts // group.size()
        mine = slice(group.rank() * held, (group.rank() + 1) * held)
        self.mlps = type(block.experts)(text_config(num_experts=held))
        self.mlps.load_state_dict({name: w[mine] for name, w in block.experts.state_dict().items()})

    def run_experts(self, sent: Dispatched) -> Tensor:
        ids_R = torch.arange(len(sent.tokens_per_expert)).repeat_interleave(sent.tokens_per_expert)
        rows_RD: Tensor = self.mlps(sent.rows, ids_R[:, None], torch.ones(len(ids_R), 1))
        return rows_RD


def config_of(release: str) -> DispatcherConfig:
    return DispatcherConfig(
        backend={"name": "hybridep", "emulate": release},
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        wire_dtype="bfloat16",
    )


def text_config(num_experts: int = EXPERTS) -> Any:
    from transformers import Qwen3VLMoeTextConfig

    return Qwen3VLMoeTextConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=32,
        num_experts=num_experts,
        num_experts_per_tok=TOP_K,
        num_attention_heads=4,
        num_key_value_heads=4,
        experts_implementation="eager",
    )


def make_block() -> Any:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

    generator = torch.Generator().manual_seed(0)
    block = Qwen3VLMoeTextSparseMoeBlock(text_config())
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return block


def lengths_of(rank: int) -> list[int]:
    """Odd, and other ones on each rank."""
    return [length - 2 * rank for length in LENGTHS]


def micro_batch(rank: int) -> tuple[Tensor, Tensor]:
    """Hidden states and the gradient of the output, [B, S, D], padded as the step pads; S differs between ranks."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (MICRO_BATCH, padded_length(max(lengths_of(rank)), FP8_ROWS), HIDDEN)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def through_the_dispatcher(block: Any, knows_lengths: bool) -> Callable[[dist.ProcessGroup], Any]:
    config = config_of(APRIL)

    def body(group: dist.ProcessGroup) -> Any:
        rank = group.rank()
        gate = copy.deepcopy(block.gate)
        layer = Qwen3VLExperts(config, group, block)
        x, upstream = micro_batch(rank)
        x.requires_grad_()
        layout = BSHD(lengths_of(rank)) if knows_lengths else BSHD()
        plan = layer.plan(layout, like=x)
        _, weights_TK, ids_TK = gate(x)
        y = layer(x, Routing(ids_TK, weights_TK), plan)
        y.backward(upstream)
        layer.close()
        return y.detach(), x.grad, gate.weight.grad, [w.grad for w in layer.mlps.parameters()], plan.sizes.padded_rows

    return body


def dense(block: Any, knows_lengths: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of x by rank, of the untouched block; the block keeps its own gradients of all ranks."""
    outputs, grads = [], []
    for rank in range(EP_SIZE):
        x, upstream = micro_batch(rank)
        x.requires_grad_()
        real = torch.ones(x.shape[:2], dtype=torch.bool)
        if knows_lengths:
            real = torch.arange(x.shape[1]) < torch.tensor(lengths_of(rank))[:, None]
        y = torch.zeros_like(x)
        y[real] = block(x[real][None])[0]
        y.backward(upstream)
        outputs.append(y.detach())
        grads.append(x.grad)
    return outputs, grads  # type: ignore[return-value]


@ASKED_FOR
@pytest.mark.parametrize("knows_lengths", [True, False])
def test_the_block_of_the_model_works_through_the_dispatcher(knows_lengths: bool) -> None:
    block = make_block()
    ranks = on_ranks(through_the_dispatcher(block, knows_lengths))
    outputs, grads_x = dense(block, knows_lengths)
    most = sum(LENGTHS) if knows_lengths else MICRO_BATCH * padded_length(max(LENGTHS), FP8_ROWS)
    gate_grad, expert_grads = torch.zeros_like(block.gate.weight), []
    for rank, (y, grad_x, grad_gate, grads_mlps, padded_rows) in enumerate(ranks):
        assert padded_rows == padded_length(most, CHUNK), "every rank sends the same whole chunks"
        # Rows and gradients travel in bfloat16: roundings by at most 2**-9, some six of them on the longest way.
        assert relative(y, outputs[rank]) < 0.01
        assert relative(grad_x, grads_x[rank]) < 0.01
        gate_grad += grad_gate
        expert_grads.append(grads_mlps)
    assert relative(gate_grad, block.gate.weight.grad) < 0.01
    for of_ranks, weight in zip(zip(*expert_grads, strict=True), block.experts.parameters(), strict=True):
        assert relative(torch.cat(of_ranks), weight.grad) < 0.01


@pytest.mark.parametrize(
    ("release", "variables", "rows"),
    [(APRIL, ASKED, 512), (APRIL, {}, 448), (JULY, {}, 386), (JULY, ASKED, 386)],
    indirect=["variables"],
)
def test_the_rule_belongs_to_the_installed_version(release: str, rows: int) -> None:
    """Later in #3294: an updated HybridEP no longer needs it. The model's code stays the same."""
    assert sum(LENGTHS) == 386
    config = config_of(release)

    def body(group: dist.ProcessGroup) -> int | None:
        dispatcher = Dispatcher(config, group)
        padded = dispatcher.plan(BSHD(LENGTHS), like=torch.empty(4, 144, HIDDEN)).sizes.padded_rows
        dispatcher.close()
        return padded

    assert on_ranks(body) == [rows] * EP_SIZE


def test_the_code_of_the_page_runs() -> None:
    assert run_page("cases/1-qwen3-vl-hybridep.md")["y"].shape == (4, 144, 512)
