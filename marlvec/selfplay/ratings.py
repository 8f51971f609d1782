"""Ratings of players by finished games: `Elo`, `OpenSkill`, and `BradleyTerry` with intervals."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, product
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.metrics import EpisodeRecord
from marlvec.errors import ArgumentError, ContractError
from marlvec.extras import import_extra
from marlvec.serialization.records import PositiveCount, read_fields

Sides = Mapping[str, Sequence[str]]
"""Side name to its agents, which one policy plays, and which win or lose together."""


def sides_of(agents: Sequence[str], given: Sides | None = None) -> dict[str, tuple[str, ...]]:
    """Return the sides of a game, by default one per agent; refuse empty, overlapping, missing or too few sides."""
    given = {name: (name,) for name in agents} if given is None else given
    sides = {name: tuple(own) for name, own in given.items()}
    named = [agent for own in sides.values() for agent in own]
    if sorted(named) != sorted(agents):
        raise ArgumentError(f"sides: expected each of the agents {list(agents)} once, got {sides}")
    if len(sides) < 2 or not all(sides.values()):
        raise ArgumentError(f"sides: expected at least two, none of them empty, got {sides}")
    return sides


ScoreFunction = Callable[[EpisodeRecord], Sequence[float]]
"""Function of a finished episode to one number per side; more is better, equal numbers are a draw."""


@dataclass(frozen=True, slots=True)
class Game:
    """The result of one game.

    Attributes:
        sides: Names of the sides.
        players: For each side, the ids of the policies that played it, each once.
        scores: For each side, its score; more is better.
        length: Env steps.
        truncated: Whether an agent was truncated: the game was cut short.
        unmoved: Sides without a decision: the game was over before their first move.
        env_id: The env in which it was played.
        number: Number of the episode in that env, from 0.
    """

    sides: tuple[str, ...]
    players: tuple[tuple[str, ...], ...]
    scores: tuple[float, ...]
    length: int
    truncated: bool
    unmoved: tuple[str, ...]
    env_id: int
    number: int

    @property
    def is_draw(self) -> bool:
        """Whether all sides have the same score."""
        return len(set(self.scores)) == 1

    @property
    def winners(self) -> tuple[str, ...]:
        """Sides with the highest score; none if all are equal."""
        if self.is_draw:
            return ()
        return tuple(side for side, score in zip(self.sides, self.scores, strict=True) if score == max(self.scores))

    def score_of(self, player: str, against: str | None = None) -> float | None:
        """Return a policy's result: 1 a win, 0.5 a draw, 0 a loss; with several other sides, their mean.

        ``against`` is the policy whose sides count; None: all others. ``player`` is the policy's id.

        Returns:
            The result; None if the two did not meet.
        """
        results = [
            1.0 if mine > other else 0.5 if mine == other else 0.0
            for us, mine in zip(self.players, self.scores, strict=True)
            for them, other in zip(self.players, self.scores, strict=True)
            if player in us and player not in them and (against is None or against in them)
        ]
        return sum(results) / len(results) if results else None


def game_of(
    record: EpisodeRecord, agents: Sequence[str], sides: Mapping[str, Sequence[str]], score: ScoreFunction | None = None
) -> Game:
    """Read a game from an episode's record; without ``score``, a side's score is the sum of its agents' returns."""
    places = [[agents.index(name) for name in own] for own in sides.values()]
    if score is None:
        scores = [float(record.returns_A[own].sum()) for own in places]
    else:
        scores = [float(number) for number in score(record)]
    if len(scores) != len(places) or any(map(math.isnan, scores)):
        raise ContractError(
            f"score() of env {record.env_id}, episode {record.number}: expected one number for each of the sides "
            f"{list(sides)}, got {scores}"
        )
    return Game(
        sides=tuple(sides),
        players=tuple(tuple(dict.fromkeys(record.policies[a] for a in own)) for own in places),
        scores=tuple(scores),
        length=record.length,
        truncated=bool(record.truncated_A.any()),
        unmoved=tuple(side for side, own in zip(sides, places, strict=True) if not record.lengths_A[own].any()),
        env_id=record.env_id,
        number=record.number,
    )


