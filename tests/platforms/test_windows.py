"""What runs on Windows, all but worker processes: there, and on Linux without what Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "platforms" / "windows.py"
HEAD = """
import numpy as np
import pytest
import marlvec
from marlvec.errors import ArgumentError
"""
SCRIPTS = {
    "envs, and no workers": """
for backend in ("sync", "thread", "native", "auto"):
    with marlvec.make("simple_spread", num_envs=4, backend=backend) as envs:
        batch = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0).collect(env_steps=200)
        assert len(batch["main"]) == 600
with marlvec.make("simple_spread", num_envs=2) as envs:
    assert (envs.backend, envs.backend_reason) == ("sync", "this system has no worker processes")
with marlvec.make("connect_four", num_envs=2, backend="auto", num_workers=2, max_episode_steps=9) as envs:
    assert envs.backend in ("native", "thread")
with marlvec.make("CartPole-v1", 4, backend="pool") as envs:
    envs.reset(seed=0)
    for _ in range(50):
        envs.step(envs.random_action())
for call in (
    lambda: marlvec.make("simple_spread", 2, backend="async"),
    lambda: marlvec.make("simple_spread", 2, backend="auto", step_timeout=1.0),
    lambda: marlvec.AsyncVectorEnv([lambda: None]),
):
    with pytest.raises(ArgumentError, match="need fork.., which Windows does not have; use backend='thread' .* WSL$"):
        call()
""",
    "files and self-play": """
from pathlib import Path
from marlvec.connectors import NormalizeObs

def collector_of(envs):
    return marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0, agent_connectors=[NormalizeObs()])

def three():
    return marlvec.make("simple_spread", num_envs=3, backend="native")

with three() as envs, three() as others:
    one, other = collector_of(envs), collector_of(others)
    batch = one.collect(env_steps=90)
    batch["main"].save("rows.npz")
    batch["main"].save("rows.parquet")
    assert len(marlvec.SampleBatch.load("rows.npz")) == len(marlvec.SampleBatch.load("rows.parquet")) == 270
    for _ in range(2):
        one.save("collector.npz")
    other.load("collector.npz")
    for _ in range(2):
        marlvec.save_checkpoint("run", collector=one)
    marlvec.load_checkpoint("run", collector=other)
    ours, theirs = one.collect(env_steps=60)["main"], other.collect(env_steps=60)["main"]
    assert ours["next_obs"].tobytes() == theirs["next_obs"].tobytes()
assert not list(Path().rglob("*.tmp"))

from marlvec.selfplay import Every, Latest, OpponentPool, RatingTracker, SelfPlayMapping
with marlvec.make("tictactoe", num_envs=8, backend="native") as envs:
    board = RatingTracker(envs.agents, note=["main"])
    pool = OpponentPool(marlvec.RandomPolicy, capacity=2, when=[Every(100)], board=board, folder="pool")
    mapping = SelfPlayMapping(pool, envs.agents, {"main": Latest()})
    collector = marlvec.Collector(envs, {"main": marlvec.RandomPolicy()}, mapping, callbacks=[board], seed=0)
    for _ in range(6):
        collector.collect(env_steps=200)
        if pool.offer(collector, "main"):
            mapping.update(collector)
    assert len(pool) == 2
""",
    "external": """
import threading
from gymnasium.spaces import Box, Discrete
from marlvec import external
with external.make({"a": (Box(-1, 1, (2,)), Discrete(3))}, 2, batch_wait=0.0) as envs, external.Server(envs) as server:
    collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0)
    def play():
        with external.Client(server.url) as client:
            for _ in range(5):
                episode = client.start_episode()
                for n in range(4):
                    client.get_action(episode, np.zeros(2, np.float32))
                    client.log_returns(episode, 1.0)
                client.end_episode(episode, np.zeros(2, np.float32))
    threads = [threading.Thread(target=play) for _ in range(2)]
    for thread in threads:
        thread.start()
    batch = collector.collect(env_steps=40)
    assert len(batch["main"]) == 40
    for thread in threads:
        thread.join()
with open("token", "w") as file:
    file.write(external.make_token())
assert external.find_token("token")
""",
    "interop": """
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.interop.pettingzoo import AECView, ParallelView
from marlvec.interop.sb3 import SB3VecEnv
from stable_baselines3 import PPO
view = SB3VecEnv(marlvec.make("simple_spread", num_envs=2))
PPO("MlpPolicy", view, n_steps=8, batch_size=8, n_epochs=1).learn(48)
view.close()
views = GymnasiumVectorEnv(marlvec.make("CartPole-v1", num_envs=2))
views.reset(seed=0)
views.step(views.action_space.sample())
views.close()
""",
    "command line": """
from typer.testing import CliRunner
from marlvec.cli.app import app
for command in (
    "envs",
    "check simple_spread",
    "rollout simple_spread --num-envs 2 --env-steps 200",
    "rollout connect_four --backend native --env-steps 200",
    "bench simple_spread --num-envs 2 --seconds 0.05",
    "arena tictactoe random other=random --games 20",
):
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, (command, result.output, result.exception)
""",
}


@pytest.mark.slow("starts programs of its own")
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_where_windows_has_gaps(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[name])
    harness = [] if sys.platform == "win32" else [str(HARNESS)]
    ran = subprocess.run(
        [sys.executable, *harness, str(script)],
        env=os.environ | ({} if sys.platform == "win32" else {"PYTHONPATH": str(ROOT)}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
