#!/usr/bin/env bash
# Versions: tianshou 2.0.1, torch 2.13.0, gymnasium 1.4.0, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: a ReplayBuffer whose first observation was an int raises at a float, or widens its column.
# Behaviour: each column has the dtype of the first row, and later rows are cast to it without a word: floats in an int column
#   lose their fractions, 300 in a uint8 column becomes 44. An env whose reset() gives ints and whose step() gives floats is
#   stored wrong.
# Output seen: 1, then 2.7: int64 [1, 2]; uint8 1, then 300: uint8 [1, 44]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet tianshou==2.0.1 torch==2.13.0 gymnasium==1.4.0 numpy==2.4.6 pettingzoo==1.27.0
"$VENV/bin/python" - <<'PY'
import numpy as np
from tianshou.data import Batch, ReplayBuffer


def stored(*rows):
    buffer = ReplayBuffer(5)
    for row in rows:
        buffer.add(Batch(obs=row, act=0, rew=0.0, terminated=False, truncated=False, obs_next=row, info={}))
    return str(buffer.obs.dtype), np.asarray(buffer.obs[: len(rows)]).ravel().tolist()


found = stored(1, 2.7), stored(np.array([1], np.uint8), np.array([300]))
print(found)
assert found == (("int64", [1, 2]), ("uint8", [1, 44]))
PY
