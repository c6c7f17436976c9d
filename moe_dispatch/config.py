"""The configuration of a Dispatcher: the shape of the MoE layer, and the backend that moves its tokens."""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from moe_dispatch.backends.base import BackendOptions, PermutationName
from moe_dispatch.backends.capacity import GraphSafeOptions
from moe_dispatch.backends.registry import (
    AUTO,
    BackendName,
    backends_with,
    choose_backend,
    load_backend,
    parse_backend,
)
from moe_dispatch.backends.wire import WireDtype, WireOptions, load_wire_options
from moe_dispatch.communication import canonical_json
from moe_dispatch.errors import ConfigError, did_you_mean, shown
from moe_dispatch.seams.options import (
    FROZEN,
    SHORT,
    Count,
    OptionMapping,
    Options,
    name_in,
    plain,
    spelled_out,
    with_option,
)
from moe_dispatch.seams.plug_ins import load_plug_in, require_plug_in
from moe_dispatch.seams.slots import BalanceName, SlotOptions, load_slot_options
from moe_dispatch.versions import how_to_install, newer_format

if TYPE_CHECKING:
    from moe_dispatch.steps.options import ChunkOptions

logger = logging.getLogger("moe_dispatch")

ENVIRONMENT_PREFIX = "MOE_DISPATCH_"
# Ends of the variables that Kubernetes sets for services whose names begin with moe-dispatch.
_OF_KUBERNETES = re.compile(r"(^|.*_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_[A-Z]+(_[A-Z]+)?)?)")
# Quantised grouped GEMMs need a row count for each expert that is a multiple of these numbers. mxfp8: the GEMM of the
# weight gradient sums over rows in blocks of 32. nvfp4: the fused transform of transformer-engine 2.12 and later works
# on 128 rows at a time.
PAD_MULTIPLES = {"bf16": 1, "fp8": 16, "mxfp8": 32, "nvfp4": 128}

FORMAT = 1
"""The format of config files, which may hold it under the key ``format``."""

# Seconds: the watchdog beats five times in a time limit, and torch counts milliseconds in 64 bits.
SHORTEST_WATCHDOG = 0.1
LONGEST_WATCHDOG = 1e6

RowCounts = Literal["agree", "assume", "check", "static"]


# Neither config class is @final: jsonargparse refuses an instance of a final class as a default.
class ConstraintOverrides(BaseModel):
    """Numbers that replace the constraints of the backend. None keeps the backend's own number.

    Args:
        row_multiple: The rows of a rank are padded to a multiple of this.
        max_rows: Largest number of rows of a rank, after padding.
        hidden_multiple: ``hidden_size`` must be a multiple of this.
        max_hidden: Largest ``hidden_size``.
        max_top_k: Largest ``top_k``.
        group_sizes: Sizes that the expert-parallel group may have.
        local_experts_multiple: The number of experts on each rank must be a multiple of this.
        max_local_experts: Largest number of experts on each rank.
    """

    model_config = FROZEN

    row_multiple: Count | None = None
    max_rows: Count | None = None
    hidden_multiple: Count | None = None
    max_hidden: Count | None = None
    max_top_k: Count | None = None
    group_sizes: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    local_experts_multiple: Count | None = None
    max_local_experts: Count | None = None

    def given(self) -> dict[str, Any]:
        """Return the numbers that are set, with the names and types of ``Constraints``."""
        numbers = self.model_dump(exclude_none=True, exclude={"group_sizes"})
        return numbers if self.group_sizes is None else {**numbers, "group_sizes": frozenset(self.group_sizes)}


