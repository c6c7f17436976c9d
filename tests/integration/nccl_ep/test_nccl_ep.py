"""What ``nccl_ep`` promises beyond the kit: groups that grow, capacities, overflow, refusals, ids of -1, close."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from moe_dispatch import Dispatcher, DispatcherConfig, Plan, Routing, Rows, build_dispatcher
from moe_dispatch.errors import CapacityError, ConfigError, InputError, PeerError, StateError
from moe_dispatch_testing.ranks import run_ranks as fresh_ranks
from moe_dispatch_testing.ranks import thread_group
from tests.integration.nccl_ep.double import installed, requires_wheel
from tests.integration.nccl_ep.stand_in import Trapped
from tests.ranks import run_ranks

pytestmark = requires_wheel
Group = dist.ProcessGroup
E, K, D = 12, 3, 16


@pytest.fixture(autouse=True)
def library() -> Iterator[Callable[[], Any]]:
    with installed() as module:
        yield module


def config(**fields: Any) -> DispatcherConfig:
    given: dict[str, Any] = {"backend": "nccl_ep", "num_experts": E, "top_k": K, "hidden_size": D}
    return DispatcherConfig(**(given | fields))


@contextmanager
def opened(group: Group, **fields: Any) -> Iterator[Dispatcher]:
    """A dispatcher that is closed at the end, unless the block raises: its peers may be elsewhere then."""
    dispatcher = build_dispatcher(config(**fields), group)
    yield dispatcher
    dispatcher.close()


def batch(rank: int, tokens: int, *, to: Sequence[int] = range(E), seed: int = 0) -> tuple[Tensor, Routing]:
    """Rows of whole numbers, and routing to some of the experts; one weight is zero, and one negative."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(-3, 4, (tokens, D), generator=generator).bfloat16().requires_grad_()
    order = torch.rand(tokens, len(to), generator=generator).argsort(1)[:, :K]
    weights = torch.rand(tokens, K, generator=generator) + 0.1
    weights[:1, :1] = 0
    weights[1:2, 1:2] *= -1
    return x, Routing(torch.tensor(list(to))[order], weights.requires_grad_())


def run(
    group: Group, dispatcher: Dispatcher, x: Tensor, routing: Routing, plan: Plan | None = None, strays: int = 0
) -> Tensor:
    """A layer whose expert e multiplies by e + 1, or returns infinity if the id of the row was -1.

    At least ``strays`` rows must be of this kind.
    """
    first = group.rank() * E // group.size()
    sent = dispatcher.dispatch(x, routing, plan or Rows())
    counts = sent.tokens_per_expert
    factors = torch.arange(first, first + len(counts)).add(1).repeat_interleave(counts)
    rows = torch.full_like(sent.rows, torch.nan)  # behind the experts' rows
    rows = torch.cat([sent.rows[: len(factors)] * factors.unsqueeze(1).bfloat16(), rows[len(factors) :]])
    is_token_R = sent.state.route.is_token_R
    assert sent.real_tokens_per_expert.sum() - is_token_R[: len(factors)].sum() >= strays
    return dispatcher.combine(rows.masked_fill(~is_token_R.unsqueeze(1), torch.inf), sent)


def check(y: Tensor, x: Tensor, routing: Routing) -> None:
    """The output and the gradients of such a layer."""
    y.float().sum().backward()
    ids, weights = routing.topk_ids, routing.topk_weights.detach()
    factors = torch.where(ids < 0, 0, ids + 1.0)
    scale = (weights * factors).sum(1, keepdim=True)
    near: dict[str, Any] = {"rtol": 0.03, "atol": 0.25}
    torch.testing.assert_close(y.float(), x.detach().float() * scale, **near)
    assert x.grad is not None
    assert routing.topk_weights.grad is not None
    torch.testing.assert_close(x.grad.float(), scale.expand_as(x), **near)
    torch.testing.assert_close(routing.topk_weights.grad, x.detach().float().sum(1, keepdim=True) * factors, **near)


def bounds(module: Any) -> list[int]:
    return [one.max_tokens_per_rank for one in module.tex.bootstraps]


