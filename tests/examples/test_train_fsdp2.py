"""The training with FSDP2: its losses on 1, 2 and 4 processes, with another backend, and after a resume."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import train_fsdp2
from moe_dispatch import DispatcherConfig
from moe_dispatch.training import Setup
from moe_dispatch_testing import run_processes
from tests.examples.fsdp2_losses import losses, losses_in, printed

STEPS = 6
EVERY_COPY = '{"name": "exact", "min_rows": 0}'


@pytest.mark.slow
def test_losses_are_those_of_one_process_also_after_a_resume_on_other_ranks(tmp_path: Path) -> None:
    exact = ("--dtype", "float32", "--steps")
    one = losses(1, *exact, str(STEPS), "--backend", "local")
    assert list(one) == list(range(1, STEPS + 1))
    assert one[STEPS] < 0.8 * one[1]
    saved = ("--checkpoint", str(tmp_path), "--save-every", "2")
    four = losses(4, *exact, "3", "--ep", "2", "--balance", EVERY_COPY, *saved)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000003"]
    said = printed(2, *exact, str(STEPS), "--backend", "allgather", *saved)
    assert said.startswith("resumed from step 3\n")
    two = losses_in(said)
    assert (list(four), list(two)) == ([1, 2, 3], [4, 5, 6])
    assert {**four, **two} == pytest.approx(one, rel=2e-5)


@pytest.mark.slow
def test_losses_in_bfloat16_are_those_of_one_process() -> None:
    steps = ("--steps", str(STEPS))
    one = losses(1, *steps)
    assert losses(4, *steps) == pytest.approx(one, rel=3e-3)


def values_of_padding(rank: int) -> list[list[float]]:
    """The loss of the real tokens and the auxiliary loss, for two values of padding rows."""
    config = DispatcherConfig(backend="local", num_experts=8, top_k=2, hidden_size=train_fsdp2.HIDDEN)
    torch.manual_seed(0)
    model = train_fsdp2.LanguageModel(config, init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "ep")))
    tokens_T, targets_T, layout = next(pack for pack in train_fsdp2.packs() if pack[1].min() < 0)
    real_T = targets_T >= 0
    found = []
    for value in (0, 7):
        tokens_T[~real_T] = value
        logits, auxiliary = model(tokens_T, layout)
        found.append([torch.nn.functional.cross_entropy(logits, targets_T).item(), auxiliary.item()])
    dist.barrier()
    return found


def test_padding_counts_in_no_loss() -> None:
    [[first, second]] = run_processes(values_of_padding, 1)
    assert first == second


def backward_of_a_frozen_model(rank: int) -> tuple[int, int, float]:
    """Bytes of combines before and after a backward that recomputes blocks, and the norm of clipped gradients."""
    config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=train_fsdp2.HIDDEN)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "ep"))
    torch.manual_seed(0)
    model = train_fsdp2.LanguageModel(config, mesh)
    model.tokens.requires_grad_(False)
    train_fsdp2.shard(model, mesh, torch.float32)
    tokens_T, targets_T, layout = next(train_fsdp2.packs())
    logits, auxiliary = model(tokens_T, layout)
    sent = model.dispatchers[0].metrics().bytes_sent["combine"]
    (torch.nn.functional.cross_entropy(logits, targets_T) + auxiliary).backward()
    Setup(mesh).clip(model, 0.5)
    gradients = [train_fsdp2.own_part(p.grad).flatten() for p in model.parameters() if p.grad is not None]
    squared = torch.cat(gradients).square().sum()
    dist.all_reduce(squared)
    return sent, model.dispatchers[0].metrics().bytes_sent["combine"], squared.sqrt().item()


def test_a_recomputation_sends_no_combine_and_frozen_parameters_are_not_clipped() -> None:
    for forward, both, norm in run_processes(backward_of_a_frozen_model, 2):
        assert both == forward > 0
        assert norm == pytest.approx(0.5, rel=1e-4)


def test_packs_hold_each_document_whole_and_in_order() -> None:
    stream = train_fsdp2.packs()
    for _ in range(20):
        tokens_T, targets_T, layout = next(stream)
        ends = list(layout.cu_seqlens)
        assert len(tokens_T) == train_fsdp2.ROWS
        assert targets_T[: ends[-1]].min() >= 0
        assert (targets_T[ends[-1] :] == -100).all()
        for start, end in pairwise(ends):
            assert tokens_T[start] == train_fsdp2.BEGIN
            assert torch.equal(tokens_T[start + 1 : end], targets_T[start : end - 1])
