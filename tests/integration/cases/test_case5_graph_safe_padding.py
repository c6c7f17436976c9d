"""Case 5, Megatron-LM #4071: rows per expert are padded once, on the device where the library can, never by hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dispatch import Dispatched, DispatcherConfig, Routing, build_dispatcher
from moe_dispatch_testing import HostSyncError, allow_host_syncs, refuse_host_syncs, run_ranks
from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.integration.jobs import Check, require
from tests.integration.megatron_core.layer import RANKS, Case, build, outcome, own_spec
from tests.integration.megatron_core.on_cpu import run_megatron
from tests.integration.needs import needs
from tests.integration.steps import difference

pytestmark = pytest.mark.integration
_, needs_megatron = needs("megatron")

RELEASE = "hybridep-94a9f8f"
HYBRIDEP = {"name": "hybridep", "emulate": RELEASE}
MULTIPLE, MOST, HIDDEN, EXPERTS, TOP_K = 16, 32, 256, 8, 2


def drawn(rank: int) -> tuple[Tensor, Routing]:
    """bfloat16 (T, D) and choices, other counts on every rank; nobody chooses expert 3."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 9 + 7 * rank
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
    scores_TE[:, 3] = -1.0
    chosen = scores_TE.topk(TOP_K)
    return torch.randn(tokens, HIDDEN, generator=generator).bfloat16(), Routing(chosen.indices, chosen.values)


def pad_on_the_host(sent: Dispatched) -> Tensor:
    """What experts do that find their rows unpadded: Megatron's stand-alone step, which the issue is about."""
    counts = sent.tokens_per_expert.tolist()
    parts = sent.rows[: sum(counts)].split(counts)
    return torch.cat([nn.functional.pad(part, (0, 0, 0, -len(part) % MULTIPLE)) for part in parts])


def quantised_experts(sent: Dispatched) -> Tensor:
    """Experts of a multiple: what was dispatched says whether they have to see to it."""
    return torch.tanh(pad_on_the_host(sent) if sent.pad_multiple % MULTIPLE else sent.rows)


def one_layer(group: dist.ProcessGroup, experts: Callable[[Dispatched], Tensor], *, graph_safe: bool) -> Dispatched:
    with allow_host_syncs():
        config = DispatcherConfig(
            backend=HYBRIDEP,
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            pad_multiple="fp8",
            graph_safe=graph_safe,
            max_tokens_per_rank=MOST if graph_safe else None,
        )
        dispatcher = build_dispatcher(config, group)
        x, routing = drawn(group.rank())
    sent = dispatcher.dispatch(x.requires_grad_(), routing)
    dispatcher.combine(experts(sent), sent).sum().backward()
    with allow_host_syncs():
        assert not graph_safe or not dispatcher.check().overflowed
        dispatcher.close()
    return sent


