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


def on_two_ranks(rank: int) -> list[Any]:
    """Whether the saved program gives the layer's bits; what is said after close, and of a backend with objects."""
    layer = Layer(dispatcher_for("alltoall", dist.group.WORLD), torch.float32, rank=rank, size=2)
    program = saved(export(layer, tensors(6, rank, torch.float32))).module()
    inputs = tensors(4 + rank, rank, torch.float32)
    found: list[Any] = [torch.equal(program(*inputs), layer(*inputs))]
    layer.dispatcher.close()
    emulated = dispatcher_for({"name": "deepep", "emulate": True}, dist.group.WORLD, hidden_size=256)

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


def test_a_saved_program_talks_to_its_peers_while_the_dispatcher_is_open() -> None:
    for same, closed, objects in run_processes(on_two_ranks, 2):
        assert same
        assert re.match(r"StateError: moe_dispatch operators: channel 'alltoall-\w+-0' is not open\. Keep the", closed)
        assert re.match(r"ConfigError: .*torch\.compile needs a backend whose state is tensors, got 'deepep'", objects)
