#!/usr/bin/env bash
# Versions: open_spiel 2.0.2, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: the sum of state.rewards() over all nodes of a game is state.returns() at its end, in every simultaneous game.
# Behaviour: so it is where chance comes first only, but not where chance nodes follow a joint move: laser_tag and
#   coop_box_pushing say the move's reward again at each chance node after it. Who adds rewards() after each
#   apply_action() gets three times laser_tag's returns, and about twice coop_box_pushing's. Differences of returns() are right.
# Output seen: laser_tag: sum [93.0, 120.0], returns [31.0, 40.0]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet open_spiel==2.0.2 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import random

import pyspiel


def play(name, seed):
    game, draws = pyspiel.load_game(name), random.Random(seed)
    state, added = game.new_initial_state(), [0.0] * game.num_players()
    while not state.is_terminal():
        if state.is_chance_node():
            outcomes, chances = zip(*state.chance_outcomes())
            state.apply_action(draws.choices(outcomes, chances)[0])
        else:
            state.apply_actions([draws.choice(state.legal_actions(p)) for p in range(game.num_players())])
        added = [a + r for a, r in zip(added, state.rewards())]
    return added, state.returns()


for name in ("laser_tag", "coop_box_pushing", "goofspiel", "pathfinding"):
    games = [play(name, seed) for seed in range(10)]
    added, returns = ([sum(part) for part in zip(*(game[k] for game in games))] for k in (0, 1))
    print(f"{name}: sum {added}, returns {returns}")
    equal = all(abs(a - r) < 1e-6 for game in games for a, r in zip(*game))
    assert equal is (name in ("goofspiel", "pathfinding")), name
    if name == "laser_tag":
        assert all(abs(a - 3 * r) < 1e-6 for game in games for a, r in zip(*game))
PY
