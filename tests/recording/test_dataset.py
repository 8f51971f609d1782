"""`load_dataset`: rows come back as they were recorded, whole or in part, and bad files are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.external import make as make_external
from tests.collect.players import sync
from tests.recording.runs import collector, make_batch, policy_of, same_rows, two_lives, write
from tests.vector.support.reference import refused

pytest.importorskip("pyarrow")

SOME = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FORMATS = pytest.mark.parametrize("format", ["parquet", "arrow"])


def columns(numbers: Any) -> dict[str, Any]:
    n = len(numbers)
    tree = {"a": np.stack([numbers] * 3, axis=1).astype(np.float32), "b": (numbers % 2 == 0, np.zeros((n, 0)))}
    return {"x": numbers, "obs": tree, "name": np.array([str(k) for k in numbers], "U9")}


@pytest.fixture
def data(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[marlvec.recording.RecordedDataset]:
    """1,000 rows in several files of several blocks."""
    batches = [make_batch(start, 50, columns) for start in range(0, 1000, 50)]
    write(tmp_path / "run", batches, format=request.param, part_bytes=4000)
    with marlvec.load_dataset(tmp_path / "run") as made:
        assert len(made["main"].files) > 3
        yield made


BOTH = pytest.mark.parametrize("data", ["parquet", "arrow"], indirect=True)
WHOLE = SampleBatch(columns(np.arange(1000)))


# --- rows


@BOTH
def test_parts_of_it_are_read_as_numpy_cuts_arrays(data: Any) -> None:
    @SOME
    @given(st.data())
    def check(draw: st.DataObject) -> None:
        start, stop = draw.draw(st.tuples(*[st.integers(-1200, 1200)] * 2))
        first, last, _ = slice(start, stop).indices(1000)
        same_rows(data["main"].read(start, stop), WHOLE.slice(first, max(first, last)))
        where = draw.draw(st.lists(st.integers(0, 999), max_size=30))
        same_rows(data["main"].take(where), WHOLE.take(np.array(where, np.int64)))
        step = draw.draw(st.integers(-7, 7).filter(bool))
        x, obs = data["main"].column("x"), data["main"].column("obs")["a"]
        np.testing.assert_array_equal(x[start:stop:step], np.arange(1000)[start:stop:step])
        np.testing.assert_array_equal(obs[where], WHOLE["obs"]["a"][where])

    check()
    rows = data["main"]
    same_rows(SampleBatch(rows.to_numpy()), WHOLE)
    same_rows(SampleBatch.concat(list(rows.batches(33))), WHOLE)
    x = rows.column("x")
    assert (x[-1], x[np.int64(3)], len(x), x.shape, x.dtype) == (999, 3, 1000, (1000,), np.int64)
    assert x[np.arange(1000) % 500 == 7].tolist() == [7, 507]
    assert np.asarray(x, np.float32).dtype == np.float32
    assert "of policy 'main': int64 of (1000,)" in repr(x)
    assert rows.read(columns=["x"]).keys() == {"x"}
    for wrong in ([1000], [-1], [0.5], [[1]]):
        refused(IndexError, "", rows.take, wrong)
    refused(KeyError, r"no columns \['y'\]", rows.read, columns=["y"])
    refused(ArgumentError, r"write columns=\['x'\]", rows.read, columns="x")
    with pytest.raises(KeyError, match=r"no policy 'other'.*\['main'\]"):
        data["other"]


@BOTH
@pytest.mark.parametrize(("size", "window"), [(64, 1 << 18), (64, 100), (7, 1), (300, 120), (1000, 1000), (5000, 10)])
def test_minibatches_have_each_row_once_an_epoch(size: int, window: int, data: Any) -> None:
    rows = data["main"]
    batches = list(rows.minibatches(size, seed=3, epochs=2, window=window))
    assert len(batches) == len(rows.minibatches(size, epochs=2)) == 2 * -(-1000 // size)
    epochs = [batches[: len(batches) // 2], batches[len(batches) // 2 :]]
    for epoch in epochs:
        assert [len(batch) for batch in epoch[:-1]] == [size] * (len(epoch) - 1)
        joined = SampleBatch.concat(epoch)
        same_rows(joined.take(np.argsort(joined["x"])), WHOLE)
        assert joined["x"].tolist() != list(range(1000))
    orders = [np.concatenate([batch["x"] for batch in epoch]).tolist() for epoch in epochs]
    assert orders[0] != orders[1]
    again = [batch["x"].tolist() for batch in rows.minibatches(size, seed=3, epochs=2, window=window, columns=["x"])]
    assert again == [batch["x"].tolist() for batch in batches]
    dropped = list(rows.minibatches(size, seed=3, drop_last=True, window=window))
    assert [batch["x"].tolist() for batch in dropped] == again[: 1000 // size]
    assert len(dropped) == len(rows.minibatches(size, drop_last=True))


@pytest.mark.parametrize("data", ["parquet"], indirect=True)
def test_minibatches_without_end_and_bad_numbers(data: Any) -> None:
    endless = data["main"].minibatches(600, seed=0, epochs=None)
    found = iter(endless)
    assert sum(len(next(found)) for _ in range(6)) == 3000
    refused(ArgumentError, "they have no end", len, endless)
    for wrong in ({"size": 0}, {"size": 5, "window": 0}, {"size": 5, "epochs": -1}, {"size": 5, "seed": -1}):
        refused(ArgumentError, "", data["main"].minibatches, **wrong)


def test_a_window_of_all_rows_mixes_them_evenly(tmp_path: Path) -> None:
    write(tmp_path / "run", [make_batch(0, 3, lambda n: {"x": n})])
    with marlvec.load_dataset(tmp_path / "run") as data:
        orders = [tuple(next(iter(data["main"].minibatches(3, seed=k)))["x"].tolist()) for k in range(600)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 60  # 100 each, give or take 9


@pytest.mark.slow("imports torch")
def test_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write(tmp_path / "run", [make_batch(0, 5, lambda n: {"x": n})])
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert torch.equal(data["main"].to_torch()["x"], torch.arange(5))


READERS = """
import sys
parquet, arrow = sys.argv[1:]
import duckdb, polars
assert polars.read_parquet(parquet)["x"].to_list() == [0, 1, 2, 3, 4]
assert polars.read_ipc(arrow)["obs"].to_list() == [[1.0, 1.0]] * 5
assert duckdb.sql(f"select sum(x) from read_parquet('{parquet}')").fetchall() == [(10,)]
"""


@pytest.mark.slow("imports polars and DuckDB, in a process of their own: they leave threads behind")
def test_polars_and_duckdb_read_the_files(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    pytest.importorskip("duckdb")
    paths = []
    for format in ("parquet", "arrow"):
        batch = make_batch(0, 5, lambda n: {"x": n, "obs": np.ones((5, 2))})
        write(tmp_path / format, [batch], format=format)
        with marlvec.load_dataset(tmp_path / format) as data:
            paths += map(str, data["main"].files)
    subprocess.run([sys.executable, "-c", READERS, *paths], check=True)


POLARS = """
import sys
from pathlib import Path
import polars
for folder in map(Path, sys.argv[1:]):
    kind = folder.name
    files, scan = f"{folder}/policy=*/*.{kind}", getattr(polars, {"parquet": "scan_parquet", "arrow": "scan_ipc"}[kind])
    rows = scan(files, hive_partitioning=True)
    assert rows.select("policy", "x").collect().sort("x", "policy").rows() == [
        (policy, x) for x in range(3) for policy in ("chasers", "runner")
    ]
    assert "policy" not in scan(files).collect_schema()
    for all_of_them in (lambda: rows.collect(), lambda: scan(folder, hive_partitioning=True).collect()):
        try:
            all_of_them()
        except polars.exceptions.PolarsError:
            continue
        raise AssertionError(kind)
    mine = scan(f"{folder}/policy=runner/*.{kind}").collect()
    assert mine.schema["obs/camera"] == polars.Array(polars.Float32, 6)
    assert mine["obs/camera"].to_numpy().reshape(-1, 2, 3)[2].tolist() == [[12, 13, 14], [15, 16, 17]]
    assert "obs/nothing" not in mine.columns
