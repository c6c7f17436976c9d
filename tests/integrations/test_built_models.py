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
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations import slime, verl
from moe_dispatch.integrations.built_models import convert_built

TRAINER = "def build(*args, **kwargs):\n    return ['chunk']\n\ndef build_pair():\n    return ['chunk'], 'config'\n"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What is given to ``convert``, which is a stand-in here."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    stand_in = types.ModuleType("moe_dispatch.integrations.megatron")
    stand_in.convert = lambda model, **given: calls.append((model, given))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delenv("MOE_DISPATCH_BACKEND", raising=False)
    return calls


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a module that is not imported yet."""
    finders, name = list(sys.meta_path), f"trainer_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.meta_path[:] = finders
    sys.modules.pop(name, None)


@pytest.mark.parametrize("imported", ["before", "after"])
def test_models_are_converted_when_a_backend_is_named(
    imported: str, trainer: str, converted: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if imported == "before":
        importlib.import_module(trainer)
    convert_built(trainer, "build", "build_pair")
    convert_built(trainer, "build", "build_pair")  # a second time changes nothing
    module = importlib.import_module(trainer)
    assert module.build() == ["chunk"]
    assert converted == []
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "hybridep")
    monkeypatch.setenv("MOE_DISPATCH_GRAPH_SAFE", "false")
    with caplog.at_level(logging.INFO, logger="moe_dispatch"):
        assert module.build(1, two=2) == ["chunk"]
    assert converted == [(["chunk"], {"backend": "hybridep", "graph_safe": False})]
    assert f"converted the models of {trainer}.build: {{'backend': 'hybridep'" in caplog.text
    assert module.build_pair() == (["chunk"], "config")
    assert converted[1][0] == ["chunk"]


def test_two_may_wait_for_one_module(trainer: str, converted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    convert_built(trainer, "build")
    convert_built(trainer, "build_pair")
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "alltoall")
    module = importlib.import_module(trainer)
    module.build()
    module.build_pair()
    assert len(converted) == 2


def test_a_module_that_fails_at_first_is_wrapped_when_it_is_imported(
    trainer: str, converted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_built(trainer, "build")
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "alltoall")
    monkeypatch.setitem(sys.modules, "absent", None)
    source = Path(str(importlib.util.find_spec(trainer).origin))  # type: ignore[union-attr]
    source.write_text("import absent\n" + TRAINER)
    with pytest.raises(ImportError):
        importlib.import_module(trainer)
    source.write_text(TRAINER)
    importlib.invalidate_caches()
    importlib.import_module(trainer).build()
    assert len(converted) == 1


def test_a_trainer_without_the_function(
    trainer: str, converted: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    convert_built(trainer, "assemble")
    importlib.import_module(trainer)
    assert f"{trainer} has no function assemble. Use a tested version" in caplog.text
    del sys.modules[trainer]
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "alltoall")
    with pytest.raises(IntegrationError, match=r"has no function assemble. Use a tested version"):
        importlib.import_module(trainer)


def test_a_misspelled_variable_is_reported_before_the_build(
    trainer: str, converted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_built(trainer, "build")
    monkeypatch.setenv("MOE_DISPATCH_BACKENDS", "alltoall")
    with pytest.raises(ConfigError, match="Did you mean MOE_DISPATCH_BACKEND"):
        importlib.import_module(trainer).build()


def test_a_misspelled_backend_is_reported_before_the_build(
    trainer: str, converted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []
    module = types.ModuleType(trainer)
    module.build = lambda: builds.append("built")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, trainer, module)
    convert_built(trainer, "build")
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "altoall")
    with pytest.raises(ConfigError, match=r"Unknown backend 'altoall'\. .*Did you mean 'alltoall'"):
        module.build()
    assert builds == []


def test_verl_takes_the_backend_from_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_DISPATCH_BACKEND", "allgather")
    assert verl.settings(override_model_config={"moe_config": {}}) == {"backend": "allgather"}
    assert verl.settings(override_model_config=None) == {"backend": "allgather"}
    options = MappingProxyType({"name": "deepep", "num_sms": 24})  # as a DictConfig, no dict
    given = MappingProxyType({"backend": options, "debug": True})
    found = verl.settings(1, two=2, override_model_config={"moe_dispatch": given})
    assert found == {"backend": {"name": "deepep", "num_sms": 24}, "debug": True}
    assert type(found["backend"]) is dict


@pytest.mark.parametrize("given", ["alltoall", {"debug": True}])
def test_a_config_of_verl_without_a_backend_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"override_mcore_model_config: moe_dispatch must be a mapping with a backend"
    ):
        verl.settings(override_model_config={"moe_dispatch": given})


def test_verl_keeps_the_lengths_that_it_packs() -> None:
    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4, 8], dtype=torch.int32))
    module = types.ModuleType("verl.models.mcore.util")
    verl._keep_lengths(module)  # another version, without the function
    module.preprocess_thd_engine = lambda input_ids, pre_process: ("rows", params)  # type: ignore[attr-defined]
    verl._keep_lengths(module)
    nested = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    assert module.preprocess_thd_engine(nested, pre_process=True) == ("rows", params)
    assert params.moe_dispatch_cu_seqlens.tolist() == [0, 3, 5]
    assert params.moe_dispatch_cu_seqlens.dtype == torch.int32


def test_the_entry_point_for_verl_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["verl.plugins"].values()
    assert module == verl.__name__


def test_slime_needs_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_DISPATCH_BACKEND", raising=False)
    with pytest.raises(ConfigError, match=r"MOE_DISPATCH_BACKEND is not set, so no backend is named. Set it with"):
        slime.init(Namespace())


def run_stand_in(files: dict[str, str], folder: Path, *command: str, **environment: str) -> str:
    """Run Python with a stand-in of a trainer, and return what it printed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_modules_for_trainers_import_no_framework_and_areal_runs_its_server(tmp_path: Path) -> None:
    """The server here is a stand-in that looks at what has been imported before it."""
    server = (
        "import sys\n"
        "import moe_dispatch.integrations.ms_swift, moe_dispatch.integrations.slime, moe_dispatch.integrations.verl\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(__name__, sys.argv[1:], loaded & {'megatron', 'swift', 'slime', 'verl', 'transformers'})\n"
    )
    command = ["-m", "moe_dispatch.integrations.areal", "--port", "1"]
    printed = run_stand_in({"areal/infra/rpc/rpc_server.py": server}, tmp_path, *command)
    assert printed == "__main__ ['--port', '1'] set()\n"


