"""``marlvec rollout``, ``envs``, ``connectors``, ``check`` and ``bench``, as somebody at a terminal meets them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from marlvec import VectorEnv, __version__, make
from marlvec.cli import app, arguments
from marlvec.cli.running import Figures, recommended
from marlvec.collect.progress_bar import ProgressBar
from marlvec.connectors import RnnState
from tests.programs import at_a_terminal

# --- ``marlvec rollout``, ``envs`` and ``connectors``, as somebody at a terminal meets them


ROOT = Path(__file__).resolve().parents[2]
PLAYERS = '''
import numpy as np
from marlvec import Policy, RandomPolicy

calls = 0

def left(rows):
    return np.ones(len(rows), np.int64)

def stop(rows):
    """As if somebody pressed Ctrl-C."""
    global calls
    calls += 1
    if calls == 40:
        raise KeyboardInterrupt
    return left(rows)

def confused(rows):
    return np.zeros(len(rows) + 1, np.int64)

def broken(rows):
    return 1 // 0

class Own(Policy):
    def act(self, rows, *, explore=True):
        return left(rows)

class Needy(Own):
    def __init__(self, weights):
        pass

class Stranger:
    pass

class Plain:
    def act(self, rows):
        return left(rows)

plain = Plain()
instance = RandomPolicy(seed=3)
number = 3
'''
COMMANDS = ("rollout", "record", "play", "arena", "serve", "bench", "check", "envs", "connectors", "examples")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with policies in it, to stand in; what the commands do to this process is undone."""
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in {"players", "my_env"} & (set(sys.modules) - before):
        del sys.modules[name]


def marlvec(*args: str) -> Any:
    return CliRunner().invoke(app, args, prog_name="marlvec")


def succeed(*args: str) -> str:
    result = marlvec(*args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def small(*args: str, env: str = "simple_spread", steps: int = 200) -> str:
    """A rollout in this process, of few steps."""
    return succeed("rollout", env, "--num-envs", "4", "--env-steps", str(steps), "--backend", "sync", *args)


def cells(printed: str, policy: str) -> list[str]:
    """The row of one policy, cell by cell."""
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(f"{policy} ")]
    return re.split(r"\s{2,}", line.strip())


# --- rollout


def test_the_table_counts_what_happened() -> None:
    printed = small("--seed", "0")
    policy, plays, rows, obs, actions, mean, extremes, length = cells(printed, "random")
    assert (policy, plays, rows) == ("random", "agent_0, agent_1, agent_2", "600")
    assert (obs, actions, length) == ("(n, 18) float32", "(n,) int64", "25")
    low, high = map(float, extremes.split(" … "))
    assert low < float(mean.split(" ± ")[0]) < high < 0
    assert "simple_spread_v3 · 4 envs × 3 agents, in this process" in printed
    assert re.search(r"^200 env steps, 600 agent steps, 8 episodes in \d+\.\d s: [\d,]+ env steps/s$", printed, re.M)
    assert "time went to: envs " in printed


@pytest.mark.slow("runs commands as programs")
def test_a_seed_gives_the_same_table_whatever_runs_it() -> None:
    def table(*args: str) -> list[str]:
        return cells(small(*args), "random")

    reference = table("--seed", "7")
    assert table("--seed", "7", "--autoreset-mode", "next_step") == reference
    assert table("--seed", "7", "--autoreset-mode", "disabled") == reference
    args = ("--num-envs", "4", "--env-steps", "200", "--seed", "7", "--num-workers", "2")
    printed = succeed("rollout", "simple_spread", *args)
    assert "2 worker processes" in printed
    assert cells(printed, "random") == reference
    assert table("--seed", "8") != reference


def test_complete_batches_hold_whole_episodes() -> None:
    printed = small("--batch-mode", "complete", steps=230)
    assert "250 env steps, 750 agent steps" in printed


def test_two_policies_with_connectors_of_their_own(folder: Path) -> None:
    printed = small(
        *("--policy", "main=random", "--policy", "players.py:left", "--mapping", "agent_2=left"),
        *("--connectors", "main=FlattenObs, NormalizeObs(clip=5), FrameStack(4), AgentIndicator()"),
    )
    assert cells(printed, "main")[1:5] == ["agent_0, agent_1", "400", "(n, 75) float32", "(n,) int64"]
    assert cells(printed, "left")[1:5] == ["agent_2", "200", "(n, 18) float32", "(n,) int64"]


def test_one_chain_for_every_policy() -> None:
    args = ("--policy", "a=random", "--policy", "b=random", "--mapping", "agent_0=b", "--connectors", "FrameStack(2)")
    printed = small(*args)
    assert cells(printed, "a")[1:4] == ["agent_1, agent_2", "400", "(n, 36) float32"]
    assert cells(printed, "b")[1:4] == ["agent_0", "200", "(n, 36) float32"]


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize("what", ["left", "Own", "instance", "Plain", "plain"])
def test_what_can_be_a_policy(what: str) -> None:
    assert cells(small("--policy", f"players:{what}"), what)[2] == "600"
    assert cells(small("--policy", f"me={Path.cwd()}/players.py:{what}"), "me")[2] == "600"


