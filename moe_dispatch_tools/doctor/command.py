"""Run ``doctor`` and print its findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_dispatch_tools import console
from moe_dispatch_tools.doctor.diagnosis import BackendFinding, Diagnosis, PermutationFinding, Request, diagnose
from moe_dispatch_tools.doctor.self_tests import SelfTest, Topology
from moe_dispatch_tools.machine import Machine
from moe_dispatch_tools.ranks import this_rank


def run(request: Request, *, as_json: bool) -> int:
    """Run the self-tests and print the findings.

    Returns:
        The exit status: 0 if the named backend works or, without a name, if no self-test fails. Otherwise 1.
    """
    first = this_rank() == 0
    with console.progress("self-tests", visible=first) as show:
        diagnosis = diagnose(request, show)
    if not first:  # only rank 0 has the results
        return 0
    if as_json:
        console.document(dataclasses.asdict(diagnosis))
    else:
        _show(diagnosis)
    answer = diagnosis.self_tests_pass if request.backend is None else diagnosis.backends[0].works
    return 0 if answer else 1


def _show(diagnosis: Diagnosis) -> None:
    _show_machine(diagnosis.machine, diagnosis.topology)
    model = diagnosis.model
    console.line()
    console.line(
        f"backends, for {model['num_experts']} experts, top-{model['top_k']}, hidden size {model['hidden_size']}"
    )
    for backend in diagnosis.backends:
        _show_backend(backend)
    if diagnosis.permutations:
        console.line()
        console.line("permutations")
    for permutation in diagnosis.permutations:
        _show_finding(permutation, f"{permutation.name} on {permutation.device}")


def _show_machine(machine: Machine, topology: Topology) -> None:
    console.line(f"moe-dispatch {machine.moe_dispatch}, Python {machine.python}, torch {machine.torch}")
    gloo = "gloo" if machine.gloo else "no gloo"
    console.line(f"torch has {_or_no('CUDA', machine.cuda)}, {_or_no('NCCL', machine.nccl)}, {gloo}")
    console.line(f"CPU: {machine.cpu_cores} cores")
    for gpu in machine.gpus or ("none",):
        console.line(f"GPU: {gpu}")
    started = "started by torchrun" if topology.launcher == "torchrun" else "started here"
    console.line(
        f"ranks: {topology.ranks} {started}, over {topology.transport}; {topology.ranks_per_node} per node, "
        f"{topology.nodes} {'node' if topology.nodes == 1 else 'nodes'}"
    )


def _or_no(name: str, version: str | None) -> str:
    return f"no {name}" if version is None else f"{name} {version}"


def _show_backend(found: BackendFinding) -> None:
    _show_finding(found, found.name if found.emulates is None else f"{found.name}, emulated {found.emulates}")
    if found.constraints:
        console.line(f"on {_ranks(found.ep_size)}: {_listed(found.constraints)}", indent=11)
    if found.refused is not None:
        console.line(f"refused: {found.refused}", indent=11)
    if found.emulations:
        console.line(f"can be emulated (--emulated): {', '.join(found.emulations)}", indent=11)


def _show_finding(found: BackendFinding | PermutationFinding, name: str) -> None:
    console.line(f"{name}: {_verdict(found)}", mark=_mark(found), indent=2)
    if found.self_test is not None and found.self_test.passed is False:
        console.line(found.self_test.error or "", indent=11)


def _mark(found: BackendFinding | PermutationFinding) -> str:
    if not found.usable or found.self_test is None or found.self_test.passed is None:
        return "-"
    return "ok" if found.self_test.passed else "failed"


def _verdict(found: BackendFinding | PermutationFinding) -> str:
    if not found.usable:
        return f"not usable: {found.reason}"
    version = ", ".join([f"version {found.version}", *found.features])
    return version if found.self_test is None else f"{version}; {_outcome(found.self_test)}"


def _outcome(test: SelfTest) -> str:
    where = f"on {_ranks(test.ranks)}, {test.device}"
    if test.passed is None:
        return f"self-test not possible {where}: {test.error}"
    return f"self-test {'passed' if test.passed else 'FAILED'} {where}"


def _ranks(number: int) -> str:
    return f"{number} ranks" if number > 1 else "one rank"


def _listed(constraints: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {_value(value)}".rstrip() for name, value in constraints.items())


def _value(value: Any) -> str:
    if value is True:
        return ""
    if value is False:
        return "no"
    return ", ".join(value) if isinstance(value, list) else str(value)
