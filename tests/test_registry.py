"""From names to factories to envs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import registry
from marlvec.envs import adapt
from marlvec.envs import builtin_ids as catalog
from marlvec.errors import (
    AlreadyRegisteredError,
    ArgumentError,
    MissingExtraError,
    RegistryError,
    UnknownEnvError,
)
from marlvec.registry import EnvFactory, listing, register, resolve, resolve_all
from marlvec.testing.scripted import CounterEnv, SingleEnv


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Whatever a test registers is forgotten after it."""
    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)
    registry._by_name.cache_clear()


def built(env: Any, **kwargs: Any) -> Any:
    return resolve(env)(**kwargs)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mpe/simple_spread_v3", "mpe/simple_spread_v3"),
        ("simple_spread_v3", "mpe/simple_spread_v3"),
        ("mpe/simple_spread", "mpe/simple_spread_v3"),
        ("simple_spread", "mpe/simple_spread_v3"),
        ("simple_spread-v3", "mpe/simple_spread_v3"),
        ("simple", "mpe/simple_v3"),
        ("pettingzoo/classic/connect_four_v3", "pettingzoo/classic/connect_four_v3"),
        ("classic/connect_four-v3", "pettingzoo/classic/connect_four_v3"),
        ("connect_four", "pettingzoo/classic/connect_four_v3"),
        ("pong", "pettingzoo/atari/pong_v3"),
        ("gymnasium/CartPole-v1", "gymnasium/CartPole-v1"),
        ("CartPole-v1", "gymnasium/CartPole-v1"),
        ("CartPole", "gymnasium/CartPole-v1"),
    ],
)
def test_short_and_whole_names(name: str, found: str) -> None:
    assert resolve(name).entry.id == found


def test_every_env_of_mpe_and_pettingzoo_is_known_in_its_preferred_form() -> None:
    rows = {row.id: row for row in listing()}
    assert sum(row.family == "mpe" for row in rows.values()) == 12
    sizes = {family: sum(row.family == family for row in rows.values()) for family in ("classic", "butterfly", "sisl")}
    assert sizes == {"classic": 9, "butterfly": 3, "sisl": 2}
    import pettingzoo

    for kind, known in (("aec", pettingzoo.aec_registry), ("parallel", pettingzoo.parallel_registry)):
        for env_id in known:
            entry = resolve(f"pettingzoo/{env_id}").entry
            assert isinstance(entry.entry_point, partial)
            preferred = "parallel" if env_id in pettingzoo.parallel_registry else "aec"
            assert entry.entry_point.args[1] == preferred, (env_id, kind)


@pytest.mark.mostly_slow("starts programs of its own", quick=3)
@pytest.mark.parametrize(
    ("name", "agents"),
    [
        ("mpe/collect_treasure_v1", 8),
        ("simple", 1),
        ("simple_adversary", 3),
        ("simple_crypto", 3),
        ("simple_formation", None),
        ("simple_line", None),
        ("simple_push", 2),
        ("simple_reference", 2),
        ("simple_speaker_listener", 2),
        ("simple_spread", 3),
        ("simple_tag", 4),
        ("simple_world_comm", 6),
        ("tictactoe", 2),
        ("rps", 2),
        ("leduc_holdem", 2),
        ("chess", 2),
        ("CartPole-v1", 1),
    ],
)
def test_envs_are_built_and_adapted(name: str, agents: int | None) -> None:
    factory = pickle.loads(pickle.dumps(resolve(name)))
    env = adapt(factory(env_index=0, num_envs=2))
    assert agents in (None, len(env.agents))
    env.close()


@pytest.mark.checklist(3)
def test_an_unknown_id_lists_what_comes_near() -> None:
    with pytest.raises(UnknownEnvError) as caught:
        resolve("simple_sprad")
    assert "mpe/simple_spread_v3" in str(caught.value)
    assert "marlvec envs" in str(caught.value)
    with pytest.raises(UnknownEnvError, match="gymnasium/CartPole-v1"):
        resolve("cartpole")
    with pytest.raises(UnknownEnvError, match="simple_spread_v3"):
        resolve("mpe/simple_spread_v9")
    with pytest.raises(UnknownEnvError, match="unknown env 'zzzzzz'"):
        resolve("zzzzzz")
    assert issubclass(UnknownEnvError, LookupError)


