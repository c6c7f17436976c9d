"""Random tables with ids that name their own key, and cuts of them made by slicing alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_dispatch.layouts import BSHD, SBHD, THD, Layout, Masked, ShardKind
from moe_dispatch.replay import RoutingTable
from tests.layouts.written_batches import assemble, zigzag


def random_ids(length: int, layers: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, layers, num_experts, generator=generator).argsort(2)[:, :, :top_k]


def small_table(lengths: dict[str, int] | None = None, *, layers: int = 3, top_k: int = 2) -> RoutingTable:
    lengths = {"a": 5, "b": 3, "c": 8} if lengths is None else lengths
    pairs = {name: random_ids(size, layers, top_k, 8, seed) for seed, (name, size) in enumerate(lengths.items())}
    return RoutingTable(pairs, num_experts=8)


class WriterOfVerl:
    """Write the routes of one sample as verl 0.9.1 does: int16, with zeros where the engine gave none.

    Of ``tokens`` tokens, ``routes`` positions have a route. ``generated`` tells which tokens of the response the model
    generated; others came from tools.
    """

    def __init__(self, prompt: int, generated: list[int], routes: int, seed: int) -> None:
        self.prompt, self.generated, self.routes = prompt, torch.tensor(generated), routes
        self.ids = random_ids(routes, 2, 2, 8, seed)

    def padded(self, prompt_length: int, response_length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Routes (S, L, K), attention mask (S,) and response mask, prompts padded left and responses right."""
        ids = torch.zeros(prompt_length + response_length, 2, 2, dtype=torch.int16)
        start, end = prompt_length - self.prompt, prompt_length + len(self.generated)
        ids[start : start + self.routes] = self.ids
        mask = torch.zeros(len(ids), dtype=torch.int64)
        mask[start:end] = 1
        return ids, mask, F.pad(self.generated, (0, response_length - len(self.generated)))


SAMPLES_OF_VERL = {
    "one turn": WriterOfVerl(3, [1, 1, 1], 5, 0),
    "full response": WriterOfVerl(4, [1, 1, 1, 1, 1], 8, 1),
    "ends with a tool": WriterOfVerl(2, [1, 1, 0, 1, 0], 5, 2),  # no forward after the last generated token
    "filled up": WriterOfVerl(1, [0], 0, 3),  # a synthetic sample, all zeros
}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    names: list[int | str]
    ids: list[Tensor]
    owned: list[int]
    num_experts: int
    form: str
    kind: ShardKind
    cp: int
    tp: int
    stages: list[list[int]]
    micro_batches: list[range]

    def table(self) -> RoutingTable:
        return RoutingTable(zip(self.names, self.ids, strict=True), num_experts=self.num_experts)

    def expected(self, sequence: int) -> Tensor:
        """The entries as the table should hold them: an entry without any id is unknown."""
        ids = self.ids[sequence]
        return torch.where((ids < 0).all(2, keepdim=True), -2, ids)

    def rows(self, micro_batch: range, what: list[Tensor], cp_rank: int, tp_rank: int) -> Tensor:
        """One rank's rows of a micro-batch, by slicing padded sequences; padding is -1."""
        padded = []
        for part, owned in ((what[i], self.owned[i]) for i in micro_batch):
            gap = torch.full((owned - len(part), *part.shape[1:]), -1)
            padded.append(torch.cat([gap, part] if self.form == "Masked" else [part, gap]))
        form = "BSHD" if self.form == "Masked" else self.form
        if self.cp > 1 and self.kind == "zigzag":
            x = assemble(form, [zigzag(part, cp_rank, self.cp) for part in padded])
        else:
            x = _part(form, assemble(form, padded), cp_rank, self.cp)
        return _part(form, x, tp_rank, self.tp)

    def layout(self, micro_batch: range) -> Layout:
        lengths = [len(self.ids[i]) for i in micro_batch]
        if self.form == "THD":
            return THD(_sums(lengths), _sums([self.owned[i] for i in micro_batch]))
        if self.form == "Masked":
            before = torch.tensor([self.owned[0] - length for length in lengths])
            return Masked((torch.arange(self.owned[0]) >= before.unsqueeze(1)).flatten())
        return {"BSHD": BSHD, "SBHD": SBHD}[self.form](lengths)


def _part(form: str, x: Tensor, index: int, size: int) -> Tensor:
    dim = 1 if form == "BSHD" else 0
    length = x.shape[dim] // size
    return x.narrow(dim, index * length, length)


def _sums(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def draw_case(seed: int) -> Drawn:
    """Draw a random table, and one way to cut it: layout, parallelism and micro-batches."""
    draw = random.Random(seed)
    cp, tp, pp = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 3)
    form = draw.choice(["BSHD", "SBHD", "THD", "Masked"])
    kind: ShardKind = "zigzag" if draw.randint(0, 1) else "contiguous"
    if form == "Masked":
        cp, tp, kind = 1, 1, "contiguous"  # a part of its rows does not tell the sequences apart
    num_experts, top_k = draw.choice([4, 254, 255, 40_000]), draw.randint(1, 3)
    count, layers = draw.randint(1, 4), draw.randint(pp, pp + 2)
    multiple = 2 * cp * tp
    owned = [draw.randint(1, 3) * multiple for _ in range(count)]
    if form != "THD":
        owned = [max(owned)] * count
    lengths = [draw.randint(1, rows) for rows in owned]
    generator = torch.Generator().manual_seed(seed)
    first = [torch.randint(num_experts, (size, layers, 1), generator=generator) for size in lengths]
    ids = [(part + torch.arange(top_k)) % num_experts for part in first]
    ids = [part.masked_fill(torch.rand(part.shape, generator=generator) < 0.2, -1) for part in ids]
    names = draw.sample([*range(10), *"abcdefghij"], count)
    bounds = sorted(draw.sample(range(1, count), draw.randint(0, count - 1))) if count > 1 else []
    return Drawn(
        names=names,
        ids=ids,
        owned=owned,
        num_experts=num_experts,
        form=form,
        kind=kind,
        cp=cp,
        tp=tp,
        stages=[part.tolist() for part in torch.arange(layers).tensor_split(pp)],
        micro_batches=[range(a, b) for a, b in zip([0, *bounds], [*bounds, count], strict=True)],
    )
