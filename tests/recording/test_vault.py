"""Recordings as OG-MARL's Vaults, and back."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, CheckpointError, MissingExtraError
from marlvec.recording import from_vault, to_vault, vault
from marlvec.recording.vault import Leaf, VaultStore, leaves_of
from tests.recording import foreign
from tests.recording.runs import collector, same_rows, two_lives, write
from tests.vector.support.reference import refused

pytest.importorskip("pyarrow")

needs_tensorstore = pytest.mark.skipif(
    importlib.util.find_spec("tensorstore") is None, reason="tensorstore is not installed"
)


@pytest.fixture
def recorded(tmp_path: Path) -> MultiAgentBatch:
    """Two policies' rows of simple_tag, with states, in ``run``; in order of episode, agent and time."""
    pytest.importorskip("numba")
    with (
        marlvec.make("simple_tag", 3, backend="native", max_cycles=5, state=True) as envs,
        marlvec.Recorder(tmp_path / "run", part_bytes=4000) as recorder,
    ):
        collects = collector(envs, [recorder])
        return MultiAgentBatch.concat([collects.collect(env_steps=33) for _ in range(3)])


def _sorted(rows: SampleBatch, *keys: str) -> SampleBatch:
    return rows.take(np.lexsort([rows[key] for key in keys[::-1]]))


@needs_tensorstore
def test_rows_go_to_a_vault_and_back(recorded: MultiAgentBatch, tmp_path: Path) -> None:
    agents = ["adversary_2", "adversary_0"]
    with marlvec.load_dataset(tmp_path / "run") as data:
        steps = to_vault(data, tmp_path / "tag.vlt" / "Random", agents)
        assert steps == data.env_steps == 99
        assert data.agents is not None
        places = [data.agents.index(agent) for agent in agents]
        spaces: Any = {agent: (data.observation_space(agent), data.action_space(agent)) for agent in agents}
    from_vault(tmp_path / "tag.vlt" / "Random", tmp_path / "back", spaces=spaces)
    with marlvec.load_dataset(tmp_path / "back") as back:
        assert back.agents == tuple(agents)
        assert back.env_steps == steps
        assert {agent: (back.observation_space(agent), back.action_space(agent)) for agent in agents} == spaces
        got = _sorted(back["main"].read(), "eps_id", "agent_index", "t")
    rows = recorded["chasers"]
    found = [rows.take(np.flatnonzero(rows["agent_index"] == place)) for place in places]
    want = SampleBatch.concat([one.replace(agent_index=np.full(len(one), k)) for k, one in enumerate(found)])
    want = _sorted(want, "eps_id", "agent_index", "t")
    for name in ("obs", "actions", "actions_for_env", "rewards", "state", "t", "env_t", "next_env_t", "agent_index"):
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    ends_B = got["next_obs_missing"]
    np.testing.assert_array_equal(
        np.flatnonzero(ends_B), np.flatnonzero(np.diff(want["eps_id"] * 2 + got["agent_index"], append=-1))
    )
    for name in ("next_obs", "next_state"):
        np.testing.assert_array_equal(got[name][~ends_B], want[name][~ends_B])
        np.testing.assert_array_equal(got[name][ends_B], want[name.removeprefix("next_")][ends_B])
    np.testing.assert_array_equal(got["terminated"], want["terminated"])
    np.testing.assert_array_equal(got["truncated"], ends_B)  # all are cut off, by time or by the recording's end
    assert np.unique(got["eps_id"]).tolist() == list(range(len(np.unique(want["eps_id"]))))