"""


@pytest.mark.slow("imports polars, in a process of its own: it leaves threads behind")
def test_what_polars_reads_and_what_it_refuses(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    folders = [tmp_path / format for format in ("parquet", "arrow")]
    for folder in folders:
        cameras = {"runner": np.arange(18, dtype=np.float32).reshape(3, 2, 3), "chasers": np.zeros((3, 5), np.float32)}
        batches = {
            policy: SampleBatch({"obs": {"camera": camera, "nothing": np.zeros((3, 0))}, "x": np.arange(3)})
            for policy, camera in cameras.items()
        }
        write(folder, [MultiAgentBatch(batches, env_steps=3)], format=folder.name)
    subprocess.run([sys.executable, "-c", POLARS, *map(str, folders)], check=True)


# --- episodes


def turns(folder: Path, kind: str = "turns", **options: Any) -> list[MultiAgentBatch]:
    """Record envs whose agents join late, end early or take turns."""
    with sync(kind, 3, 3) as envs, marlvec.Recorder(folder, part_bytes=3000, **options) as recorder:
        collects = marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=[recorder], seed=1)
        return [collects.collect(env_steps=13) for _ in range(9)]


KINDS = pytest.mark.parametrize("kind", ["parallel", "turns"])


@KINDS
def test_episodes_are_those_of_the_batches(kind: str, tmp_path: Path) -> None:
    whole = MultiAgentBatch.concat(turns(tmp_path / "run", kind))
    want = whole.episodes()
    with marlvec.load_dataset(tmp_path / "run") as data:
        got = list(data.episodes())
        groups = list(data.episode_batches(rows=20))
        table = data.episode_table()
    assert [repr(one).splitlines()[1:] for one in got] == [repr(one).splitlines()[1:] for one in want]
    assert len(groups) > 3
    ids = [sorted(set(group["main"]["eps_id"].tolist())) for group in groups]
    assert [eps_id for group in ids for eps_id in group] == [one.eps_id for one in want]
    rows = whole["main"]
    for k, one in enumerate(want):
        mine = rows.take(np.flatnonzero(rows["eps_id"] == one.eps_id))
        assert (table.eps_id[k], table.session[k]) == (one.eps_id, 0)
        assert table.returns[k] == pytest.approx(mine["rewards"].sum())
        assert table.length[k] == len(one)
        ended = int((mine["terminated"] | mine["truncated"]).sum())
        assert table.whole[k] == (ended == int((mine["t"] == 0).sum()))


@KINDS
def test_joint_rows_have_an_axis_of_agents(kind: str, tmp_path: Path) -> None:
    rows = MultiAgentBatch.concat(turns(tmp_path / "run", kind))["main"]
    with marlvec.load_dataset(tmp_path / "run") as data:
        episodes = list(data.joint())
        assert data.agents is not None
        second = list(data.joint(columns=["rewards"], agents=[data.agents[1]]))
    joint = SampleBatch.concat(episodes)
    assert int(joint["acting"].sum()) == len(rows)
    assert [int(one["unroll_id"][0]) for one in episodes] == list(range(len(episodes)))
    where = {}
    for m, (eps_id, env_t) in enumerate(zip(joint["eps_id"].tolist(), joint["env_t"].tolist(), strict=True)):
        where[eps_id, env_t] = m
    assert list(where) == sorted(where)
    for i in range(len(rows)):
        m, a = where[int(rows["eps_id"][i]), int(rows["env_t"][i])], int(rows["agent_index"][i])
        assert joint["acting"][m, a]
        for name in ("obs", "actions", "rewards", "next_obs", "terminated", "next_env_t"):
            assert joint[name][m, a].tobytes() == rows[name][i].tobytes()
    assert not joint["obs"][~joint["acting"]].any()
    padded = joint.right_zero_pad()
    assert padded["obs"].shape[:3] == (len(episodes), max(map(len, episodes)), 3)
    assert sum(float(one["rewards"].sum()) for one in second) == pytest.approx(
        float(rows["rewards"][rows["agent_index"] == 1].sum())
    )


def test_joint_rows_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(tmp_path / "run") as recorder,
    ):
        collector(envs, [recorder]).collect(env_steps=10)
    with marlvec.load_dataset(tmp_path / "run") as data:
        refused(ArgumentError, r"column 'obs' of policy '.*' is .*choose columns= or agents=", next, data.joint())
        episode = next(data.joint(columns=["rewards"]))
        assert episode["rewards"].shape == (5, 4)
        hunters = next(data.joint(agents=[agent for agent in envs.agents if agent.startswith("adv")]))
        assert hunters["obs"].shape == (5, 3, 16)
        for wrong in (["nobody"], [], "agent_0"):
            refused(ArgumentError, "expected names among", data.joint, agents=wrong)
        refused(ArgumentError, r"has no columns \['logp'\]", data.joint, columns=["logp"])


@KINDS
def test_it_is_replayed(kind: str, tmp_path: Path) -> None:
    rows = MultiAgentBatch.concat(turns(tmp_path / "run", kind))["main"]
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert data.agents is not None
        spaces = {agent: (data.observation_space(agent), data.action_space(agent)) for agent in data.agents}
        count = len(list(data.episodes()))
        with make_external(spaces, num_envs=4) as envs, data.replay(envs):
            batch = marlvec.Collector(envs, marlvec.RandomPolicy(), batch_mode="complete").collect(episodes=count)
    got = batch["main"]
    assert len(got) == len(rows)
    assert sorted(got["rewards"].tolist()) == sorted(rows["rewards"].tolist())


def with_values(rows: Any) -> tuple[Any, dict[str, Any]]:
    """Acts, with a number, a count and a pair as further columns."""
    n = len(rows)
    pair = {"a": np.full((n, 2), 7.0, np.float32), "b": np.full(n, 3)}
    return np.ones(n, np.int64), {"values": np.full(n, 0.5, np.float32), "count": np.full(n, 2), "pair": pair}


@pytest.mark.parametrize("how", ["random_steps", "append"])
def test_columns_that_begin_late_are_filled_and_marked_in_every_view(how: str, tmp_path: Path) -> None:
    def collect(policies: Any, batches: int, **options: Any) -> None:
        with (
            marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
            marlvec.Recorder(tmp_path / "run", append=True) as recorder,
        ):
            collects = marlvec.Collector(envs, policies, policy_of, callbacks=[recorder], seed=0, **options)
            for _ in range(batches):
                collects.collect(env_steps=20)

    late = {"chasers": marlvec.FunctionPolicy(with_values), "runner": marlvec.FunctionPolicy(with_values)}
    if how == "random_steps":
        collect(late, 3, random_steps=20)
    else:
        # The chasers' columns begin late, those of the runner are in all files.
        collect({**late, "chasers": marlvec.RandomPolicy()}, 1)
        collect(late, 2)
    with marlvec.load_dataset(tmp_path / "run") as data:
        chasers = data["chasers"].read()
        lacks_B = chasers["values_missing"]
        assert lacks_B.dtype == np.bool_
        assert 0 < lacks_B.sum() < len(chasers)
        assert (np.isnan(chasers["values"]) == lacks_B).all()
        assert (chasers["values"][~lacks_B] == 0.5).all()
        assert (chasers["count_missing"] == lacks_B).all()
        assert (chasers["count"] == np.where(lacks_B, 0, 2)).all()
        assert (chasers["pair_missing"] == lacks_B).all()
        assert (np.isnan(chasers["pair"]["a"]) == lacks_B[:, None]).all()
        assert (chasers["pair"]["b"] == np.where(lacks_B, 0, 3)).all()
        if how == "append":
            assert not data["runner"].read()["values_missing"].any()
        same_rows(data["chasers"].take(np.arange(len(chasers))), chasers)
        counts = [rows["count"][rows["values_missing"]] for rows in data["chasers"].minibatches(7, seed=0)]
        assert np.concatenate(counts).tolist() == [0] * lacks_B.sum()
        episodes = list(data.episodes())
        assert sum(len(one) for each in episodes for one in each.agent_episodes) == len(chasers) + len(data["runner"])
        for rows in data.joint(["values", "values_missing", "rewards"]):
            missing_TA = rows["values_missing"] & rows["acting"]
            assert (np.isnan(rows["values"]) == missing_TA).all()
        assert len(data.episode_table().returns) == len(episodes)


def test_a_column_without_which_a_row_is_no_decision_is_not_filled(tmp_path: Path) -> None:
    batches = [make_batch(0, 4, lambda n: {"x": n}), make_batch(4, 4, lambda n: {"x": n, "rewards": n * 1.0})]
    write(tmp_path / "run", batches)
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert data["main"].keys() == ["x", "rewards"]
        refused(CheckpointError, "lacks 'rewards', which other files have: choose columns= without", data["main"].read)
        assert data["main"].read(columns=["x"])["x"].tolist() == list(range(8))


def test_a_recorded_column_with_the_name_of_a_mark_stays(tmp_path: Path) -> None:
    marks = np.arange(8) % 2 == 0
    batches = [
        make_batch(0, 4, lambda n: {"x_missing": marks[n]}),
        make_batch(4, 4, lambda n: {"x_missing": marks[n], "x": n, "name": n.astype(str)}),
    ]
    write(tmp_path / "run", batches)
    with marlvec.load_dataset(tmp_path / "run") as data:
        rows = data["main"].read()
    assert rows["x_missing"].tolist() == marks.tolist()
    assert rows["name"].tolist() == ["", "", "", "", "4", "5", "6", "7"]
    assert rows["name_missing"].tolist() == [True] * 4 + [False] * 4


def test_rows_without_ids_are_no_episodes(tmp_path: Path) -> None:
    write(tmp_path / "run", [make_batch(0, 3, lambda n: {"x": n})])
    with marlvec.load_dataset(tmp_path / "run") as data:
        for call in (data.episode_table, lambda: next(data.episodes()), lambda: next(data.joint())):
            refused(ArgumentError, r"no columns|lack the columns", call)
        assert data.agents is None
        assert "3 rows" in repr(data)


def test_an_empty_recording_is_one(tmp_path: Path) -> None:
    write(tmp_path / "run", [])
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert list(data) == list(data.episodes()) == list(data.joint()) == []
        assert data.is_closed
        assert len(data.episode_table().returns) == 0


# --- bad files


def spoilt(folder: Path, change: Callable[[list[Any]], object]) -> None:
    """Change a manifest's lines."""
    path = folder / "manifest.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@FORMATS