Players = Sequence[str | Sequence[str]]
"""For each side, one policy id, or several that play it together."""


class Ratings(ABC):
    """One number per policy, from its games.

    Games may have two or more sides, and draws. A policy without games has the initial rating. Equal games in equal
    order give equal ratings.
    """

    def add(self, game: Game) -> None:
        """Add a game."""
        self.rate(game.players, game.scores)

    def rate(self, players: Players, scores: Sequence[float]) -> None:
        """Add the result of a game for all players.

        Args:
            players: For each side, the policies that played it.
            scores: For each side; higher is better, equal scores are a draw.

        Raises:
            ArgumentError: Not one score for each of two or more sides, a score is NaN, or a side has no players.
        """
        teams = [(side,) if isinstance(side, str) else tuple(side) for side in players]
        if len(teams) != len(scores) or len(teams) < 2 or not all(teams):
            raise ArgumentError(f"expected one score for each of two or more sides, got {players!r} and {scores!r}")
        if any(math.isnan(score) for score in scores):
            raise ArgumentError(f"scores must not be NaN, got {scores!r}")
        self._rate(teams, [float(score) for score in scores])

    @abstractmethod
    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None: ...

    @abstractmethod
    def rating(self, player: str) -> float:
        """Return the rating of a policy (``player``), the initial one if it was never rated; more is better."""

    @abstractmethod
    def expected(self, one: str, other: str) -> float:
        """Return the expected score of policy ``one`` against policy ``other``: 1 a sure win, 0.5 an even game."""

    @property
    @abstractmethod
    def players(self) -> tuple[str, ...]:
        """All rated policies, in order of their first rating."""

    def ranking(self) -> list[tuple[str, float]]:
        """Return all policies with their ratings, the best first."""
        return sorted(((name, self.rating(name)) for name in self.players), key=lambda pair: -pair[1])

    @abstractmethod
    def copy(self, old: str, new: str) -> None:
        """Let policy ``new`` start with the rating of policy ``old``, e.g. a snapshot with its learner's."""

    @abstractmethod
    def forget(self, player: str) -> None:
        """Reset a policy to the initial rating.

        Args:
            player: The policy's id.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the ratings as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`.

        Raises:
            ArgumentError: Not such a state; nothing has changed.
        """

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {rating:.1f}" for name, rating in self.ranking()[:3])
        return f"{type(self).__name__}({len(self.players)} players{': ' * bool(best)}{best})"


def begin_of(fixed: Mapping[str, float] | None, initial: float | None) -> tuple[dict[str, float], float]:
    """Return the fixed ratings and the initial one: the given one, the mean of the fixed ones, or 1000."""
    known = {name: float(rating) for name, rating in (fixed or {}).items()}
    begin = float(initial) if initial is not None else math.fsum(known.values()) / len(known) if known else 1000.0
    if not all(map(math.isfinite, (begin, *known.values()))):
        raise ArgumentError(f"ratings must be finite, got fixed={fixed!r} and initial={initial!r}")
    return known, begin


def expected_score(one: float, other: float) -> float:
    """Return the expected score on Elo's scale, where 400 points are odds of ten to one."""
    # Beyond 40 powers of ten the result equals 1 in floats; without the bound it would overflow.
    return 1.0 / (1.0 + math.pow(10.0, min(max((other - one) / 400.0, -40.0), 40.0)))


