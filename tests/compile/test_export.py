"""``torch.export`` of a layer: the program gives the layer's bits, and runs only where the dispatcher is open."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import MoEDispatchError, Routing
from moe_dispatch_testing import run_processes
from tests.compile.layer import Layer, dispatcher_for, step, tensors


def export(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    rows = torch.export.Dim("rows", min=2, max=64)
    return torch.export.export(layer, inputs, dynamic_shapes=({0: rows}, {0: rows}, {0: rows}), strict=True)


def saved(program: Any) -> Any:
    """The program after it was written and read."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("fields", [{}, {"graph_safe": True, "max_tokens_per_rank": 8}], ids=["eager", "graph-safe"])
def test_the_program_gives_output_and_gradients_of_the_layer(fields: dict[str, Any]) -> None:
    layer = Layer(dispatcher_for(**fields), torch.float32)
    program = export(layer, tensors(6, 0, torch.float32)).module()
    for rows in (6, 3, 8):
        inputs = tensors(rows, rows, torch.float32)
        want = step(layer, layer, inputs)
        got = step(lambda x, ids, weights, _: program(x, ids, weights), program, inputs)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


def saved_and_closed(rank: int, size: int = 2) -> list[Any]:
    """Whether the saved program gives the layer's bits; what is said after close, and of a backend with objects."""
    group = dist.group.WORLD if size > 1 else None
    layer = Layer(dispatcher_for("alltoall", group), torch.float32, rank=rank, size=size)
    program = saved(export(layer, tensors(6, rank, torch.float32))).module()
    inputs = tensors(4 + rank, rank, torch.float32)
    found: list[Any] = [torch.equal(program(*inputs), layer(*inputs))]
    layer.dispatcher.close()
    emulated = dispatcher_for({"name": "deepep", "emulate": True}, group, hidden_size=256)

    class Dispatch(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            sent = emulated.dispatch(x, Routing(ids, weights))
            return emulated.combine(sent.rows, sent)

    wide = (torch.ones(len(inputs[0]), 256), *inputs[1:])
    with_objects = export(Dispatch(), wide).module()
    for refused, arguments in ((program, inputs), (with_objects, wide)):
        with pytest.raises(MoEDispatchError) as caught:
            refused(*arguments)
        found.append(f"{caught.type.__name__}: {caught.value}")
    emulated.close()
    return found


# Ranks are processes, which start slowly. What is particular to several of them, the exchange, operators do.
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_saved_program_talks_to_its_peers_while_the_dispatcher_is_open(size: int) -> None:
    for same, closed, objects in run_processes(saved_and_closed, 2) if size > 1 else [saved_and_closed(0, 1)]:
        assert same
        assert re.match(r"StateError: .*channel 'alltoall-\w+-\d+' is not open\. Keep the dispatcher open", closed)
        assert re.match(r"ConfigError: .*torch\.compile needs a backend whose state is tensors, got 'deepep'", objects)
