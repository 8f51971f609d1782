"""`marlvec.make`: what it takes, what reaches the envs, render modes, and what it gives back."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete

import marlvec
from marlvec.arguments import signature_of
from marlvec.errors import ArgumentError, ContractError, EnvArgumentError, EnvRaised
from marlvec.testing import CounterEnv, KeyedEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv, decode
from marlvec.vector.workers.worker import serve

# --- `marlvec.make`: what it takes, what reaches the envs, and what it gives back


BACKENDS = ("sync", "async")


class Told(CounterEnv):
    """Declares what a vectorizer may tell a factory."""

    def __init__(self, num_envs: int, env_index: int = -1, tag: int = 0, box: list[int] | None = None) -> None:
        super().__init__(env_index=env_index)
        self.metadata = {**self.metadata, "told": (num_envs, tag)}
        if box is not None:
            box.append(env_index)
            assert len(box) == 1, "this list is another env's too"


@pytest.mark.mostly_slow("starts worker processes", quick=2)
@pytest.mark.parametrize("how", [{"backend": b} for b in ("sync", "thread", "async")] + [{"context": "spawn"}], ids=str)
def test_class_of_a_file_plays_as_an_imported_one(how: dict[str, Any], tmp_path: Path) -> None:
    """With a module of its folder, and under a name that another module has already."""
    (tmp_path / "random.py").write_text(
        "from marlvec.testing import CounterEnv\nfrom lengths_of_envs import LENGTH\n"
        "class Mine(CounterEnv):\n    def __init__(self):\n        super().__init__(LENGTH)\n"
    )
    (tmp_path / "lengths_of_envs.py").write_text("LENGTH = 4\n")
    settings = {"num_envs": 4, **({} if how.get("backend") == "sync" else {"num_workers": 2}), **how}
    known = sys.modules["random"]
    with (
        marlvec.make(f"{tmp_path}/random.py:Mine", **settings) as envs,
        marlvec.make(lambda: CounterEnv(4), num_envs=4, backend="sync") as same,
    ):
        assert np.array_equal(envs.reset(seed=0)[0], same.reset(seed=0)[0])
        for _ in range(9):
            actions = same.random_action()
            for ours, theirs in zip(envs.step(actions)[:4], same.step(actions)[:4], strict=True):
                assert np.array_equal(ours, theirs)
    assert sys.modules["random"] is known


class Shift(gymnasium.RewardWrapper):
    def __init__(self, env: Any, by: float = 1.0) -> None:
        super().__init__(env)
        self.by = by

    def reward(self, reward: float) -> float:
        return reward + self.by


class Double(gymnasium.RewardWrapper):
    def reward(self, reward: float) -> float:
        return 2 * reward


def rewards_of(steps: int = 3, **settings: Any) -> np.ndarray:
    with marlvec.make("CartPole-v1", num_envs=2, **settings) as envs:
        envs.reset(seed=0)
        return np.stack([envs.step(np.zeros((2, 1), np.int64))[1] for _ in range(steps)])


@pytest.mark.slow("starts programs of its own")
@pytest.mark.checklist(1)
@pytest.mark.parametrize("settings", [{}, {"backend": "sync"}], ids=["default", "sync"])
def test_simple_spread_works_by_its_name(settings: dict[str, Any]) -> None:
    with marlvec.make("simple_spread", num_envs=16, **settings) as envs:
        assert (envs.num_envs, envs.agent_num) == (16, 3)
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (16, 3, 18)
        assert [envs.agent_action_space(agent) for agent in envs.agents] == [Discrete(5)] * 3
        for t in range(1, 76):
            obs, rewards, terminated, truncated, _ = envs.step(np.zeros((16, 3), np.int64))
            assert truncated.all() == truncated.any() == (t % 25 == 0)
            assert not terminated.any()
            assert (obs.shape, rewards.shape) == ((16, 3, 18), (16, 3))
        state = envs.state()
        assert state.shape == (16, 54)
        # mpe2's state is what all agents see, one after the other.
        assert state.tobytes() == obs.reshape(16, 54).tobytes()


@pytest.mark.mostly_slow("starts programs of its own", quick="each")
@pytest.mark.checklist(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "env",
    ["CartPole-v1", "marlvec.testing:CounterEnv", CounterEnv, lambda: CounterEnv(), partial(CounterEnv, agent_num=2)],
    ids=["id", "module:attr", "class", "lambda", "partial"],
)
def test_anything_that_builds_an_env_will_do(env: Any, backend: str) -> None:
    with marlvec.make(env, num_envs=3, backend=backend) as envs:
        assert envs.reset(seed=0)[0].shape[:2] == (3, envs.agent_num)
    with marlvec.make([env, env], backend=backend) as envs:
        assert envs.num_envs == 2
    with marlvec.make([env, env], num_envs=2, backend=backend) as envs:
        assert envs.num_envs == 2
    with pytest.raises(ValueError, match=re.escape("num_envs=3, but 2 factories were given")):
        marlvec.make([env, env], num_envs=3, backend=backend)


@pytest.mark.checklist(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keyword_arguments_reach_the_env_or_raise(backend: str) -> None:
    with marlvec.make("simple_spread", num_envs=2, backend=backend, N=5, max_cycles=7) as envs:
        assert envs.agent_num == 5
        envs.reset(seed=0)
        ends = [envs.step(np.zeros((2, 5), np.int64))[3].all() for _ in range(21)]
        assert np.flatnonzero(ends).tolist() == [6, 13, 20]
    with marlvec.make(CounterEnv, num_envs=2, backend=backend, agent_num=5) as envs:
        assert envs.agent_num == 5
    for env in ("simple_spread", "CartPole-v1", CounterEnv, lambda: CounterEnv()):
        with pytest.raises(TypeError, match="flavour") as caught:
            marlvec.make(env, num_envs=2, backend=backend, flavour="vanilla")
        assert isinstance(caught.value, EnvArgumentError)
        assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.checklist(5)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_may_differ_per_env_and_a_factory_may_get_its_index(backend: str) -> None:
    with marlvec.make(Told, num_envs=4, backend=backend, env_kwargs={"tag": 3}) as envs:
        assert tuple(envs.metadata["told"]) == (4, 3)
        obs, _ = envs.reset(seed=0)
        assert [decode(obs[i, 0]).env for i in range(4)] == [0, 1, 2, 3]
    with marlvec.make(
        CounterEnv, num_envs=3, backend=backend, env_kwargs=[{"env_index": 7}, {}, {"env_index": 9}]
    ) as envs:
        obs, _ = envs.reset(seed=0)
        assert [decode(obs[i, 0]).env for i in range(3)] == [7, 1, 9]
    with marlvec.make(Told, num_envs=3, backend=backend, box=[]) as envs:  # each env has a copy of its own
        envs.reset(seed=0)
    with pytest.raises(ArgumentError, match="expected one dict per env, 3 in all, got 2"):
        marlvec.make(CounterEnv, num_envs=3, backend=backend, env_kwargs=[{}, {}])
    with pytest.raises(ArgumentError, match="expected a dict, or a list of one dict per env"):
        marlvec.make(CounterEnv, num_envs=3, backend=backend, env_kwargs=7)  # type: ignore[arg-type]  # on purpose


@pytest.mark.mostly_slow("starts programs of its own", quick=3)
@pytest.mark.checklist(6)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrappers_go_round_every_env_innermost_first(backend: str) -> None:
    plain = rewards_of(backend=backend)
    assert (plain == 1).all()
    assert (rewards_of(backend=backend, wrappers=Double) == 2).all()
    assert (rewards_of(backend=backend, wrappers=lambda env: Double(env)) == 2).all()
    assert (rewards_of(backend=backend, wrappers=partial(Shift, by=10)) == 11).all()
    assert (rewards_of(backend=backend, wrappers=[Shift, Double]) == 4).all()  # (1 + 1) * 2
    assert (rewards_of(backend=backend, wrappers=[Double, Shift]) == 3).all()  # 1 * 2 + 1
    assert (rewards_of(backend=backend, wrappers=(Double, partial(Shift, by=5), Double)) == 14).all()
    with pytest.raises(ArgumentError, match="expected classes or functions from env to env"):
        rewards_of(backend=backend, wrappers=[3])


@pytest.mark.checklist(8)
@pytest.mark.parametrize("backend", BACKENDS)
def test_old_and_new_envs_give_the_same_five_values(backend: str) -> None:
    runs = []
    for old_api in (False, True):
        script = [Script.together(3, 4, "terminated"), Script.together(3, 3, "terminated")]
        with marlvec.make(partial(ScriptedParallelEnv, script, old_api=old_api), num_envs=2, backend=backend) as envs:
            obs, infos = envs.reset(seed=1)
            assert isinstance(infos, dict)
            run = [obs.tobytes()]
            for _ in range(12):
                values = envs.step(np.ones((2, 3), np.int64))
                assert len(values) == 5
                run += [value.tobytes() for value in values[:4]]
            runs.append(run)
    assert runs[0] == runs[1]


@pytest.mark.checklist(9)
@pytest.mark.parametrize("backend", BACKENDS)
def test_agents_have_one_order_everywhere(backend: str) -> None:
    class Shuffled(ScriptedParallelEnv):
        """Gives its dicts in another order in every step."""

        def step(self, actions: dict[str, Any]) -> Any:
            self.turn = getattr(self, "turn", 0) + 1
            return tuple(self._mixed(table) for table in super().step(actions))

        def _mixed(self, table: dict[str, Any]) -> dict[str, Any]:
            names = list(table)
            k = self.turn % max(1, len(names))
            return {name: table[name] for name in names[k:] + names[:k]}

    with (
        marlvec.make(Shuffled, num_envs=4, backend=backend) as envs,
        marlvec.make(ScriptedParallelEnv, num_envs=4, backend="sync") as plain,
    ):
        assert envs.agents == ("agent_0", "agent_1", "agent_2")
        assert [envs.agents.index(name) for name in envs.agents] == [0, 1, 2]
        assert envs.groups == {"agent": (0, 1, 2)}
        envs.reset(seed=0)
        plain.reset(seed=0)
        for _ in range(40):
            for got, expected in zip(
                envs.step(np.ones((4, 3), np.int64))[:4], plain.step(np.ones((4, 3), np.int64))[:4], strict=True
            ):
                assert got.tobytes() == expected.tobytes()


class Intruder(CounterEnv):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest = super().step(actions)
        return {**obs, "nobody": next(iter(obs.values()))}, *rest


@pytest.mark.checklist(9)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_agent_is_named(backend: str) -> None:
    with marlvec.make(Intruder, num_envs=2, backend=backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(
            ContractError, match="env 0.*'agent_0', 'agent_1', 'agent_2', got the unknown agent 'nobody'"
        ):
            envs.step(np.ones((2, 3), np.int64))


@pytest.mark.mostly_slow("starts programs of its own", quick=2)
@pytest.mark.parametrize("env", [CounterEnv, TurnEnv, SingleEnv, KeyedEnv])
def test_all_four_kinds_of_env_run_whole_episodes(env: Any) -> None:
    with marlvec.make(env, num_envs=3) as envs:
        envs.reset(seed=0)
        ended = 0
        for _ in range(60):
            envs.send(np.zeros((3, envs.agent_num), np.int64))
            ended += int(envs.recv().done.sum())
        assert ended >= 9


class Numbered(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Is told its place, as a factory is."""

    def __init__(self, env: Any, env_index: int, *, num_envs: int = -1, tag: str = "") -> None:
        super().__init__(env)
        self.place = (env_index, num_envs, tag)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrapper_may_get_its_index(backend: str) -> None:
    def with_index(env: Any, *, env_index: int) -> Any:
        env.told = env_index
        return env

    settings: dict[str, Any] = {"num_envs": 3, "backend": backend}
    with marlvec.make(SingleEnv, **settings, wrappers=[with_index, Double, Numbered]) as envs:
        assert envs.get_attr("place") == ((0, 3, ""), (1, 3, ""), (2, 3, ""))
        assert envs.get_attr("told") == (0, 1, 2)
    with marlvec.make(SingleEnv, **settings, wrappers=partial(Numbered, env_index=7, tag="x")) as envs:
        assert envs.get_attr("place") == ((7, 3, "x"),) * 3


