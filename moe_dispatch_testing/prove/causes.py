"""Name what makes a gradient, a norm or a loss differ: a factor, a reduction, whose tokens it counts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from moe_dispatch_testing.prove.texts import ranks_of

if TYPE_CHECKING:
    from moe_dispatch_testing.prove.comparison import Alone, Part, Whole

EVERYONE = -1


@final
class Gradients:
    """The gradients of a step, as they were before clipping, on the ranks and on one process."""

    def __init__(
        self, whole: Whole, number: int, numbers: Sequence[Mapping[str, float]], want: Mapping[str, float], alone: Alone
    ) -> None:
        self.whole, self.setup, self.number, self._alone = whole, whole.setup, number, alone
        clipped = whole.of_one(lambda held: held.gradients[number])
        length, self.norm = _length(clipped.values()), want.get("norm")
        # A norm above the length of the gradients says that they were clipped, to that length.
        is_clipped = self.norm is not None and self.norm > length * (1 + 1e-6)
        self.limit = length if is_clipped else float("inf")
        self.norms = {rank: one["norm"] for rank, one in enumerate(numbers) if "norm" in one}
        self._factors: dict[int, float] = {}  # by rank, if all its gradients have one
        self.want = self._before_clipping(clipped, self.norm)
        self.scale = _length(self.want.values())
        self.got = {
            key: [(part, self._of_part(part)) for part in parts]
            for key, parts in whole.parts.items()
            if key in self.want
        }

    def _before_clipping(self, gradients: Mapping[str, Tensor], norm: float | None) -> dict[str, Tensor]:
        return {key: one * self._unclipped(norm) for key, one in gradients.items()}

    def _unclipped(self, norm: float | None) -> float:
        return 1.0 if norm is None else max(1.0, norm / self.limit)

    def _of_part(self, part: Part) -> Tensor | None:
        gradient = part.held.gradients[self.number]
        return None if gradient is None else gradient * self._unclipped(self.norms.get(part.rank))

    # ---- gradients ----

    def findings(self) -> list[str]:
        """Tell how gradients and their norm differ."""
        by_key = {key: text for key in self.whole.trained() if (text := self._finding(key))}
        if not by_key:
            return self._norm_findings()
        same = self._same_factors(by_key)
        if same and all(factor < 1 for factor in self._factors.values()) and (clipped := self._norm_findings()):
            return clipped
        return [same] if same else self.whole.told(by_key)

    def _finding(self, key: str) -> str:
        pairs, want = self.got[key], self.want[key]
        missing = [part.rank for part, got in pairs if got is None and want[part.numbers].any()]
        if missing:
            where = "on any rank" if len(missing) == len(pairs) else f"on {ranks_of(missing)}"
            return f"no gradient of {{}} {self._resharded(missing) or f'{where}.'}"
        given = [(part, got) for part, got in pairs if got is not None]
        if any(len(got) != len(part.numbers) for part, got in given):
            return "gradient of {} has another shape than the parameter. Define gradient(parameter)."
        off = [(part, got) for part, got in given if not self.whole.close(got, want[part.numbers], self.scale)]
        if not off:
            return ""
        if any(not torch.isfinite(got).all() for _, got in off):
            return f"gradient of {{}} is not finite on {ranks_of(part.rank for part, _ in off)}."
        factors = [self._factor(got, want[part.numbers]) for part, got in off]
        known = [factor for factor in factors if factor is not None]
        if len(known) == len(off) and max(known) - min(known) <= 1e-3 * abs(known[0]):
            only = "" if len(off) == len(given) else f" on {ranks_of(part.rank for part, _ in off)}"
            return f"gradient of {{}} is {self.times(known[0])}{only}."
        far = max(_length([got - want[part.numbers]]) / (_length([want[part.numbers]]) or 1.0) for part, got in off)
        ranks = [part.rank for part, _ in off]
        where = self._resharded(ranks) or f"on {ranks_of(ranks)}."
        return (
            self._unreduced(key, given)
            or self._tokens(key, off)
            or f"gradient of {{}} differs by {far:.2g} of its length {where}"
        )

    def _factor(self, got: Tensor, want: Tensor) -> float | None:
        square = float(want.double().square().sum())
        factor = float((got.double() * want.double()).sum()) / square if square else 0.0
        return factor if factor > 0 and self.whole.close(got / factor, want, self.scale) else None

    def times(self, factor: float) -> str:
        """Say how many times too large something is, and which sizes of the mesh have that product."""
        size = factor if factor > 1 else 1 / factor
        names = [
            " x ".join(dims)
            for dims in self._dimensions()
            if abs(self._size(dims) - size) < 0.005 * size and size > 1.5
        ]
        cause = f" (number of ranks along {', or '.join(names)})" if names else ""
        return f"{size:.2f} times too {'large' if factor > 1 else 'small'}{cause}"

    def _dimensions(self) -> list[tuple[str, ...]]:
        names = [name for name, size in self.setup.mesh.items() if size > 1]
        return [dims for count in range(1, len(names) + 1) for dims in itertools.combinations(names, count)]

    def _size(self, dims: Sequence[str]) -> int:
        return torch.Size(self.setup.mesh[name] for name in dims).numel()

    def _same_factors(self, by_key: Mapping[str, str]) -> str:
        """Tell that all gradients of a rank have one factor, if no norm says that they were clipped."""
        factors: dict[int, list[float]] = {}
        for key, pairs in self.got.items():
            for part, got in pairs:
                if key in self.whole.trained() and self.want[key][part.numbers].any():
                    factor = None if got is None else self._factor(got, self.want[key][part.numbers])
                    if factor is None:
                        return ""
                    factors.setdefault(part.rank, []).append(factor)
        if any(max(of_rank) - min(of_rank) > 1e-3 * of_rank[0] for of_rank in factors.values()) or len(by_key) < 2:
            return ""
        self._factors = first = {rank: of_rank[0] for rank, of_rank in factors.items()}
        if max(first.values()) - min(first.values()) <= 1e-3 * first[min(first)]:
            return f"Every gradient is {self.times(first[min(first)])}."
        listed = ", ".join(f"{factor:.3g}" for factor in first.values())
        return f"Gradients have one factor on each rank ({listed}): each clips by a norm of its own."

    def _unreduced(self, key: str, given: Sequence[tuple[Part, Tensor]]) -> str:
        """Tell that ranks keep gradients of their own, which add up to the right one."""
        if all(torch.equal(got, given[0][1]) for _, got in given):
            return ""
        for dims in self._dimensions():
            groups: dict[tuple[object, ...], list[tuple[Part, Tensor]]] = {}
            for part, got in given:
                rest = (place for name, place in self.setup.coordinates(part.rank).items() if name not in dims)
                groups.setdefault((*rest, part.numbers.numpy().tobytes()), []).append((part, got))
            if any(len(group) != self._size(dims) for group in groups.values()):
                continue
            sums = [
                (torch.stack([got for _, got in group]).sum(0), self.want[key][group[0][0].numbers])
                for group in groups.values()
            ]
            for how, size in (("sum", 1), ("mean", self._size(dims))):
                if all(self.whole.close(total / size, want, self.scale) for total, want in sums):
                    return (
                        f"gradient of {{}} is that of each rank alone: a reduction along {' x '.join(dims)} is missing "
                        f"(their {how} is right)."
                    )
        return ""

    def _tokens(self, key: str, off: Sequence[tuple[Part, Tensor]]) -> str:
        """Tell whose tokens a gradient counts, and how."""
        alone, weights = self._of_batches, self._weights
        if alone is None or weights is None:
            return ""
        if weights[1]:
            means = {number: 1 / len(alone) for number in range(len(alone))}
            if self._all_are(key, off, lambda rank: means):
                return (
                    "gradient of {} is the mean of the means of the ranks: a rank with fewer tokens counts as much as "
                    "one with more. Divide the sum over tokens by the number of tokens of all ranks."
                )
            for dims in [(), *self._dimensions()]:
                if self._all_are(key, off, lambda rank: self._group(rank, dims, weights[0])):  # noqa: B023
                    whose = f"of the ranks along {' x '.join(dims)} only" if dims else "of the rank's own tokens only"
                    return f"gradient of {{}} is that {whose}: a reduction is missing, or goes over the wrong group."
            return self._unevenly(key, off, weights[0])
        return (
            "gradient of {} differs, and that of the whole batch is not made up of those of the ranks' batches: is a "
            "part of the loss that is not a sum over tokens, such as an auxiliary loss, counted per rank?"
        )

    def _unevenly(self, key: str, off: Sequence[tuple[Part, Tensor]], right: Sequence[float]) -> str:
        """Tell that a gradient is made up of those of all batches, whose tokens do not count alike."""
        assert self._of_batches is not None
        counts = list[float]()
        for part, got in off:
            columns = torch.stack([alone[key][part.numbers] for alone in self._of_batches], 1).double()
            weights = _combined(columns, got.double())
            if not self.whole.close(columns @ weights, got, self.scale):
                return ""
            counts += [
                float(mine / due)
                for mine, due, column in zip(weights, right, columns.unbind(1), strict=True)
                if due and column.any()
            ]
        if not counts or min(counts) <= 0:
            return ""
        return (
            "gradient of {} is a mean of means, or of sums with other divisors: the tokens of one rank's batch count "
            "several times as much as those of another's. Divide the sum over tokens by the number of tokens of all "
            "ranks."
        )

    def _group(self, rank: int, dims: Sequence[str], weights: Sequence[float]) -> dict[int, float]:
        return {number: weights[number] for number in map(self.setup.batch_number, self._peers(rank, dims))}

    def _all_are(
        self, key: str, off: Sequence[tuple[Part, Tensor]], weights: Callable[[int], Mapping[int, float]]
    ) -> bool:
        alone = self._of_batches
        assert alone is not None
        factors = []
        for part, got in off:
            counted = [weight * alone[number][key][part.numbers] for number, weight in weights(part.rank).items()]
            want = torch.stack(counted).sum(0)
            if not self.whole.close(got, want, self.scale):
                factor = self._factor(got, want)
                if factor is None:
                    return False
                factors.append(factor)
        return not factors or max(factors) - min(factors) <= 1e-3 * factors[0]

    @functools.cached_property
    def _of_batches(self) -> list[dict[str, Tensor]] | None:
        """Gradients of one process for the batch of each rank alone; None if it cannot run on them."""
        numbers = 1 + max(map(self.setup.batch_number, range(self.setup.num_ranks)))
        try:
            found = [self._alone(number, 1) for number in range(numbers)] if numbers > 1 else []
        except Exception:  # a batch may be too small for the user's step; then no cause is named
            return None
        return [self._before_clipping(gradients, values.get("norm")) for values, gradients in found] or None

    @functools.cached_property
    def _weights(self) -> tuple[list[float], bool] | None:
        """How much each batch counts in the right gradient; and whether that is all there is to it."""
        if self._of_batches is None:
            return None
        columns = torch.stack([_flat(one, self.want) for one in self._of_batches], 1)
        right = _flat(self.want, self.want)
        weights = _combined(columns, right)
        return weights.tolist(), bool(
            _length([columns @ weights - right]) <= 10 * self.whole.tolerance * _length([right])
        )

    def _resharded(self, ranks: Sequence[int]) -> str:
        """Say where FSDP has resharded parameters before the second half of a backward, or nothing."""
        schedule = next((one.splits_backward for one in self.whole.ranks if one.rank in ranks and one.reshards), "")
        stages = {str(self.setup.coordinates(rank)["pp"]) for rank in ranks if "pp" in self.setup.mesh}
        where = f"stage {' and '.join(sorted(stages))}" if stages else ranks_of(ranks)
        text = f"on {where}: resharded before a split backward ({schedule}). Use reshard_after_forward=False."
        return text if schedule else ""

    # ---- numbers ----

    def _norm_findings(self) -> list[str]:
        """Tell which parts a wrong norm counts."""
        if self.norm is None or all(self.whole.same(norm, self.norm) for norm in self.norms.values()):
            return []
        squares = dict.fromkeys(range(self.setup.num_ranks), 0.0)
        for part, got in itertools.chain.from_iterable(self.got.values()):
            if got is not None:
                squares[part.rank] += float((got.double() / self._factors.get(part.rank, 1.0)).square().sum())
        listed = ", ".join(dict.fromkeys(f"{norm:.6g}" for norm in self.norms.values()))
        told = f"The norm of the gradients is {listed} on the ranks, and {self.norm:.6g} on one process: "
        for dims in [(), *self._dimensions()]:
            sums = {rank: sum(squares[peer] for peer in self._peers(rank, dims)) ** 0.5 for rank in self.norms}
            if all(abs(sums[rank] - norm) <= 1e-3 * norm for rank, norm in self.norms.items()):
                how = f"ranks clip by the sum along {' x '.join(dims)}" if dims else "each rank clips by its own part"
                return [f"{told}{how}. Count each gradient once, and the parts of all ranks."]
        return [f"{told}{self.times(next(iter(self.norms.values())) / self.norm)}."]

    def _peers(self, rank: int, dims: Sequence[str]) -> list[int]:
        """Return the ranks that differ from a rank along some dimensions only."""
        here = [(name, place) for name, place in self.setup.coordinates(rank).items() if name not in dims]
        return [peer for peer in range(self.setup.num_ranks) if {*here} <= {*self.setup.coordinates(peer).items()}]

    def number_finding(self, key: str, got: Mapping[int, float], right: float) -> str:
        """Say how a number of the step differs; nothing if the ranks' own numbers make it up."""
        by_batch = {self.setup.batch_number(rank): value for rank, value in got.items()}
        total, same = sum(by_batch.values()), self.whole.same
        if len({*got.values()}) > 1 and (same(total, right) or same(total / len(by_batch), right)):
            return ""
        try:
            own = {number: self._alone(number, 1)[0][key] for number in by_batch} if len(by_batch) > 1 else {}
        except Exception:
            own = {}
        first = next(iter(got.values()))
        if own and all(same(value, own[number]) for number, value in by_batch.items()):
            weights = self._weights
            adds_up = weights is not None and same(
                sum(weights[0][number] * value for number, value in own.items()), right
            )
            return "" if adds_up or key == "loss" else "is counted on the tokens of each rank alone"
        if all(same(value, first) for value in got.values()):
            if own and same(first, sum(own.values()) / len(own)):
                return "is the mean of what each rank has alone, whatever its number of tokens"
            if own and same(first, sum(own.values())):
                return "is the sum of what each rank has alone: it is counted once per rank"
            return f"is {self.times(first / right)}" if right * first > 0 else "differs"
        return "differs"


def _combined(columns: Tensor, right: Tensor) -> Tensor:
    """Return with which weights columns come closest to a vector. Columns may be 0."""
    weights: Tensor = torch.linalg.pinv(columns.mT @ columns, hermitian=True) @ (columns.mT @ right)
    return weights


def _length(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(one.double().square().sum()) for one in tensors) ** 0.5)


def _flat(tensors: Mapping[str, Tensor], keys: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[key].double() for key in keys])