def test_the_longest_prefix_decides() -> None:
    args = ("--policy", "a=random", "--policy", "b=random", "--policy", "c=random")
    printed = small(*args, "--mapping", "agent=b", "--mapping", "agent_1=c", "--mapping", "agent_2=a")
    assert [cells(printed, name)[1] for name in "abc"] == ["agent_2", "agent_0", "agent_1"]


def test_groups_act_at_random_each_on_its_own() -> None:
    printed = small(env="simple_tag", steps=100)
    assert cells(printed, "adversary")[1:4] == ["adversary_0, adversary_1, adversary_2", "300", "(n, 16) float32"]
    assert cells(printed, "agent")[1:4] == ["agent_0", "100", "(n, 14) float32"]


def test_agents_that_fare_differently_have_lines_of_their_own() -> None:
    printed = small("--seed", "0", env="tictactoe", steps=1500)
    first, second = cells(printed, "player_1"), cells(printed, "player_2")
    assert float(first[1].split(" ± ")[0]) > 0 > float(second[1].split(" ± ")[0]), "who begins wins more often"
    assert "player_1 " not in small("--seed", "0", env="tictactoe", steps=40)


def test_arguments_reach_the_env() -> None:
    printed = small("--set", "N=4", "--set", "max_cycles=10", "--set", "continuous_actions=true")
    _, plays, rows, obs, actions, *_, length = cells(printed, "random")
    assert (plays, rows, obs) == ("agent_0, agent_1, agent_2, agent_3", "800", "(n, 24) float32")
    assert (actions, length) == ("(n, 5) float32", "10")


def test_an_env_from_a_file_beside_one(folder: Path) -> None:
    (folder / "my_env.py").write_text("from marlvec.testing import CounterEnv as Mine\n", encoding="utf-8")
    args = ("--num-envs", "3", "--env-steps", "30", "--num-workers", "1")
    for env in ("my_env:Mine", "my_env.py:Mine", f"{folder}/my_env.py:Mine"):
        assert "3 envs × 3 agents" in succeed("rollout", env, *args)


def test_a_rollout_in_which_no_episode_ends(folder: Path) -> None:
    printed = small("--plot", "none.png", steps=20)
    assert cells(printed, "random")[-3:] == ["–", "–", "–"]
    assert "no episode ended" in printed
    assert (folder / "none.png").exists()


def test_ctrl_c_ends_early_with_what_there_is() -> None:
    result = marlvec("rollout", "simple_spread", "--num-envs", "4", "--backend", "sync", "--policy", "players.py:stop")
    assert result.exit_code == 130
    steps = re.search(r"^stopped after (\d+) env steps, (\d+) agent steps", result.stdout, re.M)
    assert steps is not None
    assert 0 < int(steps[1]) < 40 * 4
    assert int(steps[2]) == 3 * int(steps[1])
    assert cells(result.stdout, "stop")[2] == steps[2]


@pytest.mark.slow("runs commands as programs")
def test_the_command_itself_with_a_terminal_for_errors(folder: Path) -> None:
    """The bar is on stderr, where it is a terminal; stdout has the table and nothing else."""
    command = [sys.executable, "-m", "marlvec.cli", "rollout", "simple_spread", "--env-steps", "800"]
    code, printed, seen = at_a_terminal(command)
    assert code == 0
    assert "\x1b" not in printed
    assert cells(printed, "random")[2] == "2,400"
    bar = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)
    assert "800/800 env steps" in bar
    assert re.search(r"\d/s  team return -\d", bar)


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("name", ["simple_spread_v3", "knights_archers_zombies_v11"])
def test_the_bar_cuts_no_number_where_the_terminal_is_narrow(name: str, width: int) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, color_system=None)
    with ProgressBar(name, "env steps", 2_000_000, console=console) as bar:
        bar.show(1_000_000, speed=123_456.0, note="team return -1.234e+04")
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.getvalue())
    *_, last = [line for line in re.split(r"[\r\n]", plain) if line.strip()]
    assert "1000000/2000000 env steps  123,456/s" in last
    assert "…" not in last
    assert len(last) <= width
    for part in (name, "team return -1.234e+04"):
        assert part in last or part[:4] not in last, "it is there as a whole, or not at all"
        assert part in last or width < 120
    assert "━" in last or width < 120


# --- plots