def test_built_envs_are_closed_if_a_wrapper_raises() -> None:
    closed = []

    class Closing(SingleEnv):
        def close(self) -> None:
            closed.append(self.world.env_index)
            raise RuntimeError("nor can it be closed")

    def bad(env: Any, env_index: int) -> Any:
        if env_index == 1:
            raise ValueError("no such layer")
        return env

    with pytest.raises(EnvRaised, match="env 1 raised in __init__.*no such layer"):
        marlvec.make(Closing, 3, backend="sync", wrappers=bad)
    assert sorted(closed) in ([0, 1], [0, 1, 2])


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_name_and_metadata_are_the_envs_and_metadata_is_a_copy(backend: str) -> None:
    class Shared(SingleEnv):
        own = {"name": "shared", "render_modes": ["ansi"]}

        def __init__(self) -> None:
            super().__init__()
            self.metadata = self.own

    modes = ("same_step", "next_step")
    with (
        marlvec.make(Shared, 2, backend=backend, autoreset_mode=modes[0]) as one,
        marlvec.make(Shared, 2, backend=backend, autoreset_mode=modes[1]) as other,
    ):
        assert (one.spec.name, other.spec.name) == ("shared", "shared")
        assert (one.metadata["autoreset_mode"], other.metadata["autoreset_mode"]) == modes
        one.metadata["render_modes"].append("spoilt")
        assert other.metadata["render_modes"] == ["ansi"]
        assert one.get_attr("metadata") == (Shared.own,) * 2
    assert Shared.own == {"name": "shared", "render_modes": ["ansi"]}


