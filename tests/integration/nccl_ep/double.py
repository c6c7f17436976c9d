"""The real ``ep.py`` of a released wheel of transformer-engine, on a CPU, over the stand-in of its compiled part.

``make integration`` puts the wheel into ``.frameworks/te``. Ranks are threads, but ``ep.py`` keeps its state in globals
of its process, so each thread gets a copy of the module. Nothing of the file is changed but its imports: torch does
without CUDA, operators of ``torch.library`` are called directly, and a group is a gloo group.
"""

from __future__ import annotations

import ast
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dispatch.backends.nccl_ep.library import EPLibrary
from tests.integration.nccl_ep.stand_in import GROUPS, StandIn

VERSION = "2.20.2"
FOLDER = Path(__file__).parents[3] / ".frameworks" / "te"
SOURCE = FOLDER / "transformer_engine" / "pytorch" / "ep.py"

requires_wheel = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not SOURCE.is_file(),
        reason=f"needs transformer-engine {VERSION} in .frameworks/te: make integration installs it",
    ),
]


class _Over(types.SimpleNamespace):
    """A module with some names of its own, and those of another module."""

    def __init__(self, under: Any, **own: Any) -> None:
        super().__init__(**own)
        self.__dict__["_under"] = under

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_under"], name)


class _Group:
    """What ``ep_bootstrap`` asks of a process group over NCCL."""

    group_name = "ep"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.size()

    def _get_backend(self, device: torch.device) -> Any:
        GROUPS[id(self._group)] = self._group
        return types.SimpleNamespace(_comm_ptr=lambda: id(self._group))


def _operators() -> tuple[Callable[..., Any], types.SimpleNamespace]:
    """``torch.library.custom_op`` and the namespace of the operators that it defines. They are plain functions."""
    defined = types.SimpleNamespace()

    def custom_op(name: str, *, mutates_args: Any, device_types: str) -> Callable[[Callable[..., Any]], Any]:
        def define(function: Any) -> Any:
            setattr(defined, name.partition("::")[2], function)
            function.register_fake = lambda fake: fake
            return function

        return define

    return custom_op, defined


def _empty(*shape: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
    return torch.empty(*shape, **given)


@cache
def _code() -> types.CodeType:
    tree = ast.parse(SOURCE.read_text())
    outside = ("torch", "torch.distributed", "transformer_engine_torch", "atexit")
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Import) and node.names[0].name in outside)
        and not (isinstance(node, ast.ImportFrom) and node.level)
    ]
    return compile(tree, str(SOURCE), "exec")


def load() -> Any:
    """A copy of ``transformer_engine.pytorch.ep`` of one process, with ``tex``, the stand-in."""
    custom_op, defined = _operators()
    module: Any = types.ModuleType(__name__)  # dataclasses look the name of its module up
    module.__dict__.update(
        torch=_Over(
            torch,
            empty=_empty,
            library=_Over(torch.library, custom_op=custom_op),
            ops=_Over(torch.ops, transformer_engine_ep=defined),
            cuda=_Over(torch.cuda, current_device=lambda: 0, is_current_stream_capturing=lambda: False),
        ),
        dist=_Over(dist, barrier=lambda group, device_ids: None),
        tex=StandIn(),
        atexit=types.SimpleNamespace(register=lambda function: function),
        mark_not_offload=lambda *tensors: None,
        symm_mem_alloc=None,
        release_symm_mem_pool=lambda: None,
        QuantizedTensor=type("QuantizedTensor", (), {}),
    )
    exec(_code(), module.__dict__)
    module._check_nccl_runtime_version = lambda: None
    bootstrap = module.ep_bootstrap

    @functools.wraps(bootstrap)
    def ep_bootstrap(ep_group: Any, *args: Any, **given: Any) -> None:
        bootstrap(_Group(ep_group), *args, **given)

    module.ep_bootstrap = ep_bootstrap
    return module


@contextmanager
def installed() -> Iterator[Callable[[], Any]]:
    """Let ``backend="nccl_ep"`` find a copy of the module for each thread. Yields a function that returns it."""
    of_thread: weakref.WeakKeyDictionary[threading.Thread, EPLibrary] = weakref.WeakKeyDictionary()

    def find() -> EPLibrary:
        thread = threading.current_thread()
        if thread not in of_thread:
            of_thread[thread] = EPLibrary(ep=load(), version=VERSION, device="cpu")
        return of_thread[thread]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_dispatch.backends.nccl_ep.library.find_library", find)
        yield lambda: find().ep
