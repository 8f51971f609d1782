"""`evaluate_match`: play matches between policies and count wins."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import count_from
from marlvec.collect import Episode
from marlvec.collect.callbacks import Callback, RunningEpisode
from marlvec.collect.collector import EvaluationCollector
from marlvec.collect.metrics import EpisodeRecord
from marlvec.collect.policies import pipelines_for
from marlvec.connectors import ActionPipeline, AgentPipeline
from marlvec.errors import ArgumentError, StateError
from marlvec.making import make
from marlvec.policies import Policy, PolicyLike, as_policy
from marlvec.policies.policy_map import SharedPolicy
from marlvec.registry import EnvLike
from marlvec.selfplay.opponents import Opponent
from marlvec.selfplay.ratings import Game, ScoreFunction, Sides, game_of, sides_of
from marlvec.selfplay.results import MatchResult
from marlvec.vector.settings import check_seed
from marlvec.vector.vector_env import VectorEnv

_STREAM = 0x7363686564756C65  # "schedule"


def line_ups(
    players: Sequence[str], sides: Sequence[str], plays: Mapping[str, Collection[str]] | None = None
) -> list[tuple[str, ...]]:
    """Return all line-ups of a tournament, each one policy id per side; ``plays`` limits a policy to some sides.

    If every policy can play every side: every choice of as many policies as there are sides, rotated over the sides, so
    that over all line-ups each policy plays each side equally often. Fewer policies than sides take turns along the
    sides, again rotated. If some policies can play only certain sides: all possible line-ups, without those in which
    one policy plays all sides.
    """
    plays = plays or {}
    unknown = [name for name in plays if name not in players]
    unknown += [side for own in plays.values() for side in own if side not in sides]
    if len(players) < 2 or unknown:
        what = f"plays: unknown {unknown}" if unknown else f"policies: expected at least two, got {players}"
        raise ArgumentError(f"{what}; the policies are {list(players)}, the sides {list(sides)}")
    if plays:
        able = [[name for name in players if name not in plays or side in plays[name]] for side in sides]
        found = [line_up for line_up in product(*able) if len(set(line_up)) > 1]
        if most := max((len(set(line_up)) for line_up in found), default=0):
            return [line_up for line_up in found if len(set(line_up)) == most]
        raise ArgumentError(f"plays: no line-up is possible; the sides {list(sides)} can be played by {able}")
    s = len(sides)
    groups = list(combinations(players, s)) or [tuple(players[i % len(players)] for i in range(s))]
    rotated = [tuple(group[(i + shift) % s] for i in range(s)) for group in groups for shift in range(s)]
    return list(dict.fromkeys(rotated))


class MatchSchedule:
    """Assigns a line-up to the n-th game: each line-up comes once, in random order, then all come again."""

    def __init__(self, line_ups: Sequence[tuple[str, ...]], seed: int) -> None:
        self.line_ups, self._seed = tuple(line_ups), seed
        self._round, self._order = -1, np.arange(0)

    def __getitem__(self, game: int) -> tuple[str, ...]:
        """Return the line-up of a game: one policy id per side."""
        round_, place = divmod(game, len(self.line_ups))
        if round_ != self._round:
            stream = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, round_))
            self._round, self._order = round_, np.random.default_rng(stream).permutation(len(self.line_ups))
        return self.line_ups[int(self._order[place])]


def evaluate_match(
    policies: Mapping[str, PolicyLike | Opponent],
    env: EnvLike | Sequence[EnvLike] | VectorEnv,
    games: int,
    *,
    num_envs: int = 16,
    seed: int = 0,
    sides: Sides | None = None,
    plays: Mapping[str, Collection[str]] | None = None,
    agent_connectors: Any = None,
    action_connectors: Any = None,
    score: ScoreFunction | None = None,
    explore: bool = True,
    confidence: float = 0.95,
    progress: bool | None = None,
    **options: Any,
) -> MatchResult:
    """Let policies play matches against each other, in many envs at once.

    Line-ups are fixed in advance, see `marlvec.selfplay.evaluate.line_ups`: two policies change sides; more policies
    all meet each other. Each env plays its own list of games to the end, so that short games are not counted more often
    than long ones. ``games`` should be a multiple of the number of line-ups; otherwise some are played once more than
    others.

    Equal arguments give equal results, bit for bit, in one process or in many: ``backend``, ``num_workers`` and
    ``autoreset_mode`` make no difference. (``num_envs`` does, since it changes the envs' seeds.)

    Policies and connectors are left unchanged: connectors are copied and in eval mode, and policies get their state
    back.

    Args:
        policies: Policy id to a policy (or an object with a method ``act(rows)``, or a function of rows), or to an
            opponent of a pool, which has its own connectors. An `OpponentPool` is such a dict.
        env: As for `marlvec.make`; or a `VectorEnv`, which is reset and left open.
        games: How many games.
        num_envs: How many envs at once; fewer if there are fewer games.
        seed: Seed of envs, policies, connectors' draws (beside the connectors' own seeds), and the order of line-ups.
        sides: Which agents play together; None: each agent is its own side.
        plays: Policy id to the sides it can play; others can play all.
        agent_connectors: As for `Collector`: one chain, or policy id to chain, or None. Opponents use those that they
            were saved with; an opponent saved without any can be named in the dict.
        action_connectors: As for `Collector`.
        score: One number per side of a finished episode, more is better; None: the sum of its agents' returns.
        explore: Whether policies explore. If neither they nor the env are random, all games of a line-up are equal.
        confidence: Level of the win rates' intervals.
        progress: Whether to show a progress bar on stderr; None: if stderr is a terminal.
        options: For `marlvec.make`: ``backend``, ``num_workers``, ``max_episode_steps``, ``env_kwargs``, …

    Returns:
        The games, with win rates and their intervals.

    Raises:
        ArgumentError: An argument is wrong; nothing was played.
        EnvFault: An env failed, and ``on_fault`` is ``"raise"``.
        Exception: As raised by policies.
    """
    total = count_from(games, f"games={games!r}")
    seed = check_seed(seed)
    players = tuple(policies)
    if isinstance(env, VectorEnv):
        if options:
            raise ArgumentError(f"{list(options)}: options build envs, but env is a VectorEnv already; leave them out")
        opened: Any = nullcontext(env)
    else:
        opened = make(env, min(count_from(num_envs, f"num_envs={num_envs!r}"), total), **options)
    with opened as envs:
        match = _Match(envs, total, sides_of(envs.agents, sides), players, plays, score, seed)
        own, before, behind = _policy_set(policies, agent_connectors, action_connectors)
        with _restored([policy.host for policy in own.values() if isinstance(policy, SharedPolicy)]):
            collector = EvaluationCollector(
                envs,
                own,
                match.player,
                agent_connectors=before,
                action_connectors=behind,
                policies_to_train=(),
                callbacks=[match],
                explore=explore,
                seed=seed,
                window=1,
            ).eval()
            with _bar(total, progress) as show:
                while match.is_on:
                    try:
                        collector.collect(episodes=1)
                    except StateError:
                        if match.is_on:
                            raise  # otherwise the last envs with games to play were masked
                    show(match.played)
    return MatchResult(
        players, tuple(match.sides), match.games, match.lost, total - match.played, confidence=confidence
    )


class _Match(Callback):
    """Assigns line-ups to episodes, and records their games.

    Env i plays games i, i + N, i + 2 N, …; later episodes are not counted.
    """

    def __init__(
        self,
        envs: VectorEnv,
        total: int,
        sides: Mapping[str, Sequence[str]],
        players: Sequence[str],
        plays: Mapping[str, Collection[str]] | None,
        score: ScoreFunction | None,
        seed: int,
    ) -> None:
        self.sides = sides
        self._schedule = MatchSchedule(line_ups(players, tuple(sides), plays), seed)
        self._side_of = {agent: i for i, own in enumerate(sides.values()) for agent in own}
        self._envs, self._total, self._score = envs, total, score
        self._next_N: NDArray[np.int64] = np.arange(envs.num_envs)  # the current game of each env
        self._found: dict[int, Game] = {}
        self.lost = 0

    def player(self, agent: str, episode: Episode) -> str:
        """Policy mapping: return the policy that plays an agent."""
        line_up = self._schedule[int(self._next_N[episode.env_id])]
        return line_up[self._side_of[agent]]

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        game = int(self._next_N[record.env_id])
        if game < self._total:
            self._found[game] = game_of(record, self._envs.agents, self.sides, self._score)
            self._next_N[record.env_id] += len(self._next_N)

    def on_episode_lost(self, episode: RunningEpisode, why: str) -> None:
        self.lost += int(self._next_N[episode.env_id]) < self._total

    @property
    def games(self) -> tuple[Game, ...]:
        """The finished games, in the order of the schedule."""
        return tuple(game for _, game in sorted(self._found.items(), key=operator.itemgetter(0)))

    @property
    def played(self) -> int:
        """How many games are finished."""
        return len(self._found)

    @property
    def is_on(self) -> bool:
        """Whether an unmasked env has games to play."""
        waiting = self._next_N < self._total
        waiting[list(self._envs.masked_env_ids)] = False
        return bool(waiting.any())


def _policy_set(
    policies: Mapping[str, PolicyLike | Opponent], agent_connectors: Any, action_connectors: Any
) -> tuple[dict[str, Policy], dict[str, AgentPipeline], dict[str, ActionPipeline]]:
    """Return all policies, with copies of their connectors."""
    own: dict[str, Policy] = {}
    for name, policy in policies.items():
        if isinstance(policy, Opponent):
            own[name] = policy.policy()
        else:
            own[name] = SharedPolicy(name, as_policy(policy, f"policy {name!r}", also=", or an Opponent"))
    open_to = [_open_to(policies, given, place) for place, given in ((1, agent_connectors), (2, action_connectors))]
    before = pipelines_for(AgentPipeline, copy.deepcopy(agent_connectors), open_to[0], AgentPipeline.default)
    behind = pipelines_for(ActionPipeline, copy.deepcopy(action_connectors), open_to[1], ActionPipeline.default)
    for name, policy in policies.items():
        if isinstance(policy, Opponent):
            if name not in before:
                before[name] = policy.agent_connectors()
            if name not in behind:
                behind[name] = policy.action_connectors()
    return own, before, behind


def _open_to(policies: Mapping[str, PolicyLike | Opponent], given: Any, place: int) -> list[str]:
    """List policies that take given connectors: opponents only if named, and if their file at this place is missing."""
    named = given if isinstance(given, Mapping) else ()
    return [
        name
        for name, policy in policies.items()
        if not isinstance(policy, Opponent) or (policy.files[place] is None and name in named)
    ]


@contextmanager
def _restored(policies: Sequence[Policy]) -> Iterator[None]:
    """Restore the policies' states, including their random generators, at exit."""
    kept = [(policy, policy.state_dict(), policy.version) for policy in policies]
    try:
        yield
    finally:
        for policy, state, version in kept:
            policy.load_state_dict(state)
            policy.version = version


@contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over games; yield a function that takes the number of finished games."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda games: None
        return
    from marlvec.collect.progress_bar import ProgressBar  # imported here, since importing rich is slow

    with ProgressBar("match", "games", total) as bar:
        yield bar.show