def test_threads_take_what_threads_can() -> None:
    with marlvec.make(CounterEnv, 4, backend="thread", num_workers=2, state=False, grouped=True, copy=False) as envs:
        assert (envs.backend, envs.num_workers, envs.grouped, envs.copy) == ("thread", 2, True, False)
        obs, _ = envs.reset(seed=0)
        assert [decode(obs["agent"][i, 0]).env for i in range(4)] == [0, 1, 2, 3]


def test_every_setting_reaches_the_vectorizer() -> None:
    def loop(link: Any) -> None:
        serve(link)

    settings: dict[str, Any] = {
        "autoreset_mode": "next_step",
        "done_on": "any",
        "copy": False,
        "grouped": True,
        "context": "forkserver",
        "num_workers": 2,
        "shared_memory": "require",
        "daemon": False,
        "worker": loop,
        "validate": "off",
        "state": True,
        "spaces": "compatible",
        "pad": True,
        "max_episode_steps": 3,
    }
    with marlvec.make(CounterEnv, 2, **settings, env_kwargs={"state": True}) as envs:
        assert (envs.autoreset_mode, envs.done_on, envs.copy, envs.grouped) == ("next_step", "any", False, True)
        assert (envs.num_workers, envs.context) == (2, "forkserver")
        _, infos = envs.reset(seed=0)
        assert infos["state"].shape == (2, 7)
        for _ in range(3):
            *_, truncated, infos = envs.step({"agent": np.ones((2, 3), np.int64)})
        assert truncated.all()


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    for settings, words in (
        ({"backend": "cloud"}, "backend must be 'async', 'thread', 'sync', 'native', 'pool' or 'auto', got 'cloud'"),
        ({"num_envs": 0}, "at least 1, got 0"),
        ({"num_workers": 3}, "num_workers must be an integer from 1 to num_envs=2, got 3"),
        ({"num_workers": 0}, "num_workers must be an integer from 1 to num_envs=2, got 0"),
        ({"backend": "sync", "num_workers": 2}, "num_workers=2 is for workers; backend='sync' has none"),
        ({"backend": "sync", "context": "spawn"}, "context='spawn' is for worker processes; backend='sync' has none"),
        ({"backend": "thread", "context": "spawn"}, "context='spawn' is for worker processes; backend='thread'"),
        ({"backend": "thread", "shared_memory": "require"}, "shared_memory='require' is for worker processes"),
        ({"backend": "sync", "shared_memory": False}, "shared_memory=False is for worker processes"),
        ({"backend": "sync", "daemon": False}, "daemon=False is for worker processes"),
        ({"backend": "thread", "worker": serve}, "is for worker processes; backend='thread' has none"),
        ({"backend": "thread", "num_workers": 3}, "num_workers must be an integer from 1 to num_envs=2, got 3"),
        ({"shared_memory": "maybe"}, "shared_memory must be True, False or 'require', got 'maybe'"),
        ({"done_on": "some"}, "done_on must be one of"),
        ({"spaces": "similar"}, "spaces must be one of"),
        ({"max_episode_steps": 0}, "max_episode_steps: expected an int of at least 1, got 0"),
        ({"render_mode": 3}, "render_mode: expected a mode such as 'rgb_array'"),
        ({"wrappers": "Double"}, "wrappers: expected classes or functions"),
        ({"env_kwargs": [{}]}, "env_kwargs: expected one dict per env, 2 in all, got 1"),
        ({"autoreset_mode": "never"}, "autoreset_mode must be one of"),
        ({"validate": "maybe"}, "validate must be one of"),
        ({"context": "thread"}, "context must be one of"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            marlvec.make(CounterEnv, **{"num_envs": 2, **settings})
    words = "expected something that builds envs, e.g. lambda: CounterEnv(): each of"
    with pytest.raises(ArgumentError, match=re.escape(words)):
        marlvec.make(CounterEnv(), num_envs=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("4", "num_envs: expected a whole number of at least 1, got '4', a str; write num_envs=4"),
        ("sync", "num_envs: expected a whole number of at least 1, got 'sync', a str; write num_envs=16"),
        (2.0, "num_envs: expected a whole number of at least 1, got 2.0, a float; write num_envs=2"),
        (True, "num_envs: expected a whole number of at least 1, got True, a bool; write num_envs=16"),
    ],
)
def test_num_envs_that_is_no_whole_number(given: Any, words: str) -> None:
    for env in (CounterEnv, [CounterEnv] * 4):
        with pytest.raises(ArgumentError, match=f"^{re.escape(words)}$"):
            marlvec.make(env, given)


def test_num_envs_may_be_numpys() -> None:
    with marlvec.make(CounterEnv, np.int32(2), backend="sync") as envs:
        assert (envs.num_envs, type(envs.num_envs)) == (2, int)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n_envs", "num_envs"),
        ("env_num", "num_envs"),
        ("backnd", "backend"),
        ("autoreset", "autoreset_mode"),
        ("asynchronous", "backend"),
        ("observation_mode", "spaces"),
    ],
)
@pytest.mark.parametrize("settings", [{"backend": "sync"}, {"backend": "native"}, {}])
def test_a_misspelt_argument_that_the_env_does_not_take(settings: dict[str, Any], name: str, meant: str) -> None:
    with pytest.raises(EnvArgumentError) as caught:
        marlvec.make("simple_spread", **settings, **{name: 5})
    head = str(caught.value).partition("\n")[0]
    assert f"got an unexpected keyword argument {name!r}" in head
    assert head.endswith(f". Did you mean make(…, {meant}=…)? Other arguments are passed to the env")
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_argument_of_the_env_is_no_misspelt_one_of_make() -> None:
    """One that comes near, which the env takes, and one that it does not take and that comes near nothing."""
    seen = []

    def build(n_envs: int) -> CounterEnv:
        seen.append(n_envs)
        return CounterEnv()

    marlvec.make(build, backend="sync", n_envs=5).close()
    assert seen == [5]
    with pytest.raises(EnvArgumentError, match="unexpected keyword argument 'height'") as caught:
        marlvec.make(CounterEnv, backend="sync", height=5)
    assert "Did you mean" not in str(caught.value)


