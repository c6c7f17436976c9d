"""docs/faq.md, docs/tuning.md and the glossary in docs/concepts.md are true where they say what the library does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_dispatch import Dispatched, DispatcherConfig, Routing, Rows, build_dispatcher
from moe_dispatch.errors import InputError
from moe_dispatch_testing import run_ranks

DOCS = Path(__file__).parent.parent / "docs"
HIDDEN, EXPERTS = 16, 8


def _config(backend: str = "alltoall", **fields: Any) -> DispatcherConfig:
    return DispatcherConfig(**{"backend": backend, "num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, **fields})


def _routing(tokens: int, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :2].contiguous()
    return Routing(ids, torch.rand(tokens, 2, generator=generator))


def _rows(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_no_token_is_dropped_when_all_choose_the_same_experts(backend: str) -> None:
    def body(group: Any) -> None:
        x = _rows(50, group.rank())
        routing = Routing(torch.tensor([[0, 1]]).expand(50, 2).contiguous(), torch.full((50, 2), 0.5))
        dispatcher = build_dispatcher(_config(backend), group)
        sent = dispatcher.dispatch(x, routing)
        torch.testing.assert_close(dispatcher.combine(sent.rows, sent), x)
        assert sent.real_tokens_per_expert.sum() == (200 if group.rank() == 0 else 0)

    run_ranks(body, 2)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_shared_experts_run_between_dispatch_and_wait(backend: str) -> None:
    def body(group: Any) -> None:
        x, routing = _rows(5 + group.rank()), _routing(5 + group.rank())
        dispatcher = build_dispatcher(_config(backend), group)
        flight = dispatcher.dispatch(x, routing, async_op=True)
        shared = torch.tanh(x)
        sent = flight.wait()
        y = shared + dispatcher.combine(sent.rows, sent)
        torch.testing.assert_close(y, torch.tanh(x) + x * routing.topk_weights.sum(1, keepdim=True))

    run_ranks(body, 2)


def _gradient(dispatcher: Any, group: Any, cuts: list[int]) -> Tensor:
    """The gradient of this rank's experts, one number each, from micro-batches of these sizes."""
    scale_L = torch.ones(EXPERTS // group.size(), requires_grad=True)
    x, routing = _rows(sum(cuts), group.rank()), _routing(sum(cuts), group.rank())
    ids, weights = routing.topk_ids.split(cuts), routing.topk_weights.split(cuts)
    for part, ids_TK, weights_TK in zip(x.split(cuts), ids, weights, strict=True):
        sent = dispatcher.dispatch(part, Routing(ids_TK, weights_TK))
        rows = sent.rows * scale_L.repeat_interleave(sent.tokens_per_expert).unsqueeze(1)
        dispatcher.combine(rows, sent).square().sum().backward()
    assert scale_L.grad is not None
    return scale_L.grad


def test_accumulated_gradients_do_not_depend_on_the_cut_and_repeat_bit_for_bit() -> None:
    def body(group: Any) -> None:
        dispatcher = build_dispatcher(_config(), group)
        whole = _gradient(dispatcher, group, [8, 0])
        torch.testing.assert_close(_gradient(dispatcher, group, [3, 5]), whole)
        torch.testing.assert_close(_gradient(dispatcher, group, [8, 0] if group.rank() else [5, 3]), whole)
        assert torch.equal(_gradient(dispatcher, group, [8, 0]), whole)

    run_ranks(body, 2)


def test_a_float8_tensor_is_refused() -> None:
    with pytest.raises(InputError, match=r"x must be .*got torch.float8_e4m3fn"):
        build_dispatcher(_config()).dispatch(_rows(3).to(torch.float8_e4m3fn), _routing(3))


def test_an_expert_with_rows_is_padded_to_the_multiple_and_one_without_is_not() -> None:
    dispatcher = build_dispatcher(_config(pad_multiple="nvfp4"))
    sent = dispatcher.dispatch(_rows(1), Routing(torch.tensor([[0, 1]]), torch.ones(1, 2)))
    assert isinstance(sent, Dispatched)
    assert sent.tokens_per_expert_list == (128, 128, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("backend", "planned", "agreements"), [("allgather", True, 1), ("allgather", False, 4), ("alltoall", False, 0)]
)
def test_a_plan_agrees_on_sizes_once_for_all_layers(backend: str, planned: bool, agreements: int) -> None:
    def body(group: Any) -> int:
        layers = [build_dispatcher(_config(backend), group) for _ in range(4)]
        x, routing = _rows(3 + group.rank()), _routing(3 + group.rank())
        plan = layers[0].plan(Rows(), like=x) if planned else None
        for layer in layers:
            layer.dispatch(x, routing, plan)
        return layers[0].metrics().collectives.get("sizes", 0)

    assert run_ranks(body, 2) == [agreements] * 2


def test_the_glossary_has_at_most_25_words_of_one_sentence() -> None:
    _, _, glossary = (DOCS / "concepts.md").read_text(encoding="utf-8").partition("\n## Glossary\n")
    entries = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", glossary, re.MULTILINE)
    meanings = dict(entries[1:])
    assert len(meanings) == len(entries) - 1 <= 25
    for word, meaning in meanings.items():
        assert re.search(word.replace(" ", ".?").lower()[:5], meaning.lower()), word
        assert meaning.endswith(".")
        assert meaning.count(". ") == 0


def test_numbers_of_the_tuning_page_are_those_of_the_pages_it_names() -> None:
    """A number that is measured anew must not stay here as it was."""
    tuning, performance, plan, precision = (
        (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("tuning", "performance", "plan", "precision")
    )
    for here, there, page in [
        ("2.65 times as long", "| | worst | 0.420 | 0.110 | 0.944 | 1.474 | 2.65 |", performance),
        ("3.57 times in float32", "| 2.809 | 3.57 |", performance),
        ("took 1.34 and 1.15 times", "| 0.749 | 1.34 |", performance),
        ("1.15 to 1.34 times", "| 0.904 | 1.15 |", performance),
        ("265 MB in place of 636 MB", "| 265 | 1.19 |", performance),
        ("265 MB in place of 636 MB", "| 636 | 2.86 |", performance),
        ("15 padding rows of 32128", "at the experts of a rank             32128", plan),
        ("4272 bytes a row in place of 8240", '| bfloat16 | `"float8_e4m3fn"` | 4272 |', precision),
        ("4272 bytes a row in place of 8240", "| bfloat16 | `None` | 8240 |", precision),
    ]:
        assert here in tuning, here
        assert there in page, there
