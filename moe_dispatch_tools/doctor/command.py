"""Run ``doctor``: find out which backends and permutations work on this machine, and print it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal, get_args, get_origin

import torch
from torch.utils.collect_env import get_pretty_env_info

from moe_dispatch.backends import BackendOptions, Constraints, known_backends, load_backend
from moe_dispatch.backends.base import listed_sizes
from moe_dispatch.backends.capacity import GraphSafeSupport
from moe_dispatch.backends.registry import probe_backend
from moe_dispatch.backends.wire import WireSupport
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import shape_of
from moe_dispatch.errors import ConfigError, MoEDispatchError
from moe_dispatch.permutation import known_permutations, probe_permutation
from moe_dispatch.seams.plug_ins import Rejected, Usable
from moe_dispatch_tools import console
from moe_dispatch_tools.doctor.self_tests import Testee, run_self_tests
from moe_dispatch_tools.machine import this_machine
from moe_dispatch_tools.ranks import num_ranks, this_rank

Finding = dict[str, Any]
# What a user acts on, of the constraints that differ from the defaults.
_PHRASES = {
    "row_multiple": "pads the rows of a rank to a multiple of {}",
    "equal_rows": "pads all ranks to the same number of rows",
    "min_rows": "needs at least {} rows of every rank",
    "max_rows": "takes at most {} rows of a rank",
    "hidden_multiple": "needs a hidden size that is a multiple of {}",
    "max_hidden": "takes a hidden size of at most {}",
    "dtypes": "takes rows in {}",
    "devices": "runs on {}",
    "max_top_k": "takes a top_k of at most {}",
    "group_sizes": "runs on groups of these sizes: {}",
    "local_experts_multiple": "needs a multiple of {} experts on a rank",
    "max_local_experts": "takes at most {} experts of a rank",
    "wire": "supports wire {}",
    "graph_safe": "supports graph-safe mode",
    "compilable": "supports torch.compile",
    "differentiable": "computes no gradients",
}


def run(
    config: DispatcherConfig, *, backend: str | None, emulated: bool, ranks: int, environment: bool, as_json: bool
) -> int:
    """Run the self-tests and print the findings.

    Args:
        config: Config with the sizes of the model.
        backend: Name of the backend to test; None for all backends and permutations.
        emulated: Whether emulations of missing libraries are also tested.
        ranks: Number of processes to start for self-tests. Under torchrun, torchrun's number of ranks is used.
        environment: Whether to add what ``torch.utils.collect_env`` finds.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 0 if the named backend works or, without a name, if no self-test fails. Otherwise 1.

    Raises:
        ConfigError: The backend does not exist, or has options.
    """
    if backend and "+" in backend:
        raise ConfigError(
            f"--backend of doctor must be a name without options, got {backend!r}. Write --backend "
            f"{backend.partition('+')[0]}, or run moe-dispatch check {backend}."
        )
    ranks, names = num_ranks(ranks), [backend] if backend else known_backends()
    for name in names:
        if name not in known_backends():
            load_backend(name)  # raises an error with a hint
    testees: dict[str, Testee] = {}
    machine, watched = this_machine(), this_rank() == 0 and not as_json and sys.stdout.isatty()
    if watched:  # who waits for the self-tests sees this at once
        _show_machine(machine)
    found: Finding = {
        "machine": machine,
        "model": {field: getattr(config, field) for field in ("num_experts", "top_k", "hidden_size")},
        "backends": [
            _backend(config, name, release, ranks, testees)
            for name in names
            for release in (None, *(_emulations(name) if emulated else ()))
        ],
        "permutations": [
            _permutation(config, name, device, testees)
            for name in known_permutations()
            for device in ("cpu", "cuda")
            if backend is None
        ],
    }
    with console.progress("self-tests", visible=this_rank() == 0) as show_progress:
        results, found["topology"] = run_self_tests(testees, ranks, show_progress)
    if this_rank() != 0:  # only rank 0 has the results
        return 0
    if environment:
        found["environment"] = get_pretty_env_info()
    everything = (*found["backends"], *found["permutations"])
    for one in everything:
        one["self_test"] = results.get(one["label"])
    if as_json:
        console.document(found)
    else:
        if not watched:
            _show_machine(machine)
        _show(found)
        if environment:
            console.line()
            console.line(found["environment"])
    passed = [one["self_test"] and one["self_test"]["passed"] for one in everything]
    return int(False in passed if backend is None else not passed[0])


def _backend(
    config: DispatcherConfig, name: str, release: str | None, ranks: int, testees: dict[str, Testee]
) -> Finding:
    """Probe a backend, or its emulation of a release, and add it to the testees if it is usable.

    Returns:
        The ``reason`` why it is not usable, its ``constraints`` on ``ep_size`` ranks that differ from the defaults, and
        the ``emulations`` that can be tested instead.
    """
    label = name if release is None else f"{name}, emulated {release}"
    verdict = probe_backend(name) if release is None else _options(name, release).probe()
    found = {"label": label, "name": name, "emulates": release, **_described(verdict)}
    if isinstance(verdict, Rejected):
        return found | {"ep_size": ranks, "constraints": {}, "emulations": _emulations(name)}
    alone, constraints = False, {}
    try:
        sizes = _options(name, release).constraints(shape_of(config, 1)).group_sizes
        alone = sizes is not None and 1 in sizes and ranks not in sizes
        constraints = _restrictions(_options(name, release).constraints(shape_of(config, 1 if alone else ranks)))
    except Exception:
        pass
    spec = name if release is None else {"name": name, "emulate": release}
    testees[label] = Testee(config=config.replace(backend=spec), alone=alone, on_cpu=release is not None)
    return found | {"ep_size": 1 if alone else ranks, "constraints": constraints, "emulations": ()}


def _permutation(config: DispatcherConfig, name: str, device: str, testees: dict[str, Testee]) -> Finding:
    """Probe a permutation, and add it to the testees if it is usable."""
    label, verdict = f"{name} on {device}", Rejected("torch sees no CUDA device")
    if device == "cpu" or torch.cuda.is_available():
        verdict = probe_permutation(name, device)  # type: ignore[assignment]
    if isinstance(verdict, Usable):
        local = config.replace(backend="local", permutation=name, device=device)
        testees[label] = Testee(config=local, alone=True, on_cpu=device == "cpu")
    return {"label": label, "name": name, "device": device, **_described(verdict)}


def _described(verdict: Usable | Rejected) -> Finding:
    if isinstance(verdict, Rejected):
        return {"usable": False, "reason": verdict.reason, "version": None, "features": ()}
    return {"usable": True, "reason": None, "version": verdict.version, "features": verdict.features}


def _options(name: str, release: str | None) -> BackendOptions:
    return load_backend(name).model_validate({} if release is None else {"emulate": release})


def _restrictions(needs: Constraints) -> Finding:
    """Return the fields that differ from the defaults, which stand for no needs and no features, in types of JSON."""
    anything, found = Constraints(), {}
    for field in dataclasses.fields(needs):
        value = getattr(needs, field.name)
        if value == getattr(anything, field.name) or field.name in ("graph_safe_reason", "group_sizes_hint"):
            continue
        if isinstance(value, WireSupport):
            value = value.dtypes
        if isinstance(value, GraphSafeSupport):
            value = True
        if isinstance(value, frozenset):
            numbers = all(isinstance(item, int) for item in value)
            names = sorted(str(item).removeprefix("torch.") for item in value)
            value = listed_sizes(value) if numbers else ", ".join(names)
        found[field.name] = value
    return found


def _emulations(name: str) -> tuple[str, ...]:
    """Return the releases that the backend's option ``emulate`` accepts; empty without that option."""
    try:
        option = load_backend(name).model_fields.get("emulate")
    except MoEDispatchError:
        return ()
    choices = get_args(option.annotation) if option is not None else ()
    return tuple(value for choice in choices if get_origin(choice) is Literal for value in get_args(choice))


