"""Unequal numbers of micro-batches: a rank that is done goes on with empty ones until all ranks are done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from moe_dispatch.communication import Communicator, raise_alike
from moe_dispatch.dispatchers.channel import Group, process_group_of

Batch = TypeVar("Batch")


def even_rounds(batches: Iterable[Batch], empty: Batch, group: Group) -> Iterator[Batch]:
    """Yield the micro-batches of this rank, and then empty ones until every rank is done. Collective.

    So all ranks make the same number of rounds, and each round may contain anything that ranks do together: calls of a
    dispatcher in every mode, and the collectives of FSDP and DDP. A rank without a token still runs its experts for the
    others. Leave the loop in the same round on every rank.

    Args:
        batches: The micro-batches of this rank: any number, also none.
        empty: A micro-batch without tokens, such as ``x[:0]``. If the model cannot take one, a micro-batch of one token
            with ids -1, whose loss does not count.
        group: All ranks that must run in step, as a process group or a one-dimensional DeviceMesh. That is the
            expert-parallel group; with FSDP or DDP around it, all of their ranks. None for one rank.

    Yields:
        The next micro-batch, or ``empty`` itself.

    Raises:
        PeerError: ``batches`` raised an error on another rank. The rank itself raises its own error.

    Cost: before each round and once at the end, one all-reduce of four integers; with a host sync on a GPU-only group.
    """
    control, own, is_done = Communicator(process_group_of(group, "even_rounds")), iter(batches), False
    while True:
        batch, problem = empty, None
        if not is_done:
            try:
                batch = next(own)
            except StopIteration:
                is_done = True
            except Exception as error:
                problem = error
        (goes_on,) = raise_alike(control, problem, values=[int(not is_done)], label="rounds")
        if not goes_on:
            return
        yield batch
