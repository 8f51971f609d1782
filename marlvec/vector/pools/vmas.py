"""`VmasPool`: VMAS's scenarios, N envs in one simulator of tensors: ``make("vmas/balance", num_envs=4096)``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from numpy.typing import NDArray

from marlvec.envs.spec import AgentGroup, AutoresetMode, EnvSpec
from marlvec.errors import ArgumentError, ContractError
from marlvec.extras import import_extra
from marlvec.vector.infos import OF_AGENTS, Path
from marlvec.vector.pools.pool import Leaves, Pool, PoolReply, check_known

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_SEED_LIMIT = 2**32  # VMAS gives its seed to numpy, too


def build(
    num_envs: int,
    *,
    scenario: str,
    seed: Any = None,
    max_episode_steps: int | None = None,
    autoreset_mode: str = "same_step",
    render_mode: str | None = None,
    **kwargs: Any,
) -> VmasPool:
    """Build the envs of one scenario, by VMAS's own name; ``kwargs`` are for ``vmas.make_env`` and the scenario.

    `seed` is of the first episodes, until a ``reset(seed=…)``: an int, or a list whose first entry is used.
    """
    vmas = import_extra("vmas", f"env 'vmas/{scenario}'", "pip install 'marlvec[vmas]'")
    known = [*vmas.scenarios, *vmas.debug_scenarios, *vmas.mpe_scenarios]
    check_known("vmas", scenario, known, "vmas.scenarios")
    for name in ("dict_spaces", "terminated_truncated", "wrapper", "wrapper_kwargs", "grad_enabled"):
        if name in kwargs:
            raise ArgumentError(f"{name}={kwargs[name]!r}: marlvec reads VMAS's plain answers, and gives arrays")
    if max_episode_steps is not None:
        kwargs["max_steps"] = max_episode_steps
    first = seed[0] if isinstance(seed, (list, tuple, np.ndarray)) else seed

    def make_env() -> Any:
        with warnings.catch_warnings():
            # VMAS drops unknown arguments with a warning; here they raise.
            warnings.filterwarnings("error", "Scenario kwargs: ", UserWarning)
            try:
                return vmas.make_env(
                    scenario, num_envs=num_envs, seed=_small(first), terminated_truncated=True, **kwargs
                )
            except UserWarning as error:
                raise ArgumentError(
                    f"vmas/{scenario}: expected arguments of the scenario; VMAS reports: {error}"
                ) from error

    return VmasPool(
        make_env,
        f"vmas/{scenario}",
        autoreset_mode=autoreset_mode,
        render_mode=render_mode,
        device=kwargs.get("device", "cpu"),
    )


class VmasPool(Pool):
    """All envs of one VMAS environment: they step together, end separately, and share one random stream.

    VMAS keeps that stream in a class attribute, for all environments of a process, and on a GPU uses torch's generator
    of that GPU. The pool installs streams of its own for each call, so that it and others have no influence on each
    other. ``make_env`` must use ``terminated_truncated=True``.
    """

    steps_all = True

    def __init__(
        self,
        make_env: Callable[[], Any],
        name: str,
        *,
        autoreset_mode: str,
        render_mode: str | None = None,
        device: Any = "cpu",
    ) -> None:
        self._torch = torch = import_extra("torch", name, "pip install 'marlvec[vmas]'")
        environment_class = import_extra("vmas.simulator.environment", name, "pip install 'marlvec[vmas]'").Environment
        self._shared_stream: list[Any] = environment_class.vmas_random_state
        self._stream: list[Any] = list(self._shared_stream)
        self._gpu = gpu if (gpu := torch.device(device)).type == "cuda" else None
        self._gpu_stream = None if self._gpu is None else torch.cuda.get_rng_state(self._gpu)
        with self._own_stream():
            self.environment = env = make_env()
        self.render_mode = render_mode
        self.num_envs = self.batch_size = int(env.num_envs)
        # The shard resets envs, except in the mode in which a step may reset some envs.
        resets = AutoresetMode(autoreset_mode) is AutoresetMode.NEXT_STEP
        self.autoreset = AutoresetMode.NEXT_STEP if resets else AutoresetMode.DISABLED
        self._over = np.zeros(self.num_envs, np.bool_)
        self._everyone = np.arange(self.num_envs)
        self._request: Callable[[], PoolReply] | None = None
        agents = tuple(agent.name for agent in env.agents)
        observation_spaces = tuple(map(_as_gymnasium, env.observation_space))
        action_spaces = tuple(map(_as_gymnasium, env.action_space))
        metadata = {"name": name, "render_modes": ["rgb_array"]}
        self.spec = EnvSpec(name, agents, observation_spaces, action_spaces, (None,) * len(agents), metadata=metadata)
        self._groups = self.spec.groups

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        if any(option is not None for option in options):
            raise ArgumentError(f"reset(options=…): {self.spec.name} has no options")
        if len(ids) < self.num_envs and any(seed is not None for seed in seeds):
            raise ArgumentError(
                f"reset(seed=…, env_ids=…): {self.spec.name} has one random stream for all its envs, and takes a seed "
                f"with a reset of all of them; got {ids.tolist()}"
            )

    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        first = seeds[int(ids.argmin())] if len(seeds) else None  # env 0's, if all envs are reset, in any order
        self._request = partial(self._reset, ids, first)

    def send(self, ids: Ids, actions: Leaves, acting: BoolArray) -> None:
        if len(ids) < self.num_envs:
            raise ArgumentError(f"{self.spec.name} steps all its {self.num_envs} envs at once, got {ids.tolist()}")
        self._request = partial(self._step, [leaf for (leaf,) in actions])  # of a Box, Discrete or MultiDiscrete

    def recv(self) -> PoolReply:
        request, self._request = self._request, None
        assert request is not None
        with self._own_stream(), self._torch.no_grad():
            return request()

    def forget(self) -> bool:
        self._request = None
        return True  # it only needs a reset

    def env(self, i: int) -> VmasEnvView:
        return VmasEnvView(self, i)

    def close(self) -> None:
        self._request = None

    def _reset(self, ids: Ids, seed: int | None) -> PoolReply:
        obs = self._begin(ids, seed)
        self._over[ids] = False
        return self._reply(ids, obs, np.zeros((len(ids), len(self.spec.agents))))

    def _step(self, actions: Sequence[NDArray[Any]]) -> PoolReply:
        env, torch = self.environment, self._torch
        by_agent: list[Any] = [None] * len(self.spec.agents)
        for group, leaf in zip(self._groups, actions, strict=True):
            rows = torch.from_numpy(leaf.reshape(*leaf.shape[:2], -1)).to(env.device)
            for a, row in zip(group.agents, rows.unbind(1), strict=True):
                by_agent[a] = row
        obs, rewards, terminated, truncated, infos = env.step(by_agent)
        reward = _numpy(torch.stack(rewards, 1)).reshape(actions[0].shape[0], -1)  # `wheel` gives (N, 1) an agent
        ends = [_numpy(terminated), _numpy(truncated)]
        columns = {path: _numpy(column) for path, column in self._columns(infos)}
        has_columns = None
        if self.autoreset is AutoresetMode.NEXT_STEP:
            again, self._over = self._over, ends[0] | ends[1]
            if again.any():
                obs = self._begin(np.flatnonzero(again))
                reward = np.where(again[:, None], 0, reward)
                ends = [flag & ~again for flag in ends]
                self._over &= ~again
                has_columns = ~again
        return self._reply(self._everyone, obs, reward, ends, columns, has_columns)

    def _begin(self, ids: Ids, seed: int | None = None) -> Any:
        """Begin episodes of all envs, or of some (VMAS resets these one by one); return all observations."""
        env = self.environment
        if len(ids) == self.num_envs:
            return env.reset(seed=_small(seed))
        for i in ids.tolist():
            env.reset_at(i, return_observations=False)
        (obs,) = env.get_from_scenario(get_observations=True, get_rewards=False, get_infos=False, get_dones=False)
        return obs

    def _reply(
        self,
        ids: Ids,
        obs: Sequence[Any],
        reward: NDArray[Any],
        ends: Sequence[BoolArray] | None = None,
        columns: Mapping[Path, NDArray[Any]] | None = None,
        has_columns: BoolArray | None = None,
    ) -> PoolReply:
        shape = (len(ids), len(self.spec.agents))
        terminated, truncated = (np.broadcast_to(end[:, None], shape) for end in ends or np.zeros((2, len(ids)), bool))
        return PoolReply(
            env_ids=ids,
            obs=[self._stack(group, obs, ids) for group in self._groups],
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            elapsed=_numpy(self.environment.steps)[ids],
            columns=dict(columns or {}),
            has_columns=has_columns,
        )

    def _stack(self, group: AgentGroup, obs: Sequence[Any], ids: Ids) -> list[NDArray[Any]]:
        """Return a group's observations of these envs, (n, A_g, …) per leaf."""
        leaves = zip(*(group.observation_tree.flatten(obs[a]) for a in group.agents), strict=True)
        return [_numpy(self._torch.stack(agents, 1))[ids] for agents in leaves]

    def _columns(self, infos: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
        """Return VMAS's infos of all agents, a tensor (N, A, …) per key."""
        first = infos[0]
        if any(info.keys() != first.keys() for info in infos):
            raise ContractError(f"{self.spec.name}: expected infos with the same keys of all agents, got {infos}")
        for key in first:
            values = [info[key] for info in infos]
            if isinstance(first[key], Mapping):
                yield from self._columns(values, (*path, key))
            else:
                yield (OF_AGENTS, *path, key), self._torch.stack(values, 1)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        cuda, gpu = self._torch.cuda, self._gpu
        shared, self._shared_stream[:] = list(self._shared_stream), self._stream
        if gpu is not None:
            shared_on_gpu = cuda.get_rng_state(gpu)
            cuda.set_rng_state(self._gpu_stream, gpu)
        try:
            yield
        finally:
            self._stream[:] = self._shared_stream
            self._shared_stream[:] = shared
            if gpu is not None:
                self._gpu_stream = cuda.get_rng_state(gpu)
                cuda.set_rng_state(shared_on_gpu, gpu)


class VmasEnvView:
    """One env, ``index``, of the ``vmas`` environment of a `VmasPool`, for control calls."""

    def __init__(self, pool: VmasPool, index: int) -> None:
        self.environment, self.index, self.render_mode = pool.environment, index, pool.render_mode

    def render(self) -> Any:
        """Return a frame, (H, W, 3) uint8; VMAS draws with pyglet, and needs a display."""
        return self.environment.render(mode="rgb_array", env_index=self.index)


def _small(seed: int | None) -> int | None:
    """Return a seed for VMAS: unchanged below 2**32, else folded."""
    if seed is None or seed < _SEED_LIMIT:
        return None if seed is None else int(seed)
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _numpy(tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _as_gymnasium(space: Any) -> gymnasium.Space[Any]:
    """Convert a space of the old gym library, which VMAS uses, to Gymnasium's."""
    kind = type(space).__name__
    if kind == "Box":
        return Box(space.low, space.high, space.shape, space.dtype)
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return MultiDiscrete(space.nvec)
    if kind == "Dict":
        return Dict({key: _as_gymnasium(part) for key, part in space.spaces.items()})
    raise ContractError(f"expected a Box, Discrete, MultiDiscrete or Dict space, got {space}")
