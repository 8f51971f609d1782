#!/usr/bin/env bash
# Versions: xuance 1.4.4, torch 2.13.0, gymnasium 1.2.3, numpy 1.26.4, Python 3.11.7; seen 2026-11-29.
# Guess: a multi-agent buffer keeps actions of a Discrete space as ints, as they were stored.
# Behaviour: MARL_OffPolicyBuffer and MARL_OnPolicyBuffer keep them as float32, whatever the space: whole numbers above
#   16,777,216 (an action that codes several choices) come back as another action, and no sampled action can index.
# Output seen: stored int64 16777217, sampled float32 16777216.0
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet xuance==1.4.4 torch==2.13.0 gymnasium==1.2.3 numpy==1.26.4
"$VENV/bin/python" - <<'PY'
import numpy as np
from gymnasium.spaces import Box, Discrete
from xuance.common.memory_tools_marl import MARL_OffPolicyBuffer, MARL_OnPolicyBuffer

AGENTS, ACTION = ["a", "b"], 2**24 + 1
SPACES = {
    "agent_keys": AGENTS,
    "state_space": None,
    "obs_space": {agent: Box(-9, 9, (2,)) for agent in AGENTS},
    "act_space": {agent: Discrete(2**25) for agent in AGENTS},
    "n_envs": 2,
    "buffer_size": 8,
}


def rows(value, dtype, *shape):
    return {agent: np.full((2, *shape), value, dtype) for agent in AGENTS}


step = {
    "obs": rows(0, np.float32, 2),
    "actions": rows(ACTION, np.int64),
    "rewards": rows(1, np.float32),
    "terminals": rows(False, bool),
    "agent_mask": rows(True, bool),
}
off = MARL_OffPolicyBuffer(batch_size=2, **SPACES)
off.store(obs_next=rows(0, np.float32, 2), **step)
on = MARL_OnPolicyBuffer(use_gae=True, gamma=0.9, gae_lam=0.9, **SPACES)
on.store(returns=rows(0, np.float32), values=rows(0, np.float32), log_pi_old=rows(0, np.float32), advantages=rows(0, np.float32), **step)
for kind, kept in (("off policy", off.sample()["actions"]["a"]), ("on policy", on.data["actions"]["a"][:, 0])):
    print(f"{kind}: stored {step['actions']['a'].dtype} {ACTION}, kept {kept.dtype} {kept.tolist()}")
    assert kept.dtype == np.float32 and set(kept.tolist()) == {float(ACTION - 1)}
PY
