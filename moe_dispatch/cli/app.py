"""Commands, options and help texts. The one module that imports Typer."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

import moe_dispatch
from moe_dispatch.cli import console
from moe_dispatch.cli.bench import command as bench
from moe_dispatch.cli.bench.request import SUITES, make_request
from moe_dispatch.cli.check import command as conformance
from moe_dispatch.cli.compare import command as compare
from moe_dispatch.cli.compare.comparison import MODES
from moe_dispatch.cli.compare.workload import MOST_STEPS
from moe_dispatch.cli.doctor import command as doctor
from moe_dispatch.cli.doctor import diagnosis
from moe_dispatch.cli.names import parse_backend
from moe_dispatch.cli.plan import command as plan
from moe_dispatch.cli.plan.sequences import Batch, Parallelism
from moe_dispatch.cli.ranks import PeerFailed, this_rank, wait_for_failed_peer
from moe_dispatch.cli.report.command import write_report
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch.testing import RankFailed

Command = TypeVar("Command", bound=Callable[..., int])

app = typer.Typer(
    name="moe-dispatch",
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts are printed as they stand here, so that examples can be copied
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> int:
    """Parse ``sys.argv`` and run its command; usage errors end with 2."""
    app(prog_name="moe-dispatch")
    return 0


def answering(command: Command) -> Command:
    """Make a command end with its return value as exit status; errors are printed in a line: 2, or 130 for Ctrl-C."""

    @functools.wraps(command)
    def answered(*arguments: Any, **options: Any) -> None:
        raise typer.Exit(_status(lambda: command(*arguments, **options)))

    return answered  # type: ignore[return-value]


def _status(command: Callable[[], int]) -> int:
    try:
        return command()
    except RankFailed as failure:
        console.error(str(failure))
    except PeerFailed:
        pass
    except MoEDispatchError as wrong:
        if this_rank() == 0:  # an error before ranks meet is the same on all of them
            console.error(str(wrong))
        else:
            wait_for_failed_peer()
    except KeyboardInterrupt:
        console.error("interrupted, all ranks are ended.")
        return 130
    return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        console.line(
            f"moe-dispatch {moe_dispatch.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
        )
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at, check and compare backends that move tokens of mixture-of-experts layers between ranks.

    \b
    moe-dispatch doctor                               what can be used on this machine
    moe-dispatch check my_package:MyBackend           is a backend right?
    moe-dispatch plan config.json --ep 64 --seq 4096  what will a model send on a cluster?
    moe-dispatch compare -b alltoall,allgather c.yaml are two backends the same, and what do they cost?
    moe-dispatch bench --save before.json             how fast is a layer, beside torchtitan's and transformers'?

    A command that starts ranks starts processes of this machine, or is started by torchrun on all of them:

    \b
    torchrun --nproc-per-node 4 --no-python moe-dispatch doctor
    """  # noqa: D301 - \b is what keeps the lines of a paragraph apart


