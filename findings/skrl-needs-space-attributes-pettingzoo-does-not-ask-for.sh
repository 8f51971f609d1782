#!/usr/bin/env bash
# Versions: skrl 2.1.1, torch 2.13.0, pettingzoo 1.27.0, gymnasium 1.4.0, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: wrap_env() runs every PettingZoo ParallelEnv that has observation_space(agent) and action_space(agent), as the API
#   asks for.
# Behaviour: it wraps it, and then reset() and step() raise AttributeError: the wrapper reads the dicts observation_spaces and
#   action_spaces. With these two attributes the same env runs.
# Output seen: methods alone: AttributeError: ... does not have attribute 'observation_spaces'; with the dicts: reset works
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet skrl==2.1.1 torch==2.13.0 pettingzoo==1.27.0 gymnasium==1.4.0 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import numpy as np
import pettingzoo
from gymnasium.spaces import Box, Discrete
from skrl.envs.wrappers.torch import wrap_env


class Methods(pettingzoo.ParallelEnv):
    metadata = {"name": "methods"}
    render_mode = None
    possible_agents = ["a", "b"]

    def observation_space(self, agent):
        return Box(-1, 1, (2,), np.float32)

    def action_space(self, agent):
        return Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = ["a", "b"]
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}


class Dicts(Methods):
    def __init__(self):
        self.observation_spaces = {agent: self.observation_space(agent) for agent in self.possible_agents}
        self.action_spaces = {agent: self.action_space(agent) for agent in self.possible_agents}


try:
    wrap_env(Methods(), wrapper="pettingzoo").reset()
    raise SystemExit("it runs now")
except AttributeError as error:
    print(f"methods alone: AttributeError: {error}")
    assert "observation_spaces" in str(error)
observations, _ = wrap_env(Dicts(), wrapper="pettingzoo").reset()
print("with the dicts:", {agent: tuple(seen.shape) for agent, seen in observations.items()})
assert set(observations) == {"a", "b"}
PY
