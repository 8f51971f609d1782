#!/usr/bin/env bash
# Versions: tianshou 2.0.1, torch 2.13.0, gymnasium 1.4.0, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: DummyVectorEnv.reset(seed=5) seeds its envs with 5, 6 and 7, as Gymnasium's vector envs and its own seed(5) do (seen: [5], [6], [7]).
# Behaviour: it hands seed=5 to each: all envs play one and the same episode, and random actions apart, a batch of three has
#   one start three times.
# Output seen: reset(seed=5): 1 start among 3 envs; Gymnasium: 3
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet tianshou==2.0.1 torch==2.13.0 gymnasium==1.4.0 numpy==2.4.6 pettingzoo==1.27.0
"$VENV/bin/python" - <<'PY'
from functools import partial

import gymnasium
from tianshou.env import DummyVectorEnv

factories = [partial(gymnasium.make, "CartPole-v1")] * 3
one = {tuple(row) for row in DummyVectorEnv(factories).reset(seed=5)[0].tolist()}
other = {tuple(row) for row in gymnasium.vector.SyncVectorEnv(factories).reset(seed=5)[0].tolist()}
print(f"reset(seed=5): {len(one)} start among 3 envs; Gymnasium: {len(other)}")
assert (len(one), len(other)) == (1, 3)
PY
