#!/usr/bin/env bash
# Versions: open_spiel 2.0.2, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: deserialize_state(state.serialize()) of a mean field game goes on as the state would: same rewards.
# Behaviour: so it is in the games written in Python, and of clone(). Those in C++ write their distribution with six digits:
#   rewards() of the copy is another in the sixth digit in mfg_crowd_modelling, and by a tenth or more in
#   mfg_crowd_modelling_2d and mfg_garnet.
# Output seen: mfg_crowd_modelling_2d: 8.354244457030877, its copy 6.105170185988091, its clone 8.354244457030877
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet open_spiel==2.0.2 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import random

import numpy as np
import pyspiel
from open_spiel.python.mfg.games import crowd_modelling, linear_quadratic  # noqa: F401  registers them


def rewards(name):
    """Return the reward behind the first mean field node: of the state, of its serialized copy, of its clone."""
    game, draws = pyspiel.load_game(name), random.Random(0)
    state = game.new_initial_state()
    while state.current_player() != pyspiel.PlayerId.MEAN_FIELD:
        if state.is_chance_node():
            outcomes, chances = zip(*state.chance_outcomes())
            state.apply_action(draws.choices(outcomes, chances)[0])
        else:
            state.apply_action(draws.choice(state.legal_actions()))
    size = len(state.distribution_support())
    state.update_distribution(np.random.default_rng(0).dirichlet(np.ones(size)).tolist())
    copies = (state, game.deserialize_state(state.serialize()), state.clone())
    return [float(one.rewards()[0]) for one in copies]


for name in ("python_mfg_crowd_modelling", "mean_field_lin_quad", "mfg_crowd_modelling", "mfg_crowd_modelling_2d", "mfg_garnet"):
    kept, copied, cloned = rewards(name)
    print(f"{name}: {kept}, its copy {copied}, its clone {cloned}")
    assert kept == cloned
    off = abs(kept - copied)
    if name in ("python_mfg_crowd_modelling", "mean_field_lin_quad"):
        assert off == 0
    elif name == "mfg_crowd_modelling":
        assert 0 < off < 1e-4
    else:
        assert off > 0.1
PY
