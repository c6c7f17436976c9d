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
from moe_dispatch.cli import compare, conformance, console, diagnosis, doctor, plan
from moe_dispatch.cli.bench import command as bench
from moe_dispatch.cli.bench.request import SUITES, make_request
from moe_dispatch.cli.comparison import MODES
from moe_dispatch.cli.names import parse_backend
from moe_dispatch.cli.ranks import PeerFailed, RankFailed, let_others_speak, this_rank
from moe_dispatch.cli.replay import MOST_STEPS
from moe_dispatch.cli.report import write_report
from moe_dispatch.cli.sequences import Batch, Parallelism
from moe_dispatch.errors import ConfigError, MoEDispatchError

Command = TypeVar("Command", bound=Callable[..., int])

app = typer.Typer(
    name="moe-dispatch",
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts as they stand here, to be copied from
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> int:
    """Parse ``sys.argv`` and run what it asks for; usage errors end with 2."""
    app(prog_name="moe-dispatch")
    return 0


def answering(command: Command) -> Command:
    """A command whose return value is the exit status, and whose errors are told in a line: 2, or 130 for Ctrl-C."""

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
        if this_rank() == 0:  # what is wrong before ranks meet is wrong on all of them
            console.error(str(wrong))
        else:
            let_others_speak()
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """Look at, check and compare the ways in which mixture-of-experts tokens travel.

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
        str | None, typer.Option("--backend", "-b", help="Look at this one; the exit status says whether it works.")
    ] = None,
    emulated: Annotated[bool, typer.Option("--emulated", help="Test the emulations of deep_ep too.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start for self-tests; torchrun knows its own.")] = 2,
    ep: Annotated[
        int | None, typer.Option(min=1, help="Tell the constraints on so many ranks; as many as are tested by default.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Of those; what is found, or all, by default.")
    ] = None,
    num_experts: Annotated[int, typer.Option(min=1, help="E, in the whole group.")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="K, experts of a token.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="D, hidden size.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Say what can be used on this machine, and why the rest cannot; run the self-tests of what can.

    Constraints are told where they differ from "anything goes". Ends with 0 if the named backend works here for this
    model, or without a name if no self-test fails; else with 1.

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
    ep: Annotated[str, typer.Option(metavar="SIZES", help="Sizes of the groups to run on.")] = "1,2,4",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every case, with tracebacks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Run the conformance kit on a backend, on the CPU; ranks are threads.

    Cases that the backend's own constraints rule out are excused, and counted by the constraint that does. Ends with 0
    if it conforms, else with 1.

    \b
    moe-dispatch check my_package:MyBackend
    moe-dispatch check my_package:MyBackend --ep 2 --verbose
    moe-dispatch check alltoall+reduction=exact
    moe-dispatch check hybridep+emulate=true --ep 4
    """  # noqa: D301
    return conformance.run(parse_backend(backend), _sizes(ep), verbose=verbose, as_json=as_json)


def _sizes(text: str) -> list[int]:
    if not all(size.isdecimal() and int(size) > 0 for size in text.split(",")):
        raise ConfigError(f"--ep must be whole numbers from 1 on with commas between, got {text!r}. Write --ep 1,2,4.")
    return [int(size) for size in text.split(",")]


@app.command("plan")
@answering
def plan_command(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="A DispatcherConfig, YAML or JSON; or a transformers config.json."),
    ],
    ep: Annotated[
        int | None, typer.Option(min=1, help="Ranks of an expert-parallel group; 8, or a trace's, by default.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes that the group lies on; of 8 ranks by default.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows that a rank brings to a dispatch.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a micro-batch, in place of --tokens.")] = 1,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence, in place of --tokens.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Tensor-parallel ranks divide the sequence.")
    ] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers with experts; counted where possible.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf, zipf:EXPONENT, or a recorded trace, FILE.safetensors.")
    ] = "uniform",
    seed: Annotated[int, typer.Option(min=0, help="Of which experts are popular.")] = 0,
    backends: Annotated[
        str | None,
        typer.Option("--backends", "-b", metavar="NAMES", help="With commas between; +OPTION=VALUE for options."),
    ] = None,
    capacity_factor: Annotated[
        list[float] | None, typer.Option(help="Look at this one; may be given several times.")
    ] = None,
    graph_safe: Annotated[bool, typer.Option("--graph-safe", help="Plan graph-safe mode.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Another value of a field of the config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Say what a model will send, pad and allocate on a cluster of any size. Nothing is run.

    Rows and padding of sequences, ranks and experts, bytes on the wire and in buffers, how often a capacity overflows,
    and what is refused. Libraries that are not here are planned by the rules of their releases. Ends with 1 if no
    backend can be used so.

    \b
    moe-dispatch plan Qwen3-30B-A3B/config.json --ep 64 --nodes 8 --tokens 4096
    moe-dispatch plan experiment.yaml --ep 8 --batch 2 --seq 4000 --tp 2 --sequence-parallel --set pad_multiple=fp8
    moe-dispatch plan config.json --ep 512 --tokens 4096 --routing zipf:0.5 --graph-safe --capacity-factor 1.3
    moe-dispatch plan experiment.yaml --routing run.safetensors -b alltoall,alltoall+reduction=exact --json
    """  # noqa: D301
    found = plan.make_forecast(
        config,
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
    return plan.run(found, as_json=as_json)


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
            help="With commas between; +OPTION=VALUE for a backend's options. By default the config's, or for "
            '"auto" all that are known.',
        ),
    ] = None,
    mode: Annotated[str, typer.Option(metavar="MODES", help="Of eager and graph-safe.")] = ",".join(MODES),
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes to start: 4, or a trace's; torchrun knows its own.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Of the rank with most; 64 by default.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Batches, each with a routing of its own, 3 by default; or a trace's first dispatches, {MOST_STEPS}.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "bfloat16",
    routing: Annotated[
        str | None, typer.Option(help="uniform, which is the default, balanced, skewed, partly_nowhere, ...")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What Trace.record wrote: its ids, weights and layouts.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Of differences from the reference, in place of the dtype's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Send the same tokens through several backends, forward and backward, and hold them against a reference.

    Tells how far each is from a dense float64 computation and from the first, and what a call costs: bytes, padding,
    host syncs, time. Ends with 1 if one differs more than its dtype allows, or if a backend that was named cannot run.
    With a trace, tokens go where they went when it was recorded, on as many ranks.

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
    suite: Annotated[str, typer.Argument(metavar="SUITE", help=f"Of {', '.join(SUITES)}.")] = "layer",
    contenders: Annotated[
        str | None,
        typer.Option(
            "--contenders",
            "-c",
            metavar="NAMES",
            help="With commas between: torchtitan, transformers, or backends, +OPTION=VALUE for their options; ratios "
            "are to the first. By default alltoall and the two others where they are installed.",
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="COUNTS", help="Of each rank; 4096 in suite layer.")] = None,
    hidden: Annotated[str | None, typer.Option(metavar="SIZES", help="D, hidden sizes; 1024.")] = None,
    experts: Annotated[str | None, typer.Option(metavar="COUNTS", help="E, in the whole group; 64.")] = None,
    top_k: Annotated[str | None, typer.Option(metavar="COUNTS", help="K, experts of a token; 8.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAMES", help="Of bfloat16 and float32; both in layer.")] = None,
    routing: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Of balanced, and skewed by Zipf's law with exponent 1.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; torchrun knows its own.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="Runs of each contender after the first, cold one.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="At most 256 tokens and 2 iterations: does everything run?")
    ] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results there, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them there, PNG or SVG.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tell ratios to the run that --save wrote there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> int:
    """Measure dispatch and combine, forward and backward, beside other libraries or other backends.

    Contenders get the same tokens and routing, take turns, and are held against a dense float64 result and the first of
    them. Experts cost nothing. An axis takes several values: all combinations that can be are measured.

    
    layer       times, bytes and memory of each contender
    overhead    what a call of 16 tokens costs above its collectives, on one rank and on all
    growth      times over tokens, hidden size, experts, top-k and ranks, one at a time
    graph-safe  eager mode and graph-safe mode of several capacities

    
    moe-dispatch bench --quick
    moe-dispatch bench --tokens 64,4096 --top-k 2,8 --dtype bfloat16 --picture bench.png
    moe-dispatch bench -c alltoall,alltoall+reduction=exact,allgather --save before.json
    moe-dispatch bench -c alltoall --against before.json
    moe-dispatch bench graph-safe -c allgather --iterations 7
    torchrun --nproc-per-node 8 --no-python moe-dispatch bench growth --json
    """
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
        Path, typer.Argument(metavar="TRACE|RUN", help="What Trace.record wrote, or RunLog.record's directory.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where index.html is written.")] = Path(
        "report"
    ),
) -> int:
    """Write a page on a routing trace or on a run: load of experts, imbalance, padding, bytes, overflows.

    One HTML file that needs no network, no scripts and no other file. Of a trace it tells what the recorded backend
    did, what the others would do with the same routing, and which capacity_factor would have been enough; of a run what
    its dispatchers counted, step by step.

    \b
    moe-dispatch report run.safetensors
    moe-dispatch report run.safetensors --out reports/run-17
    moe-dispatch report out/run -o reports/latest
    """  # noqa: D301
    console.line(str(write_report(source, out)))
    return 0
