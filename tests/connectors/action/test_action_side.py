"""What all pieces of the action side have in common, and what they are for: lines 97 and 98 of the checklist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec import connectors as c
from tests.connectors.helpers.action_samples import bind, decisions, play, send
from tests.connectors.helpers.samples import same_tree

GEAR = spaces.Discrete(5, start=-2)
ARM = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([3.0, 0.3], np.float32))
STOCHASTIC: list[tuple[str, dict[str, Any], spaces.Space[Any]]] = [
    ("MaskInvalid", {"fallback": "random"}, GEAR),
    ("StickyActions", {}, spaces.Dict({"arm": ARM, "gear": GEAR})),
    ("GaussianNoise", {}, ARM),
    ("OrnsteinUhlenbeckNoise", {}, ARM),
    ("EpsilonGreedy", {"epsilon": 0.5}, GEAR),
    ("ReplaceNaN", {"fill": "random"}, ARM),
]


def with_nan(actions: Any) -> Any:
    """NaN in half of the rows."""
    return np.where(np.arange(len(actions))[:, None] % 2, actions, np.nan)


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.checklist(97)
@pytest.mark.parametrize(("name", "args", "space"), STOCHASTIC)
def test_masking_lambda_discretise_sticky_and_noise_exist_and_what_is_random_has_a_seed(
    name: str, args: dict[str, Any], space: spaces.Space[Any]
) -> None:
    """Equal seeds send equal actions, other seeds others, in the same episodes; numpy's own generator stays as it is.

    The chain of the second half has all five kinds; the pieces' own tests say what each does.
    """
    np.random.seed(7)  # noqa: NPY002  # that nobody draws from it is the point
    untouched = np.random.random(3).tolist()  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    sent = []
    for seed in (1, 1, 2):
        pipeline = bind(getattr(c, name)(**args, seed=seed), space)
        ticks = play(pipeline.policy_space_, 10, mask=GEAR if space is GEAR else None)
        if name == "ReplaceNaN":
            ticks = [rows.replace(actions=with_nan(rows.actions)) for rows in ticks]
        sent.append([rows.actions_for_env for rows in send(pipeline, ticks)])
    assert np.random.random(3).tolist() == untouched  # noqa: NPY002
    same_tree(sent[0], sent[1])
    with pytest.raises(AssertionError):
        same_tree(sent[0], sent[2])

    chain = c.ActionPipeline(
        [
            c.MapActions(lambda actions: actions[:, ::-1]),
            c.GaussianNoise(0.2, seed=5),
            c.StickyActions(seed=5),
            c.MapActions(lambda actions: (actions[:, 0] > 0).astype(np.int64), spaces.Box(-1, 1, (2,))),
            c.MaskInvalid("random", seed=5),
            c.DiscretizeActions(2),
        ]
    )
    chain.bind(spaces.Box(-3, 3, ()))
    assert chain.policy_space_ == spaces.Box(-1, 1, (2,))
    for rows in play(chain.policy_space_, 5, mask=spaces.Discrete(2)):
        assert np.isin(chain(rows).actions_for_env, [-3, 3]).all()


@pytest.mark.checklist(98)
def test_action_connectors_see_the_rows_and_may_change_states_and_extras() -> None:
    """The connector half of it; tests/collect has the other, where these columns arrive in batches."""
    seen: list[dict[str, Any]] = []

    @c.action_connector
    def cautious(rows: c.Rows) -> c.Rows:
        """Near a wall (obs above 1) the agent stands still, its state is cleared, and its logp says so."""
        seen.append(dict(rows))
        stops = rows.obs[:, 0] > 1
        return rows.replace(
            actions_for_env=np.where(stops[:, None], 0, rows.actions_for_env),
            state_out={"h": np.where(stops[:, None], 0, rows.state_out["h"])},
            logp=np.where(stops, 0, rows.logp),
            stopped=stops,
        )

    space = spaces.Box(-1, 1, (2,))
    chain = c.ActionPipeline([c.GaussianNoise(0.1), cautious])
    chain.bind(space)
    rows = decisions(
        np.ones((4, 2), np.float32),
        envs=2,
        agents=2,
        t=3,
        obs=np.array([[0.0], [2.0], [0.5], [9.0]]),
        rewards=np.arange(4.0),
        action_mask=np.ones((4, 1), bool),
        state_in={"h": np.zeros((4, 3))},
        state_out={"h": np.ones((4, 3))},
        logp=np.full(4, -1.5),
    )
    out = chain(rows)
    inputs = ("env_id", "agent_index", "eps_id", "t", "first", "obs", "rewards", "action_mask", "state_in", "state_out")
    for name in (*inputs, "logp", "actions"):
        assert seen[0][name] is rows[name]
    np.testing.assert_array_equal(out.stopped, [False, True, False, True])
    np.testing.assert_array_equal(out.logp, [-1.5, 0, -1.5, 0])
    np.testing.assert_array_equal(out.state_out["h"][:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(out.actions_for_env[[1, 3]], np.zeros((2, 2)))
    assert (out.actions_for_env[[0, 2]] > 0).all()
    np.testing.assert_array_equal(out.actions, np.ones((4, 2)))
    np.testing.assert_array_equal(rows.state_out["h"], np.ones((4, 3)))
