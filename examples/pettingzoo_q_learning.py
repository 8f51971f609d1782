"""Code written for PettingZoo's turns, on a view of marlvec's: a table learns tic-tac-toe by playing against itself.

`--total-timesteps 480000` takes minutes. Needs the extras `classic`, `plot` and, for --track, `tensorboard`.
There is no --num-envs: such a script has one env, and sees one agent at a time. With --resume it goes on bit by bit.
"""

import argparse
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and of what is drawn")
parser.add_argument("--total-timesteps", type=int, default=24_000, help="moves in all, of both players")
parser.add_argument("--test-games", type=int, default=300, help="against random moves, by which it is judged")
parser.add_argument(
    "--checkpoint", type=Path, default=Path("runs/pettingzoo_tictactoe"), help="folder for all that is kept"
)
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before anything large is imported
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    from matplotlib.figure import Figure

    import marlvec
    from marlvec.interop.pettingzoo import AECView

    if args.track:
        from tensorboard.summary import Writer
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[classic,plot,tensorboard]'") from None

RATE, EXPLORE, POINTS = 0.2, 0.3, 12

table: dict[bytes, np.ndarray] = defaultdict(lambda: np.zeros(9))  # what each move is worth to who must move
curve: list[tuple[int, float]] = []  # moves that were learned from, share of games lost
done = 0
if args.resume:
    progress = marlvec.load_checkpoint(args.checkpoint)
    curve, done = progress["curve"], progress["done"]
    for position, worth in zip(progress["positions"], progress["worth"], strict=True):
        table[position.tobytes()] = worth
rng = np.random.default_rng(args.seed)
if args.resume:
    rng.bit_generator.state = progress["rng"]


def choose(obs: dict[str, Any], explore: float) -> tuple[bytes, int]:
    """The position, and the best move in it, or now and then any that is allowed."""
    key, allowed = obs["observation"].tobytes(), np.flatnonzero(obs["action_mask"])
    if rng.random() < explore:
        return key, int(rng.choice(allowed))
    worth = table[key][allowed]
    return key, int(rng.choice(allowed[worth == worth.max()]))


def play(env: AECView, explore: dict[str, float], *, learn: bool) -> dict[str, float]:
    """Play one game, as any script for an AEC env does; gives each player's return."""
    global done
    env.reset()
    made: dict[str, tuple[bytes, int]] = {}  # each player's last move
    returns: dict[str, float] = {}
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        over = terminated or truncated
        if learn and agent in made:  # its reward since its last move, and what its position is worth now
            key, move = made[agent]
            ahead = 0.0 if over else table[obs["observation"].tobytes()][obs["action_mask"] == 1].max()
            table[key][move] += RATE * (reward + ahead - table[key][move])
        if over:
            returns[agent] = reward
            env.step(None)
            continue
        done += learn
        made[agent] = choose(obs, explore[agent])
        env.step(made[agent][1])
    return returns


def lost(env: AECView) -> float:
    """Share of games lost against random moves; it begins every second one."""
    defeats = 0
    for game in range(args.test_games):
        me, other = env.possible_agents[:: 1 if game % 2 else -1]
        defeats += play(env, {me: 0.0, other: 1.0}, learn=False)[me] < 0
    return defeats / args.test_games


writer = Writer(str(args.checkpoint / "logs")) if args.track else None
with closing(AECView.make("tictactoe")) as env:
    env.reset(seed=args.seed)
    if not curve:
        curve.append((0, lost(env)))
    while done < args.total_timesteps:
        goal = min(done + max(args.total_timesteps // POINTS, 1), args.total_timesteps)
        while done < goal:
            play(env, dict.fromkeys(env.possible_agents, EXPLORE), learn=True)
        curve.append((done, lost(env)))
        positions = np.array([np.frombuffer(key, np.int8) for key in table])
        progress = {"positions": positions, "worth": np.array(list(table.values())), "curve": curve, "done": done}
        progress["rng"] = rng.bit_generator.state
        marlvec.save_checkpoint(args.checkpoint, progress=progress, score=-curve[-1][1])
        if writer:
            writer.add_scalar("games lost", curve[-1][1], done)
if writer:
    writer.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(*zip(*curve, strict=True))
axes.set(xlabel="moves in games against itself", ylabel="games lost (one agent)", title="tic-tac-toe, a table")
axes.set_ylim(0, None)
axes.figure.savefig(args.checkpoint / "lost.png", dpi=100)
print(f"lost against random moves: {curve[0][1]:.0%} before, {curve[-1][1]:.0%} after {done} moves against itself")
print(f"wrote last.npz, best.npz, lost.png{', logs' * args.track} into {args.checkpoint}")
