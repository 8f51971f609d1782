"""Plays whole episodes on a raw env, checking all returned values."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray

from marlvec.envs.adapters.base import Adapter, keywords_of
from marlvec.envs.adapters.return_values import AgentId, only_element, zero_or_one
from marlvec.envs.adapters.self_reset import OBSERVATION_KEYS, resets_itself
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import split_action_mask
from marlvec.testing.env_checks.findings import EpisodeLog, Fault, Findings, Place, Uncopied, first_difference, leaf
from marlvec.testing.env_checks.values import (
    ConstantSpaces,
    check_flag,
    check_mask,
    check_member,
    check_reward,
    check_table,
    check_tuple,
)

__all__ = ["Moment", "Player", "RawPlayer"]


@dataclass
class Moment:
    """Copies of the results of one call, keyed by description, e.g. ``"reward of agent 'a'"``."""

    place: Place
    facts: dict[str, Any] = field(default_factory=dict)


class Player(ABC):
    """Plays random legal actions on one env of one form.

    `read_spaces`: see `ConstantSpaces`; observation spaces of all agents first, then action spaces.
    """

    def __init__(
        self,
        env: Any,
        name: str,
        agents: Iterable[AgentId],
        read_spaces: Callable[[], dict[str, Any]],
        max_steps: int,
        findings: Findings,
    ) -> None:
        self.env, self.name, self.agents, self.max_steps = env, name, list(agents), max_steps
        self.log = EpisodeLog(findings)
        self.place = Place(name, "reset()", log=self.log)
        self.spaces = ConstantSpaces(name, lambda: {**read_spaces(), **_state_space(env)}, self.log)
        found = list(read_spaces().values())
        self.observation_spaces: dict[AgentId, Space[Any]] = dict(zip(self.agents, found, strict=False))
        self.action_spaces: dict[AgentId, Space[Any]] = dict(zip(self.agents, found[len(self.agents) :], strict=False))
        self._samplers = {agent: SpaceSampler(SpaceTree(space)) for agent, space in self.action_spaces.items()}
        self._masked = {
            agent: split_action_mask(self.observation_spaces[agent], self.action_spaces[agent])[1] is not None
            for agent in self.agents
        }
        self.resets_itself = resets_itself(env, name)
        self.live: set[AgentId] = set()
        self.gone: set[AgentId] = set()  # agents that have ended
        self.over = False
        self.lenient = False  # the env is played with ``lenient=True``
        # called after each checked call, with whether the episode is over
        self.watch: Callable[[bool], None] = lambda over: None
        self._moment = Moment(self.place)

    # --- implemented per form ---

    @abstractmethod
    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Begin an episode and check the results; set ``live`` and ``over``."""

    @abstractmethod
    def step(self, rng: np.random.Generator) -> None:
        """Take one step with random legal actions and check the results; set ``live``, ``gone`` and ``over``."""

    # --- whole episodes ---

    def play(self, episodes: int, seed: int) -> list[Moment]:
        """Play episodes, and return the results of each call; the first is seeded, the others continue from there.

        Faults go to the findings; an episode that cannot continue ends there.
        """
        return list(self.moments(episodes, seed))

    def moments(self, episodes: int, seed: int, actions: int | None = None) -> Iterator[Moment]:
        """Play episodes, and yield the results of each call once it has returned.

        `seed` is that of the env, in the first episode, and of the actions unless `actions` gives another one.
        """
        rng = np.random.default_rng(seed if actions is None else actions)
        for episode in range(1, episodes + 1):
            self.log.begin()
            self.gone, self.over, step = set(), False, 0
            self._enter(Place(self.name, "reset()", episode, log=self.log))
            with self._until_broken():
                self.reset(seed if episode == 1 else None, None if episode == 1 else {})
                self._check_state()
            self.spaces.check(self.place)
            self.watch(self.over)
            yield self._moment
            while not self.over:
                step += 1
                self._enter(Place(self.name, "step()", episode, step, self.log))
                with self._until_broken():
                    if step > self.max_steps:
                        expected = f"its end within max_steps={self.max_steps} steps"
                        self.place.fault("ends", "the episode", expected, "none")
                    self.step(rng)
                    self._check_state()
                if self.over:
                    self.spaces.check(self.place)
                self.watch(self.over)
                yield self._moment

    def _enter(self, place: Place) -> None:
        self.place, self._moment = place, Moment(place)

    @contextmanager
    def _until_broken(self) -> Iterator[None]:
        """End the episode where it cannot continue."""
        try:
            yield
        except Fault as fault:
            self.log.add(fault)
            self.note("how the episode ended", fault.finding.problem)
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

    def ask_reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Call ``reset`` with the arguments it accepts; an old env is seeded by ``seed()``."""
        takes = keywords_of(self.env.reset)
        kwargs: dict[str, Any] = {"seed": seed, "options": options}
        if takes is not None:
            if "seed" not in takes and seed is not None:
                if not callable(getattr(self.env, "seed", None)):
                    change = "write reset(self, seed=None, options=None)"
                    self.place.fault("results", "the signature", "an argument 'seed'", f"{sorted(takes)}", change)
                self.ask(self.env.seed, seed, given="seed")
            kwargs = {key: value for key, value in kwargs.items() if key in takes}
        return self.ask(self.env.reset, given="options", **kwargs)

    def draw(self, agent: AgentId, mask: NDArray[np.bool_] | None, rng: np.random.Generator) -> Any:
        """Return one random action that the mask allows; ints for Discrete spaces, private arrays."""
        tree = SpaceTree(self.action_spaces[agent])
        drawn = tree.flatten(self._samplers[agent].sample(rng, 1, None if mask is None else mask[None]))
        plain = [_plain(one.space, leaves[0]) for one, leaves in zip(tree.leaves, drawn, strict=True)]
        return tree.unflatten(plain)

    # --- results ---

    def split_reset(self, result: Any) -> tuple[Any, Any]:
        """Split the result of a reset into dicts of observations and infos; the old API has no infos."""
        if not isinstance(result, Mapping):
            observations, infos = check_tuple(result, self.place, 2)
            return observations, infos
        self.note_old_reset("a dict")
        return result, {}

    def note_old_reset(self, got: str) -> None:
        """Report a reset that returns observations alone."""
        self._note_old("a tuple of 2", f"{got} without infos", "return (observations, infos)")

    def check_step(self, result: Any) -> tuple[Any, ...]:
        """Check the number of values that a step returned, and report the old API's 4."""
        values = check_tuple(result, self.place, 4, 5)
        if len(values) == 4:
            change = "return (observations, rewards, terminations, truncations, infos)"
            self._note_old("a tuple of 5", "a tuple of 4 with one value for terminations and truncations", change)
        return values

    def _note_old(self, expected: str, got: str, change: str) -> None:
        old = f"{got}: the old API, as of Gym before 0.26"
        self.place.report("results", "the result", expected, old, change, kind=self.place.call, minor=True)

    def note(self, what: str, value: Any, check: str = "observations") -> None:
        """Add a copy of a value to the trace."""
        purpose = "without a copy, it is not compared with that of other episodes of the same seed"
        self._moment.facts[what] = self.place.copied(check, what, value, purpose)

    def observe(self, agent: AgentId, value: Any) -> None:
        """Check and note one agent's observation."""
        subject = f"observation of agent {agent!r}"
        with self.place.logging():
            check_member(self.observation_spaces[agent], value, self.place, subject)
        self.note(subject, value)

    def allowed(self, agent: AgentId, obs: Any, info: Any) -> NDArray[np.bool_] | None:
        """Check and note the mask of an agent that must act, from its observation or else its info."""
        source = obs if self._masked[agent] else info
        if not isinstance(source, Mapping) or "action_mask" not in source:
            return None
        mask = None
        with self.place.logging():
            mask = check_mask(self.action_spaces[agent], source["action_mask"], self.place, agent)
        self.note(f"action mask of agent {agent!r}", mask)
        return mask

    def note_reward(self, agent: AgentId, value: Any) -> None:
        """Check and note one agent's reward."""
        if self.lenient and (number := only_element(value)) is not None:
            value = float(number)
        with self.place.logging():
            check_reward(value, self.place, agent)
        with suppress(OverflowError):  # an int beyond all floats, which is reported above
            value = float(value) if isinstance(value, numbers.Real) else value
        self.note(f"reward of agent {agent!r}", value, "rewards")

    def ends(self, agent: AgentId, terminated: Any, truncated: Any) -> bool:
        """Check and note one agent's flags; return whether it has ended."""
        flags = [self.read_flag(terminated, agent, "termination"), self.read_flag(truncated, agent, "truncation")]
        self.note(f"flags of agent {agent!r}", flags)
        return any(flags)

    def read_flag(self, value: Any, agent: AgentId, what: str) -> bool:
        """Check one flag; return it as a bool."""
        if self.lenient and (flag := zero_or_one(value)) is not None:
            value = flag
        with self.place.logging():
            return check_flag(value, self.place, agent, what)
        return bool(np.any(value))

    def check_infos(self, infos: Any) -> Mapping[Any, Any]:
        """Check the infos of all agents; other keys are not checked."""
        table: Mapping[Any, Any] = {}
        with self.place.logging():
            table = check_table(infos, self.place, "infos", "infos")
        for agent in self.agents:
            if agent in table:
                with self.place.logging():
                    check_table(table[agent], self.place, f"info of agent {agent!r}", "infos")
        return table

    def check_final(self, agent: AgentId, info: Any, common: Mapping[Any, Any]) -> None:
        """Check an agent's last observation in an env that resets itself: in its info, or by agent in common infos."""
        found = [info[key] for key in OBSERVATION_KEYS if isinstance(info, Mapping) and key in info]
        shared = [table for key in OBSERVATION_KEYS if isinstance(table := common.get(key), Mapping)]
        found += [table[agent] for table in shared if agent in table]
        subject = f"final observation of agent {agent!r}"
        with self.place.logging():
            if not found:
                change = "put what the agent saw last into its info, as it says that it resets itself"
                expected = f"one in its info under {', '.join(map(repr, OBSERVATION_KEYS))}"
                self.place.fault("observations", subject, expected, "none", change)
            check_member(self.observation_spaces[agent], found[0], self.place, subject)
            self.note(subject, found[0])

    def _check_state(self) -> None:
        space = getattr(self.env, "state_space", None)
        if isinstance(space, Space) and callable(getattr(self.env, "state", None)):
            state = self.ask(self.env.state)
            with self.place.logging():
                check_member(space, state, self.place, "the global state", "state")
            self.note("the global state", state, "state")


class RawPlayer(Player):
    """Plays the raw env of an adapter, with the adapter's name, agents and spaces."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        pairs = [(kind, agent) for kind in ("observation", "action") for agent in adapter.ids]

        def read() -> dict[str, Any]:
            return {self.space_call(kind, agent): adapter.space_of(kind, agent) for kind, agent in pairs}

        super().__init__(adapter.env, adapter.name, adapter.ids, read, max_steps, findings)
        self.lenient = adapter.is_lenient

    def space_call(self, kind: str, agent: AgentId) -> str:
        """Return the call by which a user reads a space, for messages."""
        return f"{kind}_space({agent!r})"


def _state_space(env: Any) -> dict[str, Any]:
    space = getattr(env, "state_space", None)
    return {"state_space": space} if isinstance(space, Space) else {}


def _plain(space: Space[Any], value: Any) -> Any:
    if isinstance(space, Discrete):
        return int(value)
    if isinstance(value, np.generic) and space.shape == ():
        return np.asarray(value)
    return value.copy() if isinstance(value, np.ndarray) else value
