"""Subcommands with their options and help texts.

Modules that import torch are imported inside the functions. Help and completion then take 0.2 s of processor time.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

import moe_dispatch
from moe_dispatch.errors import MoEDispatchError
from moe_dispatch_tools import console
from moe_dispatch_tools.options import Backend, Backends, Changes, Json, count, option

Command = TypeVar("Command", bound=Callable[..., int])


class Once(TyperCommand):
    """A command that refuses an option that is given twice, instead of using the last one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [arg.partition("=") for arg in args]
        for param in self.params:
            at = [at for at, (name, *_) in enumerate(given) if name in param.opts]
            if not getattr(param, "multiple", True) and len(at) > 1:
                told = f"{param.opts[0]} is given more than once."
                if str(param.metavar).endswith("S"):  # SIZES, NAMES: values with commas between
                    values = (given[one][2] or "".join(args[one + 1 : one + 2]) for one in at)
                    told += f" Write {param.opts[0]} {','.join(values)}."
                raise typer.BadParameter(told, ctx=ctx)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="moe-dispatch",
    no_args_is_help=True,
    rich_markup_mode=None,  # keeps the line breaks of examples, so that they can be copied
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> int:
    """Parse ``sys.argv`` and run a subcommand. Usage errors exit with 2."""
    app(prog_name="moe-dispatch")
    return 0


def answering(command: Command) -> Command:
    """Make the return value of a command its exit status, and print an error as one line."""

    @functools.wraps(command)
    def answered(*arguments: Any, **options: Any) -> None:
        raise typer.Exit(_status(lambda: command(*arguments, **options)))

    return answered  # type: ignore[return-value]


def _status(command: Callable[[], int]) -> int:
    from moe_dispatch_testing import RankFailed
    from moe_dispatch_tools.ranks import PeerFailed, this_rank, wait_for_failed_peer

    try:
        return command()
    except RankFailed as failure:
        console.error(str(failure))
    except PeerFailed:
        pass
    except MoEDispatchError as wrong:
        if this_rank() == 0:  # before ranks meet, every rank has the same error
            console.error(str(wrong))
        else:
            wait_for_failed_peer()
    except KeyboardInterrupt:
        console.error("interrupted, all ranks are ended.")
        return 130
    return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        import torch

        console.line(
            f"moe-dispatch {moe_dispatch.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
        )
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Check, compare and measure backends that move the tokens of MoE layers.

    A command that needs several ranks starts them as processes on this machine. Under torchrun it runs on torchrun's
    ranks:

    \b
    torchrun --nproc-per-node 4 --no-python moe-dispatch doctor
    """  # noqa: D301 - \b keeps the line breaks of a paragraph


@app.command("doctor", cls=Once)
@answering
def doctor_command(
    backend: Annotated[str | None, option("Test this backend only.", "--backend", "-b", backends=True)] = None,
    emulated: Annotated[bool, typer.Option("--emulated", help="Also test the emulations of deep_ep.")] = False,
    ranks: Annotated[int, count("Processes to start; ignored under torchrun.")] = 2,
    num_experts: Annotated[int | None, count("Experts in the whole group, E.", default="64")] = None,
    top_k: Annotated[int | None, count("Experts per token, K.", default="8")] = None,
    hidden: Annotated[int | None, count("Hidden size, D.", default="4096")] = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Also print what torch.utils.collect_env finds.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show which backends work on this machine.

    Every usable backend runs its self-test. For an unusable backend the reason is shown. The constraints of a backend
    are shown where they restrict something. The exit status is 0 if the named backend works for this model or, without
    a name, if no self-test fails. Otherwise it is 1.

    \b
    moe-dispatch doctor
    moe-dispatch doctor --emulated
    moe-dispatch doctor -b hybridep --num-experts 256 --hidden 7168
    torchrun --nproc-per-node 8 --no-python moe-dispatch doctor --json
    """  # noqa: D301
    with console.progress("load torch"):
        from moe_dispatch_tools.doctor import command as doctor
        from moe_dispatch_tools.names import load_config

    sizes = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden}
    named = {field: size for field, size in sizes.items() if size is not None}
    config = load_config(None, named, backends=backend, num_experts=64, top_k=8, hidden_size=4096)
    own = None if config.backend_name == "auto" else config.backend_name
    return doctor.run(
        config.replace(backend="auto"),
        backend=backend or own,
        emulated=emulated,
        ranks=ranks,
        environment=environment,
        as_json=as_json,
    )


