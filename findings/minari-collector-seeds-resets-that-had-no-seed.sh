#!/usr/bin/env bash
# Versions: minari 0.5.4, h5py 3.16.0, gymnasium 1.4.0, numpy 2.4.6, jax 0.10.2, Python 3.11.7; seen 2026-11-29.
# Guess: DataCollector hands reset() without a seed on as it is: the env goes on with its stream, and the dataset has no
#   seed for that episode.
# Behaviour: it draws a seed of its own, from the system, for each such reset, and stores that. So only the first of several
#   episodes after reset(seed=3) is the same in two runs, where the env itself repeats all of them. (The stored seed repeats
#   the episode.)
# Output seen: [True, False, False] beside another run, [True, False, False] beside the env itself; seeds [3, 7046…, 2871…]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet minari==0.5.4 jax==0.10.2 jaxlib==0.10.2 h5py==3.16.0 pillow==13.0.0 gymnasium==1.4.0 numpy==2.4.6
export MINARI_DATASETS_PATH="$(mktemp -d)"
"$VENV/bin/python" - <<'PY'
import gymnasium
import minari


def starts(env):
    found = []
    for seed in (3, None, None):
        found.append(env.reset(seed=seed)[0].tolist())
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(1)
            ended = terminated or truncated
    return found


def make():
    return gymnasium.make("CartPole-v1", max_episode_steps=5)


collectors = [minari.DataCollector(make()) for _ in range(2)]
one, other = map(starts, collectors)
plain, again = starts(make()), starts(make())
assert plain == again
dataset = collectors[0].create_dataset(dataset_id="one-v0", algorithm_name="right")
seeds = [next(iter(dataset.storage.get_episode_metadata([k])))["seed"] for k in range(3)]
beside = [a == b for a, b in zip(one, other)], [a == b for a, b in zip(one, plain)]
print(f"beside another run {beside[0]}, beside the env itself {beside[1]}; seeds {seeds}")
assert beside == ([True, False, False],) * 2
assert seeds[0] == 3 and all(seed > 2**31 for seed in seeds[1:])
assert make().reset(seed=int(seeds[1]))[0].tolist() == one[1]
PY
rm -rf "$MINARI_DATASETS_PATH"
