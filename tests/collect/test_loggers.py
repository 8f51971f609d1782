"""Callbacks that come with marlvec: what they write can be read elsewhere, and what they show is so."""

from __future__ import annotations

import io
import json
import math
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from marlvec.collect import Collector
from marlvec.collect.callbacks import RunningEpisode
from marlvec.collect.loggers import JSONLinesLogger, LiveTable, TensorBoardLogger
from marlvec.errors import ArgumentError, MissingExtraError
from tests.collect.plans import dying_counters
from tests.collect.players import noop
from tests.faults.test_resources import limited
from tests.tracer import Tracer


def on_episode_end(episode: RunningEpisode, record: Any) -> None:
    episode.custom["won"] = record.number == 0
    episode.custom["odd"] = math.nan


# --- TensorBoard


def read_events(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Steps and scalars in the one event file there, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events
        if event.HasField("summary")
    ]


def test_tensorboard_can_read_the_metrics_of_each_batch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "runs" / "first"
    with dying_counters({(1, 0): ("step", 4, False)}, length=3) as envs, TensorBoardLogger(folder) as logger:
        collector = Collector(
            envs,
            {"p": noop(), "q": noop()},
            {"agent_0": "q", "agent_1": "p"},
            callbacks=[on_episode_end, logger],
            seed=0,
            window=4,
        )
        collector.collect(env_steps=4)
        (first,) = read_events(folder)  # on disk at once
        for loss in (9.0, 0.5, math.nan):
            collector.metrics.add_value("loss", loss)
        collector.metrics.add_value("won", 7.0)  # a name that episodes have, too
        collector.collect(env_steps=14)
        metrics = collector.metrics
        again, (step, values) = read_events(folder)
    logger.close()
    assert again == first
    assert first[0] == 4
    assert not any(tag.startswith(("episodes/", "policies/", "agents/", "custom/")) for tag in first[1])
    assert step == metrics.env_steps == 20
    expected = {
        "episodes/return_mean": metrics.returns.mean,
        "episodes/return_min": metrics.returns.min,
        "episodes/length_max": 3.0,
        "policies/p/return_max": metrics.agent("agent_1")["return"].max,
        "policies/q/length_mean": 3.0,
        "agents/agent_0/return_mean": metrics.policy("q")["return"].mean,
        "custom/won_mean": metrics.episode_values["won"].mean,
        "custom/won": 7.0,
        "custom/loss": 0.5,  # the last of them, and no mean
        "totals/episodes": metrics.episodes_total,
        "totals/episodes_faulty": 1.0,
        "totals/env_steps_lost": metrics.env_steps_lost,
    }
    assert {tag: values[tag] for tag in expected} == {tag: np.float32(value) for tag, value in expected.items()}
    assert 0 < values["custom/won_mean"] < 1
    assert not {"custom/odd", "custom/odd_mean", "custom/loss_mean"} & values.keys()
    assert values["speed/env_steps_per_second"] > 0
    assert 0 < values["seconds/env_wait"] < metrics.timers["env_wait"].seconds
    assert not any(math.isnan(value) for value in values.values())


def test_a_value_is_written_as_it_was_given_last(tmp_path: Path) -> None:
    """However many came before: a curve of means would say 0.103 where it is 0.061."""
    pytest.importorskip("tensorboard")
    given = [0.4 * 0.9**k for k in range(20)]
    with dying_counters({}, 1) as envs, TensorBoardLogger(tmp_path / "a") as logger:
        collector = Collector(envs, noop(), callbacks=[logger])
        for value in given:
            collector.metrics.add_value("exploitability", value)
            collector.collect(env_steps=2)
    curve = [values["custom/exploitability"] for _, values in read_events(tmp_path / "a")]
    assert curve == [np.float32(value) for value in given]
    assert collector.metrics.last_values == {"exploitability": given[-1]}
    assert collector.metrics.summary()["last_values"] == {"exploitability": given[-1]}
    assert collector.metrics.custom["exploitability"].count == 20


