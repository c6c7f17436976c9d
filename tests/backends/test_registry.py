"""Backends by name: ours, registered ones and entry points of other packages, good and broken."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

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
from moe_dispatch.seams import extension_points

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

        monkeypatch.setattr(extension_points, "entry_points", listed)

    monkeypatch.setattr(registry, "_LOADED", {})  # later tests must not find what was loaded under these names
    entry_points()
    return entry_points


def test_entry_points_are_listed_unimported_and_loaded_on_use(install: Install) -> None:
    """They come beside the built-in backends, and cannot take their names."""
    install(ours=f"{__name__}:Ours", absent="no_such_package.at_all:Backend", alltoall=f"{__name__}:Ours")
    assert {"ours", "absent", *BUILT_IN} <= set(known_backends())
    assert known_backends().count("alltoall") == 1
    assert load_backend("ours") is Ours
    for name in BUILT_IN:
        assert load_backend(name).name == name
    config = DispatcherConfig(backend={"name": "ours", "speed": 3}, num_experts=2, top_k=1, hidden_size=4)
    assert config.backend_options == Ours(speed=3)


def __getattr__(name: str) -> None:
    if name == "EndsTheProgram":  # as an entry point whose import does
        raise SystemExit(2)
    raise AttributeError(name)


ENTRY_POINTS: list[tuple[str, type[Exception], str]] = [
    ("no_such_package.at_all:Backend", BackendUnavailableError, "its import raised ModuleNotFoundError: No module"),
    ("no_such_package.at_all:Backend", ImportError, "choose one of: allgather, alltoall"),
    (f"{__name__}:Missing", BackendUnavailableError, "its import raised AttributeError"),
    (f"{__name__}:EndsTheProgram", BackendUnavailableError, "its import raised SystemExit: 2"),
    (f"{__name__}:OfTheFuture", ConfigError, r"Backend 'other' speaks protocol 2, this moe-dispatch speaks 1. Install"),
    (
        f"{__name__}:NoBackend",
        ConfigError,
        r"'other' must be a subclass of moe_dispatch.backends.BackendOptions with all of its methods, got",
    ),
]


@pytest.mark.parametrize(("value", "kind", "text"), ENTRY_POINTS)
def test_entry_points_that_cannot_be_used(value: str, kind: type[Exception], text: str, install: Install) -> None:
    install(other=value)
    with pytest.raises(kind, match=text):
        load_backend("other")
    with pytest.raises(kind, match=text):
        DispatcherConfig(backend="other", num_experts=2, top_k=1, hidden_size=4)


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (_class("Another", "ours"), r"the name 'ours' is taken. Choose another name for Another"),
        (_class("Local", "local"), "the name 'local' is taken"),
        (OfTheFuture, "'ours' speaks protocol 2"),
        (Backend, r"must be a subclass of moe_dispatch\.backends\.BackendOptions"),
        (BackendOptions, "must be a subclass of .* with all of its methods, got"),
    ],
)
def test_what_cannot_be_registered(refused: Any, text: str) -> None:
    assert register_backend(Ours) is register_backend(Ours) is Ours
    before = known_backends()
    with pytest.raises(ConfigError, match=text):
        register_backend(refused)
    assert known_backends() == before
    assert load_backend("ours") is Ours


@pytest.mark.parametrize(
    ("name", "near"),
    [("alltoal", "alltoall"), ("all_gather", "allgather"), ("locall", "local"), ("our", "ours"), ("xyz", None)],
)
def test_unknown_name_with_the_list_and_the_nearest(install: Install, name: str, near: str | None) -> None:
    register_backend(Ours)
    nearest = "" if near is None else rf" Did you mean {near!r}\?"
    text = rf"^Unknown backend {name!r}\. Known backends: allgather, alltoall, [a-z_, ]+\.{nearest} \[MD01\]$"
    with pytest.raises(ConfigError, match=text):
        load_backend(name)


def test_parsed_specs() -> None:
    assert parse_backend("auto") is None
    assert parse_backend({"name": "auto"}) is None
    assert parse_backend("alltoall") == parse_backend({"name": "alltoall"}) == load_backend("alltoall")()
    register_backend(Ours)
    spec = {"name": "ours", "speed": 3}
    assert parse_backend(spec) == Ours(speed=3)
    assert spec == {"name": "ours", "speed": 3}  # the mapping that is parsed stays as it was
    with pytest.raises(ConfigError, match=r'a mapping must have "name", a string, got {.speed.: 3}. Write'):
        parse_backend({"speed": 3})
    with pytest.raises(ConfigError, match=r"options need a named backend, got \"auto\" with \['speed'\]. Name the"):
        parse_backend({"name": "auto", "speed": 3})
