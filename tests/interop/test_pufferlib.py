"""The view for PufferLib, by its protocol: it compiles extensions, and cannot be had everywhere.

`tests.interop.test_row_views` plays whole episodes through it.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import SyncVectorEnv
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.testing import Script, ScriptedParallelEnv
from tests.interop.envs import SampleEnv
from tests.interop.row_views import pufferlib_stand_in


def test_results_are_written_into_the_buffers_that_it_is_given() -> None:
    """Slices of larger arrays, as PufferLib's vectorizers hand them out."""
    from_above = {
        "observations": np.full((8, 18), -1, np.float32),
        "rewards": np.full(8, -1, np.float32),
        "terminals": np.ones(8, np.bool_),
        "truncations": np.ones(8, np.bool_),
        "masks": np.zeros(8, np.bool_),
        "actions": np.zeros(8, np.int32),
    }
    with pufferlib_stand_in(), marlvec.make("simple_spread", 2, backend="sync") as envs:
        from marlvec.interop.pufferlib import PufferView

        view = PufferView(envs, {name: array[1:7] for name, array in from_above.items()})
        assert view.num_agents == 6
        assert (view.single_observation_space.shape, view.single_action_space) == ((18,), Discrete(5))
        obs, infos = view.reset(seed=[3])  # as its Multiprocessing does
        first = obs.copy()
        obs, infos = view.reset(seed=3)
        assert first.tobytes() == obs.tobytes()
        assert infos == []
        with marlvec.make("simple_spread", 2, backend="sync") as plain:
            want = plain.reset(seed=3)[0].reshape(6, 18)
            assert from_above["observations"][1:7].tobytes() == obs.tobytes() == want.tobytes()
            assert (from_above["masks"][1:7].all(), from_above["terminals"][1:7].any()) == (True, False)
            for step in range(25):
                actions = np.full(6, step % 5, np.int32)
                infos = view.step(actions)[4]
                wanted = plain.step(actions.reshape(2, 3))
                assert from_above["observations"][1:7].tobytes() == wanted[0].reshape(6, 18).tobytes()
                assert from_above["rewards"][1:7].tobytes() == wanted[1].reshape(6).astype(np.float32).tobytes()
        assert from_above["truncations"].tolist() == [True] * 8
        assert not from_above["terminals"][1:7].any()
        assert [(info["agent"], info["episode_length"]) for info in infos] == [
            ("agent_0", 25),
            ("agent_1", 25),
            ("agent_2", 25),
        ] * 2
        for edge in (0, 7):
            assert (from_above["observations"][edge] == -1).all()
            assert from_above["rewards"][edge] == -1
        view.close()


def test_masks_say_whose_rows_count() -> None:
    script = Script([0, 0], [2, 4], ["terminated", "truncated"])
    with (
        pufferlib_stand_in(),
        SyncVectorEnv([partial(ScriptedParallelEnv, [script], agent_num=2)]) as envs,
    ):
        from marlvec.interop.pufferlib import PufferView

        view = PufferView(envs)
        view.reset()
        seen = []
        for _ in range(4):
            view.step(np.zeros(2, np.int32))
            seen.append((view.masks.tolist(), view.terminals.tolist(), view.truncations.tolist()))
        up, down, both = [True, False], [False, True], [True, True]
        none = [False, False]
        assert seen == [(both, none, none), (down, up, none), (down, none, none), (both, none, down)]


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ((Discrete(3), Discrete(4)), "expected one Box of observations"),
        ((Box(0, 1, (2,), np.float32), Discrete(4, start=3)), "expected choices that start at 0"),
    ],
)
def test_spaces_that_it_cannot_hold_are_refused(spaces: tuple[Any, Any], said: str) -> None:
    with pufferlib_stand_in(), SyncVectorEnv([partial(SampleEnv, *spaces)]) as envs:
        from marlvec.interop.pufferlib import PufferView

        with pytest.raises(ArgumentError, match=said):
            PufferView(envs)


@pytest.mark.parametrize(
    ("module", "library", "hint"),
    [
        ("pufferlib", "pufferlib", r"puffer\.ai/docs"),
        ("sb3", "stable_baselines3", r"pip install 'marlvec\[sb3\]'"),
        ("sb3.decisions", "stable_baselines3", r"pip install 'marlvec\[sb3\]'"),
    ],
)
def test_a_library_that_is_missing_is_named(
    module: str, library: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"marlvec.interop.{module}"
    folder = name.removesuffix(".decisions")
    for loaded in [key for key in sys.modules if key.startswith(folder) or key.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=hint):
        importlib.import_module(name)