@pytest.mark.slow("runs commands as programs")
def test_a_plot_is_a_picture(folder: Path) -> None:
    from matplotlib import image

    printed = small("--plot", "out.png", "--policy", "a=random", "--policy", "b=random", "--mapping", "agent_1=b")
    assert printed.endswith("Plot: out.png\n")
    data = (folder / "out.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000
    pixels = image.imread(folder / "out.png")
    assert pixels.shape[0] > 700 < pixels.shape[1]
    assert len({tuple(pixel) for pixel in pixels[::5, ::5, :3].reshape(-1, 3).tolist()}) > 20


@pytest.mark.slow("runs commands as programs")
def test_a_plot_of_episodes_of_many_lengths_and_agents_that_differ(folder: Path) -> None:
    small("--seed", "0", "--plot", "out.svg", env="tictactoe", steps=1500)
    drawn = (folder / "out.svg").read_text(encoding="utf-8")
    assert drawn.count("<path") > 50
    assert "<!-- return per agent -->" in drawn


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = marlvec("rollout", "simple_spread", "--plot", "out.png")
    assert result.exit_code == 2
    assert 'pip install "marlvec[plot]"' in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (folder / "out.png").exists()
    assert result.stdout == "", "nothing ran"


# --- files


def write(folder: Path, **texts: str) -> None:
    """Modules in a folder."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


MOVES = """
import numpy as np
import helper
from kit.tools import number

def {name}(rows):
    assert helper.number == number == {number}
    return np.full(len(rows), number)
"""


def test_policy_file_imports_modules_of_its_folder(folder: Path) -> None:
    """Two files in two folders, each with a helper of the same name; and neighbours named as what is installed."""
    for k, side in enumerate(("left", "right"), 1):
        wrong = "raise AssertionError('an installed module was meant')"
        write(folder / side, **{f"{side}_moves": MOVES.format(name=side, number=k), "helper": f"number = {k}"})
        write(folder / side / "kit", tools=f"number = {k}")
        for name in ("mpe2", "gymnasium", "numpy", "colorsys", "cloudpickle"):
            (folder / side / f"{name}.py").write_text(wrong, encoding="utf-8")
    before = set(sys.modules)
    found = list(sys.meta_path)
    policies = ("--policy", "left/left_moves.py:left", "--policy", "right/right_moves.py:right")
    try:
        args = ("rollout", "simple_spread", "--num-envs", "2", "--env-steps", "60", "--backend", "async")
        printed = succeed(*args, *policies, "--mapping", "agent_2=right")
        assert cells(printed, "right")[1] == "agent_2"
        small("--policy", "left/left_moves.py:left")
    finally:
        for name in {"left_moves", "right_moves", "helper", "kit", "kit.tools"} & (set(sys.modules) - before):
            del sys.modules[name]
    assert not [path for path in sys.path if path.endswith(("left", "right"))]
    assert sys.meta_path == found


def test_a_policy_file_whose_neighbour_is_not_there(folder: Path) -> None:
    write(folder / "alone", lonely="import nobody_beside_it")
    result = marlvec("rollout", "simple_spread", "--policy", "alone/lonely.py:act")
    assert result.exit_code == 2
    assert "cannot import alone/lonely.py (No module named 'nobody_beside_it')" in result.stderr
    assert "lonely" not in sys.modules


# --- the command itself


@pytest.mark.slow("runs commands as programs")
@pytest.mark.parametrize("module", ["marlvec", "marlvec.cli"])
def test_python_m_is_the_command(module: str) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        return subprocess.run([sys.executable, "-m", module, *args], env=environ, capture_output=True, text=True)

    shown = run("--help")
    assert shown.returncode == 0
    assert "Usage: marlvec [OPTIONS] COMMAND" in shown.stdout
    assert run("--version").stdout == f"marlvec {__version__}\n"
    rollout = run("rollout", "simple_spread", "--num-envs", "2", "--env-steps", "20")
    assert (rollout.returncode, rollout.stderr) == (0, "")
    assert "20 env steps" in rollout.stdout


def test_the_oldest_typer_that_works_is_asked_for() -> None:
    """Up to 0.12.3 there is no ``list[str] | None``; up to 0.15.3 all take the newest click, and break with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "typer>=0.15.4" in project["dependencies"]


# --- errors

SPREAD = ("rollout", "simple_spread", "--backend", "sync", "--num-envs", "2", "--env-steps", "10")


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("rollout", "simple_sprad"), 2, "unknown env 'simple_sprad'. Did you mean 'mpe/simple_spread_v3'"),
        (("rollout", "nowhere:Env"), 2, "no module 'nowhere'"),
        ((*SPREAD, "--num-workers", "2"), 2, "num_workers=2 is for workers"),
        ((*SPREAD, "--set", "N=2", "--set", "N=3"), 2, "N is given twice"),
        ((*SPREAD, "--set", "N"), 2, "expected KEY=VALUE"),
        ((*SPREAD, "--set", "speed=3"), 2, "unexpected keyword argument 'speed'; --traceback shows where"),
        ((*SPREAD, "--policy", "players"), 2, "expected random, MODULE:ATTR or FILE.py:ATTR"),
        ((*SPREAD, "--policy", "nowhere:b:c"), 2, "cannot import nowhere:b"),
        ((*SPREAD, "--policy", "players.py:nobody"), 2, "players.py has no 'nobody'"),
        ((*SPREAD, "--policy", "players.py:left@a.npz"), 2, "`play`, `arena` and `serve` take MAKE@FILE"),
        ((*SPREAD, "--policy", "players.py:plan"), 2, "players.py has no 'plan' (did you mean plain"),
        ((*SPREAD, "--policy", "other.py:left"), 2, "cannot import other.py"),
        ((*SPREAD, "--policy", "players.py:number"), 2, "must be a marlvec Policy, an object with a method act(rows)"),
        ((*SPREAD, "--policy", "players.py:Stranger"), 2, "expected a policy, but Stranger has no method act(rows)"),
        ((*SPREAD, "--policy", "players.py:Needy"), 2, "Needy needs the arguments ['weights']"),
        ((*SPREAD, "--policy", "random", "--policy", "random"), 2, "two policies 'random'"),
        ((*SPREAD, "--policy", "a=random", "--policy", "b=random"), 2, "policy 'b' plays no agent"),
        ((*SPREAD, "--mapping", "agent=a"), 2, "expected a --policy to assign, got none"),
        ((*SPREAD, "--policy", "a=random", "--mapping", "agent"), 2, "expected PREFIX=ID, e.g. agent_2=a"),
        ((*SPREAD, "--policy", "a=random", "--mapping", "agent=b"), 2, "no policy 'b'; the policies are ['a']"),
        ((*SPREAD, "--policy", "a=random", "--mapping", "x=a"), 2, "no agent's name begins with 'x'"),
        ((*SPREAD, "--connectors", "Normalise"), 2, "no agent connector 'Normalise' (did you mean NormalizeObs or "),
        ((*SPREAD, "--connectors", "ClipActions"), 2, "no agent connector 'ClipActions'"),
        ((*SPREAD, "--connectors", "FrameStack(0)"), 2, "FrameStack(0): k must be a whole number of at least 1"),
        ((*SPREAD, "--connectors", "FrameStack(x)"), 2, "FrameStack(x)"),
        ((*SPREAD, "--connectors", "RnnState(np.load('x'))"), 2, "or np.array(…), got np.load('x')"),
        ((*SPREAD, "--connectors", "RnnState(__import__('os').getcwd())"), 2, "expected a Python literal, [0.0] * 32"),
        ((*SPREAD, "--connectors", "RnnState(np.zeros((1000, 1001)))"), 2, "has more than 1,000,000 numbers"),
        ((*SPREAD, "--connectors", "RnnState([[0] * 1000] * 1001)"), 2, "has more than 1,000,000 numbers"),
        ((*SPREAD, "--connectors", "RnnState(np.zeros(-1))"), 2, "expected a length, or a tuple of lengths, as shape"),
        ((*SPREAD, "--connectors", "RnnState(np.zeros(2, 'O'))"), 2, "expected a dtype of numbers such as np.float32"),
        ((*SPREAD, "--connectors", "RnnState(np.zeros(2, shape=2))"), 2, "expected np.zeros(shape, dtype)"),
        ((*SPREAD, "--connectors", "RnnState(np.array(['a']))"), 2, "expected an array of numbers, got dtype <U1"),
        ((*SPREAD, "--connectors", f"RnnState({'-' * 5000}1)"), 2, "expected names or calls"),
        ((*SPREAD, "--connectors", "FrameStack("), 2, "expected names or calls"),
        ((*SPREAD, "--connectors", "a.b(3)"), 2, "expected names or calls"),
        ((*SPREAD, "--connectors", "f=FlattenObs"), 2, "no policy 'f'"),
        ((*SPREAD, "--connectors", "FlattenObs", "--connectors", "FlattenObs"), 2, "one chain for all policies"),
        ((*SPREAD, "--plot", "out.xyz"), 2, "expected a name that ends in one of "),
        ((*SPREAD, "--plot", "nowhere/out.png"), 2, "folder nowhere does not exist"),
        ((*SPREAD, "--policy", "players.py:confused"), 1, "policy 'confused' was given 6 rows"),
        (("rollout", "marlvec.testing:RaisingEnv", "--backend", "sync"), 1, "env 0 raised in step(): ValueError"),
        (("envs", "simple_sprad"), 2, "no env id contains 'simple_sprad' (did you mean "),
        (("connectors", "FrameStak"), 2, "in its name (did you mean FrameStack"),
        (("rollout",), 2, "missing argument 'ENV', e.g. `marlvec rollout simple_spread`; `marlvec envs` lists them"),
        (("rollout", "simple_spread", "--num-envs", "0"), 2, "invalid value for '--num-envs': "),
        (("rollout", "simple_spread", "--seed"), 2, "option '--seed' requires an argument; `marlvec -h` shows"),
        (("rollout", "simple_spread", "--num-env", "3"), 2, "no such option: --num-env (Possible options: --num-envs"),
        (("rolout",), 2, "no such command 'rolout'. Did you mean 'rollout'? `marlvec -h` shows what it takes"),
        (("dance",), 2, "no such command 'dance'; `marlvec -h` shows what it takes"),
        (("envs", "nothing like it"), 2, "no env id contains 'nothing like it'"),
        (("connectors", "nothing"), 2, "no connector has 'nothing' in its name"),
        (("connectors", "Stack", "--side", "action"), 2, "no connector of the action side has 'Stack' in its name"),
    ],
)
def test_an_error_is_one_line(args: tuple[str, ...], code: int, words: str) -> None:
    result = marlvec(*args)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("np.zeros(32)", np.zeros(32)),
        ("initial=[0.0] * 3", [0.0] * 3),
        ("3 * (1,)", (1, 1, 1)),
        ("np.full((2, 3), -1.5, dtype=np.float32)", np.full((2, 3), -1.5, np.float32)),
        ("numpy.ones(2, 'int64')", np.ones(2, np.int64)),
        (
            "{'h': np.zeros(2), 'c': (np.array([1, 2], float), -np.inf)}",
            {"h": np.zeros(2), "c": (np.array([1.0, 2]), -np.inf)},
        ),
        ("-1e-3", -1e-3),
        ("[[1, 2], [True, 3]]", [[1, 2], [True, 3]]),
    ],
)
def test_arguments_of_connectors_may_be_arrays(text: str, wanted: Any) -> None:
    (made,) = arguments.connectors([f"RnnState({text})"], ("main",))
    assert isinstance(made, RnnState)
    np.testing.assert_equal(made.initial, wanted)
    assert str(made.initial.dtype if isinstance(made.initial, np.ndarray) else "") == str(getattr(wanted, "dtype", ""))