# --- `render_mode=`: for all envs, for one of them, or for each its own


class Painter(SingleEnv):
    """Renders its index; ``strict`` says what its constructor does with a mode that it does not know."""

    modes = ["rgb_array", "ansi"]

    def __init__(self, render_mode: str | None = None, *, env_index: int = 0, strict: bool = False) -> None:
        super().__init__(9, env_index=env_index)
        self.metadata = {**self.metadata, "render_modes": self.modes}
        if strict:
            assert render_mode is None or render_mode in self.modes
        self.render_mode = render_mode
        self.renderer = None if render_mode is None else object()

    def render(self) -> Any:
        assert self.renderer is not None
        if self.render_mode == "ansi":
            return f"env {self.world.env_index}"
        return np.full((2, 3, 3), self.world.env_index, np.uint8)


class Shy(SingleEnv):
    """Knows no render mode, and has no argument for one."""


def modes_of(envs: marlvec.VectorEnv) -> list[Any]:
    return list(envs.get_attr("render_mode"))


@pytest.mark.mostly_slow("starts programs of its own", quick=2)
@pytest.mark.checklist(77)
@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_for_all_for_one_and_for_each(backend: str) -> None:
    def made(mode: Any, **kwargs: Any) -> marlvec.VectorEnv:
        return marlvec.make(Painter, 3, backend=backend, render_mode=mode, **kwargs)

    with made("rgb_array") as envs:
        assert modes_of(envs) == ["rgb_array"] * 3
        envs.reset(seed=0)
        assert [frame[0, 0, 0] for frame in envs.render()] == [0, 1, 2]
    with made("single_ansi") as envs:
        assert modes_of(envs) == ["ansi", None, None]
        assert [renderer is not None for renderer in envs.exec_func(lambda env: env.renderer is not None or None)] == [
            True,
            False,
            False,
        ]
        envs.reset(seed=0)
        assert envs.render(indices=[0]) == ("env 0",)
    with made([None, "ansi", "rgb_array"]) as envs:
        assert modes_of(envs) == [None, "ansi", "rgb_array"]
        envs.reset(seed=0)
        text, frame = envs.render(indices=[1, 2])
        assert text == "env 1"
        assert frame.shape == (2, 3, 3)
    for mode in ("human", "single_human", [None, "human", "ansi"]):
        for strict in (False, True):
            with pytest.raises(
                ArgumentError, match=r"render_mode='human': .*Painter supports 'rgb_array', 'ansi'"
            ) as caught:
                made(mode, strict=strict)
            assert isinstance(caught.value, ValueError)


