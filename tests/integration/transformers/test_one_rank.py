"""Real models on one rank: which rows are dispatched, under which plan, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch import Dispatcher
from moe_dispatch.errors import ConfigError, LayoutError, StateError
from moe_dispatch.integrations.transformers import attach
from tests.idle_groups import garbage_in_idle_groups
from tests.integration.steps import difference
from tests.integration.transformers.models import BATCHES, HIDDEN, LAYERS, TOP_K, build, draw_batch
from tests.integration.transformers.wiring import (
    gradients,
    loss_of,
    ready,
    rows_cut,
    rows_real,
    targets,
    unsharded,
    wire,
    with_lora,
)

FAMILY = "qwen3_moe"
_, LEFT, EMPTY, _ = BATCHES
PADDING = LEFT.attention_mask.numel() - LEFT.num_real


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": "experts"},
        {"pad_multiple": 4},
        {"graph_safe": True, "max_tokens_per_rank": 32},
        {"graph_safe": True, "max_tokens_per_rank": 32, "pad_multiple": 4, "weights": "experts"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_fields_of_the_config_change_no_number(fields: dict[str, Any], mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name=f"fields-{'-'.join(fields)}", **fields).train()
    loss_of(model, LEFT, targets(LEFT)).backward()
    assert difference(gradients(model), unsharded(FAMILY, (LEFT,))[1]) < 1e-4


@pytest.fixture
def plans() -> Iterator[mock.Mock]:
    """Counts the plans that are made."""
    with mock.patch.object(Dispatcher, "plan", autospec=True, side_effect=Dispatcher.plan) as counted:
        yield counted


def test_one_plan_serves_all_layers_of_a_forward(mesh: DeviceMesh, plans: mock.Mock) -> None:
    model = ready(FAMILY, mesh, name="one-plan")
    attach(model)  # a second time adds nothing
    assert list(model.state_dict()) == list(build(FAMILY).state_dict())
    model(input_ids=LEFT.input_ids, attention_mask=LEFT.attention_mask)
    model.model(LEFT.input_ids, LEFT.attention_mask)  # what some trainers call: the model without its head
    assert plans.call_count == 2
    assert rows_cut(model) == 2 * LAYERS * PADDING


def test_experts_that_no_row_reaches_get_a_gradient(mesh: DeviceMesh) -> None:
    """FSDP on other ranks waits for it. The loop over experts that have rows would give none."""
    model = ready(FAMILY, mesh, name="no-rows").train()
    model.set_experts_implementation("eager")
    model(input_ids=EMPTY.input_ids, attention_mask=EMPTY.attention_mask).logits.sum().backward()
    of_experts = {name: grad for name, grad in gradients(model).items() if ".experts." in name}
    assert len(of_experts) == 2 * LAYERS
    assert all(not grad.any() for grad in of_experts.values())
    assert rows_real(model, TOP_K) == 0


SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": 32}


@pytest.mark.parametrize("fields", [{}, SAFE, {"chunks": 4}], ids=["plain", "graph-safe", "chunks"])
def test_experts_without_rows_get_no_garbage(fields: dict[str, Any], mesh: DeviceMesh) -> None:
    few = draw_batch(6, [1], 1, "right")  # two of eight experts get its one row
    with garbage_in_idle_groups():
        model = ready(FAMILY, mesh, name=f"garbage-{'-'.join(fields)}", **fields).train()
        model(input_ids=few.input_ids).logits.sum().backward()
        # By transformers alone, garbage arrives.
        (alone := build(FAMILY)).set_experts_implementation("grouped_mm")
        alone(input_ids=few.input_ids).logits.sum().backward()
    right = build(FAMILY).train()
    right(input_ids=few.input_ids).logits.sum().backward()
    assert difference(gradients(model), gradients(right)) < 1e-4
    assert difference(gradients(alone), gradients(right)) > 1


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_with_biases_in_buffers_of_fixed_size(implementation: str, mesh: DeviceMesh) -> None:
    """The slack and the padding of a buffer get biases too, which must reach no gradient. EMPTY has nothing else."""
    model = ready("gpt_oss", mesh, name=f"biases-{implementation}", pad_multiple=4, **SAFE).train()
    model.set_experts_implementation(implementation)
    for batch in (EMPTY, LEFT):
        loss_of(model, batch, targets(LEFT)).backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".experts." in name)
    assert difference(gradients(model), unsharded("gpt_oss", (LEFT,))[1]) < 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_on_sharded_experts_are_refused(mesh: DeviceMesh) -> None:
    told = r"sharded cannot have adapters, got Qwen3MoeExperts inside of ParamWrapper\. .* register\(config, group="
    model = with_lora(ready(FAMILY, mesh, name="adapters"))
    with pytest.raises(ConfigError, match=told):
        loss_of(model, LEFT, 1)
    model = with_lora(wire(build(FAMILY), mesh, "adapters"))
    with pytest.raises(ConfigError, match=told):
        attach(model)


def test_a_loop_over_experts_is_refused_in_graph_safe_mode(mesh: DeviceMesh) -> None:
    told = r"Qwen3MoeExperts must have an experts_implementation of fixed shapes with graph_safe=True, got 'eager'"
    model = ready(FAMILY, mesh, name="loop", **SAFE)
    model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match=told):
        loss_of(model, LEFT, 1)
    model = build(FAMILY)
    model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match=told):
        wire(model, mesh, "loop")


def test_an_experts_function_without_a_backward_is_refused_in_training(mesh: DeviceMesh) -> None:
    """That of DeepGEMM writes into buffers, and would train nothing without a word."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    ALL_EXPERTS_FUNCTIONS.register("forward_only", lambda *rows: function(*rows).detach())
    model = ready(FAMILY, mesh, name="forward-only")
    model.set_experts_implementation("forward_only")
    with pytest.raises(
        StateError, match=r"experts_implementation='forward_only' must have a backward, .* gate_up_proj"
    ):
        loss_of(model, LEFT, 1)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, LEFT, 1), loss_of(build(FAMILY), LEFT, 1), rtol=1e-4, atol=1e-4)