def test_an_error_with_its_traceback() -> None:
    result = marlvec("rollout", "marlvec.testing:RaisingEnv", "--backend", "sync", "--traceback")
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "EnvRaised"
    assert "where it happened" in str(result.exception)


def test_policy_bug_shows_its_traceback() -> None:
    result = marlvec(*SPREAD, "--policy", "players.py:broken")
    assert isinstance(result.exception, ZeroDivisionError)


# --- narrow terminals, and programs that read what is printed


def narrow(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("marlvec.cli.console._WIDTH_IN_A_PIPE", width)


@pytest.mark.slow("runs commands as programs")
@pytest.mark.parametrize("width", [60, 80, 99])
def test_no_number_is_cut_where_the_terminal_is_narrow(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch, width)
    printed = small("--seed", "0", env="simple_tag")
    assert "…" not in printed.replace(" … ", "")  # the one between two numbers is no cut
    assert max(map(len, printed.splitlines())) <= width
    block = printed.partition("\nadversary\n")[2].partition("\n\n")[0]
    lines = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in block.splitlines())
    assert lines["plays"] == "adversary_0, adversary_1, adversary_2" or width == 60
    assert (lines["rows"], lines["obs"], lines["length"]) == ("600", "(n, 16) float32", "25")


def test_ids_are_whole_where_the_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = re.findall(r"^ *(\S+/\S+) ", succeed("envs"), re.M)
    narrow(monkeypatch, 80)
    printed = succeed("envs")
    assert re.findall(r"^ *(\S+/\S+) ", printed, re.M) == wide
    assert max(map(len, printed.splitlines())) <= 80
    assert re.findall(r"^ (\w+) ", succeed("connectors"), re.M)[:2] == ["connector", "ActionMaskFromObs"]


