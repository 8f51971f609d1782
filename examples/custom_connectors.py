"""Connectors of your own, one for each side, in chains with marlvec's: hunters and their prey in mpe2's simple_tag.

Three hunters share a policy, and see where the prey is heading. The prey has a policy of its own, and is kept on the
field. What the hunters learn from holds what the prey saw. In the end the hunters' chain goes to a file and back.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and policies")
parser.add_argument("--num-envs", type=int, default=16, help="envs at once")
parser.add_argument("--episodes", type=int, default=100, help="of each of three batches")
args = parser.parse_args()  # before anything large is imported

import numpy as np

import marlvec
from marlvec.connectors import (
    ActionPipeline,
    AgentConnector,
    AgentIndicator,
    AgentPipeline,
    AgentTable,
    EpsilonGreedy,
    FlattenObs,
    GeneralAdvantageEstimation,
    LearnerConnector,
    NormalizeObs,
    Rows,
    Standardize,
    action_connector,
    register_connector,
)
from marlvec.testing import check_connector


# 1. Agent side: a class that remembers. Registered, so that a chain with it can be saved.
@register_connector
class Aim(AgentConnector):
    """Adds column aim (n, 2): where the prey will be, by the way it went since the agent's last row."""

    def __init__(self, lead: float = 2.0) -> None:
        self.lead = lead
        self._last = AgentTable((2,), np.float32)

    def __call__(self, rows: Rows) -> Rows:
        way = rows.obs[:, 12:14]  # from hunter to prey
        last = self._last.get(rows.env_id, rows.agent_index)
        last[rows.first] = way[rows.first]
        self._last.set(rows.env_id, rows.agent_index, way)
        return rows.replace(aim=way + self.lead * (way - last))

    def reset(self, env_ids=None) -> None:
        self._last.reset(env_ids)

    def state_dict(self) -> dict:
        return {"last": self._last.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        if state.keys() != {"last"}:
            raise marlvec.errors.ArgumentError(f"expected 'last', got {list(state)}")
        self._last.load_state_dict(state["last"])


# 2. Action side: a function. It sees what the policy saw, and changes only what is sent.
@action_connector
def stay_inside(rows: Rows) -> Rows:
    """Whoever is about to leave the field turns back to its middle."""
    position = rows.obs[:, 2:4]
    outside = np.abs(position).max(axis=1) > 0.8
    return rows.replace(actions_for_env=np.where(outside, towards(-position), rows.actions_for_env))


# 3. Learner side: sees the rows of all policies before its own come. Here a critic gets to know what the prey saw.
class PreyObs(LearnerConnector):
    """Adds prey_obs (n, d): what the prey of the same env saw at the same moment; zeros where it is in no row."""

    across_agents = True

    def __init__(self, prey: str = "prey") -> None:
        self.prey = prey

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        self._seen = batch[self.prey]

    def __call__(self, rows: Rows) -> Rows:
        seen = self._seen
        times = np.concatenate([np.stack([part.eps_id, part.t], axis=1) for part in (seen, rows)])
        moments, moment = np.unique(times, axis=0, return_inverse=True)
        obs = np.zeros((len(moments), seen.obs.shape[1]), seen.obs.dtype)
        obs[moment[: len(seen)]] = seen.obs
        return rows.replace(prey_obs=obs[moment[len(seen) :]])


def towards(way: np.ndarray) -> np.ndarray:
    """From directions (n, 2) to actions (n,): 1 left, 2 right, 3 down, 4 up."""
    axis = np.abs(way).argmax(axis=1)
    return 1 + 2 * axis + (way[np.arange(len(way)), axis] > 0)


def value(rows: Rows) -> np.ndarray:
    """The nearer the prey, the better; a stand-in for a network."""
    return -np.linalg.norm(rows.obs[:, 12:14], axis=1)


# 4. Chains of one's own and marlvec's, for each policy; first, one's own are checked as marlvec's are.
envs = marlvec.make("simple_tag", num_envs=args.num_envs)
check_connector(Aim, envs.agent_observation_space("adversary_0"))
check_connector(lambda: PreyObs("main"), agents=["prey"])  # one an env
collector = marlvec.Collector(
    envs,
    policies={
        "hunters": marlvec.FunctionPolicy(lambda rows: (towards(rows.aim), {"values": value(rows)})),
        "prey": marlvec.RandomPolicy(),
    },
    policy_mapping=lambda agent, episode: "prey" if agent == "agent_0" else "hunters",
    agent_connectors={"hunters": [FlattenObs(), Aim(), NormalizeObs(), AgentIndicator()]},
    action_connectors={"hunters": [EpsilonGreedy(0.5)], "prey": [*ActionPipeline.default(), stay_inside]},
    learner_connectors={"hunters": [PreyObs(), GeneralAdvantageEstimation(value_function=value), Standardize()]},
    seed=args.seed,
)

# 5. A few batches: in training with half of the actions at random, in the end without.
for mode in ("train", "train", "eval"):
    _ = collector.eval() if mode == "eval" else collector.train()
    batch = collector.collect(episodes=args.episodes)
    hunters, prey = batch["hunters"], batch["prey"]
    turned = np.mean(prey.actions != prey.actions_for_env)
    mean = collector.metrics.policy("hunters")["return"].mean
    print(f"{mode:>5}: a hunter's return is {mean:5.1f}; {turned:.0%} of the prey's moves were turned round")
print(f"\n{hunters}\n")
pipeline = collector.agent_connectors["hunters"]
print(f"{pipeline.describe()}\n")
print("\n".join(f"{name:<15} {1e6 * t.seconds / t.calls:5.0f} µs a call" for name, t in pipeline.timings.items()))

# 6. To a file and back, in the middle of episodes: the copy goes on as the original, whatever comes next.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "hunters.npz"
    pipeline.save(path)
    twin = AgentPipeline.load(path)
    size = path.stat().st_size
n = np.arange(min(16, len(hunters)))
rows = Rows(env_id=n, agent_index=0 * n, first=n < 0, obs=hunters.next_obs[: len(n), :16])
one, two = pipeline(rows), twin(rows)
same = np.array_equal(one.aim, two.aim) and np.array_equal(one.obs, two.obs)
print(f"\n{size} bytes; the copy says the same: {same}")
envs.close()
