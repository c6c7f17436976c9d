"""Trainings of a GPTModel on Megatron's groups, with its DDP, schedules and optimizer, to be proven."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_dispatch_testing.prove import Setup
from tests.integration.megatron_core.layer import EXPERTS, HIDDEN, Case, Parallel, transformer_config
from tests.integration.megatron_core.model import LENGTH, VOCABULARY, moe_block
from tests.integration.megatron_core.on_cpu import megatron_on_cpu
from tests.integration.megatron_core.test_packed import params
from tests.integration.megatron_core.training import Training

_groups = ExitStack()  # of the training that is being proven; the next one closes it


def places(model: Any) -> dict[str, tuple[str, Tensor]]:
    """Return which elements this rank holds of each parameter, as Megatron's own checkpoints know it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    named = dict(model.named_parameters())
    names = {parameter.data_ptr(): name for name, parameter in named.items()}
    found = {}
    for one in nested_values(model.sharded_state_dict()):
        if not isinstance(one, ShardedTensor | ShardedTensorFactory) or one.data is None:
            continue
        name = names.get(one.data.data_ptr())
        if name is None:
            continue
        own = torch.arange(named[name].numel()).view(named[name].shape)
        pieces = [one]
        if isinstance(one, ShardedTensorFactory):  # gate and up lie in one parameter, and each is cut
            pieces = [*nested_values({"": one.build_fn(one.key, own, one.replica_id, None)})]
        numbers = torch.empty_like(own).flatten()
        for piece in pieces:
            rows = own if piece is one else piece.data
            whole = torch.arange(torch.Size(piece.global_shape).numel()).view(piece.global_shape)
            sizes = (1,) * piece.prepend_axis_num + tuple(rows.shape)
            cut = tuple(slice(first, first + size) for first, size in zip(piece.global_offset, sizes, strict=True))
            numbers[rows.flatten()] = whole[cut].flatten()
        found[name] = (one.key, numbers.view_as(own))
    return found


def prepared(mesh: DeviceMesh, sizes: Mapping[str, int], fields: Mapping[str, Any]) -> tuple[Case, int]:
    """Make Megatron's groups. Return the case of the model, and the number of stages."""
    _groups.close()
    _groups.enter_context(megatron_on_cpu())
    degrees: dict[str, Any] = {
        name: size if mesh.size() > 1 else 1 for name, size in {"ep": 1, "tp": 1, "pp": 1, "cp": 1, **sizes}.items()
    }
    _groups.enter_context(Training(**degrees).global_groups())
    common = {
        "pipeline_model_parallel_size": degrees["pp"],
        "pipeline_dtype": torch.float32,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    parallel = Parallel(ep=degrees["ep"], tp=degrees["tp"], cp=degrees["cp"])
    return Case(parallel=parallel, config=common | dict(fields), seed=3), degrees["pp"]


def build(mesh: DeviceMesh, *, sizes: Mapping[str, int], fields: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """A GPTModel whose rows our ``alltoall`` moves, in Megatron's DDP, its config, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    case, stages = prepared(mesh, sizes, fields)
    config = transformer_config(case)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(3)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=False,
    )
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # the stand-in for Megatron's norms, which say this themselves
            for parameter in module.parameters():
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return wrapped(model, config)


def wrapped(model: Any, config: Any) -> tuple[Any, Any, Any]:
    """The model with our dispatchers in Megatron's DDP, its config, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from moe_dispatch.integrations.megatron import convert

    config.finalize_model_grads_func = finalize_model_grads
    convert(model, backend="alltoall")
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    ddp.broadcast_params()
    # Its clipping asks for CUDA tensors.
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0), [ddp])
    return ddp, config, optimizer


