"""Record the routing of generate() with a cache: it is that of one forward over the finished sequences, and replays."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_dispatch.errors import InputError
from moe_dispatch.integrations.transformers import RoutingReplay, attach, config_for, dispatchers_of, register
from moe_dispatch.layouts import Masked
from moe_dispatch.replay import RoutingTable
from tests.integration.transformers.models import HIDDEN, build
from tests.integration.transformers.wiring import gradients
from tests.ranks import run_ranks

PAD, VOCABULARY = 0, 61
NEW = 5


def wired(family: str, group: Any) -> Any:
    model = build(family).eval()
    register(config_for(model.config, backend="alltoall"), group=group, name=f"generation of {family}")
    model.set_experts_implementation(f"generation of {family}")
    attach(model)
    return model


def prompts() -> tuple[Tensor, Tensor]:
    """Three prompts of 6, 3 and 1 tokens, padded on the left."""
    ids = torch.randint(2, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3, [0] * 5 + [1]])
    return ids.masked_fill(mask == 0, PAD), mask


def generated(model: Any, returned: int, **options: Any) -> tuple[Tensor, Tensor, list[str], RoutingTable]:
    ids, mask = prompts()
    names = [f"{row}.{copy}" for row in range(3) for copy in range(returned)]
    torch.manual_seed(0)
    with RoutingTable.record([*dispatchers_of(model).values()]) as recording:
        recording.micro_batch(names, cached=True)
        whole = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            pad_token_id=PAD,
            do_sample=returned > 1,
            num_return_sequences=returned,
            **options,
        )
    fed = torch.cat(
        [mask.repeat_interleave(returned, 0), torch.ones(len(whole), whole.shape[1] - 6, dtype=torch.int64)], 1
    )
    return whole[:, :-1], fed[:, :-1], names, recording.table()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("returned", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_recorded_generation_replays_in_training(family: str, returned: int, ends: bool) -> None:
    def body(group: Any) -> None:
        model = wired(family, group)
        whole, fed, names, table = generated(model, returned)
        if ends:  # the first sequence ends early; transformers feeds its padding to the model as tokens
            whole, fed, names, table = generated(model, returned, eos_token_id=int(whole[0, 7]))
            assert (whole[0, 8:] == PAD).all()
        lengths = dict(zip(names, fed.sum(1).tolist(), strict=True))
        assert table.lengths == lengths

        with RoutingTable.record([*dispatchers_of(model).values()]) as recording, torch.no_grad():
            recording.micro_batch(names)
            model(whole, attention_mask=fed)
        again = recording.table()
        for name in names:
            assert torch.equal(table.stored_NLK[table.rows_of(name)], again.stored_NLK[again.rows_of(name)])

        replay = RoutingReplay(model)
        like = torch.empty(*whole.shape, HIDDEN)
        losses, found = [], []
        for part in (table, again):
            model.zero_grad()
            with replay.micro_batch(part.cut(Masked(fed.flatten() != 0), names, like=like)):
                losses.append(model(whole, attention_mask=fed, labels=whole.masked_fill(fed == 0, -100)).loss)
            losses[-1].backward()
            found.append({name: gradient.clone() for name, gradient in gradients(model).items()})
            part.check_used()
        replay.close()
        assert torch.equal(*losses)
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

    run_ranks(body, 1)


def test_a_generation_without_the_argument_says_so() -> None:
    def body(group: Any) -> None:
        model = wired("qwen3_moe", group)
        ids, mask = prompts()
        with RoutingTable.record([*dispatchers_of(model).values()]) as recording:
            recording.micro_batch(["a", "b", "c"])
            model.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=PAD)
        with pytest.raises(
            InputError, match=r"must have the numbers of their MoE layers, got \'model\..*dispatchers\.val"
        ):
            RoutingTable.record(cast(Any, dispatchers_of(model)))
        with pytest.raises(InputError, match=r"or once with cached=True before a generate\(\) with a cache"):
            recording.table()

    run_ranks(body, 1)


@pytest.mark.parametrize("returned", [1, 2])
def test_a_beam_search_is_refused_and_a_forward_over_its_sequences_is_recorded(returned: int) -> None:
    def body(group: Any) -> None:
        model = wired("qwen3_moe", group)
        ids, mask = prompts()
        layers = [*dispatchers_of(model).values()]
        beams: dict[str, Any] = {
            "attention_mask": mask,
            "max_new_tokens": NEW,
            "pad_token_id": PAD,
            "num_beams": 2,
            "num_return_sequences": returned,
            "do_sample": False,
        }
        names = [f"{row}.{beam}" for row in range(3) for beam in range(returned)]
        with RoutingTable.record(layers) as recording:
            recording.micro_batch(names, cached=True)
            with pytest.raises(
                InputError, match=r"got a beam search, which .*\. Call generate\(\) outside of the block"
            ):
                model.generate(ids, **beams)
        whole = model.generate(ids, **beams)
        fed = torch.cat([mask.repeat_interleave(returned, 0), torch.ones(len(whole), NEW, dtype=torch.int64)], 1)
        with RoutingTable.record(layers) as recording, torch.no_grad():
            recording.micro_batch(names)
            model(whole, attention_mask=fed)
        assert recording.table().lengths == dict(zip(names, fed.sum(1).tolist(), strict=True))

    run_ranks(body, 1)
