"""What marlvec costs over a bare loop of JAX: the suite's own step, vmapped and jitted, with its own autoreset.

Run ``python benchmarks/pools_jax.py``, or one line of it: ``--envs pgx/hex --sizes 1024``. All contestants take short
turns over the same suite, and the fastest turn of each is quoted, since other work on the machine only adds: bare time
divided by ours, so 1.00 is as fast. Where all episodes end together (simple_spread: every 25 steps), a short turn may
have no reset of ours; ``--seconds`` makes turns longer. Actions are made outside of the timer but for ``collect()``,
whose policy draws them. The bare loop waits for its observations in each step, and begins the next episode as its suite
does: by a reset of every world in every step, whose final observations are lost. On a GPU its rows stay there;
with ``--on-host`` it copies observations, rewards and who is done to the host, which learners outside of JAX need.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np

import marlvec
from marlvec.vector.pools.jax_suites import JaxMarlWorld, PgxWorld

ENVS = ("jaxmarl/MPE_simple_spread_v3", "jaxmarl/overcooked", "jaxmarl/HeuristicEnemySMAX", "pgx/connect_four")
SIZES = (64, 1024, 16384)


class Bare:
    """The suite's ``step``, with its own autoreset."""

    def __init__(self, world: Any, num_envs: int, *, on_host: bool = False) -> None:
        self.rng, self.turns = np.random.default_rng(0), isinstance(world, PgxWorld)
        self.read = jax.device_get if on_host else jax.block_until_ready
        self.world, self.num_envs, env = world, num_envs, world.env
        self.key = jax.random.key(0)
        keys = jax.random.split(self.key, num_envs)
        if self.turns:
            from pgx.experimental import auto_reset

            step = auto_reset(env.step, env.init)

            def advance(key: Any, state: Any, actions: Any) -> tuple[Any, Any, Any]:
                key, own = jax.random.split(key)
                state = jax.vmap(step)(state, actions, jax.random.split(own, num_envs))
                rows = (state.observation, state.rewards, state.terminated)
                return key, state, rows if on_host else state.observation

            self.state = jax.jit(jax.vmap(env.init))(keys)
        else:
            agents = env.agents

            def advance(key: Any, state: Any, actions: Any) -> tuple[Any, Any, Any]:
                key, own = jax.random.split(key)
                given = {agent: actions[:, a] for a, agent in enumerate(agents)}
                obs, state, rewards, dones, _ = jax.vmap(env.step)(jax.random.split(own, num_envs), state, given)
                return key, state, (obs, rewards, dones) if on_host else obs

            _, self.state = jax.jit(jax.vmap(env.reset))(keys)
        self.advance = jax.jit(advance)

    def run(self, steps: int) -> float:
        """Seconds a step."""
        spent = 0.0
        moves = self.world.action_spaces[0].n
        for _ in range(steps):
            if self.turns:
                mask = np.asarray(self.state.legal_action_mask)
                actions = (self.rng.random(mask.shape) * mask).argmax(axis=1).astype(np.int32)
            else:
                actions = self.rng.integers(0, moves, (self.num_envs, len(self.world.agents)), np.int32)
            begin = time.perf_counter()
            self.key, self.state, rows = self.advance(self.key, self.state, actions)
            self.read(rows)
            spent += time.perf_counter() - begin
        return spent / steps


class Ours:
    """The same under `marlvec.make`."""

    def __init__(self, world: Any, num_envs: int, **options: Any) -> None:
        self.envs = marlvec.make(world, num_envs, **options)
        self.envs.reset(seed=0)

    def run(self, steps: int) -> float:
        """Seconds a step."""
        spent = 0.0
        for _ in range(steps):
            actions = self.envs.random_action()
            begin = time.perf_counter()
            self.envs.step(actions)
            spent += time.perf_counter() - begin
        return spent / steps


class Draw(marlvec.Policy):
    """Draws moves that its masks allow, as fast as numpy does."""

    def __init__(self, moves: int) -> None:
        self.moves, self.rng = moves, np.random.default_rng(0)

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        """One move a row."""
        if "action_mask" in rows:
            return (self.rng.random(rows.action_mask.shape, np.float32) * rows.action_mask).argmax(axis=1)
        return self.rng.integers(0, self.moves, len(rows))


class Collecting(Ours):
    """`Collector.collect()` with a policy that draws."""

    def __init__(self, world: Any, num_envs: int) -> None:
        super().__init__(world, num_envs)
        self.collector = marlvec.Collector(self.envs, Draw(int(world.action_spaces[0].n)), seed=0)

    def run(self, steps: int) -> float:
        """Seconds a step."""
        begin = time.perf_counter()
        self.collector.collect(env_steps=steps * self.envs.num_envs)
        return (time.perf_counter() - begin) / steps


def main() -> None:
    """Measure, and print a line a suite and size as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", nargs="+", default=ENVS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--on-host", action="store_true", help="the bare loop brings its rows to the host, too")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a turn of each, about; two steps at least")
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].platform}, the fastest of {options.rounds} turns", flush=True)
    print(
        f"{'env':>30} {'envs':>6} {'bare, ms':>8} {'÷ step()':>8} {'÷ copy=False':>12} {'÷ collect()':>11}", flush=True
    )
    for name in options.envs:
        family, _, own = name.partition("/")
        world = JaxMarlWorld(own) if family == "jaxmarl" else PgxWorld(own)
        for size in options.sizes:
            bare = Bare(world, size, on_host=options.on_host)
            step, views = Ours(world, size), Ours(world, size, copy=False)
            contestants = [bare, step, views, Collecting(world, size)]
            bare.run(2)
            steps = int(np.clip(options.seconds / max(bare.run(2), 1e-5), 2, 400))
            for one in contestants:
                one.run(steps)
            # collect() has work of its own around its steps, so its turns are eight times as long.
            turns = [steps, steps, steps, 8 * steps]
            times = np.full((options.rounds, len(contestants)), np.inf)
            for k in range(options.rounds):
                for c in range(len(contestants))[:: 1 - 2 * (k % 2)]:
                    times[k, c] = contestants[c].run(turns[c])
            fastest = times.min(axis=0)
            a, b, c = (f"{fastest[0] / one:.2f}" for one in fastest[1:])
            print(f"{name:>30} {size:>6,} {1e3 * fastest[0]:>8.2f} {a:>8} {b:>12} {c:>11}", flush=True)
            for one in contestants[1:]:
                one.envs.close()


if __name__ == "__main__":
    main()
