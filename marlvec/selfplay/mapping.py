"""`SelfPlayMapping`: a policy mapping with learners, frozen opponents and a matchmaker; the matchmakers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from marlvec.collect import Collector, Episode
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import PolicyMap
from marlvec.selfplay.opponents import Opponent, OpponentPool
from marlvec.selfplay.ratings import Ratings, Sides, sides_of
from marlvec.selfplay.results import MatchTable


class Matchmaker(ABC):
    """Chooses a learner's opponent in one game; stateless."""

    @abstractmethod
    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        """Choose one opponent for one side of one game.

        Args:
            learner: The learner's policy id.
            opponents: Opponents that can play that side, oldest first; at least one.
            rng: The game's random generator; use no other.

        Returns:
            The id of one of the opponents; or of a learner (itself or another one), which plays with its current
            weights. If that learner cannot play the side, a learner that can plays it.
        """


def draw(opponents: Sequence[Opponent], weights: NDArray[np.float64], rng: np.random.Generator) -> str:
    """Draw an opponent by weights, which need not sum to 1; if all are 0, uniformly."""
    total = float(weights.sum())
    if not np.isfinite(total) or (weights < 0).any():
        named = {opponent.opponent_id: float(w) for opponent, w in zip(opponents, weights, strict=True)}
        raise ArgumentError(f"weights of opponents: expected finite numbers of at least 0, got {named}")
    if total == 0:
        return opponents[int(rng.integers(len(opponents)))].opponent_id
    # Not rng.choice, which requires probabilities that sum to 1 exactly.
    found = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
    return opponents[min(found, int(np.flatnonzero(weights)[-1]))].opponent_id


class Mirror(Matchmaker):
    """The learner plays all sides itself, with its current weights, and learns from all of them."""

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        return learner


