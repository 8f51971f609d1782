"""``marlvec arena``, as somebody at a terminal meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from marlvec import RandomPolicy
from marlvec.cli import app
from marlvec.connectors import AgentPipeline, RnnState
from marlvec.policies import save_policy
from marlvec.selfplay import Opponent, OpponentPool, evaluate_match

PLAYERS = '''
import numpy as np
from marlvec import Policy, RandomPolicy, ScriptedPolicy

def _corner(obs, agent, t, memory):
    """The centre and corners first; any other field else."""
    allowed = np.flatnonzero(memory.action_mask)
    good = [i for i in (4, 0, 2, 6, 8) if i in allowed]
    return good[0] if good else int(memory.rng.choice(allowed))

corner = ScriptedPolicy(_corner)

class Turning(Policy):
    """Plays the first allowed field from a place on that moves in each of its turns."""

    def __init__(self, start):
        self.start = start

    def act(self, rows, *, explore=True):
        mask, state = rows["action_mask"], rows["state_in"]
        begin = (state[:, 0] + self.start).astype(np.int64)
        order = (begin[:, None] + np.arange(9)) % 9
        first = np.take_along_axis(mask, order, axis=1).argmax(axis=1)
        return order[np.arange(len(order)), first], {"state_out": state + 3}

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]

turning = Turning(7)

def make():
    return RandomPolicy()
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with policies and a pool in it, to stand in; what the command does to this process is undone."""
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    pool = OpponentPool(RandomPolicy, folder=tmp_path / "pool")
    for name in ("old", "new"):
        pool.add(name, RandomPolicy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("players", None)


def arena(*args: str, env: str = "tictactoe", backend: str = "sync") -> Any:
    result = CliRunner().invoke(app, ["arena", env, "--backend", backend, *args], prog_name="marlvec")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow("runs commands as programs")
def test_standings_are_sorted_and_numbers_add_up() -> None:
    result = arena("random", "players.py:corner", "players.py:make@pool", "--games", "30", "--plot", "arena.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "180 games" in result.stdout
    rows = {}
    for line in result.stdout.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] in ("random", "corner", "new") and len(cells) == 10:
            rows[cells[0]] = cells[1:]
    assert next(iter(rows)) == "corner", "the best first"
    games, won, drawn, lost = ([int(row[k]) for row in rows.values()] for k in (1, 2, 3, 4))
    assert games == [120] * 3
    assert sum(won) == sum(lost)
    assert sum(won) + sum(drawn) + sum(lost) == 2 * 180
    assert "bradley-terry" in result.stdout
    ratings = {name: tuple(map(int, row[0].split(" ± "))) for name, row in rows.items()}
    assert ratings["corner"][0] > 1000 > min(rating for rating, _ in ratings.values())
    assert sum(rating for rating, _ in ratings.values()) == pytest.approx(3000, abs=2)
    assert all(20 < error < 80 for _, error in ratings.values())
    low, high = map(float, re.findall(r"[\d.]+", rows["corner"][6]))
    assert 50 < low < float(rows["corner"][5].rstrip("%")) < high < 100
    assert re.search(r"^ *corner( +\d+–\d+–\d+| +–){3} *$", result.stdout, re.M)
    assert re.search(r"\d+% \[\d+%, \d+%\]", result.stdout)
    assert "Plot: arena.png" in result.stdout
    assert Path("arena.png").read_bytes().startswith(b"\x89PNG")


def test_equal_seeds_give_equal_tables_wherever_it_runs() -> None:
    args = ("random", "other=random", "--games", "10")
    first = arena(*args, "--seed", "4").stdout
    assert arena(*args, "--seed", "4", backend="thread").stdout == first
    assert arena(*args, "--seed", "5").stdout != first


def test_a_whole_pool_plays_and_may_be_given_a_name() -> None:
    printed = arena("first=players.py:make@pool/*", "players.py:make@pool/old", "--games", "2").stdout
    assert all(re.search(rf"^ *{name} ", printed, re.M) for name in ("first/old", "first/new", "old"))
    assert "12 games" in printed


def test_files_of_policies_play_with_the_connectors_in_them(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(PLAYERS, namespace)
    for name, start in (("one", 1), ("two", 0)):
        save_policy(f"{name}.npz", namespace["Turning"](start), AgentPipeline([RnnState(np.zeros(1))]))
    files = ("players.py:turning@one.npz", "players.py:turning@two.npz")
    found = json.loads(arena(*files, "random", "--games", "4", "--json").stdout)
    assert {player["id"] for player in found["players"]} == {"one/turning", "two/turning", "random"}
    assert found["games"] == 24
    players = {
        name: Opponent.from_file(f"{file}.npz", lambda: namespace["Turning"](5))
        for name, file in (("one/turning", "one"), ("two/turning", "two"))
    }
    wanted = evaluate_match({**players, "random": RandomPolicy()}, "tictactoe", 24, backend="sync", seed=0)
    for player in found["players"]:
        total = wanted.table.total(player["id"])
        assert (player["wins"], player["losses"]) == (total.wins, total.losses)
    chain = ("--connectors", "turning=RnnState([0.0] * 1)")
    save_policy("bare.npz", namespace["Turning"](0))
    bare = arena("players.py:turning@bare.npz", "random", "--games", "4", *chain, "--json")
    assert json.loads(bare.stdout)["games"] == 8
    result = arena("players.py:turning@one.npz", "random", "--connectors", "turning=RnnState([1.0])")
    assert (result.exit_code, "turning was saved with its own connectors" in result.stderr) == (2, True)


def test_opponent_of_a_pool_with_the_name_of_another_player_gets_its_folder_as_well(folder: Path) -> None:
    OpponentPool(RandomPolicy, folder=folder / "more").add("random", RandomPolicy())
    printed = arena("players.py:make@more/*", "random", "--games", "2").stdout
    assert all(re.search(rf"^ *{name} ", printed, re.M) for name in ("more/random", "random"))


def test_intervals_are_of_the_confidence_that_was_asked_for() -> None:
    widths = []
    for confidence in ("0.5", "0.95"):
        printed = arena("random", "players.py:corner", "--games", "20", "--confidence", confidence).stdout
        found = re.search(r"^ *corner +\d+ ± (\d+) +40 ", printed, re.M)
        assert found, printed
        widths.append(int(found[1]))
    assert 2 < widths[1] / widths[0] < 4, "1.96 to 0.67"


def test_json_has_what_the_tables_have() -> None:
    found = json.loads(arena("random", "players.py:corner", "--games", "20", "--json").stdout)
    best, other = found["players"]
    assert (best["id"], best["games"], found["games"]) == ("corner", 40, 40)
    assert (best["wins"], best["losses"]) == (other["losses"], other["wins"])
    low, high = best["rating_interval"]
    assert low < best["rating"] < high
    assert best["sides"]["player_1"]["games"] == 20
    (pair,) = [pair for pair in found["pairs"] if pair["player"] == "corner"]
    assert (pair["against"], pair["wins"]) == ("random", best["wins"])
    elo = json.loads(arena("random", "players.py:corner", "--games", "2", "--rating", "elo", "--json").stdout)
    assert elo["players"][0]["rating_interval"] == [None, None]


def test_no_number_is_cut_where_the_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    players = ("random", "a_name_of_some_length=random", "b=random", "c=random", "d=random")
    wide = arena(*players, "--games", "1").stdout
    monkeypatch.setattr("marlvec.cli.console._WIDTH_IN_A_PIPE", 80)
    printed = arena(*players, "--games", "1").stdout
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert len(re.findall(r"\d+–\d+–\d+ +\d+% \[\d+%, \d+%\]", printed)) == 10, "every pair once"
    ratings = re.findall(r"\d+ ± \d+", wide)
    assert re.findall(r"\d+ ± \d+", printed) == ratings
    assert len(ratings) == 5


@pytest.mark.mostly_slow("runs commands as programs", quick=3)
@pytest.mark.parametrize(("kind", "module"), [("elo", "marlvec"), ("skill", "openskill"), ("alpha-rank", "pyspiel")])
def test_players_can_be_rated_in_other_ways(kind: str, module: str) -> None:
    pytest.importorskip(module)
    printed = arena("random", "players.py:corner", "--games", "20", "--rating", kind).stdout
    names = [line.split()[0] for line in printed.splitlines() if line.strip().startswith(("random ", "corner "))]
    assert names[:2] == ["corner", "random"]


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("random",), "policies: expected at least two"),
        (("random", "random"), "there are two players 'random'; give one another id: ID=random"),
        (("random", "a=random", "--confidence", "1"), "--confidence 1.0: expected a number between 0 and 1"),
        (("random", "a=random", "--plot", "a.docx"), "--plot a.docx: expected a name that ends in one of"),
        (("random", "players.py:make@pool/x"), "no opponent 'x' in pool"),
        (("random", "a=random", "--connectors", "b=FlattenObs"), "no policy 'b'"),
    ],
)
def test_errors_are_one_line(args: tuple[str, ...], words: str) -> None:
    result = arena(*args)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


