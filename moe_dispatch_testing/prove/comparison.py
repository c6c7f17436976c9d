"""Compare what the ranks hold with what one process holds, and tell differences as what they look like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from moe_dispatch_testing.prove import causes
from moe_dispatch_testing.prove.running import Held, Record
from moe_dispatch_testing.prove.setup import Setup
from moe_dispatch_testing.prove.texts import listed, names_of, ranks_of

Alone = Callable[[int, int], tuple[dict[str, float], dict[str, Tensor]]]
"""What one process gives on the batch of some ranks alone, with a seed: numbers, and gradients by key."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a rank holds of a whole tensor."""

    rank: int
    held: Held
    numbers: Tensor  # of the elements of the whole


@final
class Whole:
    """The tensors of one process, by key, and who holds which parts of them."""

    def __init__(self, setup: Setup, ranks: Sequence[Record], one: Record) -> None:
        self.setup, self.ranks, self.one = setup, ranks, one
        self.findings: list[str] = []
        self.sizes: dict[str, int] = {}
        self._own: dict[str, list[Part]] = {}
        for held in one.held.values():
            self._own.setdefault(held.key, []).append(Part(rank=0, held=held, numbers=held.numbers))
            size = 1 + int(held.numbers.max()) if held.numbers.numel() else 0
            self.sizes[held.key] = max(self.sizes.get(held.key, 0), size)
        self.parts: dict[str, list[Part]] = {key: [] for key in self.sizes}
        for record in ranks:
            for held in record.held.values():
                if not (text := self._misplaced(record.rank, held)):
                    self.parts[held.key].append(Part(rank=record.rank, held=held, numbers=held.numbers))
                elif not held.is_buffer:
                    self.findings.append(text)
        self._check_held()

    def _misplaced(self, rank: int, held: Held) -> str:
        """Say why what a rank holds is no part of the tensor of one process, or of the experts that it serves."""
        key = held.key
        if key not in self._own:
            return (
                f"{key} on rank {rank} has no counterpart on one process. If it has another name there, define "
                "name(own, model)."
            )
        whole = self._own[key][0].held.shape
        if held.shape is None or whole is None:
            return ""
        if held.shape != whole:
            over = f", over ranks {listed(held.mesh_ranks)} together" if held.mesh_ranks else ""
            cause = (
                "Ranks with different experts share its mesh: shard it over those that hold copies"
                if held.experts and held.mesh_ranks
                else "Say with places(model) which part it is"
            )
            return f"{key} is {held.shape} on rank {rank}{over}, and {whole} on one process. {cause}."
        if held.experts is None or not held.mesh_ranks or not len(held.numbers):
            return ""
        rows = {*(held.numbers // torch.Size(whole[1:]).numel()).tolist()}
        if len(rows) <= len(held.experts) and not rows <= {*held.experts}:
            return (
                f"{key} on rank {rank} is experts {listed(sorted(rows))}, but its dispatcher sends it the rows of "
                f"experts {listed(held.experts)}. The group of the dispatcher and the mesh of the weights have their "
                "ranks in another order (wrong mesh)."
            )
        return ""

    def _check_held(self) -> None:
        for key, parts in self.parts.items():
            if all(part.held.is_buffer for part in self._own[key]):
                continue
            seen = torch.zeros(self.sizes[key], dtype=torch.bool)
            for part in parts:
                seen[part.numbers] = True
            if not seen.all() and not self.findings:
                what = "" if not seen.any() else f" {int((~seen).sum())} elements of"
                self.findings.append(f"No rank holds{what} {key}.")
            frozen = [part.rank for part in parts if not part.held.trainable]
            if frozen and self._own[key][0].held.trainable:
                self.findings.append(f"{key} is frozen on {ranks_of(frozen)}, and not on one process.")
            elif parts and not frozen and not self._own[key][0].held.trainable:
                self.findings.append(f"{key} is frozen on one process, and not on the ranks.")

    def gathered(self, read: Callable[[Held], Tensor | None], parts: Sequence[Part], key: str) -> Tensor:
        """Join parts to a flat tensor. An element that several ranks hold is taken from the first."""
        whole = torch.zeros(self.sizes[key])
        for part in reversed(parts):
            if (value := read(part.held)) is not None and len(value) == len(part.numbers):
                whole[part.numbers] = value.to(whole.dtype)
        return whole

    def of_ranks(self, read: Callable[[Held], Tensor | None]) -> dict[str, Tensor]:
        """Return the whole tensors as the ranks hold them, by key."""
        return {key: self.gathered(read, parts, key) for key, parts in self.parts.items() if parts}

    def of_one(self, read: Callable[[Held], Tensor | None]) -> dict[str, Tensor]:
        """Return the tensors of one process, by key."""
        return {key: self.gathered(read, parts, key) for key, parts in self._own.items()}

    def to_load(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values by the names of one process."""
        held_by = self.one.held
        return {name: values[held.key][held.numbers] for name, held in held_by.items() if held.key in values}

    def told(self, by_key: Mapping[str, str]) -> list[str]:
        """Return each text once, with the keys for which it holds in the place of its braces."""
        groups: dict[str, list[str]] = {}
        for key, text in by_key.items():
            groups.setdefault(text, []).append(key)
        return [text.replace("{}", names_of(keys)) for text, keys in groups.items()]

    def trained(self) -> list[str]:
        """Return the keys of trainable parameters."""
        return [key for key, own in self._own.items() if own[0].held.trainable and not own[0].held.is_buffer]

    # ---- start ----

    def compare_start(self, own: Mapping[str, Tensor]) -> list[str]:
        """Tell ranks that start apart, and experts in the places of others; ``own`` are the values of one process."""
        apart = self._apart(lambda held: held.start, exactly=True)
        return self.told(
            {key: f"{who} start with different values of {{}}." for key, who in apart.items()}
        ) or self._moved(own)

    def _apart(self, read: Callable[[Held], Tensor | None], *, exactly: bool = False) -> dict[str, str]:
        """Say by key which ranks hold other values of elements that they share."""
        found = {}
        for key, parts in self.parts.items():
            first = self.gathered(read, parts, key)
            groups: dict[int, list[int]] = {}
            for part in parts:
                value, want = read(part.held), first[part.numbers]
                if value is not None and not (torch.equal(value, want) if exactly else self.close(value, want)):
                    peer = next(one.rank for one in parts if torch.isin(part.numbers, one.numbers).any())
                    groups.setdefault(peer, [peer]).append(part.rank)
            if groups:
                found[key] = ", and ".join(map(ranks_of, groups.values()))
        return found

    def _moved(self, own: Mapping[str, Tensor]) -> list[str]:
        """Tell experts that start with the values which another expert has on one process."""
        places: dict[bytes, tuple[str, int]] = {}
        for key, row, values in self._experts(own):
            places.setdefault(values.numpy().tobytes(), (key, row))
        wrong: dict[str, str] = {}
        begun = [*self._experts(self.of_ranks(lambda held: held.start))]
        seen: dict[bytes, tuple[str, int]] = {}
        for key, row, values in begun:
            other, number = seen.setdefault(values.numpy().tobytes(), (key, row))
            if (other, number) != (key, row) and len({*values.tolist()}) > 1 and len(places) == len(begun):
                alike = f"{{}} and {other}" if row < 0 else f"numbers {number} and {row} of {{}}"
                wrong.setdefault(key, f"Different experts start alike: {alike}. Do ranks draw them from one seed?")
        for key, row, values in [] if wrong else begun:
            other, number = places.get(values.numpy().tobytes(), (key, row))
            if (other, number) == (key, row) or len({*values.tolist()}) == 1:
                continue
            size = values.numel()
            holders = ranks_of(part.rank for part in self.parts[key] if row < 0 or (part.numbers // size == row).any())
            what = other if row < 0 else f"number {number}" + f" of {other}" * (other != key)
            here = "{}" if row < 0 else f"number {row} of {{}}"
            wrong.setdefault(
                key,
                f"An expert is in the wrong place: {here} on {holders} starts with the values that {what} has on one "
                "process.",
            )
        return self.told(wrong)

    def _experts(self, values: Mapping[str, Tensor]) -> Iterable[tuple[str, int, Tensor]]:
        """Yield the values of each expert, its key, and its number in the key or -1."""
        for key, flat in values.items():
            shape = self._own[key][0].held.shape
            if any(part.held.experts for part in self.parts[key]):
                stacked = shape is not None and len(shape) > 2
                for row, part in enumerate(flat.view(shape[0], -1) if stacked and shape else flat[None]):
                    yield key, row if stacked else -1, part

    # ---- steps ----

    def close(self, got: Tensor, want: Tensor, scale: float = 0.0) -> bool:
        """Return whether two flat tensors differ by rounding; ``scale`` is the length of all tensors of their kind."""
        tolerance = self.tolerance
        far = torch.linalg.vector_norm(got.double() - want.double())
        return bool(far <= tolerance * torch.linalg.vector_norm(want.double()) + tolerance * 1e-4 * scale)

    @property
    def tolerance(self) -> float:
        """The largest relative difference that is rounding."""
        given = self.setup.tolerance
        return given if given is not None else 1e-5 if torch.get_default_dtype() == torch.float64 else 2e-3

    def compare_step(self, number: int, ranks: Sequence[Record], alone: Alone) -> list[str]:
        """Tell how the numbers, gradients and new values of a step differ."""
        numbers = [record.numbers[number] for record in ranks]
        want = self.one.numbers[number]
        gradients = causes.Gradients(self, number, numbers, want, alone)
        found = [*self._compare_numbers(numbers, want, gradients), *gradients.findings()]
        if not found and (number == 0 or torch.get_default_dtype() == torch.float64):
            found = self._compare_state(number)  # Adam makes moves of what was rounding in float32
        if found and (noise := self._noise(number, alone, want)):
            return [noise]
        return found

    def _noise(self, number: int, alone: Alone, want: Mapping[str, float]) -> str:
        """Say that a step is random, if another seed gives one process other results."""
        everyone = -1
        numbers, gradients = alone(everyone, 1)
        again, others = alone(everyone, 2)
        same = all(self.same(value, again[key]) for key, value in numbers.items())
        if same and all(self.close(gradients[key], others[key], 1e-3) for key in gradients):
            return ""
        where = f": dropout in {', '.join(self.one.dropout[:3])}" if self.one.dropout else ""
        return (
            f"The step is random{where}. One process gives another result with another seed, so nothing can be "
            "compared. Set it to 0 for the proof."
        )

    def same(self, value: float, want: float) -> bool:
        """Return whether two numbers differ by rounding."""
        return abs(value - want) <= self.tolerance * abs(want) + 1e-12 or (value != value and want != want)

    def _compare_numbers(
        self, numbers: Sequence[Mapping[str, float]], want: Mapping[str, float], gradients: causes.Gradients
    ) -> list[str]:
        found = []
        for key, right in want.items():
            if key == "norm":  # is told with the gradients
                continue
            got = {rank: one[key] for rank, one in enumerate(numbers) if key in one}
            if all(self.same(value, right) for value in got.values()):
                continue
            by_batch: dict[int, list[int]] = {}
            for rank in got:
                by_batch.setdefault(self.setup.batch_number(rank), []).append(rank)
            split = [
                ranks for ranks in by_batch.values() if not all(self.same(got[rank], got[ranks[0]]) for rank in ranks)
            ]
            shown = ", ".join(f"{value:.6g}" for value in got.values())
            if split:
                found.append(
                    f"{key}: {ranks_of(split[0])} take the same batch and have different values ({shown}). Is it "
                    "dropout with different seeds, or a reduction that is missing?"
                )
            elif cause := gradients.number_finding(key, got, right):
                found.append(f"{key} {cause} ({shown}; one process: {right:.6g}).")
        return found

    def _compare_state(self, number: int) -> list[str]:
        """Tell where values after the step differ, though gradients do not."""

        def moved(held: Held) -> Tensor:
            return held.after[number] - (held.after[number - 1] if number else held.start)

        want = self.of_one(moved)
        scale = sum(float(value.double().square().sum()) for value in want.values()) ** 0.5
        gradients = self.of_one(lambda held: held.gradients[number] if held.gradients else None)
        numbers = torch.cat([gradients[key].double() for key in self.trained()])
        self._typical = float(numbers.square().mean().sqrt())
        found, in_stacks = dict[str, str](), True
        for key, parts in self.parts.items():
            here = self._own[key][0].held
            off = [
                part
                for part in parts
                if not self._arrives(
                    moved(part.held), want[key][part.numbers], part, scale, gradients[key][part.numbers]
                )
            ]
            if not off:
                continue
            in_stacks = in_stacks and len(off) == len(parts) and self._in_one_stack(key)
            ranks = [part.rank for part in off]
            options = sorted({n for part in off for n, x in part.held.options.items() if x != here.options.get(n, x)})
            states = sorted(
                {n for part in off for n in part.held.states[number] if self._state_differs(n, number, part, key)}
            )
            still = [part.rank for part in off if not moved(part.held).any()]
            if here.is_buffer:
                found[key] = f"The buffer {{}} differs on {ranks_of(ranks)} after the step."
            elif len(still) == len(off):
                found[key] = f"The optimizer does not move {{}} on {ranks_of(still)}. Was it made before sharding?"
            elif options and {*options} <= {n for part in off for n in part.held.decides}:
                found[key] = (
                    f"{off[0].held.optimizer} steps {{}} by numbers that each rank finds in what it holds "
                    f"({', '.join(options)}). Use an optimizer that looks at each parameter alone, or let ranks agree."
                )
            elif options:
                shown = ", ".join(
                    f"{name} {off[0].held.options[name]:g} for {here.options[name]:g}" for name in options
                )
                found[key] = f"The optimizer steps {{}} with other options on {ranks_of(ranks)}: {shown}."
            elif states:
                found[key] = f"The optimizer has another state ({', '.join(states)}) for {{}} on {ranks_of(ranks)}."
            elif who := self._apart(lambda held: held.after[number]).get(key):
                found[key] = f"After the step {who} hold different values of {{}}, though gradients are right."
            else:
                found[key] = f"{{}} differs on {ranks_of(ranks)} after the step, though its gradient is right."
        if found and in_stacks:
            by = " and ".join(sorted({part.held.optimizer for key in found for part in self.parts[key]}))
            text = (
                f"{by} takes the stacks {{}} for one tensor each, so experts step otherwise where a rank holds fewer. "
            )
            found = dict.fromkeys(found, f"{text}Step them with PerExpert of moe_dispatch.training.")
        told = self.told(found)
        if not told and not number:
            told = self._unmoved(want)
        return told

    def _in_one_stack(self, key: str) -> bool:
        """Whether each rank holds some of the experts of a stack, and its optimizer all of these as one parameter."""
        shape = self._own[key][0].held.shape
        return (
            shape is not None
            and len(shape) > 2
            and all(part.held.experts and len(part.numbers) < self.sizes[key] for part in self.parts[key])
        )

    def _arrives(self, got: Tensor, want: Tensor, part: Part, scale: float, gradient: Tensor) -> bool:
        """Return whether two moves are the same. Where a gradient is rounding only, so is the move that Adam makes."""
        if gradient.any():
            seen = gradient.abs() > self.tolerance * self._typical
            got, want = got[seen], want[seen]
        rounding = float(torch.finfo(want.dtype).eps * torch.linalg.vector_norm(part.held.start.double())) * 8
        far = float(torch.linalg.vector_norm(got.double() - want.double()))
        length = float(torch.linalg.vector_norm(want.double()))
        return far <= 10 * self.tolerance * length + self.tolerance * 1e-3 * scale + rounding

    def _state_differs(self, name: str, number: int, part: Part, key: str) -> bool:
        value, mine = part.held.states[number][name], self._own[key]
        if not all(name in own.held.states[number] for own in mine):
            return True
        if len(value) != len(part.numbers):
            return len(value) == 1 and not torch.equal(value, mine[0].held.states[number][name])
        return not self.close(
            value, self.gathered(lambda held: held.states[number].get(name), mine, key)[part.numbers], 1e-12
        )

    def _unmoved(self, moves: Mapping[str, Tensor]) -> list[str]:
        """Tell parameters with a gradient that no run moves."""
        gradient = self.of_one(lambda held: held.gradients[0])
        still = [key for key in self.trained() if gradient[key].any() and not moves[key].any()]
        if not still:
            return []
        if len(still) == len(self.trained()):
            return ["No parameter moves in the first step, on one process either. Is the learning rate 0?"]
        text = "{} has a gradient and does not move, on one process either: the optimizer does not hold it."
        return self.told(dict.fromkeys(still, text))