def test_every_curve_that_is_a_mean_over_episodes_is_called_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with dying_counters({}, length=[2, 3]) as envs, TensorBoardLogger(tmp_path / "a") as logger:
        collector = Collector(envs, noop(), callbacks=[on_episode_end, logger])
        collector.metrics.add_value("loss", 1)
        collector.collect(env_steps=20)
    ((_, values),) = read_events(tmp_path / "a")
    over_episodes = {tag for tag in values if tag.split("/")[0] in ("episodes", "policies", "agents")}
    assert {tag.rpartition("_")[2] for tag in over_episodes} == {"mean", "min", "max"}
    assert {tag for tag in values if tag.startswith("custom/")} == {"custom/loss", "custom/won_mean"}
    rest = {tag.split("/")[0] for tag in values.keys() - over_episodes}
    assert rest == {"custom", "totals", "speed", "seconds"}


def test_agents_may_be_left_out(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with dying_counters({}, 1) as envs, TensorBoardLogger(str(tmp_path / "a"), agents=False) as logger:
        Collector(envs, noop(), callbacks=[logger]).collect(env_steps=10)
    ((_, values),) = read_events(tmp_path / "a")
    assert "policies/main/return_mean" in values
    assert not any(tag.startswith("agents/") for tag in values)


def test_curves_are_of_the_policies_that_were_asked_for(tmp_path: Path) -> None:
    """Of those that come later, too: a pool of opponents grows."""
    pytest.importorskip("tensorboard")
    for chosen, written in ((None, {"old", "new"}), (["new"], {"new"}), ([], set())):
        folder = tmp_path / str(chosen)
        with dying_counters({}, 1) as envs, TensorBoardLogger(folder, policies=chosen) as logger:
            players = ["old"]
            collector = Collector(envs, {"old": noop()}, lambda *_, players=players: players[-1], callbacks=[logger])
            collector.collect(episodes=2)
            collector.add_policy("new", noop())
            players.append("new")
            collector.collect(episodes=3)
        events = [values for _, values in read_events(folder)]
        assert {tag.split("/")[1] for values in events for tag in values if tag.startswith("policies/")} == written
        assert all("episodes/return_mean" in values for values in events)


def test_curves_go_on_where_a_checkpoint_was(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with dying_counters({}, 1) as envs, TensorBoardLogger(tmp_path / "a", first_step=700) as logger:
        collector = Collector(envs, noop(), callbacks=[logger])
        for steps in (10, 20):
            collector.collect(env_steps=steps)
    assert [step for step, _ in read_events(tmp_path / "a")] == [710, 730]


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r'pip install "marlvec\[tensorboard\]"'):
        TensorBoardLogger(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("collects whole runs on several backends")
def test_neither_torch_nor_what_callbacks_draw_with_is_imported_unasked() -> None:
    code = (
        "import sys, marlvec.collect.loggers as c; bad = {'torch', 'tensorboard', 'rich'} & set(sys.modules); "
        "assert not bad, bad; c.LiveTable(); assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- JSON lines


def test_a_line_of_json_for_each_episode(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"eps_id": -1}\n')
    with dying_counters({}, length=[2, 3]) as envs, JSONLinesLogger(path) as logger:
        collector = Collector(envs, noop(), callbacks=[on_episode_end, logger], seed=0)
        collector.collect(env_steps=10)
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # on disk at once
    logger.close()
    records = collector.metrics.episodes
    assert [line["eps_id"] for line in lines] == [-1, *(record.eps_id for record in records)]
    assert len(records) == 4
    for line, record in zip(lines[1:], records, strict=True):
        assert line == {
            "eps_id": record.eps_id,
            "env_id": record.env_id,
            "number": record.number,
            "length": record.length,
            "return": record.episode_return,
            "duration": record.duration,
            "returns": record.returns_A.tolist(),
            "decisions": [record.length] * 2,
            "present": [True, True],
            "policies": ["main", "main"],
            "custom": {"won": float(record.number == 0), "odd": None},
        }


@pytest.mark.mostly_slow("interrupts at each line", quick=2)
@pytest.mark.parametrize("stop", ["a full disk", "Ctrl-C"])
@pytest.mark.parametrize("kind", [JSONLinesLogger, TensorBoardLogger])
def test_records_are_whole_and_each_is_there_once_whatever_stops_a_call(kind: Any, stop: str, tmp_path: Path) -> None:
    if kind is TensorBoardLogger:
        pytest.importorskip("tensorboard")
    for at in range(1, 200):
        path = tmp_path / str(at)
        with dying_counters({}, length=[2, 3]) as envs, kind(path) as logger:
            collector = Collector(envs, noop(), callbacks=[logger], seed=0)
            collector.collect(env_steps=20)
            file = path if path.is_file() else next(path.iterdir())
            try:
                if stop == "a full disk":
                    with limited(resource.RLIMIT_FSIZE, file.stat().st_size + 99 * at - 98):
                        collector.collect(env_steps=20)
                else:
                    with Tracer(("/collect/append_file",), at, everywhere=True):
                        collector.collect(env_steps=20)
                break
            except OSError as error:
                assert error.filename == str(file)  # noqa: PT017  (of one way of two)
            except KeyboardInterrupt:
                assert stop == "Ctrl-C"
            for _ in range(2):  # the batch that was not returned is returned first
                collector.collect(env_steps=20)
        if kind is JSONLinesLogger:
            found = [json.loads(line)["eps_id"] for line in path.read_text().splitlines()]
            known = [record.eps_id for record in collector.metrics.episodes]
            assert found == [eps_id for eps_id in known if eps_id in found]
            assert len(found) >= len(known) - (stop == "Ctrl-C"), "where its hook was ended"
        else:
            steps = [step for step, _ in read_events(path)]
            assert sorted({*steps, collector.metrics.env_steps}) == sorted({20, 40, 60, *steps})
            assert len(steps) <= 4
    else:
        raise AssertionError("it was stopped each time")


# --- the live table


def screen(text: str) -> list[str]:
    """What stands on a terminal in the end, line by line, with the codes that rich uses to redraw."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[\d;?]*[a-zA-Z]|\r|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part and not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines]


def terminal(**options: Any) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=100, color_system=None, legacy_windows=False, **options), text


def collect(table: LiveTable, calls: int = 3, *, deaths: Any = None) -> Collector:
    with dying_counters(deaths or {}, length=[2, 3]) as envs:
        policies = {"p": noop(), "q": noop()}
        mapping = {"agent_0": "q", "agent_1": "p"}
        collector = Collector(envs, policies, mapping, callbacks=[on_episode_end, table], seed=0)
        for _ in range(calls):
            collector.collect(env_steps=10)
    return collector


def test_on_a_terminal_the_table_is_redrawn_in_place() -> None:
    console, text = terminal(force_terminal=True)
    with LiveTable(30, title="counters", console=console, refresh_seconds=1e-9) as table:
        collector = collect(table, deaths={(0, 0): ("step", 6, False)})
    metrics = collector.metrics
    shown = screen(text.getvalue())
    assert shown[0] == "counters"
    assert re.fullmatch(r"32 of 30 env steps · [\d,]+/s · 11 episodes, 1 lost", shown[1])
    assert shown.count("counters") == 1
    assert text.getvalue().count("counters") > 10
    for name in ("p", "q"):
        (line,) = [line for line in shown if line.strip().startswith(f"{name} ")]
        stats = metrics.policy(name)["return"]
        assert re.split(r"\s{2,}", line.strip()) == [
            *(name, f"{stats.mean:.4g}", f"{stats.min:.4g} … {stats.max:.4g}"),
            *(f"{metrics.lengths.mean:.4g}", "2 … 3"),
        ]
    assert any(line.split()[:5] == ["won", f"{metrics.custom['won'].mean:.4g}", "0", "…", "1"] for line in shown)
    (team,) = [line for line in shown if "team return (sum over agents)" in line]
    assert re.split(r"\s{2,}", team.strip())[1] == f"{metrics.returns.mean:.4g}"
    assert metrics.returns.mean > 1.5 * metrics.policy("p")["return"].mean
    assert any(line.strip() == "return per agent" for line in shown), "a label of its own"
    assert any(line.split() == ["odd", "–", "–"] for line in shown)
    assert any(re.match(r"time: .*env wait \d+%", line) for line in shown)
    assert text.getvalue().endswith("\x1b[?25h"), "the cursor is back"
    before = text.getvalue()
    table.close()
    collect(table)  # closed: it says no more
    assert text.getvalue() == before


@pytest.mark.parametrize("options", [{"force_terminal": True}, {}])
def test_a_value_is_shown_as_it_was_given_last(options: Any) -> None:
    console, text = terminal(**options)
    with LiveTable(console=console) as table, dying_counters({}, 1) as envs:
        collector = Collector(envs, noop(), callbacks=[table])
        for loss in (9.0, 0.25):
            collector.metrics.add_value("loss", loss)
            collector.collect(env_steps=4)
    last = screen(text.getvalue()) if options else text.getvalue().split(" · ")
    assert [part.split() for part in last if part.strip().startswith("loss")] == [
        ["loss", "0.25"] if options else ["loss:", "0.25"]
    ]


def test_where_there_is_no_terminal_a_plain_line_comes_now_and_then() -> None:
    console, text = terminal()
    with LiveTable(title="run 1", console=console, plain_seconds=3600) as table:
        collector = collect(table)
        assert text.getvalue() == "", "not yet"
    metrics = collector.metrics
    (line,) = text.getvalue().splitlines()
    words = line.split(" · ")
    assert (words[0], words[2]) == ("run 1: 30 env steps", "12 episodes")
    assert re.fullmatch(r"[\d,]+/s", words[1])
    stats = metrics.policy("p")["return"]
    assert words[3] == f"p: return per agent {stats.mean:.4g} ({stats.min:.4g} … {stats.max:.4g})"
    assert words[5:] == [f"won (mean): {metrics.custom['won'].mean:.4g}"]
    assert "\x1b" not in text.getvalue()

    console, text = terminal()
    with LiveTable(console=console, plain_seconds=1e-9) as table:
        collect(table)
    lines = text.getvalue().splitlines()
    assert len(lines) >= 15, "one for each step"
    assert [int(line.split()[0]) for line in lines] == sorted(int(line.split()[0]) for line in lines)
    assert lines[-1].startswith("30 env steps")


def test_a_table_of_some_policies_shows_no_others() -> None:
    for options in ({"force_terminal": True}, {}):
        console, text = terminal(**options)
        with LiveTable(console=console, policies=["q"]) as table:
            collect(table)
        shown = text.getvalue()
        assert re.search(r"\bq(:| )", shown)
        assert not re.search(r"\bp(:| )", shown)


def test_neither_a_name_nor_a_number_is_cut_at_80_columns() -> None:
    text, name = io.StringIO(), "a_policy_with_a_name_that_is_longer_than_half_a_line"
    console = Console(file=text, width=80, color_system=None, legacy_windows=False, force_terminal=True)
    with LiveTable(10**12, console=console) as table, dying_counters({}, length=[2, 3]) as envs:
        collector = Collector(envs, {name: noop()}, name, callbacks=[table], seed=0)
        collector.collect(env_steps=10)
    shown = screen(text.getvalue())
    assert max(map(len, shown)) <= 80
    first = next(k for k, line in enumerate(shown) if line.strip().startswith("a_policy"))
    assert "".join(line.split()[0] for line in shown[first : first + 2]) == name
    stats = collector.metrics.policy(name)["return"]
    assert f"{stats.mean:.4g}   {stats.min:.4g} … {stats.max:.4g}" in shown[first]
    assert not re.search(r"\S…|…\S", "".join(shown))


def test_how_far_it_is_is_drawn_where_the_end_is_known() -> None:
    for total, drawn in ((60, "50%"), (None, "")):
        console, text = terminal(force_terminal=True)
        with LiveTable(total, console=console) as table:
            collect(table)
        lines = [line for line in screen(text.getvalue()) if "━" in line]
        assert bool(lines) == bool(total)
        assert all(re.search(rf"━+.* {drawn}, 0:00:\d\d left", line) for line in lines)


def test_unclosed_table_restores_the_cursor() -> None:
    console, text = terminal(force_terminal=True)
    table = LiveTable(console=console)
    collect(table)
    assert text.getvalue().count("\x1b[?25l") == 1
    assert text.getvalue().count("\x1b[?25h") == 0
    del table
    import gc

    gc.collect()
    assert text.getvalue().count("\x1b[?25h") == 1


def test_nothing_was_collected() -> None:
    console, text = terminal(force_terminal=True)
    with LiveTable(console=console):
        pass
    assert text.getvalue() == ""


@pytest.mark.parametrize("options", [{"window": 0}, {"refresh_seconds": 0.0}, {"plain_seconds": -1.0}])
def test_a_table_wants_positive_numbers(options: Any) -> None:
    with pytest.raises(ArgumentError, match="above 0"):
        LiveTable(**options)
