"""``marlvec record``, ``record-data`` and ``data``."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import marlvec
from marlvec.cli import app
from marlvec.envs import video
from marlvec.policies import save_policy
from marlvec.selfplay import OpponentPool
from tests.painter import frames_of, places_of, read
from tests.recording.runs import make_batch, write
from tests.vector.support.reference import refused

# --- ``marlvec record``, as somebody at a terminal meets it


ROOT = Path(__file__).resolve().parents[2]
PAINTER = "tests.painter:PainterEnv"
CARDS = '''
from marlvec import Policy
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from tests.painter import PainterEnv

class Masked(PainterEnv):
    """Allows the last action only."""

    def observation_space(self, agent):
        return Dict({"observation": super().observation_space(agent), "action_mask": Box(0, 1, (3,), np.int8)})

    def _observe(self):
        mask = np.array([0, 0, 1], np.int8)
        return {name: {"observation": obs, "action_mask": mask} for name, obs in super()._observe().items()}

    def step(self, actions):
        assert set(actions.values()) == {2}
        return super().step(actions)

class Shrinking(PainterEnv):
    def render(self):
        return super().render()[: 96 - 2 * self.t]

class Tired(PainterEnv):
    def step(self, actions):
        if self.t == 2:
            raise KeyboardInterrupt
        return super().step(actions)

class Steady(Policy):
    """Plays its one number."""

    number = np.array(0)

    def act(self, rows, *, explore=True):
        return np.full(len(rows), self.number)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]

class Noting(PainterEnv):
    """Writes down who did what."""

    def step(self, actions):
        with open("notes", "a") as notes:
            notes.write(f"{sorted(set(int(action) for action in actions.values()))}")
        return super().step(actions)

def one(rows):
    return np.ones(len(rows), np.int64)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with envs in it, to stand in; what the command does to this process is undone."""
    (tmp_path / "cards.py").write_text(CARDS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    yield tmp_path
    sys.modules.pop("cards", None)


def record(*args: str) -> Any:
    return CliRunner().invoke(app, ["record", *args], prog_name="marlvec")


def succeed(*args: str) -> str:
    result = record(*args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stderr) == (0, "")
    return str(result.stdout)


def refuse(*args: str, code: int = 2) -> str:
    result = record(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert not list(Path().glob("*.mp4*")), "nothing is left, under no name"
    return str(result.stderr)


@pytest.mark.mostly_slow("runs commands as programs", quick="each")
@pytest.mark.parametrize("suffix", ["mp4", "gif"])
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_every_episode_is_there_from_its_first_frame_to_its_last(suffix: str, backend: str) -> None:
    out = succeed(
        *(PAINTER, "-o", f"out.{suffix}", "--episodes", "3", "--set", "length=4", "--seed", "0", "--backend", backend)
    )
    assert places_of(Path(f"out.{suffix}")) == [(0, episode, t) for episode in range(3) for t in range(5)]
    assert "3 episodes of painter: 15 frames of 96 × 48 pixels, 0.6 s at 25 frames/s" in out
    assert f"Video: out.{suffix}" in out


def test_several_envs_stand_side_by_side_until_each_has_played_its_episodes() -> None:
    out = succeed(PAINTER, "-o", "out.mp4", "--episodes", "2", "--num-envs", "3", "--seed", "3")
    frames = frames_of(Path("out.mp4"))
    shown: list[list[tuple[int, int, int]]] = []
    for i in range(3):
        top, left = i // 2 * 48, i % 2 * 96
        shown.append([read(frame[top : top + 48, left : left + 96]) for frame in frames])
    assert all((frame[48:, 96:] < 30).all() for frame in frames), "the fourth cell is empty"
    lengths = []
    for i, places in enumerate(shown):
        changed = [place for k, place in enumerate(places) if k == 0 or place != places[k - 1]]
        ends = [max(t for _, episode, t in changed if episode == e) for e in range(2)]
        assert changed == [(i, e, t) for e in range(2) for t in range(ends[e] + 1)]
        lengths += ends
    assert len(set(lengths)) > 1, "episodes of unequal lengths are what this is about"
    listed = re.findall(r"in (\d+) steps", out)
    assert sorted(map(int, listed)) == sorted(lengths)


def test_a_seed_makes_the_same_film_and_a_limit_a_shorter_one() -> None:
    args = (PAINTER, "--episodes", "2", "--num-envs", "2")
    first, second = (succeed(*args, "-o", name, "--seed", "5").replace(name, "") for name in ("one.mp4", "two.mp4"))
    assert first == second
    assert Path("one.mp4").read_bytes() == Path("two.mp4").read_bytes()
    out = succeed(PAINTER, "-o", "short.gif", "--set", "length=9", "--max-episode-steps", "2", "--fps", "5")
    assert places_of(Path("short.gif")) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert "1 episode of painter: 3 frames of 96 × 48 pixels, 0.6 s at 5 frames/s" in out


def test_policies_play_and_their_returns_are_told() -> None:
    out = succeed(
        *(PAINTER, "-o", "out.mp4", "--set", "length=3", "--policy", "a=cards:one", "--policy", "cards.py:one"),
        *("--mapping", "agent_1=one", "--episodes", "2"),
    )
    # Two agents, each paid t and its action, 1, in steps 1, 2 and 3.
    assert "Returns, all agents together: 18.00 in 3 steps, 18.00 in 3 steps" in out
    assert "Return, all agents together: 24.00 in 3 steps" in succeed(
        "cards:Masked", "-o", "m.gif", "--set", "length=3"
    )
    assert places_of(Path("m.gif")) == [(0, 0, t) for t in range(4)], "random policies keep to the masks"


@pytest.mark.slow("runs commands as programs")
def test_a_real_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDL_VIDEODRIVER")
    out = succeed("simple_spread", "-o", "spread.gif", "--episodes", "2", "--max-episode-steps", "4", "--seed", "1")
    assert "2 episodes of simple_spread_v3: 10 frames of 700 × 700 pixels, 1.0 s at 10 frames/s" in out
    assert os.environ["SDL_VIDEODRIVER"] == "dummy", "a machine without a screen will do"
    frames = frames_of(Path("spread.gif"))
    assert len({frame.tobytes() for frame in frames}) >= 8, "something moves"
    assert all((np.abs(frame.astype(int) - 255) > 60).any() for frame in frames), "something is drawn"


def test_ctrl_c_keeps_what_there_is() -> None:
    result = record("cards:Tired", "-o", "out.mp4", "--set", "length=5", "--episodes", "2")
    assert result.exit_code == 130
    assert "stopped early; 0 episodes of painter: 3 frames" in result.stdout
    assert places_of(Path("out.mp4")) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((PAINTER, "-o", "out.avi"), "--output out.avi: expected a name that ends in .mp4 or .gif"),
        ((PAINTER, "-o", "out"), "--output out: expected a name that ends in .mp4 or .gif"),
        ((PAINTER, "-o", "nowhere/out.mp4"), "--output nowhere/out.mp4: folder nowhere does not exist"),
        ((PAINTER, "-o", "out.mp4", "--fps", "0"), "--fps: expected a positive number of frames a second, got 0.0"),
        ((PAINTER, "-o", "out.gif", "--fps", "60"), "--fps: viewers show a GIF with at most 50 frames a second"),
        (("simple_sprea", "-o", "out.mp4"), "unknown env 'simple_sprea'"),
        ((PAINTER, "-o", "out.mp4", "--policy", "nobody"), "--policy nobody: expected random, MODULE:ATTR"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(args: tuple[str, ...], words: str) -> None:
    said = refuse(*args)
    assert words in said
    assert len(said.splitlines()) == 1


def test_env_without_frames_names_its_render_modes() -> None:
    said = refuse("marlvec.testing.scripted:ScriptedParallelEnv", "-o", "out.mp4")
    assert "render_mode='rgb_array': " in said
    assert "supports none at all" in said


def test_frames_of_changing_size_are_refused_and_leave_no_file() -> None:
    said = refuse("cards:Shrinking", "-o", "out.mp4", "--set", "size=[96,96]", "--set", "length=3", code=1)
    assert "frame 1 of out.mp4: expected the shape of the earlier frames" in said


def test_a_missing_extra_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert 'pip install "marlvec[video]"' in refuse("cards:NotEvenThere", "-o", "out.mp4")
    refused(ImportError, "", video.find_ffmpeg)


@pytest.mark.slow("runs commands as programs")
def test_a_terminal_sees_a_bar_over_episodes(folder: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "marlvec.cli", "record", PAINTER, "-o", "out.gif", "--episodes", "3"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=follower)
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert "3/3" in shown.decode()
    assert "episodes" in shown.decode()
    assert "3 episodes of painter" in out.decode()


def test_opponents_of_a_pool_and_files_of_policies_play(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "cards"}
    exec(CARDS, namespace)
    pool = OpponentPool(namespace["Steady"], folder=tmp_path / "pool")
    for number in (1, 2):
        policy = namespace["Steady"]()
        policy.load_state_dict({"number": np.array(number)})
        pool.add(f"old_{number}", policy)
        save_policy(tmp_path / f"{number}.npz", policy)
    for path, number in (("pool", 2), ("pool/old_1", 1), ("1.npz", 1), ("2.npz", 2)):
        succeed("cards:Noting", "-o", "out.mp4", "--set", "length=3", "--policy", f"cards.py:Steady@{path}")
        assert Path("notes").read_text(encoding="utf-8") == f"[{number}]" * 3
        Path("notes").unlink()
    mixed = ("--policy", "old=cards.py:Steady@pool", "--policy", "cards.py:one", "--mapping", "agent_1=one")
    succeed("cards:Noting", "-o", "out.mp4", "--set", "length=1", *mixed)
    assert Path("notes").read_text(encoding="utf-8") == "[1, 2]"
    Path("out.mp4").unlink()
    twice = ("--policy", "one=cards.py:Steady@pool", "--policy", "cards.py:one")
    assert "there are two policies 'one'" in refuse("cards:Noting", "-o", "out.mp4", *twice)
    assert "expected a file of save_policy() or a pool, found none at nowhere" in refuse(
        "cards:Noting", "-o", "out.mp4", "--policy", "cards.py:Steady@nowhere"
    )


# --- from a moment that was saved


def saved_moments(path: str, backend: str = "sync") -> list[int]:
    """Save two painters in the middle of their episodes; how many steps each has made."""
    with marlvec.make(PAINTER, 2, backend=backend, env_state="deepcopy", length=9) as envs:
        envs.reset(seed=0)
        actions = np.zeros((2, 2), np.int64)
        for _ in range(3):
            envs.step(actions)
        envs.send(actions[:1], [0])
        envs.recv()
        marlvec.save_state(path, envs.get_state())
        return [int(envs.get_attr("t")[k]) for k in range(2)]


@pytest.mark.mostly_slow("runs commands as programs", quick=3)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_film_begins_with_the_moment_that_was_saved(backend: str) -> None:
    begins = saved_moments("saved.npz", backend)
    assert begins == [4, 3]
    again = ("--from", "saved.npz", "--set", "length=9", "--backend", backend)
    for env_id, t in enumerate(begins):
        out = succeed(PAINTER, "-o", "out.gif", *again, "--env-id", str(env_id))
        assert [shown for *_, shown in places_of(Path("out.gif"))] == list(range(t, 10))
        assert f"in {9 - t} steps" in out, "what came before is not in it"
    out = succeed(PAINTER, "-o", "two.gif", *again, "--env-id", "1", "--num-envs", "2", "--episodes", "2")
    frames = frames_of(Path("two.gif"))
    for left in (0, 96):
        places = [read(frame[:, left : left + 96])[2] for frame in frames]
        assert places == [*range(3, 10), *range(10)], "the second episode is whole"


@pytest.mark.slow("runs commands as programs")
def test_a_moment_of_an_env_that_was_not_drawn_is_drawn_and_what_follows_is_what_followed() -> None:
    pytest.importorskip("numba", reason="native envs need it")
    for kind in ("sync", "native"):
        with marlvec.make("connect_four", 3, backend=kind, env_state="deepcopy", autoreset_mode="disabled") as envs:
            envs.reset(seed=1)
            for _ in range(5):
                envs.step(envs.random_action(seed=2))
            marlvec.save_state(f"{kind}.npz", envs.get_state([2]))
        result = record("connect_four", "-o", f"{kind}.gif", "--from", f"{kind}.npz", "--seed", "4")
        assert result.exit_code == 0, result.output
    one, two = (frames_of(Path(f"{kind}.gif")) for kind in ("sync", "native"))
    np.testing.assert_array_equal(one, two)
    assert len({frame.tobytes() for frame in one}) == len(one), "a stone a frame"
    assert np.abs(one[0].astype(int) - one[1]).max() > 100


def test_a_moment_that_does_not_fit_is_refused_with_what_differs() -> None:
    saved_moments("saved.npz")
    film = (PAINTER, "-o", "out.mp4", "--from", "saved.npz")
    assert "--from saved.npz: it holds the envs [0, 1]; choose one with --env-id" in refuse(*film)
    assert "--env-id 2: the file saved.npz holds the envs [0, 1]" in refuse(*film, "--env-id", "2")
    assert "--env-id 0: expected --from FILE, whose env it selects, got none" in refuse(*film[:3], "--env-id", "0")
    said = refuse("simple_spread", "-o", "out.mp4", "--from", "saved.npz", "--env-id", "0")
    assert "--from saved.npz: set_state(): env: expected 'simple_spread_v3', got a state of 'painter'" in said
    assert "nowhere.npz" in refuse(*film[:3], "--from", "nowhere.npz")
    with marlvec.make(PAINTER, 1, backend="sync", env_state="deepcopy", length=1, autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        envs.step(np.zeros((1, 2), np.int64))
        marlvec.save_state("over.npz", envs.get_state())
    assert "env 0 was saved between two episodes" in refuse(*film[:3], "--from", "over.npz")


# --- ``marlvec record-data`` and ``marlvec data``


DATA_PLAYERS = """
import numpy as np

calls = 0

def left(rows):
    return np.ones(len(rows), np.int64)

def stop(rows):
    global calls
    calls += 1
    if calls == 250:
        raise KeyboardInterrupt
    return left(rows)
"""


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("pyarrow")
    pytest.importorskip("numba")
    (tmp_path / "data_players.py").write_text(DATA_PLAYERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_dataset_is_recorded_and_shown(data_folder: Path) -> None:
    options = ["--out", "run", "--env-steps", "300", "--num-envs", "4", "--seed", "3", "--set", "max_cycles=5"]
    players = ["--policy", "fox=data_players.py:left", "--policy", "dogs=random", "--mapping", "adversary=dogs"]
    result = run("record-data", "simple_tag", *options, *players, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["env"], content["env_steps"], content["closed"]) == ("simple_tag_v3", 300, True)
    assert {one["policy"]: one["rows"] for one in content["policies"]} == {"dogs": 900, "fox": 300}
    assert content["notes"]["env_kwargs"] == {"max_cycles": 5}
    with marlvec.load_dataset("run") as data:
        assert (data["fox"].read().actions == 1).all()
        table = data.episode_table()
    whole = content["episodes"]
    assert whole["whole"] == int(table.whole.sum()) == 60
    assert whole["return_mean"] == pytest.approx(table.returns[table.whole].mean())
    assert whole["length_mean"] == 5
    assert content["policies"][0]["columns"]["obs"] in ("float32 (16,)", "float32 (14,)")
    again = run("record-data", "simple_tag", *options, *players, "--append")
    assert again.exit_code == 0, again.output
    shown = run("data", "run").stdout
    assert "run of simple_tag_v3: 600 env steps" in shown
    assert "120 whole episodes, parts of 0; return" in shown
    assert json.loads(run("data", "run", "--json").stdout)["env_steps"] == 600


def test_ctrl_c_ends_it_early_with_what_there_is(data_folder: Path) -> None:
    options = ["--out", "run", "--env-steps", "10000", "--num-envs", "2", "--policy", "data_players.py:stop"]
    result = run("record-data", "simple_spread", *options)
    assert result.exit_code == 130
    with marlvec.load_dataset("run") as data:
        assert data.is_closed
        assert 0 < data.env_steps < 10000


def test_rows_that_are_no_episodes_are_shown_too(data_folder: Path) -> None:
    write(data_folder / "run", [make_batch(0, 3, lambda n: {"x": n})])
    with (data_folder / "run" / "manifest.jsonl").open("r+b") as file:
        file.truncate(len(b"".join(file.readlines()[:-1])))
    content = json.loads(run("data", "run", "--json").stdout)
    assert (content["episodes"], content["env"], content["closed"]) == (None, None, False)
    assert "not closed: its recorder was killed" in run("data", "run").stdout
    write(data_folder / "none", [])
    assert run("data", "none").exit_code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--policy", "nowhere.py:seek"),
        ("--policy", "a=random", "--policy", "b=random"),
        ("--policy", "random", "--connectors", "NoSuch"),
    ],
)
def test_after_a_wrong_policy_the_same_folder_can_be_recorded_into(wrong: tuple[str, ...], data_folder: Path) -> None:
    options = ("--out", "run", "--env-steps", "20", "--num-envs", "2", "--backend", "sync")
    failed = run("record-data", "simple_tag", *options, *wrong)
    assert (failed.exit_code, failed.stderr.count("error:")) == (2, 1), failed.stderr
    again = run("record-data", "simple_spread", *options, "--json")
    assert again.exit_code == 0, again.stderr
    content = json.loads(again.stdout)
    assert (content["env_steps"], content["env"], content["closed"]) == (20, "simple_spread_v3", True)
    full = run("record-data", "simple_spread", *options)
    assert (full.exit_code, "it holds a recording" in full.stderr) == (2, True)


def test_errors_come_in_a_line(data_folder: Path) -> None:
    (data_folder / "full").mkdir()
    (data_folder / "full" / "x").touch()
    for arguments, code, text in [
        (["data", "nowhere"], 2, "is not a folder"),
        (["data", "full"], 2, "is not a recording"),
        (["record-data", "simple_spread", "--out", "full"], 2, "expected a new or empty folder"),
        (["record-data", "simple_spread"], 2, "--out"),
    ]:
        result = run(*arguments)
        assert result.exit_code == code
        assert text in result.stderr