@needs_tensorstore
def test_turns_and_masks_go_to_a_vault_and_back(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    with marlvec.make("connect_four", 2, backend="native") as envs, marlvec.Recorder(tmp_path / "run") as recorder:
        collects = marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=[recorder], batch_mode="complete", seed=0)
        rows = collects.collect(episodes=9)["main"]
    with marlvec.load_dataset(tmp_path / "run") as data:
        to_vault(data, tmp_path / "vault")
    from_vault(tmp_path / "vault", tmp_path / "back", "arrow")
    with marlvec.load_dataset(tmp_path / "back") as back:
        assert back.episode_table().whole.all()
        got = _sorted(back["main"].read(), "eps_id", "agent_index", "t")
    want = _sorted(rows, "eps_id", "agent_index", "t")
    names = [
        "obs",
        "actions_for_env",
        "rewards",
        "terminated",
        "truncated",
        "action_mask",
        "next_action_mask",
        "t",
        "env_t",
    ]
    for name in (*names, "agent_index"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@st.composite
def _vaults(draw: st.DrawFn) -> dict[str, Any]:
    """Flags (T, N) of a Vault, as they may come."""
    length, agents = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    seed, rate = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    rng = np.random.default_rng(seed)
    found = {name: rng.random((length, agents)) < rate for name in ("terminals", "truncations")}
    return found | ({"acting": rng.random((length, agents)) < 0.6} if draw(st.booleans()) else {})


def _expected(flags: dict[str, Any]) -> list[tuple[int, ...]]:
    """Rows as a plain loop has them: episode, agent, t, env_t, terminated, truncated, time step, next time step."""
    rows: list[tuple[int, ...]] = []
    over = flags["terminals"] | flags["truncations"]
    length, agents = over.shape
    begins = [0, *(k + 1 for k in range(length - 1) if over[k].all()), length]
    for episode, (start, stop) in enumerate(pairwise(begins)):
        for agent in range(agents):
            acts = [k for k in range(start, stop) if "acting" not in flags or flags["acting"][k, agent]]
            if "acting" not in flags:
                acts = [k for k in acts if not over[start:k, agent].any()]
            for t, k in enumerate(acts):
                is_last = t == len(acts) - 1 or bool(over[k, agent])  # an agent may come back
                terminated = is_last and bool(flags["terminals"][k, agent])
                truncated = is_last and (bool(flags["truncations"][k, agent]) or not terminated)
                after = k if is_last else acts[t + 1]
                rows.append((episode, agent, t, k - start, terminated, truncated, k, after))
    return sorted(rows)


class _Memory:
    """Arrays in memory, read as a `VaultStore` is."""

    def __init__(self, arrays: dict[Leaf, Any]) -> None:
        self._arrays, self.folder = arrays, Path("memory")
        self.shapes = {leaf: (1, *array.shape) for leaf, array in arrays.items()}

    def read(self, leaf: Leaf, b: int, start: int, stop: int) -> Any:
        return self._arrays[leaf][start:stop]


@given(flags=_vaults(), steps=st.integers(1, 12))
def test_any_flags_make_the_rows_of_a_plain_loop(flags: dict[str, Any], steps: int) -> None:
    """However many time steps are read together, in the reference all at once."""
    length, agents = flags["terminals"].shape
    number = np.broadcast_to(np.arange(length, dtype=np.float32)[:, None], (length, agents))
    arrays: dict[Leaf, Any] = {
        ("observations",): number[..., None],
        ("actions",): np.zeros((length, agents), np.int32),
        ("rewards",): number,
        ("terminals",): flags["terminals"],
        ("truncations",): flags["truncations"].astype(np.float32),
    }
    if "acting" in flags:
        arrays["infos", "acting"] = flags["acting"]
    store: Any = _Memory(arrays)
    found: list[tuple[int, ...]] = []
    unrolls: list[int] = []
    ends: list[bool] = []
    done = episodes = fragments = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vault, "_STEPS", steps)
        for start, moments in vault._pieces(store, 0, length):
            assert start == done
            done += len(moments.ends_T)
            rows = vault._rows(
                {leaf: array[start:done] for leaf, array in arrays.items()}, moments, 0, episodes, fragments
            )
            episodes += int(moments.first_T.sum())
            fragments += int(rows["next_obs_missing"].sum())
            names = ("eps_id", "agent_index", "t", "env_t", "terminated", "truncated")
            columns = [*(rows[name] for name in names), rows.obs[:, 0], rows["next_obs"][:, 0]]
            found += zip(*(column.astype(int).tolist() for column in columns), strict=True)
            np.testing.assert_array_equal(rows["rewards"], rows.obs[:, 0])
            np.testing.assert_array_equal(rows["next_obs_missing"], rows["terminated"] | rows["truncated"])
            unrolls += rows["unroll_id"].tolist()
            ends += rows["next_obs_missing"].tolist()
    assert unrolls == [sum(ends[:k]) for k in range(len(ends))]  # one number a fragment
    assert done == length
    assert sorted(found) == [tuple(map(int, row)) for row in _expected(flags)]


