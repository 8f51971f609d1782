#!/usr/bin/env bash
# Versions: ray 2.60.0, gymnasium 1.2.2, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: MultiAgentEpisode.cut() while an agent waits (it has acted, has been paid, and has not observed since) keeps what is
#   open: the returns of both chunks add up to that of the episode without a cut.
# Behaviour: so it is with cut(len_lookback_buffer=1), which env runners ask for. With the default, 0, the successor does not
#   know the agent's action: all that it was paid since then is lost from both returns, its next observation begins it anew
#   without a step, and concat_episode() of the two chunks raises AssertionError.
# Output seen: without a cut 19.0; cut(len_lookback_buffer=1) 19.0; cut() 6.0, and the agent's rewards in the successor: none
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet "ray[rllib]==2.60.0" gymnasium==1.2.2 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import numpy as np
from gymnasium.spaces import Box, Discrete
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

AGENTS = ("a", "b")


def step(episode, observations, actions, rewards):
    episode.add_env_step(
        observations={agent: np.array([float(x)]) for agent, x in observations.items()},
        actions=actions,
        rewards=rewards,
        infos={agent: {} for agent in observations},
        terminateds={"__all__": False},
        truncateds={"__all__": False},
    )


def begin():
    episode = MultiAgentEpisode(
        observation_space={agent: Box(-99, 99, (1,)) for agent in AGENTS},
        action_space={agent: Discrete(3) for agent in AGENTS},
        agent_to_module_mapping_fn=lambda agent, episode: "one",
    )
    episode.add_env_reset(observations={"a": np.array([0.0]), "b": np.array([10.0])}, infos={})
    step(episode, {"b": 11}, {"a": 0, "b": 0}, {"a": 1.0, "b": 1.0})  # a acts, and then waits
    step(episode, {"b": 12}, {"b": 0}, {"a": 5.0, "b": 2.0})
    return episode


def end(episode):
    step(episode, {"a": 2, "b": 13}, {"b": 0}, {"a": 7.0, "b": 3.0})  # a observes again
    return episode


def cut(**lookback):
    first = begin()
    second = end(first.cut(**lookback))
    return first.get_return() + second.get_return(), second.get_rewards().get("a"), first, second


whole = end(begin()).get_return()
kept, _, *_ = cut(len_lookback_buffer=1)
lost, rewards, first, second = cut()
print(f"without a cut {whole}; cut(len_lookback_buffer=1) {kept}; cut() {lost}, and the agent's rewards there: {rewards}")
assert (whole, kept, lost, rewards) == (19.0, 19.0, 6.0, None)
try:
    first.concat_episode(second)
    raise SystemExit("the chunks can be joined now")
except AssertionError:
    print("concat_episode(): AssertionError")
PY
