"""The budget of bytes of each verb, in multiples of its floor. ``bytes.json`` holds it.

``python -m tests.simulated_cuda.bytes`` measures all verbs and writes the table anew.
``python -m tests.simulated_cuda.bytes alltoall eager dispatch`` lists what one verb reads and writes, with its lines.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulated_cuda.floor import VERBS

TABLE = Path(__file__).with_name("bytes.json")
TOKENS, HIDDEN, TOP_K, EXPERTS = 64, 7168, 8, 32
SAFE: dict[str, Any] = {"graph_safe": True, "max_tokens_per_rank": TOKENS}
BY_NODE = {"name": "alltoall_by_node", "ranks_per_node": 2}
# In graph-safe mode without the sort of the library, which reads the device.
EXPAND = {"name": "deepep", "expand": True}
EXPAND_SAFE = {**EXPAND, "deterministic": False}
Multiples = dict[str, float]
_NEAR, _APPLIED = (1.15, 1.15, 1.15, None), (None, 1.2, 1.2, None)
_WIRE = (1.2, *_NEAR[1:])


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
        backend: Backend of the config.
        ranks: Number of ranks.
        floor: Name of the function of ``floor`` that returns the floors.
        fields: Further fields of the config.
        aims: For each verb, the multiple to reach; None if there is no aim.
        release: Release of the vendor's library that is emulated, if the backend calls one.
    """

    backend: Any
    ranks: int
    floor: str
    fields: dict[str, Any]
    aims: tuple[float | None, ...] = (None,) * 4
    release: str | None = None


# By the backend and the mode in the table.
SETTINGS: dict[tuple[str, str], Setting] = {
    ("local", "eager"): Setting("local", 1, "local", {}, _NEAR),
    ("local", "graph-safe"): Setting("local", 1, "local", SAFE),
    ("alltoall", "eager"): Setting("alltoall", 4, "alltoall", {}, _NEAR),
    ("alltoall", "graph-safe"): Setting("alltoall", 4, "alltoall", SAFE),
    ("alltoall", "balanced"): Setting("alltoall", 4, "alltoall", {**SAFE, "balance": "exact"}),
    ("alltoall", "float8"): Setting("alltoall", 4, "alltoall", {"wire": "float8_e4m3fn"}, _WIRE),
    ("alltoall", "mxfp8"): Setting("alltoall", 4, "alltoall", {"wire": "mxfp8"}, _WIRE),
    ("alltoall", "mxfp8-quantised"): Setting(
        "alltoall", 4, "alltoall", {"wire": {"dtype": "mxfp8", "deliver": "quantised"}, "pad_multiple": 32}, _WIRE
    ),
    ("alltoall", "mxfp8-gradients"): Setting(
        "alltoall", 4, "alltoall", {"wire": {"dtype": "mxfp8", "gradients": True}}, (1.2, 1.15, 1.2, None)
    ),
    ("alltoall_by_node", "eager"): Setting(BY_NODE, 4, "alltoall", {}),
    ("allgather", "eager"): Setting("allgather", 4, "allgather", {}, _NEAR),
    ("allgather", "graph-safe"): Setting("allgather", 4, "allgather", SAFE),
    ("hybridep", "eager"): Setting("hybridep", 1, "around_library", {}, _APPLIED, "hybridep-94a9f8f"),
    ("hybridep", "graph-safe"): Setting("hybridep", 1, "around_library", SAFE, _APPLIED, "hybridep-94a9f8f"),
    ("deepep-expand", "eager"): Setting(EXPAND, 1, "around_library", {}, _APPLIED, "v2-2.1.0"),
    ("deepep-expand", "graph-safe"): Setting(EXPAND_SAFE, 1, "around_library", SAFE, _APPLIED, "v2-2.1.0"),
}

