"""How a backend of another package makes its routes tensors, and what it is told if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Routing
from moe_dispatch.backends import Arrived, Backend, BackendContext, Sizes
from moe_dispatch.backends.local import Local, LocalOptions
from moe_dispatch.capabilities.compiling.routes import LocalForm, RankMajorForm, Tables, form_of, load_form
from moe_dispatch.dispatchers import Dispatcher
from moe_dispatch.errors import StateError
from moe_dispatch.types import Capacity
from tests.compile.layer import dispatcher_for, layer_of, tensors


class Mine(Backend):
    """Lets ``local`` move the rows."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.inner = LocalOptions().open(context)

    def dispatch(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, sizes: Sizes) -> Arrived:
        return self.inner.dispatch(rows_TD, ids_TK, weights_TK, sizes)


@contextmanager
def backed_by(kind: type[Backend]) -> Iterator[Dispatcher]:
    """A dispatcher of a backend of this class, though its name is "local"."""
    dispatcher = dispatcher_for("local")
    channel = dispatcher._channel
    given, channel.backend = channel.backend, kind(channel.context)
    yield dispatcher
    channel.backend = given


def test_a_backend_without_a_form_is_told_what_to_register() -> None:
    inputs = tensors(10, 0, torch.float32)
    with backed_by(Mine) as dispatcher:
        dispatcher.dispatch(inputs[0], Routing(*inputs[1:]))
        with pytest.raises(Exception, match="Mine: a backend that declares compilable must turn its routes into"):
            torch.compile(layer_of(dispatcher), fullgraph=True, backend="eager")(*inputs)
        with pytest.raises(
            StateError, match=r"Register a RouteForm with form_of of moe_dispatch\.capabilities\.compiling\.routes"
        ):
            load_form(dispatcher._channel.backend)


def test_a_backend_with_a_form_compiles() -> None:
    class Registered(Mine):
        pass

    @form_of(Registered)
    class Form(RankMajorForm):
        def route(self, tables: Tables, num_rows: int | None, capacity: Capacity | None) -> Any:
            return LocalForm(self.backend.inner).route(tables, num_rows, capacity)

    inputs = tensors(10, 0, torch.float32)
    with backed_by(Registered) as dispatcher:
        run = layer_of(dispatcher)
        assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(*inputs), run(*inputs))


def test_a_subclass_has_the_form_of_its_base() -> None:
    dispatcher = dispatcher_for("local")
    backend = dispatcher._channel.backend
    assert isinstance(backend, Local)
    assert type(load_form(backend)) is LocalForm
