"""Defects of self-play: who plays whom, the pool of opponents, results and ratings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from marlvec.selfplay import Elo, MatchTable, OpponentPool
from marlvec.selfplay.mapping import SelfPlayMapping
from tests.defects.registry import Patch, after, found_by

MAPPING = "tests/selfplay/test_mapping.py"
POOL = "tests/selfplay/test_opponents.py"
RATINGS = "tests/selfplay/test_ratings.py"


@found_by(MAPPING)
def selfplay_learner_always_on_the_first_side(patch: Patch) -> None:
    """A learner plays one side of the game alone."""
    lineup = SelfPlayMapping._lineup

    def first_side(mapping: SelfPlayMapping, episode: Any) -> dict[str, str]:
        turns, mapping._turns = mapping._turns, mapping._turns[:1]
        try:
            return lineup(mapping, episode)
        finally:
            mapping._turns = turns

    patch.setattr(SelfPlayMapping, "_lineup", first_side)


@found_by(MAPPING)
def selfplay_lineup_of_the_env_before(patch: Patch) -> None:
    """Who plays an env's first episode plays all episodes of that env."""
    call = SelfPlayMapping.__call__

    def keep(mapping: SelfPlayMapping, agent: str, episode: Any) -> str:
        if episode.env_id in mapping._lineups:
            return mapping._lineups[episode.env_id][1][mapping._side_of[agent]]
        return call(mapping, agent, episode)

    patch.setattr(SelfPlayMapping, "__call__", keep)


@found_by(MAPPING, POOL)
def selfplay_evicted_opponents_go_on(patch: Patch) -> None:
    """Opponents that have left the pool go on being chosen."""

    def chosen_again(_: None, mapping: SelfPlayMapping, *__: Any) -> None:
        mapping._retiring.clear()

    after(patch, SelfPlayMapping, "update", chosen_again)


@found_by(POOL)
def selfplay_one_more_than_fits(patch: Patch) -> None:
    """A pool that is full keeps one opponent more than it may."""
    too_many = OpponentPool._too_many
    patch.setattr(OpponentPool, "_too_many", lambda pool, opponents: too_many(pool, opponents)[1:])


@found_by(RATINGS, "tests/selfplay/test_evaluate.py")
def selfplay_draw_counts_as_won(patch: Patch) -> None:
    """A draw is a game that the first player won."""
    add = MatchTable.add_result
    patch.setattr(MatchTable, "add_result", lambda table, one, other, margin: add(table, one, other, margin or 1.0))


@found_by(RATINGS)
def selfplay_winner_alone_is_rated(patch: Patch) -> None:
    """The points that a winner gets are not taken from anybody."""

    def give_back(_: None, elo: Elo, teams: Any, scores: Any) -> None:
        for players, score in zip(teams, scores, strict=True):
            if score < max(scores):
                for player in players:
                    elo._ratings[player] = elo.initial

    after(patch, Elo, "_rate", give_back)


@found_by(POOL)
def selfplay_opponents_saved_as_of_step_zero(patch: Patch) -> None:
    """A pool that was loaded says of all its opponents that they are of step 0."""
    unpack = OpponentPool.unpack

    def young(pool: OpponentPool, packed: Any, unpacked: Any = None) -> Any:
        return replace(unpack(pool, packed, unpacked), step=0)

    patch.setattr(OpponentPool, "unpack", young)