def test_generate_dispatches_new_tokens_and_no_padding(mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name="generate").eval()
    prompt = {"input_ids": LEFT.input_ids, "attention_mask": LEFT.attention_mask}
    arguments = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    tokens = model.generate(**prompt, **arguments)
    assert torch.equal(tokens, build(FAMILY).eval().generate(**prompt, **arguments))
    assert tokens.shape[1] == LEFT.input_ids.shape[1] + 4
    assert rows_cut(model) == LAYERS * PADDING
    assert rows_real(model, TOP_K) == LAYERS * (LEFT.num_real + 2 * 3)  # the last token is not run


def test_rows_behind_packed_sequences_are_not_dispatched(mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name="packed")
    packed = draw_batch(5, [9], 9, "right")
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    model(input_ids=packed.input_ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=4, max_length_k=4)
    assert rows_cut(model) == LAYERS * 2
    assert rows_real(model, TOP_K) == LAYERS * 7


def test_a_forward_that_fails_leaves_no_plan(mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name="wrong-mask")
    mask = LEFT.attention_mask
    with pytest.raises(LayoutError, match=r"attention_mask must be \[2, 8\], got \[2, 1, 8, 8\]\. Pass the tokenizer"):
        model(input_ids=LEFT.input_ids, attention_mask=mask[:, None, None].expand(2, 1, 8, 8))
    fail = mock.Mock(side_effect=RuntimeError("this layer fails"))
    with mock.patch.object(model.model.layers[1], "forward", fail), pytest.raises(RuntimeError, match="layer fails"):
        model(input_ids=LEFT.input_ids, attention_mask=mask)
    with pytest.raises(StateError, match=r"must be called in a forward of a model that was given to attach, got a"):
        model.model.layers[0].mlp(torch.zeros(2, 8, HIDDEN))


def add_a_norm(experts: Any) -> None:
    experts.norm = torch.nn.RMSNorm(HIDDEN)


def change_a_dtype(experts: Any) -> None:
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "told"),
    [(add_a_norm, r"got weights like norm\.weight"), (change_a_dtype, r"got torch\.bfloat16, torch\.float32")],
)
def test_experts_whose_weights_cannot_travel_are_refused(change: Any, told: str, mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name="balanced", balance="exact")
    change(model.model.layers[0].mlp.experts)
    with pytest.raises(ConfigError, match=rf"Qwen3MoeExperts itself must hold all weights of its experts.*{told}\. L"):
        loss_of(model, LEFT, 1)


def test_experts_outside_a_forward_take_rows_as_real_where_the_config_allows(mesh: DeviceMesh) -> None:
    model = ready(FAMILY, mesh, name="outside", infer_layout=True)
    x = torch.randn(2, 8, HIDDEN)
    y = model.model.layers[0].mlp(x)
    torch.testing.assert_close(y, build(FAMILY).model.layers[0].mlp(x), rtol=1e-4, atol=1e-5)
