"""``marlvec serve``: a trained policy, with what its connectors had learned, answers in another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import marlvec
from marlvec.cli import app
from marlvec.connectors import AgentPipeline, ClipObs, FlattenObs, NormalizeObs, Rows
from marlvec.errors import CheckpointError, ContractError, RefusedError
from marlvec.external import Client, make_token
from marlvec.policies import FunctionPolicy, Policy, load_policy, save_policy
from marlvec.selfplay import OpponentPool

ROOT = Path(__file__).resolve().parents[2]
PLAYERS = '''
import numpy as np
from marlvec import Policy

class Learner(Policy):
    """Does what its one number and the observation say."""

    number = np.array(0)

    def act(self, rows, *, explore=True):
        return (np.abs(np.floor(rows["obs"].sum(axis=1) * 997)).astype(np.int64) + self.number + 2 * explore) % 5

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@contextmanager
def serving(*arguments: str, **environ: str) -> Iterator[str]:
    """The command in a process of its own; gives the url, and sees that Ctrl-C ends it well."""
    with saying(*arguments, **environ) as (url, _):
        yield url


@contextmanager
def saying(*arguments: str, **environ: str) -> Iterator[tuple[str, list[str]]]:
    """The same; beside the url, a list of what else it has said, once it is over."""
    said: list[str] = []
    command = [sys.executable, "-m", "marlvec.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert " at ws://" in line, line + process.stderr.read()
        yield line.split(" at ")[1].split(";")[0], said
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler says where it is
            pytest.fail(f"Ctrl-C has not ended it:\n{process.stderr.read()}")
        # Not by communicate(), which passes over what came with the first line and is in the file's buffer.
        rest = process.stderr.read()
        assert process.returncode == 0
        assert "Traceback" not in rest
        said += rest.splitlines()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def learner(number: int) -> Policy:
    namespace: dict[str, type[Policy]] = {}
    exec(PLAYERS, namespace)
    policy = namespace["Learner"]()
    policy.load_state_dict({"number": np.array(number)})
    policy.version = 12
    return policy


@pytest.mark.slow("runs commands as programs")
def test_served_policy_uses_its_learned_connectors(tmp_path: Path) -> None:
    policy = learner(3)
    with marlvec.make("simple_spread", 2, backend="sync") as envs:
        trained = marlvec.Collector(envs, policy, agent_connectors=[FlattenObs(), NormalizeObs()], seed=0)
        trained.collect(50)
        chain = trained.eval().agent_connectors["main"]
        save_policy("learned.npz", policy, chain, trained.action_connectors["main"])
        obs, _ = envs.reset(seed=5)
        chain.reset()
        wanted = policy.act(chain(rows_of(obs[0])), explore=False)
    assert load_policy("learned.npz").version == 12
    token = make_token()
    options = ("simple_spread", "--policy", "main=players.py:Learner@learned.npz", "--num-envs", "3")
    with serving(*options, "--connectors", "FlattenObs, NormalizeObs", MARLVEC_TOKEN=token) as url:
        with pytest.raises(RefusedError, match="token"):
            Client(url)
        with Client(url, token=token, timeout=60) as client:
            episode = client.start_episode()
            seen = dict(zip(client.agents, obs[0], strict=True))
            actions = client.get_action(episode, seen)
            assert [int(actions[name]) for name in client.agents] == wanted.tolist()
            client.end_episode(episode)
            episode = client.start_episode()
            client.log_action(episode, seen, actions)  # a person's moves, say
            client.get_action(episode, seen)
            client.end_episode(episode)


@pytest.mark.slow("runs commands as programs")
def test_logged_actions_raise_if_action_connectors_change_the_space() -> None:
    options = ("simple_spread", "--set", "continuous_actions=true")
    with serving(*options) as url, Client(url, timeout=60) as client:
        episode = client.start_episode()
        seen = {name: np.zeros(18, np.float32) for name in client.agents}
        actions = client.get_action(episode, seen)
        assert all(((action >= 0) & (action <= 1)).all() for action in actions.values())
        client.log_action(episode, seen, actions)
        with pytest.raises(ContractError, match="accepts no logged actions"):
            client.end_episode(episode)


@pytest.mark.slow("runs commands as programs")
def test_an_opponent_of_a_pool_answers_with_the_connectors_it_was_kept_with(tmp_path: Path) -> None:
    pool = OpponentPool(lambda: learner(0), folder=tmp_path / "pool")
    for number in (1, 3):
        pool.add(f"old_{number}", learner(number), agent_connectors=AgentPipeline([FlattenObs(), ClipObs(-0.5, 0.5)]))
    obs = np.linspace(-1, 1, 54, dtype=np.float32).reshape(3, 18)
    clipped = Rows({"obs": obs.clip(-0.5, 0.5)})
    for path, number in ((tmp_path / "pool", 3), (tmp_path / "pool" / "old_1", 1)):
        options = ("simple_spread", "--policy", f"players.py:Learner@{path}")
        with serving(*options) as url, Client(url, timeout=60) as client:
            episode = client.start_episode()
            actions = client.get_action(episode, dict(zip(client.agents, obs, strict=True)))
            client.end_episode(episode)
        assert [int(action) for action in actions.values()] == learner(number).act(clipped, explore=False).tolist()


def rows_of(obs: Any) -> Rows:
    """First rows of one episode, one for each agent."""
    n = len(obs)
    none, yes = np.zeros(n, np.int64), np.ones(n, np.bool_)
    columns = {"env_id": none, "agent_index": np.arange(n), "eps_id": none, "t": none, "obs": obs, "first": yes}
    return Rows({**columns, "rewards": np.zeros(n), "last": ~yes, "terminated": ~yes, "truncated": ~yes})


@pytest.mark.slow("runs commands as programs")
@pytest.mark.parametrize(
    ("options", "token", "line"),
    [
        ((), None, "no token: any program on this machine may connect; set MARLVEC_TOKEN or --token-file to"),
        (("--no-token",), make_token(), "no token: any program on this machine may connect"),
        (
            ("--host", "0.0.0.0", "--allow-remote", "--no-token"),
            None,
            "no token: any client that can reach 0.0.0.0 may connect",
        ),
        (("--host", "0.0.0.0", "--allow-remote"), make_token(), None),
    ],
    ids=["here", "here, as asked", "anywhere, as asked", "with a token"],
)
def test_who_may_come_in_is_said_where_no_token_is_asked_for(
    options: tuple[str, ...], token: str | None, line: str | None
) -> None:
    environ = {} if token is None else {"MARLVEC_TOKEN": token}
    with saying("simple_spread", "--num-envs", "1", *options, **environ) as (url, said):
        asked_for = None if line is not None else token
        with Client(url.replace("0.0.0.0", "127.0.0.1"), token=asked_for, timeout=60) as client:
            episode = client.start_episode()
            client.get_action(episode, {name: np.zeros(18, np.float32) for name in client.agents})
            client.end_episode(episode)
    assert [text for text in said if "no token" in text] == said
    assert len(said) == (line is not None)
    assert line is None or said[0].startswith(line)


def test_wrong_command_lines_are_reported(tmp_path: Path) -> None:
    save_policy("other.npz", FunctionPolicy(len))
    Path("junk.npz").write_bytes(b"junk")
    env = ("simple_spread",)
    for arguments, code, what in (
        ((), 2, "missing argument 'ENV', e.g. `root serve simple_spread`"),
        (
            (*env, "--policy", "players.py:Learner@none.npz"),
            2,
            "expected a file of save_policy() or a pool, found none at none.npz",
        ),
        ((*env, "--policy", "players.py:Learner@junk.npz"), 2, "junk.npz"),
        ((*env, "--policy", "players.py:Learner@other.npz"), 2, "does not fit policy 'Learner'"),
        ((*env, "--host", "0.0.0.0"), 2, "say allow_remote=True (--allow-remote) and give a token"),
        ((*env, "--host", "0.0.0.0", "--no-token"), 2, "say allow_remote=True (--allow-remote)"),
        ((*env, "--host", "0.0.0.0", "--allow-remote"), 2, "from MARLVEC_TOKEN or --token-file), or say"),
        ((*env, "--host", "0.0.0.0", "--allow-remote"), 2, "allow_no_token=True (--no-token)"),
        ((*env, "--no-token", "--token-file", "players.py"), 2, "--no-token and --token-file: expected only one"),
        ((*env, "--token-file", "players.py"), 2, "token file players.py"),
        (("nothing_such",), 2, "nothing_such"),
    ):
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == code, result.output
        assert what in " ".join(result.output.split())
    with pytest.raises(CheckpointError, match="holds no policy"):
        from marlvec.serialization.archive import write_archive

        write_archive("empty.npz", {})
        load_policy("empty.npz")