@pytest.mark.slow("runs commands as programs")
def test_json_of_a_rollout_has_its_figures() -> None:
    found = json.loads(small("--seed", "0", "--json"))
    assert (found["env_steps"], found["agent_steps"], found["episodes"], found["num_envs"]) == (200, 600, 8, 4)
    policy = found["policies"]["random"]
    assert (policy["rows"], policy["obs"], policy["agent_episodes"]) == (600, ["(n, 18) float32"], 24)
    assert policy["length"] == {"mean": 25.0, "std": 0.0, "min": 25, "max": 25}
    shown = cells(small("--seed", "0"), "random")[5]
    assert f"{policy['return']['mean']:.2f} ± {policy['return']['std']:.2f}" == shown
    assert list(policy["agents"]) == found["agents"] == ["agent_0", "agent_1", "agent_2"]
    assert json.loads(small("--json", steps=20))["policies"]["random"]["return"] is None


def test_json_of_lists() -> None:
    envs = {row["id"]: row for row in json.loads(succeed("envs", "--json"))}
    assert envs["mpe/simple_spread_v3"] == {
        "id": "mpe/simple_spread_v3",
        "family": "mpe",
        "extra": None,
        "installed": True,
    }
    found = json.loads(succeed("connectors", "clip", "--side", "action", "--json"))
    assert [(row["name"], row["side"]) for row in found] == [("ClipActions", "action")]


@pytest.mark.slow("compiles kernels")
def test_compiling_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    event = pytest.importorskip("numba.core.event")

    def compiling(*args: Any, **options: Any) -> VectorEnv:
        for _ in range(2):
            with event.trigger_event("numba:compile", data={}):
                pass
        return make(*args, **options)

    monkeypatch.setattr("marlvec.cli.arguments.make", compiling)
    result = marlvec("rollout", "kuhn_poker", "--backend", "native", "--num-envs", "2", "--env-steps", "4")
    assert result.exit_code == 0
    said = result.stderr.splitlines()
    assert said[0] == "compiling kuhn_poker for this machine, once; this time is not counted …"
    assert said[-1].startswith("compiled in ")
    assert len(said) == 2
    small()  # nothing to compile, and nothing said


# --- paths


