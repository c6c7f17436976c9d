"""The configuration of a Dispatcher: what the model needs, and the name of the backend that does it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moe_dispatch.backends.base import BackendOptions, PermutationName, WireDtype
from moe_dispatch.backends.capacity import Factor
from moe_dispatch.backends.registry import AUTO, choose_backend, parse_backend
from moe_dispatch.backends.wire import FLOAT8_BLOCK
from moe_dispatch.communication import canonical_json
from moe_dispatch.errors import ConfigError

ENVIRONMENT_PREFIX = "MOE_DISPATCH_"
# Rows per expert that quantised grouped GEMMs need: 16 bytes of fp8 in a row group; the contraction of the weight
# gradient in blocks of 32 for mxfp8; 128 for nvfp4 with its fused transform (transformer-engine 2.12 and later).
PAD_MULTIPLES = {"bf16": 1, "fp8": 16, "mxfp8": 32, "nvfp4": 128}

RowCounts = Literal["agree", "assume", "check", "static"]
_Count = Annotated[int, Field(ge=1)]


@final
class ConstraintOverrides(BaseModel):
    """Numbers to use instead of what the backend says of its installed version; None leaves the backend's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    row_multiple: _Count | None = None
    max_rows: _Count | None = None
    hidden_multiple: _Count | None = None
    max_hidden: _Count | None = None
    max_top_k: _Count | None = None
    group_sizes: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    local_experts_multiple: _Count | None = None
    max_local_experts: _Count | None = None

    def given(self) -> dict[str, Any]:
        """The overrides that are set, as ``Constraints`` has them."""
        numbers = self.model_dump(exclude_none=True, exclude={"group_sizes"})
        return numbers if self.group_sizes is None else {**numbers, "group_sizes": frozenset(self.group_sizes)}


