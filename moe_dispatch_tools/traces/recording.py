"""Record a trace: the start and the end of the ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_dispatch.communication import raise_alike
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.dispatchers.recorder import Recorder
from moe_dispatch.errors import InputError, MoEDispatchError, PeerError, StateError
from moe_dispatch.replay import file
from moe_dispatch_tools.traces.columns import columns_of, metadata_of

if TYPE_CHECKING:
    from moe_dispatch.dispatchers import Dispatcher


@contextmanager
def record(dispatcher: Dispatcher, path: Path, steps: int) -> Iterator[None]:
    """Do the work of ``Trace.record``."""
    channel = dispatcher._channel  # raises if closed
    raise_alike(channel.control, _problem(channel, path, steps), label="trace")
    recorder = channel.recorder = Recorder(steps)
    try:
        yield
    except BaseException as error:
        _save_own_part(channel, recorder, path, error)
        raise
    finally:
        channel.recorder = None
    try:
        _save(channel, recorder, path)
    except PeerError:
        raise
    except Exception as error:
        _save_own_part(channel, recorder, path, error)
        raise


def _problem(channel: Channel, path: Path, steps: int) -> MoEDispatchError | None:
    """Return why this rank cannot record; None if it can."""
    try:
        file.safetensors_of("Trace.record")
        if channel.control.rank == 0:
            file.check_writable(path)
    except MoEDispatchError as error:
        return error
    if channel.recorder is not None:
        return StateError(
            "Trace.record: only one block must record a channel at a time, got another block that is still open. "
            "Leave that block first. It records all dispatchers of this config and group."
        )
    if steps < 1:
        return InputError(f"Trace.record: steps must be 1 or more, got {steps}. Give the number of steps to record.")
    return None


def _save(channel: Channel, recorder: Recorder, path: Path) -> None:
    """Gather the parts of all ranks on rank 0, which writes the file. Collective."""
    everyone = channel.control.gather_bytes(file.pack(_own_columns(channel, recorder)), label="trace")
    problem = None
    if everyone is not None:
        tensors = {
            f"rank{rank}.{name}": tensor for rank, part in enumerate(everyone) for name, tensor in _unpacked(part)
        }
        try:
            file.write(path, tensors, metadata_of(channel, recorder.notes))
        except MoEDispatchError as error:
            problem = error
    raise_alike(channel.control, problem, label="trace")


def _unpacked(part: Tensor) -> list[tuple[str, Tensor]]:
    return list(file.unpack(part).items())


def _own_columns(channel: Channel, recorder: Recorder) -> dict[str, Tensor]:
    for device in {note.device for note in recorder.notes if note.device.type != "cpu"}:
        torch.accelerator.synchronize(device)  # copies to the host may still be under way
    return columns_of(recorder.notes, channel.config.top_k)


def _save_own_part(channel: Channel, recorder: Recorder, path: Path, error: BaseException) -> None:
    """Write the part of this rank without its peers, which may have failed. Add a note with the path to the error."""
    rank = channel.communicator.rank
    own = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    try:
        columns = {f"rank{rank}.{name}": tensor for name, tensor in _own_columns(channel, recorder).items()}
        own.parent.mkdir(parents=True, exist_ok=True)
        file.write(own, columns, metadata_of(channel, recorder.notes))
    except Exception as failure:  # the first error is more important
        error.add_note(f"The trace was not written: {failure}")
    else:
        error.add_note(f"The part of this rank is in {own}.")