class Elo(Ratings):
    """Elo's ratings: after each game, a policy that did better than expected gets points from those that did worse.

    They follow policies that learn, and depend on the order of games: the last ones count most. For policies that don't
    change, `BradleyTerry` gets more out of the same games.

    A game of more than two sides counts as one game of each pair of sides, each worth ``k / (sides - 1)``. A side of
    several policies has their mean rating, and each gets the side's points. The sum of all ratings stays constant,
    unless ``fixed`` policies play.

    Args:
        k: Maximum of points for one game of two sides.
        initial: Rating of new policies; None: the mean of the fixed ratings, or 1000.
        fixed: Policy id to a rating that never changes, e.g. a random policy at 0, so that ratings of several runs can
            be compared.

    Raises:
        ArgumentError: ``k`` is not positive, or a rating is NaN or infinite.

    Attributes:
        k, initial, fixed: As given, or the defaults.
    """

    def __init__(
        self, k: float = 32.0, initial: float | None = None, *, fixed: Mapping[str, float] | None = None
    ) -> None:
        if not k > 0:
            raise ArgumentError(f"k must be above 0, got {k!r}")
        self.k = float(k)
        self.fixed, self.initial = begin_of(fixed, initial)
        self._ratings: dict[str, float] = {}

    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None:
        before = [sum(map(self.rating, team)) / len(team) for team in teams]
        share = self.k / (len(teams) - 1)
        points = [0.0] * len(teams)
        for i, j in combinations(range(len(teams)), 2):
            result = 0.5 + 0.5 * ((scores[i] > scores[j]) - (scores[i] < scores[j]))
            won = share * (result - expected_score(before[i], before[j]))
            points[i] += won
            points[j] -= won
        for team, won in zip(teams, points, strict=True):
            for player in team:
                self._ratings[player] = self._ratings.get(player, self.initial) + won

    def rating(self, player: str) -> float:
        return self.fixed[player] if player in self.fixed else self._ratings.get(player, self.initial)

    def expected(self, one: str, other: str) -> float:
        return expected_score(self.rating(one), self.rating(other))

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self._ratings)

    def copy(self, old: str, new: str) -> None:
        self._ratings[new] = self.rating(old)

    def forget(self, player: str) -> None:
        self._ratings.pop(player, None)

    def state_dict(self) -> dict[str, Any]:
        return {"ratings": dict(self._ratings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ratings = read_fields(state, "the state of an Elo", ratings=dict[str, float])["ratings"]


class OpenSkill(Ratings):
    """Mean and standard deviation of each policy's skill, as in TrueSkill; from a model of openskill.

    Elo needs many games to rate a new policy; this rating changes fast while it is uncertain, and slowly after many
    games. Games may have any number of sides, and sides any number of policies.

    Args:
        model: Class in `openskill.models`, e.g. ``"PlackettLuce"``, ``"BradleyTerryFull"``,
            ``"ThurstoneMostellerFull"``.
        options: Arguments of that class: ``mu``, ``sigma``, ``beta``, ``tau``, …

    Raises:
        MissingExtraError: openskill is not installed (extra ``selfplay``).
        ArgumentError: openskill has no such model.
    """

    def __init__(self, model: str = "PlackettLuce", **options: Any) -> None:
        models = import_extra("openskill.models", "OpenSkill", "pip install 'marlvec[selfplay]'")
        known = {kind.__name__: kind for kind in models.MODELS}
        if model not in known:
            raise ArgumentError(f"model: expected one of openskill's models {sorted(known)}, got {model!r}")
        self._model = known[model](**options)
        self._beliefs: dict[str, tuple[float, float]] = {}

    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None:
        names = dict.fromkeys(name for team in teams for name in team)
        if len(names) == 1:
            return  # a policy against itself carries no information
        given = [[self._belief(name) for name in team] for team in teams]
        found = self._model.rate(given, scores=list(scores))
        # A policy that plays several sides changes by the sum of their changes; its uncertainty shrinks with each.
        beliefs = {name: self.belief(name) for name in names}
        for team, before, after in zip(teams, given, found, strict=True):
            for name, old, new in zip(team, before, after, strict=True):
                mu, sigma = beliefs[name]
                beliefs[name] = mu + (new.mu - old.mu), sigma * (new.sigma / old.sigma)
        self._beliefs |= beliefs

    def _belief(self, player: str) -> Any:
        mu, sigma = self.belief(player)
        return self._model.rating(mu=mu, sigma=sigma)

    def belief(self, player: str) -> tuple[float, float]:
        """Return mean and standard deviation of a policy's (``player``) skill, on OpenSkill's scale."""
        if player in self._beliefs:
            return self._beliefs[player]
        new = self._model.rating()
        return float(new.mu), float(new.sigma)

    def rating(self, player: str) -> float:
        return self.belief(player)[0]

    def lower_bound(self, player: str, deviations: float = 3.0) -> float:
        """Return a lower bound of a policy's (``player``) skill: the mean minus some standard ``deviations``."""
        mu, sigma = self.belief(player)
        return mu - deviations * sigma

    def expected(self, one: str, other: str) -> float:
        return float(self._model.predict_win([[self._belief(one)], [self._belief(other)]])[0])

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self._beliefs)

    def copy(self, old: str, new: str) -> None:
        self._beliefs[new] = self.belief(old)

    def forget(self, player: str) -> None:
        self._beliefs.pop(player, None)

    def state_dict(self) -> dict[str, Any]:
        return {"beliefs": {name: [mu, sigma] for name, (mu, sigma) in self._beliefs.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = read_fields(state, "the state of an OpenSkill", beliefs=dict[str, tuple[float, float]])
        self._beliefs = found["beliefs"]


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


_POINTS = 400.0 / math.log(10.0)
"""Elo points per unit of log-strength, that is per factor e in the odds."""


class BradleyTerry(Ratings):
    """Maximum-likelihood ratings of all games together, on Elo's scale: 400 points are odds of ten to one.

    All games are fitted at once, so their order makes no difference, and `interval` gives a rating's uncertainty. Each
    policy is assumed to be equally strong in all its games. That is true of snapshots, anchors and players of an arena;
    of a policy that learns it gives a mean over its games, whereas `Elo` follows it.

    The model is that of Bradley and Terry (1952) for two sides, and of Plackett (1975) and Luce (1959) for more: the
    best of some sides is drawn with their strengths as weights, then the next best of the others, as in Hunter, "MM
    algorithms for generalized Bradley-Terry models" (Annals of Statistics 32, 2004). A draw of two sides counts as half
    a win of each, a draw of k sides as 2 / k such draws of each pair, so that it weighs as much as an order of them
    would. A side of several policies has their mean log-strength.

    A policy that won all games, or lost all, would have no finite rating. So each policy gets half a drawn game in
    addition, spread over its opponents in proportion to its games; two policies that met no others get one drawn game,
    as in Coulom's Bayeselo. The effect is small with many games: 75 % of 100 count as 74.75 %.

    Ratings compare only policies that met, directly or through others. A policy linked to a fixed one by such games has
    a rating on the scale of the fixed ratings. All others form groups of policies that met; in each group the mean
    rating is ``initial``, and a rating gives the distance from the mean of its group, and nothing about other groups. A
    policy that never met another has ``initial``.

    Games are counted, not stored. The first query after a game fits again: less than a millisecond of one core for 20
    policies that all met, some ten for 200.

    Args:
        fixed: Policy id to a rating that never changes, e.g. a random policy at 0, so that ratings of several runs can
            be compared.
        initial: Rating of new policies; None: the mean of the fixed ratings, or 1000.

    Raises:
        ArgumentError: A number is NaN or infinite.

    Attributes:
        initial, fixed: As given, or the defaults.
    """

    def __init__(self, *, fixed: Mapping[str, float] | None = None, initial: float | None = None) -> None:
        self.fixed, self.initial = begin_of(fixed, initial)
        self._players: dict[str, None] = {}  # in order of their first game
        self._results: dict[Result, int] = {}
        self._copies: dict[str, str] = {}
        self._likelihood: Likelihood | None = None  # of the current kinds of results; None after a new kind
        self._fit: Fit | None = None

    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None:
        sides = [tuple(sorted(set(team))) for team in teams]
        if len(set(sides)) == 1:
            return  # a policy against itself carries no information
        self._players |= {name: None for team in teams for name in team}
        ranked = sorted(zip(scores, sides, strict=True), key=lambda pair: pair[0])
        worse: list[tuple[str, ...]] = []
        for _, drawn in groupby(ranked, key=lambda pair: pair[0]):
            level = sorted(side for _, side in drawn)
            self._note((tuple(level), tuple(worse)), 1)
            worse = sorted(worse + level)
        self._fit = None

    def _note(self, result: Result, times: int) -> None:
        if len({side for sides in result for side in sides}) < 2:
            return
        if result not in self._results:
            self._likelihood = None
        self._results[result] = self._results.get(result, 0) + times

    def _fitted(self) -> Fit:
        if (fit := self._fit) is None:
            if self._likelihood is None:
                fixed = {name: (rating - self.initial) / _POINTS for name, rating in self.fixed.items()}
                self._likelihood = Likelihood(self._results, fixed, self._linked())
            counts = [self._results[result] for result in self._likelihood.results]
            fit = self._fit = self._likelihood.fit(counts)
        return fit

    def _linked(self) -> list[tuple[str, str]]:
        """Return copies that have played, with the players that they are copies of."""
        played = {name for drawn, worse in self._results for side in (*drawn, *worse) for name in side}
        pairs = ((name, self._origin(old, played)) for name, old in self._copies.items() if name in played)
        return [(new, old) for new, old in pairs if new != old and (old in played or old in self.fixed)]

    def _origin(self, player: str, played: Container[str]) -> str:
        """Return the player whose rating applies: itself or, while it has not played, the player it is a copy of."""
        seen = set()
        while player not in played and player not in self.fixed and player in self._copies and player not in seen:
            seen.add(player)
            player = self._copies[player]
        return player

    def rating(self, player: str) -> float:
        if player in self.fixed:
            return self.fixed[player]
        strengths = self._fitted().strengths
        name = self._origin(player, strengths)
        return self.fixed[name] if name in self.fixed else self.initial + _POINTS * strengths.get(name, 0.0)

    def interval(self, player: str, confidence: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of a rating.

        It follows from the observed information, the curvature of the likelihood. For a policy that is not linked to a
        fixed one by games, it is an interval of the distance from the mean of its group. A fixed rating has no
        uncertainty; without games the interval is infinite. With draws it is wider than necessary.

        Args:
            player: Policy id.
            confidence: Probability with which it should contain the true rating.

        Returns:
            The lower and the upper end.

        Raises:
            ArgumentError: ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ArgumentError(f"confidence must be above 0 and below 1, got {confidence!r}")
        rating = self.rating(player)
        if player in self.fixed:
            return rating, rating
        error = self._fitted().errors.get(player, math.inf)
        half = _POINTS * error * NormalDist().inv_cdf(0.5 + confidence / 2)
        return rating - half, rating + half

    def expected(self, one: str, other: str) -> float:
        return expected_score(self.rating(one), self.rating(other))

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self._players)

    def copy(self, old: str, new: str) -> None:
        """Let a policy start with another policy's rating, e.g. a snapshot with its learner's.

        It has that rating until it has played; then the two count as having drawn once, and its own games decide the
        rest.
        """
        if old != new:
            self.forget(new)
            self._copies[new] = old
        self._players.setdefault(new)

    def forget(self, player: str) -> None:
        """Reset a policy to the initial rating; its games also no longer count for others."""
        results, self._results = self._results, {}
        for (drawn, worse), times in results.items():
            rest = [tuple(side for side in sides if player not in side) for sides in (drawn, worse)]
            if rest[0]:
                self._note((rest[0], rest[1]), times)
        self._copies = {new: old for new, old in self._copies.items() if player not in (new, old)}
        self._players.pop(player, None)
        self._likelihood = self._fit = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "players": list(self._players),
            "results": [
                [[list(side) for side in drawn], [list(side) for side in worse], times]
                for (drawn, worse), times in self._results.items()
            ],
            "copies": [[new, old] for new, old in self._copies.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        results = list[tuple[tuple[Side, ...], tuple[Side, ...], PositiveCount]]
        kinds = {"players": list[str], "results": results, "copies": list[tuple[str, str]]}
        found = read_fields(state, "the state of a BradleyTerry", **kinds)
        self._players, self._copies = dict.fromkeys(found["players"]), dict(found["copies"])
        self._results = {(drawn, worse): times for drawn, worse, times in found["results"]}
        self._likelihood = self._fit = None
