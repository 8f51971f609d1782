"""Train what "Benchmarking Multi-Agent Deep RL Algorithms in Cooperative Tasks" trains (Papoudakis et al. 2021).

    python -m benchmarks.paper_table rware-tiny-4ag --algorithm mappo --seeds 3
    python -m benchmarks.paper_table --epymarl ../epymarl --python ../epymarl/.venv/bin/python --algorithm mappo
    python -m benchmarks.paper_table --page

The first line trains on one core, a row (task, algorithm, seed) after the other, and writes each row into
``paper_table.json`` as it ends; finished rows are skipped. A training that was cut off continues from its last
evaluation (folder ``runs/paper_table``). The second line lets EPyMARL train on the warehouse for a while and measures
its speed. The third line writes ``docs/paper_table.md`` from the JSON, and so do the others after each row.

The methods are those of ``examples/``: one net for all agents, which see their number; all agents get the sum of their
rewards. IPPO's critic sees what one agent sees, MAPPO's critic and QMIX's mixer what all agents see. Every 40th of a
training 100 episodes are played: PPO draws actions, as in EPyMARL's tests. Needs torch and ``marlvec[native]``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import marlvec
from marlvec.connectors import (
    AgentIndicator,
    EpsilonGreedy,
    GeneralAdvantageEstimation,
    Rows,
    Standardize,
    agent_connector,
    learner_connector,
)
from marlvec.interop.torch import TorchPolicy

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "paper_table.json", ROOT / "docs" / "paper_table.md"
RUNS = Path("runs/paper_table")
EVALUATIONS, EPISODES = 40, 100  # evaluations of a whole training; episodes of each
Row = Mapping[str, Any]
"""A training, as the file has it."""

NUM_ENVS, NUM_STEPS, MINIBATCH = 256, 64, 2_048  # envs, steps of each a batch, env steps a minibatch
LEARNING_RATE, EPOCHS, CLIP, ENTROPY, GAMMA, LAMBDA, WIDTH = 5e-4, 4, 0.2, 0.01, 0.99, 0.95, 128
Q_ENVS, Q_STEPS, Q_UPDATES, Q_MINIBATCH, Q_TARGET = 32, 8, 8, 1_024, 25  # updates a batch; batches a target
MEMORY, MIXING, EXPLORING = 250_000, 32, 0.1  # env steps; width of the mixer; share of the training
NEEDED = "obs", "next_obs", "actions_executed", "rewards", "terminated"


@dataclass(frozen=True)
class Task:
    """A task of the paper, as an env of ours.

    Attributes:
        env: Id for `marlvec.make`.
        steps: Env steps of a training with IPPO or MAPPO; the paper's figures show a tenth of them.
        arguments: More arguments of `marlvec.make`.
    """

    env: str
    steps: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


TASKS = {
    "simple-spread": Task("mpe/simple_spread_v3", 20_000_000),
    "speaker-listener": Task("mpe/simple_speaker_listener_v4", 20_000_000, {"pad": True}),
    "lbf-8x8-2p-2f-coop": Task("lbf/Foraging-8x8-2p-2f-coop-v3", 20_000_000),
    "lbf-2s-8x8-2p-2f-coop": Task("lbf/Foraging-2s-8x8-2p-2f-coop-v3", 20_000_000),
    "lbf-10x10-3p-3f": Task("lbf/Foraging-10x10-3p-3f-v3", 20_000_000),
    "lbf-15x15-3p-5f": Task("lbf/Foraging-15x15-3p-5f-v3", 20_000_000),
    "lbf-15x15-4p-3f": Task("lbf/Foraging-15x15-4p-3f-v3", 20_000_000),
    "lbf-15x15-4p-5f": Task("lbf/Foraging-15x15-4p-5f-v3", 20_000_000),
    "rware-tiny-2ag": Task("rware/rware-tiny-2ag-v2", 40_000_000),
    "rware-tiny-4ag": Task("rware/rware-tiny-4ag-v2", 40_000_000),
    "rware-small-4ag": Task("rware/rware-small-4ag-v2", 40_000_000),
}
ALGORITHMS = ("ippo", "mappo", "qmix")


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Return two layers of 128, as the paper's nets without recurrence."""
    hidden = nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


