"""The emulated releases of deep_ep. Each is a module with the names of the real package of that release."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import torch

from moe_dispatch.errors import ConfigError
from moe_dispatch.versions import SUPPORT
from moe_dispatch_testing.emulation.config import Config
from moe_dispatch_testing.emulation.elastic import ElasticBuffer, EPBuffer
from moe_dispatch_testing.emulation.elastic_copies import BLOCK_BYTES, EXPERT_BYTES, BufferAllocator
from moe_dispatch_testing.emulation.elastic_rows import EPHandle, GuardedEPHandle
from moe_dispatch_testing.emulation.events import ElasticEventOverlap, EPEventOverlap, EventHandle, EventOverlap
from moe_dispatch_testing.emulation.hybrid import hybrid_ep_buffer
from moe_dispatch_testing.emulation.hybrid_rows import indices_to_map
from moe_dispatch_testing.emulation.normal import buffer_class

LIKE_V1 = SUPPORT["UCCL-EP"].emulated + SUPPORT["ROCm DeepEP"].emulated
"""Other libraries whose import name is ``deep_ep`` and that have the class of v1."""

RELEASES = SUPPORT["DeepEP"].emulated + LIKE_V1 + SUPPORT["HybridEP"].emulated
"""The releases of deep_ep that can be emulated."""


@functools.cache
def emulated_deep_ep(release: str) -> ModuleType:
    """Make the module that stands for ``deep_ep``. Its submodules are attributes. They are not in ``sys.modules``.

    Raises:
        ConfigError: There is no such release.
    """
    if release in ("hybridep-0ed15b5", "hybridep-34152ae"):
        raise ConfigError(f"{release} is no longer supported. Use hybridep-94a9f8f or later.")
    if release not in RELEASES:
        raise ConfigError(f"Unknown release of deep_ep {release!r}. Emulated releases: {', '.join(RELEASES)}.")
    if release.startswith("v2-"):
        return _v2(release)
    if release.startswith("v2.5"):
        return _v25(release)
    return _hybrid_ep(release) if release.startswith("hybridep-") else _v1(release)


@contextmanager
def imported_as_deep_ep(release: str) -> Iterator[ModuleType]:
    """Make ``import deep_ep`` import the emulation inside the block. Afterwards restore the modules of before.

    A module that is imported inside the block keeps the emulated names that it has imported.
    """
    package = emulated_deep_ep(release)
    aside = {name: module for name, module in sys.modules.items() if _belongs(name)}
    _forget_deep_ep()
    sys.modules.update(_with_submodules(package))
    try:
        yield package
    finally:
        _forget_deep_ep()
        sys.modules.update(aside)


def _forget_deep_ep() -> None:
    for name in [name for name in sys.modules if _belongs(name)]:
        del sys.modules[name]


def _belongs(name: str) -> bool:
    return name.partition(".")[0] == "deep_ep"


def _with_submodules(module: ModuleType) -> dict[str, ModuleType]:
    found = {module.__name__: module}
    for part in vars(module).values():
        if isinstance(part, ModuleType) and part.__name__.startswith(module.__name__ + "."):
            found |= _with_submodules(part)
    return found


def _module(name: str, **names: object) -> ModuleType:
    module = ModuleType(name, "Emulated: moe_dispatch_testing.emulation.")
    module.__dict__.update(names)
    module.__path__ = []  # makes it a package, so that `import deep_ep.utils` works
    return module


def _v1(release: str) -> ModuleType:
    """Make the module of v1, or of a library that has its class."""
    buffer, more = buffer_class(release), dict[str, object]()
    if release.startswith("uccl-"):
        more = {"EventHandle": EventHandle, **dict.fromkeys(("initialize_uccl", "destroy_uccl"), _unemulated_function)}
        more["check_nvlink_connections"] = _unemulated_function
    elif release.startswith("rocm-"):
        more = {"topk_idx_t": torch.int64}
    return _module(
        "deep_ep",
        Buffer=buffer,
        Config=Config,
        EventOverlap=EventOverlap,
        **more,
        buffer=_module("deep_ep.buffer", Buffer=buffer, Config=Config, EventHandle=EventHandle),
        utils=_module("deep_ep.utils", EventHandle=EventHandle, EventOverlap=EventOverlap),
    )


def _v2(release: str) -> ModuleType:
    legacy = _unemulated_buffer(release)
    return _module(
        "deep_ep",
        Buffer=legacy,
        Config=Config,
        ElasticBuffer=ElasticBuffer,
        EPHandle=EPHandle,
        EventHandle=EventHandle,
        EventOverlap=ElasticEventOverlap,
        topk_idx_t=torch.int64,
        __version__=release.removeprefix("v2-"),
        buffers=_module(
            "deep_ep.buffers",
            elastic=_module("deep_ep.buffers.elastic", ElasticBuffer=ElasticBuffer, EPHandle=EPHandle),
            legacy=_module("deep_ep.buffers.legacy", Buffer=legacy),
        ),
        utils=_module(
            "deep_ep.utils",
            EventHandle=EventHandle,  # no EventOverlap, as in the real v2, where code for v1 fails to import it
            event=_module("deep_ep.utils.event", EventHandle=EventHandle, EventOverlap=ElasticEventOverlap),
        ),
    )


def _v25(release: str) -> ModuleType:
    """Make the module of V2.5. It has no ``Buffer``, ``Config`` and ``ElasticBuffer`` any more.

    Its buffers for other purposes (EngramBuffer, PPBuffer, BucketBuffer) are not emulated.
    """
    event = _module("deep_ep.utils.event", EventHandle=EventHandle, EventOverlap=EPEventOverlap)
    return _module(
        "deep_ep",
        BufferAllocator=BufferAllocator,
        EPBuffer=EPBuffer,
        EPHandle=GuardedEPHandle,
        EventHandle=EventHandle,
        EventOverlap=EPEventOverlap,
        get_num_allocation_alignment=lambda: BLOCK_BYTES,
        get_num_tma_alignment=lambda: EXPERT_BYTES,
        topk_idx_t=torch.int64,
        __version__=release.removeprefix("v"),
        buffers=_module(
            "deep_ep.buffers", ep=_module("deep_ep.buffers.ep", EPBuffer=EPBuffer, EPHandle=GuardedEPHandle)
        ),
        utils=_module("deep_ep.utils", event=event),
    )


def _hybrid_ep(release: str) -> ModuleType:
    """Make the module of a HybridEP release."""
    buffer, of_branch = hybrid_ep_buffer(release), _unemulated_buffer(release)
    return _module(
        "deep_ep",
        **{buffer.__name__: buffer},
        Buffer=of_branch,
        Config=Config,
        EventOverlap=EventOverlap,
        buffer=_module("deep_ep.buffer", Buffer=of_branch, Config=Config, EventHandle=EventHandle),
        hybrid_ep_buffer=_module(
            "deep_ep.hybrid_ep_buffer", **{buffer.__name__: buffer}, indices_to_map=indices_to_map
        ),
        utils=_module("deep_ep.utils", EventHandle=EventHandle, EventOverlap=EventOverlap),
    )


def _unemulated_function(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("A buffer calls this function itself. It is not emulated.")


def _unemulated_buffer(release: str) -> type:
    """Make a class ``Buffer`` that can be imported, and raises on every use. It serves releases with a newer class.

    The class of v1.2.1 cannot replace it, because ``Buffer`` has other group sizes and queue lengths in these releases
    (deep_ep/buffers/legacy.py of v2, deep_ep/buffer.py of branch hybrid-ep).
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"Buffer: the class of release {release} is not emulated, only its newer class is. Use the newer class, or "
            "release v1.2.1 for Buffer."
        )

    methods = {name: staticmethod(refuse) for name in ("set_num_sms", "get_dispatch_config", "get_combine_config")}
    return type("Buffer", (), {"__init__": refuse, **methods, "__doc__": refuse.__doc__})
