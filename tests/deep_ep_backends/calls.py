"""The calls that the backends make to deep_ep, by release, seen while layers run on the emulation.

``python -m tests.deep_ep_backends.calls`` writes docs/deep-ep-calls.md. A test compares the page.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_dispatch import build_dispatcher
from moe_dispatch_testing.emulation import RELEASES, emulated_deep_ep
from moe_dispatch_testing.emulation.signatures import parsed, recorded
from tests.deep_ep_backends.vendors import config
from tests.dispatchers.layer import Group, on_ranks, random_routing

PAGE = Path(__file__).parents[2] / "docs" / "deep-ep-calls.md"
_HEAD = """# Calls to deep_ep

This list has every method of `deep_ep` that the backends `deepep` and `hybridep` call, with every argument that they pass. It was seen while layers ran on the [emulation](deep-ep.md#without-a-gpu-the-emulation) of each release, forward and backward, eager and graph-safe, with every option that changes a call. `python -m tests.deep_ep_backends.calls` writes this page, and a test compares it with the code and with the recorded signatures.

The last column names the line of DeepEP that defines the method, at the commit in the heading. For HybridEP of pull requests 744 and 746 only the file is known, because no checkout of these commits was at hand. The layers ran on two ranks of one node. Between nodes, `deepep` with v1 also calls `Config.get_rdma_buffer_size_hint`, and passes `num_qps_per_rank` to `Buffer`.
"""  # noqa: E501
# Options of a config with which a release is called in another way.
_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "deepep": [{}, {"num_sms": 8}, {"allocate_on_comm_stream": True}],
    "hybridep": [
        {},
        {"num_sms_dispatch": 8, "num_sms_combine": 8},
        {"num_blocks_permute": 8, "num_blocks_unpermute": 8},
    ],
}

Calls = dict[tuple[str, str], set[str]]


def calls_of(release: str) -> Calls:
    """Arguments that the backend passes, by class and method."""
    name = "hybridep" if release.startswith("hybridep") else "deepep"
    options = [*_OPTIONS[name]]
    if release.startswith("v2"):
        options.append({"expand": True, "deterministic": False})
    if name == "hybridep":
        options.append({"fuse_permute": True})
    found: Calls = {}
    with spied(release, found):
        for more in options:
            for graph_safe in (False, True):
                on_ranks(functools.partial(_run_layer, {"name": name, "emulate": release, **more}, graph_safe), 2)
    return found


def _run_layer(backend: dict[str, Any], graph_safe: bool, group: Group) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "pad_multiple": 16, "max_tokens_per_rank": 16}
    dispatcher = build_dispatcher(config(backend, graph_safe=graph_safe, **sizes), group)
    routing, x = random_routing(16), torch.ones(16, 256).requires_grad_()
    for async_op in (False, True):
        sent: Any = dispatcher.dispatch(x, routing, async_op=async_op)
        sent = sent.wait() if async_op else sent
        dispatcher.combine(sent.rows, sent).sum().backward()
        dispatcher.combine(dispatcher.dispatch(x, again=sent).rows, sent)
    dispatcher.close()


@contextmanager
def spied(release: str, found: Calls) -> Iterator[None]:
    """Note the calls of all recorded methods. Calls that a method itself makes are left out."""
    module, inside, restore = emulated_deep_ep(release), threading.local(), []

    def spy(name: str, method: str, function: Any, taken: inspect.Signature) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "deep_ep", False):
                return function(*args, **kwargs)
            bound = taken.bind(*args, **kwargs)
            found.setdefault((name, method), set()).update(list(bound.arguments))
            inside.deep_ep = True
            try:
                return function(*args, **kwargs)
            finally:
                inside.deep_ep = False

        return noted

    for name, methods in recorded(release)["classes"].items():
        cls = getattr(module, name, None) or getattr(module.utils, name, None)
        if cls is None:
            continue
        for method, parameters in methods.items():
            own = inspect.getattr_static(cls, method)
            kind = type(own) if isinstance(own, (staticmethod, classmethod)) else None
            function = getattr(cls, method)
            noting = spy(name, method, function, parsed(parameters))
            restore.append((cls, method, cls.__dict__.get(method)))
            setattr(cls, method, staticmethod(noting) if kind else noting)
    try:
        yield
    finally:
        for cls, method, own in restore:
            if own is None:
                delattr(cls, method)
            else:
                setattr(cls, method, own)


def page() -> str:
    """The text of docs/deep-ep-calls.md."""
    parts = [_HEAD]
    for release in RELEASES:
        record, lines = recorded(release), recorded(release)["lines"]
        source = record["source"]
        parts.append(f"## {release}\n\nCommit `{source['commit'][:10]}` of <https://{source['repository']}>.\n")
        rows = ["| call | arguments | accepted by |", "|---|---|---|"]
        for (name, method), passed in sorted(calls_of(release).items()):
            parameters = record["classes"][name][method]
            names = [one.partition("=")[0] for one in parameters if one.partition("=")[0] in passed]
            names = [one for one in names if one != "self"]
            call = f"`{name}`" if method == "__init__" else f"`{name}.{method}`"
            told = ", ".join(f"`{one}`" for one in names) or "none"
            rows.append(f"| {call} | {told} | {lines[name][method]} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
