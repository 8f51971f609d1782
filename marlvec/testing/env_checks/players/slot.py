"""Checks envs that write into slots themselves, and JAX worlds as such envs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.adapters.return_values import AgentId
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info, refuse_masks
from marlvec.errors import ContractError
from marlvec.testing.env_checks.findings import Findings
from marlvec.testing.env_checks.players.base import Player
from marlvec.testing.env_checks.values import check_mask, check_member, check_table
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.pools.jax.pool import JaxPool
from marlvec.vector.pools.jax.world import JaxWorld
from marlvec.vector.pools.pool import Leaves, PoolReply

__all__ = ["SlotPlayer", "WorldEnv"]


class SlotPlayer(Player):
    """Plays a `MultiAgentEnv` with private arrays, prepared before each call as by a vectorizer."""

    def __init__(self, env: MultiAgentEnv, max_steps: int, findings: Findings) -> None:
        def read() -> dict[str, Any]:
            spaces = {f"observation_spaces[{a}]": space for a, space in enumerate(env.observation_spaces)}
            return spaces | {f"action_spaces[{a}]": space for a, space in enumerate(env.action_spaces)}

        self._spec = spec = env.spec()
        super().__init__(env, env.name, spec.agents, read, max_steps, findings)
        self._homes: dict[AgentId, tuple[int, int]] = {
            spec.agents[a]: (g, j) for g, group in enumerate(spec.groups) for j, a in enumerate(group.agents)
        }
        self._rows = rows = Buffers(spec, 1)
        self._slot = rows.slot(0)
        self._reward, self._ended, self._cut = rows.reward[0], rows.terminated[0], rows.truncated[0]
        self._alive, self._acting, self._unseen = rows.alive[0], rows.acting[0], rows.final_missing[0]

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._rows.clear_row(0)
        self._clear()
        infos = self.ask(partial(self.env.reset, self._slot), seed=seed, options=options, given="options")
        self._check_info(infos)
        if not self._alive.any():
            self.place.fault("agents", "alive", "at least one agent", "none", "set slot.alive in reset()")
        self.live = set()
        self._check_rows()

    def step(self, rng: np.random.Generator) -> None:
        for agent in np.array(self.agents)[self._acting].tolist():
            g, j = self._homes[agent]
            action = self.draw(agent, self._mask_of(agent), rng)
            tree = self._spec.groups[g].action_tree
            for leaf, part in zip(self._rows.actions[g], tree.flatten(action), strict=True):
                leaf[0, j] = part
        for a in np.flatnonzero(~self._alive).tolist():
            self._slot.zero_obs(a)
        self._clear()
        self._check_info(self.ask(partial(self.env.step, self._slot)))
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
            self.note_reward(agent, float(self._reward[a]))
            self.ends(agent, self._ended[a], self._cut[a])
            if not begun:
                with place.logging():
                    self._check_life(agent, alive, bool(flagged[a]), bool(self._reward[a]))
            # Before its first turn an agent may have no observation; without a final one it was checked earlier.
            if self._acting[a] or (flagged[a] and not self._unseen[a]) or (alive and self._has_obs(agent)):
                self.observe(agent, self._row(agent))
            if self._acting[a]:
                self._mask_of(agent)
            if self._unseen[a] and not flagged[a]:
                change = "set final_missing only in the step in which the agent ends"
                subject = f"final_missing of agent {agent!r}"
                place.report("life", subject, "False, for it has not ended", "True", change)
        ended = {agent for agent, flag in zip(self.agents, flagged.tolist(), strict=True) if flag}
        self.gone |= ended
        self.live = {agent for agent, alive in zip(self.agents, self._alive.tolist(), strict=True) if alive}
        self.note("alive", self._alive)
        self.note("acting", self._acting)
        self.over = self._slot.done
        if not begun and self.over is not (not self.live):
            change = "set slot.done in the step after which no agent is alive, and in no other"
            place.fault("ends", "slot.done", f"{not self.live}, as alive says", str(self.over), change)
        if self._rows.state is not None and self._spec.state_space is not None:
            self.ask(partial(self.env.write_state, self._slot))
            state = self._rows.state[0, ...]
            with place.logging():
                check_member(self._spec.state_space, state, place, "the global state", "state")
            self.note("the global state", state)

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

    def _row(self, agent: AgentId) -> Any:
        g, j = self._homes[agent]
        return self._spec.groups[g].observation_tree.unflatten([leaf[0, j].copy() for leaf in self._rows.obs[g]])

    def _has_obs(self, agent: AgentId) -> bool:
        g, j = self._homes[agent]
        rows = (leaf[0, j, ...] for leaf in self._rows.obs[g])
        return any(row[()] is not None if row.dtype == np.object_ else row.any() for row in rows)

    def _mask_of(self, agent: AgentId) -> NDArray[np.bool_] | None:
        g, j = self._homes[agent]
        masks = self._rows.action_masks[g]
        if masks is None or (self._spec.groups[g].mask_size is None and not self._slot.gave_mask[0]):
            return None
        mask = None
        with self.place.logging():
            mask = check_mask(self.action_spaces[agent], masks[0, j], self.place, agent)
        self.note(f"action mask of agent {agent!r}", mask)
        return mask

    def _check_info(self, infos: Any) -> None:
        if infos is not None:
            with self.place.logging():
                for agent, info in check_table(infos, self.place, "infos", "infos").items():
                    check_table(info, self.place, f"info of {agent!r}", "infos")
            with self.place.logging():
                self._refuse_masks(infos)

    def _refuse_masks(self, infos: Info) -> None:
        try:
            refuse_masks(self._spec, infos)
        except ContractError:
            change = "write it with slot.write_mask(), or put it under another key"
            self.place.fault("masks", "action_mask in infos", "none, since it forbids no action there", "one", change)


class WorldEnv(MultiAgentEnv):
    """One world, compiled, which resets nothing by itself; `ContractError` if it breaks the protocol."""

    def __init__(self, world: JaxWorld) -> None:
        self.world = world
        self._pool = JaxPool(world, 1, autoreset_mode="disabled")
        spec = self._pool.spec
        self.name, self.agents, self.metadata = spec.name, spec.agents, spec.metadata
        self.observation_spaces, self.action_spaces = spec.observation_spaces, spec.action_spaces
        self.mask_sizes, self.state_space = spec.mask_sizes, spec.state_space
        self._groups = spec.groups
        self._one = np.zeros(1, np.int64)

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._pool.reset(self._one, [seed], [None])
        self._write(slot, self._pool.recv(), [True] * len(self.agents))

    def step(self, slot: Slot) -> None:
        given, actions = slot.read_actions(), []
        for group in self._groups:
            leaves = [np.zeros((1, len(group.agents), *leaf.shape), leaf.dtype) for leaf in group.action_tree.leaves]
            for j, a in enumerate(group.agents):
                if slot.acting[a]:
                    for target, part in zip(leaves, group.action_tree.flatten(given[a]), strict=True):
                        target[0, j] = part
            actions.append(leaves)
        self._step(slot, actions)

    def _step(self, slot: Slot, actions: Leaves) -> None:
        before = list(slot.alive)
        self._pool.send(self._one, actions, np.array(slot.acting)[None])
        reply = self._pool.recv()
        for a, was_alive in enumerate(before):
            if was_alive:
                slot.reward[a] = float(reply.reward[0, a])
                slot.terminated[a], slot.truncated[a] = bool(reply.terminated[0, a]), bool(reply.truncated[0, a])
        self._write(slot, reply, before)
        slot.done = not any(slot.alive)

    def _write(self, slot: Slot, reply: PoolReply, present: list[Any]) -> None:
        ended = (reply.terminated | reply.truncated)[0]
        for g, group in enumerate(self._groups):
            for j, a in enumerate(group.agents):
                if not present[a]:
                    continue
                slot.write_obs(a, group.observation_tree.unflatten([leaf[0, j] for leaf in reply.obs[g]]))
                slot.alive[a] = alive = not ended[a]
                slot.acting[a] = alive and (reply.acting is None or bool(reply.acting[0, a]))
                mask = None if reply.masks is None else reply.masks[g]
                if mask is not None:
                    slot.write_mask(a, mask[0, j])

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self._pool.state()[0])

    def close(self) -> None:
        self._pool.close()
