"""SuperSuit's functions that convert a PettingZoo env to a vector env, on marlvec's vectorizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import cloudpickle
import gymnasium
import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.errors import ArgumentError
from marlvec.interop.rows import RowDriver, metadata_of, render_mode_of, viewed
from marlvec.making import make
from marlvec.vector.vector_env import VectorEnv

if TYPE_CHECKING:
    from marlvec.interop.sb3 import SB3VecEnv

__all__ = ["SuperSuitVecEnv", "concat_vec_envs_v1", "pettingzoo_env_to_vec_env_v1"]

Infos = list[dict[str, Any]]


class SuperSuitVecEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A view of a `VectorEnv` with one group of agents, like SuperSuit's vector envs: rows, and a list of infos.

    `marlvec.interop.rows.RowDriver` describes a row's info, and rows of agents that end before their env
    (SuperSuit requires ``black_death`` for these). As in SuperSuit, infos of an autoreset are merged into the infos of
    the step before, and ``observation_space`` and ``action_space`` are those of one row.

    Args:
        envs: The vectorizer, in same-step mode. No other code may step or reset it.
        par_env: The env that it was made from, if any.
        flag_dtype: Dtype of terminations and truncations. SuperSuit's are uint8 in one process, and bool across
            processes.

    Raises:
        ArgumentError: There are several groups, or the mode differs.

    Attributes:
        envs: The vectorizer.
        driver: The `RowDriver` that steps it.
        par_env: As given.
        num_envs: R, the number of rows.
        observation_space, action_space, single_observation_space, single_action_space: Spaces of one row.
        metadata, render_mode: From the envs.
    """

    def __init__(self, envs: VectorEnv, par_env: Any = None, *, flag_dtype: DTypeLike = np.uint8) -> None:
        self._flag_dtype = np.dtype(flag_dtype)
        self.driver = RowDriver(envs, "SuperSuitVecEnv")
        group = self.driver.rows.group
        self.envs, self.par_env = envs, par_env
        self.num_envs = self.driver.rows.row_num
        self.observation_space = self.single_observation_space = deepcopy(group.observation_space)
        self.action_space = self.single_action_space = deepcopy(group.action_space)
        self.metadata = metadata_of(envs)
        self.render_mode = render_mode_of(envs)

    def __del__(self) -> None:
        """Leave ``envs`` open: Gymnasium up to 1.2 closes a view when it is deleted, even a half-built one."""

    def reset(  # type: ignore[override]  # a list of infos, as in SuperSuit
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Begin new episodes in all envs.

        Args:
            seed: One int: env i gets ``seed + i``, as in SuperSuit. A list of one int or None per env: used as they
                are.
                None: the envs' random generators continue.
            options: For the envs.

        Returns:
            ``(obs, infos)``; obs (R, …), one dict per row.
        """
        if isinstance(seed, (int, np.integer)):
            seed = [int(seed) + i for i in range(self.envs.num_envs)]
        return self.driver.reset(seed, options)

    def step(  # type: ignore[override]  # a list of infos, as in SuperSuit
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
        """Send actions to all envs; `step_wait` returns the result."""
        self.driver.send(actions)

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[Any], NDArray[Any], Infos]:
        """Wait for the step started by `step_async`."""
        step = self.driver.recv()
        infos = [{**info, **first} for info, first in zip(step.infos, step.first_infos, strict=True)]
        flags = step.terminated.astype(self._flag_dtype), step.truncated.astype(self._flag_dtype)
        return step.obs, step.rewards.astype(np.float32), *flags, infos

    def render(self) -> Any:
        """The frame of the first env's ``render()``."""
        return self.envs.render([0])[0]

    def env_is_wrapped(self, wrapper_class: type) -> list[bool]:
        """Return for each row whether its env is wrapped in ``wrapper_class``, at any depth."""
        return list(self.driver.rows.of_envs(self.envs.env_is_wrapped(wrapper_class)))

    def close_extras(self, timeout: float = 5.0) -> None:
        """Close the vectorizer; `close` calls this."""
        self.envs.close(timeout)


def pettingzoo_env_to_vec_env_v1(parallel_env: Any) -> SuperSuitVecEnv:
    """Convert one PettingZoo env to a vector env with a row per agent.

    Args:
        parallel_env: The env: Parallel, or AEC, which SuperSuit does not accept. It is used directly, not copied.

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
    """Make many copies of an env one vector env.

    Args:
        vec_env: A vector env from `pettingzoo_env_to_vec_env_v1`, or a Gymnasium env, which has one row. The env is
            copied by cloudpickle. It is not closed.
        num_vec_envs: N.
        num_cpus: Worker processes; 0: all envs in this process. With two or more workers (and envs), flags are bool, as
            in SuperSuit; else uint8.
        base_class: ``"gymnasium"``: a `SuperSuitVecEnv`. ``"stable_baselines3"``: an
            `marlvec.interop.sb3.SB3VecEnv`, whose ``seed()`` spreads seeds in marlvec's way.

    Returns:
        A vector env of Gymnasium or of Stable-Baselines3, as SuperSuit's function returns.

    Raises:
        ArgumentError: Another base class, a view that was not made from an env, or neither a view nor a Gymnasium env;
            the message names the function to call instead.
        MissingExtraError: Stable-Baselines3 is requested, and not installed.
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
    from marlvec.interop.sb3 import SB3VecEnv

    return SB3VecEnv(envs)


def _env_of(vec_env: Any) -> Any:
    if isinstance(vec_env, SuperSuitVecEnv):
        if vec_env.par_env is not None:
            return vec_env.par_env
        got = "a view without an env"
    elif isinstance(vec_env, gymnasium.Env):
        return vec_env
    elif isinstance(vec_env, gymnasium.vector.VectorEnv):
        got = f"{type(vec_env).__name__}, which has many envs already: use marlvec.make(env, n)"
    else:
        got = f"{type(vec_env).__name__}: call pettingzoo_env_to_vec_env_v1(env) first"
    raise ArgumentError(
        f"vec_env: expected the result of pettingzoo_env_to_vec_env_v1(), or a Gymnasium env, got {got}"
    )