@pytest.mark.checklist(3)
def test_an_id_is_registered_once_unless_overwritten() -> None:
    register("mine/counter_v1", CounterEnv, kwargs={"agent_num": 2})
    with pytest.raises(AlreadyRegisteredError, match="overwrite=True"):
        register("mine/counter_v1", CounterEnv)
    assert len(built("mine/counter_v1").possible_agents) == 2
    register("mine/counter_v1", CounterEnv, kwargs={"agent_num": 4}, overwrite=True)
    assert len(built("counter").possible_agents) == 4
    with pytest.raises(AlreadyRegisteredError):
        register("mpe/simple_spread_v3", CounterEnv)


@pytest.mark.checklist(3)
def test_default_kwargs_are_copied_at_registration_and_for_each_env() -> None:
    class Greedy(CounterEnv):
        def __init__(self, level: dict[str, list[int]], **options: Any) -> None:
            super().__init__(**options)
            self.level = level["depths"]
            level["depths"].append(9)

    defaults = {"level": {"depths": [1]}}
    register("greedy", Greedy, kwargs=defaults)
    defaults["level"]["depths"].append(5)
    envs = [built("greedy") for _ in range(3)]
    assert [env.level for env in envs] == [[1, 9]] * 3
    mine = {"level": {"depths": [2]}}
    factory = resolve("greedy").with_kwargs(**mine)
    assert [factory().level for _ in range(2)] == [[2, 9]] * 2
    assert mine == {"level": {"depths": [2]}}


def test_an_argument_that_cannot_be_copied_is_passed_on_as_it_is() -> None:
    class Locked(CounterEnv):
        def __init__(self, log: Any) -> None:
            super().__init__()
            self.log = log

    stream = (number for number in range(3))
    assert built(Locked, log=stream).log is stream


def test_the_highest_version_and_names_of_ones_own() -> None:
    register("mine/maze_v1", CounterEnv, kwargs={"agent_num": 1})
    register("mine/maze_v10", CounterEnv, kwargs={"agent_num": 5})
    register("mine/maze_v9", CounterEnv, kwargs={"agent_num": 4})
    assert resolve("maze").entry.id == "mine/maze_v10"
    assert resolve("maze_v9").entry.id == "mine/maze_v9"
    register("theirs/maze_v2", CounterEnv)
    with pytest.raises(RegistryError, match=r"mine/maze_v10.*theirs/maze_v2"):
        resolve("maze")
    register("maze", CounterEnv)
    assert resolve("maze").entry.id == "maze"


def test_kwargs_reach_the_env_or_raise() -> None:
    assert len(built("simple_spread", N=5).possible_agents) == 5
    assert len(built("simple_spread").possible_agents) == 3
    assert built("rps", num_actions=5).action_space("player_0").n == 5
    assert built("CartPole-v1", max_episode_steps=7).spec.max_episode_steps == 7
    assert len(built(CounterEnv, agent_num=5).possible_agents) == 5
    for env in ("simple_spread", "tictactoe", "rps", "CartPole-v1", CounterEnv, "marlvec.testing:CounterEnv"):
        with pytest.raises(TypeError, match="no_such_argument"):
            built(env, no_such_argument=1)


def test_a_factory_with_an_index_parameter_gets_it() -> None:
    def everything(env_index: int, num_envs: int) -> Any:
        return env_index, num_envs

    def index_only(*, env_index: int, size: int = 3) -> Any:
        return env_index, size

    def swallows(**kwargs: Any) -> Any:
        return kwargs

    class Numbered:
        def __init__(self, num_envs: int) -> None:
            self.num_envs = num_envs

    class Callable_:
        def __call__(self, env_index: int) -> int:
            return env_index

    offer: dict[str, Any] = {"env_index": 4, "num_envs": 6}
    assert built(everything, **offer) == (4, 6)
    assert built(index_only, **offer) == (4, 3)
    assert built(swallows, **offer) == {}
    assert built(lambda: "none", **offer) == "none"
    assert built(Numbered, **offer).num_envs == 6
    assert built(Callable_(), **offer) == 4
    assert built(partial(everything, num_envs=1), **offer) == (4, 1)
    assert resolve(everything).with_kwargs(env_index=0)(**offer) == (0, 6), "what was given is not replaced"
    assert built(CounterEnv, **offer).world.env_index == 4
    assert built("marlvec.testing:SingleEnv", **offer).world.env_index == 4


