"""Prove the training set-up of a file, and print what differs."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

from moe_dispatch_testing.prove import load_setup, prove
from moe_dispatch_tools import console


def run(file: Path, *, dtype: str, seconds: int, as_json: bool) -> int:
    """Prove the set-up and print what differs. The exit status is 0 if nothing does, otherwise 1."""
    mesh = load_setup(file).mesh
    with console.progress(f"prove {file.name}"):
        proof = prove(file, dtype=dtype, timeout=datetime.timedelta(seconds=seconds))
    if as_json:
        console.document({"right": proof.right, "mesh": dict(mesh), **dataclasses.asdict(proof)})
        return 0 if proof.right else 1
    for number, numbers in enumerate(proof.numbers, start=1):
        shown = ", ".join(f"{name} {value:.6g}" for name, value in numbers.items()) or "ran"
        console.line(f"step {number} of one process: {shown}", mark="-")
    for finding in proof.findings:
        console.line(finding, mark="failed")
    where = f"{' x '.join(f'{name} {size}' for name, size in mesh.items())}, {dtype}"
    if proof.right:
        told = f"{console.counted(proof.num_parameters, 'parameter')} and their gradients are those of one process"
    else:
        told = f"{console.counted(len(proof.findings), 'difference')} from one process"
    console.line(f"{file.name}, mesh {where}: {told}", mark="ok" if proof.right else "failed")
    return 0 if proof.right else 1