class Net(nn.Module):
    """An actor over what one agent sees, and a critic over what one agent or the team sees."""

    def __init__(self, sees: int, actions: int, agents: int, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.actor, self.critic = layers(sees, actions), layers(sees * agents if joint else sees, 1)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs)}

    def values(self, obs_MAk: torch.Tensor) -> torch.Tensor:
        """Return values of moments, (M, A): equal ones of all agents if the critic sees the team."""
        if self.joint:
            return self.critic(obs_MAk.flatten(1)).expand(-1, obs_MAk.shape[1])
        return self.critic(obs_MAk)[..., 0]


@agent_connector
def team_reward(rows: Rows) -> Rows:
    """Give each agent the sum of the rewards of its episode's agents, as EPyMARL does."""
    _, episode = np.unique(rows.eps_id, return_inverse=True)
    return rows.replace(rewards=np.bincount(episode, rows.rewards)[episode])


def by_moment(rows: Rows | marlvec.SampleBatch, agents: int) -> NDArray[np.intp]:
    """Return rows' numbers, (M, A): a row for each moment of an episode, its agents in their order."""
    return np.lexsort((rows.agent_index, rows.env_t, rows.eps_id)).reshape(-1, agents)


class Mixer(nn.Module):
    """QMIX's mixer: the agents' values to the team's, rising with each; its weights come from what the team sees."""

    def __init__(self, agents: int, state: int) -> None:
        super().__init__()
        sizes = {"first": agents * MIXING, "bias": MIXING, "second": MIXING, "base": 1}
        self.hyper = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(state, 64), nn.ReLU(), nn.Linear(64, size)) for name, size in sizes.items()}
        )

    def forward(self, chosen_MA: torch.Tensor, state_Mk: torch.Tensor) -> torch.Tensor:
        made = {name: net(state_Mk) for name, net in self.hyper.items()}
        first = made["first"].abs().view(*chosen_MA.shape, MIXING)
        hidden = nn.functional.elu((chosen_MA[:, None] @ first)[:, 0] + made["bias"])
        return (hidden * made["second"].abs()).sum(1) + made["base"][:, 0]