def test_a_file_that_is_missing_cut_or_changed_is_named(format: str, tmp_path: Path) -> None:
    write(tmp_path / "run", [make_batch(0, 500, lambda n: {"x": n})], format=format)
    path = tmp_path / "run" / "policy=main" / f"part-000000.{format}"
    content = path.read_bytes()
    for wrong, text in [
        (content[:-1], "it was cut or changed"),
        (content + b"x", "it was cut or changed"),
        (b"", "cut"),
    ]:
        path.write_bytes(wrong)
        caught = refused(CheckpointError, text, marlvec.load_dataset, tmp_path / "run")
        assert caught.file == str(path)
    for place in range(0, len(content), 211):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with marlvec.load_dataset(tmp_path / "run") as data, pytest.raises(CheckpointError, match="was changed"):
            data["main"].read()
        with marlvec.load_dataset(tmp_path / "run", verify=False) as data:
            try:
                rows = data["main"].read()
            except CheckpointError:
                continue
            assert format == "arrow" or rows["x"].tolist() == list(range(500))
    path.unlink()
    refused(CheckpointError, "there is no such file", marlvec.load_dataset, tmp_path / "run")


@FORMATS
def test_a_file_of_another_recording_raises(format: str, tmp_path: Path) -> None:
    for name in ("run", "other"):
        write(tmp_path / name, [make_batch(0, 50, lambda n, key=name: {key: n})], format=format)
    path = Path("policy=main", f"part-000000.{format}")
    content = (tmp_path / "other" / path).read_bytes()
    (tmp_path / "run" / path).write_bytes(content)

    def fit(lines: list[Any]) -> None:
        lines[2]["files"][0]["bytes"] = len(content)

    spoilt(tmp_path / "run", fit)
    with (
        marlvec.load_dataset(tmp_path / "run", verify=False) as data,
        pytest.raises(CheckpointError, match="is not the manifest's file: its columns, forms differ"),
    ):
        data["main"].read()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: lines[0].update(format=2), "is of format 2; this marlvec reads 1"),
        (lambda lines: lines[0].update(format=[1]), "is of format"),
        (lambda lines: lines.insert(1, lines[2]), "line 2"),
        (lambda lines: lines.append([3]), "line 5.*expected an object"),
        (lambda lines: lines.append({"x": 3}), "line 5"),
        (lambda lines: lines[2].update(part=1), "line 3.*part: expected 0, got 1"),
        (lambda lines: lines[2].update(session=7), "line 3"),
        (lambda lines: lines[2]["files"][0].update(rows=51), "rows: expected 50, got 51"),
        (lambda lines: lines[2]["files"][0].update(rows=-1), "line 3"),
        (lambda lines: lines[2]["files"][0].update(policy="../../etc"), "policy: expected 'main'"),
        (lambda lines: lines[2]["files"][0].update(format="pickle"), r"files\[0\]: format: expected one of"),
        (lambda lines: lines[2]["files"].append(lines[2]["files"][0]), "two files"),
        (lambda lines: lines[1].update(forms={"x": ["|V8", []]}), r"line 2.*'\|V8'"),
        (lambda lines: lines[1].update(forms={"x": ["<i8", [-1]]}), "line 2"),
        (lambda lines: lines[1].update(columns=[["x", {"list": []}]]), "line 2"),
        (lambda lines: lines[1].update(columns=[["x", "y"]]), "line 2"),
    ],
)
def test_an_invalid_manifest_raises(change: Any, text: str, tmp_path: Path) -> None:
    write(tmp_path / "run", [make_batch(0, 50, lambda n: {"x": n})])
    spoilt(tmp_path / "run", change)
    refused(CheckpointError, text, marlvec.load_dataset, tmp_path / "run")
    refused(CheckpointError, text, marlvec.Recorder, tmp_path / "run", append=True)


