"""Functions of trainers that are wrapped: inert without a backend, and wherever their module is imported."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tomllib
import types
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, final

import pytest
import torch

from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations import slime, verl
from moe_dispatch.integrations.built_models import convert_built

BUILD = "def build(*args, **kwargs):\n    return ['chunk']\n\ndef build_pair():\n    return ['chunk'], 'config'\n"


@final
@dataclass(frozen=True)
class Trainer:
    """A stand-in of a trainer, which is not imported yet. ``converted`` has what was given to ``convert``."""

    name: str
    source: Path
    environment: pytest.MonkeyPatch
    converted: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.environment.setenv(f"MOE_DISPATCH_{name}", value)

    def imported(self) -> Any:
        return importlib.import_module(self.name)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """No backend is named, and ``convert`` is a stand-in too."""
    name = f"trainer_{abs(hash(request.node.name))}"
    found = Trainer(name, tmp_path / f"{name}.py", monkeypatch)
    found.source.write_text(BUILD)
    stand_in: Any = types.ModuleType("moe_dispatch.integrations.megatron")
    stand_in.convert = lambda model, **given: found.converted.append((model, given))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delenv("MOE_DISPATCH_BACKEND", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield found
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] in (name, "verl")]:
        del sys.modules[loaded]


@pytest.mark.parametrize("imported", ["before", "after"])
def test_models_are_converted_when_a_backend_is_named(
    imported: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    if imported == "before":
        trainer.imported()
    for _ in range(2):  # the second time changes nothing
        convert_built(trainer.name, "build")
    convert_built(trainer.name, "build_pair")
    module = trainer.imported()
    assert module.build() == ["chunk"]
    assert trainer.converted == []
    trainer.set(BACKEND="hybridep", GRAPH_SAFE="false")
    with caplog.at_level(logging.INFO, logger="moe_dispatch"):
        assert module.build(1, two=2) == ["chunk"]
    assert trainer.converted == [(["chunk"], {"backend": "hybridep", "graph_safe": False})]
    assert f"converted the models of {trainer.name}.build: {{'backend': 'hybridep'" in caplog.text
    assert module.build_pair() == (["chunk"], "config")
    assert [model for model, _ in trainer.converted] == [["chunk"]] * 2


def test_a_module_that_fails_at_first_is_wrapped_when_it_is_imported(trainer: Trainer) -> None:
    convert_built(trainer.name, "build")
    trainer.set(BACKEND="alltoall")
    trainer.source.write_text("raise ImportError\n")
    with pytest.raises(ImportError):
        trainer.imported()
    trainer.source.write_text(BUILD)
    importlib.invalidate_caches()
    trainer.imported().build()
    assert len(trainer.converted) == 1


def test_a_trainer_without_the_function(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    convert_built(trainer.name, "assemble")
    trainer.imported()
    assert f"{trainer.name} has no function assemble. Use a tested version" in caplog.text
    del sys.modules[trainer.name]
    trainer.set(BACKEND="alltoall")
    with pytest.raises(IntegrationError, match=r"has no function assemble. Use a tested version"):
        trainer.imported()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"BACKENDS": "alltoall"}, "Did you mean MOE_DISPATCH_BACKEND"),
        ({"BACKEND": "altoall"}, r"Unknown backend 'altoall'\. .*Did you mean 'alltoall'"),
    ],
)
def test_what_is_misspelled_is_reported_before_the_build(
    variables: dict[str, str], told: str, trainer: Trainer
) -> None:
    trainer.source.write_text("def build():\n    raise AssertionError('the models were built')\n")
    convert_built(trainer.name, "build")
    trainer.set(**variables)
    with pytest.raises(ConfigError, match=told):
        trainer.imported().build()


def test_verl_takes_the_backend_from_its_config(trainer: Trainer) -> None:
    trainer.set(BACKEND="allgather")
    assert verl.settings(override_model_config={"moe_config": {}}) == {"backend": "allgather"}
    assert verl.settings(override_model_config=None) == {"backend": "allgather"}
    options = MappingProxyType({"name": "deepep", "num_sms": 24})  # as a DictConfig, no dict
    given = MappingProxyType({"backend": options, "debug": True})
    found = verl.settings(1, two=2, override_model_config={"moe_dispatch": given})
    assert found == {"backend": {"name": "deepep", "num_sms": 24}, "debug": True}
    assert type(found["backend"]) is dict
    for wrong in ("alltoall", {"debug": True}):
        with pytest.raises(ConfigError, match=r"moe_dispatch must be a mapping with a backend"):
            verl.settings(override_model_config={"moe_dispatch": wrong})


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("level", [None, "WARN"])
def test_verl_shows_what_was_converted(level: str | None, trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """verl leaves the root logger at WARNING, and then loads its plug-ins."""
    put(trainer.source.parent, {"verl/utils/megatron_utils.py": "def make_megatron_module():\n    return []\n"})
    if level:
        trainer.environment.setenv("VERL_LOGGING_LEVEL", level)
    with caplog.at_level(logging.NOTSET, logger="moe_dispatch"):
        importlib.reload(verl)
        trainer.set(BACKEND="local")
        importlib.import_module("verl.utils.megatron_utils").make_megatron_module()
    assert trainer.converted[0] == ([], {"backend": "local"})  # loaded twice, the plug-in wraps the function twice
    told = "moe_dispatch: converted the models of verl.utils.megatron_utils.make_megatron_module"
    assert (told in caplog.text) == (level is None)


def test_verl_keeps_the_lengths_that_it_packs(trainer: Trainer) -> None:
    importlib.reload(verl)
    name, pack = "verl.models.mcore.util", "def preprocess_thd_engine(input_ids, params):\n    return 'rows', params\n"
    put(trainer.source.parent, {"verl/models/mcore/util.py": ""})
    importlib.import_module(name)  # another version, without the function
    del sys.modules[name]
    put(trainer.source.parent, {"verl/models/mcore/util.py": pack})
    importlib.invalidate_caches()
    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4, 8], dtype=torch.int32))
    nested = SimpleNamespace(offsets=lambda: torch.tensor([0, 3, 5]))
    packing: Any = importlib.import_module(name)
    assert packing.preprocess_thd_engine(nested, params=params) == ("rows", params)
    assert params.moe_dispatch_cu_seqlens.tolist() == [0, 3, 5]
    assert params.moe_dispatch_cu_seqlens.dtype == torch.int32


def test_the_entry_point_for_verl_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["verl.plugins"].values()
    assert module == verl.__name__


@pytest.mark.usefixtures("trainer")
def test_slime_needs_a_backend() -> None:
    with pytest.raises(ConfigError, match=r"MOE_DISPATCH_BACKEND is not set, so no backend is named. Set it with"):
        slime.init(Namespace())


def test_areal_runs_its_server_without_a_framework_and_converts_the_workers_that_it_forks(tmp_path: Path) -> None:
    """The scheduler gives a forked worker the name of AReaL's server, and the guard in the first worker starts it.

    The server here is a stand-in that looks at what has been imported before it.
    """
    guard = "def run_with_streaming_logs(cmd, log, *, env):\n    print(cmd, log, env)\n\n"
    guard += "def fork(cmd):\n    run_with_streaming_logs(cmd, 'log', env={})\n"
    server = (
        "import sys\n"
        "import moe_dispatch.integrations.ms_swift, moe_dispatch.integrations.slime, moe_dispatch.integrations.verl\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(__name__, sys.argv[1:], loaded & {'megatron', 'swift', 'slime', 'verl', 'transformers'})\n"
        "from areal.infra.rpc.guard import app\n"
        "app.fork(['python', '-m', 'areal.infra.rpc.rpc_server', '--role', 'ref'])\n"
        "app.fork(['python', '-m', 'areal.experimental.proxy'])\n"
    )
    put(tmp_path, {"areal/infra/rpc/guard/app.py": guard, "areal/infra/rpc/rpc_server.py": server})
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "moe_dispatch.integrations.areal", "--port", "1"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).splitlines() == [
        "__main__ ['--port', '1'] set()",
        "['python', '-m', 'moe_dispatch.integrations.areal', '--role', 'ref'] log {}",
        "['python', '-m', 'areal.experimental.proxy'] log {}",
    ]
