#!/usr/bin/env bash
# Versions: tianshou 2.0.1, torch 2.13.0, gymnasium 1.4.0, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: Batch.stack() of batches with different keys raises, as Batch.cat() does.
# Behaviour: it puts 0 where a batch lacks the key. Likewise a ReplayBuffer: a step whose info lacks a key has 0 there, which
#   no reader can tell from a 0 that the env said.
# Output seen: stack: b = [2, 0]; cat: ValueError; infos of three steps, the second without x: [7, 0, 7]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet tianshou==2.0.1 torch==2.13.0 gymnasium==1.4.0 numpy==2.4.6 pettingzoo==1.27.0
"$VENV/bin/python" - <<'PY'
from tianshou.data import Batch, ReplayBuffer

stacked = Batch.stack([Batch(a=1, b=2), Batch(a=3)]).b.tolist()
try:
    joined = Batch.cat([Batch(a=[1], b=[2]), Batch(a=[3])])
except ValueError as error:
    joined = type(error).__name__
buffer = ReplayBuffer(3)
for info in ({"x": 7}, {}, {"x": 7}):
    buffer.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=0, info=info))
found = stacked, joined, buffer.info.x.tolist()
print(found)
assert found == ([2, 0], "ValueError", [7, 0, 7])
PY
