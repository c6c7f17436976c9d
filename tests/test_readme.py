"""README.md and the quickstart are true: their commands print what the pages show, and every backend is listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_dispatch import DispatcherConfig
from moe_dispatch.backends import known_backends, load_backend
from tests.pages import ROOT, blocks, commands, run_command

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
RUNS = commands("quickstart.md")


def test_example_is_the_script() -> None:
    script = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert blocks("README.md", "python") == [script.partition('"""\n\n')[2]]


@pytest.mark.slow
def test_example_prints_what_the_readme_shows() -> None:
    (command,) = (block.strip() for block in blocks("README.md", "sh") if block.startswith("torchrun"))
    ran = run_command(command)
    assert sorted(ran.stdout.splitlines()) == blocks("README.md", "text")[-1].splitlines(), ran.stderr


def test_every_backend_of_the_package_is_listed() -> None:
    built_in = [name for name in known_backends() if load_backend(name).__module__.startswith("moe_dispatch.backends.")]
    table = README.partition("\n## Backends\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == built_in


def test_commands_of_the_quickstart_have_their_output() -> None:
    """All but the installation."""
    assert len(RUNS) == 4
    assert QUICKSTART.count("```sh\n") == len(RUNS) + 1


def test_layer_of_the_quickstart_takes_a_mesh() -> None:
    (code,) = re.findall(r'^```python title="moe.py"\n(.*?)^```$', QUICKSTART, re.MULTILINE | re.DOTALL)
    defined: dict[str, Any] = {"__name__": "moe"}
    exec(code, defined)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = DispatcherConfig(backend="alltoall", num_experts=8, top_k=2, hidden_size=32)
        assert defined["MoE"](config, init_device_mesh("cpu", (1,))).layer(torch.ones(1, 5, 32)).shape == (1, 5, 32)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), RUNS, ids=[command for command, _ in RUNS])
def test_commands_of_the_quickstart_print_what_it_shows(command: str, shown: str, tmp_path: Path) -> None:
    for name, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', QUICKSTART, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ran = run_command(command, tmp_path)
    printed = sorted(ran.stdout.splitlines()) or ran.stderr.splitlines()[-1:]
    assert printed == shown.splitlines(), ran.stderr