@app.command("check", cls=Once)
@answering
def check_command(
    backend: Backend,
    ep: Annotated[str, option("Numbers of ranks, separated by commas.", metavar="SIZES")] = "1,2,4",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every case, with tracebacks.")] = False,
    as_json: Json = False,
) -> int:
    """Run the conformance tests on a backend.

    The tests run on the CPU, and ranks are threads. A case that the backend's own constraints rule out is excused.
    Excused cases are counted by constraint. +OPTION=VALUE after the name sets an option of the backend. The exit status
    is 0 if the backend conforms, otherwise 1.

    \b
    moe-dispatch check my_package:MyBackend
    moe-dispatch check my_package:MyBackend --ep 2 --verbose
    moe-dispatch check alltoall+reduction=exact
    moe-dispatch check hybridep+emulate=true --ep 4
    """  # noqa: D301
    from moe_dispatch_tools.check import command as check
    from moe_dispatch_tools.names import parse_backend, parse_numbers, tell_unread

    tell_unread("check")
    return check.run(parse_backend(backend), parse_numbers("--ep", ep, "1,2,4"), verbose=verbose, as_json=as_json)


@app.command("plan", cls=Once)
@answering
def plan_command(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="DispatcherConfig, transformers config.json, trace, or set-up in Python."
        ),
    ],
    ep: Annotated[int | None, count("Ranks in the group.", default="8, or the trace's")] = None,
    nodes: Annotated[int | None, count("Nodes in the group.", default="8 ranks per node")] = None,
    tokens: Annotated[int | None, count("Rows per rank and dispatch.")] = None,
    layers: Annotated[int | None, count("Layers with experts.", default="as in CONFIG, or 1")] = None,
    dtype: Annotated[str | None, option("bfloat16, float16 or float32.", default="as in CONFIG, or bfloat16")] = None,
    routing: Annotated[str, option("uniform, zipf, zipf:EXPONENT or a trace file.", metavar="ROUTING")] = "uniform",
    seed: Annotated[int, count("Seed of the simulated routing.", least=0)] = 0,
    backends: Backends = None,
    changes: Changes = None,
    as_json: Json = False,
) -> int:
    """Predict what a model sends on a cluster.

    The plan shows padding, bytes sent, buffer sizes, overflows of capacities, and backends that refuse the model. No
    rank is started. A random routing is simulated. A library that is not installed is planned by the rules of its
    release. Without --backends all known backends are planned. The exit status is 1 if no backend can be used,
    otherwise 0. Of a set-up as for prove, one step of one rank runs on torch's fake process group.

    \b
    moe-dispatch plan examples/prove_fsdp2.py
    moe-dispatch plan Qwen3-30B-A3B/config.json --ep 64 --nodes 8 --tokens 4096
    moe-dispatch plan experiment.yaml --tokens 4096 --set pad_multiple=fp8
    moe-dispatch plan config.json --routing zipf:0.5 --set graph_safe=true --set max_tokens_per_rank=4096
    moe-dispatch plan experiment.yaml --routing run.safetensors -b alltoall --json
    moe-dispatch plan run.safetensors
    moe-dispatch plan run.safetensors --set balance=exact --set balance.bound=1.05
    """  # noqa: D301
    import torch

    from moe_dispatch_tools.names import parse_changes, planned_backends
    from moe_dispatch_tools.plan.display import show
    from moe_dispatch_tools.plan.forecast import check_request, forecast
    from moe_dispatch_tools.plan.models import read_model
    from moe_dispatch_tools.plan.routing import routing_of

    torch.set_num_threads(1)  # a second thread slows down many small operators
    if config.suffix == ".py":
        from moe_dispatch_tools.plan import dry_run

        sizes = {"ep": ep, "nodes": nodes, "tokens": tokens, "layers": layers, "dtype": dtype, "seed": seed}
        alone = dry_run.dry_run(config, sizes | {"routing": routing != "uniform", "backends": backends, "set": changes})
        if as_json:
            console.document(alone)
        else:
            dry_run.show(config, alone)
        return 0
    model = read_model(config, layers=layers, dtype=dtype, changes=parse_changes(changes or ()))
    source, ranks = routing_of(routing, config, model, ep_size=ep, seed=seed)
    planned = planned_backends(model.config, backends)
    check_request(model, source, tokens=tokens, ep_size=ranks, nodes=nodes, backends=planned)
    with console.progress("count the rows of dispatches", told=True):
        found = forecast(model, source, tokens=tokens, ep_size=ranks, nodes=nodes, backends=planned)
    if as_json:
        console.document(found)
    else:
        show(found)
    return int(all(backend["refused"] for backend in found["backends"]))


