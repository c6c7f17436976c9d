"""Reused buffers: never lent twice, reused when nothing holds them, and fresh where that is as good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher
from moe_dispatch.backends.workspace import Workspace

CPU = torch.device("cpu")
MEGABYTE = 1 << 20
CONFIG = DispatcherConfig(backend="alltoall", num_experts=4, top_k=2, hidden_size=512)


def _address(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


@pytest.fixture
def unfilled() -> Iterator[None]:
    """Fresh memory is not filled, as outside of these tests: only then is that of results used again."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.mark.usefixtures("unfilled")
def test_what_nobody_holds_is_lent_again_and_of_it_the_smallest_that_fits() -> None:
    space = Workspace()
    sizes = {"large": 3 * MEGABYTE, "small": 2 * MEGABYTE}
    buffers = {name: space.lend(nbytes, device=CPU) for name, nbytes in sizes.items()}
    addresses = {name: _address(buffer) for name, buffer in buffers.items()}
    buffers.clear()
    first = space.lend(MEGABYTE // 2 - 4, 1, dtype=torch.float32, device=CPU)
    second = space.lend(2 * MEGABYTE - 16, device=CPU)
    assert (_address(first), _address(second)) == (addresses["small"], addresses["large"])
    assert (first.shape, first.dtype) == ((MEGABYTE // 2 - 4, 1), torch.float32)
    assert (second.shape, second.dtype) == ((2 * MEGABYTE - 16,), torch.uint8)


@pytest.mark.usefixtures("unfilled")
def test_threads_never_share_a_buffer() -> None:
    space, clashes = Workspace(), []

    def work(mark: int) -> None:
        for _ in range(50):
            buffer = space.lend(MEGABYTE, device=CPU)
            buffer[:64] = mark
            if not (buffer[:64] == mark).all():
                clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda rows: rows,
    "a view": lambda rows: rows[7:9],
    "a view of another dtype": lambda rows: rows.view(torch.int32),
    "what was detached": lambda rows: rows.detach(),
    "numpy": lambda rows: rows.numpy(),
    "a graph that saved it": lambda rows: rows.square().sum() if rows.requires_grad_().numel() else None,
    "a parameter": lambda rows: torch.nn.Parameter(rows),
    "another process": lambda rows: rows.share_memory_().sum(),
}


@pytest.mark.usefixtures("unfilled")
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_holds_is_not_lent_again(holder: str) -> None:
    space = Workspace()
    rows = space.lend(MEGABYTE, dtype=torch.float32, device=CPU)
    held = HOLDERS[holder](rows)
    address = _address(rows)
    del rows
    assert _address(space.lend(MEGABYTE, dtype=torch.float32, device=CPU)) != address
    del held


@pytest.mark.usefixtures("unfilled")
def test_growing_sizes_replace_what_has_become_too_small() -> None:
    space = Workspace()
    for megabytes in (4, 5, 6):
        space.lend(megabytes * MEGABYTE, device=CPU)
    only = space.lend(4 * MEGABYTE, device=CPU)
    assert only.untyped_storage().nbytes() >= 6 * MEGABYTE  # nothing smaller is kept


@pytest.mark.usefixtures("unfilled")
def test_the_pool_holds_at_most_twice_what_was_in_use_at_one_time() -> None:
    """Sizes that never fit each other, one after the other: without a bound all of them would stay."""
    space, most = Workspace(), 0
    for megabytes, count in ((1, 24), (3, 9), (7, 4), (15, 2), (31, 1)):
        held = [space.lend(megabytes * MEGABYTE, device=CPU) for _ in range(count)]
        most = max(most, sum(each.untyped_storage().nbytes() for each in held))
        assert space.nbytes <= 2 * most
        del held
    before = space.nbytes
    assert most < before
    again = [space.lend(31 * MEGABYTE, device=CPU), space.lend(15 * MEGABYTE, device=CPU)]
    assert space.nbytes in (before, before + again[1].untyped_storage().nbytes())


@pytest.mark.usefixtures("unfilled")
def test_memory_that_nobody_needs_for_a_minute_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("moe_dispatch.backends.workspace.time.monotonic", lambda: now[0])
    space = Workspace()
    large, kept = (space.lend(megabytes * MEGABYTE, device=CPU) for megabytes in (9, 4))
    whole, of_large = space.nbytes, large.untyped_storage().nbytes()
    del large
    for seconds in (59, 2):  # the second call is the first look that finds it idle
        now[0] += seconds
        assert space.nbytes == whole
        space.lend(MEGABYTE // 2, device=CPU)  # small memory is not looked at
        small = space.lend(4 * MEGABYTE, device=CPU)
        whole = max(whole, space.nbytes)
        del small
    now[0] += 61
    space.lend(4 * MEGABYTE, device=CPU)
    assert space.nbytes == whole - of_large
    now[0] += 61
    del kept
    space.lend(4 * MEGABYTE, device=CPU)
    assert space.nbytes == whole - of_large, "what was in use is kept for a minute more"


def test_lent_memory_is_fresh_where_fresh_memory_is_filled() -> None:
    """As these tests have it, to see what is read but was never written."""
    space = Workspace()
    for _ in range(2):
        buffer = space.lend(MEGABYTE, dtype=torch.float32, device=CPU)
        assert buffer.isnan().all()
        buffer.zero_()
        del buffer


@pytest.mark.usefixtures("unfilled")
def test_grouped_rows_and_results_are_lent_in_turn() -> None:
    """Two steps of a layer in the same memory, a third while a result of the second is kept in other memory."""
    dispatcher = build_dispatcher(CONFIG)
    x, ids = torch.randn(512, 512), torch.randint(4, (512, 2))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        sent = dispatcher.dispatch(x, Routing(ids, torch.rand(512, 2)))
        return sent.rows, dispatcher.combine(sent.rows, sent)

    addresses = [{_address(each) for each in step()} for _ in range(3)]
    assert addresses[1] == addresses[2]
    kept = step()
    before = [each.clone() for each in kept]
    others = step()
    assert not {_address(each) for each in kept} & {_address(each) for each in others}
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
    dispatcher.close()


def _train() -> list[torch.Tensor]:
    """Losses and gradients of layers of two batches, with two calls in flight and one layer recomputed."""
    dispatcher, found = build_dispatcher(CONFIG), []
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(512, generator=generator).requires_grad_()

    def layer(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        sent = dispatcher.dispatch(x, routing)
        return x + dispatcher.combine(torch.tanh(sent.rows * scale), sent)

    for rows in (520, 700):
        x = torch.randn(rows, 512, generator=generator, requires_grad=True)
        routing = Routing(torch.rand(rows, 4, generator=generator).topk(2).indices, torch.full((rows, 2), 0.5))
        first, second = dispatcher.dispatch(x, routing), dispatcher.dispatch(2 * x, routing)
        y = dispatcher.combine(first.rows, first) + dispatcher.combine(second.rows.square(), second)
        y = checkpoint(layer, layer(y, routing), routing, use_reentrant=False)
        found += [y.detach().clone(), *torch.autograd.grad(y.square().mean(), (x, scale))]
    dispatcher.close()
    return found


def test_used_again_memory_changes_no_bit() -> None:
    fresh = _train()
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(_train(), fresh, strict=True))
