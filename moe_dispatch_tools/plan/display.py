"""Show a plan as tables on a terminal."""

from __future__ import annotations

from typing import Any

from moe_dispatch_tools import console
from moe_dispatch_tools.console import counted, size


def show(found: dict[str, Any]) -> None:
    """Print what ``forecast`` returned."""
    model, cluster = found["model"], found["cluster"]
    limit = f" in {model['topk_groups']} of {model['num_groups']} groups" if model["num_groups"] else ""
    console.line(
        f"{model['name']}: {model['num_experts']} experts, top {model['top_k']}{limit}, hidden size "
        f"{model['hidden_size']}, {counted(model['layers'], 'layer')} with experts, {model['dtype']}"
    )
    console.line(
        f"expert parallelism over {counted(cluster['ep_size'], 'rank')}, {counted(cluster['nodes'], 'node')} of "
        f"{cluster['ranks_per_node']}; "
        f"{'graph-safe' if model['graph_safe'] else 'eager'} mode"
    )
    if spare := model["spare_experts_per_rank"]:
        planner = model["balance"]["name"]
        filled = "which stay empty" if planner == "manual" else f"filled by {planner} in each dispatch"
        slots = model["num_experts"] // cluster["ep_size"] + spare
        console.line(f"a rank has {counted(slots, 'expert slot')}, {spare} of them spare, {filled}")
    if model["balance_promise"]:
        console.line(model["balance_promise"])
    if copies := found["copies"]["expected"]:
        weights = size(found["expert_bytes"] and copies * found["expert_bytes"]) or "of unknown size"
        console.line(
            f"weights of {counted(round(copies), 'expert')}, {weights}, travel in a forward of a layer and again in "
            "its backward; as many gradients return"
        )
    console.line(f"routing {found['routing']}")
    console.line(f"a rank brings {counted(found['rows_per_rank'], 'row')} to each dispatch")
    rows = {
        "at the experts of a rank": found["received"],
        "at the experts of the busiest rank": found["busiest_rank"],
        "at the busiest expert": found["busiest_expert"],
    }
    if model["pad_multiple"] > 1:
        rows[f"padding at a rank: each expert to a multiple of {model['pad_multiple']}"] = found["expert_padding"]
    how = "simulated" if found["simulated"] else "recorded"
    console.table(
        ["rows of one dispatch", "mean", "min", "max"],
        [[title, *(f"{of[name]:.0f}" for name in ("expected", "low", "high"))] for title, of in rows.items()],
        caption=f"{counted(found['dispatches'], f'{how} dispatch', f'{how} dispatches')}.",
    )
    _show_backends(found)
    if found["capacities"]:
        _show_capacities(found)


def _show_backends(found: dict[str, Any]) -> None:
    usable = [backend for backend in found["backends"] if backend["refused"] is None]
    rows = []
    for one in usable:
        cells: list[Any] = ["unknown"] * 6
        if one["sent"] is not None:
            step, most = (one["forward"][of] + one["backward"][of] for of in ("expected", "high"))
            numbers = (one["forward"]["expected"], one["backward"]["expected"], step, most, one["between_nodes"])
            cells = [one["row_dtypes"], *map(size, numbers)]
        rows.append([one["name"] + " *" * bool(one["payload_only"]), *cells])
    if usable:
        note = " * Rows only: the library sends more beside them." * any(one["payload_only"] for one in usable)
        console.table(
            ["sent by a rank", "rows in", "forward", "backward", "step", "max step", "to other\nnodes"],
            rows,
            caption=f"Mean of one micro-batch in {counted(found['model']['layers'], 'layer')}.{note}",
            text_columns=2,
        )
        purposes = list(dict.fromkeys(purpose for one in usable for purpose in one["buffers"]))
        rows = [
            [
                one["name"],
                *(f"{one[field]['high']:.0f}" for field in ("rows_per_rank", "rank_padding")),
                one["row_multiple"],
                *(size(one["buffers"].get(purpose, {"high": None})["high"]) for purpose in purposes),
            ]
            for one in usable
        ]
        if len(rows) > 1 and all(row[1:] == rows[0][1:] for row in rows):
            rows = [["each backend", *rows[0][1:]]]
        console.table(
            [
                "max of a dispatch, a rank",
                "rows",
                "padding",
                "sequence\nmultiple",
                *(f"size of {one}" for one in purposes),
            ],
            rows,
            caption="Rows that are a multiple of this number on every rank need no padding. Sizes: the "
            + ("buffers that graph-safe mode allocates." if found["model"]["graph_safe"] else "rows of the experts."),
        )
    for one in found["backends"]:
        if one["refused"] is not None:
            console.line(f"{one['name']}: {one['refused']}", mark="-")
        elif "not usable here" in one["rules"]:
            console.line(f"{one['name']}: planned by the {one['rules']}", mark="-")


def _show_capacities(found: dict[str, Any]) -> None:
    console.table(
        ["capacity_factor", "rows", "buffer", "overflow", "dropped", "pair_rows", "overflow"],
        [
            [
                *(one["factor"], one["rows"], size(one["buffer_bytes"])),
                *(f"{100 * one[share]:.3g} %" for share in ("overflow", "dropped")),
                *(one["pair_rows"], f"{100 * one['pair_overflow']:.3g} %"),
            ]
            for one in found["capacities"]
        ],
        caption=f"Graph-safe mode: a capacity_factor of {found['needed_factor']:.3f} is enough for these dispatches. "
        "Overflow: dispatches in which some rank needs more rows. Dropped: share of all rows. The last two columns: "
        "pair_rows of alltoall for this factor, and dispatches in which some pair of ranks needs more.",
    )
