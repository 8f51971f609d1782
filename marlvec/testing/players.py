"""Plays whole episodes on a raw env, checking all returned values: PettingZoo Parallel, RLlib-style, Gymnasium."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.envs.adapters.base import (
    OBSERVATION_KEYS,
    Adapter,
    AgentId,
    keywords_of,
    only_element,
    resets_itself,
    zero_or_one,
)
from marlvec.envs.adapters.dicts import ALL
from marlvec.envs.adapters.gymnasium import AGENT, MASKS, JointAdapter, joint_keys
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import count_choices, split_action_mask
from marlvec.spaces.equality import short
from marlvec.testing.findings import (
    ConstantSpaces,
    EpisodeLog,
    Fault,
    Findings,
    Place,
    Uncopied,
    check_agents,
    check_flag,
    check_keys,
    check_mask,
    check_member,
    check_reward,
    check_table,
    check_tuple,
    first_difference,
    leaf,
)


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


class ByAgentPlayer(RawPlayer):
    """Plays an env that takes actions by agent, and returns dicts by agent; keeps the last observations and infos."""

    tables: ClassVar[tuple[str, str, str, str]]  # the env's names of observations, rewards and both flags
    seen: Mapping[Any, Any] = {}
    infos: Mapping[Any, Any] = {}

    def take_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset the env and check that it returns dicts."""
        obs, infos = self.split_reset(self.ask_reset(seed, options))
        self.seen, self.infos = check_table(obs, self.place, "observations"), self.check_infos(infos)

    def take_step(self, acting: Iterable[AgentId], rng: np.random.Generator) -> dict[str, Mapping[Any, Any]]:
        """Step the env with random actions of these agents; return its dicts by name, without the infos."""
        masks = {agent: self.allowed(agent, self.seen.get(agent), self.infos.get(agent)) for agent in acting}
        actions = {agent: self.draw(agent, mask, rng) for agent, mask in masks.items()}
        result = self.check_step(self.ask(self.env.step, actions, given="actions"))
        if len(result) == 4:
            obs, rewards, dones, infos = result
            result = obs, rewards, dones, dict.fromkeys(check_table(dones, self.place, "dones"), False), infos
        *parts, infos = result
        tables = {what: check_table(part, self.place, what) for what, part in zip(self.tables, parts, strict=True)}
        self.infos, self.seen = self.check_infos(infos), tables["observations"]
        return tables

    def observe_seen(self) -> None:
        """Check and note all observations of the last call."""
        for agent in self.agents:
            if agent in self.seen:
                self.observe(agent, self.seen[agent])

    def take(self, agent: AgentId, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Check the results of a step for one agent; return whether it has ended."""
        obs, rewards, *flags = (tables[what] for what in self.tables)
        if agent in obs:
            self.observe(agent, obs[agent])
        if agent in rewards:
            self.note_reward(agent, rewards[agent])
        return self.ends(agent, *(table.get(agent, False) for table in flags))


class ParallelPlayer(ByAgentPlayer):
    """Plays a PettingZoo Parallel env: each agent in ``env.agents`` acts in every step."""

    tables = ("observations", "rewards", "terminations", "truncations")

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.take_reset(seed, options)
        self.live = set(self._listed())
        if not self.live:
            change = "set self.agents = self.possible_agents[:] in reset()"
            self.place.fault("agents", "env.agents", "at least one agent", "none", change)
        with self.place.logging():
            check_keys(self.seen, self.live, self.place, "observations")
        self.observe_seen()

    def step(self, rng: np.random.Generator) -> None:
        tables = self.take_step([agent for agent in self.agents if agent in self.live], rng)
        now = self._listed()
        for what, table in tables.items():
            with self.place.logging():
                check_agents(list(table), self.agents, self.place, what)
        if self.resets_itself and self._all_end(tables):
            return
        known = set(self.agents)
        silent = self.live - set(now) if self.lenient else set()  # they may have data or not
        born = ((set(now) | set(self.seen)) & known) - self.live - self.gone
        for what, table in tables.items():
            for agent in self.gone:
                if agent in table:
                    self.place.report("life", what, f"nothing of agent {agent!r}, which has ended", "data")
            # New agents have been observed; a reward at once is optional.
            expected = self.live | born if table is self.seen else self.live | (born & set(table))
            with self.place.logging():
                check_keys((set(table) & known) - self.gone - silent, expected - silent, self.place, what)
        ended = {agent for agent in sorted(self.live | born, key=str) if self.take(agent, tables)} | silent
        with self.place.logging():
            self._check_listed(now, born, ended)
        self.gone |= ended
        self.live = (self.live | born) - ended
        self.over = not self.live

    def _all_end(self, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Return whether this step ended the episode of an env that resets itself; if so, check it."""
        others = [tables[what] for what in self.tables[1:]]
        if any(agent not in table for agent in self.live for table in others):
            return False  # the caller reports what is missing
        live = [agent for agent in self.agents if agent in self.live]
        ends = [self.ends(agent, others[1][agent], others[2][agent]) for agent in live]
        if not all(ends):
            return False
        for agent in live:
            self.note_reward(agent, others[0][agent])
            self.check_final(agent, self.infos.get(agent), self.infos)
        self.observe_seen()
        self.over = True
        return True

    def _check_listed(self, now: list[AgentId], born: set[AgentId], ended: set[AgentId]) -> None:
        for agent in now:
            if agent in self.gone:
                self.place.fault("life", "env.agents", f"no agent {agent!r}, which has ended", "it again")
            if agent in ended:
                expected = f"agent {agent!r}, which has ended, to leave it"
                change = (
                    "leave those that have ended out of env.agents: self.agents = [agent for agent in self.agents if "
                    "not (terminations[agent] or truncations[agent])]"
                )
                self.place.fault("life", "env.agents", expected, "it still there", change)
        for agent in sorted((self.live | born) - ended - set(now), key=str):
            self.place.fault("life", "env.agents", f"agent {agent!r}, whose flags are False", "it has left")

    def _listed(self) -> list[AgentId]:
        agents = check_agents(getattr(self.env, "agents", None), self.agents, self.place, "env.agents")
        self.note("env.agents", agents)
        return agents


class KeyedPlayer(ByAgentPlayer):
    """Plays an RLlib-style env: each agent in the observations acts next."""

    tables = ("observations", "rewards", "terminateds", "truncateds")

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._acting: list[AgentId] = []

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space of agent {agent!r}"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.take_reset(seed, options)
        self._acting = check_agents(list(self.seen), self.agents, self.place, "observations")
        if not self.seen:
            self.place.fault("agents", "observations", "at least one agent's", "none", "observe who is to act first")
        self.live = set(self.seen)
        self.observe_seen()

    def step(self, rng: np.random.Generator) -> None:
        tables = self.take_step(self._acting, rng)
        over = self._all_flags(tables)
        for what, table in tables.items():
            known = [*self.agents, ALL] if what in self.tables[2:] else self.agents
            with self.place.logging():
                check_agents(list(table), known, self.place, what)
        if self.resets_itself and (over or self._all_end(tables)):
            self._take_all(tables, {})
            for agent in [agent for agent in self.agents if agent in self.live]:
                self.check_final(agent, self.infos.get(agent), self.infos)
            self.observe_seen()
            self.over = True
            return
        born = (set(self.seen) & set(self.agents)) - self.live - self.gone
        ended = self._take_all(tables, self.seen)
        self.gone |= ended
        self.live = (self.live | born) - ended
        self._acting = [agent for agent in self.seen if agent in self.live]
        self.over = over or len(self.gone) == len(self.agents)

    def _all_end(self, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Return whether every possible agent has ended by its own flags."""
        flags = [tables[what] for what in self.tables[2:]]
        return all(agent in self.gone or any(table.get(agent, False) for table in flags) for agent in self.agents)

    def _take_all(self, tables: Mapping[str, Mapping[Any, Any]], seen: Mapping[Any, Any]) -> set[AgentId]:
        """Check the results of a step with these observations; return the agents that ended by their own flags."""
        ended = set()
        for agent in self.agents:
            flags = [tables[what].get(agent, False) for what in self.tables[2:]]
            if agent in self.gone:
                # These envs often keep flags set, which is allowed; sending data is not.
                if agent in seen or tables["rewards"].get(agent, 0) != 0:
                    got = "an observation or a reward"
                    self.place.report("life", f"agent {agent!r}", "no data, for it has ended", got)
                continue
            if agent not in self.live | set(seen):
                if agent in tables["rewards"] or any(flags):
                    change = "give an agent's first observation before, or with, its first reward"
                    expected = "nothing before its first observation"
                    self.place.report("life", f"agent {agent!r}", expected, "a reward or flag", change)
                continue
            if self.take(agent, {**tables, "observations": seen}):
                ended.add(agent)
        return ended

    def _all_flags(self, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        if ALL not in tables["terminateds"]:
            change = f"set terminateds[{ALL!r}] in every step"
            got = f"{sorted(map(str, tables['terminateds']))}"
            self.place.report("keys", "terminateds", f"a flag of {ALL!r}", got, change)
            self.log.doubtful = True  # the end of the episode is unknown
        flags = [self.read_flag(tables[what].get(ALL, False), ALL, what[:-1]) for what in self.tables[2:]]
        self.note(f"flags of {ALL!r}", flags)
        return any(flags)


class SinglePlayer(RawPlayer):
    """Plays a Gymnasium env as the single agent ``"agent_0"``."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._seen: Any = None
        self._info: Any = {}
        self._joint = len(joint_keys(self.env.observation_space, self.env.action_space) or ())
        self._form = "tuple" if isinstance(self.env.observation_space, Tuple) else "dict"

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        result = self.ask_reset(seed, options)
        pair = isinstance(result, tuple) and len(result) == 2
        if not pair:
            self.note_old_reset(type(result).__name__)
        self._seen, self._info = result if pair else (result, {})
        with self.place.logging():
            check_table(self._info, self.place, "info", "infos")
        self.observe(AGENT, self._seen)

    def step(self, rng: np.random.Generator) -> None:
        action = self.draw(AGENT, self.allowed(AGENT, self._seen, self._info), rng)
        result = self.check_step(self.ask(self.env.step, action, given="the action"))
        obs, reward, ended, *cut, self._info = result
        with self.place.logging():
            check_table(self._info, self.place, "info", "infos")
        self._seen = obs
        self.observe(AGENT, obs)
        if self._joint and isinstance(reward, (list, tuple, np.ndarray)) and len(reward) == self._joint:
            change = (
                "if each part of the spaces is one agent's, set self.n_agents to their number, or write make(…, "
                f"agents={self._form!r}), and here marlvec.envs.adapt(env, agents={self._form!r})"
            )
            self.place.fault("form", "the reward", "one number, as of an env of one agent", short(reward), change)
        self.note_reward(AGENT, reward)
        self.over = self.ends(AGENT, ended, cut[0] if cut else False)
        if self.over and self.resets_itself:
            self.check_final(AGENT, self._info, {})


class JointPlayer(RawPlayer):
    """Plays a Gymnasium env with one entry per agent in its spaces: all agents act, ended ones as the adapter says."""

    def __init__(self, adapter: JointAdapter, max_steps: int, findings: Findings) -> None:
        self._adapter = adapter
        super().__init__(adapter, max_steps, findings)
        self._seen: Mapping[AgentId, Any] = {}
        self._infos: Mapping[AgentId, Any] = {}

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space[{self._adapter.keys[self._adapter.ids.index(agent)]!r}]"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        result = self.ask_reset(seed, options)
        obs, info = self._adapter.split_reset(result)
        if obs is result:
            self.note_old_reset(type(result).__name__)
        self.live = set(self.agents)
        self._take_infos({} if info is None else info)
        self._check_obs(obs)

    def step(self, rng: np.random.Generator) -> None:
        actions = [
            self.draw(agent, self._allowed(agent), rng) if agent in self.live else self._adapter.idle_action(a)
            for a, agent in enumerate(self.agents)
        ]
        joint = self._adapter.join(actions)
        result = self.check_step(self.ask(self.env.step, joint, given="the action"))
        obs, rewards, ended, *cut, info = result
        self._take_infos(info)
        self._take_rewards(rewards)
        over = self._take_flags(ended, cut[0] if cut else False)
        if over == self.live and self.resets_itself:
            self._check_finals(info)
            self.over = True
            self._check_obs(obs)
            return
        self._check_obs(obs)
        self.gone |= over
        self.live -= over
        self.over = not self.live

    def _check_obs(self, obs: Any) -> None:
        """Check the observations of agents in the episode, or that have just ended."""
        entries = self._entries(obs, "observations")
        if entries is None:
            got, change = type(obs).__name__, "return a tuple with an observation for each agent"
            self.place.fault("results", "observations", self._one_each(), got, change)
        self._seen = entries
        for agent in self.agents:
            if agent in self.live:
                self.observe(agent, entries[agent])

    def _take_rewards(self, rewards: Any) -> None:
        entries = self._entries(rewards, "rewards")
        for agent in self.agents:
            value = rewards if entries is None else entries.get(agent)
            if agent in self.live:
                self.note_reward(agent, value)
            elif entries is not None and value is not None and np.any(value):
                change = "give 0 as the reward of an agent that has ended"
                self.place.report("life", f"reward of agent {agent!r}", "0, for it has ended", str(value), change)

    def _take_flags(self, terminated: Any, truncated: Any) -> set[AgentId]:
        """Check the flags; return the agents that ended in this step."""
        tables = [
            (value, self._entries(value, what))
            for value, what in ((terminated, "terminated"), (truncated, "truncated"))
        ]
        found = set()
        for agent in self.agents:
            if agent in self.live:
                flags = [value if entries is None else entries[agent] for value, entries in tables]
                if self.ends(agent, *flags):
                    found.add(agent)
        return found

    def _take_infos(self, info: Any) -> None:
        """Check the infos: one dict for all, in which masks may be a list, or one per agent."""
        by_agent: Mapping[AgentId, Any] = {}
        if isinstance(info, (list, tuple)) or (isinstance(info, Mapping) and self._adapter.is_dict):
            entries = info if isinstance(info, Mapping) else self._entries(info, "infos")
            by_agent = self.check_infos(entries)
        else:
            with self.place.logging():
                by_agent = self._masks_in(check_table(info, self.place, "info", "infos"))
        self._infos = by_agent

    def _masks_in(self, info: Mapping[Any, Any]) -> dict[AgentId, Any]:
        """Return infos of the agents with the masks that the common info has for each."""
        spaces = self.action_spaces.values()
        takes_masks = not all(self._masked.values()) and not all(isinstance(space, Box) for space in spaces)
        has_choices = any(count_choices(space) is not None for space in spaces)
        for key in MASKS if takes_masks else ():
            value = info.get(key)
            if key not in info or (value is None and not has_choices):
                continue
            if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != len(self.agents):
                got = f"{type(value).__name__} {short(value)}"
                change = f"put a list with one mask for each agent under {key!r}"
                self.place.fault("masks", f"{key!r} of the info", self._one_each(), got, change, kind="values")
            pairs = zip(self.agents, value, strict=True)
            return {agent: {"action_mask": self._cut(agent, mask)} for agent, mask in pairs}
        return {}

    def _cut(self, agent: AgentId, mask: Any) -> Any:
        """Return a mask without entries beyond the agent's choices, if those are all zero."""
        size = count_choices(self.action_spaces[agent])
        if size is None or np.ndim(mask) != 1 or np.any(np.asarray(mask[size:]) != 0):
            return mask
        return mask[:size]

    def _allowed(self, agent: AgentId) -> NDArray[np.bool_] | None:
        return self.allowed(agent, self._seen[agent], self._infos.get(agent))

    def _check_finals(self, info: Any) -> None:
        """Check the last observations of an episode whose env has reset itself."""
        common = info if isinstance(info, Mapping) else {}
        shared = {
            key: dict(zip(self.agents, value, strict=True))
            for key, value in common.items()
            if isinstance(value, (list, tuple, np.ndarray)) and len(value) == len(self.agents)
        }
        for agent in self.agents:
            if agent in self.live:
                self.check_final(agent, self._infos.get(agent), {**common, **shared})

    def _entries(self, value: Any, what: str) -> Mapping[AgentId, Any] | None:
        """Return one entry per agent, or None if one value is for all. A dict may omit ended agents."""
        if isinstance(value, Mapping):
            known = set(self.agents)
            check_keys(set(value) - (known - self.live), self.live, self.place, what)
            return value
        if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim):
            return None
        if self.lenient and len(value) == 1 < len(self.agents) and only_element(value) is not None:
            return None
        if len(value) != len(self.agents):
            change = f"return one for each agent as {what}"
            if what == "rewards":
                change = (
                    "return one number for the team, or one for each agent; if it is one for each objective, make it "
                    "one: mo_gymnasium.wrappers.LinearReward(env, weight=…)"
                )
            self.place.fault("results", what, self._one_each(), str(len(value)), change, kind=what)
        return dict(zip(self.agents, value, strict=True))

    def _one_each(self) -> str:
        return f"one for each agent, {len(self.agents)} in all"
