#!/usr/bin/env bash
# Versions: skrl 2.1.1, torch 2.13.0, pettingzoo 1.27.0, gymnasium 1.4.0, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: SequentialTrainer trains IPPO over an agent that leaves early, as agents of PettingZoo may (it fills its rows, or
#   leaves them out).
# Behaviour: the step after the agent left raises KeyError in record_transition(): every agent must be in every step.
# Output seen: {'together': 'trained', 'early': 'KeyError'}
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet skrl==2.1.1 torch==2.13.0 pettingzoo==1.27.0 gymnasium==1.4.0 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import numpy as np
import pettingzoo
import torch
from gymnasium.spaces import Box, Discrete
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.multi_agents.torch.ippo import IPPO, IPPO_CFG
from skrl.trainers.torch import SequentialTrainer

AGENTS = ["a", "b"]


class Two(pettingzoo.ParallelEnv):
    """Two agents for four steps; `early`: the first one leaves after its second step, flagged as terminated."""

    metadata = {"name": "two"}
    render_mode = None
    possible_agents = AGENTS
    state_space = Box(-9, 9, (3,))

    def __init__(self, early):
        self.early = early
        self.observation_spaces = {agent: Box(-9, 9, (2,), np.float32) for agent in AGENTS}
        self.action_spaces = {agent: Discrete(3) for agent in AGENTS}

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def reset(self, seed=None, options=None):
        self.agents, self.steps = AGENTS[:], 0
        return {agent: np.zeros(2, np.float32) for agent in AGENTS}, {agent: {} for agent in AGENTS}

    def step(self, actions):
        self.steps += 1
        here = self.agents
        ended = {agent: self.early and agent == "a" and self.steps == 2 for agent in here}
        cut = {agent: self.steps == 4 for agent in here}
        self.agents = [agent for agent in here if not (ended[agent] or cut[agent])]
        seen = {agent: np.zeros(2, np.float32) for agent in here}
        return seen, dict.fromkeys(here, 1.0), ended, cut, {agent: {} for agent in here}


class WithState(Two):
    def state(self):
        return np.zeros(3, np.float32)


def net(mixin, outputs):
    class Net(mixin, Model):
        def __init__(self, space, actions):
            Model.__init__(self, observation_space=space, action_space=actions, device="cpu")
            mixin.__init__(self)
            self.layer = torch.nn.Linear(2, outputs)

        def compute(self, inputs, role=""):
            return self.layer(inputs["observations"]), {}

    return Net


def train(inner):
    env = wrap_env(inner, wrapper="pettingzoo")
    kinds = {"policy": net(CategoricalMixin, 3), "value": net(DeterministicMixin, 1)}
    spaces = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in AGENTS}
    cfg = IPPO_CFG(rollouts=16, learning_epochs=1, mini_batches=1)
    for name in ("observation_preprocessor", "state_preprocessor", "value_preprocessor", "learning_rate_scheduler"):
        setattr(cfg, f"{name}_kwargs", {agent: {} for agent in AGENTS})
    agents = IPPO(
        possible_agents=AGENTS,
        models={agent: {name: kind(*spaces[agent]) for name, kind in kinds.items()} for agent in AGENTS},
        memories={agent: RandomMemory(memory_size=16, num_envs=1, device="cpu") for agent in AGENTS},
        observation_spaces=env.observation_spaces,
        state_spaces=env.state_spaces,
        action_spaces=env.action_spaces,
        device="cpu",
        cfg=cfg,
    )
    settings = {"timesteps": 20, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    try:
        SequentialTrainer(env=env, agents=agents, cfg=settings).train()
    except (KeyError, NotImplementedError) as error:
        return type(error).__name__
    return "trained"


found = {"together": train(WithState(early=False)), "early": train(WithState(early=True))}
print(found)
assert found == {"together": "trained", "early": "KeyError"}
PY
