"""Backends by name: ours, registered ones and entry points of other packages, good and broken."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from moe_dispatch import DispatcherConfig
from moe_dispatch.backends import (
    Backend,
    BackendContext,
    BackendOptions,
    Constraints,
    MoEShape,
    known_backends,
    load_backend,
    parse_backend,
    register_backend,
    registry,
)
from moe_dispatch.errors import BackendUnavailableError, ConfigError

BUILT_IN = ["allgather", "alltoall", "local"]


class Ours(BackendOptions):
    name = "ours"

    speed: int = 1

    def constraints(self, shape: MoEShape) -> Constraints:
        return Constraints()

    def open(self, context: BackendContext) -> Backend:
        raise NotImplementedError


class OfTheFuture(Ours):
    protocol = 2


class NoBackend:
    pass


def _class(qualname: str, name: str) -> type[BackendOptions]:
    return type(qualname, (Ours,), {"__module__": __name__, "__qualname__": qualname, "name": name})


Install = Callable[..., None]


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that packages with these entry points are installed."""

    def entry_points(**names: str) -> None:
        points = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in names.items()]

        def listed(*, group: str) -> list[EntryPoint]:
            assert group == "moe_dispatch.backends"
            return points

        monkeypatch.setattr(registry, "entry_points", listed)

    monkeypatch.setattr(registry, "_LOADED", {})  # later tests must not find what was loaded under these names
    entry_points()
    return entry_points


def test_built_in_backends(install: Install) -> None:
    assert set(BUILT_IN) <= set(known_backends())
    for name in BUILT_IN:
        assert load_backend(name).name == name


def test_entry_point_is_listed_unimported_and_loaded_on_use(install: Install) -> None:
    install(ours=f"{__name__}:Ours", absent="no_such_package.at_all:Backend")
    assert {"ours", "absent", *BUILT_IN} <= set(known_backends())
    assert load_backend("ours") is Ours
    config = DispatcherConfig(backend={"name": "ours", "speed": 3}, num_experts=2, top_k=1, hidden_size=4)
    assert config.backend_options == Ours(speed=3)


def test_entry_point_cannot_take_the_name_of_ours(install: Install) -> None:
    install(alltoall=f"{__name__}:Ours")
    assert load_backend("alltoall").__name__ == "AllToAllOptions"
    assert known_backends().count("alltoall") == 1


def __getattr__(name: str) -> None:
    if name == "EndsTheProgram":  # as an entry point whose import does
        raise SystemExit(2)
    raise AttributeError(name)


ENTRY_POINTS: list[tuple[str, type[Exception], str]] = [
    (
        "no_such_package.at_all:Backend",
        BackendUnavailableError,
        r"Backend 'other' cannot be used here: its import raised ModuleNotFoundError: No module named 'no_such",
    ),
    ("no_such_package.at_all:Backend", ImportError, "choose one of: allgather, alltoall"),
    (f"{__name__}:Missing", BackendUnavailableError, "its import raised AttributeError"),
    (f"{__name__}:EndsTheProgram", BackendUnavailableError, "its import raised SystemExit: 2"),
    (f"{__name__}:OfTheFuture", ConfigError, r"Backend 'other' speaks protocol 2, this moe-dispatch speaks 1. Install"),
    (f"{__name__}:NoBackend", ConfigError, r"'other' must be a subclass of moe_dispatch.backends.BackendOptions, got"),
]


@pytest.mark.parametrize(("value", "kind", "text"), ENTRY_POINTS)
def test_entry_points_that_cannot_be_used(value: str, kind: type[Exception], text: str, install: Install) -> None:
    install(other=value)
    with pytest.raises(kind, match=text):
        load_backend("other")
    with pytest.raises(kind, match=text):
        DispatcherConfig(backend="other", num_experts=2, top_k=1, hidden_size=4)


def test_registered_backend_and_a_name_that_is_taken(install: Install) -> None:
    assert register_backend(Ours) is Ours
    assert register_backend(Ours) is Ours
    assert load_backend("ours") is Ours
    assert "ours" in known_backends()
    with pytest.raises(ConfigError, match=r"the name 'ours' is taken. Choose another name for Another"):
        register_backend(_class("Another", "ours"))
    with pytest.raises(ConfigError, match="the name 'local' is taken"):
        register_backend(_class("Local", "local"))


def test_registering_another_protocol_leaves_no_trace(install: Install) -> None:
    with pytest.raises(ConfigError, match="'ours' speaks protocol 2"):
        register_backend(OfTheFuture)
    assert "ours" not in known_backends()


@pytest.mark.parametrize(
    ("name", "near"), [("alltoal", "alltoall"), ("all_gather", "allgather"), ("locall", "local"), ("our", "ours")]
)
def test_unknown_name_with_the_list_and_the_nearest(install: Install, name: str, near: str) -> None:
    register_backend(Ours)
    with pytest.raises(ConfigError) as caught:
        load_backend(name)
    assert str(caught.value).startswith(f"Unknown backend {name!r}. Known backends: allgather, alltoall, ")
    assert str(caught.value).endswith(f" Did you mean {near!r}? [MD01]")


def test_unknown_name_far_from_all(install: Install) -> None:
    with pytest.raises(ConfigError, match=r"Unknown backend 'xyz'. Known backends: [a-z, ]+\. \[MD01\]$"):
        load_backend("xyz")


def test_parsed_specs() -> None:
    assert parse_backend("auto") is None
    assert parse_backend({"name": "auto"}) is None
    assert parse_backend("alltoall") == parse_backend({"name": "alltoall"}) == load_backend("alltoall")()
    register_backend(Ours)
    assert parse_backend({"name": "ours", "speed": 3}) == Ours(speed=3)
    with pytest.raises(ConfigError, match=r'a mapping must have "name", a string, got {.speed.: 3}. Write'):
        parse_backend({"speed": 3})
    with pytest.raises(ConfigError, match=r"options need a named backend, got \"auto\" with \['speed'\]. Name the"):
        parse_backend({"name": "auto", "speed": 3})


def test_the_mapping_that_is_parsed_stays_as_it_was() -> None:
    spec = {"name": "alltoall", "reduction": "exact"}
    parse_backend(spec)
    assert spec == {"name": "alltoall", "reduction": "exact"}


def test_what_is_registered_must_be_an_options_class_with_a_name() -> None:
    with pytest.raises(ConfigError, match=r"must be a subclass of moe_dispatch\.backends\.BackendOptions"):
        register_backend(Backend)  # type: ignore[type-abstract]
    with pytest.raises(ConfigError, match="the options class must have this name, got None"):
        register_backend(BackendOptions)  # type: ignore[type-abstract]