THREADS = """
import numpy as np
import marlvec.vector.cores

def first(rows):
    import torch
    with open("threads", "w") as file:
        file.write(str(torch.get_num_threads()))
    return np.argmax(rows["action_mask"], axis=1)
"""


@pytest.mark.slow("runs commands as programs")
def test_torch_has_as_many_threads_as_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a container's quota is one core of several; torch is there already, or is imported by a policy."""
    pytest.importorskip("torch")
    (tmp_path / "threads.py").write_text(THREADS, encoding="utf-8")
    command = ("arena", "tictactoe", "random", "threads.py:first", "--games", "1", "--backend", "sync")
    script = f"""
import os, sys
import marlvec.vector.cores
{{before}}
given = dict(os.environ)
marlvec.vector.cores.usable_cores = lambda: 1
sys.argv = ["marlvec", *{command!r}]
from marlvec.cli.console import torch_within_cores
from marlvec.cli import app
app(prog_name="marlvec", standalone_mode=False)
assert os.environ.get("OMP_NUM_THREADS") == given.get("OMP_NUM_THREADS")
{{after}}
"""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    for before, after in (
        ("", "assert 'torch' in sys.modules"),
        ("import torch; torch.set_num_threads(3)", "assert torch.get_num_threads() == 3"),
    ):
        code = script.format(before=before, after=after)
        subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, cwd=tmp_path)
        assert Path("threads").read_text(encoding="utf-8") == "1"
        Path("threads").unlink()
