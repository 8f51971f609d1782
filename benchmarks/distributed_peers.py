"""Two collectors on Ray, beside RLlib's EnvRunnerGroup and TorchRL's RayCollector, on the same work in the same run.

    python benchmarks/distributed_peers.py                    # some minutes
    python benchmarks/distributed_peers.py --peer rllib --turns 3

It needs an environment that has all of them: marlvec[distributed], mpe2, "ray[rllib]" and torchrl. What cannot be
imported is named and left out.

Everybody has two actors in one Ray cluster, of 16 envs each (mpe2's simple_spread: three agents, episodes of 25 steps,
in Python) and one random policy for all agents, and is asked for batches of both actors' shares, one after the other,
as a learner would that stays on policy: marlvec with ``sync=True``, RLlib by ``synchronous_parallel_sample`` over
``MultiAgentEnvRunner``, TorchRL by ``RayCollector(sync=True)`` over ``SerialEnv``. Nobody sends weights. They take
turns, medians are quoted; ratios are taken inside a turn. *µs* are processor time an env step: of the head, the actors
and Ray together, which waiting does not change.

What each hands over differs: marlvec one batch of rows by policy with ids, next observations and flags; RLlib a list of
episode objects, of which its learner's connectors make rows later; TorchRL one TensorDict with all agents in one group.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from distributed import processor_seconds

NUM_ENVS, STEPS = 16, 50  # of one actor: envs, and steps of each of them a batch
BATCH = 2 * NUM_ENVS * STEPS  # env steps

Collect = Callable[[], int]
"""Collects one batch; env steps in it."""


def make_env() -> Any:
    """One env."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=3, max_cycles=25)


def marlvec_() -> Collect:
    """`marlvec.distributed.Collectors`."""
    import marlvec
    from marlvec.distributed import Collectors, Place

    def build(place: Place) -> marlvec.Collector:
        envs = marlvec.make(make_env, num_envs=NUM_ENVS, backend="sync")
        return marlvec.Collector(envs, marlvec.RandomPolicy(), seed=place.seed)

    many = Collectors(build, 2, sync=True, sync_states=None)
    return lambda: many.collect(env_steps=BATCH).env_steps


def rllib() -> Collect:
    """RLlib's `EnvRunnerGroup`, as its algorithms use it."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.env.env_runner_group import EnvRunnerGroup
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
    from ray.tune.registry import register_env

    class Random(RandomRLModule):
        framework = "torch"  # the runner takes modules of no other

    register_env("benchmark", lambda _: ParallelPettingZooEnv(make_env()))
    spec = MultiRLModuleSpec(rl_module_specs={"main": RLModuleSpec(module_class=Random)})
    config = (
        PPOConfig()
        .environment("benchmark")
        .framework("torch")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=STEPS)
        .training(train_batch_size_per_learner=BATCH)
        .multi_agent(policies={"main"}, policy_mapping_fn=lambda *_, **__: "main")
        .rl_module(rl_module_spec=spec)
    )
    group = EnvRunnerGroup(config=config, local_env_runner=False)

    def collect() -> int:
        episodes = synchronous_parallel_sample(worker_set=group, _uses_new_env_runners=True)
        return sum(int(episode.env_steps()) for episode in episodes)

    return collect


def torchrl() -> Collect:
    """TorchRL's `RayCollector`."""
    from torchrl.collectors import Collector
    from torchrl.collectors.distributed import RayCollector
    from torchrl.envs import MarlGroupMapType, PettingZooWrapper, SerialEnv

    def make_envs() -> Any:
        group = MarlGroupMapType.ALL_IN_ONE_GROUP
        return SerialEnv(NUM_ENVS, lambda: PettingZooWrapper(make_env(), group_map=group))

    collector = RayCollector(
        [make_envs, make_envs],
        None,
        frames_per_batch=BATCH,
        total_frames=10**9,  # -1, the default, ends it at once
        sync=True,
        collector_class=Collector,
        remote_configs={"num_cpus": 1, "num_gpus": 0},
    )
    batches = iter(collector)
    return lambda: int(next(batches).numel())


PEERS: dict[str, tuple[str, Callable[[], Collect]]] = {
    "marlvec": ("marlvec.distributed.Collectors", marlvec_),
    "rllib": ("RLlib EnvRunnerGroup", rllib),
    "torchrl": ("TorchRL RayCollector", torchrl),
}


def turn(collect: Collect, batches: int) -> tuple[float, float]:
    """Env steps a second, and processor seconds an env step."""
    steps, before, clock = 0, processor_seconds(), time.perf_counter()
    for _ in range(batches):
        steps += collect()
    wall = time.perf_counter() - clock
    return steps / wall, (processor_seconds() - before) / steps


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--peer", choices=list(PEERS), action="append", help="only these, and marlvec; else all")
    parser.add_argument("--turns", type=int, default=7, help="how often each is measured")
    parser.add_argument("--batches", type=int, default=2, help="of one turn")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of old idioms in the peers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=500_000_000, log_to_driver=False)
    found: dict[str, Collect] = {}
    for name in PEERS:
        if name == "marlvec" or not args.peer or name in args.peer:
            try:
                found[name] = PEERS[name][1]()
            except ImportError as error:
                print(f"{PEERS[name][0]}: left out ({error})", flush=True)
                continue
            found[name]()  # envs are reset, caches are filled
            found[name]()
    turns = [{name: turn(collect, args.batches) for name, collect in found.items()} for _ in range(args.turns)]
    print(f"{'':<34}{'env steps/s':>12}{'µs':>8}{'marlvec is, times':>19}{'by µs':>8}")
    for name in found:
        rate = statistics.median(one[name][0] for one in turns)
        cost = statistics.median(one[name][1] for one in turns) * 1e6
        faster = statistics.median(one["marlvec"][0] / one[name][0] for one in turns)
        cheaper = statistics.median(one[name][1] / one["marlvec"][1] for one in turns)
        print(f"{PEERS[name][0]:<34}{rate:>12,.0f}{cost:>8.0f}{faster:>19.2f}{cheaper:>8.2f}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