@final
class DispatcherConfig(BaseModel):
    """Everything about a Dispatcher except its process group. Frozen, strict; unknown fields are refused.

    Two configs are equal if they mean the same: ``"alltoall"`` and ``{"name": "alltoall"}``, ``"fp8"`` and ``16``,
    ``row_counts=None`` and the policy that None stands for.

    Attributes:
        backend: a name, or a mapping of ``name`` and that backend's options. "auto" picks and says which.
        num_experts: E, experts in the whole expert-parallel group.
        top_k: K, slots per row.
        hidden_size: D.
        pad_multiple: rows per expert are rounded up to this: an int, or "fp8" (16), "mxfp8" (32), "nvfp4" (128), "bf16"
            (1).
        weights: who multiplies expert outputs by their weights: "combine", or "experts" (they read ``sent.weights``).
        wire_dtype: what rows travel in; None is their own dtype. "float8_e4m3fn" quantises dispatch, one float32 scale
            per 128 columns; combine and gradients then travel in bfloat16. The gradient is straight-through.
        row_counts: how ranks come to equal row counts, or to the largest, where the backend needs that: "agree" (a MAX
            all-reduce and a host sync), "assume" (the caller promises equality), "check" (assume, verify, raise),
            "static" (``max_tokens_per_rank``). None: "agree", in graph-safe mode "static".
        max_tokens_per_rank: upper bound of the rows a rank brings.
        infer_layout: a call without a layout takes that of ``layout_of(x)``. False refuses it: for packed data, where
            a rank that never received the layout would otherwise take its rows for a plain batch.
        graph_safe: no host sync and no data-dependent shape in either verb, forward and backward.
        capacity_factor: graph-safe room of a rank's experts: a float over the balanced load, ``ceil(factor *
            max_tokens_per_rank * top_k)`` rows before expert padding, or "worst", which no routing overflows.
        on_overflow: what becomes of rows beyond a finite capacity, which must be chosen with it: "raise" (``check()``
            raises on all ranks), "drop" (slots of the least weight go nowhere; of equal ones the last by source rank,
            token, slot), "drop_by_position" (the order of ``hybridep``: the rows of the highest experts).
        permutation: implementation of the one-rank reorder: "torch", "triton" (ours), "te" (transformer-engine's
            kernels), honoured or refused; "auto" is Triton on CUDA devices where it can be used, else torch.
        device: "cpu" or "cuda" to refuse tensors elsewhere; None takes any.
        debug: exchange refusals and check values (ids, weights, lengths) in every plan and dispatch; costs host syncs.
        constraints: numbers to use instead of the backend's own.

    Raises:
        ConfigError: a field is unknown or wrong, or two do not fit each other; every problem, with its field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    backend: str | dict[str, Any] = "auto"
    num_experts: _Count
    top_k: _Count
    hidden_size: _Count
    pad_multiple: _Count | Literal["bf16", "fp8", "mxfp8", "nvfp4"] = 1
    weights: Literal["combine", "experts"] = "combine"
    wire_dtype: WireDtype | None = None
    row_counts: RowCounts | None = None
    max_tokens_per_rank: _Count | None = None
    infer_layout: bool = True
    graph_safe: bool = False
    capacity_factor: Factor = "worst"
    on_overflow: Literal["raise", "drop", "drop_by_position"] | None = None
    permutation: PermutationName = "auto"
    device: Literal["cpu", "cuda"] | None = None
    debug: bool = False
    constraints: ConstraintOverrides = ConstraintOverrides()

    if not TYPE_CHECKING:  # type checkers and editors keep the signature that pydantic makes of the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ConfigError(_problems(error)) from error

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, DispatcherConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        parse_backend(value)
        return copy.deepcopy(value)  # the caller may change the mapping later

    @model_validator(mode="after")
    def _fields_agree(self) -> DispatcherConfig:
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts}). Lower top_k.")
        if self.wire_dtype == "float8_e4m3fn" and self.hidden_size % FLOAT8_BLOCK:
            raise ConfigError(
                f'wire_dtype "float8_e4m3fn": hidden_size must be a multiple of {FLOAT8_BLOCK} (one scale per '
                f'{FLOAT8_BLOCK} columns), got {self.hidden_size}. Use wire_dtype "bfloat16".'
            )
        needs_maximum = (
            "graph_safe" if self.graph_safe else 'row_counts="static"' if self.row_counts == "static" else ""
        )
        if needs_maximum and self.max_tokens_per_rank is None:
            raise ConfigError(
                f"{needs_maximum} needs max_tokens_per_rank, got None. Set the largest count a rank can have."
            )
        if self.graph_safe and self.row_counts not in (None, "static"):
            raise ConfigError(
                f'graph_safe needs row_counts "static", got {self.row_counts!r}, which syncs with the host. Leave it '
                f"out."
            )
        self._check_capacity()
        return self

    def _check_capacity(self) -> None:
        options = {} if self.backend_options is None else self.backend_options.capacity_bounds
        bounds = {"capacity_factor": self.capacity_factor, **options}
        finite = [f"{name}={bound!r}" for name, bound in bounds.items() if bound != "worst"]
        given = finite if self.on_overflow is None else [*finite, f"on_overflow={self.on_overflow!r}"]
        if given and not self.graph_safe:
            raise ConfigError(
                f"{', '.join(given)} must come with graph_safe=True, got graph_safe=False, where every buffer has the "
                "size that the routing needs. Set graph_safe, or leave it out."
            )
        if finite and self.on_overflow is None:
            raise ConfigError(
                f"on_overflow must be chosen with a finite capacity, got None with {', '.join(finite)}. "
                'Set on_overflow to "raise" or "drop".'
            )

    @cached_property
    def backend_options(self) -> BackendOptions | None:
        """``backend``, parsed; None for "auto"."""
        return parse_backend(self.backend)

    def options_for(self, ep_size: int) -> BackendOptions:
        """``backend`` on a group of ``ep_size`` ranks: as named, or what "auto" chooses there."""
        return choose_backend(ep_size) if self.backend_options is None else self.backend_options

    @property
    def backend_name(self) -> str:
        """The backend's name, or "auto"."""
        return AUTO if self.backend_options is None else self.backend_options.name

    @property
    def pad_multiple_rows(self) -> int:
        """``pad_multiple`` as a number."""
        return self.pad_multiple if isinstance(self.pad_multiple, int) else PAD_MULTIPLES[self.pad_multiple]

    @property
    def row_counts_policy(self) -> RowCounts:
        """``row_counts``, with None replaced by what it stands for."""
        return self.row_counts or ("static" if self.graph_safe else "agree")

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """All fields as JSON values in the one form that equal configs share."""
        options = {} if self.backend_options is None else self.backend_options.model_dump(mode="json")
        return {
            **self.model_dump(mode="json"),
            "backend": {"name": self.backend_name, **options},
            "pad_multiple": self.pad_multiple_rows,
            "row_counts": self.row_counts_policy,
        }

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of ``canonical``; ranks compare it when a dispatcher is built."""
        return hashlib.sha256(canonical_json(self.canonical).encode()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> DispatcherConfig:
        """As ``replace``, so that a copy with changes is validated too."""
        return self.replace(**(update or {}))

    def replace(self, **changes: Any) -> DispatcherConfig:
        """A copy with some fields changed, validated like a new one."""
        return DispatcherConfig(
            **{**self.model_dump(exclude={"constraints"}), "constraints": self.constraints, **changes}
        )

    @classmethod
    def load(
        cls, file: str | Path | None = None, *, environment: Mapping[str, str] | None = None, **fields: Any
    ) -> DispatcherConfig:
        """Read a config from a file, the environment and keywords; later ones win.

        Args:
            file: ``.yaml``, ``.yml`` (extra ``yaml``) or ``.json``; a mapping of the fields above.
            environment: where ``MOE_DISPATCH_<FIELD>`` is looked up, by default ``os.environ``. Values are JSON where
                they parse as JSON (``64``, ``true``, ``{"name": "alltoall"}``), else strings (``alltoall``).
            **fields: as in the constructor.

        Raises:
            ConfigError: the file is missing, malformed (with its line) or not a mapping; a variable names no field; a
                field is wrong (with the file's name).
        """
        source = "keywords" if file is None else str(file)
        from_file = {} if file is None else _read(Path(file))
        from_environment = _from_environment(os.environ if environment is None else environment)
        try:
            return cls(**{**from_file, **from_environment, **fields})
        except ConfigError as error:
            if from_environment:
                source += f" and {', '.join(ENVIRONMENT_PREFIX + name.upper() for name in sorted(from_environment))}"
            raise ConfigError(f"DispatcherConfig.load: {source}: {error}") from error


_TYPES = {"bool", "dict", "float", "int", "str"}  # as pydantic names the choices of a union


def _problems(error: ValidationError) -> str:
    """Pydantic's findings, one a line and field: a text of ours, or theirs, all that the field may be in one."""
    lines: dict[tuple[str, str], list[str]] = {}
    for found in error.errors():
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            lines[str(cause), ""] = []
            continue
        # Of a union, each choice is reported for itself, with a description of its own behind the field's name.
        field = ".".join(part for part in map(str, found["loc"]) if part.isidentifier() and part not in _TYPES)
        got = "nothing" if found["type"] == "missing" else repr(found["input"])
        lines.setdefault((field, got), []).append(found["msg"])
    return "\n".join(
        f"DispatcherConfig: {field}: {'; or '.join(said)}, got {got}." if said else field
        for (field, got), said in lines.items()
    )


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): json_or_text(value)
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    unknown = sorted(set(found) - set(DispatcherConfig.model_fields))
    if unknown:
        names = ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in unknown)
        raise ConfigError(
            f"DispatcherConfig.load: {names}: no such field. Fields: {', '.join(DispatcherConfig.model_fields)}."
        )
    return found


def json_or_text(value: str) -> Any:
    """Parse a value as JSON; text that is not JSON stays text."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"DispatcherConfig.load: {path} must be UTF-8 text, got {error.reason}. Save it so."
        ) from error
    except OSError as error:
        raise ConfigError(f"DispatcherConfig.load: cannot read {path}: {error.strerror}. Check the path.") from error
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"DispatcherConfig.load: {path} must end in .yaml, .yml or .json, got {path.suffix!r}. Rename it."
        )
    value = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    if not isinstance(value, dict):
        raise ConfigError(
            f"DispatcherConfig.load: {path} must hold a mapping of fields, got {type(value).__name__}. "
            'Start with "backend: alltoall".'
        )
    return value


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"DispatcherConfig.load: {path}, line {error.lineno}: {error.msg}. Correct the JSON."
        ) from error


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # noqa: PLC0415 - optional, read on use
    except ImportError as error:
        raise ConfigError(
            f"DispatcherConfig.load: reading {path} needs PyYAML. Install moe-dispatch[yaml], or use a .json file."
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"DispatcherConfig.load: {path}{line}: {problem}. Correct the YAML.") from error
