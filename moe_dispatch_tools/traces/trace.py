"""The routing trace: the frozen values ``Trace``, ``Call`` and ``Part``, how they are recorded, and their file.

Dimensions: ``T`` rows of a rank in the model, ``K`` top_k, ``E`` experts of the whole group, ``P`` its ranks.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, final

import torch
from pydantic import BaseModel, Field, Json, ValidationError
from torch import Tensor

from moe_dispatch import __version__
from moe_dispatch.backends.base import Constraints
from moe_dispatch.capabilities.replay import file
from moe_dispatch.communication import raise_alike
from moe_dispatch.config import DispatcherConfig
from moe_dispatch.dispatchers.channel import Channel
from moe_dispatch.errors import ConfigError, InputError, MoEDispatchError, PeerError, StateError, TraceError, shown
from moe_dispatch.layouts import Layout
from moe_dispatch.layouts.encoding import decode, encode
from moe_dispatch.permutation import merge_slots
from moe_dispatch.seams.plug_ins import require_plug_in
from moe_dispatch.types import Routing

if TYPE_CHECKING:
    from moe_dispatch.capabilities.observers.recorder import Note, Recorder
    from moe_dispatch.dispatchers import Dispatcher

# The index of a dtype is its code in a file, so new dtypes go to the end.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COLUMNS = ("ids", "weights", "calls", "shapes", "layouts")
_BROKEN = "Trace.load: {path} must have all parts of a trace, got {fault}. Record it again."
Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]  # without control characters


@final
class _Metadata(BaseModel):
    """The metadata of a file. Each value is a text, which is a name or JSON."""

    config: Json[dict[str, Any]]
    backend: Name
    ep_size: Annotated[int, Field(ge=1)]
    ranks_per_node: Json[Annotated[int, Field(ge=1)] | None]
    needs: Json[dict[str, bool | Count]]
    layers: Json[list[Name]]
    versions: Json[dict[str, str]]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The input of one rank to one dispatch; all tensors are on the CPU.

    Attributes:
        routing: Ids, int64 (T, K), and weights (T, K) from the model.
        layout: The layout of x.
        on_host: Whether the host knew the real rows. Eager mode then left out padding rows. Otherwise they were masked.
        shape: The shape of x.
        dtype: The dtype of x.
    """

    routing: Routing
    layout: Layout
    on_host: bool
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """Number of rows, T."""
        return len(self.routing.topk_ids)

    def sent_ids(self, *, cut: bool) -> Tensor:
        """Return the experts of the rows, int64. The id is -1 for no expert. A row has no expert twice.

        Args:
            cut: Whether to leave out padding rows, as a dispatcher does in eager mode if ``on_host``. The result is
                then (real rows, K). Otherwise padding rows have ids of -1, and the result is (T, K).
        """
        ids, valid_T = self.routing.topk_ids, self.layout.valid_T(self.num_rows)
        if valid_T is not None:
            ids = ids[valid_T] if cut else torch.where(valid_T.unsqueeze(1), ids, -1)
        return merge_slots(ids, torch.zeros(ids.shape), asks=True)[0]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One dispatch of all ranks.

    Attributes:
        layer: The index of the dispatcher. Dispatchers are in the order of their first dispatches.
        step: The number of recorded dispatches of this dispatcher before this one.
        parts: One part per rank, in the order of ``Trace.ranks``.
    """

    layer: int
    step: int
    parts: tuple[Part, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The routing of real steps. ``record`` writes a trace, and ``load`` reads it.

    Any reader of safetensors opens the file. Ids and weights are those of the model, before padding, cutting and
    merging. The file has these tensors for each rank r:

    - ``rank{r}.ids``, int32, and ``rank{r}.weights``: (rows of all calls, top_k). The id is -1 if a slot goes to no
      expert. Weights have the widest dtype of all calls.
    - ``rank{r}.calls``, int64 (calls, 7): layer, step, number of rows, number of dimensions of x, number of integers of
      the layout, dtypes (code of x plus 16 times that of the weights; 0 float32, 1 bfloat16, 2 float16, 3 float64), and
      1 if the host knew the lengths.
    - ``rank{r}.shapes`` and ``rank{r}.layouts``, int64: the shapes of x, and the layouts in the encoding of
      ``moe_dispatch/layouts/encoding.py``, one after another.

    Metadata are strings: ``moe_dispatch_trace``, the number of the format, 1; ``config``, ``needs``, ``layers`` and
    ``versions``, JSON; ``backend``, ``ep_size`` and ``ranks_per_node``.

    Attributes:
        config: The config of the dispatchers.
        backend_name: The name of the backend, never "auto".
        ep_size: The number of ranks, P.
        ranks: The ranks with a part in this trace: all P ranks, or one rank after an error.
        ranks_per_node: The number of consecutive ranks on a host.
        needs: The constraints of the backend on row counts in the recorded run.
        layers: The names of the dispatchers on rank ``ranks[0]``; "dispatcher 0" and so on for those without a name.
        calls: The calls, in the order of rank ``ranks[0]``.
        versions: The versions of moe_dispatch, torch and Python.
    """

    config: DispatcherConfig
    backend_name: str
    ep_size: int
    ranks: tuple[int, ...]
    ranks_per_node: int | None
    needs: Constraints
    layers: tuple[str, ...]
    calls: tuple[Call, ...]
    versions: dict[str, str]

    @staticmethod
    @contextmanager
    def record(dispatcher: Dispatcher, path: str | Path, *, steps: int = 100) -> Iterator[None]:
        """Record the routing of every dispatch inside a ``with`` block, in one file for all ranks.

        The first ``steps`` dispatches of every dispatcher with the same channel are recorded, that is, with the same
        config and group. Two kinds of dispatches are not recorded: dispatches inside a backward, where a checkpoint
        repeats earlier dispatches, and dispatches with ``again=sent``, which use an earlier routing. At the end of the
        block, rank 0 gathers all parts and writes the file. If the block raises, each rank writes its own part, such as
        ``run.rank3.safetensors``.

        Args:
            dispatcher: An open dispatcher.
            path: The file. Its directory is created. An existing file is replaced at the end of the block.
            steps: The largest number of dispatches to record. Each one needs 8 to 12 bytes of memory per row and slot.

        Raises:
            TraceError: safetensors is missing, or the path cannot be written. The other ranks raise PeerError.
            StateError: The dispatcher is closed, or another block is recording its channel. A dispatch inside the block
                raises it in a CUDA graph, ``torch.compile`` or selective checkpointing.

        Cost: The start and the end of the block are collective. Inside the block, each dispatch copies ids, weights and
        lengths to the host without a host sync. A dispatch outside of a recording has no extra cost.
        """
        require_plug_in("moe_dispatch.capabilities.observers", "Trace.record needs it. Record no trace")
        from moe_dispatch.capabilities.observers.recorder import Recorder  # noqa: PLC0415 - other commands never need it

        channel, path = dispatcher._channel, Path(path)  # raises if closed
        recorder = Recorder(steps)
        raise_alike(channel.control, _problem(channel, recorder, path), label="trace")
        channel.observers.append(recorder)
        try:
            yield
        except BaseException as error:
            _save_own_part(channel, recorder, path, error)
            raise
        finally:
            channel.observers.remove(recorder)
        try:
            _save(channel, recorder, path)
        except PeerError:
            raise
        except Exception as error:
            _save_own_part(channel, recorder, path, error)
            raise

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace file.

        Raises:
            TraceError: The file is missing, incomplete or not a trace of this format, or safetensors is missing.
        """
        tensors, metadata = file.read(Path(path))
        try:
            told = _Metadata.model_validate(metadata)
            ranks = sorted({int(name.partition(".")[0].removeprefix("rank")) for name in tensors})
            parts = [_parts({name: tensors[f"rank{rank}.{name}"] for name in _COLUMNS}) for rank in ranks]
            known = {item.name for item in fields(Constraints)}
            needs: dict[str, Any] = {name: value for name, value in told.needs.items() if name in known}
            trace = Trace(
                config=config_from(told.config, told.versions, where=f"Trace.load: the config of {path}"),
                backend_name=told.backend,
                ep_size=told.ep_size,
                ranks=tuple(ranks),
                ranks_per_node=told.ranks_per_node,
                needs=Constraints(**needs),  # without those of other versions
                layers=tuple(told.layers),
                calls=tuple(  # those that every rank has, because an interrupted rank may lack the last ones
                    Call(layer=layer, step=step, parts=tuple(of_rank[layer, step] for of_rank in parts))
                    for layer, step in parts[0]
                    if all((layer, step) in of_rank for of_rank in parts)
                ),
                versions=told.versions,
            )
            if (fault := _fault(trace, parts)) is not None:
                raise TraceError(_BROKEN.format(path=path, fault=fault))
            return trace
        except TraceError:
            raise
        except ValidationError as error:
            raise TraceError(_BROKEN.format(path=path, fault=first_fault(error))) from error
        except Exception as error:  # damaged numbers raise many kinds of errors in torch and in layouts
            raise TraceError(_BROKEN.format(path=path, fault=f"{type(error).__name__}: {error}")) from error

    @property
    def steps(self) -> int:
        """The largest number of dispatches of any dispatcher."""
        return max((call.step + 1 for call in self.calls), default=0)

    @property
    def max_rows(self) -> int:
        """The largest number of rows of any rank in any dispatch, padding included."""
        return max((part.num_rows for call in self.calls for part in call.parts), default=0)

    def cuts(self, part: Part) -> bool:
        """Return whether the dispatcher left out the padding rows of a part, instead of masking them."""
        return part.on_host and not self.config.graph_safe

    def tokens_per_expert(self) -> Tensor:
        """Return the number of rows that went to each expert in each call, without padding: int64 (calls, E)."""
        counts = torch.zeros(len(self.calls), self.config.num_experts, dtype=torch.int64)
        for row, call in zip(counts, self.calls, strict=True):
            for part in call.parts:
                ids = part.sent_ids(cut=True)
                row += torch.bincount(ids[ids >= 0], minlength=len(row))[: len(row)]
        return counts

    @staticmethod
    def load_whole(path: str | Path, where: str) -> Trace:
        """Read a trace that has all ranks and at least one dispatch, with ids in -1..E-1.

        Raises:
            TraceError: The trace cannot be read, or is not such a trace. The error begins with ``where``.
        """
        trace = Trace.load(path)
        if len(trace.ranks) != trace.ep_size:
            raise TraceError(
                f"{where}: {path} must hold all {trace.ep_size} ranks, got rank {', '.join(map(str, trace.ranks))}. "
                "Record a run that ends without an error."
            )
        if not trace.calls:
            raise TraceError(f"{where}: {path} must hold a dispatch, got none. Record at least one step.")
        last = trace.config.num_experts - 1
        for call in trace.calls:
            for rank, part in enumerate(call.parts):
                ids, valid_T = part.routing.topk_ids, part.layout.valid_T(part.num_rows)
                ids = ids if valid_T is None else ids[valid_T]
                if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) <= last:
                    raise TraceError(
                        f"{where}: topk_ids must lie in -1..{last}, got {int(ids.min())}..{int(ids.max())} on rank "
                        f"{rank} in step {call.step} of {trace.layers[call.layer]}. Check the router."
                    )
        return trace

    def check(self, config: DispatcherConfig, *, ep_size: int) -> None:
        """Raise an error if the routing does not fit a config.

        Args:
            config: The config. Its backend, hidden size, padding and mode may differ from the recorded run.
            ep_size: The number of ranks of the new run.

        Raises:
            TraceError: A field does not fit. The error names it with both values.
        """
        for field, recorded, wanted in (
            ("num_experts", self.config.num_experts, config.num_experts),
            ("top_k", self.config.top_k, config.top_k),
            ("ep_size", self.ep_size, ep_size),
        ):
            if recorded != wanted:
                raise TraceError(
                    f"Trace.check: {field} must be {recorded}, as in the trace, got {wanted}. Use a config with "
                    f"{recorded}, or record a trace with this config."
                )
        if config.max_tokens_per_rank is not None and self.max_rows > config.max_tokens_per_rank:
            raise TraceError(
                f"Trace.check: max_tokens_per_rank must be at least {self.max_rows}, the rows of the trace, got "
                f"{config.max_tokens_per_rank}. Raise it."
            )


def _fault(trace: Trace, parts: Sequence[Mapping[tuple[int, int], Part]]) -> str | None:
    """Return what a reader of a trace could not use, or None.

    Args:
        trace: The trace.
        parts: The parts of each of its ranks, by dispatcher and step.
    """
    config, size = trace.config, trace.ep_size
    if config.num_experts % size:
        return f"num_experts ({config.num_experts}) that ep_size ({size}) does not divide"
    if trace.ranks_per_node is not None and size % trace.ranks_per_node:
        return f"ranks_per_node ({trace.ranks_per_node}) that does not divide ep_size ({size})"
    if not {*trace.ranks} <= {*range(size)}:
        return f"rank {max(trace.ranks, key=abs)} of {size} ranks"
    for name, value in asdict(trace.needs).items():
        if name.endswith("_multiple") and not value:
            return f"needs.{name} of 0"
    for of_rank in parts:
        steps = Counter(layer for layer, _ in of_rank)
        if {*of_rank} != {(layer, step) for layer, number in steps.items() for step in range(number)}:
            return "dispatches of a layer that are not numbered 0, 1, 2 and so on"
    if (found := {call.layer for call in trace.calls}) != {*range(len(trace.layers))}:
        return f"dispatches of {sorted(found)} for the layers {shown([*trace.layers])}"
    for (layer, step), part in ((at, part) for of_rank in parts for at, part in of_rank.items()):
        *places, hidden = part.shape or (0,)
        ids, weights = (tuple(of.shape) for of in (part.routing.topk_ids, part.routing.topk_weights))
        if ids != (math.prod(places), config.top_k) or weights != ids or hidden != config.hidden_size:
            return (
                f"ids {ids} and weights {weights} for x {tuple(part.shape)} in step {step} of dispatcher {layer}, with "
                f"top_k {config.top_k} and hidden_size {config.hidden_size}"
            )
        part.layout.check(part.num_rows, values=True)  # raises if it does not describe these rows
    return None


def first_fault(error: ValidationError) -> str:
    """Say where a value is wrong, and why."""
    fault = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'text'}: {fault['msg']}"


def versions_here() -> dict[str, str]:
    """Return the versions of moe_dispatch, torch and Python."""
    return {"moe_dispatch": __version__, "torch": torch.__version__, "python": platform.python_version()}


def config_from(fields: Mapping[str, Any], versions: Mapping[str, str], *, where: str) -> DispatcherConfig:
    """Make the config of a recording from its fields.

    Raises:
        TraceError: This version does not know a field or the backend. The error begins with ``where``, and names the
            version that made the recording.
    """
    try:
        return DispatcherConfig.load(environment={}, **fields)
    except ConfigError as error:
        raise TraceError(
            f"{where} must be valid in this version, got a config of moe_dispatch {versions.get('moe_dispatch')}: "
            f"{error} Install that version, and the backend of the config."
        ) from error


def _problem(channel: Channel, recorder: Recorder, path: Path) -> MoEDispatchError | None:
    """Return why this rank cannot record; None if it can."""
    try:
        file.safetensors_of("Trace.record")
        if channel.control.rank == 0:
            file.check_writable(path)
    except MoEDispatchError as error:
        return error
    if recorder.records(channel):
        return StateError(
            "Trace.record: only one block must record a channel at a time, got another block that is still open. "
            "Leave that block first. It records all dispatchers of this config and group."
        )
    if recorder.steps < 1:
        return InputError(
            f"Trace.record: steps must be 1 or more, got {recorder.steps}. Give the number of steps to record."
        )
    return None


def _save(channel: Channel, recorder: Recorder, path: Path) -> None:
    """Gather the parts of all ranks on rank 0, which writes the file. Collective."""
    everyone = channel.control.gather_bytes(file.pack(_own_columns(channel, recorder)), label="trace")
    problem = None
    if everyone is not None:
        parts = enumerate(map(file.unpack, everyone))
        tensors = {f"rank{rank}.{name}": tensor for rank, part in parts for name, tensor in part.items()}
        try:
            file.write(path, tensors, _metadata(channel, recorder.notes))
        except MoEDispatchError as error:
            problem = error
    raise_alike(channel.control, problem, label="trace")


def _own_columns(channel: Channel, recorder: Recorder) -> dict[str, Tensor]:
    for device in {note.device for note in recorder.notes if note.device.type != "cpu"}:
        torch.accelerator.synchronize(device)  # copies to the host may still be under way
    return _columns(recorder.notes, channel.config.top_k)


def _save_own_part(channel: Channel, recorder: Recorder, path: Path, error: BaseException) -> None:
    """Write the part of this rank without its peers, which may have failed. Add a note with the path to the error."""
    rank = channel.communicator.rank
    own = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    try:
        columns = {f"rank{rank}.{name}": tensor for name, tensor in _own_columns(channel, recorder).items()}
        own.parent.mkdir(parents=True, exist_ok=True)
        file.write(own, columns, _metadata(channel, recorder.notes))
    except Exception as failure:  # the first error is more important
        error.add_note(f"The trace was not written: {failure}")
    else:
        error.add_note(f"The part of this rank is in {own}.")


class _Row(NamedTuple):
    """One call of one rank: its dispatcher and step, and its number of entries in the other tensors."""

    layer: int
    step: int
    rows: int
    dims: int
    layout_entries: int
    dtypes: int  # the code of the dtype of x, plus 16 times the code of the dtype of the weights
    on_host: int


def _columns(notes: Sequence[Note], top_k: int) -> dict[str, Tensor]:
    """Convert the notes of one rank to tensors. Their devices must be synchronised."""
    layers: dict[Hashable, int] = {}
    steps, table = Counter[int](), list[_Row]()
    shapes, layouts = list[int](), list[int]()
    for note in notes:
        layer = layers.setdefault(note.owner, len(layers))
        encoded = encode(note.layout()).tolist()
        table.append(
            _Row(
                layer=layer,
                step=steps[layer],
                rows=len(note.ids_TK),
                dims=len(note.shape),
                layout_entries=len(encoded),
                dtypes=_DTYPES.index(note.dtype) + 16 * _DTYPES.index(note.weights_TK.dtype),
                on_host=int(note.on_host),
            )
        )
        steps[layer] += 1
        shapes += note.shape
        layouts += encoded
    widest = reduce(torch.promote_types, (note.weights_TK.dtype for note in notes), torch.bfloat16)
    return {
        "ids": torch.cat([torch.empty(0, top_k, dtype=torch.int32), *(note.ids_TK for note in notes)]),
        "weights": torch.cat([torch.empty(0, top_k, dtype=widest), *(note.weights_TK.to(widest) for note in notes)]),
        "calls": torch.tensor(table, dtype=torch.int64).view(-1, len(_Row._fields)),
        "shapes": torch.tensor(shapes, dtype=torch.int64),
        "layouts": torch.tensor(layouts, dtype=torch.int64),
    }


def _metadata(channel: Channel, notes: Sequence[Note]) -> dict[str, str]:
    """Return the metadata of a trace. Each value is a name or JSON."""
    names: dict[Hashable, str] = {}
    for note in notes:
        names.setdefault(note.owner, note.name or f"dispatcher {len(names)}")
    needs = {name: value for name, value in asdict(channel.needs).items() if isinstance(value, int)}
    return {
        "config": channel.config.model_dump_json(),
        "backend": channel.backend_name,
        "ep_size": str(channel.communicator.size),
        "ranks_per_node": json.dumps(channel.shape.ranks_per_node),
        "needs": json.dumps(needs),
        "layers": json.dumps(list(names.values())),
        "versions": json.dumps(versions_here()),
    }


def _parts(columns: dict[str, Tensor]) -> dict[tuple[int, int], Part]:
    """Return the parts of one rank by dispatcher and step."""
    rows = [_Row(*values) for values in columns["calls"].tolist()]
    if any(min(row) < 0 for row in rows):
        raise ValueError(f"a negative number in {next(row for row in rows if min(row) < 0)}")
    lengths = [row.rows for row in rows]
    ids, weights = columns["ids"].long().split(lengths), columns["weights"].split(lengths)
    shapes = columns["shapes"].split([row.dims for row in rows])
    layouts = columns["layouts"].split([row.layout_entries for row in rows])
    return {
        (row.layer, row.step): Part(
            routing=Routing(ids[i], weights[i].to(_DTYPES[row.dtypes // 16])),
            layout=decode(layouts[i]),
            on_host=bool(row.on_host),
            shape=torch.Size(shapes[i].tolist()),
            dtype=_DTYPES[row.dtypes % 16],
        )
        for i, row in enumerate(rows)
    }