def test_workers_that_areal_forks_are_converted_too(tmp_path: Path) -> None:
    """The scheduler gives a forked worker the name of AReaL's server, and the guard in the first worker starts it."""
    guard = "def run_with_streaming_logs(cmd, log, *, env):\n    print(cmd, log, env)\n\n"
    guard += "def fork(cmd):\n    run_with_streaming_logs(cmd, 'log', env={})\n"
    server = "from areal.infra.rpc.guard import app\n"
    server += "app.fork(['python', '-m', 'areal.infra.rpc.rpc_server', '--role', 'ref'])\n"
    server += "app.fork(['python', '-m', 'areal.experimental.proxy'])\n"
    files = {"areal/infra/rpc/guard/app.py": guard, "areal/infra/rpc/rpc_server.py": server}
    assert run_stand_in(files, tmp_path, "-m", "moe_dispatch.integrations.areal").splitlines() == [
        "['python', '-m', 'moe_dispatch.integrations.areal', '--role', 'ref'] log {}",
        "['python', '-m', 'areal.experimental.proxy'] log {}",
    ]


def test_verl_shows_what_was_converted(tmp_path: Path) -> None:
    """verl sets the level of the root logger to WARNING, and then loads its plug-ins."""
    verl = "import logging\nlogging.basicConfig(level=logging.WARNING)\nimport moe_dispatch.integrations.verl\n"
    program = (
        "import sys, types, verl\n"
        "integration = types.SimpleNamespace(convert=lambda *args, **given: None)\n"
        "sys.modules['moe_dispatch.integrations.megatron'] = integration\n"
        "from verl.utils import megatron_utils\n"
        "megatron_utils.make_megatron_module()\n"
    )
    files = {
        "verl/__init__.py": verl,
        "verl/utils/megatron_utils.py": "def make_megatron_module():\n    return []\n",
        "program.py": program,
    }
    told = "moe_dispatch: converted the models of verl.utils.megatron_utils.make_megatron_module"
    printed = {
        level: run_stand_in(files, tmp_path, str(tmp_path / "program.py"), MOE_DISPATCH_BACKEND="local", **level_of)
        for level, level_of in {"default": {}, "WARN": {"VERL_LOGGING_LEVEL": "WARN"}}.items()
    }
    assert told in printed["default"]
    assert told not in printed["WARN"]
