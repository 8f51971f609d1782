"""Scripts of examples/ train, shorter than they stand: they learn, and go on from a checkpoint to the same numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv
from typer.testing import CliRunner

import marlvec
from marlvec.cli import app
from tests.examples.scripts import EXAMPLES, checkpoint, learned, run

pytest.importorskip("torch", reason="torch is not installed, and `run` looks after its seed")

# --- Scripts that learn by PPO: they do learn, and after a break a training comes to the same numbers as without one


PPO_SCRIPTS = ["ppo_simple_spread", "mappo_simple_tag", "mappo_rware", "ippo_foraging"]
SMALL = ("--num-envs", 16, "--games", 16, "--seed", 3, "--track")
UPDATE = 16 * 25  # env steps
MORE = {"ippo_foraging": ("--num-steps", 25), "mappo_rware": ("--num-steps", 25)}


@pytest.mark.slow("trains")
def test_agents_learn_to_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        "ppo_simple_spread",
        "--total-timesteps",
        19_200,
        "--games",
        500,
        "--backend",
        "native",
        "--checkpoint",
        tmp_path,
    )
    found = re.search(r"team return \(sum over agents\): (\S+) at random, (\S+) trained", capsys.readouterr().out)
    assert found
    random, trained = map(float, found.groups())
    assert -82 < random < -76
    assert trained > 0.88 * random  # seeds 0 to 4 come to 0.81, 0.80, 0.76, 0.74, 0.77 of it


@pytest.mark.slow("trains")
def test_hunters_learn_to_catch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--games", 300, "--backend", "native", "--checkpoint", tmp_path, "--video")
    run("mappo_simple_tag", "--total-timesteps", 25_600, *options)
    assert len(list(tmp_path.glob("*.gif"))) == 4
    said = re.findall(r"(\w+) and +(\w+): (\S+) touches", capsys.readouterr().out)
    touches = {(hunters, prey): float(number) for hunters, prey, number in said}
    assert 0.3 < touches["random_hunters", "random_prey"] < 0.7
    # Seeds 0 to 4 come to 3.9, 5.1, 6.0, 3.7, 4.2 times as many. What prey learns takes longer to show.
    assert touches["hunters", "random_prey"] > 2 * touches["random_hunters", "random_prey"]


@pytest.mark.slow("trains")
def test_players_learn_to_forage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    field = ("--env", "lbf/Foraging-5x5-2p-1f-v3", "--num-envs", 64, "--games", 300, "--backend", "native")
    run("ippo_foraging", "--total-timesteps", 64_000, *field, "--checkpoint", tmp_path)
    found = re.search(r"team return \(all foods: 1\): (\S+) at random, (\S+) trained", capsys.readouterr().out)
    assert found
    random, trained = map(float, found.groups())
    assert 0.4 < random < 0.55
    assert trained > 1.6 * random  # seeds 0 to 4 come to 2.1, 2.1, 2.0, 2.1, 2.2 of it


@pytest.mark.slow("trains")
def test_robots_learn_to_deliver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="compiled envs need it")
    easy = ("--env", "rware/rware-tiny-4ag-easy-v2", "--num-envs", 32, "--games", 64, "--backend", "native")
    run("mappo_rware", "--total-timesteps", 200_000, *easy, "--checkpoint", tmp_path)
    found = re.search(r"deliveries an episode: (\S+) at random, (\S+) trained", capsys.readouterr().out)
    assert found
    random, trained = map(float, found.groups())
    assert 0.1 < random < 0.5
    assert trained > 1.5 * random  # seed 0 comes to 3 times as many


# --- Scripts that learn from a replay memory


OFF_POLICY = [
    ("qmix_simple_spread", ("--mixer", "vdn", "--total-timesteps", 16_000)),
    ("qmix_simple_spread", ("--mixer", "qmix", "--total-timesteps", 32_000)),
    ("maddpg_simple_spread", ("--total-timesteps", 16_000)),
]


@pytest.mark.slow("trains")
@pytest.mark.time_limit(600)  # some thousand updates
@pytest.mark.parametrize(("script", "options"), OFF_POLICY, ids=["vdn", "qmix", "maddpg"])
def test_agents_learn_to_spread_from_a_replay_memory(
    script: str, options: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba", reason="compiled envs need it")
    kept = tmp_path / "kept"
    run(script, *options, "--num-envs", 16, "--games", 300, "--backend", "native", "--track", "--checkpoint", kept)
    found = re.search(
        r"team return \(sum over agents\): (\S+) at random, (\S+) (?:by|trained)", capsys.readouterr().out
    )
    assert found
    random, trained = map(float, found.groups())
    assert trained > 0.88 * random
    assert list((kept / "logs").iterdir())


class Forbidding(ParallelEnv):  # type: ignore[misc]
    """Two agents choose among three actions, of which infos forbid the last in every other step."""

    metadata: ClassVar[dict[str, Any]] = {"name": "forbidding"}
    possible_agents: ClassVar[list[str]] = ["left", "right"]
    state_space = observation = Box(0.0, 9.0, (1,), np.float32)

    def observation_space(self, agent: str) -> Box:
        return self.observation

    def action_space(self, agent: str) -> Discrete:
        return Discrete(3)

    def state(self) -> np.ndarray:
        return np.array([self.t], np.float32)

    def outcome(self) -> tuple[dict[str, Any], dict[str, Any]]:
        infos = {agent: {"action_mask": np.array([1, 1, self.t % 2], np.int8)} for agent in self.possible_agents}
        return dict.fromkeys(self.possible_agents, self.state()), infos

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.agents, self.t = list(self.possible_agents), 0
        return self.outcome()

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        assert self.t % 2 or 2 not in actions.values(), "a forbidden action"
        self.t += 1
        obs, infos = self.outcome()
        ends = self.t == 8
        rewards, flags = dict.fromkeys(self.agents, 1.0), dict.fromkeys(self.agents, ends)
        self.agents = [] if ends else self.agents
        return obs, rewards, flags, dict.fromkeys(rewards, False), infos


@pytest.mark.slow("trains")
@pytest.mark.parametrize("mixer", ["qmix", "vdn"])
def test_value_decomposition_stays_within_masks(mixer: str, tmp_path: Path) -> None:
    marlvec.register("tests/forbidding", Forbidding, overwrite=True)
    options = ("--env", "tests/forbidding", "--backend", "sync", "--num-envs", 2, "--games", 4, "--mixer", mixer)
    run("qmix_simple_spread", "--total-timesteps", 200, *options, "--checkpoint", tmp_path)
    memory = marlvec.load_checkpoint(tmp_path)["memory"]
    allowed = memory["next_action_mask"][:200]
    assert allowed[..., :2].all()
    ends = memory["terminated"][:200]
    odd = memory["next_obs"][:200, :, 0] % 2 == 1  # then an AgentIndicator's two columns
    assert (allowed[..., 2] == (odd | ends)).all()


# --- PPO again: a training that goes on, and other backends


@pytest.mark.slow("trains")
@pytest.mark.parametrize(
    ("script", "backend"),
    [
        ("ppo_simple_spread", "native"),
        ("ppo_simple_spread", "sync"),
        ("mappo_simple_tag", "native"),
        ("ippo_foraging", "native"),
        ("mappo_rware", "native"),
    ],
)
def test_a_training_that_goes_on_comes_to_the_same_numbers(script: str, backend: str, tmp_path: Path) -> None:
    through, parts = tmp_path / "through", tmp_path / "parts"
    where = (*SMALL, *MORE.get(script, ()), "--backend", backend)
    run(script, *where, "--total-timesteps", 3 * UPDATE, "--checkpoint", through)
    run(script, *where, "--total-timesteps", 2 * UPDATE, "--checkpoint", parts)
    assert checkpoint(parts) != checkpoint(through)
    run(script, *where, "--total-timesteps", 3 * UPDATE, "--checkpoint", parts, "--resume")
    assert checkpoint(parts) == checkpoint(through)
    assert checkpoint(parts)["progress"]["done"] == 3 * UPDATE
    assert len(list((parts / "logs").iterdir())) == 2  # TensorBoard reads both as one curve
    assert list(parts.glob("*.png"))


@pytest.mark.slow("trains")
@pytest.mark.time_limit(600)  # two trainings
@pytest.mark.parametrize("script", PPO_SCRIPTS)
def test_every_backend_comes_to_the_same_numbers(script: str, tmp_path: Path) -> None:
    if script == "ippo_foraging":
        pytest.importorskip("lbforaging", reason="the extra `lbf` is not installed")
    if script == "mappo_rware":
        pytest.importorskip("rware", reason="the extra `rware` is not installed")
    small = (*SMALL, *MORE.get(script, ()), "--total-timesteps", 2 * UPDATE)
    for backend in ("native", "sync"):
        run(script, *small, "--checkpoint", tmp_path / backend, "--backend", backend)
    assert learned(tmp_path / "native") == learned(tmp_path / "sync")


@pytest.mark.slow("trains")
def test_many_collectors_go_on_to_the_same_numbers(tmp_path: Path) -> None:
    """Also their envs, what their connectors have learnt, and metrics."""
    pytest.importorskip("numba", reason="the Python env of simple_spread has no state: new episodes would begin")
    through, parts = tmp_path / "through", tmp_path / "parts"
    flags = ("--num-envs", 4, "--backend", "sync", "--apart", "--seed", 3)
    run("ippo_many_machines", *flags, "--total-timesteps", 600, "--checkpoint", through)
    run("ippo_many_machines", *flags, "--total-timesteps", 400, "--checkpoint", parts)
    run("ippo_many_machines", *flags, "--total-timesteps", 600, "--checkpoint", parts, "--resume")
    assert checkpoint(parts)["learner"] == checkpoint(through)["learner"]
    progress = checkpoint(parts)["progress"]
    assert progress["curve"] == checkpoint(through)["progress"]["curve"]
    assert len(progress["curve"]) == 3
    assert set(checkpoint(parts)["learner"]) == {f"{what}policy_{i}" for what in ("", "adam_") for i in range(3)}


# --- Scripts written for the envs of other libraries, on views of marlvec: they run as they stand, and they learn


@pytest.mark.checklist(125)
@pytest.mark.slow("trains")
@pytest.mark.parametrize(
    ("script", "amount", "gain"),
    [("gymnasium_wrappers", ("--total-timesteps", 144_000), 2), ("cleanrl_ppo", ("--total-timesteps", 57_600), 1)],
)
def test_agents_learn_to_spread_in_a_view(
    script: str, amount: tuple[str, int], gain: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba", reason="native worlds need numba")
    run(script, *amount, "--backend", "native", "--checkpoint", tmp_path)
    found = re.match(r"mean return per agent: random (\S+), after .* (\S+)\nwrote last.npz, ", capsys.readouterr().out)
    assert found
    random, learned = map(float, found.groups())
    assert -28.5 < random < -25
    assert learned > random + gain
    assert (tmp_path / "return.png").stat().st_size > 5_000


@pytest.mark.checklist(125)
@pytest.mark.slow("trains")
def test_pettingzoo_q_learning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("pettingzoo_q_learning", "--total-timesteps", 9_600, "--test-games", 100, "--checkpoint", tmp_path)
    found = re.search(r"lost against random moves: (\d+)% before, (\d+)% after 96\d\d moves", capsys.readouterr().out)
    assert found
    before, after = map(int, found.groups())
    assert 30 < before < 60
    assert after < before - 10
    assert (tmp_path / "lost.png").stat().st_size > 5_000


# --- The scripts of self-play train, short of what they do as they stand: what they learn, and that they go on


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path) -> Run:
    """Run an example that keeps what it found; how far it came."""
    for library in ("tensorboard", "matplotlib", "numba"):
        pytest.importorskip(library)

    def train(name: str, *args: str) -> dict[str, Any]:
        folder = tmp_path / "kept"
        run(name, "--checkpoint", folder, "--track", *args)
        found: dict[str, Any] = checkpoint(folder)["progress"]
        return found

    return train


def steps_of(folder: Path) -> list[int]:
    """Env steps at which there is something in TensorBoard's logs, file by file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = sorted(folder.iterdir())
    events = [Event.FromString(raw) for path in files for raw in RawEventFileLoader(str(path)).Load()]
    return [event.step for event in events if event.HasField("summary")]