def test_nothing_outside_of_the_folder_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "run", [make_batch(0, 50, lambda n: {"x": n})])
    path = tmp_path / "run" / "policy=main" / "part-000000.parquet"
    path.replace(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(CheckpointError, "leads out of", marlvec.load_dataset, tmp_path / "run")
    path.unlink()
    os.mkfifo(path)
    refused(CheckpointError, "there is no such file", marlvec.load_dataset, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda about: about.update(format=3), "is of format 3"),
        (lambda about: about.pop("envs"), "cannot be read"),
        (lambda about: about["envs"].update(action_spaces=[]), "cannot be read"),
        (lambda about: about["envs"].update(state_space=3), "expected a space"),
        (lambda about: about["envs"]["action_spaces"][0].update({"$space": "Pickle"}), "cannot be read"),
    ],
)
def test_an_invalid_schema_raises(change: Any, text: str, tmp_path: Path) -> None:
    turns(tmp_path / "run")
    path = tmp_path / "run" / "schema.json"
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))
    refused(CheckpointError, text, marlvec.load_dataset, tmp_path / "run")


def test_a_folder_without_recording_raises(tmp_path: Path) -> None:
    refused(CheckpointError, "is not a folder", marlvec.load_dataset, tmp_path / "nowhere")
    refused(CheckpointError, r"is not a recording: its manifest\.jsonl cannot be read", marlvec.load_dataset, tmp_path)
    (tmp_path / "manifest.jsonl").touch()
    refused(CheckpointError, "it lists no session", marlvec.load_dataset, tmp_path)
    write(tmp_path / "run", [make_batch(0, 50, lambda n: {"x": n})])
    (tmp_path / "run" / "schema.json").unlink()
    refused(CheckpointError, r"schema\.json cannot be read", marlvec.load_dataset, tmp_path / "run")


def test_an_episode_is_whole_although_an_agent_ended_and_came_back(tmp_path: Path) -> None:
    rows = two_lives()["main"]
    cases = {"whole": np.ones(12, np.bool_), "no end": np.arange(12) != 4, "no start": np.arange(12) != 5}
    for name, kept in cases.items():
        write(tmp_path / name, [MultiAgentBatch({"main": rows.take(kept)}, env_steps=7)])
        with marlvec.load_dataset(tmp_path / name) as data:
            assert data.episode_table().whole.tolist() == [name == "whole"]
            (episode,) = data.episodes()
            assert len(episode.episodes_of(0)) == 2
