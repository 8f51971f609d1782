"""`SelfPlayMapping`: a policy mapping with learners, frozen opponents and a matchmaker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
        self._entered: dict[str, Opponent] = {}
        self._retiring: dict[str, Opponent] = {}
        self._lineups: dict[int, tuple[int, dict[str, str]]] = {}  # env to its episode, and who plays which side

    def __repr__(self) -> str:
        return f"SelfPlayMapping(learners={list(self._learners)}, {len(self._entered)} opponents)"

    def __call__(self, agent: str, episode: Episode) -> str:
        """Say who plays an agent in an episode.

        Raises:
            KeyError: There is no such agent.
            ArgumentError: A matchmaker chose somebody who is neither an opponent nor a learner.
        """
        known, lineup = self._lineups.get(episode.env_id, (-1, {}))
        if known != episode.eps_id:
            lineup = self._lineup(episode)
            self._lineups[episode.env_id] = episode.eps_id, lineup
        return lineup[self._side_of[agent]]

    def _lineup(self, episode: Episode) -> dict[str, str]:
        turns = len(self._turns)
        stretch, place = divmod(episode.number, turns)
        order = episode.stream(stretch).permutation(turns)
        learner, own = self._turns[int(order[(episode.env_id + place) % turns])]
        return {side: learner if side == own else self._choose(learner, side, episode) for side in self.sides}

    def _choose(self, learner: str, side: str, episode: Episode) -> str:
        opponents = [one for one in self._entered.values() if self._can(one.of, side)]
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
        for name, opponent in list(self._entered.items()):
            if self._pool.get(name) is not opponent:
                self._retiring[name] = self._entered.pop(name)
        for name in list(self._retiring):
            try:
                collector.remove_policy(name)
            except StateError:  # it plays to the end of its episodes
                continue
            del self._retiring[name]
        for name, opponent in self._pool.items():
            if name not in self._entered and name not in self._retiring:
                enter(collector, opponent)
                self._entered[name] = opponent


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
