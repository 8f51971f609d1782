"""Code written for PettingZoo's turns, on a view of marlvec's: a table learns tic-tac-toe by playing against itself.

`--total-timesteps 480000` takes minutes. Needs the extras `classic` and `plot`.
"""

import argparse
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and of what is drawn")
parser.add_argument("--total-timesteps", type=int, default=24_000, help="moves, of both players together")
parser.add_argument("--test-games", type=int, default=300, help="against random moves, by which it is judged")
parser.add_argument(
    "--checkpoint", type=Path, default=Path("runs/pettingzoo_tictactoe"), help="folder for all that is kept"
)
args = parser.parse_args()  # before anything large is imported

try:
    import numpy as np
    from matplotlib.figure import Figure

    import marlvec
    from marlvec.interop.pettingzoo import AECView
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[classic,plot]'") from None

RATE, EXPLORE, POINTS = 0.2, 0.3, 12

rng = np.random.default_rng(args.seed)
table: dict[bytes, np.ndarray] = defaultdict(lambda: np.zeros(9))  # what each move is worth to who must move


def choose(obs: dict[str, Any], explore: float) -> tuple[bytes, int]:
    """The position, and the best move in it, or now and then any that is allowed."""
    key, allowed = obs["observation"].tobytes(), np.flatnonzero(obs["action_mask"])
    if rng.random() < explore:
        return key, int(rng.choice(allowed))
    worth = table[key][allowed]
    return key, int(rng.choice(allowed[worth == worth.max()]))


def play(env: AECView, explore: dict[str, float], *, learn: bool) -> dict[str, float]:
    """Play one game, as any script for an AEC env does; returns what each player was paid."""
    global done
    env.reset()
    made: dict[str, tuple[bytes, int]] = {}  # each player's last move
    paid: dict[str, float] = {}
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        over = terminated or truncated
        if learn and agent in made:  # what it was paid since its last move, and what its position is worth now
            key, move = made[agent]
            ahead = 0.0 if over else table[obs["observation"].tobytes()][obs["action_mask"] == 1].max()
            table[key][move] += RATE * (reward + ahead - table[key][move])
        if over:
            paid[agent] = reward
            env.step(None)
            continue
        done += learn
        made[agent] = choose(obs, explore[agent])
        env.step(made[agent][1])
    return paid


def lost(env: AECView) -> float:
    """Share of games lost against random moves; it begins every second one."""
    defeats = 0
    for game in range(args.test_games):
        me, other = env.possible_agents[:: 1 if game % 2 else -1]
        defeats += play(env, {me: 0.0, other: 1.0}, learn=False)[me] < 0
    return defeats / args.test_games


curve: list[tuple[int, float]] = []
done = 0  # moves that were learned from
with closing(AECView.make("tictactoe")) as env:
    env.reset(seed=args.seed)
    before = lost(env)
    for point in range(1, POINTS + 1):
        while done < point * args.total_timesteps // POINTS:
            play(env, dict.fromkeys(env.possible_agents, EXPLORE), learn=True)
        curve.append((done, lost(env)))
        progress = {
            "positions": np.array([list(key) for key in table]),
            "worth": np.array(list(table.values())),
            "curve": curve,
        }
        marlvec.save_checkpoint(args.checkpoint, progress=progress, score=-curve[-1][1])

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(*zip((0, before), *curve, strict=True))
axes.set(xlabel="moves in games against itself", ylabel="games lost (one agent)", title="tic-tac-toe, a table")
axes.set_ylim(0, None)
axes.figure.savefig(args.checkpoint / "lost.png", dpi=100)
print(f"lost against random moves: {before:.0%} before, {curve[-1][1]:.0%} after {done} moves against itself")
print(f"wrote last.npz, best.npz, lost.png into {args.checkpoint}")
