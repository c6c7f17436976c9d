"""One training step of a small GPTModel on two ranks, built by each trainer's own function."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.integration.frameworks.sources import import_real
from tests.integration.megatron_core.layer import EXPERTS, HIDDEN
from tests.integration.megatron_core.layer import FIELDS as FIELDS_OF_LAYER
from tests.integration.megatron_core.model import LENGTH, VOCABULARY, gpt_outcome
from tests.integration.megatron_core.on_cpu import megatron_on_cpu
from tests.integration.steps import difference

RANKS = 2
BACKEND = "allgather"  # not the one that is used without a word
# A dense layer and an MoE layer.
FIELDS: dict[str, Any] = FIELDS_OF_LAYER | {"expert_model_parallel_size": RANKS, "moe_layer_freq": [0, 1]}


def gpt_model(config: Any) -> Any:
    """A GPTModel by Megatron's spec of a block."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(3)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)


def config_of(cls: Any = None, **fields: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return (cls or TransformerConfig)(**{**FIELDS, **fields})


def bridge_provider() -> Any:
    """A provider with the real mixin of Megatron-Bridge, as each of its model families defines one."""
    from dataclasses import dataclass

    from megatron.core.transformer.transformer_config import TransformerConfig

    packages = ["megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.common", "megatron.bridge.utils"]
    real = import_real("megatron.bridge.models.model_provider", bare=packages, stubs=["omegaconf"])

    @dataclass
    class Provider(TransformerConfig, real.ModelProviderMixin):  # type: ignore[misc, name-defined]
        def provide(self, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None) -> Any:
            return gpt_model(self)

        def finalize(self) -> None: ...

    return config_of(Provider)


def ddp_config(**fields: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False, **fields)


def by_bridge() -> Any:
    from moe_dispatch.integrations.megatron import pre_wrap_hook

    provider = bridge_provider()
    if "MOE_DISPATCH_BACKEND" in os.environ:
        provider.register_pre_wrap_hook(pre_wrap_hook(backend=os.environ["MOE_DISPATCH_BACKEND"]))
    return provider.provide_distributed_model(ddp_config=ddp_config(), use_cpu_initialization=True)


def by_verl() -> Any:
    """verl's function, with a provider of the Bridge."""
    import moe_dispatch.integrations.verl  # noqa: F401 - verl does this by its entry point

    packages = ["verl", "verl.utils", "verl.utils.megatron", "verl.models", "verl.models.mcore", "verl.workers"]
    missing = ["ray", "tensordict", "omegaconf", "verl.workers.config", "verl.utils.model", "verl.utils.fs"]
    real = import_real(
        "verl.utils.megatron_utils",
        bare=packages,
        stubs=[*missing, "verl.utils.torch_dtypes", "verl.models.mcore.bridge", "megatron.bridge.training"],
    )
    provider = bridge_provider()
    models, config = real.make_megatron_module(
        real.McoreModuleWrapperConfig(wrap_with_ddp=False),
        tf_config=provider,
        hf_config=SimpleNamespace(hidden_size=HIDDEN),
        bridge=object(),
        provider=provider,
        override_model_config=dict(OVERRIDE),
    )
    assert config.num_moe_experts == EXPERTS
    return models


def by_areal() -> Any:
    """AReaL's function, with a provider of the Bridge; its engine, which calls the function, is a stand-in."""
    import moe_dispatch.integrations.areal  # noqa: F401

    packages = ["areal", "areal.api", "areal.utils", "areal.models", "areal.models.mcore"]
    import_real(
        "areal.models.mcore.registry", bare=packages, stubs=["mbridge", "areal.api.cli_args", "areal.utils.logging"]
    )
    engine = sys.modules.get("areal.engine.megatron_engine") or import_engine()
    provider = bridge_provider()
    unset = ("virtual_pipeline_parallel_size", "recompute_granularity", "recompute_method")
    off = ("use_custom_fsdp", "use_torch_fsdp2", "overlap_param_gather_with_optimizer_step")
    mcore_config = SimpleNamespace(
        **dict.fromkeys((*unset, "recompute_num_layers", "recompute_modules")),
        **dict.fromkeys((*off, "distribute_saved_activations"), False),
        moe_token_dispatcher_type="flex",  # which AReaL ignores with this bridge
        ddp=ddp_config(),
        wrap_with_ddp=True,
    )
    return engine.make_mcore_model(
        hf_config=None,
        tf_config=config_of(),
        mcore_config=mcore_config,
        bridge=SimpleNamespace(to_megatron_provider=lambda load_weights: provider),
        bridge_type="megatron-bridge",
    )


def import_engine() -> Any:
    """A module that imports the function by name, as AReaL's engine does. It is on a path of its own."""
    folder = Path(tempfile.mkdtemp())
    (folder / "megatron_engine.py").write_text("from areal.models.mcore.registry import make_mcore_model\n")
    package = types.ModuleType("areal.engine")
    package.__path__ = [str(folder)]
    sys.modules["areal.engine"] = package
    return importlib.import_module("areal.engine.megatron_engine")


def by_slime() -> Any:
    """slime's function up to the optimizer, with a model provider of the user; Megatron's get_model is a stand-in."""
    from moe_dispatch.integrations import slime

    real = import_real("slime.backends.megatron_utils.model", stubs=["ray", "sglang", "sglang_router"])
    if not hasattr(real.get_model, "__wrapped__"):
        real.get_model = lambda provider, model_type: [provider(pre_process=True, post_process=True)]
    args = Namespace(
        moe_use_upcycling=False,
        load="nowhere",
        pretrained_checkpoint=None,
        num_rollout=0,
        custom_model_provider_path="tests.integration.frameworks.training.slime_provider",
        only_train_params_name_list=None,
        freeze_params_name_list=None,
    )
    if "MOE_DISPATCH_BACKEND" in os.environ:
        slime.init(args)
    models, optimizer, scheduler = real.setup_model_and_optimizer(args)
    assert optimizer is scheduler is None
    return models


def slime_provider(pre_process: bool = True, post_process: bool = True) -> Any:
    return gpt_model(config_of())


def by_ms_swift() -> Any:
    """ms-swift's function, where mcore-bridge and the config that it would read are stand-ins."""
    import moe_dispatch.integrations.ms_swift  # noqa: F401

    stubs = ["mcore_bridge", "modelscope", "swift.utils"]
    real = import_real(
        "swift.megatron.model.utils", bare=["swift", "swift.megatron", "swift.megatron.model"], stubs=stubs
    )
    sys.modules["mcore_bridge"].get_mcore_model.side_effect = lambda config: [gpt_model(config_of())]
    with patch.object(real, "get_mcore_model_config", lambda args, hf_config: None):
        return real.get_mcore_model(SimpleNamespace(bridge_backend="mcore-bridge"), None)


BUILDS: dict[str, Callable[[], Any]] = {
    "megatron/bridge": by_bridge,
    "verl": by_verl,
    "areal": by_areal,
    "slime": by_slime,
    "swift": by_ms_swift,
}
OVERRIDE: dict[str, Any] = {}  # verl's override_mcore_model_config


@contextmanager
def in_megatron(ranks: int) -> Iterator[None]:
    """Run what trainers build in Megatron's global groups, on a CPU."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    with megatron_on_cpu(), patch.object(torch.nn.Module, "cuda", lambda self, *args: self):
        yield


def compare(rank: int, build: Callable[[], Any]) -> float:
    """The largest difference to the model that the trainer builds when no backend is named."""
    os.environ.pop("MOE_DISPATCH_BACKEND", None)
    own = build()
    os.environ["MOE_DISPATCH_BACKEND"] = BACKEND
    try:
        return difference_of(build(), own, rank)
    finally:
        del os.environ["MOE_DISPATCH_BACKEND"]


def difference_of(ours: Any, own: Any, rank: int) -> float:
    from moe_dispatch.integrations.megatron import MegatronDispatcher

    assert not any(isinstance(dispatcher, MegatronDispatcher) for dispatcher in dispatchers(own))
    (dispatcher,) = dispatchers(ours)
    assert isinstance(dispatcher, MegatronDispatcher)
    assert dispatcher.dispatcher.backend_name == BACKEND
    return difference(*(gpt_outcome(model, rank) for (model,) in (ours, own)))


def verl_config_key(rank: int) -> float:
    """verl with the backend in its config, and no variable."""
    own = by_verl()
    with patch.dict(OVERRIDE, {"moe_dispatch": {"backend": BACKEND}}):
        return difference_of(by_verl(), own, rank)


def verl_lengths(rank: int) -> float:
    """verl packs lengths 3 and 5 for 2 tensor-parallel ranks, and our plug-in keeps them: 0 if they are right."""
    import moe_dispatch.integrations.verl  # noqa: F401

    by_verl()  # makes the packages and stubs
    real = import_real("verl.models.mcore.util", stubs=["verl.utils.device"])
    nested = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    with patch.object(real.mpu, "get_tensor_model_parallel_world_size", lambda: 2):
        packed, params, _ = real.preprocess_thd_engine(nested)
    assert packed.shape == (1, 10)
    assert params.cu_seqlens_q.tolist() == [0, 4, 10]  # verl's own offsets have no lengths
    return float((params.moe_dispatch_cu_seqlens - torch.tensor([0, 3, 8])).abs().sum())


CHECKS: dict[str, Callable[[int], float]] = {
    **{name: functools.partial(compare, build=build) for name, build in BUILDS.items()},
    "verl, by its config": verl_config_key,
    "verl, lengths": verl_lengths,
}


def dispatchers(chunks: Any) -> list[Any]:
    modules = [module for chunk in chunks for module in chunk.modules()]
    return [module.token_dispatcher for module in modules if hasattr(module, "token_dispatcher")]