def test_file_and_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_file_of_envs.py"
    file.write_text("class Env:\n    size = 1\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    first = resolve("my_file_of_envs.py:Env").entry.load()
    assert (first.size, first.__module__) == (1, "my_file_of_envs")
    assert resolve(f"{file}:Env").entry.load() is first, "imported once"
    for other in ("class Env:\n    size = 2\n", "import a_package_that_is_not_there\n"):
        file.write_text(other)
        os.utime(file, ns=(0, len(other)))
        if "size" in other:
            assert resolve("my_file_of_envs.py:Env").entry.load().size == 2, "changed, so imported again"
    with pytest.raises(MissingExtraError, match="a_package_that_is_not_there"):
        resolve("my_file_of_envs.py:Env")
    assert sys.modules["my_file_of_envs"].Env.size == 2
    file.write_text("number = 3\n")
    for text, words in (
        ("my_file_of_envs.py:Other", "has no 'Other'"),
        ("my_file_of_envs.py:number", "int, expected a class or a factory"),
        ("no_such_file.py:Env", f"no file no_such_file.py, seen from {tmp_path}"),
        ("my_file_of_envs.py", "expected FILE.py:ATTR for an env defined in a file, e.g. my_file_of_envs.py:MyEnv"),
    ):
        with pytest.raises(RegistryError, match=words):
            resolve(text)


def test_module_and_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs_for_test.py").write_text(
        "import pickle\n"
        "from marlvec.testing import CounterEnv\n"
        "class Box:\n    Inner = CounterEnv\nnumber = 3\n"
        "zoo_v1 = type(pickle)('zoo.zoo_v1')\nzoo_v1.parallel_env = CounterEnv\n"
    )
    (tmp_path / "my_broken_envs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    factory = pickle.loads(pickle.dumps(resolve("my_envs_for_test:Box.Inner")))
    assert "my_envs_for_test" not in sys.modules, "named, not imported"
    assert type(factory(agent_num=2)).__name__ == "CounterEnv"
    with pytest.raises(RegistryError, match="has no 'Missing'"):
        built("my_envs_for_test:Missing")
    with pytest.raises(RegistryError, match="int, expected a class or a factory"):
        built("my_envs_for_test:number")
    with pytest.raises(RegistryError, match="is module, .*; take my_envs_for_test:zoo_v1.parallel_env"):
        built("my_envs_for_test:zoo_v1")
    with pytest.raises(ArgumentError, match=r"got the module zoo\.zoo_v1; take zoo_v1\.parallel_env"):
        resolve(sys.modules["my_envs_for_test"].zoo_v1)
    with pytest.raises(MissingExtraError, match="a_package_that_is_not_there"):
        built("my_broken_envs:Env")
    with pytest.raises(UnknownEnvError, match="no module 'no_such_module_anywhere'"):
        resolve("no_such_module_anywhere.envs:Env")
    for name in ("module:", ":Env", "a b:c", "a:b:c", "1a:b"):
        with pytest.raises(ArgumentError, match="module:attr"):
            resolve(name)


def test_the_main_module_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "HomeMade", SingleEnv, raising=False)
    assert resolve("__main__:HomeMade").entry.entry_point is SingleEnv
    with pytest.raises(UnknownEnvError, match="main module"):
        resolve("__main__:Nowhere")


@pytest.mark.parametrize("thing", [3, None, {"a": 1}, 1.5, b"simple_spread"])
def test_values_that_are_not_envs_raise(thing: Any) -> None:
    with pytest.raises(ArgumentError, match="expected an env id"):
        resolve(thing)


def test_an_env_is_no_factory() -> None:
    for env in (CounterEnv(), SingleEnv(), adapt(CounterEnv())):
        with pytest.raises(ArgumentError, match="lambda"):
            resolve(env)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("id", ["", "a b", "/a", "a/", "a:b", 3, None])
