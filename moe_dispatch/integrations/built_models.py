"""Convert the Megatron models that a trainer builds, without a change to the trainer.

A trainer builds its models in one function of one of its modules. ``convert_built`` wraps this function: the models
that it returns are converted, if a backend is named. The trainer may import the module later, or never. This module
imports neither a trainer nor megatron-core.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

from moe_dispatch.backends.registry import parse_backend
from moe_dispatch.config import with_variables
from moe_dispatch.errors import IntegrationError

logger = logging.getLogger("moe_dispatch")

Settings = Callable[..., Mapping[str, Any]]


def from_environment(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the keywords of ``convert`` that the variables ``MOE_DISPATCH_*`` set. Arguments are ignored."""
    return with_variables({}, os.environ, {})[0]


@functools.cache
def convert_built(module: str, *functions: str, settings: Settings = from_environment) -> None:
    """Wrap functions of a trainer that build Megatron models. A second call with equal arguments does nothing.

    Args:
        module: Full name of the module that calls the functions.
        *functions: Names in that module. Each function returns the chunks of this pipeline stage, or a tuple whose
            first item is the chunks.
        settings: Function that is called with the arguments of each build. It returns keywords of ``convert``. Without
            a ``backend`` among them, the models are returned as the trainer built them.

    Raises:
        IntegrationError: The module lacks one of the functions, as ``wrap_function`` raises it.
    """
    for name in functions:
        wrap_function(module, name, functools.partial(_converting, f"{module}.{name}", settings))


def _converting(name: str, settings: Settings, build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_and_convert(*args: Any, **kwargs: Any) -> Any:
        # Before the build, which takes long, so that a wrong variable or backend is reported at once.
        given = settings(*args, **kwargs)
        if "backend" in given:
            parse_backend(given["backend"])
        built = build(*args, **kwargs)
        if "backend" in given:
            from moe_dispatch.integrations.megatron import convert  # noqa: PLC0415 - a built model has imported it

            convert(built[0] if isinstance(built, tuple) else built, **given)
            logger.info("moe_dispatch: converted the models of %s: %s", name, dict(given))
        return built

    return build_and_convert


def wrap_function(module: str, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of a module by ``wrap`` of it, as soon as the module is imported.

    Raises:
        IntegrationError: ``MOE_DISPATCH_BACKEND`` is set, and the module lacks the function. It is raised when the
            trainer imports the module. If the variable is not set, a warning is logged instead.
    """

    def replace(loaded: ModuleType) -> None:
        if (function := getattr(loaded, name, None)) is not None:
            setattr(loaded, name, wrap(function))
            return
        text = (
            f"moe_dispatch: {module} has no function {name}. Use a tested version of {module.partition('.')[0]}, "
            "which docs/integrations.md names, or call convert on the built model."
        )
        if "backend" in from_environment():
            raise IntegrationError(text)
        logger.warning("%s", text)

    after_import(module, replace)


def after_import(module: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module: now if it is imported already, else as soon as it is imported."""
    if module in sys.modules:
        then(sys.modules[module])
    else:
        sys.meta_path.insert(0, _AfterImport(module, then))


@final
class _AfterImport(MetaPathFinder):
    """Finds one module as Python would find it, and calls a function with it after it is executed."""

    def __init__(self, module: str, then: Callable[[ModuleType], None]) -> None:
        self._module, self._then, self._searching = module, then, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module or self._searching:
            return None
        self._searching = True  # the search below asks this finder too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