@pytest.mark.slow("trains")
@pytest.mark.time_limit(600)  # a whole training
def test_connect_four_is_learned(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--num-envs", "128", "--snapshot-every", "16384")
    name, kept = "selfplay_connect_four", tmp_path / "kept"
    first = train(name, *short, "--total-timesteps", "8192", "--games", "20")
    assert first["done"] == 8192
    before = checkpoint(kept)
    with pytest.raises(SystemExit):  # it does not write over what there is
        train(name, *short, "--total-timesteps", "8192")
    assert "--resume goes on with the run in" in capsys.readouterr().err
    found = train(name, *short, "--total-timesteps", "28672", "--games", "60", "--resume")
    assert found["done"] == 28672
    assert [step for step, _ in found["curve"]] == [8192, 16384, 28672], "where it became an opponent, and in the end"
    assert steps_of(kept / "logs") == list(range(4096, 28673, 4096))
    after = checkpoint(kept)
    assert after["learner"].keys() == before["learner"].keys() == {"optimizer"}
    others = [who for who, _ in after["collector"]["whole"]["others"]]
    assert any("RatingTracker" in who for who in others), "ratings go on with the collector"
    assert after["collector"] != before["collector"]
    assert (kept / "best.npz").exists()
    assert (kept / "connect_four.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    (*_, rate) = re.findall(r"against random: (\d\d\.\d)% \[", printed)
    assert float(rate) > 60, "who knows nothing wins half of its games"
    # A person can play against what it has kept.
    policy = f"{EXAMPLES / name}.py:LEAGUE@{kept / 'pool'}/main_0"
    command = ["play", "connect_four", "--policy", policy, "--agent", "player_1", "--games", "1"]
    result = CliRunner().invoke(app, command, input="4\n" * 3 + "1\n2\n3\n5\n6\n7\n" * 6, prog_name="marlvec")
    assert result.exit_code == 0, result.output
    assert re.search(r"main_0 plays \d", result.stdout)
    assert re.search(r"games won \d, drawn \d, lost \d", result.stdout)


@pytest.mark.slow("trains")
@pytest.mark.parametrize("name", ["selfplay_connect_four", "selfplay_kuhn"])
def test_a_batch_of_one_step_has_no_decision_of_the_learner_and_ends_well(name: str, train: Run) -> None:
    assert train(name, "--num-envs", "64", "--total-timesteps", "1", "--games", "2")["done"] == 1


@pytest.mark.slow("trains")
def test_kuhn_poker_runs_to_its_end_without_openspiel(
    train: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    found = train("selfplay_kuhn", "--num-envs", "64", "--snapshots", "2", "--games", "2", "--total-timesteps", "8192")
    assert found["done"] == 8192
    *_, advice, last = capsys.readouterr().out.splitlines()
    assert "pip install 'marlvec[openspiel]'" in advice
    assert last == f"wrote last.npz, pool, kuhn.png, logs into {tmp_path / 'kept'}"


@pytest.mark.slow("trains")
def test_kuhn_poker_is_learned(train: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyspiel", reason="OpenSpiel says how far from perfect it is")
    short = ("--batch", "2048", "--num-envs", "512", "--snapshots", "5", "--games", "10")
    first = train("selfplay_kuhn", *short, "--total-timesteps", "8192")
    assert first["done"] == 8192
    found = train("selfplay_kuhn", *short, "--total-timesteps", "32768", "--resume")
    assert found["done"] == 32768
    *_, average = found["curve"][-1]
    assert average < 0.25, "0.458 is who plays at random"
    steps = steps_of(tmp_path / "kept" / "logs")
    assert steps == list(range(2048, 32769, 2048))
    assert (tmp_path / "kept" / "kuhn.png").read_bytes().startswith(b"\x89PNG")


# --- Examples that learn from recordings, as short as they learn something


@pytest.mark.slow("trains")
def test_a_net_learns_what_a_recorded_policy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "numba", "pyarrow"):
        pytest.importorskip(library, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    run("bc_simple_spread", "--seed", 1, "--total-timesteps", 20_000, "--epochs", 8, "--games", 200)
    said = capsys.readouterr().out
    assert "main: 60,000 rows" in said
    random, recorded, cloned = map(float, re.findall(r"(?:random|recorded|cloned) (-[\d.]+)", said))
    assert random < recorded
    assert recorded / cloned >= 0.9  # both are below 0
    assert (cloned - random) / (recorded - random) >= 0.9
    run("bc_simple_spread", "--seed", 1, "--epochs", 1, "--games", 8)  # with the recording that is there
    assert "main: 60,000 rows" in capsys.readouterr().out


@pytest.mark.slow("trains")
def test_what_is_learned_offline_is_better_than_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "numba", "pyarrow"):
        pytest.importorskip(library, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    run("iql_simple_spread", "--seed", 1, "--total-timesteps", 40_000, "--games", 200)
    random, recorded, learned = map(
        float, re.findall(r"(?:random|recorded|learned) (-[\d.]+)", capsys.readouterr().out)
    )
    assert random < recorded < learned
    assert learned - recorded > 0.4 * (recorded - random)


# --- Scripts that are stopped at some checkpoint and go on from it come to the numbers of one that was never stopped


STOPPED: dict[str, tuple[str, tuple[object, ...]]] = {
    "cleanrl_ppo": ("native", ("--total-timesteps", 4_800, "--num-envs", 8)),
    "cleanrl_ppo, Python envs": ("sync", ("--total-timesteps", 2_400, "--num-envs", 4)),
    "gymnasium_wrappers": ("native", ("--total-timesteps", 1_600, "--num-envs", 16)),
    "selfplay_connect_four": (
        "native",
        ("--total-timesteps", 8_500, "--num-envs", 64, "--snapshot-every", 3_000, "--games", 2),
    ),
    "selfplay_kuhn": (
        "native",
        ("--total-timesteps", 2_048, "--num-envs", 32, "--batch", 256, "--snapshots", 6, "--games", 2),
    ),
    "pettingzoo_q_learning": ("", ("--total-timesteps", 480, "--test-games", 4)),
    "maddpg_simple_spread": (
        "native",
        ("--total-timesteps", 404, "--num-envs", 1, "--memory", 300, "--games", 4),
    ),
    "qmix_simple_spread": (
        "native",
        ("--total-timesteps", 804, "--num-envs", 1, "--memory", 600, "--games", 4),
    ),
    "qmix_simple_spread, VDN, Python envs": (
        "sync",
        ("--mixer", "vdn", "--total-timesteps", 804, "--num-envs", 1, "--memory", 600, "--games", 4),
    ),
}


def run_until(number: int, monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    """Run a script that is stopped right after it has written so many checkpoints."""
    save, left = marlvec.save_checkpoint, number

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        path = save(*args, **kwargs)
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return path

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(marlvec, "save_checkpoint", stopping)
        run(name, *arguments)


@pytest.mark.slow("trains")
@pytest.mark.parametrize("script", STOPPED)
def test_a_stopped_script_goes_on_bit_by_bit(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="scripts draw what they have learned")
    backend, arguments = STOPPED[script]
    name = script.partition(",")[0]
    if backend:
        arguments = (*arguments, "--backend", backend)
    if backend == "native":
        pytest.importorskip("numba", reason="compiled envs need it")
    if name == "pettingzoo_q_learning":
        pytest.importorskip("pygame", exc_type=ImportError)
    through, parts = tmp_path / "through", tmp_path / "parts"
    run(name, *arguments, "--checkpoint", through)
    run_until(2, monkeypatch, name, *arguments, "--checkpoint", parts)
    assert checkpoint(parts) != checkpoint(through)
    run(name, *arguments, "--checkpoint", parts, "--resume")
    assert checkpoint(parts) == checkpoint(through)
