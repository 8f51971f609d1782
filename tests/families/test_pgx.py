"""Pgx's games by ``make("pgx/…")``: beside a plain loop over Pgx, and two of them beside marlvec's own boards."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import UnknownEnvError
from marlvec.selfplay import read_opponents

pytestmark = pytest.mark.slow("compiles worlds of JAX")


jax = pytest.importorskip("jax", reason="the extra `pgx` is not installed")
pytest.importorskip("pgx", reason="the extra `pgx` is not installed")
jnp = jax.numpy

from pgx.go import Go  # noqa: E402  (after the check that it is installed)

from marlvec.vector.pools.jax_suites import PgxWorld  # noqa: E402  (pgx first)
from tests.examples.scripts import run  # noqa: E402

NUM_ENVS = 4


@pytest.mark.parametrize(
    ("game", "mode", "steps"),
    [
        ("tic_tac_toe", "same_step", 40),
        ("tic_tac_toe", "next_step", 40),
        ("tic_tac_toe", "disabled", 40),
        ("backgammon", "same_step", 900),  # chance, and a step that leaves the turn with the same player
        ("kuhn_poker", "same_step", 30),
    ],
)
def test_whole_games_are_those_of_a_plain_loop(game: str, mode: str, steps: int) -> None:
    world = PgxWorld(game)
    seeds = [5, 6, 7, 8]
    keys = jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in seeds])
    counts = np.zeros(NUM_ENVS, np.uint32)
    init, step = jax.jit(jax.vmap(world.env.init)), jax.jit(jax.vmap(world.env.step))
    fold = jax.jit(jax.vmap(lambda key, t: jax.random.fold_in(jax.random.wrap_key_data(key), t)))
    everyone = np.arange(NUM_ENVS)
    waiting = np.zeros(NUM_ENVS, bool)
    ended = 0

    def begin(old: Any, ids: Any) -> Any:
        fresh = init(fold(keys, counts))
        counts[ids] += 1
        return fresh if old is None else jax.tree.map(lambda a, b: a.at[ids].set(b[ids]), old, fresh)

    def check(obs: Any, infos: Any, alive: Any) -> None:
        player = np.asarray(state.current_player)
        assert (infos["acting"] == ((np.arange(2) == player[:, None]) & alive[:, None])).all()
        here = everyone[alive]
        seen = np.asarray(state.observation)[here]
        np.testing.assert_array_equal(obs[here, player[here]], seen)
        legal = np.asarray(state.legal_action_mask)[here]
        np.testing.assert_array_equal(infos["action_mask"][here, player[here]], legal)
        assert infos["action_mask"][here, 1 - player[here]].all()  # who waits may do as it likes

    state = begin(None, everyone)
    with marlvec.make(world, NUM_ENVS, autoreset_mode=mode) as envs:
        obs, infos = envs.reset(seed=seeds)
        check(obs, infos, ~waiting)
        for _ in range(steps):
            actions = envs.random_action()
            player = np.asarray(state.current_player)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            state = step(state, jnp.asarray(actions[everyone, player], jnp.int32), fold(keys, counts))
            counts[~waiting] += 1
            if waiting.any():
                state = begin(state, np.flatnonzero(waiting))
            over = np.asarray(state.terminated | state.truncated) & ~waiting
            np.testing.assert_array_equal(rewards, np.where(waiting[:, None], 0, np.asarray(state.rewards)))
            np.testing.assert_array_equal(terminated, np.repeat(np.asarray(state.terminated)[:, None], 2, 1))
            np.testing.assert_array_equal(truncated.any(axis=1), np.asarray(state.truncated & ~state.terminated))
            ended += int(over.sum())
            if over.any():
                player = np.asarray(state.current_player)[over]
                final = infos["final_observation"][over, player]
                np.testing.assert_array_equal(final, np.asarray(state.observation)[over])
            if mode != "next_step" and over.any():
                state = begin(state, np.flatnonzero(over))
                if mode == "disabled":
                    obs, infos = envs.reset(env_ids=over)
            waiting = over if mode == "next_step" else waiting
            check(obs, infos, ~waiting)
    assert ended >= NUM_ENVS


@pytest.mark.parametrize(
    ("game", "native"),
    [("tic_tac_toe", "pettingzoo/classic/tictactoe_v3"), ("connect_four", "pettingzoo/classic/connect_four_v3")],
)
def test_a_board_equals_the_native_one_move_by_move(game: str, native: str) -> None:
    """Whose turn, masks, rewards of both, ends; and observations, which both have as planes of mine and theirs."""
    pytest.importorskip("numba")
    n, games = 16, 0
    order = np.arange(7)
    if game == "tic_tac_toe":
        order = np.arange(9).reshape(3, 3).T.reshape(-1)  # the native one counts squares by columns
    with marlvec.make(f"pgx/{game}", n) as envs, marlvec.make(native, n, backend="native") as boards:
        obs, infos = envs.reset(seed=0)
        theirs, others = boards.reset(seed=0)
        first = infos["acting"].argmax(axis=1)  # Pgx draws who is first
        rows = np.arange(n)
        for _ in range(60):
            turn, seat = infos["acting"].argmax(axis=1), others["acting"].argmax(axis=1)
            np.testing.assert_array_equal(turn ^ first, seat)
            legal, allowed = infos["action_mask"][rows, turn], others["action_mask"][rows, seat]
            np.testing.assert_array_equal(legal, allowed[:, np.argsort(order)] if game == "tic_tac_toe" else allowed)
            mine = obs[rows, turn]
            board = theirs[rows, seat]
            if game == "tic_tac_toe":
                board = board.transpose(0, 2, 1, 3)
            np.testing.assert_array_equal(mine, board)
            actions = envs.random_action()
            moves = np.zeros_like(actions)
            chosen = actions[rows, turn]
            moves[rows, seat] = order[chosen] if game == "tic_tac_toe" else chosen
            obs, rewards, terminated, _, infos = envs.step(actions)
            theirs, paid, ended, _, others = boards.step(moves)
            np.testing.assert_array_equal(terminated, ended)
            flipped = np.stack([rewards[rows, first], rewards[rows, 1 - first]], axis=1)
            np.testing.assert_array_equal(flipped, paid)
            over = terminated.all(axis=1)
            games += int(over.sum())
            first = np.where(over, infos["acting"].argmax(axis=1), first)
    assert games > n


def test_unsupported_arguments_raise() -> None:
    with pytest.raises(UnknownEnvError, match=r"unknown env 'pgx/go9x9'\. Did you mean 'pgx/go_9x9'"):
        marlvec.make("pgx/go9x9", 2)


def test_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with marlvec.make("pgx/tic_tac_toe", 2) as envs:
            envs.reset(seed=0)
            envs.step(envs.random_action())


@pytest.mark.time_limit(600)  # two short trainings, and two matches
def test_the_league_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At small size: both learn, copies of both join the pool, it goes on, and plays random moves in the end."""
    pytest.importorskip("torch")
    small = ("--num-envs", 8, "--num-steps", 32, "--snapshot-every", 500, "--games", 4)
    kept = tmp_path / "run"
    run("league_hex", "--total-timesteps", 512, *small, "--checkpoint", kept)
    run("league_hex", "--total-timesteps", 1_024, *small, "--checkpoint", kept, "--resume")
    said = capsys.readouterr().out
    assert len(re.findall(r"^main against random: \d+\.\d% \[.*\] of 4$", said, re.M)) == 2
    assert said.splitlines()[-1] == f"wrote last.npz, pool, hex.png into {kept}"
    assert {"main_0", "exploiter_0", "random"} <= set(read_opponents(kept / "pool", marlvec.RandomPolicy))


def test_a_built_game_is_a_world() -> None:
    """Go's limit of plies is no argument of ``pgx.make``."""
    with marlvec.make(marlvec.PgxWorld(Go(size=9, max_terminal_steps=6)), 2) as envs:
        envs.reset(seed=0)
        for t in range(6):
            terminated = envs.step(envs.random_action())[2]
            assert terminated.all() == (t == 5)
