"""The picture docs/figures/overlap.svg: nodes of Megatron's schedule on two streams, as the simulation ran them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.integration.megatron_core.schedule import Ran

NAMES = {"pre_dispatch_computation": "attention, router", "attn": "attention, router", "mlp": "experts"}
UNIT, LEFT, LANES = 58, 84, {"compute": 40, "exchange": 92}
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2933 } .small { font-size: 11px }
.card { fill: #fbfbf8; stroke: #c9c9c0 } .forward { fill: #9fc5e8; stroke: #3d6d99 }
.backward { fill: #f6c6a0; stroke: #a8642a }"""


def of_layers(nodes: Sequence[Ran], number: int) -> list[Ran]:
    """The nodes of layers between the forwards of two micro-batches, from the ``number``-th on."""
    first, last = [index for index, ran in enumerate(nodes) if ran.node == "pre_process forward"][number : number + 2]
    return [ran for ran in nodes[first:last] if "process" not in ran.node]


def svg(nodes: Sequence[Ran]) -> str:
    start, end = min(ran.begin for ran in nodes), max(ran.end for ran in nodes)
    width = round(LEFT + (end - start) * UNIT) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 176" role="img" aria-labelledby="t">',
        '<title id="t">Exchanges of one micro-batch run beside the compute of another, on their own stream</title>',
        f'<style>{STYLE}</style>\n<rect class="card" x="1" y="1" width="{width - 2}" height="174" rx="6"/>',
        '<text x="14" y="26">two layers: the forward of one micro-batch, the backward of the one before</text>',
    ]
    parts += [f'<text class="small" x="14" y="{top + 26}">{stream}</text>' for stream, top in LANES.items()]
    for ran in nodes:
        name, _, phase = ran.node.partition(" ")
        left, top, wide = LEFT + (ran.begin - start) * UNIT, LANES[ran.stream], (ran.end - ran.begin) * UNIT
        label = NAMES.get(name, name.removeprefix("moe_")).split(", ")
        parts.append(f'<rect class="{phase}" x="{left:.1f}" y="{top}" width="{wide:.1f}" height="44"/>')
        for line, text in enumerate(label):
            height = top + 26 + 13 * line - 6 * (len(label) - 1)
            parts.append(
                f'<text class="small" x="{left + wide / 2:.1f}" y="{height}" text-anchor="middle">{text}</text>'
            )
    for at, phase in ((LEFT, "forward"), (LEFT + 110, "backward")):
        parts.append(f'<rect class="{phase}" x="{at}" y="150" width="14" height="14"/>')
        parts.append(f'<text class="small" x="{at + 20}" y="161">{phase}</text>')
    return "\n".join([*parts, "</svg>\n"])