class Training:
    """One row of the table while it is trained: its envs, and what all methods have."""

    collector: marlvec.Collector
    learned: dict[str, Any]
    """What a checkpoint has."""
    draws = True
    """Whether evaluations draw actions, rather than take the best."""

    def __init__(self, task: Task, seed: int, num_envs: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.num_envs = seed, num_envs
        self.memory: dict[str, NDArray[Any]] = {}
        made = {"backend": "native", "num_workers": 1, "env_state": "deepcopy", **task.arguments}
        self.envs = marlvec.make(task.env, num_envs, **made)
        self.others = marlvec.make(task.env, min(EPISODES, num_envs), **made)
        self.agents = len(self.envs.agents)
        spaces: Any = [
            (self.envs.agent_observation_space(i), self.envs.agent_action_space(i)) for i in range(self.agents)
        ]
        self.sees = max(obs.shape[0] for obs, _ in spaces) + self.agents
        self.actions = max(int(actions.n) for _, actions in spaces)

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()
        self.others.close()

    def advance(self, done: int) -> int:
        """Collect a batch and learn from it, after ``done`` env steps; return its env steps."""
        raise NotImplementedError

    def evaluate(self) -> float:
        """Return the mean team return of some episodes."""
        found = self.collector.evaluate(EPISODES, explore=self.draws).episodes
        return float(np.mean([record.returns_A.sum() for record in found]))


class Ppo(Training):
    """IPPO; or MAPPO, if the critic is ``joint``."""

    def __init__(self, task: Task, seed: int, num_envs: int, *, joint: bool) -> None:
        super().__init__(task, seed, num_envs)
        self.net = net = Net(self.sees, self.actions, self.agents, joint)
        self.optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, eps=1e-5, fused=True)
        agents = self.agents

        # Functions, not methods: `evaluate` copies connectors, a method's object included, and envs can't be copied.
        @torch.no_grad()
        def values(rows: Rows) -> NDArray[np.float32]:
            order = by_moment(rows, agents)
            found = np.empty(len(rows), np.float32)
            found[order] = net.values(torch.from_numpy(rows.obs[order]))
            return found

        @learner_connector
        def add_values(rows: Rows) -> Rows:
            return rows.replace(values=values(rows))

        advantages = GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=values)
        self.policy = TorchPolicy(net)
        self.collector = marlvec.Collector(
            self.envs,
            self.policy,
            agent_connectors=[team_reward, AgentIndicator()],
            learner_connectors=[add_values, advantages, Standardize()],
            seed=seed,
            evaluation_envs=self.others,
        )
        self.learned = {"collector": self.collector, "learner": {"optimizer": self.optimizer}}

    def advance(self, done: int) -> int:
        batch = self.collector.collect(env_steps=self.num_envs * NUM_STEPS)
        self.update(batch["main"], done + batch.env_steps)
        return batch.env_steps

    def update(self, rows: marlvec.SampleBatch, done: int) -> None:
        """Take PPO's steps on a batch."""
        order = by_moment(rows, self.agents)
        obs, actions, logp, advantages, targets = (
            torch.from_numpy(rows[name][order]) for name in ("obs", "actions", "logp", "advantages", "value_targets")
        )
        masks = torch.from_numpy(rows.action_mask[order]) if "action_mask" in rows else None
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + done)
        for _ in range(EPOCHS):
            for i in torch.randperm(len(obs), generator=generator).split(MINIBATCH):
                seen, gains = obs[i], advantages[i]
                logits = self.net.actor(seen)
                logp_all = torch.log_softmax(logits if masks is None else logits.masked_fill(~masks[i], -1e9), -1)
                ratio = (logp_all.gather(-1, actions[i][..., None])[..., 0] - logp[i]).exp()
                gain = torch.min(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
                entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
                value_loss = (self.net.values(seen) - targets[i]).square().mean()
                self.optimizer.zero_grad()
                (0.5 * value_loss - gain - ENTROPY * entropy).backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optimizer.step()
        self.policy.note_update()


class Qmix(Training):
    """QMIX with double Q-learning, from a memory of env steps."""

    draws = False

    def __init__(self, task: Task, seed: int, num_envs: int) -> None:
        super().__init__(task, seed, num_envs)
        self.net, self.target = (
            nn.ModuleDict(
                {"agent": layers(self.sees, self.actions), "mixer": Mixer(self.agents, self.sees * self.agents)}
            )
            for _ in range(2)
        )
        self.target.load_state_dict(self.net.state_dict())
        self.optimizer = torch.optim.Adam(self.net.parameters(), LEARNING_RATE, fused=True)
        self.scale = 1.0  # of rewards: their standard deviation in the memory
        values = self.net["agent"]

        @torch.no_grad()
        def best(rows: Rows) -> NDArray[np.int64]:
            mask = torch.from_numpy(rows.action_mask) if "action_mask" in rows else None
            return best_of(values(torch.from_numpy(rows.obs)), mask).numpy()

        decay = int(EXPLORING * task.steps / 10 / num_envs)
        self.collector = marlvec.Collector(
            self.envs,
            marlvec.FunctionPolicy(best),
            agent_connectors=[team_reward, AgentIndicator()],
            action_connectors=[EpsilonGreedy(1.0, final=0.05, decay_steps=decay)],
            seed=seed,
            evaluation_envs=self.others,
        )
        parts = {"net": self.net, "target": self.target, "optimizer": self.optimizer}
        self.learned = {"collector": self.collector, "learner": parts}

    def advance(self, done: int) -> int:
        batch = self.collector.collect(env_steps=self.num_envs * Q_STEPS)
        rows = batch["main"]
        order, size = by_moment(rows, self.agents), batch.env_steps
        place = np.arange(done, done + size) % MEMORY
        for name in (*NEEDED, *(["next_action_mask"] if "next_action_mask" in rows else [])):
            if name not in self.memory:
                self.memory[name] = np.zeros((MEMORY, *order.shape[1:], *rows[name].shape[1:]), rows[name].dtype)
            self.memory[name][place] = rows[name][order]
        done += size
        self.scale = max(float(self.memory["rewards"][: min(done, MEMORY), 0].std()), 0.01)
        rng = np.random.default_rng([self.seed, done])
        for index in rng.integers(min(done, MEMORY), size=(Q_UPDATES, Q_MINIBATCH)):
            self.update({name: torch.from_numpy(column[index]) for name, column in self.memory.items()})
        if done // size % Q_TARGET == 0:
            self.target.load_state_dict(self.net.state_dict())
        return size

    def update(self, part: Mapping[str, torch.Tensor]) -> None:
        """Take one step on env steps of the memory, (M, A, …)."""
        obs, after = part["obs"], part["next_obs"]
        with torch.no_grad():
            then = best_of(self.net["agent"](after), part.get("next_action_mask"))[..., None]
            later = self.target["agent"](after).gather(-1, then)[..., 0]
            goes_on = (~part["terminated"].all(1)).float()
            worth = self.target["mixer"](later, after.flatten(1))
            goal = part["rewards"][:, 0].float() / self.scale + GAMMA * goes_on * worth
        chosen = self.net["agent"](obs).gather(-1, part["actions_executed"][..., None])[..., 0]
        self.optimizer.zero_grad()
        (self.net["mixer"](chosen, obs.flatten(1)) - goal).square().mean().backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
        self.optimizer.step()


def best_of(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of the best allowed actions."""
    return (values if mask is None else values.masked_fill(~mask, -torch.inf)).argmax(-1)


def training_of(task: Task, algorithm: str, seed: int) -> Training:
    """Return a training at its start."""
    if algorithm == "qmix":
        return Qmix(task, seed, Q_ENVS)
    return Ppo(task, seed, NUM_ENVS, joint=algorithm == "mappo")


def steps_of(name: str, algorithm: str) -> int:
    """Return the env steps of a whole training: QMIX has a tenth of the others'."""
    return TASKS[name].steps // (10 if algorithm == "qmix" else 1)


def train(name: str, algorithm: str, seed: int, *, steps: int | None = None, runs: Path = RUNS) -> Iterator[Row]:
    """Train one row from its checkpoint or from the start; yield the row as it is after each evaluation.

    Args:
        name: Key of `TASKS`.
        algorithm: One of `ALGORITHMS`.
        seed: Seed of envs, weights and actions.
        steps: Env steps after which the next evaluation is the last; None: the task's.
        runs: Folder of checkpoints.
    """
    torch.set_num_threads(1)
    task, folder = TASKS[name], runs / f"{name}-{algorithm}-{seed}"
    training, total = training_of(task, algorithm, seed), steps_of(name, algorithm)
    curve, seconds, wall, done = [], 0.0, 0.0, 0
    if (folder / "last.npz").exists():
        progress = marlvec.load_checkpoint(folder, **training.learned)
        curve, seconds, wall, done = (progress[key] for key in ("curve", "seconds", "wall", "done"))
        training.memory.update({key: np.array(column) for key, column in progress.get("memory", {}).items()})
    try:
        while True:
            if done >= len(curve) * total / EVALUATIONS:
                curve.append([done, round(training.evaluate(), 3)])
                progress = {"curve": curve, "seconds": seconds, "wall": wall, "done": done}
                kept = {**progress, "memory": training.memory} if training.memory else progress
                marlvec.save_checkpoint(folder, **training.learned, progress=kept)
                times = {"processor seconds": round(seconds, 3), "seconds": round(wall, 3)}
                row = {"task": name, "algorithm": algorithm, "seed": seed, "env": task.env, "steps": done}
                yield {**row, **times, "curve": [list(point) for point in curve], **where()}
                if done >= (steps or total):
                    return
            began = time.process_time(), time.perf_counter()
            done += training.advance(done)
            seconds, wall = seconds + time.process_time() - began[0], wall + time.perf_counter() - began[1]
    finally:
        training.close()


def where() -> dict[str, str]:
    """Return the day, the processor and the versions."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "marlvec": marlvec.__version__,
    }


def time_epymarl(folder: Path, python: str, algorithm: str, seconds: float, options: Iterable[str]) -> Row:
    """Let EPyMARL train on rware-tiny-4ag on one core until it took that many processor seconds; return its speed.

    Seconds are those of all its processes between two lines of its log, without tests and without the first updates.
    """
    every = " ".join(f"{name}_interval=5000" for name in ("log", "runner_log", "learner_log"))
    words = f"env_args.key=rware:rware-tiny-4ag-v2 env_args.time_limit=500 use_cuda=False seed=0 {every}"
    command = [python, "src/main.py", f"--config={algorithm}", "--env-config=gymma", "with", *words.split()]
    process = subprocess.Popen(
        [*command, "test_nepisode=10", "test_interval=1000000000", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    points: list[tuple[int, float, float]] = []
    last = ""
    try:
        for last in process.stdout or ():
            if found := re.search(r"Recent Stats \| t_env:\s+(\d+)", last):
                points.append((int(found[1]), processor_seconds(process.pid), time.perf_counter()))
                if len(points) > 2 and points[-1][1] - points[1][1] > seconds:
                    break
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if len(points) < 3:
        raise SystemExit(f"EPyMARL ended too early: {last}")
    steps, processor, wall = (after - before for before, after in zip(points[1], points[-1], strict=True))
    version = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return {
        "library": "EPyMARL",
        "commit": version.stdout.strip(),
        "task": "rware-tiny-4ag",
        "algorithm": algorithm,
        "options": list(options),
        "steps": steps,
        "processor seconds": round(processor, 1),
        "seconds": round(wall, 1),
        **where(),
    }


def processor_seconds(session: int) -> float:
    """Return the processor time of a session's processes, as Linux counts it."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def results(path: Path = RESULTS) -> dict[str, list[Row]]:
    """Return what was measured so far."""
    if not path.exists():
        return {"rows": [], "others": []}
    found: dict[str, list[Row]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def keep(kind: str, row: Row, path: Path = RESULTS) -> None:
    """Write a row into the file in place of an earlier one of its training, and the page with it."""
    found = results(path)
    found[kind] = [each for each in found[kind] if name_of(each) != name_of(row)] + [row]
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found) + "\n", encoding="utf-8")
    part.replace(path)
    if path == RESULTS:
        write_page()


def name_of(row: Row) -> list[Any]:
    """Return what distinguishes trainings."""
    return [row.get(key) for key in ("library", "task", "algorithm", "seed", "options")]


HEAD = """# A paper's tasks on one core

For those who know EPyMARL and ask what its trainings cost here: tasks of *Benchmarking Multi-Agent Deep Reinforcement
Learning Algorithms in Cooperative Tasks* ([Papoudakis et al. 2021](https://arxiv.org/abs/2006.07869)), trained with
marlvec's [compiled envs](native.md) and its collector. This trains a row, or continues it:

```text
python -m benchmarks.paper_table rware-tiny-4ag --algorithm mappo
```

Every run uses one core and one thread of torch. Seconds are processor time of training, without evaluation, on a
machine that others used at the same time: take the size of the ratios, not their digits.

## Speed beside EPyMARL

`rware-tiny-4ag`: collecting and learning, tests left out in both. EPyMARL has its settings of the method, 10 envs.

"""
RETURNS = f"""
## Returns

Means of {EPISODES} episodes, played at every {EVALUATIONS}th of a training: the best mean, and the last. A return is
the sum over agents and steps; as in EPyMARL's tests, IPPO and MAPPO draw actions. With several seeds: the mean over
seeds, and half the width of its 95 % interval (Student's t).

"""
DIFFERENCES = f"""
## What differs from the paper

- **The paper's returns are not in the table.** Its tables could not be read where this was measured.
- **Envs.** The paper has RWARE v1 and LBF v1; these are rware 2.0 (v2) and lbforaging 2.0 (v3), bit for bit. By their
  sources, rware 1.0.3 (v1) has the same rules as 2.0. In lbforaging 1.0.15 (v1) players never start in the last row or
  column, and without `-coop` a food's level is below the sum of the three lowest players' levels; 2.0 also draws that
  sum, so that some foods need more players.
- **Steps.** EPyMARL's authors trained on-policy methods for ten times the steps of their figures, 40 M in the warehouse
  ([issues 9](https://github.com/uoe-agents/epymarl/issues/9) and
  [24](https://github.com/uoe-agents/epymarl/issues/24)); its settings for MAPPO and IPPO say 20 M, which is what the
  other tasks have here. QMIX has a tenth.
- **Method.** Nets have two layers of {WIDTH} without recurrence. Batches are {NUM_ENVS} envs × {NUM_STEPS} steps,
  {EPOCHS} epochs of minibatches of {MINIBATCH:,} env steps. Advantages are GAE's ({GAMMA}, {LAMBDA}) and standardized;
  EPyMARL has 10 envs, whole episodes, one gradient step an epoch, n-step returns with a target critic, and standardized
  rewards. QMIX is double Q-learning over single env steps, {Q_UPDATES} updates of {Q_MINIBATCH:,} for
  {Q_ENVS} envs × {Q_STEPS} steps.
- **Critic.** MAPPO's critic sees all agents' observations once, and gives one value for the team; EPyMARL's also sees
  the agent's number, and gives a value for each agent.

## Not run

Of {len(TASKS)} tasks: {{missing}}. `simple_adversary` and `simple_tag` need opponents that EPyMARL has trained.
Rows with fewer env steps than the task's were stopped. `python -m benchmarks.paper_table` trains the rest.

QMIX had learned nothing on `lbf-8x8-2p-2f-coop` after 400,000 env steps, with a memory of 100,000 and rewards as they
are. Like EPyMARL's, its memory now has 250,000, and its rewards are divided by their standard deviation; it was not run
again at that length; 150,000 steps taught it nothing, either.
"""
WHERE = """smaclite,
which EPyMARL imports, was an empty module. Four fifths of
marlvec's time are PPO's gradient steps, four passes over each batch as in EPyMARL, so that even faster envs would gain
little; seven tenths of EPyMARL's are its ten env processes."""
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


def page(found: Mapping[str, Sequence[Row]]) -> str:
    """Return the page of these results."""
    return (
        HEAD + speed_table(found) + RETURNS + returns_table(found["rows"]) + DIFFERENCES.format(missing=missing(found))
    )


def rows_of(rows: Iterable[Row], task: str, algorithm: str) -> list[Row]:
    """Return the rows of a task and an algorithm, by seed."""
    chosen = [row for row in rows if (row["task"], row["algorithm"]) == (task, algorithm)]
    return sorted(chosen, key=lambda row: row.get("seed", 0))


def rate(rows: Sequence[Row]) -> float:
    """Return env steps a second of processor time, over all rows."""
    steps, seconds = (sum(row[key] for row in rows) for key in ("steps", "processor seconds"))
    return float(steps / seconds)


def speed_table(found: Mapping[str, Sequence[Row]]) -> str:
    """Return ours beside EPyMARL's, a line for each of its runs."""
    text = "| method | EPyMARL's nets | EPyMARL, steps/s | marlvec, steps/s | ratio | 20 M steps: EPyMARL | marlvec |\n"
    text += "| --- | --- | --- | --- | --- | --- | --- |\n"
    for other in found["others"]:
        ours = rows_of(found["rows"], other["task"], other["algorithm"])
        nets = "without recurrence" if "use_rnn=False" in other["options"] else "GRU, its default"
        mine = (f"{rate(ours):,.0f}", f"{rate(ours) / rate([other]):.0f}") if ours else ("not run", "")
        text += f"| {other['algorithm'].upper()} | {nets} | {rate([other]):,.0f} | {mine[0]} | {mine[1]} "
        text += f"| {2e7 / rate([other]) / 3600:.1f} h | {f'{2e7 / rate(ours) / 60:.0f} min' if ours else ''} |\n"
    commits = ", ".join(sorted({other["commit"][:9] for other in found["others"]}))
    least = min((other["processor seconds"] for other in found["others"]), default=0.0)
    return f"{text}\nEPyMARL at {commits}, {least:.0f} s or more of each run; both with torch 2.13.0. {WHERE}\n"


def returns_table(rows: Sequence[Row]) -> str:
    """Return a line for each task and algorithm."""
    text = "| task | method | seeds | best | last | env steps | steps/s | minutes of a seed |\n"
    text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    for task in TASKS:
        for algorithm in ALGORITHMS:
            if chosen := rows_of(rows, task, algorithm):
                best = spread([max(value for _, value in row["curve"]) for row in chosen])
                last = spread([row["curve"][-1][1] for row in chosen])
                minutes = sum(row["processor seconds"] for row in chosen) / len(chosen) / 60
                text += f"| {task} | {algorithm.upper()} | {len(chosen)} | {best} | {last} "
                steps = f"{min(row['steps'] for row in chosen) / 1e6:.0f} of {steps_of(task, algorithm) / 1e6:.0f} M"
                text += f"| {steps} | {rate(chosen):,.0f} | {minutes:.0f} |\n"
    return text


def spread(values: Sequence[float]) -> str:
    """Return the mean, and half the width of its 95 % interval if there are two values or more."""
    mean = f"{np.mean(values):.2f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {T95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5:.2f}"


def missing(found: Mapping[str, Sequence[Row]]) -> str:
    """Say how many tasks have no row, by algorithm."""
    left = {name: sum(not rows_of(found["rows"], task, name) for task in TASKS) for name in ALGORITHMS}
    return ", ".join(f"{name.upper()} on {count}" for name, count in left.items() if count)


def write_page() -> None:
    """Write docs/paper_table.md from the results."""
    PAGE.write_text(page(results()), encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"all if none is named: {', '.join(TASKS)}")
    parser.add_argument("--algorithm", choices=ALGORITHMS, action="append", help="all if none is named")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, … of each row, at most five")
    parser.add_argument(
        "--steps", type=int, help="stop a row at the next evaluation after these env steps; a later run continues it"
    )
    parser.add_argument("--epymarl", type=Path, help="a clone of uoe-agents/epymarl: time it instead")
    parser.add_argument("--python", default="python", help="an interpreter that has what EPyMARL needs")
    parser.add_argument("--seconds", type=float, default=300, help="of processor time for EPyMARL")
    parser.add_argument("--option", action="append", default=[], help="for EPyMARL, such as use_rnn=False")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--runs", type=Path, default=RUNS, help="the folder of checkpoints")
    args = parser.parse_args()
    if unknown := set(args.tasks) - TASKS.keys():
        parser.error(f"no task {', '.join(sorted(unknown))}: expected some of {', '.join(TASKS)}")
    if not 1 <= args.seeds <= max(T95):
        parser.error(f"--seeds {args.seeds}: expected 1 to {max(T95)}")
    algorithms = args.algorithm or list(ALGORITHMS)
    if not args.page and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # EPyMARL's processes have it, too
    if args.epymarl:
        python = args.python if args.python == Path(args.python).name else str(Path(args.python).absolute())
        for algorithm in algorithms:
            row = time_epymarl(args.epymarl, python, algorithm, args.seconds, args.option)
            keep("others", row, args.results)
    elif not args.page:
        tasks = [name for name in TASKS if name in (args.tasks or TASKS)]
        for seed, name, algorithm in product(range(args.seeds), tasks, algorithms):
            train_row(name, algorithm, seed, args.steps, args.results, args.runs)
    if args.page:
        write_page()


def train_row(name: str, algorithm: str, seed: int, steps: int | None, path: Path, runs: Path) -> None:
    """Train a row and show how far it is, unless the results have it."""
    total = steps or steps_of(name, algorithm)
    known = rows_of(results(path)["rows"], name, algorithm)
    if any(row["seed"] == seed and row["steps"] >= total for row in known):
        return
    shown = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} steps"), TimeRemainingColumn()
    with Progress(*shown, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"{name}, {algorithm}, seed {seed}", total=total)
        for row in train(name, algorithm, seed, steps=steps, runs=runs):
            if row["steps"]:
                keep("rows", row, path)
            progress.update(bar, completed=row["steps"])
            progress.console.print(f"{row['steps']:,} steps: return {row['curve'][-1][1]:.2f}")


if __name__ == "__main__":
    main()
