"""Packed or padded: what the layers of a model family accept, by the version of the framework that runs them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, final, get_args

from moe_dispatch.errors import ConfigError

logger = logging.getLogger("moe_dispatch")

Framework = Literal["megatron-core", "transformers"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSupport:
    """What one framework does with packed input to model families whose layers carry a state along the sequence.

    Attributes:
        model_types: as in a Hugging Face ``config.json``.
        framework: the distribution that runs the model.
        packed_since: its first release that keeps packed sequences apart; None when none was found to.
        kernels: packages, by import name, whose kernels keep packed sequences apart; what the framework falls back to
            without them does not.
        context_parallel: whether these layers can divide a packed sequence among ranks, from that release on.
        condition: what the caller must see to, for packed input to be right.
        source: where this was read, and when.
    """

    model_types: tuple[str, ...]
    framework: Framework
    packed_since: str | None
    kernels: tuple[str, ...] = ()
    context_parallel: bool = False
    condition: str = ""
    source: str


_GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_PASS_CU_SEQLENS = "Pass cu_seq_lens_q, for the delta rule, and seq_idx, for the convolution before it."

# Families that are not listed have attention only, which takes packed input everywhere.
PACKING_SUPPORT = (
    PackingSupport(
        model_types=_GATED_DELTA_NET,
        framework="megatron-core",
        packed_since="0.18.0",
        context_parallel=True,
        source="wheels 0.17.1 (raises NotImplementedError) and 0.18.2; 0.18.0 after verl#7336; read 2026-11",
    ),
    PackingSupport(
        model_types=_GATED_DELTA_NET,
        framework="transformers",
        packed_since="5.9.0",
        kernels=("fla", "causal_conv1d"),
        condition=_PASS_CU_SEQLENS,
        source="wheels 5.8.0 (mixes sequences silently), 5.9.0, and 5.23.0 (its fallbacks raise ValueError if told of "
        "sequences, and mix them if not); transformers#45034, #46859; read 2026-11",
    ),
    PackingSupport(
        model_types=("olmo_hybrid",),
        framework="transformers",
        packed_since="5.15.0",
        kernels=("fla", "causal_conv1d"),
        condition=_PASS_CU_SEQLENS,
        source="wheels 5.11.0 (mixes sequences silently) and 5.15.0; those between were not read; read 2026-11",
    ),
    PackingSupport(
        model_types=("granitemoehybrid",),
        framework="transformers",
        packed_since="5.3.0",
        kernels=("mamba_ssm", "causal_conv1d"),
        condition="Pass seq_idx and cu_seq_lens_q.",
        source="wheels 5.3.0 (the oldest read) and 5.23.0; read 2026-11",
    ),
    PackingSupport(
        model_types=("nemotron_h",),
        framework="megatron-core",
        packed_since="0.17.1",
        context_parallel=True,
        source="wheels 0.16.1 (its Mamba mixer sets no seq_idx) and 0.17.1; 0.17.0 was not read; read 2026-11",
    ),
    PackingSupport(
        model_types=("nemotron_h", "kimi_linear", "jamba", "bamba", "falcon_h1"),
        framework="transformers",
        packed_since=None,
        source="wheel 5.23.0 hands keyword arguments on to its kernels; untried, so padded; read 2026-11",
    ),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """What ``packing_for`` decided.

    Attributes:
        packed: True for THD, False for a padded batch (BSHD or SBHD).
        reason: one sentence, and what the caller must see to.
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
    """Whether a model family takes packed sequences; says so in the log, once per process, where it does not.

    Data may stay packed either way: where the model does not take it, ``thd_to_bshd`` makes the padded batch.

    Args:
        model_type: as in a Hugging Face ``config.json``; a family not in ``PACKING_SUPPORT`` counts as attention only.
        framework: the distribution that runs the model.
        framework_version: its version; that of the installed distribution when omitted.
        kernels: whether the packages that ``PackingSupport.kernels`` names are there for the model; when omitted they
            are looked for here. True where others stand for them, as kernels that transformers loads from its hub.
        cp: context-parallel ranks.

    Raises:
        ConfigError: the model needs a padded batch, or its layers cannot divide a sequence, and ``cp`` exceeds 1; the
            framework is unknown, or its version is omitted and it is not installed.
    """
    if framework not in get_args(Framework):
        raise ConfigError(
            f"packing_for: framework must be one of {', '.join(get_args(Framework))}, got {framework!r}. Name one of "
            "them."
        )
    rule = next((r for r in PACKING_SUPPORT if r.framework == framework and model_type in r.model_types), None)
    if rule is None:
        return Packing(packed=True, reason=f"{model_type} is not known to have layers that reject packed input.")
    found = framework_version or _installed(framework)
    obstacle = _obstacle(rule, found, kernels)
    if cp > 1 and (obstacle or not rule.context_parallel):
        raise ConfigError(_refusal(model_type, rule, found, obstacle, cp))
    if obstacle:
        reason = f"{model_type} needs a padded batch in {framework} {found}: packed input {obstacle}."
        _announce(reason)
        return Packing(packed=False, reason=reason)
    takes = f"{model_type} takes packed input in {framework} {found}, as since {rule.packed_since}."
    return Packing(packed=True, reason=f"{takes} {rule.condition}".rstrip())


@cache
def _announce(reason: str) -> None:
    logger.warning("%s", reason)


def _obstacle(rule: PackingSupport, found: str, kernels: bool | None) -> str:
    """What packed input lacks; nothing where it works."""
    if rule.packed_since is None:
        return "does not work in any release known here"
    if _release(found) < _release(rule.packed_since):
        return f"does not work before {rule.packed_since}"
    missing = [name for name in rule.kernels if not kernels and (kernels is False or find_spec(name) is None)]
    return f"needs the kernels of {' and '.join(missing)}, which are not installed" if missing else ""


def _refusal(model_type: str, rule: PackingSupport, found: str, obstacle: str, cp: int) -> str:
    cause = (
        "it needs a padded batch, which cannot be divided" if obstacle else "its layers cannot divide a packed sequence"
    )
    upgrade = f" or {rule.framework} {rule.packed_since}" if rule.context_parallel else ""
    return (
        f"packing_for: cp must be 1 for {model_type} in {rule.framework} {found}, because {cause}, got cp {cp}. Use "
        f"cp=1{upgrade}."
    )


def _installed(framework: str) -> str:
    try:
        return version(framework)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"packing_for: framework_version must be given while {framework} is not installed, got None. Pass the "
            "version that will run the model."
        ) from error


def _release(text: str) -> tuple[tuple[int, ...], bool]:
    """The numbers of a version, and whether it is final: a pre-release comes before its release."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise ConfigError(f"packing_for: framework_version must be numbers, got {text!r}. Pass one like 0.18.2.")
    numbers = [int(part) for part in match.group().split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers), re.match(r"\.?(a|b|rc|dev)", text[match.end() :]) is None
