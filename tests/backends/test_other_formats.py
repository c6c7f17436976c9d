"""A wire format of another package: a class with ``encode`` and ``decode``, found by its entry point."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.errors import ConfigError
from moe_dispatch_testing import run_ranks

PACKAGE = '''
import torch
from moe_dispatch.backends.wire import WireFormat

class Fixed(WireFormat):
    """Numbers in steps of 1 / 16, as int16."""

    hidden_multiple = 4
    tolerance = 0.2

    def __init__(self, dtype, hidden):
        super().__init__(dtype, hidden)
        self.nbytes = 2 * hidden

    def encode(self, rows_TD, out):
        out.view(torch.int16).copy_(rows_TD.mul(16).round())

    def decode(self, packets):
        return packets.view(torch.int16).float() / 16
'''
SIZES: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": 8}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_formats.py").write_text(PACKAGE)
    metadata = tmp_path / "other_formats-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-formats\nVersion: 1.0\n")
    points = "[moe_dispatch.wire_formats]\nfixed = other_formats:Fixed\nbroken = other_formats.missing:Format\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))


def _random(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"graph_safe": True, "max_tokens_per_rank": 3}], ids=["eager", "graph_safe"])
@pytest.mark.parametrize("backend", ["local", "allgather", "alltoall"])
def test_rows_and_gradients_travel_in_it(backend: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    wire = {"dtype": "fixed", "gradients": True}
    config = DispatcherConfig(backend=backend, wire=wire, weights="experts", **SIZES, **fields)

    def body(group: dist.ProcessGroup | None) -> None:
        dispatcher, x, upstream = build_dispatcher(config, group), _random(0, dtype), _random(1, dtype)
        sent = dispatcher.dispatch(x, Routing(torch.tensor([[0, 3]]).expand(3, 2), torch.ones(3, 2)))
        rows = sent.rows.detach().requires_grad_()
        y = dispatcher.combine(rows, sent)
        y.backward(upstream)
        assert rows.grad is not None
        # Each rank has the rows of two experts, or those of two ranks for one expert.
        for got, given in ((rows.detach(), x), (rows.grad, upstream)):
            steps = given.float().mul(16).round().div(16).to(dtype)
            assert torch.equal(got[:6], torch.cat([steps, steps]))
        assert torch.equal(y, rows[:3] * 2)
        dispatcher.self_test()
        dispatcher.close()

    if backend == "local":
        body(None)
    else:
        run_ranks(body, 2)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": 6}, 'wire "fixed": hidden_size (6) must be a multiple of 4.'),
        (
            {"wire": "fixd"},
            "Unknown wire 'fixd'. Did you mean 'fixed'? Known ones: None, bfloat16, broken, ",
        ),
        ({"wire": "broken"}, "Wire format 'broken' cannot be used here: its import raised ModuleNotFoundError: "),
        (
            {"wire": {"dtype": "fixed", "deliver": "quantised"}},
            "wire.deliver=\"quantised\" needs wire.dtype 'float8_e4m3fn' or 'mxfp8', got 'fixed'.",
        ),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        DispatcherConfig(**{**SIZES, "wire": "fixed", **fields})


def test_a_library_that_does_not_know_it_refuses_it() -> None:
    config = DispatcherConfig(
        **{**SIZES, "wire": "fixed", "backend": {"name": "deepep", "emulate": "v1.2.1"}, "hidden_size": 512}
    )
    with pytest.raises(ConfigError, match="wire must be one of None, 'bfloat16', 'float8_e4m3fn', 'mxfp8', got 'fi"):
        run_ranks(lambda group: build_dispatcher(config, group), 2)
