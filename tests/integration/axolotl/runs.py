"""Runs of Axolotl's real ``load_cfg`` and ``train`` on gloo processes: with its own dispatch, and with ours.

Stand-ins: Axolotl sends slices of experts over CUDA, which is the CPU here, and only ``saved`` lets it save. On a CPU,
Accelerate wraps DDP instead of FSDP2. The data set is made here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.integration.steps import difference
from tests.integration.transformers import adapting
from tests.integration.transformers.models import VOCABULARY, build

STEPS = 4
LORA: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
}
PACKED: dict[str, Any] = {
    "sample_packing": True,
    "sample_packing_sequentially": True,
    "dataset_num_proc": 1,
    "micro_batch_size": 1,
    "attn_implementation": "sdpa",
    "pad_to_sequence_len": False,
}
ON_EXPERTS: dict[str, Any] = {
    **LORA,
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
BASE: dict[str, Any] = {
    "datasets": [{"path": "nowhere", "ds_type": "json", "type": "completion"}],
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": STEPS,
    "optimizer": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler": "constant",
    "max_grad_norm": 0,
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "disable_tqdm": True,
    "seed": 5,
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen3MoeDecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
    },
}


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """Keys of the YAML: those of our plug-in, and others."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


def save_model(folder: Path) -> None:
    """Write a tiny model whose routers favour some experts, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = build("qwen3_moe")
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.save_pretrained(folder)
    special = ("<pad>", "<bos>", "<eos>", "<unk>")
    words = {word: number for number, word in enumerate((*special, *(f"w{n}" for n in range(4, VOCABULARY))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


@final
class _OnCpu(ModuleType):
    """torch for a module that makes tensors on the device "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *args: Any) -> torch.device:
        return torch.device("cpu")


SAVE: Any = None  # Axolotl's own function
_MESH = init_device_mesh


def _mesh_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    return _MESH("cpu", *args, **kwargs)


@contextmanager
def _fsdp_on_cpu() -> Iterator[None]:
    """A block in which Accelerate wraps FSDP2 on a CPU too, if the config shards over data-parallel ranks."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    begin: Any = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        sharded = getattr(self, "parallelism_config", None)
        if fsdp_plugin is not None and sharded is not None and sharded.dp_shard_size > 1:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


@contextmanager
def on_cpu(ranks: int) -> Iterator[None]:
    """A block in which Axolotl shards and trains on CPU processes, and keeps them together afterwards."""
    global SAVE
    from axolotl.integrations.expert_parallel import shard

    numbers = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(ranks)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, numbers | meeting | quiet))
        stack.enter_context(mock.patch.object(shard, "torch", _OnCpu("torch")))
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
        stack.enter_context(mock.patch("torch.distributed.device_mesh.init_device_mesh", _mesh_on_cpu))
        stack.enter_context(_fsdp_on_cpu())
        import axolotl.train

        SAVE = axolotl.train.save_trained_model
        for name in ("save_trained_model", "cleanup_distributed"):
            stack.enter_context(mock.patch(f"axolotl.train.{name}"))
        yield


def config_of(folder: str, case: Case, ranks: int, *, ours: bool) -> Any:
    """The config that Axolotl's own loader makes of a YAML file."""
    from axolotl.cli.config import load_cfg

    keys: dict[str, Any] = {**BASE, "base_model": f"{folder}/model", "expert_parallel_size": ranks, **case.keys}
    if ours:
        keys["moe_dispatch"] = dict(case.fields)
    with tempfile.TemporaryDirectory() as scratch:
        keys |= {"output_dir": f"{scratch}/out", "dataset_prepared_path": f"{scratch}/prepared"}
        path = Path(scratch, "run.yml")
        path.write_text(yaml.safe_dump(keys))
        return load_cfg(str(path))


def _data() -> Any:
    """Sentences of 5 to 29 tokens; batches are padded on the right."""
    from axolotl.common.datasets import TrainDatasetMeta
    from datasets import Dataset

    generator, rows = torch.Generator().manual_seed(0), list[dict[str, Any]]()
    for _ in range(64):
        length = int(torch.randint(5, 30, (1,), generator=generator))
        ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids, "attention_mask": [1] * length})
    return TrainDatasetMeta(train_dataset=Dataset.from_list(rows), eval_dataset=None, total_num_steps=STEPS)


