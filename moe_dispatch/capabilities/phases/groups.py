"""Find the process group of a channel again, which may have been destroyed and made anew in the meantime."""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from moe_dispatch.communication import Communicator, JobGroup, real_group
from moe_dispatch.errors import StateError


class KnownGroup:
    """The group of a communicator before it lets go of it.

    A group that torch.distributed knows is not kept alive, so it can be destroyed. Others belong to nobody else: a
    wrapper stays the same when the group inside is made anew, and a group without a name could not be found again.
    """

    def __init__(self, link: Communicator) -> None:
        self._link, self._of_job = link, link.of_job
        self._kept = link.group if link.of_job is None else None
        self._known = None if link.group is None or link.of_job is None else weakref.ref(link.group)

    def find(self) -> None:
        """Let the communicator hold the group as it is now.

        Raises:
            StateError: It is not there, or has another rank or size than before.
        """
        link = self._link
        if link.size == 1 and self._of_job is None and self._kept is None:
            return
        group = self._kept if self._of_job is None else self._found(self._of_job)
        if group is None:
            assert self._of_job is not None
            raise StateError(
                f"Dispatcher: the group {self._of_job.name!r} of ranks {list(self._of_job.ranks)} must be there again "
                "after release(), got none with this name and these ranks. Make it before the next dispatch, or pass "
                "the new one to reopen(group)."
            )
        hold(link, group)

    def _found(self, of_job: JobGroup) -> dist.ProcessGroup | None:
        before = None if self._known is None else self._known()
        if before is not None and JobGroup.of(before) is not None:
            return before
        candidates = [dist.group.WORLD] if of_job.is_default else []
        with suppress(KeyError, ValueError, RuntimeError):
            candidates.append(_resolve_process_group(dist.distributed_c10d.GroupName(of_job.name)))
        for group in candidates:
            found = None if group is None else JobGroup.of(real_group(group))
            if found is not None and found.ranks == of_job.ranks:
                return group
        return None


def hold(link: Communicator, group: dist.ProcessGroup) -> None:
    """Let a communicator use a group.

    Raises:
        StateError: This rank has another number in it, or it has another size.
    """
    inside = real_group(group)
    if (rank := (inside.rank(), inside.size())) != (link.rank, link.size):
        raise StateError(
            "Dispatcher: after release() the group must have the rank and the size that the dispatcher was built with, "
            f"{link.rank} of {link.size}, got {rank[0]} of {rank[1]}. Close the dispatcher and build another."
        )
    link.hold(group)
