"""From what came back from the envs to rows, through the agent connectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyRunner, Selection
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.collect.storage.policy_rows import part_of
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree

__all__ = ["BuiltRows", "RowBuilder"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class BuiltRows(NamedTuple):
    """A policy's rows behind its agent connectors.

    Attributes:
        runner: The policy's.
        lanes: (n,) lanes of the rows that went into the connectors; ascending.
        places: The same as an index.
        columns: The rows that came out, and perhaps others.
        part: Which rows of the columns these are; None: all.
        kept: (n,) bool, which of the rows came out; None for all.
        env_t: Env steps that the episodes of the rows that came out had made.
        missing: (n,) bool, which last rows have no observation of their own; None where they are not last.
        shared: Columns whose arrays other code may write into later, or that connectors have made.
    """

    runner: PolicyRunner
    lanes: IntArray
    places: Where
    columns: Mapping[str, Tree]
    part: slice | None
    kept: BoolArray | None
    env_t: IntArray
    missing: BoolArray | None
    shared: Collection[str]


class RowBuilder:
    """Makes policies' rows, and sends them through the agent connectors.

    Args:
        router: Which policy plays which agent.
        episodes: The accounts of the running episodes.
        metrics: Where the time goes.
        copies: Whether the envs' observations are arrays that the envs do not write into again.
    """

    def __init__(self, router: PolicyRouter, episodes: EpisodeTracker, metrics: Metrics, *, copies: bool) -> None:
        self._router, self._episodes, self._metrics = router, episodes, metrics
        self._of_envs = () if copies else ("obs", "action_mask")
        self._false_L = np.zeros(episodes.policy_NA.size, np.bool_)
        self._false_L.flags.writeable = False

    def build(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[BuiltRows]:
        """Each policy's rows; those of several policies in one group are made together, and are parts of the same.

        Args:
            env_step: Where they are.
            lanes: Which; None for all agents of these envs.
            last: Whether these are final observations.
        """
        found = self._before_connectors(env_step, lanes, last=last)
        return [built if built.runner.agent_connectors.is_identity else self._observed(built) for built in found]

    def build_moment(self, env_step: EnvStep, acting: IntArray | None, ended: IntArray) -> list[BuiltRows]:
        """Like `build`, of agents that act next and of others that have ended while their episodes go on.

        A policy's rows of both kinds pass its connectors in one call: what a connector shows of other agents is then of
        the same moment.

        Args:
            env_step: Where they are.
            acting: Lanes that act next; None for all agents of these envs.
            ended: Lanes that have ended; none of them acts next.
        """
        over = {built.runner: built for built in self._before_connectors(env_step, ended, last=True)}
        found = []
        for built in self._before_connectors(env_step, acting, last=False):
            ends = over.pop(built.runner, None)
            if ends is not None:
                found += self._observed_together(ends, built)
            else:
                found.append(built if built.runner.agent_connectors.is_identity else self._observed(built))
        return [*map(self._observed, over.values()), *found]

    def _before_connectors(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[BuiltRows]:
        router, found = self._router, []
        for runner in router.alone:
            if lanes is None:
                chosen = router.everyone(runner, env_step.env_ids)
            else:
                chosen = router.select(runner, env_step.env_ids, lanes)
            if len(chosen.lanes):
                columns, env_t, missing = self._make(runner.group_index, chosen, env_step, last=last)
                shared = self._of_envs if chosen.flat is None else ()
                found.append(
                    BuiltRows(runner, chosen.lanes, chosen.places, columns, None, None, env_t, missing, shared)
                )
        if not router.is_shared:
            return found
        env_ids = env_step.env_ids
        for g, chosen, shares in router.split_everyone(env_ids) if lanes is None else router.split(env_ids, lanes):
            columns, env_t, missing = self._make(g, chosen, env_step, last=last)
            for runner, part, own in shares:
                own_missing = None if missing is None else missing[part]
                found.append(BuiltRows(runner, own, own, columns, part, None, env_t[part], own_missing, ()))
        return found

    def _observed(self, built: BuiltRows) -> BuiltRows:
        """Send a policy's rows through its agent connectors."""
        began = perf_counter()
        own = {name: part_of(column, built.part) for name, column in built.columns.items()}
        out, kept = built.runner.observe(Rows.of_length(own, len(built.lanes)))
        timer = self._metrics.timers["agent_connectors"]
        timer.seconds, timer.calls = timer.seconds + perf_counter() - began, timer.calls + 1
        made = [name for name, column in out.items() if name in built.shared or column is not own.get(name)]
        env_t = built.env_t if kept is None else built.env_t[kept]
        return built._replace(columns=dict(out.items()), part=None, kept=kept, env_t=env_t, shared=made)

    def _observed_together(self, ends: BuiltRows, following: BuiltRows) -> list[BuiltRows]:
        """Send last rows and rows to act on through their policy's connectors in one call, in the order of lanes."""
        parts = [{name: part_of(c, built.part) for name, c in built.columns.items()} for built in (ends, following)]
        lanes, env_t = (np.concatenate([getattr(ends, name), getattr(following, name)]) for name in ("lanes", "env_t"))
        order = lanes.argsort(kind="stable")
        columns = dict(Rows.concat([Rows(part) for part in parts]).take(order).items())
        both = self._observed(
            BuiltRows(ends.runner, lanes[order], lanes[order], columns, None, None, env_t[order], None, ())
        )
        rows, is_last = Rows(both.columns), columns["last"]
        is_last_out = is_last if both.kept is None else is_last[both.kept]
        found = []
        for built, mine, mine_out in ((ends, is_last, is_last_out), (following, ~is_last, ~is_last_out)):
            out = dict(rows.take(mine_out).items())
            kept = None if built is ends or both.kept is None else both.kept[mine]
            found.append(
                built._replace(columns=out, part=None, kept=kept, env_t=both.env_t[mine_out], shared=tuple(out))
            )
        return found

    def _make(
        self, g: int, chosen: Selection, env_step: EnvStep, *, last: bool
    ) -> tuple[dict[str, Tree], IntArray, BoolArray | None]:
        """Columns of rows of one group; env steps made; and which last rows have no observation of their own."""
        router, episodes, places, n = self._router, self._episodes, chosen.places, len(chosen.lanes)
        rewards, first = episodes.settle(chosen.lanes, places)
        false, turns = self._false_L[:n], episodes.turn_L[places]
        leaves = [chosen.pick(leaf) for leaf in (env_step.final if last else env_step.obs)[g]]
        tree = router.groups[g].observation_tree
        columns: dict[str, Any] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": episodes.eps_id_N[chosen.env_id],
            "t": turns.copy() if isinstance(places, slice) else turns,
            "obs": leaves[0] if tree.is_leaf else tree.unflatten(leaves),
            "rewards": rewards,
            "terminated": router.pick(g, chosen, env_step.terminated) if last else false,
            "truncated": router.pick(g, chosen, env_step.truncated) if last else false,
            "first": false if first is None else first,
            "last": np.ones(n, np.bool_) if last else false,
        }
        mask = env_step.masks[g]
        if mask is not None:
            columns["action_mask"] = np.ones((n, mask.shape[2]), np.bool_) if last else chosen.pick(mask)
        if env_step.state is not None:
            columns["state"] = _state(chosen, env_step, last=last)
        missing = router.pick(g, chosen, env_step.missing) if last else None
        return columns, episodes.length_N[chosen.env_id], missing


def _state(chosen: Selection, env_step: EnvStep, *, last: bool) -> NDArray[Any]:
    """Each row's global state: with a last row that in which the episode ended, where all of it has ended."""
    assert env_step.state is not None
    at = np.searchsorted(env_step.env_ids, chosen.env_id)
    state: NDArray[Any] = env_step.state[at]
    if last and env_step.final_state is not None:
        over = env_step.done[at]
        state[over] = env_step.final_state[at[over]]
    return state
