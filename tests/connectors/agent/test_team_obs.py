from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from tests.connectors.helpers import samples
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, rows_of, vectors

NAMES = ("wolf_0", "wolf_1", "hare_0")
bound = partial(samples.bound, agents=NAMES)
EVERYONE = [(0, 0), (0, 1), (0, 2)]


class Team:
    """The plain reference: for each env the last observation, as a list of leaves, of each agent that is there."""

    def __init__(self, space: Space) -> None:
        self.leaves = SpaceTree(space).leaves
        self.seen: dict[tuple[int, int], tuple[int, list[Any]]] = {}

    def see(self, pair: tuple[int, int], episode: int, values: list[Any]) -> None:
        self.seen[pair] = (episode, values)

    def look(self, env: int, episode: int) -> tuple[list[list[Any]], list[int]]:
        """Per leaf a value of each agent, and who is there."""
        there = [self.seen.get((env, agent), (None, []))[0] == episode for agent in range(3)]
        blanks = [np.broadcast_to(getattr(leaf.space, "start", 0), leaf.shape) for leaf in self.leaves]
        return [
            [self.seen[env, agent][1][k] if there[agent] else blanks[k] for agent in range(3)]
            for k in range(len(self.leaves))
        ], [int(here) for here in there]

    def end(self, pair: tuple[int, int]) -> None:
        del self.seen[pair]

    def reset(self, env: int) -> None:
        self.seen = {pair: value for pair, value in self.seen.items() if pair[0] != env}


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), with_episodes=st.booleans(), data=st.data())
def test_each_sees_what_its_team_last_saw(space: Space, with_episodes: bool, data: st.DataObject) -> None:
    """Episodes of 3 envs × 3 agents that come, take turns, end and are lost, rows in any order; against a plain dict.

    With ``eps_id`` an episode may end unseen, without a reset: nothing of it is left in the next one.
    """
    piece = c.TeamObs()
    pipeline, team = bound(piece, space), Team(space)
    tree, after = SpaceTree(space), SpaceTree(pipeline.output_space_)
    episode = np.zeros(3, np.int64)
    for tick in range(data.draw(st.integers(1, 6))):
        pairs = data.draw(st.lists(st.sampled_from([(e, a) for e in range(3) for a in range(3)]), unique=True))
        n, ids = len(pairs), np.array(pairs, np.int64).reshape(-1, 2)
        obs = batch(space, n, tick)
        last = np.array([data.draw(st.sampled_from([False, False, True])) for _ in pairs], bool)
        columns = {"eps_id": episode[ids[:, 0]]} if with_episodes else {}
        out = pipeline(rows_of(pairs, obs, last=last, **columns)).obs
        assert all_inside(pipeline.output_space_, out, n)
        leaves = tree.flatten(obs)
        for i, pair in enumerate(pairs):
            team.see(pair, int(episode[pair[0]]), [leaf[i] for leaf in leaves])
        got = after.flatten(out)[len(leaves) : -1]
        for i, (env, _) in enumerate(pairs):
            wanted, there = team.look(env, int(episode[env]))
            assert out["team_mask"][i].tolist() == there
            for k, want in enumerate(wanted):
                np.testing.assert_array_equal(got[k][i], np.stack(want))
        for k, leaf in enumerate(leaves):
            assert after.flatten(out)[k] is leaf
            assert got[k].dtype == leaf.dtype
        for i in np.flatnonzero(last):
            team.end(pairs[i])
        for env in data.draw(st.sets(st.integers(0, 3))):
            pipeline.reset([env])
            team.reset(env)
        if with_episodes:
            episode[data.draw(st.integers(0, 2))] += 1


def test_team_obs_function() -> None:
    """How far the others are: what RLlib's examples do for two agents by hand."""

    def distances(team_obs_nA: Any, team_mask_nA: Any, rows: c.Rows) -> Any:
        assert rows.keys() == {"env_id", "agent_index", "obs"}
        for array in (team_obs_nA, team_mask_nA, rows.obs):
            assert not array.flags.writeable
        far = np.linalg.norm(team_obs_nA - rows.obs[:, None], axis=-1)
        return np.where(team_mask_nA, far, 99)

    pipeline = bound(c.TeamObs(distances, spaces.Box(0, 99, (3,))), vectors(2))
    obs = np.array([[3, 4], [0, 0]], np.float32)
    out = pipeline(rows_of([(0, 2), (0, 0)], obs)).obs
    assert out.tolist() == [[5, 99, 0], [0, 99, 5]]
    assert out.dtype == np.float32
    wrong = bound(c.TeamObs(lambda team, mask, rows: team, vectors(2)), vectors(2))
    with pytest.raises(ContractError, match=r"the function of TeamObs returned float32 of shape \(2, 3, 2\)"):
        wrong(rows_of([(0, 2), (0, 0)], obs))


def test_an_agent_beyond_the_last_is_an_error() -> None:
    with pytest.raises(ContractError, match="agent_index 3 in rows of 3 agents"):
        bound(c.TeamObs(), vectors())(rows_of([(0, 3)], np.zeros((1, 3), np.float32)))


def joint(team_obs_nA: Any, team_mask_nA: Any, rows: c.Rows) -> Any:
    return np.concatenate([team_obs_nA.reshape(len(rows), -1), team_mask_nA], axis=1)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(91)
@given(mode=st.sampled_from(["one_hot", "type"]), data=st.data())
def test_who_i_am_padding_death_functions_and_the_team_in_one_chain(mode: Any, data: st.DataObject) -> None:
    """Agents die at times of their own in 2 envs; each row against the same worked out by hand, one row at a time."""
    pipeline = c.AgentPipeline(
        [
            c.MapObs(lambda obs: obs * 2),
            c.PerAgent(lambda obs, agent: -obs if agent == "hare_0" else obs),
            c.DeathMask(append=True),
            c.PadObs(4),
            c.TeamObs(joint, spaces.Box(-np.inf, np.inf, (15,))),
            c.AgentIndicator(mode=mode),
        ]
    )
    pipeline.bind(vectors(2, -9, 9), NAMES)
    code = {"one_hot": np.eye(3), "type": np.array([[1, 0], [1, 0], [0, 1]])}[mode]
    width = 15 + code.shape[1]
    assert pipeline.output_space_.shape == (width,)
    alive = {(env, agent) for env in range(2) for agent in range(3)}
    tick = 0
    while alive:
        tick += 1
        pairs = data.draw(st.permutations(sorted(alive)))
        obs = batch(vectors(2, -9, 9), len(pairs), tick)
        ends = np.array([tick > 3 or data.draw(st.booleans()) for _ in pairs], bool)
        dies = ends & np.array([data.draw(st.booleans()) for _ in pairs], bool)
        out = pipeline(rows_of(pairs, obs, terminated=dies, truncated=ends & ~dies, last=ends)).obs
        shown = {}
        for i, (env, agent) in enumerate(pairs):
            mine = obs[i] * 2 * (-1 if agent == 2 else 1)
            shown[env, agent] = [0, 0, 0, 0] if dies[i] else [*mine, 1, 0]
        for i, (env, agent) in enumerate(pairs):
            team = [shown.get((env, other), [0, 0, 0, 0]) for other in range(3)]
            there = [(env, other) in shown for other in range(3)]
            np.testing.assert_array_equal(out[i], np.concatenate([*team, there, code[agent]]).astype(np.float32))
        assert all_inside(pipeline.output_space_, map_tree(np.asarray, out), len(pairs))
        alive -= {pair for pair, end in zip(pairs, ends, strict=True) if end}
