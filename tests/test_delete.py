"""Without the folder of a capability, everything else works as before, and asking for the capability is one error.

Each test copies the package without a folder. A fresh process imports the copy and makes the calls of ``CALLS``, whose
results must have the bits of the whole package.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).parent.parent
PACKAGE = "moe_dispatch"
CALLS = [
    *itertools.product(("local", "allgather", "alltoall"), (False, True), ("BSHD", "THD"), (None,)),
    *itertools.product(("local", "alltoall"), (False, True), ("BSHD",), ("bfloat16",)),
]
"""Backend, whether the call is graph-safe, the layout and ``wire``. ``local`` has one rank, the others two."""

CONFIG = "DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, backend={})"
ROUTING = "Routing(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))"
SENT = f"build_dispatcher({CONFIG.format(repr('local'))}).dispatch(torch.ones(2, 16), {ROUTING})"
LAYER = f"(lambda d: lambda x: d.dispatch(x, {ROUTING}).rows)(build_dispatcher({CONFIG.format(repr('local'))}))"
EXPERTS = f"(lambda sent: lambda x: sent.per_expert([torch.relu] * 8))({SENT})"
# What a user writes to get the capability of a folder, and the error without it.
CAPABILITIES: dict[str, list[tuple[str, str]]] = {
    "backends/alltoall_by_node": [
        (
            CONFIG.format("'alltoall_by_node'"),
            "BackendUnavailableError: Backend 'alltoall_by_node' cannot be used here: its import raised "
            "ModuleNotFoundError: No module named 'moe_dispatch.backends.alltoall_by_node'. Repair its package, or "
            "choose one of: allgather, alltoall, deepep, hybridep, local, nccl_ep.",
        )
    ],
    "backends/deep_ep": [
        (
            CONFIG.format(f"{name!r}"),
            f"BackendUnavailableError: Backend {name!r} cannot be used here: its import raised ModuleNotFoundError: "
            "No module named 'moe_dispatch.backends.deep_ep'. Repair its package, or choose one of: allgather, "
            "alltoall, alltoall_by_node, local, nccl_ep.",
        )
        for name in ("deepep", "hybridep")
    ]
    + [
        (
            CONFIG.format("'alltoal'"),
            "ConfigError: Unknown backend 'alltoal'. Known backends: allgather, alltoall, alltoall_by_node, local, "
            "nccl_ep.",
        )
    ],
    "backends/nccl_ep": [
        (
            CONFIG.format("'nccl_ep'"),
            "BackendUnavailableError: Backend 'nccl_ep' cannot be used here: its import raised ModuleNotFoundError: "
            "No module named 'moe_dispatch.backends.nccl_ep'. Repair its package, or choose one of: allgather, "
            "alltoall, alltoall_by_node, deepep, hybridep, local.",
        )
    ],
    "capabilities/balance": [
        *(
            (
                f"DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, {field})",
                "ConfigError: moe_dispatch.capabilities.balance is not installed. balance and Dispatcher.place ",
            )
            for field in ("balance='exact'", "balance='manual'", "balance={'name': 'exact', 'bound': 1.5}")
        ),
        (
            "Dispatcher(DispatcherConfig(num_experts=8, top_k=2, hidden_size=16)).place(None)",
            "ConfigError: moe_dispatch.capabilities.balance is not installed. ",
        ),
        (
            "from moe_dispatch.dispatchers import SlotWeights",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.balance'",
        ),
    ],
    "capabilities/carry": [
        (
            f"import torch; build_dispatcher({CONFIG.format(repr('local'))}).dispatch("
            f"torch.ones(2, 16), {ROUTING}, carry={{'adapter': torch.zeros(2)}})",
            "ConfigError: moe_dispatch.capabilities.carry is not installed. carry of Dispatcher.dispatch needs it. "
            "Leave carry out",
        )
    ],
    "capabilities/compiling": [
        *(
            (
                f"import torch; {call}",
                "ConfigError: moe_dispatch.capabilities.compiling is not installed. "
                "torch.compile and selective checkpointing of a dispatcher need it. Keep dispatchers out of them, "
                "or install the whole package.",
            )
            for call in (
                f"torch.compile({LAYER}, backend='eager')(torch.ones(2, 16))",
                f"torch.compile({EXPERTS}, backend='eager')(torch.ones(2, 16))",
                "torch.utils.checkpoint.checkpoint("
                f"{LAYER}, torch.ones(2, 16), use_reentrant=False, context_fn=lambda: "
                "torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default]))",
            )
        ),
        (
            f"import torch; torch.compile({LAYER}, backend='eager', fullgraph=True)(torch.ones(2, 16))",
            "Unsupported: Call to `torch._dynamo.graph_break()`\n  Explanation: User-inserted graph break. Message: "
            "moe_dispatch.capabilities.compiling is not installed.",
        ),
        (
            "import torch; torch.ops.moe_dispatch.dispatch",
            "AttributeError: '_OpNamespace' 'moe_dispatch' object has no attribute 'dispatch'",
        ),
    ],
    "capabilities/dry_runs": [
        (
            "import torch\n"
            "torch.distributed.init_process_group('fake', rank=0, world_size=2)\n"
            "try:\n"
            "    build_dispatcher(DispatcherConfig(num_experts=8, top_k=2, hidden_size=16), "
            "torch.distributed.group.WORLD)\n"
            "finally:\n"
            "    torch.distributed.destroy_process_group()",
            "ConfigError: moe_dispatch.capabilities.dry_runs is not installed. A fake process group needs it. ",
        )
    ],
    "integrations": [
        (
            "from moe_dispatch.integrations.transformers import attach",
            "ModuleNotFoundError: No module named 'moe_dispatch.integrations'",
        )
    ],
    "capabilities/lean": [
        (
            CONFIG.format("'alltoall', deliver='packets'"),
            'ConfigError: moe_dispatch.capabilities.lean is not installed. deliver="packets" needs it. ',
        ),
        (
            "from moe_dispatch.lean import first_mm",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.lean'",
        ),
    ],
    "capabilities/observers": [
        (
            CONFIG.format("'alltoall', watchdog=5"),
            "ConfigError: moe_dispatch.capabilities.observers is not installed. watchdog needs it. "
            "Leave that out, or install ",
        ),
        (
            "import os\nos.environ['MOE_DISPATCH_WATCHDOG'] = '5'\n"
            "try:\n    build_dispatcher(DispatcherConfig(num_experts=8, top_k=2, hidden_size=16))\n"
            "finally:\n    del os.environ['MOE_DISPATCH_WATCHDOG']",
            "ConfigError: DispatcherConfig: keywords and MOE_DISPATCH_WATCHDOG: moe_dispatch.capabilities.observers "
            "is not installed. watchdog needs it. Leave that out, or ",
        ),
        (
            "from moe_dispatch.replay import RoutingTable\n"
            "RoutingTable.record([build_dispatcher(DispatcherConfig(num_experts=8, top_k=2, hidden_size=16))])",
            "ConfigError: moe_dispatch.capabilities.observers is not installed. RoutingTable.record needs it. ",
        ),
        (  # as in the forward of DistributedDataParallel, which nobody looks at then
            "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
            "dispatcher = build_dispatcher(DispatcherConfig(num_experts=8, top_k=2, hidden_size=16))\n"
            "DDP._active_ddp_module = DDP\n"
            "ids, weights = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)\n"
            "sent = dispatcher.dispatch(torch.ones(1, 16), Routing(ids, weights))\n"
            "dispatcher.combine(sent.rows, sent)\n"
            "DDP._active_ddp_module = None",
            "nothing",
        ),
    ],
    "capabilities/phases": [
        (
            "Dispatcher(DispatcherConfig(num_experts=8, top_k=2, hidden_size=16)).release()",
            "ConfigError: moe_dispatch.capabilities.phases is not installed. Dispatcher.release needs it. "
            "Use Dispatcher.close and build again, or ",
        ),
        (
            "from moe_dispatch.dispatchers import release",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.phases'",
        ),
    ],
    "capabilities/pipelining": [
        (
            "from moe_dispatch.pipelining import build_stage",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.pipelining'",
        ),
    ],
    "capabilities/quantised": [
        *(
            (
                f"DispatcherConfig(num_experts=8, top_k=2, hidden_size=128, {field})",
                'ConfigError: moe_dispatch.capabilities.quantised is not installed. Every wire but "bfloat16" ',
            )
            for field in ("wire='mxfp8'", "wire={'dtype': 'float8_e4m3fn', 'gradients': True}")
        ),
        (
            "from moe_dispatch.quantised import mx_tensor",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.quantised'",
        ),
    ],
    "capabilities/recompute": [
        (
            "from moe_dispatch.recompute import keep_routes",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.recompute'",
        ),
        (
            "DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, chunks={'tokens': 4, 'recompute': True})",
            "ConfigError: moe_dispatch.capabilities.recompute is not installed. chunks.recompute needs it. ",
        ),
    ],
    "capabilities/replay": [
        (
            "from moe_dispatch.replay import RoutingTable",
            "ModuleNotFoundError: No module named 'moe_dispatch.capabilities.replay'",
        ),
        (
            "import torch\n"
            "ids, drift = torch.zeros(1, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)\n"
            "config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=16)\n"
            "build_dispatcher(config).dispatch(torch.ones(1, 16), Routing(ids, torch.ones(1, 2), drift))",
            "ConfigError: moe_dispatch.capabilities.replay is not installed. Routing.drift needs it. ",
        ),
    ],
    "steps": [
        (
            "DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, chunks=4)",
            "ConfigError: moe_dispatch.steps is not installed. chunks need it. Leave that out, or install ",
        ),
        *(
            (
                f"from moe_dispatch.dispatchers import {name}",
                "ModuleNotFoundError: No module named 'moe_dispatch.steps'",
            )
            for name in ("even_rounds", "run_in_chunks")
        ),
    ],
    "training": [
        ("from moe_dispatch.training import Setup", "ModuleNotFoundError: No module named 'moe_dispatch.training'")
    ],
}
# Errors that have nothing to do with a deleted folder. They name what else there is, and so they may look at folders.
OTHER_ERRORS = [
    (CONFIG.format("'alltoal'"), "ConfigError: Unknown backend 'alltoal'. Known backends: "),
    (CONFIG.format("'alltoall', reductions='exact'"), "ConfigError: DispatcherConfig: reductions: "),
    (CONFIG.format("'allgather', pair_rows=2"), "ConfigError: DispatcherConfig: pair_rows: "),
]


class Outcome(NamedTuple):
    """What a process finds: a digest of each call, the modules that the calls loaded, and the errors of statements."""

    digests: dict[str, str]
    loaded: list[str]
    errors: list[str]


def use_package(parent: Path, statements: Sequence[str]) -> Outcome:
    """Import the package that lies in ``parent``, make all calls, and then run statements that raise."""
    sys.path.insert(0, str(parent))
    import moe_dispatch

    assert moe_dispatch.__file__ is not None
    assert Path(moe_dispatch.__file__).parent == parent / PACKAGE
    torch.set_num_threads(1)
    store = dist.HashStore()
    groups = on_threads(lambda rank: make_group(store, rank))
    digests = {str(call): call_once(moe_dispatch, groups, *call) for call in CALLS}
    loaded, errors = [name for name in sys.modules if name.startswith(PACKAGE)], []
    for statement in statements:
        try:
            exec(statement, {name: getattr(moe_dispatch, name) for name in moe_dispatch.__all__})
            errors.append("nothing")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return Outcome(digests, loaded, errors)


def make_group(store: dist.Store, rank: int) -> dist.ProcessGroup:
    gloo = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))
    group = dist.ProcessGroup(store, rank, 2)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def on_threads(body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(body, range(2))]


def call_once(package: Any, groups: list[Any], backend: str, graph_safe: bool, layout: str, wire: str | None) -> str:
    """Run a layer forward and backward, and return a digest of all results of all ranks."""
    fields = {"wire": wire, **({"graph_safe": True, "max_tokens_per_rank": 8} if graph_safe else {})}
    config = package.DispatcherConfig(num_experts=8, top_k=2, hidden_size=16, backend=backend, **fields)

    def body(rank: int) -> list[Tensor]:
        dispatcher = package.build_dispatcher(config, None if backend == "local" else groups[rank])
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(*((2, 4) if layout == "BSHD" else (7,)), 16, generator=generator).requires_grad_()
        rows = x.shape[:-1].numel()
        weights, ids = torch.randn(rows, 8, generator=generator).softmax(1).topk(2)
        weights.requires_grad_()
        way = package.BSHD(lengths=[3, 4]) if layout == "BSHD" else package.THD([0, 3, 7])
        sent = dispatcher.dispatch(x, package.Routing(ids, weights), way)
        y = dispatcher.combine(sent.rows.tanh(), sent)
        y.square().sum().backward()
        dispatcher.close()
        assert x.grad is not None
        assert weights.grad is not None
        return [y, x.grad, weights.grad, sent.real_tokens_per_expert]

    results = [body(0)] if backend == "local" else on_threads(body)
    digest = hashlib.sha256()
    for tensor in itertools.chain(*results):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def in_a_fresh_process(parent: Path, statements: Sequence[str]) -> Outcome:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context()) as pool:
        return pool.submit(use_package, parent, statements).result(timeout=60)


@pytest.fixture(scope="module")
def whole() -> Outcome:
    """What the whole package does."""
    return in_a_fresh_process(ROOT, [statement for statement, _ in OTHER_ERRORS])


@pytest.mark.parametrize("folder", CAPABILITIES)
def test_the_rest_works_without_the_folder_of_a_capability(folder: str, whole: Outcome, tmp_path: Path) -> None:
    deleted = ROOT / PACKAGE / folder

    def left_out(directory: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "__pycache__" or Path(directory, name) == deleted]

    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=left_out)
    assert deleted.is_dir()
    assert not (tmp_path / PACKAGE / folder).exists()
    asked = [*CAPABILITIES[folder], *OTHER_ERRORS]
    found = in_a_fresh_process(tmp_path, [statement for statement, _ in asked])
    assert found.digests == whole.digests
    for (statement, expected), error in zip(asked, found.errors, strict=True):
        assert error.startswith(expected), statement


@pytest.mark.parametrize("folder", CAPABILITIES)
def test_a_plain_call_loads_nothing_of_a_capability(folder: str, whole: Outcome) -> None:
    module = f"{PACKAGE}.{folder.replace('/', '.')}"
    assert [name for name in whole.loaded if f"{name}.".startswith(f"{module}.")] == []


def test_errors_that_name_other_backends(whole: Outcome) -> None:
    for (statement, expected), error in zip(OTHER_ERRORS, whole.errors, strict=True):
        assert error.startswith(expected), statement
