"""The recorded signatures of deep_ep, and methods that are made from them.

The folder of this module holds one JSON file for each release. A file has the source (repository, commit, file), the
parameters of each method in Python's syntax (``["self", "x", "*", "handle=None"]``), the lines that define the methods
of which the backends make use, and the names of the items of handles. tests/emulation/test_signatures.py compares the
methods of the emulated classes with these files.

Two kinds of methods are made from the files. ``narrowed`` makes the methods of an older release, which take fewer
arguments than the newest release. ``refuse_unemulated`` makes the methods that the emulation does not have.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
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


def narrowed(method: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """Wrap a method so that it takes only these of its parameters, with the defaults that are given here.

    The first parameter, which is the object, may have another name.
    """
    signature = parsed(parameters)

    @functools.wraps(method)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        owner, *others = bound.arguments.items()
        return method(owner[1], **dict(others))

    narrow.__signature__ = signature  # type: ignore[attr-defined]
    return narrow


def refuse_unemulated(release: str, texts: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Decorate an emulated class: add methods that only raise NotImplementedError.

    Args:
        release: Name of the release whose JSON file has the signatures of the methods.
        texts: Text of the error, by name of the method.
    """

    def add_methods(cls: _Class) -> _Class:
        for name, text in texts.items():
            parameters = recorded(release)["classes"][cls.__name__][name]
            refuse = _refusal(f"{cls.__qualname__}.{name}", parsed(parameters), text)
            is_of_object = parameters[:1] in (["self"], ["buffer"])
            setattr(cls, name, refuse if is_of_object else staticmethod(refuse))
        return cls

    return add_methods


def _refusal(name: str, signature: inspect.Signature, text: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        signature.bind(*args, **kwargs)
        raise NotImplementedError(text)

    refuse.__name__, refuse.__qualname__ = name.rpartition(".")[-1], name
    refuse.__signature__ = signature  # type: ignore[attr-defined]
    return refuse