@needs_tensorstore
def test_an_agent_that_came_back_keeps_each_of_its_ends(tmp_path: Path) -> None:
    """Also where a lone agent came back: then the Vault has another episode."""
    spaces = {agent: (Box(-99, 99, (1,), np.float64), Discrete(3)) for agent in ("a", "b")}
    with marlvec.external.make(spaces) as envs:
        write(tmp_path / "run", [two_lives()], envs=envs)
    with marlvec.load_dataset(tmp_path / "run") as data:
        to_vault(data, tmp_path / "both")
        to_vault(data, tmp_path / "alone", ["a"])
    store = VaultStore.open(tmp_path / "both", "a test")
    for leaf, expected in (
        (("terminals",), [0, 0, 0, 0, 0, 0, 1]),
        (("truncations",), [0, 1, 1, 1, 0, 0, 0]),
        (("infos", "acting"), [1, 1, 0, 0, 1, 1, 1]),
    ):
        assert store.read(leaf, 0, 0, 7)[:, 0].astype(int).tolist() == expected, leaf
    for name, episodes, columns in (("both", [0] * 5, ("t", "env_t", "unroll_id")), ("alone", [0] * 2 + [1] * 3, ())):
        from_vault(tmp_path / name, tmp_path / f"{name} back")
        with marlvec.load_dataset(tmp_path / f"{name} back") as back:
            got = _sorted(back["main"].read(), "agent_index", "eps_id", "t")
            assert back.episode_table().whole.all()
        want = two_lives()["main"].slice(0, len(got))
        assert got["eps_id"][:5].tolist() == episodes
        assert len(np.unique(got["unroll_id"])) == (3 if name == "both" else 2)
        for column in ("obs", "actions", "rewards", "terminated", "truncated", *columns):
            np.testing.assert_array_equal(got[column], want[column], err_msg=f"{name} {column}")


