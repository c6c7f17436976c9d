"""Parts of a GPTModel on the stages of a pipeline, in Megatron's global groups and under its own schedules."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor

from tests.integration.megatron_core.layer import EXPERTS, Case, Parallel, transformer_config
from tests.integration.megatron_core.model import BATCH, LENGTH, VOCABULARY


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training of four ranks.

    Attributes:
        ep, pp, vpp, tp, cp: ranks of experts, pipeline stages, their chunks, tensor- and context-parallel ranks.
        config: fields of the TransformerConfig.
        unchecked: those that it would refuse.
        masked: whether batches have a mask.
    """

    ep: int
    pp: int = 1
    vpp: int | None = None
    tp: int = 1
    cp: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    unchecked: dict[str, Any] = field(default_factory=dict)
    masked: bool = False

    @contextmanager
    def global_groups(self) -> Iterator[None]:
        """Give Megatron these groups, and what it asks of CUDA as it makes and uses them."""
        from megatron.core import parallel_state

        with (
            patch.object(torch.cuda, "synchronize"),
            patch.object(Tensor, "cuda", lambda tensor: tensor),
            patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", None),
        ):
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=self.pp,
                virtual_pipeline_model_parallel_size=self.vpp,
                expert_model_parallel_size=self.ep,
                tensor_model_parallel_size=self.tp,
                context_parallel_size=self.cp,
                expert_tensor_parallel_size=1,
            )
            yield
            parallel_state.destroy_model_parallel()

    def chunks(self) -> list[Any]:
        """The chunks of this stage; the same weights whenever they are built."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        fields = {
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "pipeline_dtype": torch.float32,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            **self.config,
        }
        parallel = Parallel(ep=self.ep, tp=self.tp)
        config = transformer_config(Case(parallel=parallel, config=fields, unchecked=self.unchecked))
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
        stage, number = parallel_state.get_pipeline_model_parallel_rank(), self.vpp or 1
        models = []
        for chunk in range(number):
            torch.manual_seed(10 * stage + chunk)
            vp_stage = chunk if self.vpp else None
            predicts = bool(config.mtp_num_layers)
            models.append(
                GPTModel(
                    config,
                    spec,
                    vocab_size=VOCABULARY,
                    max_sequence_length=LENGTH,
                    pre_process=stage == 0 and chunk == 0,
                    post_process=stage == self.pp - 1 and chunk == number - 1,
                    share_embeddings_and_output_weights=False,
                    vp_stage=vp_stage,
                    mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False, vp_stage) if predicts else None,
                )
            )
        return models

    def step(self, chunks: list[Any], batches: Sequence[int]) -> list[dict[str, Tensor]]:
        """Losses and gradients of these micro-batches by Megatron's schedule. Only the last stage has losses."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        found: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, parallel_state.get_data_parallel_rank(), self.masked),
            data_iterator=[iter(batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        return found


def _forward_step(
    rank: int, masked: bool, batches: Iterator[int], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(100 * rank + next(batches))
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    call = model.build_schedule_plan if return_schedule_plan else model
    padding = {"padding_mask": torch.arange(LENGTH) >= torch.tensor([[LENGTH], [2 + rank]])} if masked else {}
    output = call(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous(), **padding)

    def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.mean(), {"loss": losses.detach().mean()}

    return output, loss_of