@pytest.mark.parametrize("graph_safe", [False, True])
def test_the_library_pads_and_nobody_after_it(graph_safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step of the graph-safe path is on the host."""
    buffer = emulated_deep_ep(RELEASE).HybridEPBuffer
    original, calls = buffer.dispatch_with_permute, []

    @functools.wraps(original)  # its signature tells the release
    def spied(self: Any, *args: Any, **given: Any) -> Any:
        result = original(self, *args, **given)
        calls.append((given, result[0].shape[0]))
        return result

    monkeypatch.setattr(buffer, "dispatch_with_permute", spied)
    with (
        patch(f"{__name__}.pad_on_the_host", side_effect=AssertionError("padded twice")),
        refuse_host_syncs() if graph_safe else nullcontext(),
    ):
        by_rank = run_ranks(lambda group: one_layer(group, quantised_experts, graph_safe=graph_safe), 2)
    forwards = [(given, rows) for given, rows in calls if given.get("handle") is None]
    assert {given["pad_multiple"] for given, _ in forwards} == {MULTIPLE}
    assert sorted(rows for _, rows in forwards) == sorted(len(sent.rows) for sent in by_rank)  # as it delivered them
    for sent in by_rank:
        padded, real = sent.tokens_per_expert, sent.real_tokens_per_expert
        assert sent.pad_multiple == MULTIPLE
        assert padded.tolist() == [-(-count // MULTIPLE) * MULTIPLE for count in real.tolist()]
        assert len(sent.rows) > padded.sum() if graph_safe else len(sent.rows) == padded.sum()
    assert by_rank[0].tokens_per_expert[3] == 0


def test_a_second_padding_is_caught() -> None:
    with pytest.raises(HostSyncError, match=r"tolist.* at .*test_case5_graph_safe_padding"), refuse_host_syncs():
        run_ranks(lambda group: one_layer(group, pad_on_the_host, graph_safe=True), 2)


# Through Megatron: its experts, with its own padding in them.


def quantised_case(seed: int) -> Case:
    """Float8 to Megatron's settings, and so to its padding; without transformer-engine nothing is converted."""
    config = {"hidden_size": HIDDEN, "moe_router_load_balancing_type": "none"}
    float8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    return Case(config=config, unchecked=float8, dtype=torch.bfloat16, tokens=(9, 16, 5, 12), seed=seed)


@contextmanager
def padding_seen() -> Iterator[list[tuple[int, int]]]:
    """Calls of the experts' padding inside the block: rows that went in and came out of it."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    original, seen = SequentialMLP._pad_tensor_for_quantization, []

    def spied(experts: Any, hidden: Tensor, probs: Tensor) -> Any:
        result = original(experts, hidden, probs)
        seen.append((len(hidden), len(result[0])))
        return result

    with patch.object(SequentialMLP, "_pad_tensor_for_quantization", spied):
        yield seen


def experts_do_not_pad(rank: int) -> dict[str, Any]:
    """How far apart, what Megatron's experts padded under its own dispatcher, and under ours, and who is to pad.

    ``skips`` is what 0.19's TEGroupedMLP, which needs transformer-engine, would be answered; 0.16 does not ask.
    """
    from megatron.core.transformer.moe import moe_utils

    from moe_dispatch.integrations.megatron import convert
    from moe_dispatch.integrations.megatron.core import VERSION

    case = quantised_case(seed=1)
    layer = build(own_spec(), case)
    with padding_seen() as by_experts:
        want = outcome(layer, case.hidden(rank))
    convert(layer, backend=HYBRIDEP)
    with padding_seen() as with_ours:
        got = outcome(layer, case.hidden(rank))
    configs = [layer.config, layer.experts.config]
    skips = [] if VERSION.startswith("0.16") else [moe_utils.skip_routed_expert_padding(config) for config in configs]
    return {
        "error": difference(got, want),
        "by experts": by_experts,
        "with ours": with_ours,
        "told": [bool(config.moe_router_padding_for_quantization) for config in configs],
        "skips": skips,
    }


class StaticExperts(nn.Module):
    """A matrix per expert on a buffer of fixed size, as grouped GEMMs with offsets on the device work."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.weight_LDD = nn.Parameter(torch.randn(experts, HIDDEN, HIDDEN, generator=generator).bfloat16() / 16)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        ends_L = tokens_per_expert.cumsum(0)
        expert_R1 = torch.searchsorted(ends_L, torch.arange(len(rows)), right=True).unsqueeze(1)
        # Behind the last expert's rows anything may lie, also in gradients: it is not to be multiplied.
        rows = torch.where(expert_R1 < len(ends_L), rows, 0)
        outputs = [torch.where(expert_R1 == expert, rows @ weight, 0) for expert, weight in enumerate(self.weight_LDD)]
        return torch.stack(outputs).sum(0) * probs.unsqueeze(1).bfloat16(), None


def graph_safe_layer(rank: int, experts: str) -> str | float:
    """A whole MoELayer under refuse_host_syncs: how far from eager mode, or what was refused."""
    from moe_dispatch.integrations.megatron import convert, layers

    case = quantised_case(seed=3)
    layer = build(own_spec(), case)
    if experts == "static":
        layer.experts = StaticExperts(layer.num_local_experts)
    convert(layer, backend=HYBRIDEP)
    want = outcome(layer, case.hidden(rank))
    with patch.object(layers, "_check_experts"):  # which would have refused the planted ones
        convert(layer, backend=HYBRIDEP, graph_safe=True, max_tokens_per_rank=MOST)
    read_of_the_map = allow_host_syncs()(Routing.from_map)  # on the CPU alone it looks whether rows fit top_k
    layer.router.forward = allow_host_syncs()(layer.router.forward)  # it moves weights that it finds on the CPU
    try:
        with patch.object(Routing, "from_map", read_of_the_map), refuse_host_syncs():
            got = outcome(layer, case.hidden(rank))
    except HostSyncError as error:
        return str(error)
    return difference(got, want)


CHECKS: dict[str, Check] = {
    "experts do not pad": experts_do_not_pad,
    "graph-safe": functools.partial(graph_safe_layer, experts="static"),
    "planted": functools.partial(graph_safe_layer, experts="Megatron's"),
}


@functools.cache
def results() -> dict[str, list[Any]]:
    return run_megatron(CHECKS)


@needs_megatron
def test_megatrons_experts_do_not_pad_again() -> None:
    by_rank = require(results()["experts do not pad"])
    assert any(before != after for found in by_rank for before, after in found["by experts"])
    for found in by_rank:
        assert found["error"] < 3e-2
        assert len(found["with ours"]) == len(found["by experts"]) == 8 // RANKS
        assert all(before == after and before % MULTIPLE == 0 for before, after in found["with ours"])
        assert found["told"] == [False, True]  # the experts, and not the config of the model
        assert found["skips"] in ([], [False, True])


@needs_megatron
def test_a_graph_safe_layer_of_megatrons_never_waits() -> None:
    assert max(require(results()["graph-safe"])) < 3e-2


@needs_megatron
def test_megatrons_padding_on_the_host_is_caught() -> None:
    for told in require(results()["planted"]):
        assert "the host must not read tensor values" in told
        assert "experts.py" in told