def test_a_mode_is_refused_before_anything_is_left_running() -> None:
    closed: list[int] = []

    class Closing(Painter):
        def close(self) -> None:
            closed.append(self.world.env_index)

    with pytest.raises(ArgumentError, match="supports 'rgb_array', 'ansi'"):
        marlvec.make(Closing, 3, backend="sync", render_mode=["ansi", "rgb_array", "human"])
    assert sorted(closed) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["nonsense", "single_nonsense"])
@pytest.mark.parametrize(
    ("env", "modes"),
    [("simple_spread", "'human', 'rgb_array'"), ("CartPole-v1", "'human', 'rgb_array'")],
)
@pytest.mark.filterwarnings("ignore:.*The environment is being initialised with render_mode.*")
def test_libraries_that_take_any_mode_are_asked_what_they_support(env: str, modes: str, mode: str) -> None:
    with pytest.raises(ArgumentError, match=f"render_mode='nonsense': .* supports {modes}"):
        marlvec.make(env, 2, backend="sync", render_mode=mode)


def test_a_warning_that_is_an_error_does_not_hide_the_reason() -> None:
    """Gymnasium warns of modes it does not know, and in these tests warnings are errors."""
    with pytest.raises(ArgumentError, match="render_mode='nonsense': .*CartPole-v1 supports 'human', 'rgb_array'"):
        marlvec.make("CartPole-v1", 1, backend="sync", render_mode="nonsense")


