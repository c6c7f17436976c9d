"""The search for ``transformer_engine.pytorch.ep``, the one module through which this package calls NCCL EP."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, final

import torch

from moe_dispatch.seams.plug_ins import Rejected, import_whole
from moe_dispatch.versions import loaded_nccl

PACKAGE = "transformer_engine"
CAPABILITY = (9, 0)
NCCL = (2, 30, 4)
# The public names of ``transformer_engine.pytorch.ep`` that are called, with the parameters that are given.
NAMES: dict[str, tuple[str, ...]] = {
    "ep_bootstrap": (
        "ep_group",
        "num_experts",
        "max_tokens_per_rank",
        "hidden_dim",
        "num_topk",
        "recv_capacity_per_rank",
        "max_num_sms",
        "drop_on_overflow",
    ),
    "ep_finalize": (),
    "is_ep_bootstrapped": (),
    "EpBuffer": (
        "top_k",
        "max_tokens_per_rank",
        "hidden_dim",
        "num_local_experts",
        "recv_capacity_per_rank",
        "alignment",
        "device",
    ),
    "ep_dispatch": ("buffer", "tokens", "topk_idx", "topk_weights"),
    "ep_combine": ("buffer", "expert_out", "num_local_tokens"),
}


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EPLibrary:
    """``transformer_engine.pytorch.ep`` as it is installed.

    Attributes:
        ep: The module.
        version: Version of transformer-engine.
        device: Device type of the tensors that it takes.
    """

    ep: Any
    version: str
    device: str = "cuda"


@cache
def find_library() -> EPLibrary | Rejected:
    """Return the installed library, or why it is unusable. Never raises."""
    if PACKAGE not in sys.modules and find_spec(PACKAGE) is None:
        return Rejected(f"no module named {PACKAGE!r} is installed")
    if not torch.cuda.is_available():
        return Rejected("torch sees no CUDA device")
    found = torch.cuda.get_device_capability()
    if found < CAPABILITY:
        return Rejected(f"NCCL EP needs compute capability {_dotted(CAPABILITY)}, this device has {_dotted(found)}")
    try:
        import_whole(f"{PACKAGE}.pytorch", PACKAGE)
        ep = import_whole(f"{PACKAGE}.pytorch.ep", PACKAGE) if find_spec(f"{PACKAGE}.pytorch.ep") else None
        version, built = str(sys.modules[PACKAGE].__version__), sys.modules[f"{PACKAGE}_torch"]
    except (Exception, SystemExit) as error:  # it loads libraries of CUDA, which may raise anything
        return Rejected(f"importing {PACKAGE!r} raised {type(error).__name__}: {str(error).strip() or 'no text'}")
    reason = unusable(version, built, ep, loaded_nccl())
    return Rejected(reason) if reason else EPLibrary(ep=ep, version=version)


def unusable(version: str, built: Any, ep: Any, nccl: tuple[int, ...] | None) -> str | None:
    """Return why an imported transformer-engine cannot be used, or None.

    Args:
        version: Its version.
        built: Its compiled part, ``transformer_engine_torch``.
        ep: Its module ``transformer_engine.pytorch.ep``; None if it has none.
        nccl: Version of the NCCL that is loaded; None if it is unknown, and the library checks it itself.
    """
    named = f"transformer-engine {version}"
    if ep is None:
        return f"{named} has no transformer_engine.pytorch.ep; install 2.20 or later"
    if not hasattr(built, "ep_initialize"):
        return f"{named} is built without NCCL EP; build it from source with NVTE_WITH_NCCL_EP=1"
    if missing := lacking(ep):
        return f"{named} lacks {missing}; install 2.20 or later"
    if nccl is not None and nccl < NCCL:
        return (
            f"NCCL EP needs NCCL {_dotted(NCCL)} or later, got {_dotted(nccl)}; run "
            f'pip install "nvidia-nccl-cu13>={_dotted(NCCL)}" --no-deps'
        )
    return None


def lacking(ep: Any) -> str:
    """Return the first name or parameter that a module lacks; an empty text if it has all of them."""
    for name, needed in NAMES.items():
        if not hasattr(ep, name):
            return f"{name} of transformer_engine.pytorch.ep"
        known = inspect.signature(getattr(ep, name)).parameters
        for parameter in needed:
            if parameter not in known:
                return f"the parameter {parameter} of transformer_engine.pytorch.ep.{name}"
    return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
