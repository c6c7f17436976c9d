"""The recorded signatures of deep_ep, and methods that are made from them.

The folder of this module holds one JSON file for each release. A file has the source (repository, commit, file), the
parameters of each method in Python's syntax (``["self", "x", "*", "handle=None"]``), the lines that define the methods
of which the backends make use, and the names of the items of handles. tests/emulation/test_signatures.py compares the
methods of the emulated classes with these files.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NoReturn, TypeVar

import torch

_Class = TypeVar("_Class", bound=type)


@functools.cache
def recorded(release: str) -> Any:
    """Return the JSON file of a release."""
    return json.loads((resources.files(__name__) / f"{release}.json").read_text())


def parsed(parameters: Sequence[str]) -> inspect.Signature:
    """Return the signature with these parameters."""
    # The text is safe to evaluate: it comes from a data file of this package. Some defaults are names of torch.
    return inspect.signature(eval(f"lambda {', '.join(parameters)}: None", {"torch": torch}))


def follow_release(release: str, cls: _Class) -> _Class:
    """Give a class the methods of a release. The class may take more parameters, and may lack methods.

    A method that takes other parameters, or has other defaults, gets the recorded ones. A method that the class does
    not have raises NotImplementedError.
    """
    for name, parameters in recorded(release)["classes"][cls.__name__].items():
        own, signature = getattr(cls, name, None), parsed(parameters)
        if own is None:
            refuse = _refusal(f"{cls.__name__}.{name}", signature)
            setattr(cls, name, refuse if parameters[:1] in (["self"], ["buffer"]) else staticmethod(refuse))
        elif _bare(inspect.signature(own)) != _bare(signature):
            setattr(cls, name, _narrowed(own, signature))
    return cls


def _bare(signature: inspect.Signature) -> list[object]:
    return [(one.name, one.kind, one.default) for one in signature.parameters.values()]


def _narrowed(method: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Wrap a method so that it takes only these of its parameters. Its object may have another name."""

    @functools.wraps(method)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        owner, *others = bound.arguments.items()
        return method(owner[1], **dict(others))

    narrow.__signature__ = signature  # type: ignore[attr-defined]
    return narrow


def _refusal(name: str, signature: inspect.Signature) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        signature.bind(*args, **kwargs)
        raise NotImplementedError(f"{name} is not emulated. Use dispatch and combine, or the real deep_ep.")

    refuse.__name__, refuse.__qualname__ = name.rpartition(".")[-1], name
    refuse.__signature__ = signature  # type: ignore[attr-defined]
    return refuse
