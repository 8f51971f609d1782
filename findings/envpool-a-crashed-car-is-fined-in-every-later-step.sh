#!/usr/bin/env bash
# Versions: envpool 1.2.7, gymnasium 1.4.0, numpy 2.5.5, Python 3.12.1; seen 2026-11-29.
# Guess: in IntersectionMultiAgent a crash of one of the two cars ends the episode for both, in all three versions of the id.
# Behaviour: only in -v0. In -v1 and -v2 the env goes on, with no flag for the crashed car: it stays in each row, is asked for
#   actions, and is paid -5 again in step after step until the env ends: here one crash costs 29, where it costs 4 in -v0.
# Output seen: -v0: 5 rows with a crash, 5 of them last ones; -v1: 19 rows, 4 of them last ones; -v2: 11 rows, 6 of them
#   (It needs Python 3.12, by PYTHON312, of pyenv or on the path: EnvPool has 1.2.7 for no older one.)
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
PYTHON312="${PYTHON312:-$(find ~/.pyenv/versions/3.12.*/bin/python 2>/dev/null | tail -1 || true)}"
"${PYTHON312:-python3.12}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet envpool==1.2.7 gymnasium==1.4.0 numpy==2.5.5
"$VENV/bin/python" - <<'PY'
import envpool
import numpy as np


def crashes(task, seed, action):
    """Return, for each episode of 60 steps that has a crash: the crashed car's reward in each row, and if the row was the last."""
    env = envpool.make(task, env_type="gymnasium", num_envs=1, seed=seed, num_threads=1)
    _, info = env.reset()
    episodes, rows = [], []
    for _ in range(60):
        zero, two = np.zeros(1, np.int32), np.full(2, action, np.int32)
        _, rewards, ended, cut, info = env.step(
            {"env_id": zero, "players.env_id": info["players"]["env_id"], "players.action": two}
        )
        if info["players"]["crashed"].any():
            rows.append((float(rewards[info["players"]["crashed"]].min()), bool(ended[0])))
        if ended[0] or cut[0]:
            episodes += [rows] if rows else []
            rows = []
    return episodes


for version in ("v0", "v1", "v2"):
    episodes = [one for start in ((5, 2), (1, 1)) for one in crashes(f"IntersectionMultiAgent-{version}", *start)]
    rows = [row for one in episodes for row in one]
    longest = max(episodes, key=len)
    print(f"{version}: {len(rows)} rows with a crash, {sum(end for _, end in rows)} of them last ones; longest {longest}")
    if version == "v0":
        assert rows and all(end for _, end in rows)
    else:
        assert len(longest) >= 3 and not any(end for _, end in longest[:-1])
        assert sum(reward for reward, _ in longest) < -10
PY
