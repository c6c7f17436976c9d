"""What ``use_moe_dispatch`` refuses, on ranks with a real engine: the texts, by name."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tests.integration.deepspeed.engines import Case, engine_of, take_steps

PLAIN = Case(backend=None)


class Renamed(NamedTuple):
    """A RouterOutput of which one name is another."""

    scores: Any
    selected_experts: Any


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """A block in which an object has no such attribute."""
    held = owner.__dict__ if not isinstance(owner, type) and name in owner.__dict__ else owner._modules
    kept = held.pop(name)
    try:
        yield
    finally:
        held[name] = kept


def changed_names(layer: Any) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Blocks in which DeepSpeed has other private names, by the name that is missing there."""
    import deepspeed.module_inject.auto_ep_layer as autoep

    import moe_dispatch.integrations.deepspeed as ours

    def patched(owner: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
        return functools.partial(mock.patch.object, owner, name, new)

    attributes = ("comm_backend", "ep_group", "ep_size", "folding_group_handles", "hidden_size", "num_experts")
    return {
        **{
            f"AutoEPMoELayer.{name}": functools.partial(without, layer, name)
            for name in (*attributes, "experts", "score_apply", "top_k")
        },
        "RouterOutput.top_scores": patched(ours, "RouterOutput", Renamed),
        "AutoEPMoELayer._deepep_route(tokens, ro)": patched(
            autoep.AutoEPMoELayer, "_deepep_route", lambda self, tokens, ids, scores: tokens
        ),
        "the call of _deepep_route in AutoEPMoELayer._forward": patched(
            autoep.AutoEPMoELayer, "_forward", lambda self, hidden_states: hidden_states
        ),
        "GroupedExperts.forward(x, num_tokens_per_expert)": patched(
            type(layer.experts), "forward", lambda self, x, counts, scales: x
        ),
    }


def refused(rank: int) -> dict[str, str]:
    """The text of each refusal; under a changed name, after ``name ``, the name that the text must have."""
    from moe_dispatch.errors import ConfigError, IntegrationError
    from moe_dispatch.integrations.deepspeed import use_moe_dispatch

    texts: dict[str, str] = {}

    def attempt(name: str, target: Any, *blocks: AbstractContextManager[Any], **options: Any) -> None:
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            try:
                use_moe_dispatch(target, **{"backend": "alltoall", **options})
                texts[name] = "not refused"
            except (ConfigError, IntegrationError) as error:
                texts[name] = f"{type(error).__name__}: {error}"

    engine = engine_of(PLAIN)
    layer = engine.module.model.layers[0].mlp
    for name, block in changed_names(layer).items():
        attempt(f"name {name}", engine, block())
    folded = SimpleNamespace(spec=SimpleNamespace(tp_size=2))
    attempt("no layers", engine.module.lm_head)
    attempt("options", engine, top_k=2, weights="experts")
    attempt("unknown", engine, balnce="exact")
    attempt("quantised", engine, wire={"dtype": "mxfp8", "deliver": "quantised"}, pad_multiple="mxfp8")
    attempt("tensor parallel", engine, mock.patch.object(layer, "folding_group_handles", folded))
    attempt("no group", engine, mock.patch.object(layer, "ep_group", None))
    attempt("one rank", engine_of(Case(backend=None, ep=1)))
    partitioned = engine_of(Case(backend=None, stage=3))
    attempt("ZeRO 3, balance", partitioned, balance="exact")
    attempt("ZeRO 3, chunks", partitioned, chunks=4)
    assert layer.comm_backend == "comm", "a refusal must leave the layer as it was"
    texts["a second call"], texts["kept"] = _second_call_that_fails()
    texts["import"] = _import_of_another_version()
    return texts


def _second_call_that_fails() -> tuple[str, str]:
    """What a second call raises whose last layer cannot be built, and how the first call's dispatchers stand then."""
    import moe_dispatch.integrations.deepspeed as ours
    from moe_dispatch import Dispatcher
    from moe_dispatch.errors import ConfigError

    engine = engine_of(Case())
    built: list[Dispatcher] = []
    kept = [vars(layer.mlp)["_deepep_route"].args[1] for layer in engine.module.model.layers]

    def build(*args: Any, **options: Any) -> Any:
        if len(built) == len(kept) - 1:
            raise ConfigError("planted")
        built.append(Dispatcher(*args, **options))
        return built[-1]

    with mock.patch.object(ours, "build_dispatcher", build):
        try:
            ours.use_moe_dispatch(engine, backend="allgather")
        except ConfigError as error:
            told = str(error)
    take_steps(Case(), engine, range(1))
    counts = [dispatcher.metrics().dispatches for dispatcher in kept]
    closed = [", closed" in repr(dispatcher) for dispatcher in built]
    again = ours.use_moe_dispatch(engine, backend="allgather")
    take_steps(Case(), engine, range(1))
    assert all(", closed" in repr(dispatcher) for dispatcher in kept)
    assert all(dispatcher.metrics().dispatches for dispatcher in again.values())
    return told, f"{min(counts) > 0} {closed}"


def _import_of_another_version() -> str:
    """The text of an import where DeepSpeed has moved a name. It reloads our module, so it comes last."""
    from moe_dispatch.errors import IntegrationError

    name = "deepspeed.module_inject.auto_ep_comm"
    ours = sys.modules["moe_dispatch.integrations.deepspeed"]
    with mock.patch.dict(sys.modules, {name: ModuleType(name)}):
        try:
            importlib.reload(ours)
        except IntegrationError as error:
            return str(error)
        finally:
            sys.modules.pop("moe_dispatch.integrations.deepspeed")
    return "not refused"


def refused_by_deepspeed(rank: int) -> dict[str, str]:
    """The text of what DeepSpeed itself raises about adapters in ``deepspeed.initialize``."""
    import tests.integration.deepspeed.engines as engines

    texts: dict[str, str] = {}
    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for name, case, targets in (
        ("experts", Case(backend=None, stage=0, adapters=True), {"target_parameters": stacked, "target_modules": []}),
        ("ZeRO 1", Case(backend=None, stage=1, adapters=True), {}),
    ):
        adapted = functools.partial(engines.with_adapters, **targets)
        try:
            with mock.patch.object(engines, "with_adapters", adapted):
                engine_of(case)
            texts[name] = "not refused"
        except (ValueError, AssertionError) as error:
            texts[name] = str(error)
    return texts
