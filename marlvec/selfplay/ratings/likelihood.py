"""The likelihood of games under the Bradley-Terry and Plackett-Luce models, and its maximum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fit", "Likelihood", "Result", "Side"]

Side = tuple[str, ...]
"""Policies that play a side together, sorted by name."""

Result = tuple[tuple[Side, ...], tuple[Side, ...]]
"""Sides that drew with each other (or one side), and all sides that did worse; both sorted."""

_Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]

_BLOCK = 1 << 20  # pairs of alternatives that are processed at once, to bound memory


class Likelihood:
    """The log-likelihood of games as a function of strengths; holds everything that does not depend on counts.

    ``fixed`` are known strengths by player; ``copies`` are pairs of players that count as having drawn once. Everything
    is sorted by name, so that the order of games makes no difference, not even in the last bit.
    """

    def __init__(
        self, results: Iterable[Result], fixed: Mapping[str, float], copies: Iterable[tuple[str, str]]
    ) -> None:
        self.results = sorted(results)
        self.fixed = fixed
        self._copies = sorted(copies)
        sides = {side for drawn, worse in self.results for side in (*drawn, *worse)}
        names = sorted({name for side in sides for name in side} | {name for pair in self._copies for name in pair})
        self.players = tuple(name for name in names if name not in fixed)
        self._sides = {side: i for i, side in enumerate(sorted(sides | {(name,) for name in names}))}
        self._shares_SP = np.zeros((len(self._sides), len(self.players)))  # a side's strength is its players' mean
        self._known_S = np.zeros(len(self._sides))
        column = {name: i for i, name in enumerate(self.players)}
        for side, i in self._sides.items():
            for name in side:
                if name in column:
                    self._shares_SP[i, column[name]] += 1 / len(side)
                else:
                    self._known_S[i] += fixed[name] / len(side)
        self._choices: dict[tuple[int, ...], int] = {}  # each set of sides of which one was best, with its index
        self._lay_out()
        self._find_groups(column)

    def _lay_out(self) -> None:
        won: list[tuple[int, int, float]] = []  # side, result, times chosen per such result
        asked: list[tuple[int, int, float]] = []  # choice, result, times made per such result
        met: dict[tuple[str, str], list[int]] = {}
        for k, (drawn, worse) in enumerate(self.results):
            below = tuple(self._sides[side] for side in worse)
            for side in drawn if below else ():
                i = self._sides[side]
                won.append((i, k, 1.0))
                asked.append((self._choice(i, *below), k, 1.0))
            share = 2 / len(drawn)
            for one, other in combinations(drawn, 2):
                i, j = self._sides[one], self._sides[other]
                won += [(i, k, share / 2), (j, k, share / 2)]
                asked.append((self._choice(i, j), k, share))
            for one, other in (*product(drawn, worse), *combinations(drawn, 2)):
                for a, b in product(one, other):
                    if a != b:
                        met.setdefault((min(a, b), max(a, b)), []).append(k)
        self._pairs = sorted(met)
        ends = [(self._sides[a,], self._sides[b,]) for a, b in (*self._pairs, *self._copies)]
        self._virtual = np.array([self._choice(i, j) for i, j in ends], np.int64)
        self._ends = np.array(ends, np.int64).reshape(-1, 2)
        self._won, self._asked = _columns(won), _columns(asked)
        self._met = _columns([(i, k, 1.0) for i, pair in enumerate(self._pairs) for k in met[pair]])
        by_size: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for members, i in self._choices.items():
            by_size.setdefault(len(members), []).append((i, members))
        self._sized = [
            (np.array([i for i, _ in found]), np.array([members for _, members in found]))
            for _, found in sorted(by_size.items())
        ]

    def _choice(self, *sides: int) -> int:
        return self._choices.setdefault(tuple(sorted(sides)), len(self._choices))

    def _find_groups(self, column: Mapping[str, int]) -> None:
        """Find groups of players that met, directly or through others; fixed players do not link groups."""
        leader = list(range(len(self.players)))

        def find(i: int) -> int:
            while leader[i] != i:
                leader[i] = leader[leader[i]]
                i = leader[i]
            return i

        both = (*self._pairs, *self._copies)
        for a, b in both:
            if a in column and b in column:
                leader[find(column[a])] = find(column[b])
        tied = {find(column[a if a in column else b]) for a, b in both if (a in column) != (b in column)}
        groups: dict[int, list[int]] = {}
        for i in range(len(self.players)):
            groups.setdefault(find(i), []).append(i)
        self.free_groups = [np.array(group) for top, group in groups.items() if top not in tied]

    def fit(self, counts: Sequence[int]) -> Fit:
        """Find the maximum-likelihood strengths by Newton's method; ``counts``: number of games with each result."""
        won_S, asked_C = self._totals(np.asarray(counts, np.float64))
        at_P, radius = np.zeros(len(self.players)), 4.0
        value, slope_P, curve_PP = self._derivatives(at_P, won_S, asked_C)
        for _ in range(300):
            step = np.linalg.solve(curve_PP, slope_P) if len(at_P) else slope_P
            longest = float(np.abs(step).max(initial=0.0))
            found_P = at_P + step * min(1.0, radius / max(longest, 1e-300))
            for group in self.free_groups:
                found_P[group] -= found_P[group].mean()
            found = self._derivatives(found_P, won_S, asked_C)
            # Newton's full step can go too far where the likelihood is flat, and not far enough where it is straight.
            # Near the maximum, values differ by less than rounding errors.
            if longest > 1e-6 and found[0] < value:
                radius = min(radius, longest) / 4
                continue
            at_P, (value, slope_P, curve_PP) = found_P, found
            if longest <= 1e-8 * (1 + float(np.abs(at_P).max(initial=0.0))):
                break  # the remaining error is its square
            radius *= 2 if longest > radius else 1
        return Fit(self, at_P, curve_PP)

    def _totals(self, counts_K: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Count wins of each side, (S,), and choices from each set of sides, (C,); with the additional draws."""

        def total(table: _Columns, size: int) -> NDArray[np.float64]:
            which, k, share = table
            return np.asarray(np.bincount(which, share * counts_K[k], size), np.float64)

        won_S, asked_C = total(self._won, len(self._sides)), total(self._asked, len(self._choices))
        met = total(self._met, len(self._pairs))
        one, other = self._ends[: len(met)].T
        games_S = np.bincount(one, met, len(won_S)) + np.bincount(other, met, len(won_S))
        draws = np.append((met / games_S[one] + met / games_S[other]) / 2, np.ones(len(self._copies)))
        for end in self._ends.T:
            won_S += np.bincount(end, draws / 2, len(won_S))
        return won_S, asked_C + np.bincount(self._virtual, draws, len(asked_C))

    def _derivatives(
        self, at_P: NDArray[np.float64], won_S: NDArray[np.float64], asked_C: NDArray[np.float64]
    ) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """Return the log-likelihood, its gradient, and its negative Hessian, regularized for free groups."""
        strength_S = self._shares_SP @ at_P + self._known_S
        size = len(strength_S)
        value = float(won_S @ strength_S)
        slope_S, curve_SS = won_S.copy(), np.zeros((size, size))
        for ids, members in self._sized:
            rows = max(1, _BLOCK // members.shape[1] ** 2)
            for start in range(0, len(ids), rows):
                some = members[start : start + rows]
                asked = asked_C[ids[start : start + rows]]
                odds = strength_S[some]
                top = odds.max(axis=1, keepdims=True)
                odds = np.exp(odds - top)
                mass = odds.sum(axis=1, keepdims=True)
                value -= float(asked @ (top + np.log(mass))[:, 0])
                odds /= mass
                expected = asked[:, None] * odds
                drawn_S = np.bincount(some.ravel(), expected.ravel(), size)
                slope_S -= drawn_S
                curve_SS[np.diag_indices(size)] += drawn_S
                flat = (some[:, :, None] * size + some[:, None, :]).ravel()
                both = (expected[:, :, None] * odds[:, None, :]).ravel()
                curve_SS -= np.bincount(flat, both, size * size).reshape(size, size)
        curve_PP = self._shares_SP.T @ curve_SS @ self._shares_SP
        # Too small to change results, large enough to solve a system that is singular in floats.
        curve_PP[np.diag_indices(len(at_P))] += 1e-13 * (1 + np.trace(curve_PP))
        for group in self.free_groups:  # its games do not determine its mean, which stays 0
            curve_PP[np.ix_(group, group)] += 1 / len(group)
        return value, self._shares_SP.T @ slope_S, curve_PP


class Fit:
    """Maximum-likelihood strengths by player, including fixed ones, and their standard errors.

    ``curve`` is the negative Hessian of the log-likelihood there, (P, P): the observed information.
    """

    def __init__(self, likelihood: Likelihood, strengths: NDArray[np.float64], curve: NDArray[np.float64]) -> None:
        self._likelihood, self._curve_PP = likelihood, curve
        self.strengths = dict(zip(likelihood.players, strengths.tolist(), strict=True)) | dict(likelihood.fixed)

    @cached_property
    def errors(self) -> dict[str, float]:
        """Standard errors: of the strength if linked to a fixed player; else of the distance from the group's mean."""
        cover_PP = np.linalg.inv(self._curve_PP)
        for group in self._likelihood.free_groups:
            part = cover_PP[np.ix_(group, group)]
            part = part - part.mean(axis=0)
            cover_PP[np.ix_(group, group)] = part - part.mean(axis=1, keepdims=True)
        found = np.sqrt(np.maximum(np.diag(cover_PP), 0.0)).tolist()
        return dict(zip(self._likelihood.players, found, strict=True)) | dict.fromkeys(self._likelihood.fixed, 0.0)


def _columns(rows: Sequence[tuple[int, int, float]]) -> _Columns:
    which, k, share = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(which, np.int64), np.array(k, np.int64), np.array(share, np.float64)
