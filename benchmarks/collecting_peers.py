"""What a row costs in other libraries' collectors and in ours, side by side in one run.

Run ``python benchmarks/collecting_peers.py --python rllib=/…/bin/python --python torchrl=/…/bin/python``: each
contestant has a process of its own, in the environment that has its library, which must be able to import marlvec's
dependencies, too. Without an interpreter of its own a library is looked for in this one; what is not installed is named
and left out. As in `limit`, contestants take turns in short rounds, ratios are taken inside a round, and medians over
rounds are quoted with their quartiles. On a machine that does other things, look at the processor time: it is that of
the contestant's process and its children together, which waiting does not change.

Everybody steps 16 envs with three agents, whose episodes have 25 steps, with one random policy for all agents, and
hands over batches of 1,600 env steps. RLlib's runners and TorchRL's collector are used as their own algorithms use
them, without a cluster around them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import ENVS
from rich.console import Console
from rich.progress import track
from rich.table import Table
from yardsticks import spread, usable_cores

NUM_ENVS, BATCH = 16, 1600

Collect = Callable[[], int]
"""Collects one batch; env steps in it."""


def _marlvec(make_env: Callable[[], Any], **settings: Any) -> Collect:
    import marlvec

    envs = marlvec.make(make_env, num_envs=NUM_ENVS, **settings)
    collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0)
    return lambda: collector.collect(env_steps=BATCH).env_steps


def _native_id(make_env: Callable[[], Any]) -> str:
    if make_env is not ENVS["simple_spread"]:
        raise ValueError("that env has no native form")
    return "simple_spread"


def _rllib_config(make_env: Callable[[], Any], *, new: bool) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    register_env("benchmark", lambda _: ParallelPettingZooEnv(make_env()))
    return (
        PPOConfig()
        .api_stack(enable_rl_module_and_learner=new, enable_env_runner_and_connector_v2=new)
        .environment("benchmark")
        .framework("torch")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=BATCH // NUM_ENVS)
    )


def _rllib_old(make_env: Callable[[], Any]) -> Collect:
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.rllib.evaluation.rollout_worker import RolloutWorker
    from ray.rllib.examples._old_api_stack.policy.random_policy import RandomPolicy
    from ray.rllib.policy.policy import PolicySpec

    env = make_env()
    name = env.possible_agents[0]
    spec = PolicySpec(RandomPolicy, env.observation_space(name), env.action_space(name), {})
    config = _rllib_config(make_env, new=False).multi_agent(
        policies={"main": spec}, policy_mapping_fn=lambda *_, **__: "main"
    )
    worker = RolloutWorker(env_creator=lambda _: ParallelPettingZooEnv(make_env()), config=config)
    return lambda: int(worker.sample().env_steps())


def _rllib_new(make_env: Callable[[], Any]) -> Collect:
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule

    class Random(RandomRLModule):
        framework = "torch"  # the runner takes modules of no other

    spec = MultiRLModuleSpec(rl_module_specs={"main": RLModuleSpec(module_class=Random)})
    config = (
        _rllib_config(make_env, new=True)
        .multi_agent(policies={"main"}, policy_mapping_fn=lambda *_, **__: "main")
        .rl_module(rl_module_spec=spec)
    )
    runner = MultiAgentEnvRunner(config=config)
    return lambda: sum(int(episode.env_steps()) for episode in runner.sample(num_timesteps=BATCH))


def _torchrl_env(make_env: Callable[[], Any]) -> Any:
    from torchrl.envs import PettingZooWrapper

    return PettingZooWrapper(make_env())


def _torchrl(make_env: Callable[[], Any], *, processes: bool) -> Collect:
    import torch
    from torchrl.collectors import Collector
    from torchrl.envs import ParallelEnv, SerialEnv

    torch.set_num_threads(1)
    if processes:
        cores = usable_cores()
        share = partial(SerialEnv, NUM_ENVS // cores, partial(_torchrl_env, make_env))
        envs: Any = ParallelEnv(cores, share, mp_start_method="fork")
    else:
        envs = SerialEnv(NUM_ENVS, partial(_torchrl_env, make_env))
    batches = iter(Collector(envs, None, frames_per_batch=BATCH, total_frames=-1))
    return lambda: int(next(batches).numel())


CONTESTANTS: dict[str, tuple[str, Callable[[Callable[[], Any]], Collect]]] = {
    "marlvec, sync": ("marlvec", lambda make_env: _marlvec(make_env, backend="sync")),
    "marlvec, async": ("marlvec", lambda make_env: _marlvec(make_env, backend="async")),
    "marlvec, native": ("marlvec", lambda make_env: _marlvec(_native_id(make_env), backend="native")),
    "RLlib, EnvRunnerV2 (old stack)": ("rllib", _rllib_old),
    "RLlib, MultiAgentEnvRunner": ("rllib", _rllib_new),
    "TorchRL, SerialEnv": ("torchrl", lambda make_env: _torchrl(make_env, processes=False)),
    "TorchRL, ParallelEnv, a process a core": ("torchrl", lambda make_env: _torchrl(make_env, processes=True)),
}
"""Whose each is, and how it is made."""


def serve(name: str, env: str) -> None:
    """Be one contestant: for each line on stdin, which says for how many seconds at least, collect and answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    collect = CONTESTANTS[name][1](ENVS[env])
    collect()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        rows, cpu, start = 0, _processor_time(), time.perf_counter()
        while not rows or time.perf_counter() - start < float(line):
            rows += 3 * collect()
        spent = time.perf_counter() - start, _processor_time() - cpu
        print(json.dumps([seconds / rows for seconds in spent]), file=answers, flush=True)