def _show_machine(machine: Finding) -> None:
    console.line(f"moe-dispatch {machine['moe_dispatch']}, Python {machine['python']}, torch {machine['torch']}")
    found_here = {name: machine[name.lower()] for name in ("CUDA", "NCCL")}
    versions = [f"{name} {version}" if version else f"no {name}" for name, version in found_here.items()]
    console.line(f"torch has {', '.join(versions)}, {'gloo' if machine['gloo'] else 'no gloo'}")
    toolkit = machine["cuda_toolkit"]
    if machine["cuda"]:
        missing = [file for file in ("bin/nvcc", "lib64/libcudart*") if not toolkit[file]]
        home = f"CUDA_HOME: {toolkit['home'] or 'not set'}"
        console.line(f"{home}, without {' and '.join(missing)}, which HybridEP needs" if missing else home)
    console.line(f"CPU: {machine['cpu_cores']} cores")
    for gpu in machine["gpus"] or ("none",):
        console.line(f"GPU: {gpu}")


def _show(found: Finding) -> None:
    topology, model = found["topology"], found["model"]
    started = "started by torchrun" if topology["launcher"] == "torchrun" else "started here"
    console.line(
        f"ranks: {topology['ranks']} {started}, over {topology['transport']}; {topology['ranks_per_node']} per node, "
        f"{topology['nodes']} node{'s' * (topology['nodes'] > 1)}"
    )
    console.line()
    sizes = f"{model['num_experts']} experts, top-{model['top_k']}, hidden size {model['hidden_size']}"
    console.line(f"backends, for {sizes}")
    for one in found["backends"]:
        _show_finding(one)
        told = [_PHRASES[name].format(value) for name, value in one["constraints"].items() if name in _PHRASES]
        if told:
            console.line(f"on {_ranks(one['ep_size'])}: {'; '.join(told)}", indent=11)
        if one["emulations"]:
            console.line(f"can be emulated (--emulated): {', '.join(one['emulations'])}", indent=11)
    if found["permutations"]:
        console.line()
        console.line("permutations")
    for one in found["permutations"]:
        _show_finding(one)


def _show_finding(found: Finding) -> None:
    test, mark = found["self_test"], "-"
    told = f"not usable: {found['reason']}"
    if found["usable"]:
        told = ", ".join([f"version {found['version']}", *found["features"]])
    if test is not None:
        mark = {None: "-", True: "ok", False: "failed"}[test["passed"]]
        outcome = {None: "not possible", True: "passed", False: "FAILED"}[test["passed"]]
        told += f"; self-test {outcome} on {_ranks(test['ranks'])}, {test['device']}"
    console.line(f"{found['label']}: {told}", mark=mark, indent=2)
    if test is not None and test["error"] is not None:
        console.line(test["error"], indent=11)


def _ranks(number: int) -> str:
    return f"{number} ranks" if number > 1 else "one rank"