def test_gymnasiums_lists_of_frames_are_supported() -> None:
    with marlvec.make("CartPole-v1", 2, backend="sync", render_mode="single_rgb_array_list") as envs:
        assert modes_of(envs) == ["rgb_array_list", None]


def test_envs_that_support_none_say_so() -> None:
    with pytest.raises(ArgumentError, match="supports none at all"):
        marlvec.make(ScriptedParallelEnv, 2, backend="sync", render_mode="rgb_array")


def test_envs_that_do_not_say_what_they_support_are_believed() -> None:
    class Silent(Painter):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            del self.metadata["render_modes"]

    with marlvec.make(Silent, 2, backend="sync", render_mode="holo") as envs:
        assert modes_of(envs) == ["holo", "holo"]


def test_envs_without_an_argument_for_it_refuse_it() -> None:
    with pytest.raises(ArgumentError, match=r"render_mode='rgb_array': .*Shy supports none at all"):
        marlvec.make(Shy, 2, backend="sync", render_mode="rgb_array")

    def broken(render_mode: str | None = None) -> Any:
        raise RuntimeError("out of paint")

    with pytest.raises(EnvRaised, match="out of paint"):
        marlvec.make(broken, 2, backend="sync", render_mode="rgb_array")


def test_wrappers_may_render_what_the_env_does_not() -> None:
    class Framed(gymnasium.Wrapper[Any, Any, Any, Any]):
        render_mode = "framed"

    with marlvec.make(Painter, 1, backend="sync", render_mode="ansi", wrappers=Framed) as envs:
        assert modes_of(envs) == ["framed"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (7, "render_mode: expected a mode such as 'rgb_array'"),
        (["ansi", 7], "render_mode: expected a mode such as 'rgb_array'"),
        (["ansi"], "render_mode: expected one mode or None per env, 2 in all, got 1"),
        (["ansi"] * 3, "render_mode: expected one mode or None per env, 2 in all, got 3"),
    ],
)
def test_wrong_modes_are_refused_before_anything_starts(mode: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        marlvec.make(Painter, 2, render_mode=mode)
    with pytest.raises(ArgumentError, match="render_mode is given twice for env 1"):
        marlvec.make(Painter, 2, render_mode="ansi", env_kwargs=[{}, {"render_mode": "rgb_array"}])


def test_a_mode_may_come_with_an_envs_own_arguments() -> None:
    with marlvec.make(
        partial(Painter, strict=True), 2, backend="sync", env_kwargs=[{}, {"render_mode": "ansi"}]
    ) as envs:
        assert modes_of(envs) == [None, "ansi"]


# --- Which arguments a function takes


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when a function is defined")
def test_annotations_may_name_what_only_type_checkers_know() -> None:
    scope: dict[str, Any] = {}
    exec(
        compile("def build(width: Unknown, *, env_index: int) -> Unknown: ...", "a file", "exec", dont_inherit=True),
        scope,
    )
    assert list(signature_of(scope["build"]).parameters) == ["width", "env_index"]


def test_callables_without_signature_raise_their_own_error() -> None:
    with pytest.raises(TypeError, match="not a callable"):
        signature_of(5)  # type: ignore[arg-type]
    assert str(signature_of(lambda a, *, b=2: a)) == "(a, *, b=2)"
