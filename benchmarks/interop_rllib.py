"""simple_spread through RLlib's multi-agent env runner: with marlvec's envs, and with RLlib's own, in one run.

Run ``python benchmarks/interop_rllib.py`` in an environment that has ray[rllib] and torch. Both runners play the same
16 envs, once with random actions and once with a module (a net of 64 × 64) in the loop: RLlib's episodes, metrics and
connectors are the same in both. "envs alone" is only the step of RLlib's vector env, dicts in and dicts out.
Contestants take turns in short rounds, ratios are taken inside a round, and medians over rounds are quoted with their
quartiles.
"""

# ruff: noqa: E402 -- what ray and torch warn and log while they are imported is silenced first

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from yardsticks import usable_cores

warnings.simplefilter("ignore", DeprecationWarning)
for name in ("ray", "ray.rllib", "ray.tune"):
    logging.getLogger(name).setLevel(logging.ERROR)

import torch
from mpe2 import simple_spread_v3
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

from marlvec.interop.rllib import RLlibEnvRunner

ENVS = 16


def runner(cls: type[Any], env: str, **env_config: Any) -> Any:
    """A runner of this class for 16 envs."""
    config = (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS)
        .multi_agent(policies={"all"}, policy_mapping_fn=lambda agent, episode, **kwargs: "all")
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))
        .debugging(seed=0)
    )
    return cls(config=config, worker_index=0)


def ours(backend: str) -> Any:
    """The runner whose envs are marlvec's."""
    return runner(RLlibEnvRunner, "simple_spread", marlvec={"backend": backend})


def theirs() -> Any:
    """RLlib's runner with RLlib's wrapper of PettingZoo's envs."""
    register_env("spread", lambda config: ParallelPettingZooEnv(simple_spread_v3.parallel_env()))
    return runner(MultiAgentEnvRunner, "spread")


def sampled(runner: Any, steps: int, **how: Any) -> float:
    """Seconds that so many steps of all envs take."""
    begin = time.perf_counter()
    runner.sample(num_timesteps=steps * ENVS, **how)
    seconds = time.perf_counter() - begin
    runner.get_metrics()  # so that finished episodes do not pile up
    return seconds


def stepped(runner: Any, actions: list[list[dict[str, Any]]], steps: int) -> float:
    """Likewise, of the vector env alone, from a reset on."""
    runner.env.reset(seed=0)
    begin = time.perf_counter()
    for step in range(steps):
        runner.env.step(actions[step % len(actions)])
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=26, help="of all envs, in a round; 26 are an episode and its reset"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Any]] = {
        "RLlib's own": theirs,
        "marlvec sync": lambda: ours("sync"),
        "marlvec async": lambda: ours("async"),
        "marlvec native": lambda: ours("native"),
    }
    console, runners = Console(), {}
    for name, make in makers.items():
        try:
            runners[name] = make()
        except Exception as error:  # what cannot be had is named and left out
            console.print(f"{name}: left out, {type(error).__name__}: {error}", markup=False)
    rng = np.random.default_rng(0)
    actions = [
        [{f"agent_{a}": np.int64(rng.integers(5)) for a in range(3)} for _ in range(ENVS)] for _ in range(args.steps)
    ]
    kinds: dict[str, Callable[[Any], float]] = {
        "a module": lambda own: sampled(own, args.steps, force_reset=True),
        "random actions": lambda own: sampled(own, args.steps, random_actions=True, force_reset=True),
        "envs alone": lambda own: stepped(own, actions, args.steps),
    }
    found: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in runners for kind in kinds}
    for own in runners.values():
        sampled(own, 3)
    for number in range(args.rounds):
        for kind, measure in kinds.items():
            for name in list(runners) if number % 2 else list(reversed(runners)):
                found[name, kind].append(measure(runners[name]))
    libraries = ("ray", "torch", "pettingzoo", "mpe2", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    console.print(f"simple_spread x {ENVS}, {usable_cores()} cores; {versions}")
    table = Table("in the loop", "envs", "env steps/s", "x RLlib's own", "quartiles")
    for kind in kinds:
        base = np.array(found[next(iter(runners)), kind])
        for name in runners:
            times = np.array(found[name, kind])
            low, median, high = np.percentile(base / times, [25, 50, 75])
            speed = args.steps * ENVS / float(np.median(times))
            table.add_row(kind, name, f"{speed:,.0f}", f"{median:.2f}", f"{low:.2f} – {high:.2f}")
    console.print(table)
    for own in runners.values():
        own.stop()


if __name__ == "__main__":
    main()
