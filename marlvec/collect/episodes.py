"""`EpisodeTracker`: which episode each env is in, which policy plays each agent, and the returns so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import signature_of
from marlvec.collect.metrics import FinishedEpisodes
from marlvec.collect.scheduling import EnvStep
from marlvec.env_ids import Where
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.serialization.saved import Saved, SavedField, State, array_field, arrays_like, check_fields

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
_EPISODE_STREAM = 0x657069736F6465  # "episode"
_SHARED_STREAM = 0x736861726564  # "shared"


class Episode:
    """The beginning episode, as an argument of a mapping function.

    Attributes:
        eps_id: The episode's id, as in batches.
        env_id: Its env.
        number: Number of the episode in its env, from 0.
    """

    __slots__ = ("_entropy", "_rng", "env_id", "eps_id", "number")

    def __init__(self, eps_id: int, env_id: int, number: int, entropy: int) -> None:
        self.eps_id, self.env_id, self.number = eps_id, env_id, number
        self._entropy = entropy
        self._rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """Random stream of this episode, seeded by the collector's seed, the env and the episode's number."""
        if self._rng is None:
            key = (_EPISODE_STREAM, self.env_id, self.number)
            self._rng = np.random.default_rng(np.random.SeedSequence(self._entropy, spawn_key=key))
        return self._rng

    @property
    def rng_state(self) -> dict[str, Any] | None:
        """State of `rng`; None if it was never used. May be set to an earlier value."""
        return None if self._rng is None else dict(self._rng.bit_generator.state)

    @rng_state.setter
    def rng_state(self, state: Mapping[str, Any] | None) -> None:
        self._rng = None
        if state is not None:
            self.rng.bit_generator.state = state

    def stream(self, *key: int) -> np.random.Generator:
        """Return a random stream that is equal in all episodes of the collector, seeded by its seed and a key of ints.

        For draws that several episodes share, such as the order of sides in each pair of games.
        """
        return np.random.default_rng(np.random.SeedSequence(self._entropy, spawn_key=(_SHARED_STREAM, *key)))

    def __repr__(self) -> str:
        return f"Episode(eps_id={self.eps_id}, env_id={self.env_id}, number={self.number})"


PolicyMapping = str | Mapping[str, str] | Callable[[str, Episode], str]
"""One policy id for all agents, or agent name → id, or a function (agent name, episode) → id."""


class EpisodeTracker:
    """Per-env and per-lane accounts of the running episodes.

    A lane is one (env, agent), number ``env * A + agent``; arrays named ``_L`` are over lanes. Each change of
    ``eps_id_N``, ``ended_N`` and ``number_N`` makes another array: published states keep the old ones, and rows do.
    """

    def __init__(
        self, num_envs: int, agents: Sequence[str], policy_ids: Sequence[str], mapping: PolicyMapping, first_id: int = 0
    ) -> None:
        self._agents = tuple(agents)
        self._policy_ids: Mapping[int, str] = {}  # by number
        self._numbers: dict[str, int] = {}  # of those that may be named
        self.set_policies(dict(enumerate(policy_ids)))
        n, a = num_envs, len(self._agents)
        self.policy_NA = np.zeros((n, a), np.int64)  # number of the policy that plays each agent in the running episode
        self.eps_id_N = np.full(n, -1, np.int64)  # id of the running episode, or -1
        self.ended_N = np.zeros(n, np.int64)  # episodes of an env with smaller ids than this have ended
        # decisions made in the running episode; while rows have it, or parts of it, another array is made to count
        self.turn_L = np.zeros(n * a, np.int64)
        self._turns_are_lent = False
        # Accounts that an episode resets are in joint arrays, so that a few writes reset them.
        self._rewards_2NA = np.zeros((2, n, a), np.float64)
        self._flags_3NA = np.zeros((3, n, a), np.bool_)
        counts_3N = np.zeros((3, n), np.int64)
        self._made_2N, self._lengths_2N = counts_3N[:2], counts_3N[1:]
        self.steps_N = counts_3N[0]  # env steps since the collector was made or reset
        self._owed_NA, self._returns_NA = self._rewards_2NA
        self._step_NA: FloatArray | None = None  # rewards of the last step, which are owed beside those
        self._owes = False  # whether any of those may be others than 0
        self._all_are_seen = False  # whether all agents are known to have had their first row
        self.seen_NA, self._present_NA, self._truncated_NA = self._flags_3NA
        self.all_are_present = False  # whether all agents are known to have been in their episodes
        self.length_N, self._handed_N = self._lengths_2N  # the second: how much of it batches have counted
        self._owed_L, self.seen_L = self._owed_NA.reshape(-1), self.seen_NA.reshape(-1)
        self._truncated_L = self._truncated_NA.reshape(-1)
        self.number_N = np.full(n, -1, np.int64)  # it is the env's n-th episode that runs or ran last
        self._began_N = np.zeros(n, np.float64)
        self._next_id_N = first_id + np.arange(n)  # of each env's next episode
        self.untrained: set[int] = set()  # ids of episodes that are for no batch
        self._function = mapping if callable(mapping) else None
        self.is_static = self._function is None  # whether every episode is played by the same policies
        self._fixed_A: list[int] = []  # each agent's policy where that is fixed
        if callable(mapping):
            _check_arity(mapping)
        else:
            self._fixed_A = self._static(mapping)
            self.policy_NA[:] = self._fixed_A

    @property
    def mapping(self) -> Callable[..., str] | dict[str, str]:
        """The policy of each agent in episodes that begin."""
        return self._function or {
            name: self._policy_ids[i] for name, i in zip(self._agents, self._fixed_A, strict=True)
        }

    def change_mapping(self, mapping: PolicyMapping) -> None:
        """Use another mapping function for episodes that begin from now on; a fixed mapping stays (`StateError`)."""
        if not callable(mapping):
            raise ArgumentError(f"a mapping that changes must be a function of (agent, episode), got {mapping!r:.200}")
        if self._function is None:
            raise StateError(f"the policy_mapping is fixed, {self.mapping}: give a function where it is to change")
        _check_arity(mapping)
        self._function = mapping

    def _static(self, mapping: str | Mapping[str, str]) -> list[int]:
        if isinstance(mapping, str):
            return [self._known(mapping, "policy_mapping")] * len(self._agents)
        if not isinstance(mapping, Mapping):
            raise ArgumentError(
                f"policy_mapping must be a policy id, a dict of agent name to id, or a function of (agent, episode); "
                f"got {type(mapping).__name__}"
            )
        unknown = [name for name in mapping if name not in self._agents]
        missing = [name for name in self._agents if name not in mapping]
        if unknown or missing:
            what = f"names unknown agents {unknown}" if unknown else f"misses the agents {missing}"
            raise ArgumentError(f"policy_mapping {what}; the agents are {list(self._agents)}")
        return [self._known(mapping[name], f"policy_mapping[{name!r}]") for name in self._agents]

    def _known(self, policy_id: str, who: str) -> int:
        try:
            return self._numbers[policy_id]
        except (KeyError, TypeError):
            raise KeyError(
                f"{who} gave the policy id {policy_id!r}; the known ones are {list(self._numbers)}: give one of those, "
                f"or add the other to policies, or by add_policy()"
            ) from None

    def begin(self, env_ids: IntArray, entropy: int) -> bool:
        """Begin an episode in these envs; call the mapping function per agent, in order; return if policies changed."""
        # A function of env and number, and so the same in whatever order envs come back.
        ids = self._next_id_N[env_ids]
        self._set_ids(env_ids, ids)
        self._next_id_N[env_ids] = ids + len(self._next_id_N)
        numbers = self.number_N[env_ids] + 1
        self.number_N = self.number_N.copy()
        self.number_N[env_ids] = numbers
        self._add_up()
        for array in (self._rewards_2NA, self._flags_3NA, self._lengths_2N):
            array[:, env_ids] = 0
        self._own_turns()[env_ids] = 0
        self.all_are_present = self._all_are_seen = False
        self._began_N[env_ids] = perf_counter()
        function = self._function
        if function is None or not len(env_ids):
            return False
        begun = zip(ids.tolist(), env_ids.tolist(), numbers.tolist(), strict=True)
        episodes = [Episode(*identity, entropy) for identity in begun]
        named = [function(name, episode) for episode in episodes for name in self._agents]
        try:
            found = [self._numbers[policy_id] for policy_id in named]
        except (KeyError, TypeError):
            for k, policy_id in enumerate(named):
                i, a = divmod(k, len(self._agents))
                self._known(policy_id, f"policy_mapping({self._agents[a]!r}, {episodes[i]})")
            raise
        before = self.policy_NA[env_ids]
        self.policy_NA[env_ids] = now = np.array(found).reshape(before.shape)
        return bool(np.count_nonzero(before != now))

    def begin_ids(self, first_id: int) -> None:
        """Number episodes from here on, before the first one begins."""
        self._next_id_N = first_id + np.arange(len(self._next_id_N))

    def _set_ids(self, env_ids: IntArray, ids: IntArray, *, run: bool = True) -> None:
        """These episodes run now, or are the next that will: in new arrays, as a published state keeps the old ones."""
        eps_id_N, ended_N = self.eps_id_N.copy(), self.ended_N.copy()
        eps_id_N[env_ids] = ids if run else -1
        ended_N[env_ids] = ids
        self.eps_id_N, self.ended_N = eps_id_N, ended_N

    def set_policies(self, policy_ids: Mapping[int, str], retired: Collection[str] = ()) -> None:
        """Set the policies by number, after additions and removals; no agent may be mapped to a retired policy."""
        self._policy_ids = policy_ids
        self._numbers = {name: number for number, name in policy_ids.items() if name not in retired}

    def fixed_agents(self, number: int) -> list[str]:
        """Agents that a policy plays by a fixed mapping."""
        return [name for name, own in zip(self._agents, self._fixed_A, strict=False) if own == number]

    def running_of(self, number: int, living: IntArray) -> IntArray:
        """Return the (env, agent) pairs, (n, 2), that a policy plays in running episodes of these envs."""
        runs_NA = (self.policy_NA == number) & (self.eps_id_N >= 0)[:, None]
        found = np.argwhere(runs_NA)
        return found[np.isin(found[:, 0], living)]

    def identity(self, env_id: int) -> tuple[int, int, int]:
        """The running episode's id, its env, and its number there."""
        return int(self.eps_id_N[env_id]), env_id, int(self.number_N[env_id])

    def add_rewards(self, envs: IntArray | slice, rewards_nA: FloatArray, *, stay: bool) -> None:
        """Add the rewards of one step of these envs, of acting and waiting agents; ``stay``: nobody changes them."""
        if self._step_NA is not None:
            self._add_up()
        if stay and len(rewards_nA) == len(self.steps_N):  # the same in a third of the time
            self._returns_NA += rewards_nA
            self._step_NA = rewards_nA
            self._made_2N += 1
            return
        self._rewards_2NA[:, envs] += rewards_nA
        self._made_2N[:, envs] += 1
        self._owes = True

    def _add_up(self) -> None:
        """Put all rewards that are owed into one array."""
        if self._step_NA is not None:
            self._owed_NA += self._step_NA
            self._step_NA, self._owes = None, True

    def pay(self, lanes: IntArray, places: Where) -> tuple[FloatArray, BoolArray | None]:
        """Return the rewards owed to agents that get their next rows, and which are an episode's first (None: none).

        ``lanes``: (n,); ``places``: the same as an index.
        """
        self._add_up()
        seen, rewards = self.seen_L[places], self._owed_L[places]
        if isinstance(places, slice):
            rewards = rewards.copy()
        if np.count_nonzero(seen) == len(lanes):
            self._owed_L[places] = 0.0
            return rewards, None
        first = ~seen  # rewards from before an agent's first row go to its first transition
        rewards[first] = 0.0
        self._owed_L[lanes[seen]] = 0.0
        self.seen_L[places] = True
        return rewards, first

    def pay_all(self) -> FloatArray | None:
        """Return the rewards owed to all agents, which get their next rows: (L,); None: it is the first one of some."""
        if not self._all_are_seen:
            if np.count_nonzero(self.seen_L) < len(self.seen_L):
                return None
            self._all_are_seen = True
        step_NA = self._step_NA
        if step_NA is not None and not self._owes:
            self._step_NA = None
            return (step_NA + 0.0).reshape(-1)  # as a sum has it: without -0.0
        self._add_up()
        rewards: FloatArray = self._owed_L.copy()
        self._owed_L[:], self._owes = 0.0, False
        return rewards

    def turns(self, places: Where) -> IntArray:
        """How many decisions lanes have made in the running episode; nothing writes into it."""
        if isinstance(places, slice):
            self._turns_are_lent = True
        return self.turn_L[places]

    def count_turns(self, places: Where, n: int) -> None:
        """Each of these n lanes has made a decision."""
        if n == len(self.turn_L):
            self.turn_L, self._turns_are_lent = self.turn_L + 1, False
        else:
            self._own_turns()
            self.turn_L[places] += 1

    def _own_turns(self) -> IntArray:
        """The decisions by env and agent, which no row has."""
        if self._turns_are_lent:
            self.turn_L, self._turns_are_lent = self.turn_L.copy(), False
        return self.turn_L.reshape(self.policy_NA.shape)

    def forget_seen(self, envs: IntArray | slice, agents_nA: BoolArray) -> None:
        """These agents begin anew, with a first row."""
        self.seen_NA[envs] &= ~agents_nA
        self._all_are_seen = False

    def see(self, envs: IntArray | slice, alive_nA: BoolArray) -> None:
        """Note who is in the episode."""
        self._present_NA[envs] |= alive_nA
        self.all_are_present = np.count_nonzero(self._present_NA) == self._present_NA.size

    def truncate(self, lanes: IntArray) -> None:
        """Note for which lanes the end was a truncation."""
        self._truncated_L[lanes] = True

    def hand_over(self) -> None:
        """Mark all env steps made so far as counted in a batch."""
        self._handed_N[:] = self.length_N

    def waiting_steps(self, env_ids: IntArray) -> int:
        """Env steps of running episodes that no batch has counted."""
        return int((self.length_N[env_ids] - self._handed_N[env_ids]).sum())

    def finish(self, env_ids: IntArray) -> FinishedEpisodes:
        """The accounts of episodes that ended, in the order given."""
        return FinishedEpisodes(
            eps_id=self.eps_id_N[env_ids],
            env_id=env_ids,
            number=self.number_N[env_ids],
            length=self.length_N[env_ids],
            returns=self._returns_NA[env_ids],
            lengths=self.turn_L.reshape(self.policy_NA.shape)[env_ids],
            present=self._present_NA[env_ids],
            truncated=self._truncated_NA[env_ids],
            policy=self.policy_NA[env_ids],
            duration=perf_counter() - self._began_N[env_ids],
            made=np.full(len(env_ids), None, np.object_),
            policy_ids=self._policy_ids,
        )

    def leave(self, env_ids: IntArray) -> None:
        """Mark these envs as without a running episode."""
        self._set_ids(env_ids, self._next_id_N[env_ids], run=False)
        self._lengths_2N[:, env_ids] = 0
        self._own_turns()[env_ids] = 0

    def get_state(self) -> State:
        """Return all accounts; policies by position in ``policies``, and the seconds that episodes have run."""
        policy_NA = np.full_like(self.policy_NA, -1)  # which it stays where none runs, and the policy is gone
        for place, number in enumerate(self._numbers.values()):
            policy_NA[self.policy_NA == number] = place
        saved = {name: getattr(self, name).copy() for name in _SAVED}
        if self._step_NA is not None:
            saved["_rewards_2NA"][0] += self._step_NA
        return {
            **saved,
            "policy": policy_NA,
            "policies": list(self._numbers),
            "turns": self.turn_L.copy(),
            "seconds": perf_counter() - self._began_N,
            "untrained": sorted(self.untrained),
        }

    def prepare(self, state: State, leaving: Collection[str] = ()) -> Callable[[], None]:
        """Validate a state from `get_state()`, without policies in ``leaving``; return a function that installs it."""
        where = "running episodes"
        check_fields(state, (*_SAVED, "policy", "policies", "turns", "seconds", "untrained"), where)
        new = arrays_like(state, {name: getattr(self, name) for name in _SAVED}, where)
        seconds = array_field(state, "seconds", np.float64, self._began_N.shape, where)
        # Others hold these two, and views of the rest are held here: they are written to.
        written = [(getattr(self, name), new.pop(name)) for name in _WRITTEN]
        turn_L = array_field(state, "turns", np.int64, self.turn_L.shape, where).copy()
        policy_NA = array_field(state, "policy", np.int64, self.policy_NA.shape, where)
        known = self._numbers.keys() - set(leaving)
        if set(state["policies"]) != known or not (policy_NA < len(known)).all():
            raise ArgumentError(f"{where}: of the policies {state['policies']}, these are {sorted(known)}")
        numbers = np.array([self._numbers[name] for name in state["policies"]])
        policy_NA = np.where(policy_NA < 0, policy_NA.max(axis=0).clip(0), policy_NA)
        written.append((self.policy_NA, numbers[policy_NA]))
        untrained = state["untrained"]
        if not isinstance(untrained, list) or not all(type(eps_id) is int for eps_id in untrained):
            raise ArgumentError(f"{where}: untrained: expected a list of ids, got {untrained!r:.200}")

        def put() -> None:
            for array, values in written:
                array[...] = values
            self.untrained.clear()
            self.untrained.update(untrained)
            vars(self).update(new, turn_L=turn_L, _turns_are_lent=False, _step_NA=None, _owes=True)
            vars(self).update(_began_N=perf_counter() - seconds, all_are_present=False, _all_are_seen=False)

        return put

    def restart(self, *, numbers: bool) -> None:
        """Forget the running episodes; ``numbers``: also count each env's episodes from 0 again."""
        self.steps_N[:] = 0
        self.untrained.clear()
        env_ids = np.arange(len(self._next_id_N))
        self._next_id_N = int((self._next_id_N - env_ids).max()) + env_ids
        if numbers:
            self.number_N = np.full_like(self.number_N, -1)