class Latest(Matchmaker):
    """The latest opponents, uniformly.

    Args:
        count: How many.

    Raises:
        ArgumentError: ``count`` is less than 1.
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ArgumentError(f"count must be at least 1, got {count!r}")
        self.count = count

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        last = opponents[-self.count :]
        return last[int(rng.integers(len(last)))].opponent_id


class Uniform(Matchmaker):
    """All opponents, uniformly: fictitious self-play."""

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        return opponents[int(rng.integers(len(opponents)))].opponent_id


class Mixture(Matchmaker):
    """Draws a matchmaker, which chooses: ``Mixture((0.35, Mirror()), (0.65, Prioritised(table)))``.

    Args:
        parts: Pairs of share and matchmaker; shares need not sum to 1.

    Raises:
        ArgumentError: No pair, or a share is not positive.
    """

    def __init__(self, *parts: tuple[float, Matchmaker]) -> None:
        if not parts or not all(share > 0 and math.isfinite(share) for share, _ in parts):
            raise ArgumentError(f"parts: expected pairs of a positive share and a matchmaker, got {parts!r}")
        self.parts = parts
        self._bounds = np.cumsum([share for share, _ in parts])

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        k = int(np.searchsorted(self._bounds, rng.random() * self._bounds[-1], side="right"))
        return self.parts[min(k, len(self.parts) - 1)][1].choose(learner, opponents, rng)


_WEIGHTINGS: dict[str, Callable[[float], float]] = {
    "hard": lambda rate: (1.0 - rate) ** 2,
    "even": lambda rate: rate * (1.0 - rate),
}


class Prioritised(Matchmaker):
    """Prioritised fictitious self-play: opponents weighted by the learner's win rate against them.

    An opponent it never met counts as even.

    Args:
        table: The win rates. With a ``decay`` a little below 1 they follow the learner's progress.
        weighting: ``"hard"``: opponents that beat it, (1 - win rate)²; ``"even"``: opponents of equal strength, win
            rate × (1 - win rate); or a function of the win rate.
        of: Learners whose snapshots are taken; None: all. If there are no such snapshots, all opponents are taken.

    Raises:
        ArgumentError: ``weighting`` is unknown.
    """

    def __init__(
        self,
        table: MatchTable,
        weighting: str | Callable[[float], float] = "hard",
        *,
        of: Collection[str] | None = None,
    ) -> None:
        if not callable(weighting) and weighting not in _WEIGHTINGS:
            raise ArgumentError(f"weighting must be one of {list(_WEIGHTINGS)} or a function, got {weighting!r}")
        self.table, self.of = table, None if of is None else tuple(of)
        self._weight = weighting if callable(weighting) else _WEIGHTINGS[weighting]

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        chosen = [one for one in opponents if self.of is None or one.of in self.of] or opponents
        rates = [self.table.win_rate(learner, one.opponent_id) for one in chosen]
        weights = [float(self._weight(0.5 if math.isnan(rate) else rate)) for rate in rates]
        return draw(chosen, np.array(weights), rng)


class ByRating(Matchmaker):
    """Opponents with a rating near the learner's, with Gaussian weights of the distance.

    Args:
        ratings: The ratings.
        spread: Standard deviation of the Gaussian, in rating points: at this distance the weight is 0.6 of the weight
            of an equal opponent.

    Raises:
        ArgumentError: ``spread`` is not positive.
    """

    def __init__(self, ratings: Ratings, spread: float = 200.0) -> None:
        if not spread > 0:
            raise ArgumentError(f"spread must be above 0, got {spread!r}")
        self.ratings, self.spread = ratings, spread

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        own = self.ratings.rating(learner)
        away = np.array([self.ratings.rating(one.opponent_id) - own for one in opponents]) / self.spread
        # Relative to the nearest opponent, so that a learner far above all does not get only weights of 0.
        return draw(opponents, np.exp((np.min(away**2) - away**2) / 2), rng)


class MainExploiter(Matchmaker):
    """The main learner with its current weights; while it is too strong, its past snapshots of equal strength.

    (An exploiter of the whole league needs no other matchmaker: use `Prioritised` against all.)

    Args:
        main: The main learner's policy id.
        table: The win rates.
        enough: Win rate against the main learner from which it is chosen.
        games: Games against it before the win rate counts.

    Raises:
        ArgumentError: ``enough`` is not within 0 and 1.
    """

    def __init__(self, main: str, table: MatchTable, *, enough: float = 0.1, games: int = 20) -> None:
        if not 0 <= enough <= 1:
            raise ArgumentError(f"enough must be within 0 and 1, got {enough!r}")
        self.main, self.table, self.enough, self.games = main, table, enough, games
        self._past = Prioritised(table, "even", of=[main])

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        met = self.table.win_count(learner, self.main)
        if met.games < self.games or met.win_rate >= self.enough:
            return self.main
        return self._past.choose(learner, opponents, rng)


class SelfPlayMapping:
    """A `policy_mapping` for a collector: in each episode one learner plays one side, and opponents play the others.

    Learners take turns, also on their sides: with k pairs of learner and side, every k episodes of an env contain each
    pair once, in random order; k neighbouring envs have different pairs at a time. The learner's matchmaker chooses an
    opponent for each other side. All random draws depend on the collector's seed, the env, the episode, and the
    matchmaker's inputs; a chosen opponent plays to the episode's end.

    Opponents must be in the collector before they can be chosen: call `update` between two calls of ``collect``. Until
    the pool has opponents, learners play against themselves and each other.

    Args:
        pool: The opponents.
        agents: Names of the env's agents, in order.
        learners: Learner's policy id to its matchmaker, in the order of their turns.
        sides: Which agents play together; None: each agent is its own side.
        plays: Learner, or an opponent's `Opponent.of`, to the sides it can play; others can play all.

    Raises:
        ArgumentError: No learner; a side is unknown, or no learner can play it; or the sides do not fit the agents.
    """

    def __init__(
        self,
        pool: OpponentPool,
        agents: Sequence[str],
        learners: Mapping[str, Matchmaker],
        *,
        sides: Sides | None = None,
        plays: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._pool, self._learners = pool, dict(learners)
        self.sides = sides_of(agents, sides)
        self._side_of = {agent: side for side, own in self.sides.items() for agent in own}
        self._plays = {name: tuple(own) for name, own in (plays or {}).items()}
        unknown = sorted({side for own in self._plays.values() for side in own} - self.sides.keys())
        if unknown or not self._learners:
            what = f"plays: unknown sides {unknown}" if unknown else "learners: expected at least one"
            raise ArgumentError(f"{what}; the sides are {list(self.sides)}")
        self._turns = [(name, side) for name in self._learners for side in self.sides if self._can(name, side)]
        if idle := [side for side in self.sides if side not in {own for _, own in self._turns}]:
            raise ArgumentError(f"plays: no learner can play the sides {idle}")
        self._entered: dict[str, Opponent] = {}  # opponents in the collector, in order of entry
        self._retiring: set[str] = set()  # opponents that are no longer chosen
        self._strays: set[str] = set()  # opponents missing from a loaded state that may still be in the collector
        self._coming: MutableMapping[str, Opponent] = (
            WeakValueDictionary()
        )  # opponents of a state that is about to be set
        self._lineups: dict[int, tuple[Episode, dict[str, str]]] = {}  # env to its episode, and side to policy

    def __repr__(self) -> str:
        return f"SelfPlayMapping(learners={list(self._learners)}, {len(self._entered) - len(self._retiring)} opponents)"

    def __call__(self, agent: str, episode: Episode) -> str:
        """Return the policy that plays an agent in an episode.

        Raises:
            KeyError: The agent is unknown.
            ArgumentError: A matchmaker chose an id that is neither an opponent's nor a learner's.
        """
        known, lineup = self._lineups.get(episode.env_id, (None, {}))
        if known is not episode:  # compare objects: an evaluation has episodes with the same ids
            lineup = self._lineup(episode)
            self._lineups[episode.env_id] = episode, lineup
        return lineup[self._side_of[agent]]

    def _lineup(self, episode: Episode) -> dict[str, str]:
        turns = len(self._turns)
        stretch, place = divmod(episode.number, turns)
        order = episode.stream(stretch).permutation(turns)
        learner, own = self._turns[int(order[(episode.env_id + place) % turns])]
        return {side: learner if side == own else self._choose(learner, side, episode) for side in self.sides}

    def _choose(self, learner: str, side: str, episode: Episode) -> str:
        there = (one for name, one in self._entered.items() if name not in self._retiring)
        opponents = [one for one in there if self._can(one.of, side)]
        if not opponents:
            return self._partner(learner, side)
        chosen = self._learners[learner].choose(learner, opponents, episode.rng)
        if chosen in self._learners:
            return self._partner(chosen, side)
        if chosen not in {one.opponent_id for one in opponents}:
            raise ArgumentError(
                f"matchmaker of {learner!r} for side {side!r}: expected a learner or one of "
                f"{[one.opponent_id for one in opponents]}, got {chosen!r}"
            )
        return chosen

    def _partner(self, learner: str, side: str) -> str:
        """Return a learner that can play a side: the given one, if it can."""
        return learner if self._can(learner, side) else next(name for name, own in self._turns if own == side)

    def _can(self, name: str, side: str) -> bool:
        return name not in self._plays or side in self._plays[name]

    def update(self, collector: Collector) -> None:
        """Make a collector's opponents those of the pool; call it between two calls of `collect`.

        New opponents are added, frozen, with their own connectors. Opponents that left the pool are no longer chosen;
        the first update after an opponent's last running episode has ended removes it from the collector.

        Raises:
            ArgumentError: An opponent has the id of another policy.
            CheckpointError: An opponent's file is damaged.
        """
        self._retiring |= {name for name, one in self._entered.items() if self._pool.get(name) is not one}
        for name in [name for name in self._entered if name in self._retiring]:
            try:
                collector.remove_policy(name)
            except StateError:  # it still plays in running episodes
                continue
            self._forget(name)
        for name, opponent in self._pool.items():
            if name not in self._entered:
                enter(collector, opponent)
                self._entered[name] = opponent

        for name in self._strays & set(collector.policies) - set(self._entered):
            with suppress(StateError):  # it still plays in running episodes
                collector.remove_policy(name)

    def _forget(self, name: str) -> None:
        del self._entered[name]
        self._retiring.discard(name)

    # --- state

    def get_state(self) -> dict[str, Any]:
        """Return the pool, its opponents in the collector, and which of them are no longer chosen, as plain data.

        A collector's state contains this state already.

        Returns:
            Numbers, texts and arrays, in dicts and lists; with the contents of the opponents' files.

        Raises:
            CheckpointError: A file of the pool is missing.
        """
        return {
            "learners": list(self._learners),
            "sides": {side: list(own) for side, own in self.sides.items()},
            "pool": self._pool.state_dict(),
            "entered": [
                [name, name in self._retiring, None if self._pool.get(name) is one else self._pool.pack(one)]
                for name, one in self._entered.items()
            ],
        }

    def set_state(self, state: Mapping[str, Any], collector: Collector | None = None) -> None:
        """Continue from a state; also sets the pool, and the opponents in the collector.

        Args:
            state: A state from `get_state`, of a mapping with the same learners and sides.
            collector: The collector that uses this mapping; no opponent may be in a running episode. None: it has the
                opponents already, as in `Collector.set_state`.

        Raises:
            ArgumentError: Not such a state, or of other learners or sides; nothing has changed.
            StateError: An opponent plays in a running episode of the collector.
            CheckpointError: The contents of a file are damaged; nothing has changed.
        """
        self._check(state)
        left = {name: packed for name, _, packed in state["entered"] if packed is not None}
        opponents = {name: self._pool.unpack(packed, self._coming) for name, packed in left.items()}
        self._pool.load_state_dict(state["pool"], self._coming)
        for opponent in opponents.values():
            self._pool.let_go(opponent)  # its files are deleted with it
        if collector is not None:
            for name in list(self._entered):
                collector.remove_policy(name)
        self._strays |= self._entered.keys()
        self._entered, self._retiring = {}, set()
        for name, is_retiring, _ in state["entered"]:
            self._entered[name] = opponent = opponents[name] if name in opponents else self._pool[name]
            if collector is not None:
                enter(collector, opponent)
            self._retiring |= {name} if is_retiring else set()
        self._strays -= self._entered.keys()
        self._lineups.clear()

    def _check(self, state: Any) -> None:
        """Check that a state fits this mapping."""
        own = {"learners": list(self._learners), "sides": {side: list(names) for side, names in self.sides.items()}}
        if not isinstance(state, Mapping) or state.keys() != {*own, "pool", "entered"}:
            raise ArgumentError(f"expected the state of a SelfPlayMapping, got {state!r:.200}")
        for what, mine in own.items():
            if state[what] != mine:
                raise ArgumentError(f"state: expected the {what} {mine}, got {state[what]}")

    def add_policies(self, state: Mapping[str, Any], collector: Collector) -> Callable[[], None]:
        """Add a state's opponents to a collector, before `set_state`.

        Opponents that are equal stay. `Collector.set_state` calls it first, since its own state contains running
        episodes of these policies.

        Args:
            state: A state from `get_state`.
            collector: The collector that uses this mapping.

        Returns:
            A function that undoes it.

        Raises:
            ArgumentError: Not such a state, or of other learners or sides; nothing has changed.
            StateError: Another opponent with the same id plays in a running episode; nothing has changed.
            CheckpointError: The contents of a file are damaged; nothing has changed.
        """
        self._check(state)
        came: dict[str, Opponent] = {}
        went: dict[str, Opponent] = {}

        def take_back() -> None:
            for name, opponent in came.items():
                if name in collector.policies:
                    collector.remove_policy(name)
                if self._pool.get(name) is not opponent:
                    self._pool.let_go(opponent)
            for name, opponent in went.items():
                if name not in collector.policies:
                    enter(collector, opponent)
            self._coming.clear()

        in_pool = {packed["id"]: packed for packed in state["pool"]["opponents"]}
        try:
            for name, _, left in state["entered"]:
                packed, known = in_pool[name] if left is None else left, self._entered.get(name)
                if known is not None and name in collector.policies:
                    if known.is_packed(packed):
                        continue
                    went[name] = known
                    collector.remove_policy(name)
                opponent = self._pool.unpack(packed)
                if name not in collector.policies:  # otherwise the caller's own policy has this id, and enter() raises
                    came[name] = self._coming[name] = opponent
                enter(collector, opponent)
        except BaseException:
            take_back()
            raise
        return take_back

    def unknown_policies(self, state: Mapping[str, Any], collector: Collector) -> list[str]:
        """Return ids of opponents that this mapping added to a collector and that a state does not contain."""
        own = (self._entered.keys() | self._strays) - {name for name, *_ in state["entered"]}
        return [name for name in collector.policies if name in own]


def enter(collector: Collector, opponent: Opponent) -> None:
    """Add an opponent to a collector, frozen, with its own connectors."""
    collector.add_policy(
        opponent.opponent_id,
        opponent.policy if isinstance(collector.policies, PolicyMap) else opponent.policy(),
        agent_connectors=opponent.agent_connectors(),
        action_connectors=opponent.action_connectors(),
        learner_connectors=(),
        frozen=True,
    )
