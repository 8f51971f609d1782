#!/usr/bin/env bash
# Versions: minari 0.5.4, h5py 3.16.0, gymnasium 1.4.0, numpy 2.4.6, jax 0.10.2, Python 3.11.7; seen 2026-11-29.
# Guess: combine_datasets(…, "team/all-v0") makes the namespace "team", as DataCollector.create_dataset() does.
# Behaviour: it raises FileNotFoundError, unless a dataset of that namespace is there already; without a namespace it works.
# Output seen: all-v0: 2 episodes; team/all-v0: FileNotFoundError; team/all-v0 beside team/one-v0: 2 episodes
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet minari==0.5.4 jax==0.10.2 jaxlib==0.10.2 h5py==3.16.0 pillow==13.0.0 gymnasium==1.4.0 numpy==2.4.6
export MINARI_DATASETS_PATH="$(mktemp -d)"
"$VENV/bin/python" - <<'PY'
import gymnasium
import minari


def made(name):
    env = minari.DataCollector(gymnasium.make("CartPole-v1", max_episode_steps=3))
    env.reset(seed=0)
    for _ in range(3):
        env.step(1)
    return env.create_dataset(dataset_id=name, algorithm_name="right")


def combined(name):
    try:
        return f"{len(minari.combine_datasets(parts, name))} episodes"
    except FileNotFoundError as error:
        return type(error).__name__


parts = [made("one-v0"), made("two-v0")]
found = [combined("all-v0"), combined("team/all-v0")]
made("team/one-v0")
found.append(combined("team/some-v0"))
print(found)
assert found == ["2 episodes", "FileNotFoundError", "2 episodes"]
PY
rm -rf "$MINARI_DATASETS_PATH"
