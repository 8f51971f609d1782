"""``marlvec serve``: a trained policy answers in another process, a client in Python or in a page's JavaScript."""

from __future__ import annotations

import json
import os
import shutil
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
from marlvec.connectors import (
    ActionPipeline,
    AgentPipeline,
    ClipObs,
    FlattenObs,
    FrameStack,
    NormalizeObs,
    RnnState,
    Rows,
    agent_connector,
)
from marlvec.errors import ArgumentError, CheckpointError, ContractError, RefusedError, SerialisationError
from marlvec.external import Client, make_token
from marlvec.policies import FunctionPolicy, Policy, load_policy, save_policy
from marlvec.selfplay import Opponent, OpponentPool
from marlvec.serialization.archive import write_archive
from tests.external.served import expected, obs_of, served
from tests.vector.support.reference import refused

# --- ``marlvec serve``: a trained policy, with what its connectors had learned, answers in another process


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
RECURRENT = '''
import numpy as np
from marlvec import Policy

class Recurrent(Policy):
    """Does what its weights, the observation and its state after the agent's last row say."""

    def __init__(self, size):
        self.weights = np.zeros((size, 8))

    def act(self, rows, *, explore=True):
        state = np.tanh(0.7 * rows["state_in"] + rows["obs"] @ self.weights)
        return np.abs(np.floor(state.sum(axis=1) * 997)).astype(np.int64) % 5, {"state_out": state}

    def state_dict(self):
        return {"weights": self.weights.copy()}

    def load_state_dict(self, state):
        self.weights = state["weights"].copy()

def make():
    return Recurrent(54)

built = make()
LEAGUE = {"main": make, "other": lambda: Recurrent(3)}
'''
OWN = '''
from marlvec.connectors import AgentConnector, register_connector
from recurrent import make

@register_connector
class Halve(AgentConnector):
    """A connector of one's own."""

    def __call__(self, rows):
        return rows.replace(obs=rows["obs"] / 2)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    (tmp_path / "recurrent.py").write_text(RECURRENT, encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
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
        refused(RefusedError, "token", Client, url)
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
        refused(ContractError, "accepts no logged actions", client.end_episode, episode)


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


def rows_of(obs: Any, t: int = 0) -> Rows:
    """Rows of one episode, one for each agent."""
    n = len(obs)
    none, first = np.zeros(n, np.int64), np.full(n, t == 0)
    columns = {"env_id": none, "agent_index": np.arange(n), "eps_id": none, "t": none + t, "obs": obs, "first": first}
    no = np.zeros(n, np.bool_)
    return Rows({**columns, "rewards": np.zeros(n), "last": no, "terminated": no, "truncated": no})


def save_recurrent(path: str, *own: Any) -> list[list[int]]:
    """Save a recurrent policy behind connectors that remember and have statistics; its answers to `seen`."""
    namespace: dict[str, Any] = {"__name__": "recurrent"}
    exec(RECURRENT, namespace)
    policy = namespace["make"]()
    policy.load_state_dict({"weights": np.random.default_rng(1).normal(size=(54, 8))})
    policy.version = 7
    with marlvec.make("simple_spread", 3, backend="sync") as envs:
        pieces = [NormalizeObs(), *own, FrameStack(3), FlattenObs(), RnnState(np.zeros(8))]
        collector = marlvec.Collector(envs, policy, agent_connectors=pieces, seed=0)
        collector.collect(40)  # in the middle of episodes
        chain = collector.agent_connectors["main"]
        save_policy(path, policy, chain, collector.action_connectors["main"])
        chain.eval().reset()
        answers = []
        for t, obs in enumerate(seen()):
            rows = chain(rows_of(obs, t))
            actions, columns = policy.act(rows, explore=False)
            chain.on_policy_output(rows.replace(actions=actions, **columns))
            answers.append(actions.tolist())
    assert len({tuple(answer) for answer in answers}) > 3
    return answers


def seen() -> Any:
    return np.random.default_rng(2).normal(size=(6, 3, 18)).astype(np.float32)


def served_answers(policy: str, *options: str) -> list[list[int]]:
    """The answers of ``marlvec serve`` to `seen`, in two episodes."""
    with serving("simple_spread", "--policy", policy, *options) as url, Client(url, timeout=60) as client:
        twice = []
        for _ in range(2):
            episode, answers = client.start_episode(), []
            for obs in seen():
                actions = client.get_action(episode, dict(zip(client.agents, obs, strict=True)))
                answers.append([int(actions[name]) for name in client.agents])
            client.end_episode(episode)
            twice.append(answers)
    assert twice[0] == twice[1]
    return twice[0]


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize(
    ("what", "connectors"),
    [
        ("recurrent.py:make", ""),
        ("recurrent.py:built", ""),
        ("main=recurrent.py:LEAGUE", "NormalizeObs, FrameStack(3), FlattenObs, RnnState(np.zeros(8))"),
        ("main=recurrent.py:make", "main=NormalizeObs, FrameStack(3), FlattenObs, RnnState(initial=np.array([0.0]*8))"),
    ],
)
def test_recurrent_policy_is_served_from_its_one_file(what: str, connectors: str) -> None:
    wanted = save_recurrent("mine.npz")
    assert served_answers(f"{what}@mine.npz", *(("--connectors", connectors) if connectors else ())) == wanted


@pytest.mark.slow("runs commands as programs")
def test_connectors_of_ones_own_are_served_from_the_file_too() -> None:
    @agent_connector
    def halve(rows: Rows) -> Rows:
        return rows

    refused(SerialisationError, "@register_function", save_policy, "mine.npz", learner(0), AgentPipeline([halve]))
    assert not Path("mine.npz").exists()
    script = """
from pathlib import Path
from marlvec.envs.recipes import load_file
from tests.cli.test_serve import save_recurrent
print(save_recurrent("mine.npz", load_file(Path("own.py")).Halve()))
"""
    command = [sys.executable, "-c", script]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    saved = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert served_answers("own.py:make@mine.npz") == json.loads(saved.stdout)


def test_file_of_a_policy_has_its_connectors_whole() -> None:
    save_recurrent("mine.npz")
    chain, acting = AgentPipeline.load("mine.npz"), ActionPipeline.load("mine.npz")
    assert [type(piece) for piece in chain] == [NormalizeObs, FrameStack, FlattenObs, RnnState]
    assert chain.training
    state = load_policy("mine.npz").agent_connectors
    assert state is not None
    np.testing.assert_equal(chain.state_dict(), dict(state))
    assert list(acting.names) == list(ActionPipeline.default().names)
    opponent = Opponent.from_file("mine.npz", lambda: learner(0))
    assert (opponent.opponent_id, opponent.read()[1]) == ("mine", 7)
    assert not opponent.agent_connectors().training
    chain.restore("mine.npz")
    save_policy("alone.npz", learner(2))
    refused(CheckpointError, "alone.npz", AgentPipeline.load, "alone.npz")
    assert len(Opponent.from_file("alone.npz", lambda: learner(0)).agent_connectors()) == 0
    refused(ArgumentError, "make must be a function", Opponent.from_file, "alone.npz", learner(0))


def test_states_without_connectors_as_they_were_saved_before_are_readable_and_refused_for_serving() -> None:
    chain = AgentPipeline([ClipObs(-1, 1)])
    data = {"version": 3, "state": {"number": np.array(2)}, "agent_connectors": chain.state_dict()}
    write_archive("old.npz", data)
    found = load_policy("old.npz")
    assert (found.version, found.agent_connectors) == (3, chain.state_dict())
    result = CliRunner().invoke(app, ["serve", "simple_spread", "--policy", "players.py:Learner@old.npz"])
    assert result.exit_code == 2
    assert "holds a state of agent_connectors without their configuration" in result.output
    assert "save_policy() with them again" in " ".join(result.output.split())


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
    save_policy("clip.npz", learner(0), AgentPipeline([ClipObs(-1, 1)]))
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
        ((*env, "--policy", "recurrent.py:LEAGUE@other.npz"), 2, "choose which policy of ['main', 'other']"),
        ((*env, "--policy", "recurrent.py:np@other.npz"), 2, "must be a marlvec Policy, an object"),
        ((*env, "--policy", "recurrent.py:Recurrent@other.npz"), 2, "needs the arguments ['size']"),
        ((*env, "--policy", "players.py:Learner@clip.npz", "--connectors", "ClipObs(-2, 1)"), 2, "its own connectors"),
        ((*env, "--policy", "a=random", "--policy", "a=players.py:Learner@clip.npz"), 2, "two policies 'a'"),
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
        write_archive("empty.npz", {})
        load_policy("empty.npz")


# --- marlvec/cli/browser/marlvec.js in Node: it plays whole episodes, and says what to do without a WebSocket


CLIENT = Path(__file__).resolve().parents[2] / "marlvec" / "cli" / "browser" / "marlvec.js"
NODE = shutil.which("node")
PLAY = """
import { connect } from "%s";
const client = await connect("%s", { token: "%s", %s });
for (let k = 0; k < 5; k++) {
  const episode = await client.begin();
  const said = [];
  for (let n = 0; n < 4; n++) {
    const obs = [10 * k + n, 2 * (10 * k + n), 1];
    const { a, b } = await episode.step({ a: obs, b: obs }, { rewards: n ? { a: 1, b: 0 } : undefined });
    said.push(a, b);
  }
  await episode.end({ a: [0, 0, 1], b: [0, 0, 1] });
  console.log(said.join(" "));
}
await client.close();
"""
TOKEN = "0123456789" * 5


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    command = [NODE, *options, "--input-type=module", "-e", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def options_of_node() -> list[str]:
    assert NODE is not None
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return ["--experimental-websocket"] if int(version.lstrip("v").split(".")[0]) < 22 else []


@pytest.mark.skipif(NODE is None, reason="needs Node: apt-get install nodejs")
@pytest.mark.parametrize("given", [False, True])
def test_it_plays_whole_episodes(given: bool) -> None:
    """With Node's own WebSocket, and with a class that is given."""
    which = "WebSocket: class extends globalThis.WebSocket {}" if given else ""
    with served(server_options={"token": TOKEN}) as there:
        ran = run(PLAY % (CLIENT.as_uri(), there.url, TOKEN, which), *options_of_node())
    assert ran.returncode == 0, ran.stderr
    want = [[expected(obs_of(10 * k + n)) for n in range(4) for _ in "ab"] for k in range(5)]
    assert [[int(word) for word in line.split()] for line in ran.stdout.splitlines()] == want


@pytest.mark.skipif(NODE is None, reason="needs Node: apt-get install nodejs")
def test_without_a_websocket_it_says_how_to_get_one() -> None:
    script = PLAY % (CLIENT.as_uri(), "ws://127.0.0.1:9/", TOKEN, "")
    ran = run(f"delete globalThis.WebSocket; {script}")
    assert ran.returncode != 0
    assert "start Node 20 with --experimental-websocket" in ran.stderr
    assert "connect(url, { WebSocket })" in ran.stderr
