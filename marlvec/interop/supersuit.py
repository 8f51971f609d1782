"""SuperSuit's functions from a PettingZoo env to a vector env, on marlvec's vectorizer.

Axis letters: N envs, A agents, R = N * A rows; the agents of env i are rows i * A to i * A + A - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import cloudpickle
import gymnasium
import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.errors import ArgumentError
from marlvec.interop.rows.driver import RowDriver
from marlvec.interop.rows.view_checks import render_mode_of, viewed
from marlvec.making import make
from marlvec.vector.vector_env import VectorEnv

if TYPE_CHECKING:
    from marlvec.interop.sb3.vec_env import SB3VecEnv

__all__ = ["SuperSuitVecEnv", "concat_vec_envs_v1", "pettingzoo_env_to_vec_env_v1"]

Infos = list[dict[str, Any]]


class SuperSuitVecEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A view of a `VectorEnv` with one group of agents, as SuperSuit's vector envs look: rows, and a list of infos.

    What a row's info has, and what becomes of agents that end before their env, is described at
    `marlvec.interop.rows.driver.RowDriver`; SuperSuit itself asks for ``black_death`` there. As with SuperSuit, what is
    said at an autoreset is put among the infos of the step before, and ``observation_space`` and ``action_space`` are
    those of one row.

    Args:
        envs: The vectorizer, in same-step mode. Nothing else may step or reset it.
        par_env: The env that it was made from, if there is one.
        flag_dtype: Of terminations and truncations. SuperSuit's are uint8 in one process, and bool from processes.

    Raises:
        ArgumentError: There are several groups, or the mode is another one.

    Attributes:
        envs: The vectorizer.
        driver: What steps it.
        par_env: As given.
        num_envs: R, the number of rows.
        observation_space, action_space, single_observation_space, single_action_space: Of one row.
        metadata, render_mode: The envs'.
    """

    def __init__(self, envs: VectorEnv, par_env: Any = None, *, flag_dtype: DTypeLike = np.uint8) -> None:
        self._flag_dtype = np.dtype(flag_dtype)
        self.driver = RowDriver(envs, "SuperSuitVecEnv")
        group = self.driver.rows.group
        self.envs, self.par_env = envs, par_env
        self.num_envs = self.driver.rows.row_num
        self.observation_space = self.single_observation_space = deepcopy(group.observation_space)
        self.action_space = self.single_action_space = deepcopy(group.action_space)
        self.metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
        self.render_mode = render_mode_of(envs)

    def __del__(self) -> None:
        """Nothing. Up to 1.2, Gymnasium would close ``envs`` with a view, also with one that was never finished."""

    def reset(  # type: ignore[override]  # a list of infos, as SuperSuit gives it
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Begin new episodes in all envs.

        Args:
            seed: One int: env i gets ``seed + i``, as with SuperSuit. A list of one int or None per env: given as they
                are. None: their random streams go on.
            options: For the envs.

        Returns:
            ``(obs, infos)``; obs (R, …), one dict per row.
        """
        if isinstance(seed, (int, np.integer)):
            seed = [int(seed) + i for i in range(self.envs.num_envs)]
        return self.driver.reset(seed, options)

    def step(  # type: ignore[override]  # likewise
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float32], NDArray[Any], NDArray[Any], Infos]:
        """Step all envs.

        Args:
            actions: (R, …), or a tree of such arrays.

        Returns:
            ``(obs, rewards, terminations, truncations, infos)``: obs (R, …), rewards (R,) float32, both flags (R,)
            uint8 or bool (``flag_dtype``), one dict per row.

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send actions to all envs; `step_wait` brings the result."""
        self.driver.send(actions)

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[Any], NDArray[Any], Infos]:
        """Wait for the step that `step_async` began."""
        step = self.driver.recv()
        infos = [{**info, **first} for info, first in zip(step.infos, step.first_infos, strict=True)]
        flags = step.terminated.astype(self._flag_dtype), step.truncated.astype(self._flag_dtype)
        return step.obs, step.rewards.astype(np.float32), *flags, infos

    def render(self) -> Any:
        """What the first env's own ``render()`` returns."""
        return self.envs.render([0])[0]

    def env_is_wrapped(self, wrapper_class: type) -> list[bool]:
        """Per row, whether its env is wrapped in it, at any depth."""
        return [wrapped for wrapped in self.envs.env_is_wrapped(wrapper_class) for _ in range(self.envs.agent_num)]

    def close_extras(self, timeout: float = 5.0) -> None:
        """Close the vectorizer; `close` calls this."""
        self.envs.close(timeout)


def pettingzoo_env_to_vec_env_v1(parallel_env: Any) -> SuperSuitVecEnv:
    """One PettingZoo env as a vector env with a row per agent.

    Args:
        parallel_env: The env: Parallel, or AEC, which SuperSuit does not take. It is used as it is, not copied.

    Returns:
        A vector env with a row for each agent.

    Raises:
        ArgumentError: Its agents have different spaces.
    """
    return viewed(SuperSuitVecEnv, make(lambda: parallel_env, 1, backend="sync"), parallel_env)


def concat_vec_envs_v1(
    vec_env: SuperSuitVecEnv | gymnasium.Env[Any, Any],
    num_vec_envs: int,
    num_cpus: int = 0,
    base_class: str = "gymnasium",
) -> SuperSuitVecEnv | SB3VecEnv:
    """Many copies of an env as one vector env.

    Args:
        vec_env: What `pettingzoo_env_to_vec_env_v1` gave, or a Gymnasium env, which has one row. The env is copied by
            cloudpickle. It is not closed.
        num_vec_envs: N.
        num_cpus: Worker processes; 0: all envs in this one. With two and more (and as many envs), flags are bool, as
            SuperSuit's are then; else uint8.
        base_class: ``"gymnasium"``: a `SuperSuitVecEnv`. ``"stable_baselines3"``: an
            `marlvec.interop.sb3.vec_env.SB3VecEnv`, whose ``seed()`` spreads seeds in marlvec's way.

    Returns:
        What SuperSuit's function returns: a vector env of Gymnasium's, or of Stable-Baselines3's.

    Raises:
        ArgumentError: Another base class, a view that was not made from an env, or something else than a view or a
            Gymnasium env; says what to call instead.
        MissingExtraError: Stable-Baselines3 is asked for, and not installed.
    """
    if base_class not in ("gymnasium", "stable_baselines3"):
        raise ArgumentError(f"base_class: expected 'gymnasium' or 'stable_baselines3', got {base_class!r}")
    data: bytes = cloudpickle.dumps(_env_of(vec_env))
    factories: list[Callable[[], Any]] = [lambda: cloudpickle.loads(data)] * num_vec_envs
    workers = {"backend": "async", "num_workers": min(num_cpus, num_vec_envs)} if num_cpus else {"backend": "sync"}
    envs = make(factories, num_vec_envs, **workers)
    if base_class == "gymnasium":
        return viewed(SuperSuitVecEnv, envs, flag_dtype=np.bool_ if min(num_cpus, num_vec_envs) > 1 else np.uint8)
    return viewed(_of_sb3, envs)


def _of_sb3(envs: VectorEnv) -> SB3VecEnv:
    from marlvec.interop.sb3.vec_env import SB3VecEnv

    return SB3VecEnv(envs)


def _env_of(vec_env: Any) -> Any:
    """The env that is to be copied."""
    if isinstance(vec_env, SuperSuitVecEnv):
        if vec_env.par_env is not None:
            return vec_env.par_env
        got = "a view without an env"
    elif isinstance(vec_env, gymnasium.Env):
        return vec_env
    elif isinstance(vec_env, gymnasium.vector.VectorEnv):
        got = f"{type(vec_env).__name__}, which is many envs already: marlvec.make(env, n) makes as many as asked"
    else:
        got = f"{type(vec_env).__name__}: call pettingzoo_env_to_vec_env_v1(env) first"
    raise ArgumentError(f"vec_env: expected what pettingzoo_env_to_vec_env_v1() gave, or a Gymnasium env, got {got}")
