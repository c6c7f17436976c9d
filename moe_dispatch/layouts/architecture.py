"""Packed or padded: what the layers of a model family accept, by the version of the framework that runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, final, get_args

from moe_dispatch.errors import ConfigError

Framework = Literal["megatron-core", "transformers"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSupport:
    """What one framework does with packed input to model families whose layers carry a state along the sequence.

    Attributes:
        model_types: as in a Hugging Face ``config.json``.
        framework: the distribution that runs the model.
        packed_since: its first release that keeps packed sequences apart; None when none was found to.
        context_parallel: whether these layers can divide a packed sequence among ranks, from that release on.
        condition: what the caller must see to, for packed input to be right.
        source: where this was read, and when.
    """

    model_types: tuple[str, ...]
    framework: Framework
    packed_since: str | None
    context_parallel: bool = False
    condition: str = ""
    source: str


_GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_PASS_CU_SEQLENS = (
    "Pass cu_seq_lens_q, and have flash-linear-attention and causal-conv1d installed: the torch fallbacks ignore it."
)

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
        condition=_PASS_CU_SEQLENS,
        source="wheels 5.8.0 (mixes sequences silently) and 5.9.0; transformers#45034, #46859; read 2026-11",
    ),
    PackingSupport(
        model_types=("olmo_hybrid",),
        framework="transformers",
        packed_since="5.15.0",
        condition=_PASS_CU_SEQLENS,
        source="wheels 5.11.0 (mixes sequences silently) and 5.15.0; those between were not read; read 2026-11",
    ),
    PackingSupport(
        model_types=("granitemoehybrid",),
        framework="transformers",
        packed_since="5.3.0",
        condition="Pass seq_idx and cu_seq_lens_q, and have mamba-ssm and causal-conv1d installed.",
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
    """What ``layout_for`` decided.

    Attributes:
        packed: True for THD, False for a padded batch (BSHD or SBHD).
        reason: one sentence to log once at start, with what the caller must see to.
    """

    packed: bool
    reason: str


def layout_for(model_type: str, *, framework: Framework, framework_version: str | None = None, cp: int = 1) -> Packing:
    """Whether a model family takes packed sequences.

    Data may stay packed either way: where the model does not take it, ``thd_to_bshd`` makes the padded batch.

    Args:
        model_type: as in a Hugging Face ``config.json``; a family not in ``PACKING_SUPPORT`` counts as attention only.
        framework: the distribution that runs the model.
        framework_version: its version; that of the installed distribution when omitted.
        cp: context-parallel ranks.

    Raises:
        ConfigError: the model needs a padded batch, or its layers cannot divide a sequence, and ``cp`` exceeds 1; the
            framework is unknown, or its version is omitted and it is not installed.
    """
    if framework not in get_args(Framework):
        raise ConfigError(
            f"layout_for: framework must be one of {', '.join(get_args(Framework))}, got {framework!r}. Name one of "
            "them."
        )
    rule = next((r for r in PACKING_SUPPORT if r.framework == framework and model_type in r.model_types), None)
    if rule is None:
        return Packing(packed=True, reason=f"{model_type} is not known to have layers that reject packed input.")
    found = framework_version or _installed(framework)
    packed = rule.packed_since is not None and _release(found) >= _release(rule.packed_since)
    if cp > 1 and not (packed and rule.context_parallel):
        raise ConfigError(_refusal(model_type, rule, found, packed, cp))
    return Packing(packed=packed, reason=_reason(model_type, rule, found, packed))


def _reason(model_type: str, rule: PackingSupport, found: str, packed: bool) -> str:
    if packed:
        takes = f"{model_type} takes packed input in {rule.framework} {found}, as since {rule.packed_since}."
        return f"{takes} {rule.condition}".rstrip()
    since = f"before {rule.packed_since}" if rule.packed_since else "in any release known here"
    return f"{model_type} needs a padded batch in {rule.framework} {found}: packed input does not work {since}."


def _refusal(model_type: str, rule: PackingSupport, found: str, packed: bool, cp: int) -> str:
    cause = (
        "its layers cannot divide a packed sequence" if packed else "it needs a padded batch, which cannot be divided"
    )
    upgrade = f" or {rule.framework} {rule.packed_since}" if rule.context_parallel else ""
    return (
        f"layout_for: cp must be 1 for {model_type} in {rule.framework} {found}, because {cause}, got cp {cp}. Use cp=1"
        f"{upgrade}."
    )


def _installed(framework: str) -> str:
    try:
        return version(framework)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"layout_for: framework_version must be given while {framework} is not installed, got None. Pass the "
            "version that will run the model."
        ) from error


def _release(text: str) -> tuple[tuple[int, ...], bool]:
    """The numbers of a version, and whether it is final: a pre-release comes before its release."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise ConfigError(f"layout_for: framework_version must be numbers, got {text!r}. Pass one like 0.18.2.")
    numbers = [int(part) for part in match.group().split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers), re.match(r"\.?(a|b|rc|dev)", text[match.end() :]) is None
