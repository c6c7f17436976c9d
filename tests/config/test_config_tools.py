"""Configs from Hydra, OmegaConf, tyro, jsonargparse and argparse, and the mistakes of their users."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import ChainMap, UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import ConfigError, InputError
from tests.pages import ROOT

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 64}
FIELDS: dict[str, Any] = {
    "backend": {"name": "alltoall", "reduction": "exact"},
    "balance": {"name": "exact", "bound": 1.05},
    "chunks": {"tokens": 4, "recompute": True},
    "constraints": {"row_multiple": 4, "group_sizes": [2, 4]},
}
CONFIG = DispatcherConfig(**SIZES, **FIELDS)


@pytest.mark.parametrize("kind", [MappingProxyType, UserDict, ChainMap])
def test_any_mapping_is_taken(kind: Any) -> None:
    config = DispatcherConfig(**SIZES, **{field: kind(value) for field, value in FIELDS.items()})
    assert config == CONFIG
    assert type(config.backend) is dict
    assert config.replace(balance=kind({"name": "exact"})).slot_options.bound == 1.0  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"Dispatcher: pass DispatcherConfig\(\*\*your_dict\), not a"):
        build_dispatcher(kind({**SIZES}))
    with pytest.raises(ConfigError, match=r"file must be a path, got a mapping"):
        DispatcherConfig.load(kind({**SIZES}))


def test_configs_of_omegaconf_and_hydra() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    instantiate = pytest.importorskip("hydra.utils").instantiate
    cfg = omegaconf.OmegaConf.create({"d": {**SIZES, **FIELDS, "pad_multiple": "${d.top_k}"}})
    assert DispatcherConfig(**cfg.d) == CONFIG.replace(pad_multiple=2)
    cfg.d._target_ = "moe_dispatch.DispatcherConfig"
    assert instantiate(cfg.d) == CONFIG.replace(pad_multiple=2)
    with pytest.raises(ConfigError, match=r"_target_: .* call hydra\.utils\.instantiate"):
        DispatcherConfig(**cfg.d)


def test_tyro_makes_a_command_line() -> None:
    tyro = pytest.importorskip("tyro")
    words = "--num-experts 8 --top-k 2 --hidden-size 64 --backend name alltoall reduction exact --balance exact --debug"
    config = tyro.cli(DispatcherConfig, args=words.split())
    assert config == DispatcherConfig(**SIZES, backend=FIELDS["backend"], balance="exact", debug=True)
    config = tyro.cli(DispatcherConfig, args=f"{words[: words.index('--balance')]} --chunks 4".split())
    assert (config.chunks, config.balance) == (4, None)


def test_jsonargparse_makes_a_command_line(tmp_path: Path) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(DispatcherConfig, "dispatcher")
    file = tmp_path / "run.yaml"
    file.write_text("dispatcher: {num_experts: 8, top_k: 2, hidden_size: 64, balance: {name: exact, bound: 1.05}}\n")
    options = "--dispatcher.backend.name=alltoall --dispatcher.backend.reduction=exact --dispatcher.graph_safe=false"
    found = parser.parse_args([f"--config={file}", *options.split()])
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert instantiate(found).dispatcher == DispatcherConfig(
        **SIZES, backend=FIELDS["backend"], balance=FIELDS["balance"]
    )


@pytest.mark.slow
def test_sweep_over_backends_by_hydra(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, code in re.findall(r'^```\w+ title="(sweep\.\w+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    shown = re.search(r"^```sh\n(torchrun .*)\n```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    command, told = shown.groups()
    started = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        started, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    printed = [line.split() for line in run.stdout.splitlines() if re.fullmatch(r"\w+( \d\.\d{4}){3}", line)]
    expected = [line.split() for line in told.splitlines()]
    assert [name for name, *_ in printed] == [name for name, *_ in expected]
    for got, want in zip(printed, expected, strict=True):
        assert list(map(float, got[1:])) == pytest.approx(list(map(float, want[1:])), abs=5e-4)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "the syntax of the command": (
        {"backend": "alltoall+reduction=exact"},
        r"backend: options must be a mapping, .* Write backend=\{'name': 'alltoall', 'reduction': 'exact'\}\.",
    ),
    "for a planner": ({"balance": "exact+bound=1.05"}, r"Write balance=\{'name': 'exact', 'bound': 1\.05\}"),
    "for chunks": ({"chunks": "4+recompute=true"}, r"Write chunks=\{'tokens': 4, 'recompute': True\}"),
    "for graph-safe mode": ({"graph_safe": "true+capacity_factor=2"}, r"Write graph_safe=\{'capacity_factor': 2\}"),
    "JSON in quotes": ({"backend": '{"name": "local"}'}, r"Write backend=\{'name': 'local'\}, without quotes"),
    "a path as a keyword": (
        {"balance.bound": 1.5},
        r"balance\.bound: .* write balance=\{\"name\": \.\.\., \"bound\": 1\.5",
    ),
    "a variable as a keyword": ({"graph_safe__capacity_factor": 2}, r"write graph_safe=\{\"capacity_factor\": 2\}"),
    "a dtype of torch": ({"wire": torch.bfloat16}, r"got torch\.bfloat16\. Write its name, 'bfloat16'\."),
    "in options": ({"wire": {"dtype": torch.bfloat16}}, r'must have "dtype", a string, got .*torch\.bfloat16'),
    "a device of torch": ({"device": torch.device("cuda:0")}, r"Write its name, 'cuda'\."),
    "a layout": (
        {"layout": "thd"},
        r"layout: .* pass a layout, such as THD\(cu_seqlens\), to Dispatcher\.plan or disp",
    ),
    "the dtype of rows": ({"dtype": "bfloat16"}, r"dtype: .* Rows keep the dtype of x\."),
    "fields two keys below": (
        {"model": {"depth": 3, "moe": SIZES}, "lr": 0.1},
        r"^DispatcherConfig: model: .* It holds the fields .* Pass what 'model\.moe' holds\.$",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    fields, told = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=told):
        DispatcherConfig(**SIZES, **fields)


def test_a_name_in_place_of_a_layout_is_named() -> None:
    dispatcher = build_dispatcher(DispatcherConfig(**SIZES))
    with pytest.raises(
        InputError, match=r"layout must be a Layout or None, got 'thd'\. Make a layout: THD\(cu_seqlens\)"
    ):
        dispatcher.plan("thd")
    routing = Routing(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    with pytest.raises(InputError, match=r"plan must be a Plan, a Layout or None, got 'bshd'\. Make a layout"):
        dispatcher.dispatch(torch.ones(1, 64), routing, "bshd")  # type: ignore[call-overload]


def test_a_file_in_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "moe.toml").write_text("top_k = 2\n")
    with pytest.raises(ConfigError, match=r"moe\.toml: .* It was read as JSON, .* For TOML, pass Dispa.*tomllib\.load"):
        DispatcherConfig.load(tmp_path / "moe.toml")
