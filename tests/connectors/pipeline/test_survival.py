"""Histories and statistics over whole runs: every row counted once, and nothing lost with the process that knew it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec.collect import Collector
from marlvec.connectors import AgentPipeline, FlattenObs, FrameStack, NormalizeObs, Rows
from marlvec.connectors.agent.filtering.frame_skip import FrameSkip
from marlvec.connectors.agent.images.max_obs import MaxObs
from marlvec.connectors.agent.memory.delay_obs import DelayObs
from marlvec.connectors.agent.memory.prev_actions import PrevActions
from marlvec.connectors.agent.memory.prev_rewards import PrevRewards
from marlvec.connectors.agent.memory.rnn_state import RnnState
from marlvec.connectors.agent.memory.view import View
from marlvec.connectors.agent.rewards.normalize_reward import NormalizeReward
from marlvec.policies import FunctionPolicy
from tests.collect.helpers.players import MODES, sync
from tests.connectors.helpers.samples import batch, pairs_of, rows_of, same_tree

ROOT = Path(__file__).resolve().parents[3]
OBS = spaces.Dict({"near": spaces.Box(-9, 9, (3,)), "far": spaces.Box(-1e6, 1e6, (2,), np.float64)})
ACTIONS = spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2,))])


def chain() -> AgentPipeline:
    """Everything on the agent side that remembers something."""
    road = [
        *(FlattenObs(), MaxObs(2), DelayObs(1), NormalizeObs(), NormalizeReward(), FrameSkip(2), FrameStack(3)),
        *(PrevActions(2), PrevRewards(2, into_obs=True), RnnState((np.zeros(2, np.float32), np.array(1)))),
        AgentPipeline(
            [View("seen", "obs", "-3:0"), View("did", "actions", -2), View("said", "logp", [-1], np.zeros(()))]
        ),
    ]
    pipeline = AgentPipeline(road)
    pipeline.bind(OBS, ("a", "b"), ACTIONS)
    return pipeline


def tick(pipeline: AgentPipeline, number: int) -> Rows:
    """One tick of 3 envs × 2 agents; every number is that of the tick."""
    rng = np.random.default_rng(number)
    first, last = np.full(6, number == 0), np.zeros(6, bool)
    if number % 7 == 6:
        last[rng.integers(6)] = True
    rows = rows_of(pairs_of(3, 2), batch(OBS, 6, number), rewards=rng.normal(size=6), first=first, last=last)
    out = pipeline(rows)
    act = out.take(~out.last)
    if len(act):
        n = len(act)
        said = {
            "logp": rng.normal(size=n),
            "state_out": (rng.normal(size=(n, 2)).astype(np.float32), act["state_in"][1] + 1),
        }
        pipeline.on_policy_output(act.replace(actions=batch(ACTIONS, n, number), **said))
    if number % 5 == 4:
        pipeline.reset([number % 3])
    return out


def run_forever(path: str) -> None:
    """Play and save after every tick, until killed."""
    pipeline, number = chain(), 0
    while True:
        tick(pipeline, number)
        number += 1
        pipeline.save(path)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


@pytest.mark.slow("draws many batches")
@pytest.mark.fault("E10")
@pytest.mark.parametrize("ticks", [1, 6, 11])
def test_after_a_kill_every_worker_goes_on_as_if_nothing_had_been(ticks: int, tmp_path: Path) -> None:
    """A process is killed while it runs and saves; two workers load what is left, mid-episode.

    They give the very same as one that was never interrupted, to the bit. So does one that was only told the state.
    """
    path = tmp_path / "pipeline.npz"
    script = "import sys; from tests.connectors.pipeline.test_survival import run_forever; run_forever(sys.argv[1])"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        while int(victim.stdout.readline()) < ticks:
            pass
        victim.kill()
    workers = [AgentPipeline.load(path), AgentPipeline.load(path), chain()]
    workers[2].load_state_dict(workers[0].state_dict())
    normalize: Any = workers[0]["NormalizeObs"]
    done = int(normalize.counts[0]) // 6  # every tick's 6 rows were counted once
    assert done >= ticks
    whole = chain()
    for number in range(done):
        tick(whole, number)
    for worker in workers:
        same_tree(worker.state_dict(), whole.state_dict())
    for number in range(done, done + 15):
        wanted = tick(whole, number)
        for worker in workers:
            same_tree(tick(worker, number), wanted)
            same_tree(worker.state_dict(), whole.state_dict())


@pytest.mark.fault("E10")
@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_several_workers_learnt_is_joined_and_their_episodes_stay_their_own(count: int) -> None:
    asked = chain()
    workers = [chain() for _ in range(count)]
    for w, worker in enumerate(workers):
        for number in range(w):
            tick(worker, number + 10 * w)
    states = [worker.state_dict() for worker in workers]
    merged = asked.merge_states(states)
    for worker, state in zip(workers, states, strict=True):
        worker.load_state_dict(merged)
        after = worker.state_dict()
        for name in ("NormalizeObs", "NormalizeReward"):
            same_tree(after[name]["moments"], merged[name]["moments"])
        assert after["NormalizeObs"]["moments"][""]["count"] == [sum(range(count)) * 6]
        for name in set(after) - {"NormalizeObs", "NormalizeReward"}:
            same_tree(after[name], state[name])
        same_tree(after["NormalizeReward"]["returns"], state["NormalizeReward"]["returns"])
    if not workers:
        assert merged["NormalizeObs"]["moments"][""]["count"] == [0]


def count_up(rows: Rows) -> Any:
    """Answers with a state that counts the agent's decisions."""
    return np.zeros(len(rows), np.int64), {"state_out": rows["state_in"] + 1, "turn": rows["t"]}


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.fault("E8")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_each_row_and_each_answer_passes_each_piece_once(kind: str, mode: str) -> None:
    """A row or an answer that passed twice, or not at all, would shift every history that counts them.

    The amounts asked for are such that calls return early, in the middle of a step and of an episode.
    """
    spread = NormalizeReward(0.5, clip=None)
    pieces = [
        RnnState(np.array(0)),
        AgentPipeline([View("rows", "t", "-2:0", -1), View("turns", "turn", "-2:-1", np.array(-1))]),
        *(spread, PrevRewards(2)),
    ]
    with sync(kind, 3, 3, mode) as envs:
        collector = Collector(envs, FunctionPolicy(count_up), agent_connectors=pieces, seed=6)
        batches = [collector.collect(env_steps=n)["main"] for n in (50, 1, 7, 64, 13)]
        batches += [collector.collect(agent_steps=n)["main"] for n in (1, 2, 31)]
        batches.append(collector.collect(env_steps=9)["main"])  # and what was closed before
    rows = {key: np.concatenate([batch[key] for batch in batches]) for key, _ in batches[0].items()}
    t = rows["t"]
    assert (t > 3).any()
    np.testing.assert_array_equal(rows["state_in"], t)
    back = t[:, None] + np.array([-2, -1, 0])
    np.testing.assert_array_equal(rows["rows"], np.where(back < 0, -1, back))
    np.testing.assert_array_equal(rows["turns"], np.where(back < 0, -1, back)[:, :2])
    lanes = list(zip(*(rows[name].tolist() for name in ("eps_id", "env_id", "agent_index")), strict=True))
    paid = {
        (*lane, turn): reward for lane, turn, reward in zip(lanes, t.tolist(), rows["rewards"].tolist(), strict=True)
    }
    for lane, turn, shown in zip(lanes, t.tolist(), rows["prev_rewards"].tolist(), strict=True):
        assert shown == [paid[(*lane, when)] if when >= 0 else 0.0 for when in (turn - 2, turn - 1)]
    assert spread.counts[0] == len(t)  # one reward per transition, its last one included
