"""RLlib's training on marlvec's vectorizers: an env runner for the new API stack."""

from __future__ import annotations

from functools import partial
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.extras import needs_extra
from marlvec.interop.rows.view_checks import viewed
from marlvec.making import make

with needs_extra("ray", "RLlibEnvRunner", "pip install 'marlvec[rllib]'"):
    from ray.rllib.callbacks.utils import make_callback
    from ray.rllib.env.env_context import EnvContext
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.tune.registry import ENV_CREATOR, _global_registry

    from marlvec.interop.rllib.vector_env import RLlibVectorEnv

__all__ = ["RLlibEnvRunner"]

_OURS = "marlvec"  # key in env_config for the arguments of marlvec.make()


class RLlibEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc]  # Any where ray is not installed
    """RLlib's `MultiAgentEnvRunner` with one marlvec vectorizer for all envs of the runner.

    ``config.environment("simple_spread", env_config={"N": 5, "marlvec": {"backend": "native"}})`` and
    ``config.env_runners(env_runner_cls=RLlibEnvRunner, num_envs_per_env_runner=16)``.

    * The env is anything that `marlvec.make` accepts or, as usual in RLlib, a `MultiAgentEnv` class or a name
      registered by ``ray.tune.register_env``; then each env is built from ``env_config``.
    * ``env_config`` goes to the env, except ``"marlvec"``: the arguments of `marlvec.make`, and ``action_masks`` of
      `RLlibVectorEnv`.
    * A runner's first reset uses RLlib's seed, spread over the envs by `marlvec.env_seeds`.
    * RLlib's check of single envs is not run, since single envs cannot be stepped. `make` has its own checks.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: (When the runner is built.) There is no env, or ``env_config["marlvec"]`` contains arguments that
            RLlib sets: the number of envs, the mode, the env's own arguments.
    """

    env: RLlibVectorEnv | None

    def make_env(self) -> None:
        """Build the vectorizer, and close the previous one."""
        if self.env is not None:
            self.env.close()
            self.env = None
        context = self._context()
        ours = dict(context.pop(_OURS, {}))
        if taken := {"num_envs", "autoreset_mode", "env_kwargs", "copy"}.intersection(ours):
            raise ArgumentError(
                f"env_config[{_OURS!r}]: expected no {sorted(taken)}: RLlib sets the number of envs "
                f"(num_envs_per_env_runner) and the mode 'next_step'; put the env's arguments beside {_OURS!r}"
            )
        action_masks = ours.pop("action_masks", False)
        own: dict[str, Any] = {}
        env = self.config.env
        if not env:
            raise ArgumentError("RLlibEnvRunner: expected an env, got none; set it with config.environment(env)")
        if isinstance(env, str) and _global_registry.contains(ENV_CREATOR, env):
            env = partial(_global_registry.get(ENV_CREATOR, env), context)
        elif isinstance(env, type) and issubclass(env, MultiAgentEnv):
            env = partial(env, context)
        else:
            own = dict(context)
        envs = make(
            env, self.config.num_envs_per_env_runner, autoreset_mode="next_step", env_kwargs=own or None, **ours
        )
        self.env = viewed(RLlibVectorEnv, envs, action_masks=action_masks)
        self.num_envs = self.env.num_envs
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={"env_runner": self, "metrics_logger": self.metrics, "env": self.env, "env_context": context},
        )

    def _context(self) -> EnvContext:
        given = self.config.env_config
        if isinstance(given, EnvContext):
            return given.copy_with_overrides()
        return EnvContext(
            dict(given),
            worker_index=self.worker_index,
            num_workers=self.config.num_env_runners,
            remote=self.config.remote_worker_envs,
        )
