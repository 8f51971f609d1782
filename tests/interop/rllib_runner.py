"""An env runner of RLlib's that plays at random, within the masks; and which episode was whose."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from marlvec.interop.rllib import RLlibEnvRunner

__all__ = ["MaskedRandom", "config_of", "played", "runner_of"]


class MaskedRandom(TorchRLModule):
    """Draws one of n actions; of those allowed, where observations have a mask. It counts how often it was asked."""

    def setup(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.asked = 0

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        obs = batch[Columns.OBS]
        masked = isinstance(obs, dict) and "action_mask" in obs
        leaf = obs["action_mask"] if masked else next(iter(obs.values())) if isinstance(obs, dict) else obs
        weights = leaf if masked else torch.ones(len(leaf), int(self.action_space.n))
        self.asked += len(leaf)
        return {Columns.ACTIONS: torch.multinomial(weights, 1, generator=self.generator)[:, 0]}


def config_of(
    env: Any,
    env_num: int,
    *,
    modules: Any = ("agent",),
    connector: Any = None,
    seed: int | None = 3,
    **env_config: Any,
) -> PPOConfig:
    """A config of one module for all agents whose names differ by a number, played at random."""

    def module_of(agent_id: str, episode: Any, **kwargs: Any) -> str:
        return agent_id.rpartition("_")[0] or "agent"

    return (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(
            env_runner_cls=RLlibEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=env_num,
            env_to_module_connector=None if connector is None else lambda env, spaces, device: connector(),
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=MaskedRandom))
        .multi_agent(policies=set(modules), policy_mapping_fn=module_of)
        .debugging(seed=seed)
    )


def runner_of(env: Any, env_num: int, **how: Any) -> RLlibEnvRunner:
    """A runner, and under ``begun`` the ids of each env's episodes in order."""
    begun: list[list[str]] = [[] for _ in range(env_num)]

    def note(*, episode: Any, env_index: int, **kwargs: Any) -> None:
        begun[env_index].append(episode.id_)

    config = config_of(env, env_num, **how).callbacks(on_episode_created=note)
    runner = RLlibEnvRunner(config=config, worker_index=0)
    runner.begun = begun
    return runner


def played(runner: RLlibEnvRunner, steps: int, **how: Any) -> list[list[Any]]:
    """Per env its episodes that came to an end within so many steps, whole: chunks put together."""
    found: dict[str, Any] = {}
    for _ in range(2):  # so that episodes are cut, and go on
        for chunk in runner.sample(num_timesteps=steps * runner.num_envs // 2, **how):
            if chunk.id_ in found:
                found[chunk.id_].concat_episode(chunk)
            else:
                found[chunk.id_] = chunk
    return [[found[key] for key in own if key in found and found[key].is_done] for own in runner.begun]
