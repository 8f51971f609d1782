"""Checks of the end of an episode, in the three autoreset modes."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.errors import NotResetError
from marlvec.testing.vector_checks.play import MakeEnvs, VectorPlace, actions_for, compare, row_of
from marlvec.vector.vector_env import VectorEnv

__all__ = ["check_autoreset"]

EPISODES = 3
MAX_STEPS = 2_000

Story = list[tuple[str, dict[str, Any]]]
"""Events of one env: ``"reset"``, ``"step"`` or ``"end"``, each with its results, whatever the mode."""


def check_autoreset(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """In all modes every env plays the same episodes; only the step where the next one begins differs."""
    stories: dict[str, list[Story]] = {}
    for mode in ("disabled", "next_step", "same_step"):
        with make(autoreset_mode=mode) as envs:
            if envs.autoreset_mode != mode or envs.metadata.get("autoreset_mode") != mode:
                place.broken("autoreset_mode", repr(mode), f"{envs.autoreset_mode!r}, metadata {envs.metadata}")
            stories[mode] = _Player(envs, place, seed).play()
    for mode in ("next_step", "same_step"):
        for i, (first, other) in enumerate(zip(stories["disabled"], stories[mode], strict=True)):
            # Modes reach the last end of the slowest env at different times: compare up to the shorter story.
            for k, ((kind, expected), (other_kind, others)) in enumerate(zip(first, other, strict=False)):
                where = f"{mode} beside disabled, env {i}, event {k}"
                compare(place, where, kind, other_kind)
                compare(place, f"{where} ({kind})", expected, others)


class _Player:
    def __init__(self, envs: VectorEnv, place: VectorPlace, seed: int) -> None:
        self._envs, self._place, self._seed = envs, place, seed
        self._stories: list[Story] = [[] for _ in range(envs.num_envs)]
        self._counts = [0] * envs.num_envs  # steps taken by the env
        self._ended = [0] * envs.num_envs

    def play(self) -> list[Story]:
        """Play one mode until every env has ended `EPISODES` episodes; return the events of each env."""
        envs, mode = self._envs, self._envs.autoreset_mode
        obs, infos = envs.reset(seed=self._seed)
        for i in range(envs.num_envs):
            self._add_reset(i, obs, infos)
        over = np.zeros(envs.num_envs, np.bool_)
        for t in range(1, MAX_STEPS + 1):
            if mode == "disabled" and over.any():
                self._check_refused(over)
                obs, infos = envs.reset(env_ids=over)
                for i in np.flatnonzero(over).tolist():
                    self._add_reset(i, obs, infos)
                over[...] = False
            step = envs.step(actions_for(envs, self._seed, self._counts))
            obs, rewards, ended, cut, infos = step
            expected = over if mode == "next_step" else np.zeros_like(over)
            compare(self._place, f"{mode}, reset_mask of step {t}", expected, infos["reset_mask"].copy())
            over = infos.get("_final_observation", np.zeros(envs.num_envs, np.bool_)).copy()
            for i in range(envs.num_envs):
                if infos["reset_mask"][i]:
                    if rewards[i].any() or ended[i].any() or cut[i].any():
                        self._place.broken(f"{mode}, env {i}, step {t}", "no reward or flag in a reset row", "some")
                    self._add_reset(i, obs, infos)
                else:
                    self._add_step(i, t, step, bool(over[i]))
            if min(self._ended) >= EPISODES:
                return self._stories
        self._place.broken(f"{mode}, every env", f"{EPISODES} episodes within {MAX_STEPS} steps", f"{self._ended}")

    def _add_reset(self, i: int, obs: Any, infos: dict[str, Any]) -> None:
        self._stories[i].append(("reset", {"obs": row_of(obs, i), **self._status(i, infos)}))

    def _add_step(self, i: int, t: int, step: tuple[Any, ...], over: bool) -> None:
        obs, rewards, ended, cut, infos = step
        mode = self._envs.autoreset_mode
        self._counts[i] += 1
        results = {"rewards": row_of(rewards, i), "terminated": row_of(ended, i), "truncated": row_of(cut, i)}
        if not over:
            results |= {"obs": row_of(obs, i), **self._status(i, infos)}
            if not infos["alive"][i].any():
                self._place.broken(f"{mode}, env {i}, step {t}", "_final_observation where no agent is left", "False")
            self._stories[i].append(("step", results))
            return
        self._ended[i] += 1
        self._stories[i].append(("end", results | {"final": row_of(infos["final_observation"], i)}))
        if infos["alive"][i].any() is not np.bool_(mode == "same_step"):
            got = "some" if mode != "same_step" else "none"
            self._place.broken(f"{mode}, env {i}, alive after the end in step {t}", "the opposite", got)
        if mode == "same_step":
            self._add_reset(i, obs, infos)
        else:
            self._check_last(i, t, step)

    def _check_last(self, i: int, t: int, step: tuple[Any, ...]) -> None:
        """An agent that ends in a row without a reset has its last observation in both obs and final_observation."""
        obs, _, ended, cut, infos = step
        envs = self._envs
        for group, members in envs.groups.items():
            for j, a in enumerate(members):
                if ended[i, a] or cut[i, a]:
                    shown, final = (tree[group] if envs.grouped else tree for tree in (obs, infos["final_observation"]))
                    where = f"{envs.autoreset_mode}, final_observation of env {i}, agent {envs.agents[a]!r}, step {t}"
                    compare(self._place, where, row_of(shown, (i, j)), row_of(final, (i, j)))

    def _status(self, i: int, infos: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in ("alive", "acting", "action_mask") if name in infos]
        return {name: row_of(infos[name], i) for name in names}

    def _check_refused(self, over: Any) -> None:
        """Check that an env without an episode cannot be stepped."""
        envs = self._envs
        try:
            envs.step(envs.action_space.sample())
        except NotResetError:
            return
        got = f"a step of envs {np.flatnonzero(over).tolist()}, which have ended"
        self._place.broken("disabled, step() after an end", "NotResetError", got)
