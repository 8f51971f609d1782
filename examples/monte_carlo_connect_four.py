"""Flat Monte Carlo on connect four: each legal move is tried in 100 games that random players end, all of them at once.

`get_state` saves the game as it stands, `set_state` puts it into 700 envs, in which it is played on.
"""

import numpy as np

import marlvec

GAMES, COLUMNS, PLAYOUTS = 10, 7, 100
make = {"backend": "native", "autoreset_mode": "disabled"}
rng = np.random.default_rng(0)

with marlvec.make("connect_four", **make) as game, marlvec.make("connect_four", COLUMNS * PLAYOUTS, **make) as tries:

    def best_move(player: int) -> int:
        """The column after which random players end best."""
        _, infos = tries.set_state(game.get_state(), env_ids=range(tries.num_envs))
        legal = infos["action_mask"][0, player]
        column = np.arange(tries.num_envs) // PLAYOUTS  # the one that each of them tries
        running, scores = np.flatnonzero(legal[column]), np.zeros(tries.num_envs)
        actions = np.repeat(column[running, None], 2, axis=1)
        while len(running):
            tries.send(actions, running)
            step = tries.recv()
            scores[step.env_ids] += step.rewards[:, player]
            running = step.env_ids[~step.terminated.any(axis=1)]
            actions = tries.random_action(seed=int(rng.integers(1 << 32)), env_ids=running) if len(running) else None
        return int(np.where(legal, scores.reshape(COLUMNS, PLAYOUTS).mean(axis=1), -np.inf).argmax())

    won = 0
    for seed in range(GAMES):
        _, infos = game.reset(seed=seed)
        while infos["alive"].any():
            actions = game.random_action(seed=int(rng.integers(1 << 32)))
            if infos["acting"][0, 0]:  # player 0 thinks, player 1 does not
                actions[0, 0] = best_move(0)
            _, rewards, _, _, infos = game.step(actions)
        won += int(rewards[0, 0] > 0)
    print(f"flat Monte Carlo won {won} of {GAMES} games against random moves")
