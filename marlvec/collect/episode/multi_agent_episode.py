"""`MultiAgentEpisode`: one episode, or a part of one, with all its agents, taken from a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.episode.reading import check_order, read_agent_episodes
from marlvec.collect.episode.single_agent_episode import SingleAgentEpisode
from marlvec.collect.episode.windows import check_step
from marlvec.connectors.rows import join_columns
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree, zip_trees

__all__ = ["MultiAgentEpisode"]

AnyArray = NDArray[Any]

Agent = int | str


class MultiAgentEpisode:
    """An episode's rows by agent, on a map of env time.

    Agents act at different times, join late and end early. Each has agent episodes of its own, in which its
    decisions are counted as the agent made them; what they have in common is the number of env steps since the reset
    (``env_t``). An agent has more than one `SingleAgentEpisode` where its policy was changed in the
    middle, or where it ended and came back.

    It holds what batches hold: decisions whose outcome is known, behind the agent connectors. So `cut` divides it as
    two calls of ``collect`` would have. No method changes an episode; arrays are shared with what it was made of, and
    are not to be written to.

    Episodes come from `MultiAgentBatch.episodes` and go back with `MultiAgentBatch.of_episodes`.

    Args:
        eps_id: Its id.
        env_id: Its env.
        agent_episodes: Ordered by agent, and those of one agent by time; at least one.
        agents: Names of all agents of the env, in order; None where they are not known.

    Raises:
        ArgumentError: There is no agent episode, or two of one agent overlap; or an agent has no name.

    Attributes:
        eps_id, env_id, agent episodes, agents: As given.
    """

    __slots__ = ("agent_episodes", "agents", "env_id", "eps_id")

    def __init__(
        self,
        eps_id: int,
        env_id: int,
        agent_episodes: Sequence[SingleAgentEpisode],
        agents: Sequence[str] | None = None,
    ) -> None:
        self.eps_id, self.env_id, self.agent_episodes = eps_id, env_id, tuple(agent_episodes)
        self.agents = None if agents is None else tuple(agents)
        if not self.agent_episodes:
            raise ArgumentError("an episode needs at least one agent episode")
        check_order(self.agent_episodes, f"eps_id {eps_id}")
        highest = max(single.agent_index for single in self.agent_episodes)
        if self.agents is not None and highest >= len(self.agents):
            raise ArgumentError(f"eps_id {eps_id} has rows of agent {highest}, and agents names {len(self.agents)}")

    @classmethod
    def of_rows(
        cls, batches: Mapping[str, Mapping[str, Tree]], agents: Sequence[str] | None = None
    ) -> list[MultiAgentEpisode]:
        """Make episodes of policies' rows, in the order of ``eps_id``.

        A new agent episode begins where the agent had ended, where another policy takes over, and where decisions are
        missing. Phantom rows are left out.

        Args:
            batches: Policy id to the columns of its rows.
            agents: Names of the envs' agents.

        Raises:
            ArgumentError: A column is missing; an ``eps_id`` is of several episodes; or these are not one row a
                decision any more, as after `NStep` or `PadSequences`.
        """
        return [
            cls(eps, env, agent_episodes, agents) for (eps, env), agent_episodes in read_agent_episodes(batches).items()
        ]

    def __len__(self) -> int:
        return self.env_stop - self.env_start

    def __repr__(self) -> str:
        lines = [f"  {single}" for single in self.agent_episodes]
        head = f"MultiAgentEpisode {self.eps_id} of env {self.env_id}, env steps {self.env_start} to {self.env_stop}"
        return "\n".join([head, *lines])

    # --- who, and when

    @property
    def agent_num(self) -> int:
        """A: how many agents there are; without names, how many there must be."""
        if self.agents is not None:
            return len(self.agents)
        return max(single.agent_index for single in self.agent_episodes) + 1

    @property
    def env_start(self) -> int:
        """Env step of its first decision."""
        return min(single.env_start for single in self.agent_episodes)

    @property
    def env_stop(self) -> int:
        """Env step of its last outcome."""
        return max(single.env_stop for single in self.agent_episodes)

    def episodes_of(self, agent: Agent) -> tuple[SingleAgentEpisode, ...]:
        """An agent's agent episodes, in order of time; none where it made no decision.

        Raises:
            KeyError: There is no such agent.
        """
        index = self._index(agent)
        return tuple(single for single in self.agent_episodes if single.agent_index == index)

    def decided(self, start: int | None = None, stop: int | None = None) -> NDArray[np.bool_]:
        """Return who decided in env steps ``start`` to ``stop - 1``: (S, A) bool; None: the episode's own.

        Raises:
            ArgumentError: A step is no whole number.
        """
        steps = self._steps(start, stop)
        found = np.zeros((len(steps), self.agent_num), np.bool_)
        for single in self.agent_episodes:
            found[:, single.agent_index] |= single.places("t", steps) >= single.lookback
        return found

    # --- reading by env time; by an agent's own time read its agent episodes

    def at(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        agent: Agent | None = None,
        fill: Any = None,
    ) -> Tree:
        """Copy what a column has for env steps ``start`` to ``stop - 1``, of all agents side by side or of one.

        See `SingleAgentEpisode.at` for what belongs to which step. Steps before the episode's first are those of the
        lookback.

        Args:
            name: The column.
            start: First env step, 0 being the reset; None for the episode's own first.
            stop: Env step after the last one; None for the one after the episode's last outcome, which has observations
                and no decision.
            agent: Its name or index; None for all.
            fill: Value where an agent has no entry; None raises there.

        Returns:
            (S, A, …), or (S, …) of one agent.

        Raises:
            KeyError: There is no such agent, or no such column.
            IndexError: There is no entry somewhere, and ``fill`` is None.
            ArgumentError: ``fill`` does not fit the dtype; the column differs in form between agents, so that each must
                be asked for; or no agent has rows from which its form could be known.
        """
        steps = self._steps(start, stop, ends=True)
        if agent is not None:
            return self._of_agent(name, self._index(agent), steps, fill)
        if fill is None and len({single.agent_index for single in self.agent_episodes}) < self.agent_num:
            raise IndexError(f"{name!r}: not all agents have rows; give fill=, the value to put there")
        like = self.agent_episodes[0]
        columns = []
        for index in range(self.agent_num):
            own = self.episodes_of(index)
            column = self._of_agent(name, index, steps, fill) if own else _blank(like, name, len(steps), fill)
            columns.append(column)

        def stacked(leaves: list[AnyArray]) -> AnyArray:
            if any(leaf.shape != leaves[0].shape or leaf.dtype != leaves[0].dtype for leaf in leaves):
                raise ArgumentError(f"{name!r} differs in shape or dtype between agents: ask with agent= for each")
            return np.stack(leaves, axis=1)

        return zip_trees(stacked, columns)

    def _of_agent(self, name: str, index: int, steps: NDArray[np.int64], fill: Any) -> Tree:
        agent_episodes = [single for single in self.agent_episodes if single.agent_index == index]
        if not agent_episodes:
            raise IndexError(f"agent {index} has no rows in this episode, so there is no {name!r} of it")
        if len(agent_episodes) == 1:
            return agent_episodes[0].at_steps(name, steps, fill)
        # Where one ends and the next begins in the same step, the later one counts: it is what the agent decided on.
        where = [single.places(name, steps) for single in agent_episodes]
        joined = join_columns([{name: single.whole(name)} for single in agent_episodes])[name]
        sizes = [single.size(name) for single in agent_episodes]
        places = np.full(len(steps), -1, np.int64)
        for own, offset in zip(where, np.cumsum([0, *sizes]).tolist(), strict=False):
            places = np.where(own >= 0, own + offset, places)
        return agent_episodes[0].gather(joined, name, places, fill)

    # --- cutting and joining

    def cut(self, env_step: int, lookback: int = 0) -> tuple[MultiAgentEpisode | None, MultiAgentEpisode | None]:
        """Divide it at an env step: ``concat`` of both parts is the whole again.

        A decision belongs to the first part if its outcome had come by then, as in batches of a collector that stopped
        there.

        Args:
            env_step: The env step.
            lookback: Up to how many decisions of each agent's the second part carries along from before.

        Returns:
            The two parts; None for one that would be empty. Where the first would have nothing but lookbacks it has
            those, and no length.

        Raises:
            ArgumentError: ``env_step`` is no whole number, or ``lookback`` none of at least 0.
        """
        if check_step("lookback", lookback) < 0:
            raise ArgumentError(f"lookback must be at least 0, got {lookback}")
        parts = [single.cut(check_step("env_step", env_step), lookback) for single in self.agent_episodes]
        heads, tails = ([part for part in side if part is not None] for side in zip(*parts, strict=True))
        return self._of(heads), self._of(tails)

    def slice(self, start: int, stop: int, lookback: int = 0) -> MultiAgentEpisode | None:
        """The part whose outcomes came after env step ``start`` and by env step ``stop``, with a lookback; or None.

        Raises:
            ArgumentError: As of `cut`.
        """
        _, rest = self.cut(start, lookback)
        return None if rest is None else rest.cut(stop)[0]

    def concat(self, other: MultiAgentEpisode) -> MultiAgentEpisode:
        """This part and the one that follows on it; the other's lookback falls away.

        Raises:
            ArgumentError: It is another episode's, or does not follow on this part.
        """
        if (self.eps_id, self.env_id, self.agents) != (other.eps_id, other.env_id, other.agents):
            raise ArgumentError(
                f"expected a part of eps_id {self.eps_id} of env {self.env_id}, agents {self.agents}, "
                f"got eps_id {other.eps_id} of env {other.env_id}, agents {other.agents}"
            )
        agent_episodes = list(self.agent_episodes)
        for single in other.agent_episodes:
            before = next((one for one in reversed(agent_episodes) if one.agent_index == single.agent_index), None)
            if before is not None and before.goes_on_in(single):
                agent_episodes[agent_episodes.index(before)] = before.joined(single)
            elif single.lookback:
                raise ArgumentError(f"{single} has a lookback that is not in the part before it: {before}")
            else:
                agent_episodes.append(single)
        agent_episodes.sort(key=lambda single: single.agent_index)  # stable, so that those of one agent stay in order
        return MultiAgentEpisode(self.eps_id, self.env_id, agent_episodes, self.agents)

    def rows(self) -> dict[str, dict[str, Tree]]:
        """Policy id to the columns of its rows, ordered by agent and time, without lookbacks.

        Raises:
            ArgumentError: Two agent episodes of one policy differ in their columns.
        """
        found: dict[str, list[Mapping[str, Tree]]] = {}
        for single in self.agent_episodes:
            if not len(single):
                continue
            columns = single.rows()
            ids = {"eps_id": self.eps_id, "env_id": self.env_id, "agent_index": single.agent_index}
            columns |= {name: np.full(len(single), value, np.int64) for name, value in ids.items()}
            found.setdefault(single.policy_id, []).append(columns)
        return {policy_id: join_columns(parts) for policy_id, parts in found.items()}

    # --- plain data

    def state_dict(self) -> dict[str, Any]:
        """Return the episode as plain data: numbers, texts, lists, dicts, and trees of copied arrays."""
        return {
            "eps_id": self.eps_id,
            "env_id": self.env_id,
            "agents": None if self.agents is None else list(self.agents),
            "agent_episodes": [single.state_dict() for single in self.agent_episodes],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MultiAgentEpisode:
        """The episode of which `state_dict` gave this.

        Raises:
            ArgumentError: Its parts do not fit each other.
            KeyError: One is missing.
        """
        agent_episodes = [SingleAgentEpisode.from_state_dict(single) for single in state["agent_episodes"]]
        return cls(int(state["eps_id"]), int(state["env_id"]), agent_episodes, state["agents"])

    def _of(self, agent_episodes: list[SingleAgentEpisode]) -> MultiAgentEpisode | None:
        return MultiAgentEpisode(self.eps_id, self.env_id, agent_episodes, self.agents) if agent_episodes else None

    def _index(self, agent: Agent) -> int:
        if isinstance(agent, str):
            if self.agents is None:
                raise KeyError(f"the agents' names are not known, so ask for {agent!r} by its index; or give agents=")
            if agent not in self.agents:
                raise KeyError(f"no agent {agent!r}; the agents are {list(self.agents)}")
            return self.agents.index(agent)
        index = check_step("agent", agent)
        if not 0 <= index < self.agent_num:
            raise KeyError(f"no agent {index}; there are {self.agent_num}")
        return index

    def _steps(self, start: int | None, stop: int | None, *, ends: bool = False) -> NDArray[np.int64]:
        first = self.env_start if start is None else check_step("start", start)
        last = self.env_stop + ends if stop is None else check_step("stop", stop)
        return np.arange(first, max(first, last))


def _blank(like: SingleAgentEpisode, name: str, n: int, fill: Any) -> Tree:
    """A column of an agent that has no rows, in the form of another's."""
    return like.gather(map_tree(lambda leaf: leaf[:0], like.whole(name)), name, np.full(n, -1, np.int64), fill)