LONG = "x" * 300
NO_NEW_FILES = "/proc/x"  # where its permissions allow root to write
HERE = ("--num-envs", "2", "--env-steps", "20", "--backend", "sync")
BAD_PATHS = [
    *(("examples", "--copy", "--to", path) for path in ("afile", "afile/x", LONG)),
    *(("record-data", "rps", *HERE, "--out", path) for path in ("afile", "afile/x", LONG)),
    *(("record", "simple_spread", "-o", f"{path}.gif") for path in ("afolder", "afile/x", LONG, NO_NEW_FILES)),
    *(
        ("record", "simple_spread", "-o", "x.gif", "--from", path)
        for path in ("nofile", "afolder.gif", "afile", "afile/x", LONG)
    ),
    *(("rollout", "rps", *HERE, "--plot", f"{path}.png") for path in ("afolder", "afile/x", LONG, NO_NEW_FILES)),
    *(("data", path) for path in ("nofolder", "afile", "afile/x", "afolder.py", LONG)),
    *(
        (*command, "--policy", f"players.py:left@{path}")
        for command in (("serve", "rps"), ("play", "rps"), ("record-data", "rps", "--out", "new"))
        for path in ("nofile", "afile", "afile/x", "afolder.py", LONG)
    ),
    *((command, "rps", "--policy", f"random@{path}") for command in ("serve", "play") for path in ("x.npz", "afile")),
    *(("arena", "rps", "random", f"players.py:left@{path}") for path in ("nofile", "afile", "afile/x", LONG)),
    *(("serve", "rps", "--token-file", path) for path in ("nofile", "afolder.py", "afile/x", LONG)),
    *(
        ("rollout", "rps", *HERE, "--policy", f"{path}:left")
        for path in ("nofile.py", "afolder.py", "afile/x.py", "afile.py", f"{LONG}.py", "..x", "")
    ),
    *(
        ("rollout", f"{path}:Env", *HERE)
        for path in ("nofile.py", "afolder.py", "afile/x.py", "afile.py", f"{LONG}.py")
    ),
]


@pytest.mark.parametrize("args", BAD_PATHS, ids=lambda args: " ".join(args).replace(LONG, "LONG"))
def test_wrong_paths_are_one_line(args: tuple[str, ...], folder: Path) -> None:
    for name in ("afile", "afile.py"):
        (folder / name).write_text("no code, and no archive", encoding="utf-8")
    for name in ("afolder.gif", "afolder.png", "afolder.py"):
        (folder / name).mkdir()
    before = sorted(folder.iterdir())
    result = marlvec(*args)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if "compil" not in line]  # of rps, where no cache has it
    assert (result.exit_code, len(lines)) == (2, 1), result.stderr
    assert lines[0].startswith("error: ")
    assert result.stdout == ""
    after = sorted(path for path in folder.iterdir() if path.name not in ("new", "__pycache__"))  # of players.py
    assert after == [path for path in before if path.name != "__pycache__"]


def test_random_moves_have_no_state() -> None:
    for command in ("serve", "play"):
        assert (
            "random moves have no state; write a=random, without @"
            in marlvec(command, "rps", "--policy", "a=random@x.npz").stderr
        )


# --- the rest


def test_envs_are_listed_with_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlcard", None)
    printed = succeed("envs")
    lines = dict(re.findall(r"^ *(\S+/\S+) +(.*?) *$", printed, re.M))
    assert lines["mpe/simple_spread_v3"].split() == ["mpe", "–", "yes"]
    assert lines["pettingzoo/atari/pong_v3"].split() == ["atari", "atari", "yes"]
    assert lines["pettingzoo/classic/leduc_holdem_v4"].split() == ["classic", "classic", "no"]
    assert re.search(
        r'^For the others: pip install "marlvec\[(brax,)?classic(,jaxmarl,jumanji,pgx)?(,textarena)?\]"$', printed, re.M
    )
    assert not any(name.startswith("gymnasium/") for name in lines)


def test_envs_can_be_searched() -> None:
    printed = succeed("envs", "CARTPOLE-v1")
    assert re.search(r"^ *gymnasium/CartPole-v1 +gymnasium +– +yes *$", printed, re.M)
    assert "simple_spread" not in printed
    assert "For the others" not in printed
    assert "simple_spread" in succeed("envs", "spread")


def test_connectors_are_listed_by_side() -> None:
    printed = succeed("connectors")
    assert re.search(
        r"^Agent side: .*(\n.*)*^ *FrameStack +Replaces an observation by .*(\n.*)*^Action side: ", printed, re.M
    )
    assert re.search(r"^ *ToNumpy +Converts every column that is not numpy to arrays, leaf by leaf *$", printed, re.M)
    actions = succeed("connectors", "clip", "--side", "action")
    assert "ClipActions" in actions
    assert "ClipReward" not in actions
    assert "Agent side" not in actions