def _trained(folder: str, case: Case, ranks: int, *, ours: bool) -> tuple[Any, list[float], dict[str, Tensor]]:
    from axolotl.train import train

    torch.manual_seed(1)
    model, _, trainer = train(cfg=config_of(folder, case, ranks, ours=ours), dataset_meta=_data())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {
        name: getattr(weight, "to_local", lambda weight=weight: weight)().detach().clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    return model, losses, weights


def compared(folder: str, case: Case, rank: int) -> dict[str, Any]:
    """Losses and trained weights of this rank after some steps, through Axolotl's own dispatch and through ours."""
    from moe_dispatch.integrations.transformers import dispatchers_of

    ranks = dist.get_world_size()
    _, losses, weights = _trained(folder, case, ranks, ours=False)
    model, our_losses, our_weights = _trained(folder, case, ranks, ours=True)
    metrics = next(iter(dispatchers_of(model).values())).metrics()
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, our_losses, strict=True)),
        "moved": abs(losses[0] - losses[-1]),
        "steps": len(losses),
        "weights": difference(our_weights, weights),
        "names": sorted(weights),
        "fetches": metrics.collectives.get("weights", 0),
        "skipped": sum(metrics.rows_skipped.values()),
    }


def saved(folder: str, case: Case, rank: int) -> dict[str, float]:
    """What Axolotl's own saving wrote of a run through our dispatch, beside the weights of the model."""
    import axolotl.train
    from safetensors.torch import load_file

    config = config_of(folder, case, dist.get_world_size(), ours=True)
    config.output_dir = f"{folder}/saved"
    torch.manual_seed(1)
    with mock.patch("axolotl.train.save_trained_model", SAVE):
        model, *_ = axolotl.train.train(cfg=config, dataset_meta=_data())
    dist.barrier()
    found = load_file(f"{folder}/saved/adapter_model.safetensors")
    weights = {
        name.replace(".default.", "."): weight for name, weight in model.named_parameters() if name.count("lora_")
    }
    assert found.keys() == weights.keys()
    return {"weights": difference(found, weights), "largest": max(float(each.abs().max()) for each in found.values())}


def refused(folder: str, cases: Mapping[str, Case], rank: int) -> dict[str, str]:
    """What Axolotl's loader of a config says to each case."""
    texts = {}
    for name, case in cases.items():
        try:
            config_of(folder, case, dist.get_world_size(), ours=True)
            texts[name] = "not refused"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def by_trl(folder: str, rank: int) -> dict[str, float]:
    """TRL's SFTTrainer on a model with all experts on each rank: without us, and with experts that run through us."""
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from moe_dispatch.integrations.transformers import attach, config_for, dispatchers_of, register

    tokenizer, found = AutoTokenizer.from_pretrained(f"{folder}/model"), []
    for ours in (False, True):
        model = build("qwen3_moe")
        if ours:
            register(config_for(model.config, backend="alltoall"), group=dist.group.WORLD, name="trl")
            model.set_experts_implementation("trl")
            attach(model)
        arguments = SFTConfig(
            output_dir=f"{folder}/trl",
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=0.5,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=_data().train_dataset, processing_class=tokenizer
        )
        trainer.train()
        found.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
    counts = [int(dispatcher.expert_counts().sum()) for dispatcher in dispatchers_of(model).values()]
    return {"weights": difference(found[1], found[0]), "rows": min(counts)}


def _in_four_bits(family: str) -> Any:
    """A model whose experts bitsandbytes holds in 4 bits, in parametrizations, and computes from on the CPU."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model = build(family)
    for experts in [module for module in model.modules() if hasattr(module, "_apply_gate")]:
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(experts, name, quant_type="nf4")
        assert experts.parametrizations.gate_up_proj.original.dtype == torch.uint8
    return model


def on_four_bits(case: adapting.Adapted, rank: int) -> dict[str, Any]:
    """Adapters on a frozen base in 4 bits beside those of the same model in one process, or what PEFT raises."""
    with mock.patch.object(adapting, "build", _in_four_bits):
        try:
            return adapting.trained(case, rank)
        except ValueError as error:
            return {"error": f"{type(error).__name__}: {error}"}