def test_malformed_ids(id: Any) -> None:
    with pytest.raises(ArgumentError, match="env id"):
        register(id, CounterEnv)


@pytest.mark.parametrize("entry_point", ["no_colon", "a:", 3, None, CounterEnv()])
def test_malformed_entry_points(entry_point: Any) -> None:
    with pytest.raises(ArgumentError, match="module:attr"):
        register("thing", entry_point)


def test_lists() -> None:
    factories = resolve_all(["simple_spread", CounterEnv, lambda: SingleEnv(3)])
    assert all(isinstance(factory, EnvFactory) for factory in factories)
    assert len(resolve_all([CounterEnv] * 3, 3)) == 3
    assert len(resolve_all(CounterEnv, 4)) == 4
    assert len(resolve_all("simple_spread")) == 1
    for envs, num_envs, words in (
        ([], None, "empty list"),
        ([CounterEnv] * 2, 3, "num_envs=3, but 2"),
        (CounterEnv, 0, "at least 1"),
        (b"xy", None, "list of factories"),
    ):
        with pytest.raises(ValueError, match=words):
            resolve_all(envs, num_envs)  # type: ignore[arg-type]  # some are wrong on purpose


def test_a_missing_package_names_the_extra() -> None:
    script = (
        "import sys\n"
        "sys.modules['rlcard'] = None  # as if it were not installed\n"
        "from marlvec.registry import listing, resolve\n"
        "installed = {row.id: row.installed for row in listing()}\n"
        "print(installed['pettingzoo/classic/leduc_holdem_v4'], installed['mpe/simple_spread_v3'])\n"
        "try:\n    resolve('leduc_holdem')()\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first, second = done.stdout.strip().splitlines()
    assert first == "False True"
    assert second.startswith("MissingExtraError")
    assert 'pip install "marlvec[classic]"' in second
    assert "rlcard" in second


def test_atari_finds_its_games_in_ale_py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ale_py").mkdir()
    (tmp_path / "ale_py" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr(catalog, "pettingzoo_env", lambda *args, **kwargs: seen.append((args, kwargs)))
    built("pong", obs_type="ram")
    built("pong", auto_rom_install_path="here")
    assert seen == [
        (
            ("atari/pong_v3", "parallel"),
            {"obs_type": "ram", "auto_rom_install_path": str(tmp_path / "ale_py" / "roms")},
        ),
        (("atari/pong_v3", "parallel"), {"auto_rom_install_path": "here"}),
    ]


def test_an_older_pettingzoo_has_a_module_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import pettingzoo

    monkeypatch.delattr(pettingzoo, "make")
    with pytest.warns(DeprecationWarning, match="registry"):
        env = built("tictactoe")
    assert env.possible_agents == ["player_1", "player_2"]
    with pytest.raises(MissingExtraError, match="tictactoe_v9"):
        catalog.pettingzoo_env("classic/tictactoe_v9", "aec")


def test_gymnasiums_own_names() -> None:
    rows = {row.id: row for row in listing(with_gymnasium=True)}
    assert rows["gymnasium/CartPole-v1"].installed
    assert rows["gymnasium/CartPole-v1"].family == "gymnasium"
    assert resolve("gymnasium/some_package:Thing-v0").entry.id == "gymnasium/some_package:Thing-v0"
    with pytest.raises(UnknownEnvError):
        resolve("gymnasium/CartPole-v99")
    env = built("gymnasium/CartPole-v1")
    env.reset(seed=0)
    assert np.isfinite(env.step(0)[1])
    env.close()


def test_naming_an_env_imports_nothing_of_it() -> None:
    script = (
        "import sys, pickle\n"
        "from marlvec.registry import listing, resolve\n"
        "for name in ('simple_spread', 'connect_four', 'pong', 'CartPole-v1', 'wave:Wave_write'):\n"
        "    pickle.dumps(resolve(name))\n"
        "listing(with_gymnasium=True)\n"
        "print([m for m in ('mpe2', 'pettingzoo', 'pygame', 'wave', 'torch', 'ray') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