def test_megatron_7578_a_packed_micro_batch_64_times_longer_than_the_first(library: Callable[[], Any]) -> None:
    """The first sizes the library's group as in Megatron, and the longer one traps there. Here the group is made anew,
    although the backward of the first is still to come."""

    def megatron(group: Group) -> None:
        ep = library()
        ep.ep_bootstrap(group, E, 64, D, K)
        for tokens in (64, 64 * 64):
            x, routing = batch(group.rank(), tokens)
            buffer = ep.EpBuffer(K, 64, D, E // 2, device=x.device)
            ep.ep_dispatch(buffer, x, routing.topk_ids, routing.topk_weights)

    with pytest.raises(Trapped, match="4096 tokens, the group is made for 64"):
        fresh_ranks(megatron, 2)

    def ours(group: Group) -> list[int]:
        with opened(group) as dispatcher:
            calls = [batch(group.rank(), tokens, seed=tokens) for tokens in (64, 64 * 64, 9)]
            outputs = [run(group, dispatcher, *call) for call in calls]
            for y, call in reversed(list(zip(outputs, calls, strict=True))):
                check(y, *call)
            return bounds(library())

    assert run_ranks(ours, 2) == [[64, 4096]] * 2


def test_ranks_with_0_1_and_4096_rows(library: Callable[[], Any]) -> None:
    def body(group: Group) -> list[int]:
        with opened(group) as dispatcher:
            for turn in range(3):
                call = batch(group.rank(), (0, 1, 4096)[(group.rank() + turn) % 3], seed=turn)
                check(run(group, dispatcher, *call), *call)
            return bounds(library())

    assert run_ranks(body, 3) == [[4096]] * 3


def test_a_group_that_grows_by_steps_is_not_made_anew_for_each(
    library: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="moe_dispatch")

    def body(group: Group) -> list[int]:
        with opened(group) as dispatcher:
            for tokens in (1, 1000, 1010, 1020, 1030, 1100, 1150, 3):
                call = batch(group.rank(), tokens)
                check(run(group, dispatcher, *call), *call)
            return bounds(library())

    assert run_ranks(body, 2) == [[64, 1024, 1152]] * 2
    assert "the group for 64 rows per rank is made anew, for 1024." in caplog.text


def test_a_known_number_of_tokens_makes_the_group_once(library: Callable[[], Any]) -> None:
    def body(group: Group) -> list[int]:
        with opened(group, max_tokens_per_rank=1001) as dispatcher:
            for tokens in (3, 1001):
                call = batch(group.rank(), tokens)
                check(run(group, dispatcher, *call), *call)
            return bounds(library())

    assert run_ranks(body, 2) == [[1024]] * 2


@pytest.mark.parametrize(
    ("fields", "capacity", "drops"),
    [
        ({}, 2 * 32 * K, False),
        ({"balance": {"name": "exact", "min_rows": 0}}, 32 * K, False),
        ({"graph_safe": {"capacity_factor": 1.5, "on_overflow": "raise"}}, 144, True),
        (
            {"graph_safe": {"capacity_factor": 1.0, "on_overflow": "drop_by_position"}, "pad_multiple": 16},
            96 + 6 * 15 - 10,
            True,
        ),
    ],
)
def test_capacity_in_graph_safe_mode(
    fields: dict[str, Any], capacity: int, drops: bool, library: Callable[[], Any]
) -> None:
    def body(group: Group) -> Any:
        with opened(group, **({"graph_safe": True, "max_tokens_per_rank": 32} | fields)):
            return library().tex.bootstraps

    for (made,) in run_ranks(body, 2):
        assert (made.max_tokens_per_rank, made.max_recv_tokens_per_rank) == (64 if capacity >= 64 else 32, capacity)
        assert made.drop_on_overflow == drops


@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_overflow_at_a_factor_of_1_is_counted_and_retried(pad_multiple: int, library: Callable[[], Any]) -> None:
    """All rows go to the experts of rank 0, which are 64 * K at two ranks, twice the balanced load."""

    def body(group: Group) -> Any:
        room = {"capacity_factor": 1.0, "on_overflow": "raise"}
        fields: dict[str, Any] = {"graph_safe": room, "max_tokens_per_rank": 32}
        with opened(group, pad_multiple=pad_multiple, **fields) as dispatcher:
            even = batch(group.rank(), 16)
            check(run(group, dispatcher, *even), *even)
            assert not dispatcher.check().overflowed
            call = batch(group.rank(), 32, to=range(E // 2))
            run(group, dispatcher, *call)
            with pytest.raises(CapacityError, match=r"at most 96 rows of a rank's experts, got \d+ .*MD07"):
                dispatcher.check()
            needed = dispatcher.required_capacity().rows
            tries: list[Tensor] = []

            def step() -> Tensor:
                tries.append(run(group, dispatcher, *call))
                return tries[-1]

            y = dispatcher.retry_on_overflow(step)
            check(y, *call)
            with pytest.raises(StateError, match="its buffers have grown since this dispatch"):
                tries[0].float().sum().backward()
            return needed, len(tries), [made.max_recv_tokens_per_rank for made in library().tex.bootstraps]

    for needed, tries, made in run_ranks(body, 2):
        assert 64 * K - (pad_multiple - 1) * E // 2 <= needed <= 64 * K
        assert tries == 2
        assert len(made) == 2
        assert made[1] >= 64 * K


def test_what_is_dropped_adds_nothing(library: Callable[[], Any]) -> None:
    """Rank 0 gets 64 tokens, three rows of each, and has room for 48 rows: both stages of the library drop."""

    def body(group: Group) -> None:
        room = {"capacity_factor": 0.5, "on_overflow": "drop_by_position"}
        with opened(group, graph_safe=room, max_tokens_per_rank=32, pad_multiple=8) as dispatcher:
            x, routing = batch(group.rank(), 32, to=range(E // 2))
            y = run(group, dispatcher, x, routing)
            y.float().sum().backward()
            assert dispatcher.check().overflowed
            assert x.grad is not None
            assert y.isfinite().all()
            assert x.grad.isfinite().all()
            assert routing.topk_weights.grad is not None
            dropped = (x.grad == 0).all(1)  # no slot of these tokens arrived
            assert dropped.any() or group.rank() == 0
            assert (y[dropped] == 0).all()
            assert (routing.topk_weights.grad[dropped] == 0).all()

    run_ranks(body, 2)


def test_the_self_test_passes(library: Callable[[], Any]) -> None:
    def body(group: Group) -> None:
        with opened(group, pad_multiple=16) as dispatcher:
            dispatcher.self_test()

    run_ranks(body, 2)


def raises_on_all(body: Callable[[Group], object], size: int, error: type[Exception], match: str) -> None:
    def refused(group: Group) -> None:
        with pytest.raises(error, match=match):
            body(group)

    fresh_ranks(refused, size)


def test_a_second_group_in_a_process_is_refused_on_all_ranks() -> None:
    """And other settings of the same group. What is open goes on, and afterwards there is room for the other."""
    store = HashStore()

    def body(group: Group) -> None:
        other = thread_group(store, group.rank(), group.size())
        call = batch(group.rank(), 8)
        with opened(group) as dispatcher:
            y = run(group, dispatcher, *call)
            with pytest.raises(ConfigError, match=r"one group and one set of sizes .* with another group has it"):
                build_dispatcher(config(), other)
            with pytest.raises(ConfigError, match=r"a dispatcher with other settings has it. Close that one"):
                build_dispatcher(config(top_k=2), group)
            check(y, *call)
        with opened(other) as dispatcher:
            call = batch(group.rank(), 8)
            check(run(group, dispatcher, *call), *call)

    run_ranks(body, 2)


@pytest.mark.parametrize("dropped_by", [{0, 1}, {1}], ids=["all ranks", "one rank"])
def test_a_dispatcher_that_was_dropped_without_close_can_be_built_again(
    dropped_by: set[int], library: Callable[[], Any]
) -> None:
    """It keeps the library's group, because ranks collect garbage at different times. The next one takes it over."""

    def layer(group: Group, dispatcher: Dispatcher) -> None:
        call = batch(group.rank(), 8)
        check(run(group, dispatcher, *call), *call)

    def body(group: Group) -> int:
        first = build_dispatcher(config(), group)
        layer(group, first)
        if group.rank() in dropped_by:
            del first
            gc.collect()
        with pytest.raises(ConfigError, match=r"build one with its config and group again, and close that"):
            build_dispatcher(config(top_k=2), group)
        again = build_dispatcher(config(), group)
        layer(group, again)
        if group.rank() not in dropped_by:
            first.close()
        again.close()
        with opened(group, top_k=2):
            pass
        return len(library().tex.bootstraps)

    assert run_ranks(body, 2) == [1, 1]


def test_a_second_group_of_one_rank_is_refused_on_all_ranks_of_the_group(library: Callable[[], Any]) -> None:
    """Rank 0 has bootstrapped the library itself, as Megatron does."""

    def body(group: Group) -> None:
        if group.rank() == 0:
            library().__dict__["_BOOTSTRAPPED"] = True
        error = ConfigError if group.rank() == 0 else PeerError
        with pytest.raises(error, match=r"another user of .* has bootstrapped NCCL EP in this process. Call ep_fin"):
            build_dispatcher(config(), group)
        library().__dict__["_BOOTSTRAPPED"] = False
        with opened(group) as dispatcher:
            call = batch(group.rank(), 8)
            check(run(group, dispatcher, *call), *call)

    run_ranks(body, 2)


def test_the_group_of_another_user_is_left_alone(library: Callable[[], Any]) -> None:
    """It was made between the build of a dispatcher and its first dispatch."""

    def body(group: Group) -> None:
        dispatcher = build_dispatcher(config(), group)
        library().__dict__["_BOOTSTRAPPED"] = True
        with pytest.raises(ConfigError, match=r"another user of .* has bootstrapped NCCL EP in this process"):
            dispatcher.dispatch(*batch(group.rank(), 8))
        dispatcher.close()
        assert library().is_ep_bootstrapped()
        library().__dict__["_BOOTSTRAPPED"] = False

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("fields", "size", "match"),
    [
        ({"pad_multiple": 48}, 2, r"pad_multiple must be a power of two, got 48. Use 64"),
        ({}, 1, r'ep_size must be one of 2 to 64, got 1\. Use "local" on one rank'),
        ({"hidden_size": 20}, 2, "hidden_size must be a multiple of 8, got 20"),
        ({"wire": "mxfp8", "hidden_size": 64}, 2, r"wire must be one of None, 'bfloat16', got 'mxfp8'"),
        (
            {"graph_safe": {"capacity_factor": 0.25, "on_overflow": "raise"}, "max_tokens_per_rank": 64},
            2,
            r"must hold at least the rows that a rank brings, 64, got 48. Raise graph_safe.capacity_factor to 0.334",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_build(fields: dict[str, Any], size: int, match: str) -> None:
    raises_on_all(lambda group: build_dispatcher(config(**fields), group), size, ConfigError, match)


def test_rows_of_float32_are_refused_or_travel_in_bfloat16() -> None:
    x, routing = torch.ones(3, D), Routing(torch.tensor([[0, 5, 7]] * 3), torch.ones(3, K))

    def refused(group: Group) -> None:
        with opened(group) as dispatcher, pytest.raises(InputError, match="float32"):
            dispatcher.dispatch(x, routing, Rows())

    run_ranks(refused, 2)

    def body(group: Group) -> Tensor:
        with opened(group, wire="bfloat16") as dispatcher:
            sent = dispatcher.dispatch(x, routing, Rows())
            assert sent.rows.dtype == torch.float32
            return dispatcher.combine(sent.rows, sent)

    assert all(torch.equal(y, 3 * x) for y in run_ranks(body, 2))


def test_ids_of_minus_1_go_nowhere_and_a_library_that_sends_them_is_found(library: Callable[[], Any]) -> None:
    def holes(rank: int) -> tuple[Tensor, Routing]:
        x, routing = batch(rank, 20)
        ids = routing.topk_ids.clone()
        ids[::2, 1], ids[5] = -1, -1
        return x, Routing(ids, routing.topk_weights)

    def body(group: Group) -> None:
        with opened(group) as dispatcher:
            for plan in (None, dispatcher.plan(like=torch.empty(20, D))):
                call = holes(group.rank())
                check(run(group, dispatcher, *call, plan), *call)

    run_ranks(body, 2)

    def otherwise(group: Group, *, planned: bool, graph_safe: bool = False) -> None:
        library().tex.skips_negative = False
        with opened(group, graph_safe=graph_safe, max_tokens_per_rank=20) as dispatcher:
            plan, call = dispatcher.plan(like=torch.empty(20, D)) if planned else None, holes(group.rank())
            check(run(group, dispatcher, *call, plan, strays=0 if group.rank() else 26), *call)  # all on expert 0

    for planned, strays in ((True, "26"), (False, "0")):  # each rank has 13 such slots
        text = rf"the experts of rank 0 must get \d+ rows, padding included, got \d+, {strays} of them of slots with"
        with pytest.raises(StateError, match=text):
            fresh_ranks(partial(otherwise, planned=planned), 2, timeout=timedelta(seconds=3))
    run_ranks(partial(otherwise, planned=True, graph_safe=True), 2)


@pytest.mark.parametrize("graph_safe", [False, True])
def test_counts_with_and_without_padding(graph_safe: bool, library: Callable[[], Any]) -> None:
    def body(group: Group) -> Any:
        seen = []
        for pads in (True, False):
            library().tex.pads_counts = pads
            given = {"graph_safe": graph_safe, "max_tokens_per_rank": 20, "pad_multiple": 16}
            with opened(group, **given) as dispatcher:
                x, routing = batch(group.rank(), 20)
                sent = dispatcher.dispatch(x, routing, Rows())
                seen.append((sent.tokens_per_expert.tolist(), sent.real_tokens_per_expert.tolist()))
                y = run(group, dispatcher, x, routing)
                check(y, x, routing)
                x.grad = None
        assert seen[0] == seen[1]
        return seen[0]

    for padded, real in run_ranks(body, 2):
        assert padded == [-(-count // 16) * 16 for count in real]
        assert 0 < sum(real) < sum(padded)


@pytest.mark.parametrize("graph_safe", [False, True])
def test_rows_carry_the_number_of_their_token(graph_safe: bool) -> None:
    def body(group: Group) -> None:
        with opened(group, graph_safe=graph_safe, max_tokens_per_rank=9, pad_multiple=8) as dispatcher:
            x, routing = batch(group.rank(), (3, 9)[group.rank()])
            token = 10 * group.rank() + torch.arange(len(x))
            x = (token + 1.0).unsqueeze(1).expand(-1, D).bfloat16().contiguous()
            sent = dispatcher.dispatch(x, routing, Rows(), carry={"token": token})
            assert sent.carried is not None
            counts = zip(sent.tokens_per_expert.tolist(), sent.real_tokens_per_expert.tolist(), strict=True)
            is_real = [row < real for padded, real in counts for row in range(padded)]
            is_real += [False] * (len(sent.rows) - len(is_real))
            wanted = torch.where(torch.tensor(is_real), sent.rows[:, 0].float().nan_to_num().long() - 1, -1)
            assert torch.equal(sent.carried["token"], wanted)
            assert sum(is_real) > 0

    run_ranks(body, 2)


def test_close_releases_the_group_and_a_later_backward_is_refused(library: Callable[[], Any]) -> None:
    def body(group: Group) -> None:
        x, routing = batch(group.rank(), 8)
        with opened(group) as dispatcher:
            y = run(group, dispatcher, x, routing)
            assert library().is_ep_bootstrapped()
        assert not library().is_ep_bootstrapped()
        with pytest.raises(StateError, match=r"its group must be open, got a call after close\(\)"):
            y.float().sum().backward()
        with opened(group, top_k=2) as dispatcher:
            dispatcher.close()

    run_ranks(body, 2)


def test_release_gives_the_group_back_and_the_next_call_makes_it_anew(library: Callable[[], Any]) -> None:
    def body(group: Group) -> list[int]:
        with opened(group) as dispatcher:
            found, held = [], []
            for tokens in (8, 8, 2048):
                x, routing = batch(group.rank(), tokens + group.rank())
                y = run(group, dispatcher, x, routing)
                check(y, x, routing)
                found.append(y.detach())
                held.append(dispatcher.metrics().memory_held)
                dispatcher.release()
                assert not library().is_ep_bootstrapped()
                held.append(dispatcher.metrics().memory_held)
            assert torch.equal(found[0], found[1])
            assert held[1::2] == [0, 0, 0]
            assert 0 < held[0] == held[2] < held[4]
            return bounds(library())

    made = run_ranks(body, 2)
    assert made[0] == made[1]
    assert len(made[0]) == 3