def _write(folder: Path, arrays: dict[tuple[str, ...], Any]) -> None:
    folder.mkdir()
    store = VaultStore.create(
        folder, {leaf: (array.dtype, array.shape[1:]) for leaf, array in arrays.items()}, "a test"
    )
    store.write(arrays, 0)
    store.finish(len(arrays[("rewards",)]), {})


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Vault, to be copied."""
    folder = tmp_path_factory.mktemp("sample") / "vault"
    _write(folder, _arrays())
    return folder


def _arrays() -> dict[tuple[str, ...], Any]:
    return {leaf: array[0] for leaf, array in leaves_of(foreign.experience())}


@needs_tensorstore
def test_dict_observations_and_foreign_infos(tmp_path: Path) -> None:
    arrays = _arrays()
    obs = arrays.pop(("observations",))
    arrays |= {("observations", "near", "camera"): obs, ("observations", "far"): obs[..., :2] * 2}
    arrays[("infos", "battle_won")] = np.zeros(len(obs), np.bool_)
    _write(tmp_path / "vault", arrays)
    from_vault(tmp_path / "vault", tmp_path / "run")
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert data.notes["left_out"] == ["infos/battle_won"]
        rows = data["main"].read()
        to_vault(data, tmp_path / "again")
    order = np.lexsort([rows["agent_index"], rows["env_t"], rows["eps_id"]])
    flat = obs.reshape(-1, 4)
    np.testing.assert_array_equal(rows.obs["near"]["camera"][order], flat)
    np.testing.assert_array_equal(rows.obs["far"][order], flat[:, :2] * 2)
    store = VaultStore.open(tmp_path / "again", "a test")
    for leaf, array in arrays.items():
        if leaf not in (("truncations",), ("infos", "battle_won")):
            np.testing.assert_array_equal(store.read(leaf, 0, 0, len(obs)), array)


@needs_tensorstore
def test_several_sequences_are_envs_of_their_own(tmp_path: Path) -> None:
    """A Vault with B = 2, as flashbax writes them with ``add_batch_size=2``."""
    arrays = _arrays()
    _write(tmp_path / "vault", arrays)
    about = json.loads((tmp_path / "vault/metadata.json").read_text())
    shutil.rmtree(tmp_path / "vault")
    (tmp_path / "vault").mkdir()
    store = VaultStore(tmp_path / "vault", "a test")
    for leaf, array in arrays.items():
        both = store._array(
            "".join(f"{key}." for key in leaf),
            {},
            create=True,
            shape=(2, 10**13, *array.shape[1:]),
            dtype=array.dtype.name,
        )
        both[:, : len(array)].write(np.stack([array, array[::-1]])).result()
    index = store._array("vault_index", {}, create=True, shape=(1,), dtype="int32")
    index.write(np.array([foreign.STEPS], np.int32)).result()
    about["structure_shape"] = json.loads(json.dumps(about["structure_shape"]).replace('"(1, ', '"(2, '))
    (tmp_path / "vault/metadata.json").write_text(json.dumps(about))
    from_vault(tmp_path / "vault", tmp_path / "run")
    with marlvec.load_dataset(tmp_path / "run") as data:
        rows = data["main"].read()
    for env_id, want in enumerate([arrays[("observations",)], arrays[("observations",)][::-1]]):
        own = rows.take(np.flatnonzero(rows["env_id"] == env_id))
        own = _sorted(own, "eps_id", "env_t", "agent_index")
        np.testing.assert_array_equal(own.obs, want.reshape(-1, 4))
    assert rows["eps_id"].max() == 15


@needs_tensorstore
@pytest.mark.slow("imports flashbax and jax, in a process of its own")
def test_flashbax_s_own_vaults_are_read_and_ours_by_flashbax(tmp_path: Path) -> None:
    for name in ("flashbax", "jax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    _write(tmp_path / "first", _arrays())
    from_vault(tmp_path / "first", tmp_path / "run")
    with marlvec.load_dataset(tmp_path / "run") as data:
        to_vault(data, tmp_path / "vaults/mpe/ours.vlt/Random")
        want = data["main"].read()
    subprocess.run([sys.executable, "-m", "tests.recording.foreign", "exchange_vaults", str(tmp_path)], check=True)
    from_vault(tmp_path / "vaults/mpe/theirs.vlt/Random", tmp_path / "theirs")
    with marlvec.load_dataset(tmp_path / "theirs") as data:
        same_rows(data["main"].read(), want)


# --- what is not a Vault


@needs_tensorstore
@pytest.mark.slow("reads a Vault as often as it has files, three times over")
def test_damaged_files_raise_or_change_nothing(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "vault")
    from_vault(tmp_path / "vault", tmp_path / "run")
    with marlvec.load_dataset(tmp_path / "run") as data:
        want = data["main"].read()
    raised = 0
    files = sorted(path.relative_to(tmp_path / "vault") for path in (tmp_path / "vault").rglob("*") if path.is_file())
    for k, name in enumerate(files):
        for damage in ("gone", "cut", "changed"):
            folder, run = tmp_path / f"{k} {damage}", tmp_path / f"run {k} {damage}"
            shutil.copytree(tmp_path / "vault", folder)
            data_before = (folder / name).read_bytes()
            middle = len(data_before) // 2
            if damage == "gone":
                (folder / name).unlink()
            elif damage == "cut":
                (folder / name).write_bytes(data_before[:middle])
            else:
                (folder / name).write_bytes(
                    data_before[:middle] + bytes([data_before[middle] ^ 255]) + data_before[middle + 1 :]
                )
            try:
                from_vault(folder, run)
            except CheckpointError as error:
                named, raised = Path(error.file), raised + 1
            else:
                named = None
            if named is not None:
                assert named.is_relative_to(folder)
                continue
            with marlvec.load_dataset(run) as data:
                same_rows(data["main"].read(), want)
    assert raised > len(files)


@needs_tensorstore
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about | {"version": 2.0}, "version 2.0; this marlvec reads 1"),
        (lambda about: about | {"version": "1.2"}, "version '1.2'"),
        (lambda about: {"version": 1.2}, "cannot be read: KeyError"),
        (lambda about: [], "cannot be read"),
        (lambda about: about | {"structure_shape": {"rewards": "__import__('os').getpid()"}}, "different trees"),
        (lambda about: _shape(about, "rewards", "__import__('os').getpid()"), "cannot be read: ValueError"),
        (lambda about: _shape(about, "rewards", "(1, 53"), "cannot be read: SyntaxError"),
        (lambda about: _shape(about, "rewards", "(1, 53, 4)"), r"damaged in its array 'rewards\.'.*expected float32"),
        (lambda about: _shape(about, "other", "(1, 53, 3)"), r"damaged in its array 'other\.'"),
    ],
)
def test_foreign_metadata_is_refused(change: Any, message: str, sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "vault")
    path = tmp_path / "vault/metadata.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    refused(CheckpointError, message, from_vault, tmp_path / "vault", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _shape(about: Any, leaf: str, shape: str) -> Any:
    shapes, dtypes = about["structure_shape"], about["structure_dtype"]
    dtype = dtypes.get(leaf, "float32")
    return about | {"structure_shape": shapes | {leaf: shape}, "structure_dtype": dtypes | {leaf: dtype}}


@needs_tensorstore
@pytest.mark.parametrize(
    ("leaf", "array", "message"),
    [
        (("rewards",), None, r"lacks \['rewards'\]"),
        (("observations",), None, r"lacks \['observations'\]"),
        (("rewards",), np.zeros(53), "expected observations of"),
        (("terminals",), np.zeros((53, 2)), "expected terminals of"),
        (("terminals",), np.zeros((53, 3, 1)), "expected terminals of"),
        (("infos", "legals"), np.zeros((53, 4, 5)), "expected infos/legals of"),
    ],
)
def test_experience_of_another_form_is_refused(leaf: Any, array: Any, message: str, tmp_path: Path) -> None:
    arrays = {name: one for name, one in _arrays().items() if name != leaf}
    folder = tmp_path / "vault"
    if array is not None:
        arrays[leaf] = array
    if leaf == ("rewards",) and array is None:
        arrays[("returns",)] = arrays[("actions",)]
    folder.mkdir()
    store = VaultStore.create(folder, {name: (one.dtype, one.shape[1:]) for name, one in arrays.items()}, "a test")
    store.finish(53, {})
    refused(CheckpointError, message, from_vault, folder, tmp_path / "run")


@needs_tensorstore
def test_nothing_outside_of_the_folder_is_read(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "vault")
    (tmp_path / "vault/d").rename(tmp_path / "elsewhere")
    (tmp_path / "vault/d").symlink_to(tmp_path / "elsewhere")
    refused(CheckpointError, "leads out of", from_vault, tmp_path / "vault", tmp_path / "run")
    refused(CheckpointError, r"metadata\.json is missing", from_vault, tmp_path / "nothing", tmp_path / "run")
    with pytest.raises(ArgumentError, match="expected 3 agents, got 1"):
        from_vault(sample, tmp_path / "run", spaces={"a": (Box(0, 1, (4,)), Discrete(5))})


@needs_tensorstore
def test_what_a_vault_cannot_hold_is_refused_and_leaves_no_folder(tmp_path: Path, recorded: MultiAgentBatch) -> None:
    def episode(n: int, obs: Any) -> MultiAgentBatch:
        """One episode of one agent."""
        ids, none = np.arange(n), np.zeros(n, np.int64)
        flags = {"terminated": ids == n - 1, "truncated": ids < 0}
        times = {"t": ids, "env_t": ids, "next_env_t": ids + 1}
        names = {"eps_id": none, "unroll_id": none, "env_id": none, "agent_index": none}
        columns = {"obs": obs, "actions_for_env": ids, "rewards": ids * 1.0, **flags, **times, **names}
        return MultiAgentBatch({"main": SampleBatch(columns)}, env_steps=n)

    cases = {
        "a tuple; flatten it": (np.zeros((3, 2)), np.zeros((3, 1))),
        r"keys without a dot, got \('a.b',\)": {"a.b": np.zeros((3, 2))},
        "expected bools, ints or floats, got <U1": np.array(["a", "b", "c"]),
    }
    for k, (message, obs) in enumerate(cases.items()):
        write(tmp_path / f"run {k}", [episode(3, obs)])
        with marlvec.load_dataset(tmp_path / f"run {k}") as data, pytest.raises(ArgumentError, match=message):
            to_vault(data, tmp_path / "vault")
        assert not (tmp_path / "vault").exists()
    with marlvec.load_dataset(tmp_path / "run") as data:
        refused(ArgumentError, "joint.*column 'obs' of policy 'runner'", to_vault, data, tmp_path / "vault")
        refused(ArgumentError, "expected a new or empty folder", to_vault, data, tmp_path / "run")
    marlvec.Recorder(tmp_path / "empty").close()
    with marlvec.load_dataset(tmp_path / "empty") as data, pytest.raises(ArgumentError, match="at least one episode"):
        to_vault(data, tmp_path / "vault")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(MissingExtraError, match=r'needs tensorstore.*pip install "marlvec\[vault\]"'):
        from_vault(tmp_path, tmp_path / "run")
    assert not any(tmp_path.iterdir())
