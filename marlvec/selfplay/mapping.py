"""`SelfPlayMapping`: a policy mapping with learners, frozen opponents and a matchmaker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from marlvec.collect import Collector, Episode
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import PolicyMap
from marlvec.selfplay.game import Sides, sides_of
from marlvec.selfplay.matchmaking import Matchmaker
from marlvec.selfplay.opponents.opponent import Opponent
from marlvec.selfplay.opponents.opponent_pool import OpponentPool

__all__ = ["SelfPlayMapping"]


class SelfPlayMapping:
    """A `policy_mapping` for a collector: in each episode one learner plays one side, and opponents play the others.

    Learners take turns, and so they do on their sides: in every stretch of as many episodes of an env as there are
    pairs of learner and side, each pair comes once, in an order that is drawn; and of as many envs, each has another
    pair at a time. The learner's matchmaker chooses an opponent for each other side. All draws come from the
    collector's seed, env and episode, and from what matchmakers look at; who was chosen plays to the episode's end.

    Opponents have to be in the collector before they can be chosen: `update` sees to that, between two calls of
    ``collect``. Until there are any, learners play against themselves and one another.

    Args:
        pool: The opponents.
        agents: Names of the env's agents, in order.
        learners: Policy id of each learner, in the order of their turns, to its matchmaker.
        sides: Which agents play together; None: each is a side of its own.
        plays: Learner, or what an opponent is `Opponent.of`, to the sides it can play; who is not named can play all.

    Raises:
        ArgumentError: There is no learner; a side is unknown, or no learner can play it; or sides do not fit agents.
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
            what = f"plays names unknown sides {unknown}" if unknown else "there must be a learner"
            raise ArgumentError(f"{what}; the sides are {list(self.sides)}")
        self._turns = [(name, side) for name in self._learners for side in self.sides if self._can(name, side)]
        if idle := [side for side in self.sides if side not in {own for _, own in self._turns}]:
            raise ArgumentError(f"no learner can play the sides {idle}")
        self._entered: dict[str, Opponent] = {}  # all that are in the collector, in the order they came
        self._retiring: set[str] = set()  # those of them that are chosen no more
        self._strays: set[str] = set()  # that a state has not known, and that may be in the collector yet
        self._coming: MutableMapping[str, Opponent] = WeakValueDictionary()  # of a state that is about to be set
        self._lineups: dict[int, tuple[Episode, dict[str, str]]] = {}  # env to who plays which side of its episode

    def __repr__(self) -> str:
        return f"SelfPlayMapping(learners={list(self._learners)}, {len(self._entered) - len(self._retiring)} opponents)"

    def __call__(self, agent: str, episode: Episode) -> str:
        """Say who plays an agent in an episode.

        Raises:
            KeyError: There is no such agent.
            ArgumentError: A matchmaker chose an id that is neither an opponent's nor a learner's.
        """
        known, lineup = self._lineups.get(episode.env_id, (None, {}))
        if known is not episode:  # not by its id: an evaluation has episodes of the same ids
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
                f"the matchmaker of {learner!r} chose {chosen!r} for side {side!r}, which is neither a learner nor one "
                f"of {[one.opponent_id for one in opponents]}"
            )
        return chosen

    def _partner(self, learner: str, side: str) -> str:
        """A learner who can play a side; this one, if it can."""
        return learner if self._can(learner, side) else next(name for name, own in self._turns if own == side)

    def _can(self, name: str, side: str) -> bool:
        return name not in self._plays or side in self._plays[name]

    def update(self, collector: Collector) -> None:
        """Have a collector know the opponents that are in the pool now, and no others; between two calls of `collect`.

        Those that are new are added, frozen, with their own connectors. Those that left the pool are chosen no more;
        each is taken out of the collector by the first update after its last running episode has ended.

        Args:
            collector: The one whose mapping this is.

        Raises:
            ArgumentError: An opponent has the id of another policy.
            CheckpointError: An opponent's file is damaged.
        """
        self._retiring |= {name for name, one in self._entered.items() if self._pool.get(name) is not one}
        for name in [name for name in self._entered if name in self._retiring]:
            try:
                collector.remove_policy(name)
            except StateError:  # it plays to the end of its episodes
                continue
            self._forget(name)
        for name, opponent in self._pool.items():
            if name not in self._entered:
                enter(collector, opponent)
                self._entered[name] = opponent

        for name in self._strays & set(collector.policies) - set(self._entered):
            with suppress(StateError):  # likewise
                collector.remove_policy(name)

    def _forget(self, name: str) -> None:
        del self._entered[name]
        self._retiring.discard(name)

    # --- as it was at some moment of a training

    def get_state(self) -> dict[str, Any]:
        """Say who can be chosen, who only plays to the end of its episodes, and all of the pool, as plain data.

        A collector's state has it, so whoever saves that need not save this.

        Returns:
            Numbers, texts and arrays, in dicts and lists; with what is in the files of opponents.

        Raises:
            CheckpointError: A file of the pool's is gone.
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
        """Go on where `get_state` was called; the pool, too, and who is in the collector.

        Args:
            state: What `get_state` returned, of a mapping of the same learners and sides.
            collector: The one whose mapping this is. No opponent may be in the middle of an episode there. None: it has
                the opponents already; `Collector.set_state` sees to that.

        Raises:
            ArgumentError: It is something else, or of other learners or sides; nothing has changed.
            StateError: An opponent plays in a running episode of the collector.
            CheckpointError: What it holds for a file is none; nothing has changed.
        """
        self._check(state)
        left = {name: packed for name, _, packed in state["entered"] if packed is not None}
        opponents = {name: self._pool.unpack(packed, self._coming) for name, packed in left.items()}
        self._pool.load_state_dict(state["pool"], self._coming)
        for opponent in opponents.values():
            self._pool.let_go(opponent)  # its files go when it does
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
        """Make sure that this is the state of a mapping such as this one."""
        own = {"learners": list(self._learners), "sides": {side: list(names) for side, names in self.sides.items()}}
        if not isinstance(state, Mapping) or state.keys() != {*own, "pool", "entered"}:
            raise ArgumentError(f"expected the state of a SelfPlayMapping, got {state!r:.200}")
        for what, mine in own.items():
            if state[what] != mine:
                raise ArgumentError(f"the state is of a SelfPlayMapping with the {what} {state[what]}, not {mine}")

    def add_policies(self, state: Mapping[str, Any], collector: Collector) -> Callable[[], None]:
        """Have a collector know the opponents of a state, before `set_state`; those that are the same stay.

        `Collector.set_state` asks for it, since its own state has what these policies are in the middle of.

        Args:
            state: What `get_state` returned.
            collector: The one whose mapping this is.

        Returns:
            What takes it back.

        Raises:
            ArgumentError: It is something else, or of other learners or sides; nothing has changed.
            StateError: Another opponent of the same id plays in a running episode; nothing has changed.
            CheckpointError: What it holds for a file is none; nothing has changed.
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
                if name not in collector.policies:  # or it is one of the caller's own, of which entering tells
                    came[name] = self._coming[name] = opponent
                enter(collector, opponent)
        except BaseException:
            take_back()
            raise
        return take_back

    def unknown_policies(self, state: Mapping[str, Any], collector: Collector) -> list[str]:
        """Opponents that it has added to a collector, and that a state does not know.

        Args:
            state: What `get_state` returned.
            collector: The one whose mapping this is.

        Returns:
            Their ids.
        """
        own = (self._entered.keys() | self._strays) - {name for name, *_ in state["entered"]}
        return [name for name in collector.policies if name in own]


def enter(collector: Collector, opponent: Opponent) -> None:
    """Have an opponent play in a collector, frozen, with its own connectors.

    Raises:
        ArgumentError: There is a policy of its id.
        CheckpointError: Its file is damaged.
    """
    collector.add_policy(
        opponent.opponent_id,
        opponent.policy if isinstance(collector.policies, PolicyMap) else opponent.policy(),
        agent_connectors=opponent.agent_connectors(),
        action_connectors=opponent.action_connectors(),
        learner_connectors=(),
        frozen=True,
    )