def test_a_connector_is_said_in_a_whole_sentence() -> None:
    printed = " ".join(succeed("connectors", "FilterRows").split())
    assert "a function does not keep, e.g. of sleeping agents 1 connector, in" in printed
    lines = [row["line"] for row in json.loads(succeed("connectors", "--json"))]
    assert [line for line in lines if line.endswith(("e.g", "i.e"))] == []


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_breaks_no_word(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    printed = succeed(command, "-h")
    assert max(map(len, printed.splitlines())) <= 80
    prose, _, _ = printed.partition("╭─")
    # Paragraphs are as wide as the terminal, and not as the source; examples keep their lines, to be copied.
    lines = [line.strip() for line in prose.splitlines()]
    for line, after in pairwise(lines):
        if line and after and not line.startswith("marlvec") and not line.endswith("\\"):
            assert len(line) + 1 + len(after.split()[0]) > 76, line
    assert [line for line in lines if "\\" in line[:-1]] == []
    assert re.findall(r"<\w[^>\n]*  ", printed) == []  # choices that go on in the next line
    assert "<bool>" not in printed


def test_help_of_examples_has_its_commands_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    lines = [line.strip() for line in succeed("examples", "--help").splitlines()]
    assert "marlvec examples policies --copy" in lines
    assert "marlvec rollout simple_spread --policy examples/policies.py:seek" in lines


def test_help_says_the_true_default_of_a_seed() -> None:
    printed = " ".join(re.sub("[│\n]", " ", succeed("arena", "-h")).split())
    assert re.search(r"--seed N \[x>=0\] [^\[]*\[default: 0\]", printed)


def test_examples_are_listed_printed_and_copied(folder: Path) -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    assert re.findall(r"^ ?(\w+)  +\S", succeed("examples"), re.M)[1:] == [file.stem for file in files]
    assert succeed("examples", "policies") == (ROOT / "examples/policies.py").read_text(encoding="utf-8")
    assert succeed("examples", "policies.py", "--copy") == "examples/policies.py\n"
    assert "200 env steps" in small("--policy", "examples/policies.py:seek")
    result = marlvec("examples", "--copy")
    assert (result.exit_code, len(list(folder.glob("examples/*.py")))) == (2, 1)
    assert "examples/policies.py exists already; move it, or copy to another folder with --to FOLDER" in result.stderr
    succeed("examples", "--copy", "--to", "all")
    assert [file.read_bytes() for file in sorted(folder.glob("all/*"))] == [file.read_bytes() for file in files]
    result = marlvec("examples", "polices")
    assert (result.exit_code, "no example 'polices' (did you mean policies?)" in result.stderr) == (2, True)


def test_version_and_help() -> None:
    assert succeed("--version") == f"marlvec {__version__}\n"
    for args in (("--help",), ("rollout", "--help"), ("envs", "--help"), ("connectors", "--help")):
        assert "Usage: marlvec" in (shown := succeed(*args))
        assert "<bool>" not in shown
    assert "rollout" in marlvec().output


# --- ``marlvec rollout --live``: how it goes while it goes, on a terminal and in a log


LIVE = ("rollout", "simple_spread", "--num-envs", "4", "--env-steps", "400", "--backend", "sync", "--live")


def test_in_a_log_lines_go_to_stderr_and_the_last_has_it_all() -> None:
    result = CliRunner().invoke(app, LIVE, prog_name="marlvec")
    assert result.exit_code == 0
    assert "\x1b" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.match(
        r"simple_spread_v3: 400 of 400 env steps · [\d,]+/s · 16 episodes · random: return per agent -\d+(\.\d+)? \(-",
        last,
    )
    assert re.search(r"^400 env steps, 1,200 agent steps, 16 episodes in ", result.stdout, re.M)
    assert re.search(r"^time went to: envs .*callbacks \d+%$", result.stdout, re.M)


def test_without_live_no_callback_is_called() -> None:
    result = CliRunner().invoke(app, LIVE[:-1], prog_name="marlvec")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "callbacks" not in result.stdout


def test_error_is_printed_after_the_table() -> None:
    command = ("rollout", "marlvec.testing:RaisingEnv", "--set", "at=20", "--backend", "sync", "--live")
    result = CliRunner().invoke(app, command, prog_name="marlvec")
    assert result.exit_code == 1
    *_, line, error = result.stderr.splitlines()  # one line every ten seconds, and the last
    assert " of 20,000 env steps · " in line
    assert error.startswith("error: env 0 raised in step(): ValueError")


@pytest.mark.slow("runs commands as programs")
@pytest.mark.parametrize("stop", [False, True])
def test_on_a_terminal_the_table_takes_the_place_of_the_bar(stop: bool, tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text(
        "import numpy as np\ncalls = 0\n\n\ndef left(rows):\n    global calls\n    calls += 1\n"
        f"    if calls == 60 and {stop}:\n        raise KeyboardInterrupt\n    return np.ones(len(rows), int)\n"
    )
    command = [sys.executable, "-m", "marlvec.cli", *LIVE, "--policy", "players.py:left"]
    code, printed, seen = at_a_terminal(command, tmp_path)
    assert code == (130 if stop else 0)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)
    steps = "236" if stop else "400"
    assert f"{steps} of 400 env steps" in shown
    assert not re.search(r"\d+/400", shown), "no other bar"
    assert re.search(r"━+.* 100%, 0:00:00 left" if not stop else r"━+.* 59%, \d:\d\d:\d\d left", shown)
    assert re.search(r"left +-\d", shown)
    assert "time: " in shown
    assert seen.rstrip().endswith("\x1b[?25h"), "the cursor is back"
    assert "\x1b" not in printed
    assert f"{steps} env steps, " in printed or stop


# --- ``marlvec check``: what is wrong with an env as a table, as JSON, and in the exit code


BROKEN = "tests.testing.test_findings:ManyFaults"
GOOD = "tests.testing.test_check_env:Good"


def check(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments])


