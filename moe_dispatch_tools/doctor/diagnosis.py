"""Find out which backends and permutations work on this machine. The findings are plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args, get_origin

import torch

from moe_dispatch.backends import BackendOptions, Constraints, MoEShape, known_backends, load_backend
from moe_dispatch.backends.base import listed_sizes
from moe_dispatch.backends.registry import probe_backend
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.requirements import check_group, shape_of
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.permutation import known_permutations, probe_permutation
from moe_dispatch.probing import Rejected, Usable
from moe_dispatch_tools.doctor.self_tests import Job, SelfTest, Topology, run_jobs
from moe_dispatch_tools.machine import Machine, this_machine
from moe_dispatch_tools.ranks import num_ranks

DEVICES = ("cpu", "cuda")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The options of the command line.

    Attributes:
        backend: Name of the backend to test; None for all backends and permutations.
        emulated: Whether emulations of missing libraries are also tested.
        ranks: Number of processes to start for self-tests. Under torchrun, torchrun's number of ranks is used.
        ep_size: Number of ranks for which constraints are shown; None for the number of tested ranks.
        ranks_per_node: Ranks per node for which constraints are shown; None for the detected number.
        num_experts: Number of experts of the model, E.
        top_k: Experts per token, K.
        hidden_size: Hidden size of the model, D.
    """

    backend: str | None = None
    emulated: bool = False
    ranks: int = 2
    ep_size: int | None = None
    ranks_per_node: int | None = None
    num_experts: int = 64
    top_k: int = 8
    hidden_size: int = 4096

    def config(self, **changes: Any) -> DispatcherConfig:
        """Make the config of the model."""
        return DispatcherConfig(num_experts=self.num_experts, top_k=self.top_k, hidden_size=self.hidden_size, **changes)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BackendFinding:
    """The finding about a backend, or about the emulation of a release of its library.

    Attributes:
        name: Name of the backend.
        emulates: Emulated release; None for the real library.
        package: Package of the backend; None if it cannot be imported.
        usable: Whether the backend can be used on this machine.
        reason: Why the backend is not usable; None if it is.
        version: Version of the backend's library; None if the backend is not usable.
        features: Features of that version.
        ep_size: Number of ranks for which ``constraints`` and ``refused`` hold.
        constraints: Constraints that restrict something, in types of JSON; empty if the backend is not usable.
        refused: Why the backend refuses the model on ``ep_size`` ranks; None if it does not.
        emulations: Releases whose emulations can be tested instead.
        self_test: Result of the self-test; None if there was none.
    """

    name: str
    emulates: str | None
    package: str | None
    usable: bool
    reason: str | None
    version: str | None
    features: tuple[str, ...]
    ep_size: int
    constraints: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    emulations: tuple[str, ...] = ()
    self_test: SelfTest | None = None

    @property
    def works(self) -> bool:
        """Whether the backend is usable, accepts the model, and passed its self-test."""
        return self.usable and self.refused is None and self.self_test is not None and self.self_test.passed is True


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PermutationFinding:
    """The finding about a permutation on one type of device."""

    name: str
    device: str
    usable: bool
    reason: str | None
    version: str | None
    features: tuple[str, ...]
    self_test: SelfTest | None = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All findings."""

    machine: Machine
    topology: Topology
    model: dict[str, int]
    backends: tuple[BackendFinding, ...]
    permutations: tuple[PermutationFinding, ...]

    @property
    def self_tests_pass(self) -> bool:
        """Whether no self-test failed."""
        findings: tuple[BackendFinding | PermutationFinding, ...] = (*self.backends, *self.permutations)
        return not any(found.self_test is not None and found.self_test.passed is False for found in findings)


def diagnose(request: Request, on_done: Callable[[int, int], None]) -> Diagnosis:
    """Probe and test backends, and read their constraints. Starts processes. Under torchrun the call is collective.

    Args:
        request: Options of the command line.
        on_done: Function that gets the number of finished self-tests and the number of all self-tests.

    Raises:
        ConfigError: The backend does not exist, or the sizes of the model are wrong.
    """
    request.config()
    request = dataclasses.replace(request, ranks=num_ranks(request.ranks))
    if request.backend is not None and request.backend not in known_backends():
        load_backend(request.backend)
    names = known_backends() if request.backend is None else [request.backend]
    wanted = [(name, release) for name in names for release in (None, *(_emulations(name) if request.emulated else ()))]
    permutations = [_permutation(*which) for which in _permutations()] if request.backend is None else []
    jobs = _jobs(request, wanted, permutations)
    results, topology = run_jobs(jobs, request.ranks, on_done)
    return Diagnosis(
        machine=this_machine(),
        topology=topology,
        model={"num_experts": request.num_experts, "top_k": request.top_k, "hidden_size": request.hidden_size},
        backends=tuple(
            _finding(request, topology, name, release, results.get(_key(name, release))) for name, release in wanted
        ),
        permutations=tuple(
            dataclasses.replace(found, self_test=results.get(_key(found.name, found.device))) for found in permutations
        ),
    )


def _key(name: str, variant: str | None) -> str:
    return name if variant is None else f"{name} {variant}"


def _permutations() -> list[tuple[str, str]]:
    return [(name, device) for name in known_permutations() for device in DEVICES]


def _permutation(name: str, device: str) -> PermutationFinding:
    present = device == "cpu" or torch.cuda.is_available()
    verdict = probe_permutation(name, device) if present else Rejected("torch sees no CUDA device")
    return PermutationFinding(name=name, device=device, **_described(verdict))


def _described(verdict: Usable | Rejected) -> dict[str, Any]:
    if isinstance(verdict, Rejected):
        return {"usable": False, "reason": verdict.reason, "version": None, "features": ()}
    return {"usable": True, "reason": None, "version": verdict.version, "features": verdict.features}


def _jobs(
    request: Request, wanted: list[tuple[str, str | None]], permutations: list[PermutationFinding]
) -> dict[str, Job]:
    jobs = {}
    for name, release in wanted:
        if isinstance(_probe(name, release), Usable):
            jobs[_key(name, release)] = Job(
                config=request.config(backend=_spec(name, release)),
                alone=_is_for_one_rank(name, release, request),
                on_cpu=release is not None,
            )
    for found in permutations:
        if found.usable:
            config = request.config(backend="local", permutation=found.name, device=found.device)
            jobs[_key(found.name, found.device)] = Job(config=config, alone=True, on_cpu=found.device == "cpu")
    return jobs


def _is_for_one_rank(name: str, release: str | None, request: Request) -> bool:
    """Return whether the backend accepts a group of one rank, but not a group of ``request.ranks``."""
    try:
        sizes = _needs(name, release, shape_of(request.config(), 1)).group_sizes
    except Exception:  # a third-party backend may raise any error; its self-test will show it
        return False
    return sizes is not None and 1 in sizes and request.ranks not in sizes


def _finding(
    request: Request, topology: Topology, name: str, release: str | None, self_test: SelfTest | None
) -> BackendFinding:
    verdict = _probe(name, release)
    ep_size = request.ep_size or (topology.ranks if self_test is None else self_test.ranks)
    needs, refused = None, None
    if isinstance(verdict, Usable):
        nodes = topology.ranks_per_node if ep_size == topology.ranks else None
        needs, refused = _refusal(request, name, release, ep_size, request.ranks_per_node or nodes)
    return BackendFinding(
        name=name,
        emulates=release,
        package=_package(name),
        **_described(verdict),
        ep_size=ep_size,
        constraints={} if needs is None else _restrictions(needs),
        refused=refused,
        emulations=_emulations(name) if isinstance(verdict, Rejected) else (),
        self_test=self_test,
    )


def _refusal(
    request: Request, name: str, release: str | None, ep_size: int, nodes: int | None
) -> tuple[Constraints | None, str | None]:
    """Return the constraints for the model on ``ep_size`` ranks, and why the backend refuses the model."""
    needs = None
    try:
        shape = shape_of(request.config(), ep_size, nodes)
        needs = _needs(name, release, shape)
        check_group(request.config(), name, shape, needs)
    except MoEDispatchError as error:
        return needs, str(error)
    except Exception as error:  # a third-party backend may raise any error
        return needs, f"constraints() raised {type(error).__name__}: {error}"
    return needs, None


def _restrictions(needs: Constraints) -> dict[str, Any]:
    """Return the fields that differ from the defaults, which stand for no needs and no features."""
    anything = Constraints()
    found = {item.name: getattr(needs, item.name) for item in dataclasses.fields(needs)}
    return {
        name: _plain(value)
        for name, value in found.items()
        if value != getattr(anything, name) and name not in ("graph_safe_reason", "group_sizes_hint")
    }


def _plain(value: Any) -> Any:
    if not isinstance(value, frozenset):
        return value
    if all(isinstance(item, int) for item in value):
        return listed_sizes(value)
    return sorted(str(item).removeprefix("torch.") for item in value)


def _probe(name: str, release: str | None) -> Usable | Rejected:
    if release is None:
        return probe_backend(name)
    return _options(name, release).probe()


def _needs(name: str, release: str | None, shape: MoEShape) -> Constraints:
    return _options(name, release).constraints(shape)


def _options(name: str, release: str | None) -> BackendOptions:
    return load_backend(name).model_validate({} if release is None else {"emulate": release})


def _spec(name: str, release: str | None) -> str | dict[str, Any]:
    return name if release is None else {"name": name, "emulate": release}


def _package(name: str) -> str | None:
    try:
        return load_backend(name).__module__.partition(".")[0]
    except MoEDispatchError:
        return None


def _emulations(name: str) -> tuple[str, ...]:
    """Return the releases that the backend's option ``emulate`` accepts; empty without that option."""
    try:
        option = load_backend(name).model_fields.get("emulate")
    except MoEDispatchError:
        return ()
    choices = get_args(option.annotation) if option is not None else ()
    return tuple(value for choice in choices if get_origin(choice) is Literal for value in get_args(choice))
