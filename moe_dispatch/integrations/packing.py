"""Whether the layers of a model family accept packed input, by the version of the framework that runs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, final, get_args

from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.checks import parse_version

logger = logging.getLogger("moe_dispatch")

__all__ = ["Packing", "PackingSupport", "packing_for"]

Framework = Literal["megatron-core", "transformers"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSupport:
    """Support of one framework for packed input to models whose layers carry a state along the sequence.

    Attributes:
        model_types: Model types as in a Hugging Face ``config.json``.
        framework: The distribution that runs the model.
        packed_since: The first release that keeps packed sequences apart; None if no known release does.
        kernels: Packages, by import name, whose kernels keep packed sequences apart; the framework's fallbacks do not.
        context_parallel: Whether these layers can divide a packed sequence among ranks, since ``packed_since``.
        condition: Arguments that the caller must pass, so that packed input gives right results.
    """

    model_types: tuple[str, ...]
    framework: Framework
    packed_since: str | None
    kernels: tuple[str, ...] = ()
    context_parallel: bool = False
    condition: str = ""


_GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_PASS_CU_SEQLENS = "Pass cu_seq_lens_q, for the delta rule, and seq_idx, for the convolution before it."
_FLA = ("fla", "causal_conv1d")

# Families that are not listed have only attention layers, which take packed input in every release. Above each row
# stands where it was read, all of it in 2026-11.
PACKING_SUPPORT = (
    # Wheels 0.17.1 (raises NotImplementedError) and 0.18.2; 0.18.0 according to verl#7336.
    PackingSupport(
        model_types=_GATED_DELTA_NET, framework="megatron-core", packed_since="0.18.0", context_parallel=True
    ),
    # Wheels 5.8.0 (mixes sequences silently), 5.9.0, and 5.23.0 (its fallbacks raise ValueError if they get
    # cu_seq_lens_q, and mix sequences if not); transformers#45034, #46859.
    PackingSupport(
        model_types=_GATED_DELTA_NET,
        framework="transformers",
        packed_since="5.9.0",
        kernels=_FLA,
        condition=_PASS_CU_SEQLENS,
    ),
    # Wheels 5.11.0 (mixes sequences silently) and 5.15.0; releases between them were not read.
    PackingSupport(
        model_types=("olmo_hybrid",),
        framework="transformers",
        packed_since="5.15.0",
        kernels=_FLA,
        condition=_PASS_CU_SEQLENS,
    ),
    # Wheels 5.3.0 (the oldest that was read) and 5.23.0.
    PackingSupport(
        model_types=("granitemoehybrid",),
        framework="transformers",
        packed_since="5.3.0",
        kernels=("mamba_ssm", "causal_conv1d"),
        condition="Pass seq_idx and cu_seq_lens_q.",
    ),
    # Wheels 0.16.1 (its Mamba mixer sets no seq_idx) and 0.17.1; 0.17.0 was not read.
    PackingSupport(
        model_types=("nemotron_h",), framework="megatron-core", packed_since="0.17.1", context_parallel=True
    ),
    # Wheel 5.23.0 passes keyword arguments to its kernels. This was not tested, so these families are padded.
    PackingSupport(
        model_types=("nemotron_h", "kimi_linear", "jamba", "bamba", "falcon_h1"),
        framework="transformers",
        packed_since=None,
    ),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The answer of ``packing_for``.

    Attributes:
        packed: True for THD, False for a padded batch (BSHD or SBHD).
        reason: One sentence, and the arguments that the caller must pass.
    """

    packed: bool
    reason: str


def packing_for(
    model_type: str,
    *,
    framework: Framework,
    framework_version: str | None = None,
    kernels: bool | None = None,
    cp: int = 1,
) -> Packing:
    """Decide whether a model family takes packed sequences; if it does not, log a warning once per process.

    Data may stay packed either way: ``thd_to_bshd`` makes the padded batch for a model that needs one.

    Args:
        model_type: As in a Hugging Face ``config.json``; a family not in ``PACKING_SUPPORT`` counts as attention only.
        framework: The distribution that runs the model.
        framework_version: Version of the framework; by default the version that is installed.
        kernels: Whether the packages in ``PackingSupport.kernels`` are available; by default this process looks for
            them. Pass True if the model has them from elsewhere, for example from transformers' kernels hub.
        cp: The number of context-parallel ranks.

    Raises:
        ConfigError: ``cp`` exceeds 1, and the model needs a padded batch or its layers cannot divide a sequence; or the
            framework is unknown, or its version is omitted and it is not installed.
    """
    if framework not in get_args(Framework):
        raise ConfigError(
            f"packing_for: framework must be one of {', '.join(get_args(Framework))}, got {framework!r}. Pass one "
            "of these names."
        )
    rule = next((r for r in PACKING_SUPPORT if r.framework == framework and model_type in r.model_types), None)
    if rule is None:
        return Packing(packed=True, reason=f"{model_type} has no layers that are known to reject packed input.")
    try:
        found = framework_version or version(framework)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"packing_for: {framework} is not installed. Pass the version that will run the model as framework_version."
        ) from error
    obstacle = _obstacle(rule, found, kernels)
    if cp > 1 and (obstacle or not rule.context_parallel):
        cause = "it needs a padded batch, which cannot be divided"
        if not obstacle:
            cause = "its layers cannot divide a packed sequence"
        upgrade = f" or {framework} {rule.packed_since}" if rule.context_parallel else ""
        raise ConfigError(
            f"packing_for: cp must be 1 for {model_type} in {framework} {found}, because {cause}, got cp {cp}. Use "
            f"cp=1{upgrade}."
        )
    if obstacle:
        reason = f"{model_type} needs a padded batch in {framework} {found}: packed input {obstacle}."
        _warn_once(reason)
        return Packing(packed=False, reason=reason)
    takes = f"{model_type} takes packed input in {framework} {found}, as in releases since {rule.packed_since}."
    return Packing(packed=True, reason=f"{takes} {rule.condition}".rstrip())


@cache
def _warn_once(reason: str) -> None:
    logger.warning("%s", reason)


def _obstacle(rule: PackingSupport, found: str, kernels: bool | None) -> str:
    """Return the reason why packed input does not work, or an empty string if it works."""
    if rule.packed_since is None:
        return "does not work in any release known here"
    if not parse_version(found)[0]:
        raise ConfigError(
            f"packing_for: framework_version must begin with a number, got {found!r}. Pass a version like 0.18.2."
        )
    if parse_version(found) < parse_version(rule.packed_since):
        return f"does not work before {rule.packed_since}"
    missing = [name for name in rule.kernels if not kernels and (kernels is False or find_spec(name) is None)]
    return f"needs the kernels of {' and '.join(missing)}, which are not installed" if missing else ""