def test_an_env_that_is_fine() -> None:
    result = check(GOOD, "--episodes", "2")
    assert (result.exit_code, result.stdout) == (0, f"{GOOD}: nothing found\n"), result.output


@pytest.mark.slow("runs commands as programs")
def test_at_a_terminal_a_bar_says_how_far_it_is() -> None:
    """The episodes are played four times over; the bar is on stderr, and the findings are on stdout."""
    code, printed, seen = at_a_terminal([sys.executable, "-m", "marlvec.cli", "check", GOOD, "--episodes", "2"])
    assert (code, printed) == (0, f"{GOOD}: nothing found\n")
    bar = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)
    assert re.search(r"8/8 episodes  [\d,]+ calls/s", bar)


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize("width", [60, 80, 400])
def test_the_table_is_never_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from marlvec.testing import check_env
    from tests.testing.test_findings import ManyFaults

    monkeypatch.setattr("marlvec.cli.console._WIDTH_IN_A_PIPE", width)
    result = check(BROKEN)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    shown = "".join(result.stdout.split())
    assert shown.startswith(f"{BROKEN}:6findings,5serious")
    own = 0  # of the findings, as in "reset(seed=…)"
    for one in check_env(ManyFaults, raise_first=False):
        for part in (f"{one.check}: {one.severity}", one.where, one.subject, one.expected, one.got, one.change):
            assert "".join(part.split()) in shown
            own += part.count("…")
    assert shown.count("…") == own


def test_json_has_every_finding() -> None:
    result = check(BROKEN, "--json", "--skip", "observations", "--skip", "flags")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["env"], said["serious"]) == (BROKEN, 2)
    assert [one["check"] for one in said["findings"]] == ["rewards", "infos"]
    assert set(said["findings"][0]) == {"check", "severity", "where", "subject", "expected", "got", "change", "times"}
    result = check(GOOD, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"env": GOOD, "serious": 0, "findings": []})


def test_arguments_reach_the_env_and_the_check() -> None:
    assert check("simple_spread", "--set", "max_cycles=5", "--max-steps", "5", "--episodes", "1").exit_code == 0
    result = check("simple_spread", "--set", "max_cycles=6", "--max-steps", "5", "--episodes", "1", "--json")
    assert [one["check"] for one in json.loads(result.stdout)["findings"]] == ["ends"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simple_sprad"], "simple_spread"),
        (["simple_spread", "--skip", "flag"], "did you mean 'flags'?"),
        (["simple_spread", "--set", "colour=red"], "--set colour: simple_spread does not accept it"),
        (["simple_spread", "--episodes", "0"], "episodes"),
    ],
)
def test_usage_errors_exit_with_code_2(arguments: list[str], message: str) -> None:
    result = check(*arguments)
    assert result.exit_code == 2
    assert message in result.output


# --- ``marlvec bench``: every backend that runs the env, in turns, and a piece of advice


QUICK = ("--num-envs", "2", "--seconds", "0.01")


@pytest.mark.slow("runs commands as programs")
def test_it_says_what_each_backend_does_and_which_to_take() -> None:
    result = CliRunner().invoke(app, ["bench", "simple_spread", *QUICK, "--set", "max_cycles=5"])
    assert result.exit_code == 0, result.output
    for backend in ("sync", "thread", "async", "native"):
        assert f" {backend}" in result.output
    assert "without pool: " in result.output
    assert "which is a single env" in " ".join(result.output.split())
    assert "Take " in result.output


def test_json_has_the_figures() -> None:
    result = CliRunner().invoke(app, ["bench", "CartPole-v1", *QUICK, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    rows = {row["backend"]: row for row in said["backends"]}
    assert set(rows) == {"sync", "thread", "async", "pool"} - set(said["refused"])
    assert said["recommended"] in rows
    for row in rows.values():
        assert 0 < row["slowest"] <= row["env_steps_per_second"] <= row["fastest"]
        assert row["agent_steps_per_second"] == row["env_steps_per_second"]
    assert "native" in said["refused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simple_sprad"], "simple_spread"),
        (["simple_spread", "--num-envs", "0"], "num-envs"),
        (["simple_spread", "--set", "colour=red"], "colour"),
    ],
)
def test_usage_errors_of_bench_exit_with_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_simplest_of_equally_fast_backends_is_recommended() -> None:
    def figures(**rates: float) -> list[Figures]:
        rows = [Figures(name, rate, rate, rate, rate, 0) for name, rate in rates.items()]
        return sorted(rows, key=lambda row: -row.env_steps_per_second)

    assert recommended(figures(sync=100, thread=105, **{"async": 108})).backend == "sync"
    assert recommended(figures(sync=100, **{"async": 150})).backend == "async"
    assert recommended(figures(sync=100, native=1000, **{"async": 150})).backend == "native"