class DispatcherConfig(BaseModel):
    """Everything that a Dispatcher needs to know, except its process group.

    A config is frozen. Types are strict: "8" is not an int. Unknown fields are refused.

    A field that is not passed has the value of its variable, ``MOE_DISPATCH_BACKEND`` for ``backend``, or else its
    default; ``load`` explains the variables, and ``load(environment={}, ...)`` reads none. If a field is passed and its
    variable is set to another value, a warning says so, once.

    ``backend``, ``balance``, ``wire``, ``chunks`` and ``graph_safe`` are each a short value, or a mapping with options:
    ``balance="exact"`` or ``balance={"name": "exact", "bound": 1.05}``. The field keeps what was written. The options
    class that it is parsed into documents the options, and has their defaults.

    Two configs are equal if they mean the same: ``"alltoall"`` equals ``{"name": "alltoall"}``, ``"fp8"`` equals
    ``16``, and ``row_counts=None`` equals the policy that it stands for.

    Args:
        backend: Name of the backend, or a mapping with its ``name`` and its options. "auto" is the backend of
            ``MOE_DISPATCH_BACKEND``, and else chooses one and logs the choice.
        num_experts: E, the number of experts in the whole expert-parallel group.
        top_k: K, the number of experts that a row is routed to.
        hidden_size: D, the number of columns of a row.
        balance: Name of a planner that places experts anew in every dispatch, and copies busy ones to spare expert
            slots; or a mapping with its ``name`` and its options. "exact" (options: ``ExactOptions``) gives every rank
            the same number of rows. "least_loaded", "eplb" and planners of other packages have the options
            ``spare_experts_per_rank``, 1 by default, and their own. "manual" has such slots too, but placements change
            only by ``Dispatcher.place``. None: there are no spare slots.
        pad_multiple: The rows of each expert are padded to a multiple of this number. "bf16" stands for 1, "fp8" for
            16, "mxfp8" for 32, "nvfp4" for 128.
        weights: Who multiplies the outputs of experts by the routing weights: "combine", or "experts", which then read
            ``sent.weights``.
        wire: Dtype in which rows travel between ranks, "bfloat16", "float8_e4m3fn" or "mxfp8"; or a mapping with this
            ``dtype`` and further options, as in ``QuantisedOptions``. None sends rows in their own dtype.
        deliver: Form in which experts get rows. "rows" copies what arrived to its experts at once. "packets" leaves it
            as it arrived, each row once, until ``sent.rows`` are read; ``first_mm`` of ``moe_dispatch.lean`` saves it
            in this form for the backward. A backend whose library delivers rows of experts does so in any case.
        row_counts: How ranks learn each other's row counts, if the backend needs equal counts or the largest count, or
            with ``chunks``, which need the largest count on every backend.
            "agree": by an all-reduce (MAX) and one host sync. "assume": the caller promises equal counts. "check": like
            "assume", but ranks compare their counts and raise if they differ. "static": every rank is padded to
            ``max_tokens_per_rank``. None: "agree", or "static" in graph-safe mode.
        max_tokens_per_rank: Largest number of rows that a rank passes to dispatch.
        chunks: Largest number of rows that a rank passes to one dispatch. A layer call with more rows runs in chunks.
            Or a mapping with these ``tokens`` and further options, as in ``ChunkOptions``. None: one dispatch.
        infer_layout: Whether a call without a layout takes the layout from ``layout_of(x)``. False refuses such a call.
            Set False for packed data: a rank that did not receive the layout would otherwise treat its rows as a plain
            batch.
        graph_safe: Whether dispatch and combine, forward and backward, do without host syncs and without shapes that
            depend on data. Or a mapping with the room for rows, and what happens to others, as in
            ``GraphSafeOptions``. True is room for every possible routing.
        permutation: Implementation of the reorder on one rank: "torch" or "triton" (kernels of this package). A named
            one is used or refused. "auto" is "triton" on CUDA devices where Triton works, and "torch" elsewhere.
            Rows in 8 bits are quantised and widened by kernels wherever "auto" is "triton".
        device: "cpu" or "cuda" refuses tensors on other devices. None accepts all devices.
        watchdog: Time limit of each collective of this library, in seconds. Where a collective fails or takes longer,
            every waiting rank raises a ``LostPeerError`` that says where each rank is. None: only the time limit of the
            group holds.
        debug: Whether every plan and dispatch checks ids, weights and lengths, and tells all ranks if one refuses. This
            costs host syncs.
        constraints: Numbers that replace the constraints of the backend.

    Raises:
        ConfigError: A field is unknown or wrong, or two fields contradict each other. The text has every problem, with
            the name of its field.
    """

    model_config = FROZEN

    backend: BackendName | str | OptionMapping = "auto"
    num_experts: Count
    top_k: Count
    hidden_size: Count
    balance: BalanceName | str | OptionMapping | None = None
    pad_multiple: Count | Literal["bf16", "fp8", "mxfp8", "nvfp4"] = 1
    weights: Literal["combine", "experts"] = "combine"
    wire: WireDtype | str | OptionMapping | None = None
    deliver: Literal["rows", "packets"] = "rows"
    row_counts: RowCounts | None = None
    max_tokens_per_rank: Count | None = None
    chunks: Count | OptionMapping | None = None
    infer_layout: bool = True
    graph_safe: bool | OptionMapping = False
    permutation: PermutationName = "auto"
    device: Literal["cpu", "cuda"] | None = None
    watchdog: Annotated[float, Field(ge=SHORTEST_WATCHDOG, le=LONGEST_WATCHDOG)] | None = None
    debug: bool = False
    constraints: ConstraintOverrides = ConstraintOverrides()

    if not TYPE_CHECKING:  # type checkers and editors know the signature that pydantic makes from the fields

        def __init__(self, /, **fields: Any) -> None:
            complete, variables = with_variables({}, os.environ, fields, "DispatcherConfig")
            with _naming("DispatcherConfig", variables and ["keywords", *variables]):
                self._validate(complete)

        def __setattr__(self, name: str, value: Any) -> None:
            raise ConfigError(f"DispatcherConfig: a config is frozen. Make a copy with config.replace({name}=...).")

    def _validate(self, fields: Mapping[str, Any]) -> None:
        fields = {name: plain(value) for name, value in fields.items()}
        try:
            BaseModel.__init__(self, **fields)
        except ValidationError as error:
            raise ConfigError(_problems(error, fields)) from error

    @classmethod
    def _exactly(cls, /, **fields: Any) -> DispatcherConfig:
        """Make a config of these fields without a look at the environment."""
        config = cls.__new__(cls)
        config._validate(fields)
        return config

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, DispatcherConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @field_validator(*SHORT)
    @classmethod
    def _options_are_known(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if told := _problem_options(info.field_name, value):
            raise ConfigError(f"{info.field_name}: options must be a mapping, got {shown(value)}.{told}")
        _parsed(info.field_name, value)
        return value == {} or copy.deepcopy(value)  # ``graph_safe={}`` is True; a caller may change a mapping later

    @model_validator(mode="after")
    def _fields_agree(self) -> DispatcherConfig:
        static = self.row_counts_policy == "static"
        bounds = ", ".join(f"{name}={bound!r}" for name, bound in self.backend_bounds.items() if bound != "worst")
        for broken, rule in (
            (self.top_k > self.num_experts, f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})."),
            (
                static and self.max_tokens_per_rank is None,
                'graph_safe and row_counts="static" need max_tokens_per_rank.',
            ),
            (
                self.deliver == "packets" and self.wire_options is not None and self.wire_options.delivers_quantised,
                'deliver="packets" and wire.deliver="quantised" exclude each other. Leave one of them out.',
            ),
            (bounds and not self.graph_safe, f"{bounds} needs graph_safe=True. Otherwise buffers follow the routing."),
        ):
            if broken:
                raise ConfigError(rule)
        if self.deliver == "packets":
            require_plug_in("moe_dispatch.capabilities.lean", 'deliver="packets" needs it. Leave that out')
        if self.watchdog is not None:
            require_plug_in("moe_dispatch.capabilities.observers", "watchdog needs it. Leave that out")
        for options in self._options.values():
            if options is not None:
                options.check(self)
        return self

    @cached_property
    def _options(self) -> dict[str, Any]:
        """By field, the options that it was parsed into; None for a field that is off."""
        return {field: _parsed(field, getattr(self, field)) for field in SHORT}

    @cached_property
    def backend_options(self) -> BackendOptions | None:
        """Options of the backend, parsed from ``backend``; None for "auto"."""
        return self._options["backend"]  # type: ignore[no-any-return]

    def options_for(self, ep_size: int) -> BackendOptions:
        """Return the options of the backend; for "auto", the backend that it chooses for ``ep_size`` ranks."""
        return choose_backend(ep_size) if self.backend_options is None else self.backend_options

    @property
    def backend_name(self) -> str:
        """Name of the backend, or "auto"."""
        return AUTO if self.backend_options is None else self.backend_options.name

    @property
    def backend_bounds(self) -> dict[str, float | Literal["worst"]]:
        """Options of the backend that limit the rows of a graph-safe dispatch, by path; "worst" is no limit."""
        bounds = {} if self.backend_options is None else self.backend_options.capacity_bounds
        return {f"backend.{name}": bound for name, bound in bounds.items()}

    @cached_property
    def slot_options(self) -> SlotOptions | None:
        """Options of the expert slots, parsed from ``balance``; None if every rank holds its own experts only."""
        return self._options["balance"]  # type: ignore[no-any-return]

    @cached_property
    def wire_options(self) -> WireOptions | None:
        """Options of the wire, parsed from ``wire``; None if rows travel in their own dtype."""
        return self._options["wire"]  # type: ignore[no-any-return]

    @cached_property
    def chunk_options(self) -> ChunkOptions | None:
        """Options of chunks, parsed from ``chunks``; None if a layer call is one dispatch."""
        return self._options["chunks"]  # type: ignore[no-any-return]

    @cached_property
    def graph_safe_options(self) -> GraphSafeOptions | None:
        """Options of graph-safe mode, parsed from ``graph_safe``; None in eager mode."""
        return self._options["graph_safe"]  # type: ignore[no-any-return]

    @property
    def plans_placements(self) -> bool:
        """Whether each dispatch plans a placement of experts. If not, only ``Dispatcher.place`` changes placements."""
        return self.slot_options is not None and self.slot_options.plans

    def spare_slots(self, ep_size: int) -> int:
        """Return the number of spare expert slots of each of ``ep_size`` ranks."""
        return 0 if self.slot_options is None else self.slot_options.spare_slots(self, ep_size)

    def num_chunks(self, rows: int) -> int:
        """Return the number of dispatches in which a layer call sends ``rows`` rows of a rank."""
        return 1 if self.chunk_options is None else max(1, -(-rows // self.chunk_options.tokens))

    @property
    def max_rows_per_dispatch(self) -> int | None:
        """Largest number of rows that a rank passes to one dispatch; None without a limit."""
        tokens = None if self.chunk_options is None else self.chunk_options.tokens
        return min(filter(None, (self.max_tokens_per_rank, tokens)), default=None)

    def balance_is_proved(self, ep_size: int) -> bool:
        """Return whether ``balance.bound`` holds for every routing, if every copy is made that a plan asks for."""
        return self.slot_options is not None and self.slot_options.is_proved(self, ep_size)

    def balance_promise(self, ep_size: int) -> str:
        """Say in a sentence what ``balance`` promises on ``ep_size`` ranks. Empty without ``balance``."""
        return "" if self.slot_options is None else self.slot_options.promise(self, ep_size)

    @property
    def pad_multiple_rows(self) -> int:
        """``pad_multiple`` as a number."""
        return self.pad_multiple if isinstance(self.pad_multiple, int) else PAD_MULTIPLES[self.pad_multiple]

    @property
    def row_counts_policy(self) -> RowCounts:
        """``row_counts``, with None replaced by the policy that it stands for."""
        return self.row_counts or ("static" if self.graph_safe else "agree")

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """All fields as JSON values. Equal configs have the same values here."""
        spelled = {field: each and each.model_dump(mode="json") for field, each in self._options.items()}
        return {
            **self.model_dump(mode="json"),
            **spelled,
            "backend": {"name": self.backend_name, **(spelled["backend"] or {})},
            "pad_multiple": self.pad_multiple_rows,
            "row_counts": self.row_counts_policy,
        }

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of ``canonical``. Ranks compare it when a dispatcher is built."""
        return hashlib.sha256(canonical_json(self.canonical).encode()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> DispatcherConfig:
        """Return a copy as ``replace`` does. Pydantic's own method would not validate the changes."""
        return self.replace(**(update or {}))

    def replace(self, /, **changes: Any) -> DispatcherConfig:
        """Return a copy with some fields changed. The copy is validated like a new config."""
        return self._exactly(**{**self.model_dump(), **changes})

    @classmethod
    def load(
        cls, /, file: str | Path | None = None, *, environment: Mapping[str, str] | None = None, **fields: Any
    ) -> DispatcherConfig:
        """Read a config from a file, the environment and keywords. Each of these overrides the ones before it.

        The variable of a field is ``MOE_DISPATCH_`` and its name in capitals: ``MOE_DISPATCH_TOP_K``. An option of a
        field follows two underscores: ``MOE_DISPATCH_BALANCE__BOUND`` changes this option only. Values are JSON
        (``64``, ``true``, ``{"name": "alltoall"}``); a value that is not JSON is a string (``alltoall``), and an empty
        one counts as not set. A warning names a variable with this prefix that is not used; those that Kubernetes sets
        for a service named moe-dispatch are ignored.

        Args:
            file: ``.yaml``, ``.yml`` (extra ``yaml``) or ``.json`` file with a mapping of fields, and optionally
                ``format: 1``, so that an older version that cannot read a later format says so.
            environment: Variables by name; by default ``os.environ``.
            **fields: Fields, as for the constructor.

        Raises:
            ConfigError: The file is missing, is malformed (the text has the line) or is not a mapping; the name of a
                variable is nearly that of a field; or a field is wrong (the text has the file and the variables).
        """
        where = "DispatcherConfig.load"
        if isinstance(file, Mapping):
            raise ConfigError(f"{where}: file must be a path, got a mapping. Use DispatcherConfig(**fields).")
        from_file = {} if file is None else _read(Path(file))
        variables = os.environ if environment is None else environment
        complete, read = with_variables(from_file, variables, fields, where)
        with _naming(where, ["keywords" if file is None else str(file), *read]):
            return cls._exactly(**complete)


@contextmanager
def _naming(where: str, sources: Sequence[str]) -> Iterator[None]:
    """Name the sources of the fields in a ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        if not sources:
            raise
        listed = " and ".join(filter(None, [sources[0], ", ".join(sources[1:])]))
        raise ConfigError(f"{where}: {listed}: {error}") from error


def _parsed(field: str, value: Any) -> Options | None:
    """Parse the value of a field that is a short value or a mapping. None and False have no options, nor has "auto".

    Raises:
        ConfigError: The capability is not installed, or has no name that is known.
        ValidationError: An option is unknown or has a wrong type. Raised by pydantic.
    """
    if value is None or value is False:
        return None
    if field == "backend":
        return parse_backend(value)
    options = spelled_out(field, value)
    return _options_class(field, options).model_validate(options)


def _options_class(field: str, options: Mapping[str, Any]) -> type[Options]:
    """Return the class of the options of a field other than ``backend``. A plug-in is imported for its own."""
    if field == "balance":
        return load_slot_options(name_in(field, options, "exact"))
    if field == "chunks":
        options_class: type[Options] = load_plug_in(
            "moe_dispatch.steps.options", "chunks need it. Leave that out"
        ).ChunkOptions
        return options_class
    if field == "wire":
        return load_wire_options(name_in(field, options, "mxfp8"))
    return GraphSafeOptions


_OF_A_CALL = {
    "layout": "It belongs to a call: pass a layout, such as THD(cu_seqlens), to Dispatcher.plan or dispatch.",
    "dtype": "Rows keep the dtype of x. wire= sets another one for their way between ranks.",
    "name": "It belongs to a dispatcher: pass it to build_dispatcher.",
    "_target_": "It is an instruction for hydra: call hydra.utils.instantiate(cfg).",
}
_OF_THE_GROUP = {"group", "ep_group", "ep_rank", "ep_size", "num_local_experts", "world_size"}
_TYPES = {"bool", "dict", "float", "int", "mapping", "str"}  # names that pydantic gives to the types of a union


def _problems(error: ValidationError, fields: Mapping[str, Any]) -> str:
    """Describe what pydantic found in ``fields``, in one line for each field."""
    lines: dict[tuple[str, str], list[str]] = {}
    errors = error.errors()
    unknown = [found for found in errors if found["type"] == "extra_forbidden" and len(found["loc"]) == 1]
    nested = [found for found in unknown if _path_to_fields(found["input"]) is not None]
    for found in nested or errors:
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            lines[str(cause), ""] = []
            continue
        # For a union, pydantic reports each type separately and appends the type to the name of the field:
        # ("pad_multiple", "constrained-int") and ("pad_multiple", "literal['bf16', ...]"). Both belong in one line.
        first, *rest = map(str, found["loc"])
        field = ".".join([first, *(part for part in rest if part.isidentifier() and part not in _TYPES)])
        got = "nothing." if found["type"] == "missing" else f"{shown(found['input'])}."
        if found["type"] == "extra_forbidden":
            got += _advice(found["loc"], found["input"], fields)
        elif type(found["input"]).__module__ == "torch":  # torch.bfloat16, torch.device("cuda")
            got += f" Write its name, {str(found['input']).removeprefix('torch.').partition(':')[0]!r}."
        elif told := _problem_options(field, found["input"]):
            got += told
        elif field == "pad_multiple":
            got += (
                f" Names stand for rows: {', '.join(f'{name!r} for {rows}' for name, rows in PAD_MULTIPLES.items())}."
            )
        lines.setdefault((field, got), []).append(found["msg"])
    return "\n".join(
        f"DispatcherConfig: {field}: {'; or '.join(said)}, got {got}" if said else field
        for (field, got), said in lines.items()
    )


def _path_to_fields(value: object, depth: int = 4) -> list[str] | None:
    """Return the keys that lead to a mapping with the fields of a config, in a mapping of mappings; None if none do."""
    if not isinstance(value, Mapping) or not depth:
        return None
    if len(DispatcherConfig.model_fields.keys() & value.keys()) > 1:
        return []
    for key, below in value.items():
        if (rest := _path_to_fields(below, depth - 1)) is not None:
            return [str(key), *rest]
    return None


def _problem_options(field: str, value: object) -> str:
    """Say how to write options that stand in one text, as a shell takes them. Starts with a space."""
    if field not in SHORT or not isinstance(value, str) or len(value) > 200:
        return ""
    name, *pairs = value.split("+")
    if pairs and all("=" in pair for pair in pairs):
        options = {option: json_or_text(text) for option, _, text in (pair.partition("=") for pair in pairs)}
        return f" Write {field}={spelled_out(field, json_or_text(name)) | options}."
    options = json_or_text(value)
    return f" Write {field}={options}, without quotes around it." if isinstance(options, dict) else ""


def _advice(where: tuple[int | str, ...], value: object, fields: Mapping[str, Any]) -> str:
    """Say where a name belongs that is unknown in its place, or which known name it is like. Starts with a space."""
    name, is_field = str(where[-1]), len(where) == 1
    if is_field and (path := _path_to_fields(value)) is not None:
        below = ".".join([name, *path])
        return f" It holds the fields of a config, which must not be below a key. Pass what {below!r} holds."
    if is_field and name in _OF_A_CALL:
        return f" {_OF_A_CALL[name]}"
    owner, _, option = name.replace("__", ".").partition(".")
    if is_field and option and owner in SHORT:
        short = f'"{SHORT[owner]}": ..., ' if SHORT[owner] else ""
        return f' It is an option of {owner}: write {owner}={{{short}"{option}": {shown(value)}}}.'
    if is_field and name in _OF_THE_GROUP:
        return " It follows from the group: pass that to build_dispatcher."
    if not is_field and name in DispatcherConfig.model_fields:
        return f" It is a field of the config itself, beside {where[0]!r}."
    if where[0] != "constraints" and name in ConstraintOverrides.model_fields:
        return f" It is a constraint: write constraints={{{name!r}: ...}}."
    if owners := backends_with(name):
        spec = fields.get("backend", AUTO)
        chosen = spec.get("name") if isinstance(spec, Mapping) else spec
        if chosen in owners:
            return f' It is an option of the backend: write backend={{"name": "{chosen}", "{name}": ...}}.'
        return f" It is an option of backend {' or '.join(map(repr, owners))}, and not of {chosen!r}."
    return did_you_mean(name, _names_beside(where, fields))


def _names_beside(where: tuple[int | str, ...], fields: Mapping[str, Any]) -> Iterable[str]:
    """Return the names that are known in the place of a field, an option or a constraint."""
    if len(where) == 1:
        return DispatcherConfig.model_fields
    field = str(where[0])
    if field == "constraints":
        return ConstraintOverrides.model_fields
    options = spelled_out(field, fields[field])
    owner = load_backend(options["name"]) if field == "backend" else _options_class(field, options)
    return owner.model_fields


def with_variables(
    below: Mapping[str, Any], environment: Mapping[str, str], above: Mapping[str, Any], where: str = "DispatcherConfig"
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a config from three sources, of which a later one wins, and the variables that were read.

    Args:
        below: Fields that a variable may change: those of a file, or defaults.
        environment: Variables by name.
        above: Fields that the program sets. A variable of one of these is not used, and a warning says so, unless it
            agrees. ``backend="auto"`` leaves the choice to a variable.
        where: Beginning of an error.

    Raises:
        ConfigError: The name of a variable is nearly that of a field, or it names an option of a field without options.
    """
    set_here = {name: value for name, value in above.items() if (name, value) != ("backend", AUTO)}
    result, read, misspelled = {**below, **above}, [], []
    for variable in sorted(environment):  # MOE_DISPATCH_BACKEND comes before MOE_DISPATCH_BACKEND__REDUCTION
        name, text = variable.removeprefix(ENVIRONMENT_PREFIX), environment[variable]
        if name == variable or not text or _OF_KUBERNETES.fullmatch(name):
            continue
        field, _, option = name.lower().partition("__")
        if not name.isupper() or field not in DispatcherConfig.model_fields:
            if right := _right_variable(field, option):
                misspelled.append(f"{variable}: no such field. {right}")
            else:
                _tell_unused(f"{variable} is not used: {field!r} is no field of DispatcherConfig. Unset it.")
        elif field in set_here:
            if not _agrees(set_here[field], field, option, json_or_text(text)):
                _tell_unused(
                    f"{variable}={shown(text)} is not used: the program sets {field} to {shown(set_here[field])}. "
                    f"Unset the variable, or leave {field} out in the program."
                )
        else:
            try:
                value = json_or_text(text)
                result[field] = with_option(result, field, option, value) if option else value
            except ConfigError as error:
                raise ConfigError(f"{where}: {variable}: {error}") from None
            read.append(variable)
    if misspelled:
        raise ConfigError(f"{where}: {' '.join(misspelled)}")
    return result, read


def _right_variable(field: str, option: str) -> str:
    """Say which variable a misspelled one may stand for; empty if it is like none."""
    owner = next((name for name in SHORT if field.startswith(f"{name}_")), None)
    below = field.removeprefix(f"{owner}_")
    if owner is not None and (owner != "backend" or backends_with(below)):
        return f"Set {ENVIRONMENT_PREFIX}{owner.upper()}__{below.upper()}."
    near = difflib.get_close_matches(field, DispatcherConfig.model_fields, n=1, cutoff=0.7)
    return f"Did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?" if near else ""


def _agrees(value: Any, field: str, option: str, asked: Any) -> bool:
    """Return whether the value of a field is, or contains, what a variable asks for."""
    if field not in SHORT:
        return not option and bool(value == asked)
    options = {option: asked} if option else spelled_out(field, asked)
    is_off = value is None or value is False
    return value == asked or (not is_off and options.items() <= spelled_out(field, value).items())


@functools.cache
def _tell_unused(text: str) -> None:
    """Log a warning once."""
    logger.warning("%s", text)


def json_or_text(value: str) -> Any:
    """Parse a value as JSON. A text that is not JSON is returned unchanged."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # no JSON, an integer of thousands of digits, or too deep
        return value


def _keys(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the keys of a mapping and of the mappings that are its values."""
    for key, value in mapping.items():
        yield key
        if isinstance(value, dict):
            yield from value


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in (".yaml", ".yml"):
            value = json.loads(text)
        else:
            import yaml  # noqa: PLC0415 - optional, imported on use

            value = yaml.safe_load(text)
    except ImportError as error:
        raise ConfigError(f"DispatcherConfig.load: PyYAML is not installed. {how_to_install('yaml')}") from error
    except Exception as error:  # the file cannot be opened, or is not UTF-8, JSON or YAML; the text has the line
        problem = f"DispatcherConfig.load: cannot read {path}: {error}."
        if isinstance(error, json.JSONDecodeError) and path.suffix != ".json":
            problem += " It was read as JSON, because its name does not end in .yaml or .yml."
            problem += " For TOML, pass DispatcherConfig(**tomllib.load(file))." if path.suffix == ".toml" else ""
        raise ConfigError(problem) from error
    if not isinstance(value, dict):
        raise ConfigError(f"DispatcherConfig.load: {path} must be a mapping of fields, not {type(value).__name__}.")
    for name in _keys(value):
        if not isinstance(name, str):
            raise ConfigError(
                f"DispatcherConfig.load: {path}: keys must be strings, got {shown(name)}. Put quotes around it."
            )
    if told := newer_format(value.get("format"), FORMAT):
        raise ConfigError(f"DispatcherConfig.load: {path} must have format {FORMAT}, {told}")
    return {name: field for name, field in value.items() if (name, field) != ("format", FORMAT)}
