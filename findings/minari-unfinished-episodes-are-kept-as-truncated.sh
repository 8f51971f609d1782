#!/usr/bin/env bash
# Versions: minari 0.5.4, h5py 3.16.0, gymnasium 1.4.0, numpy 2.4.6, jax 0.10.2, Python 3.11.7; seen 2026-11-29.
# Guess: create_dataset() leaves out an episode that has not ended, and one that a reset() broke off.
# Behaviour: both are kept, and their last step says truncated, though the env never said so: a learner cannot tell them from
#   episodes that reached the env's limit.
# Output seen: [(2, [False, True]), (3, [False, False, True])]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet minari==0.5.4 jax==0.10.2 jaxlib==0.10.2 h5py==3.16.0 pillow==13.0.0 gymnasium==1.4.0 numpy==2.4.6
export MINARI_DATASETS_PATH="$(mktemp -d)"
"$VENV/bin/python" - <<'PY'
import gymnasium
import minari

env = minari.DataCollector(gymnasium.make("CartPole-v1"))
flags = []
for steps in (2, 3):
    env.reset(seed=0)
    flags += [env.step(1)[3] for _ in range(steps)]
dataset = env.create_dataset(dataset_id="cut-v0", algorithm_name="right")
found = [(len(episode), episode.truncations.tolist()) for episode in dataset.iterate_episodes()]
print(found, "the env itself:", flags)
assert not any(flags)
assert found == [(2, [False, True]), (3, [False, False, True])]
PY
rm -rf "$MINARI_DATASETS_PATH"
