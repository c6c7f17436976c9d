"""DispatcherConfig.load: files, the environment, keywords, and what malformed ones get."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.config import ConstraintOverrides
from moe_dispatch.errors import ConfigError

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64}
EXACT = {"name": "alltoall", "reduction": "exact"}
YAML = """format: 1
backend: {name: alltoall, reduction: exact}
num_experts: 8
top_k: 2
hidden_size: 64
pad_multiple: fp8
constraints:
  row_multiple: 64
"""


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_file(tmp_path: Path, suffix: str) -> None:
    import yaml

    text = json.dumps(yaml.safe_load(YAML)) if suffix == "json" else YAML
    config = DispatcherConfig.load(_write(tmp_path, f"moe.{suffix}", text), environment={})
    constraints = ConstraintOverrides(row_multiple=64)
    assert config == DispatcherConfig(**SIZES, backend=EXACT, pad_multiple="fp8", constraints=constraints)


def test_keywords_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "moe.json", json.dumps({**SIZES, "backend": "local", "pad_multiple": 4, "debug": True}))
    environment = {"MOE_DISPATCH_PAD_MULTIPLE": "16", "MOE_DISPATCH_BACKEND": "allgather", "PATH": "/bin"}
    config = DispatcherConfig.load(path, environment=environment, backend="alltoall")
    assert (config.backend, config.pad_multiple, config.debug) == ("alltoall", 16, True)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("backend", json.dumps(EXACT), EXACT),
        ("pad_multiple", "mxfp8", "mxfp8"),
        ("pad_multiple", "48", 48),
        ("debug", "true", True),
        ("device", "null", None),
        ("weights", '"experts"', "experts"),
    ],
)
def test_values_from_the_environment(variable: str, text: str, value: Any) -> None:
    config = DispatcherConfig.load(environment={f"MOE_DISPATCH_{variable.upper()}": text}, **SIZES)
    assert getattr(config, variable) == value


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("MOE_DISPATCH_BACKND", "MOE_DISPATCH_BACKEND"),
        ("MOE_DISPATCH_BACKND__REDUCTION", "MOE_DISPATCH_BACKEND"),
        ("MOE_DISPATCH_backend", "MOE_DISPATCH_BACKEND"),
        ("MOE_DISPATCH_N_EXPERTS", "MOE_DISPATCH_NUM_EXPERTS"),
        ("MOE_DISPATCH_TOPK", "MOE_DISPATCH_TOP_K"),
    ],
)
def test_all_misspelled_variables_are_named(variable: str, near: str) -> None:
    told = rf"{variable}: no such field\. Did you mean {near}\? MOE_DISPATCH_weigts: .* MOE_DISPATCH_WEIGHTS\?$"
    with pytest.raises(ConfigError, match=told):
        DispatcherConfig.load(environment={variable: "2", "MOE_DISPATCH_weigts": "2"}, **SIZES)


@pytest.mark.parametrize("service", ["", "BACKEND_", "DEBUG_", "DEVICE_"])
def test_links_to_services_of_kubernetes_are_ignored(service: str) -> None:
    """The variables that Kubernetes sets for services named moe-dispatch, moe-dispatch-backend and so on."""
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_PROTO")
    links = {f"MOE_DISPATCH_{service}{name}": "tcp" for name in names}
    config = DispatcherConfig.load(environment={**links, "MOE_DISPATCH_BACKEND": "allgather"}, **SIZES)
    assert config == DispatcherConfig(**SIZES, backend="allgather")


@pytest.mark.parametrize(
    ("file", "environment", "backend"),
    [
        ("alltoall", {"BACKEND__REDUCTION": "exact"}, EXACT),
        (EXACT, {"BACKEND__PAIR_ROWS": '"worst"'}, {**EXACT, "pair_rows": "worst"}),
        ({"name": "hybridep", "emulate": True}, {"BACKEND": "alltoall", "BACKEND__REDUCTION": "exact"}, EXACT),
        (EXACT, {"BACKEND__NAME": "local"}, {**EXACT, "name": "local"}),
    ],
)
def test_options_from_the_environment(tmp_path: Path, file: Any, environment: dict[str, str], backend: Any) -> None:
    path = _write(tmp_path, "moe.json", json.dumps({**SIZES, "backend": file}))
    variables = {f"MOE_DISPATCH_{name}": value for name, value in environment.items()}
    variables |= {"MOE_DISPATCH_CONSTRAINTS__MAX_ROWS": "64", "MOE_DISPATCH_CONSTRAINTS__GROUP_SIZES": "[2, 4]"}
    constraints = ConstraintOverrides(max_rows=64, group_sizes=(2, 4))
    expected = DispatcherConfig(**SIZES, backend=backend, constraints=constraints)
    assert DispatcherConfig.load(path, environment=variables) == expected


def test_wrong_options_in_the_environment_and_a_mapping_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)BACKEND__SPEED: .*options need a named backend, got \"auto"):
        DispatcherConfig.load(environment={"MOE_DISPATCH_BACKEND__SPEED": "3"}, **SIZES)
    with pytest.raises(ConfigError, match=r"file must be a path, got a mapping"):
        DispatcherConfig.load(SIZES)
    with pytest.raises(ConfigError, match=r"(?s)MOE_DISPATCH_DEBUG__LEVEL: .*debug.* valid boolean"):
        DispatcherConfig.load(environment={"MOE_DISPATCH_DEBUG__LEVEL": "3"}, **SIZES)
    path = _write(tmp_path, "moe.json", json.dumps({**SIZES, "debug": True}))
    with pytest.raises(ConfigError, match=r"DEBUG__LEVEL: debug has no options, because it is True"):
        DispatcherConfig.load(path, environment={"MOE_DISPATCH_DEBUG__LEVEL": "3"})


@pytest.mark.parametrize(
    ("fields", "environment", "told"),
    [
        ({}, {"MOE_DISPATCH_DEBUG": "perhaps"}, r"load: \S*moe\.json and MOE_DISPATCH_DEBUG: .*debug.*valid boolean"),
        ({"top_k": 9}, {}, r"load: \S*moe\.json: .*top_k \(9\) must not exceed"),
        ({"topk": 3}, {}, r"load: \S*moe\.json: .*topk.*Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_told_with_its_source(
    tmp_path: Path, fields: dict[str, Any], environment: dict[str, str], told: str
) -> None:
    path = _write(tmp_path, "moe.json", json.dumps({**SIZES, **fields}))
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        DispatcherConfig.load(path, environment=environment)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("moe.yaml", "top_k: 2\nbackend: {name: alltoall\nnum_experts: 8\n", r"cannot read .*moe\.yaml: .* line 3, .*"),
        ("moe.json", '{"top_k": 2,\n "backend": local}', r"cannot read .*moe\.json: .* line 2"),
        ("moe.json", "", r"moe\.json: .* line 1"),
        ("moe.json", "[1, 2]", r"moe\.json must be a mapping of fields, not list"),
        ("moe.yaml", "format: 2\nrows: 3\n", r"must have format 1, got format 2, of a newer moe-dispatch"),
        ("moe.yaml", "format: one\n", "format: Extra inputs are not permitted, got 'one'"),
        ("moe.yaml", "on: 2\n", r"moe\.yaml: keys must be strings, got True\. Put quotes around it"),
        ("moe.yaml", "backend: {name: alltoall, 1: 2}\n", r"moe\.yaml: keys must be strings, got 1\."),
        ("moe.json", json.dumps({**SIZES, "self": 2}), "self: Extra inputs are not permitted, got 2"),
        ("moe.json", json.dumps({"moe": SIZES}), r"moe: .* It holds the fields of a config, .* Pass what 'moe' holds"),
        ("moe.toml", "top_k = 2", r"cannot read .*moe\.toml: Expecting value"),
        ("moe.yaml", b"backend: \xff\xfe\n", r"cannot read .*moe\.yaml: 'utf-8' codec"),
        ("none.yaml", None, r"cannot read .*No such file or directory: .*none\.yaml'\."),
    ],
)
def test_malformed_file(tmp_path: Path, name: str, text: str | bytes | None, told: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        DispatcherConfig.load(tmp_path / name, environment={})


DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 5000


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("TOP_K", DEEP, r"top_k: .*valid integer, got '\[\[\["),
        ("TOP_K", DIGITS, "top_k: .*valid integer, got '111"),
        ("BACKEND", DEEP, r"Unknown backend '\[\[\["),
        ("BALANCE", DEEP, r"Unknown planner '\[\[\["),
        ("TOP_K__X", "1", "top_k has no options, because it is 2"),
    ],
)
def test_hostile_variables(variable: str, text: str, told: str) -> None:
    environment = {"MOE_DISPATCH_TOP_K": "2", f"MOE_DISPATCH_{variable}": text}
    with pytest.raises(ConfigError, match=told) as caught:
        DispatcherConfig.load(environment=environment, num_experts=8, hidden_size=64)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("moe.json", f'{{"top_k": {DEEP}}}', "cannot read .*recursion"),
        ("moe.json", f'{{"top_k": {DIGITS}}}', "cannot read .*digits"),
        ("moe.yaml", f"top_k: {DIGITS}", "cannot read .*digits"),
        ("moe.yaml", f"top_k: {DEEP[98_000:-98_000]}", "cannot read .*recursion"),
    ],
)
def test_hostile_files(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        DispatcherConfig.load(_write(tmp_path, name, text))
    assert len(str(caught.value)) < 600


def test_a_yaml_file_of_aliases_that_stand_for_a_billion_words(tmp_path: Path) -> None:
    """Writing the value out, in our text or in the text of pydantic's error under it, would take minutes."""
    words = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    words += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
    fields = "top_k: *a8\nconstraints: {max_rows: *a8}\nbackend: {name: alltoall, pair_rows: *a8}\n"
    path = _write(tmp_path, "moe.yaml", "\n".join(words) + "\n" + fields)
    with pytest.raises(ConfigError, match=r"top_k: Input should be a valid integer, got \[\[\[\.\.\.\]") as caught:
        DispatcherConfig.load(path)
    assert len("".join(traceback.format_exception(caught.value))) < 50_000
    with pytest.raises(ConfigError, match=r"top_k has no options, because it is \[\[\[\.\.\.\]"):
        DispatcherConfig.load(path, environment={"MOE_DISPATCH_TOP_K__X": "1"})


def test_yaml_without_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"PyYAML is not installed\. .* pip install -e '\.\[yaml\]'"):
        DispatcherConfig.load(_write(tmp_path, "moe.yaml", YAML), environment={})