@app.command("doctor")
@answering
def doctor_command(
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", help="Look at this backend only; the exit status says if it works.")
    ] = None,
    emulated: Annotated[bool, typer.Option("--emulated", help="Test the emulations of deep_ep too.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start for self-tests; not used under torchrun.")] = 2,
    ep: Annotated[
        int | None, typer.Option(min=1, help="Show constraints for this number of ranks; by default those tested.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks to a node for --ep; by default the number found, or all.")
    ] = None,
    num_experts: Annotated[int, typer.Option(min=1, help="Experts of the whole group, E.")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="Experts of a token, K.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size, D.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Say which backends can be used on this machine, and why the others cannot; run their self-tests.

    Constraints are shown if they restrict something. The exit status is 0 if the named backend works here for this
    model, or without a name if no self-test fails; else 1.

    \b
    moe-dispatch doctor
    moe-dispatch doctor --emulated
    moe-dispatch doctor --backend hybridep --ep 64 --num-experts 256 --hidden 7168
    torchrun --nproc-per-node 8 --no-python moe-dispatch doctor --backend deepep --json
    """  # noqa: D301
    request = diagnosis.Request(
        backend=backend,
        emulated=emulated,
        ranks=ranks,
        ep_size=ep,
        ranks_per_node=ranks_per_node,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden,
    )
    return doctor.run(request, as_json=as_json)


@app.command("check")
@answering
def check_command(
    backend: Annotated[
        str, typer.Argument(metavar="BACKEND", help="PACKAGE.MODULE:CLASS, or a name; +OPTION=VALUE for its options.")
    ],
    ep: Annotated[str, typer.Option(metavar="SIZES", help="Numbers of ranks, separated by commas.")] = "1,2,4",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every case, with tracebacks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Run the conformance kit on a backend, on the CPU; ranks are threads.

    Cases that the backend's own constraints rule out are excused, and counted by constraint. The exit status is 0 if
    the backend conforms, else 1.

    \b
    moe-dispatch check my_package:MyBackend
    moe-dispatch check my_package:MyBackend --ep 2 --verbose
    moe-dispatch check alltoall+reduction=exact
    moe-dispatch check hybridep+emulate=true --ep 4
    """  # noqa: D301
    return conformance.run(parse_backend(backend), conformance.parse_sizes(ep), verbose=verbose, as_json=as_json)


@app.command("plan")
@answering
def plan_command(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="A DispatcherConfig, YAML or JSON; or a transformers config.json."),
    ],
    ep: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the expert-parallel group; by default 8, or those of the trace.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the group; by default 8 ranks lie on a node.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows that a rank brings to a dispatch.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a micro-batch, in place of --tokens.")] = 1,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence, in place of --tokens.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Tensor-parallel ranks divide the sequence.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers with experts; by default as in CONFIG, or 1.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf, zipf:EXPONENT, or a recorded trace, FILE.safetensors.")
    ] = "uniform",
    seed: Annotated[int, typer.Option(min=0, help="Seed of popularity and of all draws.")] = 0,
    backends: Annotated[
        str | None,
        typer.Option("--backends", "-b", metavar="NAMES", help="Names separated by commas; +OPTION=VALUE for options."),
    ] = None,
    capacity_factor: Annotated[
        list[float] | None, typer.Option(help="Capacity factor to look at; may be given several times.")
    ] = None,
    graph_safe: Annotated[bool, typer.Option("--graph-safe", help="Plan graph-safe mode.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set a field of the config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Say what a model will send, pad and allocate on a cluster of any size. No rank is started.

    The plan has rows and padding of sequences, ranks and experts, bytes on the wire and in buffers, overflows of
    capacities, and refusals. A random routing is simulated with a seed. Libraries that are not installed are planned by
    the rules of their releases. The exit status is 1 if no backend can be used.

    \b
    moe-dispatch plan Qwen3-30B-A3B/config.json --ep 64 --nodes 8 --tokens 4096
    moe-dispatch plan experiment.yaml --ep 8 --batch 2 --seq 4000 --tp 2 --sequence-parallel --set pad_multiple=fp8
    moe-dispatch plan config.json --ep 512 --tokens 4096 --routing zipf:0.5 --graph-safe --capacity-factor 1.3
    moe-dispatch plan experiment.yaml --routing run.safetensors -b alltoall,alltoall+reduction=exact --json
    """  # noqa: D301
    request = plan.Request(
        file=config,
        ep_size=ep,
        nodes=nodes,
        parallelism=Parallelism(tp=tp, cp=cp, sequence_parallel=sequence_parallel),
        batch=Batch(tokens=tokens, batch_size=batch, seq_length=seq),
        layers=layers,
        dtype=dtype,
        routing=routing,
        seed=seed,
        backends=backends,
        factors=capacity_factor or (),
        graph_safe=graph_safe,
        changes=changes or (),
    )
    return plan.run(plan.make_forecast(request), as_json=as_json)


@app.command("compare")
@answering
def compare_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A DispatcherConfig, YAML or JSON.")],
    backends: Annotated[
        str | None,
        typer.Option(
            "--backends",
            "-b",
            metavar="NAMES",
            help="Names separated by commas; +OPTION=VALUE for options. By default the backend of the config, or for "
            '"auto" all known backends.',
        ),
    ] = None,
    mode: Annotated[str, typer.Option(metavar="MODES", help="eager, graph-safe or both.")] = ",".join(MODES),
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start: 4, or ranks of the trace; not used under torchrun."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens of the rank with most; 64 by default.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Batches with a routing each, by default 3; or first dispatches of the trace, {MOST_STEPS}.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "bfloat16",
    routing: Annotated[
        str | None, typer.Option(help="uniform (the default), balanced, skewed, partly_nowhere, ...")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of Trace.record, for ids, weights and layouts."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference from the reference; by default that of the dtype.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Send the same tokens through several backends, forward and backward, and compare them with a reference.

    Shows how far each backend is from a dense float64 computation and from the first backend, and what a call costs:
    bytes, padding, host syncs, time. The exit status is 1 if one differs more than its dtype allows, or if a named
    backend cannot run. With a trace, tokens go where they went when it was recorded, on as many ranks.

    \b
    moe-dispatch compare experiment.yaml
    moe-dispatch compare -b alltoall,allgather experiment.yaml --dtype float32
    moe-dispatch compare -b alltoall,hybridep+emulate=true experiment.yaml --routing skewed
    moe-dispatch compare -b alltoall,my_package:MyBackend experiment.yaml --mode eager
    moe-dispatch compare -b alltoall,allgather experiment.yaml --trace run.safetensors --tolerance 0.01
    torchrun --nproc-per-node 8 --no-python moe-dispatch compare -b alltoall,deepep experiment.yaml
    """  # noqa: D301
    workload, own_ranks = compare.make_workload(
        tokens=tokens, steps=steps, dtype=dtype, routing=routing, seed=seed, trace=trace
    )
    task = compare.make_task(config, backends, mode.split(","), workload, tolerance=tolerance)
    return compare.run(task, own_ranks if ranks is None else ranks, as_json=as_json)


@app.command("bench")
@answering
def bench_command(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help=f"One of {', '.join(SUITES)}.")] = "layer",
    contenders: Annotated[
        str | None,
        typer.Option(
            "--contenders",
            "-c",
            metavar="NAMES",
            help="Names separated by commas: torchtitan, transformers, by-hand, floor, or backends, +OPTION=VALUE for "
            "their options; ratios are to the first. By default alltoall and all others that are installed.",
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="COUNTS", help="Tokens of a rank; 4096 in suite layer.")] = None,
    hidden: Annotated[str | None, typer.Option(metavar="SIZES", help="Hidden sizes, D; by default 1024.")] = None,
    experts: Annotated[
        str | None, typer.Option(metavar="COUNTS", help="Experts of the group, E; by default 64.")
    ] = None,
    top_k: Annotated[str | None, typer.Option(metavar="COUNTS", help="Experts of a token, K; by default 8.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAMES", help="bfloat16, float32; both in suite layer.")] = None,
    routing: Annotated[
        str | None, typer.Option(metavar="NAMES", help="balanced, skewed (by Zipf's law with exponent 1).")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; not used under torchrun.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="Runs of each contender after the first, cold one.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="At most 256 tokens and 2 iterations, to see if everything runs.")
    ] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results to this file, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them to this file, PNG or SVG.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show ratios to the run in this file of --save.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Measure dispatch and combine, forward and backward, beside other libraries or other backends.

    Contenders get the same tokens and routing and take turns. Their results are compared with a dense float64 result
    and with the first contender. Experts cost nothing. An axis takes several values: every combination is measured.

    \b
    layer       times, bytes and memory of each contender
    overhead    what a call of 16 tokens costs above its collectives, on one rank and on all
    growth      times over tokens, hidden size, experts, top-k and ranks, one at a time
    graph-safe  eager mode and graph-safe mode of several capacities

    \b
    moe-dispatch bench --quick
    moe-dispatch bench --tokens 64,4096 --top-k 2,8 --dtype bfloat16 --picture bench.png
    moe-dispatch bench -c alltoall,alltoall+reduction=exact,allgather --save before.json
    moe-dispatch bench -c alltoall --against before.json
    moe-dispatch bench graph-safe -c allgather --iterations 7
    torchrun --nproc-per-node 8 --no-python moe-dispatch bench growth --json
    """  # noqa: D301
    axes = {
        "tokens": tokens,
        "hidden": hidden,
        "experts": experts,
        "top-k": top_k,
        "dtype": dtype,
        "routing": routing,
    }
    request = make_request(suite, axes, contenders, ranks=ranks, iterations=iterations, quick=quick)
    files = bench.Files(save=save, picture=picture, against=against)
    return bench.run(request, files, as_json=as_json)


@app.command("report")
@answering
def report_command(
    source: Annotated[
        Path, typer.Argument(metavar="TRACE|RUN", help="File of Trace.record, or directory of RunLog.record.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Directory of index.html.")] = Path("report"),
) -> int:
    """Write a page on a routing trace or on a run: load of experts, imbalance, padding, bytes, overflows.

    The page is one HTML file that needs no network, no scripts and no other file. For a trace it shows what the
    recorded backend did, what other backends would do with the same routing, and which capacity_factor would have been
    enough. For a run it shows what the dispatchers counted, step by step.

    \b
    moe-dispatch report run.safetensors
    moe-dispatch report run.safetensors --out reports/run-17
    moe-dispatch report out/run -o reports/latest
    """  # noqa: D301
    console.line(str(write_report(source, out)))
    return 0
