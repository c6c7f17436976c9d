"""The files for Slurm and Kubernetes: their parts fit together, and their commands train on two local "nodes"."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "clusters" / "slurm.sh"
KUBERNETES = ROOT / "examples" / "clusters" / "kubernetes.yaml"
# What stands for Slurm: the nodes are this machine, and srun runs its command once for each node, at the same time.
STAND_INS = {
    "scontrol": '[ "$*" = "show hostnames nodes-a-b" ] && printf "127.0.0.1\\nnode-b\\n"',
    "srun": """
        [ "$1" = --kill-on-bad-exit=1 ] || exit 2
        shift
        for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & done
        wait -n && wait -n""",
}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def environment(folder: Path, **more: str) -> dict[str, str]:
    """A folder like the checkout, with programs of its own in ``bin``."""
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = {**STAND_INS, "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"'}
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", **more}


def start(command: list[str], folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def expect_training(nodes: list[subprocess.Popen[str]]) -> None:
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    told = "\n".join(outputs)
    assert [node.returncode for node in nodes] == [0] * len(nodes), told
    assert told.count("2 ranks over gloo, 2 steps") == 1, told
    assert "alltoall: no expert stays idle" in told, told


def test_slurm_starts_one_torchrun_per_node() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM.read_text(encoding="utf-8"), re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "8")
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0


@pytest.mark.slow
def test_the_script_for_slurm_trains_on_two_nodes(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "nodes-a-b", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    variables = environment(tmp_path, **slurm, MASTER_PORT=free_port())
    expect_training([start(["bash", str(SLURM), "--steps", "2"], tmp_path, variables)])


def documents() -> tuple[Any, Any]:
    service, job = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    return service, job


def options(command: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+) (\S+)", command))


def test_names_and_numbers_of_the_job_fit_together() -> None:
    service, job = documents()
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = options(container["args"][0])
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert command["master-addr"] == f"{name}-0.{pod['subdomain']}"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(command["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(command["nproc-per-node"])
    assert [port["containerPort"] for port in container["ports"]] == [int(command["master-port"])]
    mounted = {volume["name"] for volume in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.slow
def test_the_command_of_the_job_trains_on_two_nodes(tmp_path: Path) -> None:
    _, job = documents()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (command,) = container["args"]
    given = options(command)
    here = {"master-addr": "127.0.0.1", "master-port": free_port(), "nproc-per-node": "1", "steps": "2"}
    for option, value in here.items():
        command = command.replace(f"--{option} {given[option]}", f"--{option} {value}")
    variables = environment(tmp_path, **{entry["name"]: entry["value"] for entry in container["env"]})
    expect_training(
        [
            start([*container["command"], command], tmp_path, {**variables, "JOB_COMPLETION_INDEX": str(node)})
            for node in range(job["spec"]["completions"])
        ]
    )