# By the backend and the mode in the table, numbers of ranks that cannot be simulated. Only the tables of a dispatch of
# ``ROWS`` rows on one of them are made and counted.
MANY_RANKS = {("alltoall", "64-ranks"): 64, ("alltoall", "256-ranks"): 256}
ROWS, LOCAL_EXPERTS = 2048, 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What a verb touches.

    Attributes:
        traffic: What each of our operators and kernels reads and writes.
        calls: Bytes of the calls of a vendor's library, by their formula.
        floor: The floor of the verb, with these calls.
    """

    traffic: list[Any]
    calls: int
    floor: int

    @property
    def multiple(self) -> float:
        """Bytes of the verb as a multiple of its floor."""
        nbytes: int = sum(each.nbytes for each in self.traffic)
        return (nbytes + self.calls) / self.floor


def measure(setting: Setting) -> dict[str, Measured]:
    """Return what each verb touches on device 0."""
    from tests.simulated_cuda.deep_ep import deep_ep_on_devices
    from tests.simulated_cuda.layer import Recorder
    from tests.simulated_cuda.ranks import NcclRanks
    from tests.simulated_cuda.traffic import traffic

    release, recorder = setting.release, Recorder(setting.ranks, traffic)
    with nullcontext(list[str]()) if release is None else deep_ep_on_devices(release) as calls:
        return NcclRanks().run(lambda group: _on_rank(group, recorder, setting, calls), setting.ranks)[0]


def measure_tables(ranks: int) -> Measured:
    """Return what a dispatch touches on one of many ranks: it makes its tables, and moves rows at their floor."""
    import torch

    from moe_dispatch.permutation import choose_permutation
    from tests.simulated_cuda import floor
    from tests.simulated_cuda.traffic import traffic

    kernels, generator = choose_permutation("auto", "cuda"), torch.Generator().manual_seed(0)
    assert kernels.send_places is not None
    ids_TK = torch.rand(ROWS, ranks * LOCAL_EXPERTS, generator=generator).topk(TOP_K).indices.cuda()
    counts = torch.zeros(ranks, LOCAL_EXPERTS + 1, dtype=torch.int64, device="cuda")
    with traffic() as found:
        *_, cu_T = kernels.send_places(ids_TK, LOCAL_EXPERTS, ranks, counts=counts)
        sent = int(cu_T[-1])
        # This rank gets as many rows as it sends. One slot of each has one of its experts.
        keys_SK = torch.full((sent, TOP_K), LOCAL_EXPERTS, dtype=torch.int16)
        keys_SK[:, 0] = torch.randint(LOCAL_EXPERTS, (sent,), generator=generator)
        rows_of = torch.bincount(keys_SK[:, 0].long()).tolist()
        keys_SK = keys_SK.cuda()
        kernels.group_slots(keys_SK, rows_of)
    rows = floor.Volume(own=ROWS, sent=[sent], received=[sent], everyone=0, real=sent, padded=sent)
    nbytes = floor.alltoall(rows, floor.Widths(hidden=HIDDEN, top_k=TOP_K))["dispatch"]
    return Measured([each for each in found if each.name.startswith("triton::")], nbytes, nbytes)


def _on_rank(group: Any, recorder: Any, setting: Setting, calls: list[str]) -> dict[str, Measured]:
    """Run a layer on one rank, and measure its verbs."""
    import torch

    from moe_dispatch import DispatcherConfig, Routing, Rows, build_dispatcher
    from tests.simulated_cuda import floor
    from tests.simulated_cuda.layer import Step

    rank, fields = group.rank(), setting.fields
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "pad_multiple": 16}
    config = DispatcherConfig(backend=setting.backend, **{**sizes, **fields})
    dispatcher = build_dispatcher(config, group if setting.ranks > 1 else None)
    generator, device = torch.Generator().manual_seed(rank), torch.device("cuda", rank)
    weights, ids = (each.to(device) for each in torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K))
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device)
    step = Step(dispatcher, x.requires_grad_(), Routing(ids, weights.requires_grad_()), Rows())
    touched, called = dict[str, list[Any]](), dict[str, int]()
    for verb in VERBS:
        before = len(calls)
        touched[verb] = recorder(rank, partial(step.run, verb))
        called[verb] = len(calls) - before
    wire = dispatcher.config.wire_options
    widths = floor.Widths(
        hidden=HIDDEN,
        top_k=TOP_K,
        wire=None if wire is None else wire.dtype,
        delivers_quantised=getattr(wire, "deliver", "rows") == "quantised",
        quantised_gradients=getattr(wire, "gradients", False),
    )
    if setting.release is None:
        rows = floor.volume(step.sent, TOKENS, TOKENS * setting.ranks)
    else:
        rows = floor.volume_on_one_rank(step.sent, TOKENS)
    floors, formulas = getattr(floor, setting.floor)(rows, widths), floor.library(rows, widths)
    dispatcher.close()
    return {verb: Measured(touched[verb], called[verb] * formulas[verb], floors[verb]) for verb in VERBS}


def rounded(multiple: float) -> float:
    """Round a multiple up to a hundredth."""
    return math.ceil(multiple * 100 - 1e-9) / 100


def read() -> dict[str, Multiples]:
    """Return the budget by "backend mode", and by verb."""
    table: dict[str, Multiples] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _main(only: list[str]) -> None:
    from tests.simulated_cuda import plugin  # noqa: F401 (sets the environment)
    from tests.simulated_cuda.values import simulated

    with simulated():
        if only:
            backend, mode, verb = only
            ranks = MANY_RANKS.get((backend, mode))
            found = measure_tables(ranks) if ranks else measure(SETTINGS[backend, mode])[verb]
            for each in found.traffic:
                share = each.nbytes / found.floor
                print(f"{share:7.3f} {each.read:>10} {each.written:>10} {each.name} | {each.place}")
            print(f"{found.multiple:7.3f} of {found.floor} bytes, {found.calls} of them in calls of the library")
        else:
            table = {
                " ".join(key): {verb: rounded(found.multiple) for verb, found in measure(setting).items()}
                for key, setting in SETTINGS.items()
            }
            for key, ranks in MANY_RANKS.items():
                table[" ".join(key)] = {"dispatch": rounded(measure_tables(ranks).multiple)}
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(multiples)}" for key, multiples in table.items())
            TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
            print(TABLE.read_text(encoding="utf-8"))
    sys.stdout.flush()
    os._exit(0)  # the threads of NCCL would wait for a device


if __name__ == "__main__":
    _main(sys.argv[1:])
