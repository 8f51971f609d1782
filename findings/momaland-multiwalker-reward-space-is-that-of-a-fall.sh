#!/usr/bin/env bash
# Versions: momaland 0.2.0, pettingzoo 1.27.0, gymnasium 1.4.0, numpy 2.4.6, box2d 2.3.10, Python 3.11.7; seen 2026-11-29.
# Guess: reward_space(agent) contains the vector reward of each step, in each of momaland's envs.
# Behaviour: so it is in catch and item gathering. In multiwalker stability the first objective's bounds are those of a step
#   with a fall (-210 to -209.54): not one reward of an episode is in the space, and who scales objectives by its bounds
#   scales all of them wrong.
# Output seen: multiwalker stability: bounds [-210, -209.54], rewards -103.35 to 0.01, 0 of 156 inside
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 SDL_VIDEODRIVER=dummy
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet pettingzoo==1.27.0 gymnasium==1.4.0 numpy==2.4.6 box2d==2.3.10 pygame==2.6.1 pillow==13.0.0
"$VENV/bin/python" -m pip install --quiet --no-deps momaland==0.2.0 2> /dev/null # without wandb, sympy and OpenGL, which these envs do not use
"$VENV/bin/python" - <<'PY'
import numpy as np
from momaland.envs.item_gathering import moitem_gathering_v0
from momaland.envs.multiwalker_stability import momultiwalker_stability_v0


def episode(module):
    """Return each reward with whether it is in the agent's space, and the space's bounds of the first objective."""
    env = module.parallel_env()
    env.reset(seed=0)
    for agent in env.possible_agents:
        env.action_space(agent).seed(1)
    found = []
    while env.agents:
        _, rewards, *_ = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        found += [(float(r[0]), env.unwrapped.reward_space(a).contains(np.asarray(r, np.float32))) for a, r in rewards.items()]
    space = env.unwrapped.reward_space(env.possible_agents[0])
    return found, (float(space.low[0]), float(space.high[0]))


for module in (moitem_gathering_v0, momultiwalker_stability_v0):
    found, bounds = episode(module)
    rewards, inside = zip(*found)
    name = module.__name__.rpartition(".")[2]
    print(f"{name}: bounds {bounds}, rewards {min(rewards):.2f} to {max(rewards):.2f}, {sum(inside)} of {len(inside)} inside")
    if module is moitem_gathering_v0:
        assert all(inside)
    else:
        assert not any(inside) and len(inside) > 50
        assert bounds[1] < min(rewards)
PY
