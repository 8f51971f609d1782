"""Plays whole episodes on an env, checking all returned values: through its adapter, or with a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Dict, Discrete, Space
from numpy.typing import NDArray

from marlvec.envs.adapters.base import Adapter, AgentId, as_flag, infos_in
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import Info, refuse_masks
from marlvec.errors import ContractError
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.testing.findings import (
    ConstantSpaces,
    EpisodeLog,
    Findings,
    PlayedCall,
    RuleBroken,
    Uncopied,
    check_mask,
    check_member,
    check_reward,
    first_difference,
    leaf,
)
from marlvec.vector.buffers import Buffers


@dataclass
class PlayedStep:
    """Copies of the results of one call, keyed by description, e.g. ``"reward of agent 'a'"``."""

    place: PlayedCall
    facts: dict[str, Any] = field(default_factory=dict)


class Player(ABC):
    """Plays random legal actions on one env, with private arrays, prepared before each call as by a vectorizer.

    `env` is the env as its user wrote it, `writer` the one that writes into the slot: the same, or its adapter.
    `read_spaces`: see `ConstantSpaces`; observation spaces of all agents first, then action spaces.
    """

    def __init__(
        self,
        env: Any,
        writer: MultiAgentEnv,
        agents: Iterable[AgentId],
        read_spaces: Callable[[], dict[str, Any]],
        max_steps: int,
        findings: Findings,
    ) -> None:
        self.env, self.name, self.agents, self.max_steps = env, writer.name, list(agents), max_steps
        self.log = EpisodeLog(findings)
        self.place = PlayedCall(self.name, "reset()", log=self.log)
        self.spaces = ConstantSpaces(self.name, lambda: {**read_spaces(), **_state_space(env)}, self.log)
        found = list(read_spaces().values())
        self.observation_spaces: dict[AgentId, Space[Any]] = dict(zip(self.agents, found, strict=False))
        self.action_spaces: dict[AgentId, Space[Any]] = dict(zip(self.agents, found[len(self.agents) :], strict=False))
        self._samplers = {agent: SpaceSampler(SpaceTree(space)) for agent, space in self.action_spaces.items()}
        self.live: set[AgentId] = set()
        self.gone: set[AgentId] = set()  # agents that have ended
        self.over = False
        # called after each checked call, with whether the episode is over
        self.watch: Callable[[bool], None] = lambda over: None
        self._moment = PlayedStep(self.place)
        self._spec = spec = writer.spec()
        homes = {a: (g, j) for g, group in enumerate(spec.groups) for j, a in enumerate(group.agents)}
        self._homes: dict[AgentId, tuple[int, int]] = {agent: homes[a] for a, agent in enumerate(self.agents)}
        self._rows = rows = Buffers(spec, 1)
        self._slot = rows.slot(0)
        self._reward, self._ended, self._cut = rows.reward[0], rows.terminated[0], rows.truncated[0]
        self._alive, self._acting, self._unseen = rows.alive[0], rows.acting[0], rows.final_missing[0]

    # --- where rows and raw values differ ---

    @abstractmethod
    def reset_slot(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Let the env begin an episode in the slot, and check what is in no row."""

    @abstractmethod
    def step_slot(self) -> None:
        """Let the env take one step in the slot, and check what is in no row."""

    @abstractmethod
    def check_row(self, agent: AgentId) -> None:
        """Check and record an observation in the rows."""

    @abstractmethod
    def check_state(self) -> None:
        """Check and record the global state, if there is one."""

    # --- whole episodes ---

    def play(self, episodes: int, seed: int) -> list[PlayedStep]:
        """Play episodes, and return the results of each call; the first is seeded, the others continue from there.

        Faults go to the findings; an episode that cannot continue ends there.
        """
        return list(self.moments(episodes, seed))

    def moments(self, episodes: int, seed: int, actions: int | None = None) -> Iterator[PlayedStep]:
        """Play episodes, and yield the results of each call once it has returned.

        `seed` is that of the env, in the first episode, and of the actions unless `actions` gives another one.
        """
        rng = np.random.default_rng(seed if actions is None else actions)
        for episode in range(1, episodes + 1):
            self.log.begin()
            self.gone, self.over, step = set(), False, 0
            self.enter(PlayedCall(self.name, "reset()", episode, log=self.log))
            with self._until_broken():
                self.reset(seed if episode == 1 else None, None if episode == 1 else {})
            self.spaces.check(self.place)
            self.watch(self.over)
            yield self._moment
            while not self.over:
                step += 1
                self.enter(PlayedCall(self.name, "step()", episode, step, self.log))
                with self._until_broken():
                    if step > self.max_steps:
                        expected = f"its end within max_steps={self.max_steps} steps"
                        self.place.fault("ends", "the episode", expected, "none")
                    self.step(rng)
                if self.over:
                    self.spaces.check(self.place)
                self.watch(self.over)
                yield self._moment

    def enter(self, place: PlayedCall) -> None:
        """Say which call comes next."""
        self.place, self._moment = place, PlayedStep(place)

    @contextmanager
    def _until_broken(self) -> Iterator[None]:
        """End the episode where it cannot continue."""
        try:
            yield
        except RuleBroken as fault:
            self.log.add(fault)
            self.record("how the episode ended", fault.finding.problem)
            self.over = True
        except Exception as error:  # of the check's code, after a fault of the env
            self.log.found, self.over = True, True
            # Not through the log, which leaves out consequences: the rest of the episode is not checked.
            self.log.findings.add(self.place.stopped(error))

    # --- calls ---

    def ask(self, function: Callable[..., Any], *args: Any, given: str = "", **kwargs: Any) -> Any:
        """Call the env, which must not raise or change its arguments, which messages call `given`."""
        purpose = "without a copy, changes by the env are not found"
        before = self.place.copied("arguments", given, (args, kwargs), purpose)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self.place.raised(error)
        for sent, now in () if isinstance(before, Uncopied) else zip(before, (args, kwargs), strict=True):
            if changed := first_difference(sent, now):
                # The first part of the path is the argument.
                path = changed.path.partition("/")[2]
                expected = f"it to be left as it was given, {changed.expected}"
                kind = given.partition(" of agent")[0]
                self.place.report("arguments", leaf(given, path), expected, changed.got, kind=kind)
        return result

    def draw(self, agent: AgentId, mask: NDArray[np.bool_] | None, rng: np.random.Generator) -> Any:
        """Return one random action that the mask allows; ints for Discrete spaces, private arrays."""
        tree = SpaceTree(self.action_spaces[agent])
        drawn = tree.flatten(self._samplers[agent].sample(rng, 1, None if mask is None else mask[None]))
        plain = [_plain(one.space, leaves[0]) for one, leaves in zip(tree.leaves, drawn, strict=True)]
        return tree.unflatten(plain)

    # --- results ---

    def record(self, what: str, value: Any, check: str = "observations") -> None:
        """Add a copy of a value to the trace."""
        purpose = "without a copy, it is not compared with that of other episodes of the same seed"
        self._moment.facts[what] = self.place.copied(check, what, value, purpose)

    def observe(self, agent: AgentId, value: Any) -> None:
        """Check and record one agent's observation."""
        subject = f"observation of agent {agent!r}"
        with self.place.logging():
            check_member(self.observation_spaces[agent], value, self.place, subject)
        self.record(subject, value)

    def record_reward(self, agent: AgentId, value: Any) -> None:
        """Check and record one agent's reward."""
        self.record(f"reward of agent {agent!r}", check_reward(value, self.place, agent), "rewards")

    def ends(self, agent: AgentId, terminated: Any, truncated: Any) -> bool:
        """Check and record one agent's flags; return whether it has ended."""
        pairs = ((terminated, "termination"), (truncated, "truncation"))
        flags = [as_flag(value, self.place, agent, what) for value, what in pairs]
        self.record(f"flags of agent {agent!r}", flags)
        return any(flags)

    def record_mask(self, agent: AgentId, value: Any) -> NDArray[np.bool_] | None:
        """Check and record the mask of an agent that must act."""
        mask = None
        with self.place.logging():
            mask = check_mask(self.action_spaces[agent], value, self.place, agent)
        self.record(f"action mask of agent {agent!r}", mask)
        return mask

    def see_state(self, space: Space[Any], state: Any) -> None:
        """Check and record a global state."""
        with self.place.logging():
            check_member(space, state, self.place, "the global state", "state")
        self.record("the global state", state, "state")

    # --- rows ---

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Begin an episode and check the results."""
        self._rows.clear_row(0)
        if seed is not None:
            self._rows.gave_mask[...] = False  # as for a new env
        self._clear()
        self.reset_slot(seed, options)
        if not self._alive.any():
            self.place.fault("agents", "alive", "at least one agent", "none", "set slot.alive in reset()")
        self.live = set()
        self._check_rows()

    def step(self, rng: np.random.Generator) -> None:
        """Take one step with random legal actions and check the results."""
        for agent, acts in zip(self.agents, self._acting.tolist(), strict=True):
            if not acts:
                continue
            g, j = self._homes[agent]
            action = self.draw(agent, self._mask_of(agent), rng)
            tree = self._spec.groups[g].action_tree
            for row, part in zip(self._rows.actions[g], tree.flatten(action), strict=True):
                row[0, j] = part
        for a in np.flatnonzero(~self._alive).tolist():
            self._slot.zero_obs(a)
        self._clear()
        self.step_slot()
        self._check_rows()

    def _clear(self) -> None:
        self._reward[...], self._rows.events[...] = 0, False
        self._slot.done = self._slot.begun = False

    def _check_rows(self) -> None:
        place, begun = self.place, self._slot.begun
        flagged = self._ended | self._cut
        for a, agent in enumerate(self.agents):
            alive = bool(self._alive[a])
            if self._acting[a] and not alive:
                change = "set acting only where alive is set"
                place.report("life", f"acting of agent {agent!r}", "False, for it is not alive", "True", change)
            self.record_reward(agent, float(self._reward[a]))
            self.ends(agent, self._ended[a], self._cut[a])
            if not begun:
                with place.logging():
                    self._check_life(agent, alive, bool(flagged[a]), bool(self._reward[a]))
            # Before its first turn an agent may have no observation; without a final one it was checked earlier.
            if self._acting[a] or (flagged[a] and not self._unseen[a]) or (alive and self._has_obs(agent)):
                self.check_row(agent)
            if self._acting[a]:
                self._mask_of(agent)
            if self._unseen[a] and not flagged[a]:
                change = "set final_missing only in the step in which the agent ends"
                subject = f"final_missing of agent {agent!r}"
                place.report("life", subject, "False, for it has not ended", "True", change)
        ended = {agent for agent, flag in zip(self.agents, flagged.tolist(), strict=True) if flag}
        self.gone |= ended
        self.live = {agent for agent, alive in zip(self.agents, self._alive.tolist(), strict=True) if alive}
        self.record("alive", self._alive)
        self.record("acting", self._acting)
        self.over = self._slot.done
        if not begun and self.over is not (not self.live):
            change = "set slot.done in the step after which no agent is alive, and in no other"
            place.fault("ends", "slot.done", f"{not self.live}, as alive says", str(self.over), change)
        self.check_state()

    def _check_life(self, agent: AgentId, alive: bool, flagged: bool, rewarded: bool) -> None:
        place = self.place
        if alive:
            self.gone.discard(agent)  # it has joined again
        if agent in self.gone and (flagged or rewarded):
            change = "write no flag or reward of an agent after the step in which it ended"
            place.fault("life", f"agent {agent!r}", "nothing, for it has ended", "a flag or reward", change)
        if alive and flagged:
            change = "clear alive in the step in which the agent ends"
            place.fault("life", f"alive of agent {agent!r}", "False, for it has ended", "True", change)
        if agent in self.live and not alive and not flagged:
            change = "set terminated or truncated in the step in which alive is cleared"
            place.fault("life", f"alive of agent {agent!r}", "True, for its flags are False", "False", change)

    def _has_obs(self, agent: AgentId) -> bool:
        g, j = self._homes[agent]
        rows = (leaf[0, j, ...] for leaf in self._rows.obs[g])
        return any(row[()] is not None if row.dtype == np.object_ else row.any() for row in rows)

    def _mask_of(self, agent: AgentId) -> NDArray[np.bool_] | None:
        g, j = self._homes[agent]
        masks = self._rows.action_masks[g]
        if masks is None or (self._spec.groups[g].mask_size is None and not self._slot.gave_mask[0]):
            return None
        return self.record_mask(agent, masks[0, j])


def _state_space(env: Any) -> dict[str, Any]:
    space = getattr(env, "state_space", None)
    return {"state_space": space} if isinstance(space, Space) else {}


def _plain(space: Space[Any], value: Any) -> Any:
    if isinstance(space, Discrete):
        return int(value)
    if isinstance(value, np.generic) and space.shape == ():
        return np.asarray(value)
    return value.copy() if isinstance(value, np.ndarray) else value


class SlotPlayer(Player):
    """Plays a `MultiAgentEnv`; what it has written is checked in the rows."""

    def __init__(self, env: MultiAgentEnv, max_steps: int, findings: Findings) -> None:
        def read() -> dict[str, Any]:
            spaces = {f"observation_spaces[{a}]": space for a, space in enumerate(env.observation_spaces)}
            return spaces | {f"action_spaces[{a}]": space for a, space in enumerate(env.action_spaces)}

        super().__init__(env, env, env.agents, read, max_steps, findings)

    def reset_slot(self, seed: int | None, options: dict[str, Any] | None) -> None:
        infos = self.ask(partial(self.env.reset, self._slot), seed=seed, options=options, given="options")
        self._check_info(infos)

    def step_slot(self) -> None:
        self._check_info(self.ask(partial(self.env.step, self._slot)))

    def check_row(self, agent: AgentId) -> None:
        g, j = self._homes[agent]
        leaves = [deepcopy(leaf[0, j]) for leaf in self._rows.obs[g]]  # arrays, and objects such as texts
        self.observe(agent, self._spec.groups[g].observation_tree.unflatten(leaves))

    def check_state(self) -> None:
        if self._rows.state is not None and self._spec.state_space is not None:
            self.ask(partial(self.env.write_state, self._slot))
            self.see_state(self._spec.state_space, self._rows.state[0, ...])

    def _check_info(self, infos: Any) -> None:
        if infos is not None:
            for agent, info in infos_in(infos, self.place, "infos").items():
                infos_in(info, self.place, f"info of {agent!r}")
            with self.place.logging():
                self._refuse_masks(infos)

    def _refuse_masks(self, infos: Info) -> None:
        try:
            refuse_masks(self._spec, infos)
        except ContractError:
            change = "write it with slot.write_mask(), or put it under another key"
            self.place.fault("masks", "action_mask in infos", "none, since it forbids no action there", "one", change)


class AdapterPlayer(Player):
    """Plays a user's env through its adapter, whose broken rules and raw values come here."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        pairs = [(kind, agent) for kind in ("observation", "action") for agent in adapter.ids]

        def read() -> dict[str, Any]:
            return {adapter.space_call(kind, agent): adapter.space_of(kind, agent) for kind, agent in pairs}

        super().__init__(adapter.env, adapter, adapter.ids, read, max_steps, findings)
        self.adapter = adapter
        self._slot = WatchedSlot(self._slot, self)
        adapter.env = WatchedEnv(adapter.env, self)

    def enter(self, place: PlayedCall) -> None:
        super().enter(place)
        self.adapter.at_reset = self.adapter.at_step = place

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the adapter to the user's env."""
        return self.ask(getattr(self.env, name), *args, given=_GIVEN[name], **kwargs)

    def reset_slot(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.adapter.reset(self._slot, seed=seed, options=options if self.adapter.takes("options") else None)

    def step_slot(self) -> None:
        self.adapter.step(self._slot)

    def see(self, a: int, value: Any, what: str) -> None:
        """Check and record an observation that the adapter writes."""
        subject, path = f"{what} of agent {self.agents[a]!r}", self.adapter.path_of_observation(a)
        with self.place.logging():
            check_member(self.adapter.observation_spaces[a], value, self.place, subject, path=path)
        self.record(subject, value)

    def see_mask(self, a: int, value: Any) -> bool:
        """Check a mask that the adapter writes; return whether it fits the action space."""
        agent = self.agents[a]
        if self.adapter.mask_sizes[a] is not None:
            space = cast("Dict", self.observation_spaces[agent]).spaces["action_mask"]
            subject = f"observation of agent {agent!r}"
            with self.place.logging():
                check_member(space, value, self.place, subject, path="action_mask")
        with self.place.logging():
            check_mask(self.action_spaces[agent], value, self.place, agent)
            return True
        return False

    def check_row(self, agent: AgentId) -> None:
        """Nothing to check: all was seen before it was written."""

    def check_state(self) -> None:
        space = getattr(self.env, "state_space", None)
        if isinstance(space, Space) and callable(getattr(self.env, "state", None)):
            self.see_state(space, self.ask(self.env.state))


class WatchedEnv:
    """An env whose calls go through its player."""

    def __init__(self, env: Any, player: AdapterPlayer) -> None:
        self._env, self._player = env, player

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        return partial(self._player.call, name) if name in _GIVEN else found


_GIVEN = {"reset": "options", "seed": "seed", "step": "actions", "observe": "the agent"}
"""The calls that go through a player, and what messages call their arguments."""


class WatchedSlot(Slot):
    """A slot that shows an adapter's values to a player before it writes those that fit."""

    __slots__ = ("_player",)

    def __init__(self, slot: Slot, player: AdapterPlayer) -> None:
        for name in Slot.__slots__:
            setattr(self, name, getattr(slot, name))
        self._player = player

    def write_obs(self, agent: int, value: Any) -> None:
        self._player.see(agent, value, "observation")
        with suppress(ContractError):
            super().write_obs(agent, value)

    def write_final(self, agent: int, value: Any) -> None:
        self._player.see(agent, value, "final observation")
        with suppress(ContractError):
            super().write_final(agent, value)

    def write_mask(self, agent: int, value: Any) -> None:
        if self._player.see_mask(agent, value):
            super().write_mask(agent, value)
        else:
            self.clear_mask(agent)
