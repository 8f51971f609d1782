#!/usr/bin/env bash
# Versions: open_spiel 2.0.2, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: returns() of a mean field game at its end is the sum of rewards() over the player's nodes, in every such game.
# Behaviour: so it is in crowd modelling, crowd modelling 2d and garnet. In mean_field_lin_quad and
#   python_mfg_periodic_aversion returns() is the reward of the present node alone, and 0 at the end, whatever was played.
# Output seen: mean_field_lin_quad: sum -45.4, returns 0.0; mfg_crowd_modelling: 27.03 and 27.03
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet open_spiel==2.0.2 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import random

import pyspiel
from open_spiel.python.mfg.games import crowd_modelling, linear_quadratic, periodic_aversion  # noqa: F401  registers them


def play(name, seed):
    """Play valid random moves to the end, with the uniform distribution at each mean field node."""
    state, draws, added, equal = pyspiel.load_game(name).new_initial_state(), random.Random(seed), 0.0, True
    while not state.is_terminal():
        if state.current_player() == pyspiel.PlayerId.MEAN_FIELD:
            size = len(state.distribution_support())
            state.update_distribution([1 / size] * size)
        elif state.is_chance_node():
            outcomes, chances = zip(*state.chance_outcomes())
            state.apply_action(draws.choices(outcomes, chances)[0])
        else:
            reward = float(state.rewards()[0])
            added += reward
            equal = equal and abs(state.returns()[0] - reward) < 1e-6
            state.apply_action(draws.choice(state.legal_actions()))
    return added, float(state.returns()[0]), equal


GOOD = ("mfg_crowd_modelling", "python_mfg_crowd_modelling", "mfg_crowd_modelling_2d", "mfg_garnet")
for name in (*GOOD, "mean_field_lin_quad", "python_mfg_periodic_aversion"):
    games = [play(name, seed) for seed in range(3)]
    print(f"{name}: " + "; ".join(f"sum {added:.2f}, returns {returns:.2f}" for added, returns, _ in games))
    for added, returns, equal in games:
        assert abs(added) > 1
        assert bool(abs(added - returns) < 1e-6) is (name in GOOD)
        assert name in GOOD or (returns == 0 and equal)
PY