_WRITTEN = ("steps_N", "_rewards_2NA", "_flags_3NA", "_lengths_2N")
_SAVED = (*_WRITTEN, "eps_id_N", "ended_N", "number_N", "_next_id_N")


def _check_arity(function: Callable[[str, Episode], str]) -> None:
    try:
        signature = signature_of(function)
    except (ValueError, TypeError):  # written in C; calling it will show
        return
    try:
        signature.bind("agent", None)
    except TypeError:
        raise ArgumentError(
            f"policy_mapping must be a function of (agent, episode), got {function!r:.200} of {signature}: write "
            f"lambda agent, episode: ..."
        ) from None


class EndedAgents(Saved):
    """Notes which agents have ended in the running episodes, and which of them have come back."""

    saved_as = "ended agents"
    saved_fields: ClassVar = {"gone": SavedField("_gone_NA")}

    def __init__(self, num_envs: int, agents: tuple[str, ...]) -> None:
        self._agents = agents
        self._gone_NA = np.zeros((num_envs, len(agents)), np.bool_)
        self.any_gone = False  # whether any agent has ended in an episode that runs

    def note(self, env_step: EnvStep) -> None:
        """Note the agents that ended in this step."""
        self._gone_NA[env_step.where] |= env_step.ended
        self.any_gone = True

    def forget(self, env_ids: NDArray[np.int64]) -> None:
        """Forget the ended agents of these envs, in which new episodes begin."""
        if self.any_gone:
            self._gone_NA[env_ids] = False
            self.any_gone = bool(np.count_nonzero(self._gone_NA))

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add whether any agent has ended."""
        return {**values, "any_gone": bool(values["_gone_NA"].any())}

    def check(self, env_step: EnvStep, episodes: EpisodeTracker) -> None:
        """Restart agents that are alive again, and refuse any other ended agent that is to act."""
        gone = self._gone_NA[env_step.where]
        back = gone & env_step.alive
        if back.any():
            self._gone_NA[env_step.where] = gone & ~back
            episodes.forget_seen(env_step.where, back)
        wrong = env_step.acting & gone & ~back
        if wrong.any():
            i, a = np.argwhere(wrong)[0].tolist()
            raise ContractError(
                f"env {int(env_step.env_ids[i])}: agent {self._agents[a]!r} is to act, but it has ended already "
                f"in this episode"
            )