@app.command("compare", cls=Once)
@answering
def compare_command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="DispatcherConfig, YAML or JSON; else 64 experts, top-8, hidden 1024."),
    ] = None,
    backends: Backends = None,
    peers: Annotated[bool, typer.Option("--peers", help="Add the floor, torchtitan and transformers.")] = False,
    mode: Annotated[str, option("eager, graph-safe or both.", metavar="MODES", default="both")] = "eager,graph-safe",
    ranks: Annotated[
        int | None, count("Processes to start; ignored under torchrun.", default="4, or the trace's")
    ] = None,
    tokens: Annotated[str | None, option("Tokens on the largest rank.", metavar="COUNTS", default="64")] = None,
    changes: Changes = None,
    steps: Annotated[int | None, count("Batches to send.", default="3, or up to 16 of the trace")] = None,
    dtype: Annotated[str, option("float64, float32, bfloat16, float16.", metavar="NAMES")] = "bfloat16",
    routing: Annotated[
        str | None,
        option("balanced, uniform, skewed, last_expert, first_half, ...", metavar="NAMES", default="uniform"),
    ] = None,
    trace: Annotated[Path | None, option("Replay the routing of this trace.", metavar="FILE")] = None,
    expert_width: Annotated[
        int | None,
        count("Time SwiGLU experts of this width.", default="2 x hidden size if experts are placed"),
    ] = None,
    rounds: Annotated[int, count("Timed rounds, at least one per batch.")] = 10,
    picture: Annotated[Path | None, option("Draw the times as PNG or SVG.", metavar="FILE")] = None,
    as_json: Json = False,
) -> int:
    """Compare backends, and peers, on the same tokens.

    Each backend runs forward and backward. The tables show how far it is from a dense float64 reference and from
    the first backend, and what a step costs: time by phase, bytes, padding, host syncs, memory. All take turns in
    one process group. --peers adds the dispatchers of torchtitan and transformers, and a floor: bare collectives
    and passes over rows. Without --backends the backend of CONFIG runs, or all known backends if that is "auto", or
    alltoall without CONFIG. A name may also set balance, its options as balance.bound=1.05, deliver,
    graph_safe.capacity_factor, and place=PLANNER, which places experts for the first batch. --tokens, --dtype and
    --routing take several values with commas. The exit status is 1 if a backend differs by more than the tolerance,
    or if a named backend cannot run. Otherwise it is 0.

    \b
    moe-dispatch compare experiment.yaml
    moe-dispatch compare -b alltoall,allgather experiment.yaml --dtype float32
    moe-dispatch compare -b alltoall,hybridep+emulate=true experiment.yaml
    moe-dispatch compare -b alltoall,my_package:MyBackend experiment.yaml
    moe-dispatch compare -b alltoall,alltoall+balance=exact config.yaml
    moe-dispatch compare experiment.yaml --trace run.safetensors
    moe-dispatch compare --peers --tokens 16,4096 --picture times.png
    moe-dispatch compare --peers -b alltoall,alltoall+deliver=packets --expert-width 256 --mode eager
    moe-dispatch compare -b alltoall,floor --rounds 200 --json > now.json
    torchrun --nproc-per-node 8 --no-python moe-dispatch compare experiment.yaml
    """  # noqa: D301
    from moe_dispatch_tools.compare import command as compare
    from moe_dispatch_tools.names import parse_changes

    workloads, own_ranks = compare.make_workloads(tokens=tokens, steps=steps, dtype=dtype, routing=routing, trace=trace)
    task = compare.make_task(
        config,
        backends,
        mode,
        workloads,
        peers=peers,
        changes=parse_changes(changes or ()),
        rounds=rounds,
        expert_width=expert_width,
    )
    return compare.run(task, ranks or own_ranks, peers=peers, picture=picture, as_json=as_json)


@app.command("prove", cls=Once)
@answering
def prove_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file with build, step, batches and mesh.")],
    dtype: Annotated[str, option("float64 or float32, torch's default dtype in the run.")] = "float64",
    seconds: Annotated[int, count("Seconds that the ranks, and then the one process, may take.")] = 60,
    as_json: Json = False,
) -> int:
    """Compare a training set-up with one process.

    Two steps of the set-up run on gloo ranks, and with the same tokens on one process. Start values, losses, the norm,
    every gradient and every parameter after each step are compared. A difference is told as what it looks like. The
    exit status is 0 if nothing differs, otherwise 1.

    \b
    moe-dispatch prove setup.py
    moe-dispatch prove setup.py --dtype float32
    moe-dispatch prove setup.py --seconds 300 --json
    """  # noqa: D301
    from moe_dispatch_tools.prove import command as prove

    return prove.run(file, dtype=dtype, seconds=seconds, as_json=as_json)


@app.command("report", cls=Once)
@answering
def report_command(
    source: Annotated[Path, typer.Argument(metavar="TRACE|RUN", help="Trace file, or directory of RunLog.record.")],
    out: Annotated[Path, option("Directory for index.html.", "--out", "-o", metavar="DIR")] = Path("report"),
) -> int:
    """Write a page about a trace or a run.

    The page is one HTML file that needs no network, no scripts and no other file. It shows the load of experts and
    ranks over steps, padding and bytes. The command plan shows what other backends and capacities would do.

    \b
    moe-dispatch report run.safetensors
    moe-dispatch report run.safetensors --out reports/run-17
    moe-dispatch report out/run -o reports/latest
    """  # noqa: D301
    from moe_dispatch_tools.report.command import write_report

    with console.progress("draw the page"):
        page = write_report(source, out)
    console.line(str(page))
    return 0
