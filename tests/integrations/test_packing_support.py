"""Packed or padded, by model family and framework version."""

from __future__ import annotations

from typing import Any

import pytest

from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.packing import PACKING_SUPPORT, packing_for
from tests.integrations.conftest import Install


@pytest.mark.parametrize(
    ("family", "framework", "found", "packed", "told"),
    [
        ("qwen3_5_moe", "megatron-core", "0.17.1", False, "does not work before 0.18.0"),
        ("qwen3_5_moe", "megatron-core", "0.18.0rc2", False, ""),
        ("qwen3_5_moe", "megatron-core", "0.18.0.dev3", False, ""),
        ("qwen3_5_moe", "megatron-core", "0.18", True, ""),
        ("qwen3_5_moe", "megatron-core", "0.18.0+cu12", True, ""),
        ("qwen3_5_moe", "megatron-core", "0.19.2", True, ""),
        ("qwen3_next", "transformers", "5.8.1", False, "qwen3_next needs a padded batch in transformers 5.8.1: packed"),
        ("qwen3_5_moe", "transformers", "5.10.2", True, "as in releases since 5.9.0"),
        ("qwen3_next", "transformers", "5.23.0", True, "Pass cu_seq_lens_q"),
        ("kimi_linear", "transformers", "5.23.0", False, "packed input does not work in any release known here."),
    ],
)
def test_families_take_packed_input_from_a_release_on(
    family: str, framework: Any, found: str, packed: bool, told: str
) -> None:
    answer = packing_for(family, framework=framework, framework_version=found, kernels=True)
    assert answer.packed is packed
    assert told in answer.reason


def test_attention_takes_packed_input_with_context_parallelism() -> None:
    assert packing_for("qwen3_moe", framework="transformers", cp=4).packed
    assert packing_for("qwen3_5", framework="megatron-core", framework_version="0.18.2", cp=2).packed


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("framework", "found", "cp", "told"),
    [
        ("megatron-core", "0.17.1", 2, r"needs a padded batch, .*, got cp 2. Use cp=1 or megatron-core 0.18.0\."),
        ("transformers", "5.0.0", 2, r"cp must be 1 for .* 5.0.0, because it needs .*, got cp 2. Use cp=1\."),
        ("transformers", "5.23.0", 2, r"because its layers cannot divide a packed sequence, got cp 2"),
        ("transformers", "main", 1, r"framework_version must begin with a number, got 'main'"),
        ("jax", None, 1, r"framework must be one of megatron-core, transformers, got 'jax'"),
        ("megatron-core", None, 1, r"megatron-core is not installed\. Pass the version"),
    ],
)
def test_what_cannot_work_is_refused(framework: Any, found: str | None, cp: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        packing_for("qwen3_5", framework=framework, framework_version=found, kernels=True, cp=cp)


def test_packed_input_needs_the_kernels_that_keep_sequences_apart(install: Install) -> None:
    versions: Any = {"framework": "transformers", "framework_version": "5.23.0"}
    install("causal_conv1d", "1.0")
    packing = packing_for("qwen3_5_moe", **versions)
    assert not packing.packed
    assert packing.reason.endswith("packed input needs the kernels of fla, which are not installed.")
    with pytest.raises(ConfigError, match="because it needs a padded batch, which cannot be divided, got cp 2"):
        packing_for("qwen3_5_moe", cp=2, **versions)
    install("fla", "1.0")
    assert packing_for("qwen3_5_moe", **versions).packed
    assert "fla and causal_conv1d" in packing_for("qwen3_5_moe", kernels=False, **versions).reason
    assert packing_for("qwen3_5_moe", framework="megatron-core", framework_version="0.18.2", kernels=False).packed


def test_a_padded_batch_is_announced_once_by_the_installed_version(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("transformers", "5.0.7")  # of which no other test asks
    families = ("qwen3_5", "qwen3_next", "qwen3_5", "qwen3_moe")
    reasons = [packing_for(family, framework="transformers").reason for family in families]
    assert [record.getMessage() for record in caplog.records] == reasons[:2]
    assert {(record.name, record.levelname) for record in caplog.records} == {("moe_dispatch", "WARNING")}


def test_the_table_names_each_family_once() -> None:
    pairs = [(rule.framework, name) for rule in PACKING_SUPPORT for name in rule.model_types]
    assert len(set(pairs)) == len(pairs)