def step(ddp: Any, config: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ddp.zero_grad_buffer()
    optimizer.zero_grad()

    def forward(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Any, Any]:
        tokens, counted = next(data)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
        output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

        def loss(losses: Tensor) -> tuple[Any, ...]:
            total, number = (losses * counted).sum(), counted.sum().int()
            if config.calculate_per_token_loss:
                return total, number, {}
            return total / number, {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([batch]),
        model=[ddp],
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=len(batch[0]),
    )
    optimizer.step()


def batches(_number: int, *, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and which of them count: other numbers on each rank."""
    counted = torch.ones(count, 2, LENGTH)
    for rank in range(count):
        counted[rank, 1, 2 + rank :] = 0
    return [(torch.randint(0, VOCABULARY, (2, LENGTH + 1)), mask) for mask in counted]


def setup(mesh: Mapping[str, int], sizes: Mapping[str, int], **fields: Any) -> Setup:
    return Setup(
        build=functools.partial(build, sizes=sizes, fields=fields),
        step=step,
        batches=functools.partial(batches, count=mesh["dp"]),
        mesh=mesh,
        places=places,
    )


PACKS = (((5, 3, 0, 11), (8, 8, 8, 16)), ((2, 7), (8, 8)))  # rows of each sequence, and with its gap, by batch
Pack = tuple[tuple[int, ...], tuple[int, ...], Tensor]


def build_packed(mesh: DeviceMesh, *, sizes: Mapping[str, int], fields: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Transformer layers of experts alone, because attention without CUDA takes no packed sequences."""
    from megatron.core.enums import ModelType

    case, _ = prepared(mesh, sizes, fields)
    block = moe_block(case, of_globals=True)
    block.model_type = ModelType.encoder_or_decoder  # which schedules ask for
    return wrapped(block, block.config)


def packs(_number: int, *, count: int) -> list[Pack]:
    return [(*PACKS[data], torch.randn(sum(PACKS[data][1]), 1, HIDDEN)) for data in range(count)]


def joined(packs: Sequence[Pack]) -> Pack:
    real, padded, hidden = zip(*packs, strict=True)
    return sum(real, ()), sum(padded, ()), torch.cat(hidden)


def packed_step(ddp: Any, config: Any, optimizer: Any, pack: Pack, *, fault: str) -> None:
    """A step on the rows of a pack that this rank holds: two mirrored chunks of each sequence, then a part of these."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    real, padded, whole = pack
    cp, place = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    rows, is_real, start = list[int](), list[bool](), 0
    for length, with_gap in zip(real, padded, strict=True):
        chunk = with_gap // (2 * cp)
        for part in (place, 2 * cp - 1 - place):
            rows += range(start + part * chunk, start + (part + 1) * chunk)
        is_real += [offset < length for offset in range(with_gap)]
        start += with_gap
    number = torch.tensor([True if fault and cp > 1 else is_real[row] for row in rows]).sum()
    held = len(rows) // parallel_state.get_tensor_model_parallel_world_size()
    rows = rows[parallel_state.get_tensor_model_parallel_rank() * held :][:held]
    counted = torch.tensor(is_real)[rows]
    ddp.zero_grad_buffer()
    optimizer.zero_grad()

    def forward(_data: Any, model: Any) -> tuple[Any, Any]:
        output = model(whole[rows], None, packed_seq_params=params(real, padded))

        def loss(output: Tensor) -> tuple[Any, ...]:
            losses = (output - 1).square().sum((1, 2))
            return (losses * counted).sum(), number.int(), {}  # all tokens of the tensor-parallel ranks together

        return output, loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([]),
        model=[ddp],
        num_microbatches=1,
        seq_length=len(whole),
        micro_batch_size=1,
    )
    optimizer.step()


def packed(mesh: Mapping[str, int], sizes: Mapping[str, int], fault: str = "") -> Setup:
    return Setup(
        build=functools.partial(build_packed, sizes=sizes, fields=PER_TOKEN),
        step=functools.partial(packed_step, fault=fault),
        batches=functools.partial(packs, count=mesh["dp"]),
        join=joined,
        mesh=mesh,
        places=places,
    )


PER_TOKEN = {"calculate_per_token_loss": True}
SETUPS = {
    "ep 4": setup({"dp": 4}, {"ep": 4}, **PER_TOKEN),
    "ep 2": setup({"dp": 4}, {"ep": 2}, **PER_TOKEN),
    "tp 2, ep 4": setup({"dp": 2, "tp": 2}, {"ep": 4, "tp": 2}, **PER_TOKEN),
    "tp 2, ep 2": setup({"dp": 2, "tp": 2}, {"ep": 2, "tp": 2}, **PER_TOKEN),
    "pp 2, ep 2": setup({"pp": 2, "dp": 2}, {"ep": 2, "pp": 2}, **PER_TOKEN),
    "cp 2, ep 4": packed({"dp": 2, "cp": 2}, {"ep": 4, "cp": 2}),
    "cp 2, ep 2": packed({"dp": 2, "cp": 2}, {"ep": 2, "cp": 2}),
    "cp 2, tp 2, ep 4": packed({"dp": 1, "cp": 2, "tp": 2}, {"ep": 4, "cp": 2, "tp": 2}),
    "packed, cp 4": packed({"dp": 1, "cp": 4}, {"ep": 4, "cp": 4}),
    "packed, tp 2": packed({"dp": 2, "tp": 2}, {"ep": 4, "tp": 2}),
    "means": setup({"dp": 4}, {"ep": 4}),
    "gaps counted": packed({"dp": 2, "cp": 2}, {"ep": 4, "cp": 2}, "gaps counted"),
}
FAULTY = ("means", "gaps counted")