def _processor_time() -> float:
    """Of this process and of all its children that live: seconds."""
    ticks, todo = 0, [os.getpid()]
    while todo:
        task = Path(f"/proc/{todo.pop()}/task")
        for thread in task.iterdir():
            todo += map(int, (thread / "children").read_text().split())
            fields = (thread / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class _Guest:
    """A contestant in its own process."""

    def __init__(self, name: str, env: str, python: str) -> None:
        command = [python, __file__, "--serve", name, "--env", env]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._name = name

    def answer(self) -> Any:
        """What it says next; None where it is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def run(self, seconds: float) -> tuple[float, float]:
        """Have it collect; seconds and processor seconds a row."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        if (answer := self.answer()) is None:
            raise RuntimeError(f"{self._name} is gone: {self.last_words()}")
        clock, processor = answer
        return clock, processor

    def last_words(self) -> str:
        """The last line it wrote before it ended."""
        lines = self._process.communicate()[1].strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(console: Console, env: str, pythons: dict[str, str], rounds: int, seconds: float) -> dict[str, Any]:
    """Per contestant (rounds, 2): seconds and processor seconds a row."""
    guests: dict[str, _Guest] = {}
    try:
        for name, (library, _) in CONTESTANTS.items():
            guest = _Guest(name, env, pythons.get(library, sys.executable))
            if guest.answer() is None:
                console.print(f"left out: {name}: {guest.last_words()}", markup=False)
            else:
                guests[name] = guest
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in guests}
        for r in track(range(rounds), description=env, transient=True):
            for name in guests if r % 2 == 0 else reversed(guests):
                found[name].append(guests[name].run(seconds))
    finally:
        for guest in guests.values():
            guest.close()
    return {name: np.array(values) for name, values in found.items()}


def report(console: Console, env: str, found: dict[str, Any]) -> None:
    """Print the table of one env; what others need is held against the quicker one of ours that steps the same envs."""
    steps_them = [name for name in found if name.startswith("marlvec") and "native" not in name]
    own = min(steps_them, key=lambda name: np.median(found[name][:, 0]))
    table = Table(title=f"{env} x {NUM_ENVS}, against {own}")
    for heading in ("", "env steps/s", "µs a row", "times ours", "processor µs a row", "times ours "):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, spent in found.items():
        clock, processor = np.median(spent, axis=0)
        ratios = [spread(part, 1) for part in (spent / found[own]).T]
        table.add_row(
            name, f"{1 / clock / 3:,.0f}", f"{clock * 1e6:.1f}", ratios[0], f"{processor * 1e6:.1f}", ratios[1]
        )
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="LIBRARY=PATH", help="interpreter that has it")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each contestant in each round, at least")
    parser.add_argument("--env", choices=list(ENVS), default=None, help="only this one")
    parser.add_argument("--serve", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.env)
        return
    console = Console(width=140)
    console.print(f"Python {platform.python_version()}, {usable_cores()} usable cores, {args.rounds} rounds\n")
    pythons = dict(entry.split("=", 1) for entry in args.python)
    for env in [args.env] if args.env else list(ENVS):
        report(console, env, measure(console, env, pythons, args.rounds, args.seconds))


if __name__ == "__main__":
    main()
