"""Shared by views for single-agent libraries: agents of N envs as rows of one batch, R = N * A, row i * A + a."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.utils.env_checker import data_equivalence
from numpy.typing import NDArray

from marlvec.envs.spec import COMMON, AgentGroup, AutoresetMode, EnvSpec, Info
from marlvec.errors import ActionError, ArgumentError, ContractError, EnvRaised
from marlvec.spaces import Leaf, SpaceTree
from marlvec.vector.checks import is_by_agent, lay_out
from marlvec.vector.infos import AGENTS, RESERVED, infos_from_list, infos_to_list
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

_SHOWN = 5  # names shown in messages


class AgentRows:
    """Row layout of a `VectorEnv` with one group."""

    def __init__(self, envs: VectorEnv, view: str) -> None:
        self.group = one_group(envs, view)
        self.agent_num = envs.agent_num
        self.row_num = envs.num_envs * envs.agent_num
        self._env_num = envs.num_envs
        self._grouped = envs.grouped
        self._spec = envs.spec

    def join(self, array: NDArray[Any]) -> NDArray[Any]:
        """(N, A, …) to (R, …), without a copy."""
        return array.reshape(self.row_num, *array.shape[2:])

    def spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """Repeat values of envs for their agents: (N, …) to (R, …)."""
        return array.repeat(self.agent_num, axis=0)

    def of_envs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Repeat one value per env for its agents: one value per row, the same object for all agents of an env."""
        return tuple(value for value in values for _ in range(self.agent_num))

    def per_env(self, values: Sequence[Any], what: str) -> list[Any]:
        """Reduce one value per row to one per env; ArgumentError names ``what`` if the values of one env differ."""
        if len(values) != self.row_num:
            raise ArgumentError(f"{what}: expected one per row, {self.row_num} in all, got {len(values)}")
        for row, value in enumerate(values):
            first = values[row - row % self.agent_num]
            if value is not first and not data_equivalence(value, first):
                raise ArgumentError(
                    f"{what}: expected equal values for rows of one env; row {row} differs from them: {value}"
                )
        return list(values[:: self.agent_num])

    def split(self, actions: Any) -> Any:
        """Convert actions (R, …), or a tree of them, to the form of `VectorEnv.step`; by agent, they have it."""
        if actions.__class__ is not np.ndarray and is_by_agent(self._spec, self._grouped, actions, self._env_num):
            return actions
        tree = self.group.action_tree
        if tree.is_leaf and not self._grouped:
            return self._split(actions, tree.leaves[0])
        try:
            parts = tree.flatten(actions)
        except ContractError as error:
            raise ActionError(f"actions: {error}") from None
        split = tree.unflatten([self._split(part, leaf) for part, leaf in zip(parts, tree.leaves, strict=True)])
        return {self.group.name: split} if self._grouped else split

    def _split(self, part: Any, leaf: Leaf) -> NDArray[Any]:
        where = f"actions of {leaf}" if leaf.path else "actions"
        if not leaf.is_object and (keys := _keys_in(part)) is not None:
            agents = list(self._spec.agents)
            raise ActionError(
                f"{where}: expected an array of shape {(self.row_num, *leaf.shape)}, one row per env and agent, got "
                f"{'a dict' if isinstance(part, Mapping) else 'dicts'} with keys {keys}. Give the rows env by env, in "
                f"the order of the agents: np.array([actions[i][agent] for i in range({self._env_num}) for agent in "
                f"{agents[:_SHOWN]}{'…' * (len(agents) > _SHOWN)}]); or one dict of agents for each env"
            )
        try:
            array = np.asarray(part)
        except (ValueError, TypeError) as error:  # ragged lists, tensors on a device
            raise ActionError(f"{where}: not an array: {error}") from error
        if array.shape[:1] != (self.row_num,):
            expected = (self.row_num, *leaf.shape)
            raise ActionError(f"{where}: expected shape {expected}, one row per env and agent, got {array.shape}")
        return array.reshape(self._env_num, self.agent_num, *array.shape[1:])


def _keys_in(part: Any) -> list[str] | None:
    """Return the keys of a dict, or of the first dict in a list; None if there is no dict."""
    first = part[0] if isinstance(part, (list, tuple)) and part else part
    return sorted(map(str, first))[:_SHOWN] if isinstance(first, Mapping) else None


def cleared(leaves: list[NDArray[Any]], rows: NDArray[np.bool_]) -> list[NDArray[Any]]:
    """Return leaves with these rows zeroed, in place if they are writable."""
    if not rows.any():
        return leaves
    leaves = [leaf if leaf.flags.writeable else leaf.copy() for leaf in leaves]
    for leaf in leaves:
        leaf[rows] = None if leaf.dtype == np.object_ else 0
    return leaves


@dataclass(frozen=True, slots=True)
class RowStep:
    """One step of all rows; arrays and dicts belong to the caller."""

    # (R, …), or a tree of such arrays. If an env's episode ended, the first observation of the next one; zeros in rows
    # without an agent.
    obs: Any
    rewards: NDArray[np.float64]  # (R,), as are the flags
    terminated: NDArray[np.bool_]  # the agent ended in this step
    truncated: NDArray[np.bool_]
    infos: list[dict[str, Any]]  # of each row, see `RowDriver`
    first_infos: list[dict[str, Any]]  # of the reset after the step; empty without a reset


class EpisodeSums:
    """Return and length of each row's running episode; lengths count steps alive."""

    def __init__(self, row_num: int) -> None:
        self._returns, self._lengths = np.zeros(row_num), np.zeros(row_num, np.int64)
        self._began = time.monotonic()

    def add(self, rewards: NDArray[np.float64], was_alive: NDArray[np.bool_]) -> None:
        self._returns += rewards
        self._lengths += was_alive

    def clear(self, rows: Any = slice(None)) -> None:
        """Begin new episodes in these rows: a mask, or a slice."""
        self._returns[rows], self._lengths[rows] = 0, 0

    def at(self, row: int) -> dict[str, Any]:
        """Return a row's sums, as ``RecordEpisodeStatistics`` does; ``"t"``: seconds since this object was made."""
        seconds = round(time.monotonic() - self._began, 6)
        return {"r": float(self._returns[row]), "l": int(self._lengths[row]), "t": seconds}


class RowDriver:
    """Resets and steps a `VectorEnv` in same-step mode, and reports on each row.

    An agent's flag is True once, when it ends. If its env continues, the row is padding from the next observation on,
    as for an agent that has not joined: zeros, reward 0, no flags, any action ignored, until the env's next episode.
    Envs begin a new episode, all rows together, in the step in which their last agent ends.

    Each row's info has its agent's info, the info of the env as a whole, and

    * ``"alive"``, ``"acting"``: for the returned observation: whether there is an agent, and whether it must act now;
    * ``"action_mask"``: (k,) bool, for that observation, if there are masks;
    * ``"TimeLimit.truncated"``: the agent was truncated, and not terminated;
    * in the step in which the agent ended, ``"terminal_observation"``, its last observation, and ``"episode"``:
      ``{"r": return, "l": number of steps alive, "t": seconds since the driver began}``;
    * ``"fault"``: True if its episode was lost. The row is truncated, and its last observation is the one before the
      lost step.
    """

    def __init__(self, envs: VectorEnv, view: str) -> None:
        self.rows = AgentRows(envs, view)
        check_view(envs, view)
        self.envs = envs
        # (R,): for the latest observations; the row's action counted in the latest step; that step lost its episode.
        self.alive, self.acting, self.acted, self.lost = np.zeros((4, self.rows.row_num), np.bool_)
        self._sums = EpisodeSums(self.rows.row_num)
        self._leaves: list[NDArray[Any]] = []
        self._mask: NDArray[np.bool_] | None = None

    @property
    def has_masks(self) -> bool:
        """Whether actions can be masked: they are discrete choices."""
        return self.rows.group.choices is not None

    @property
    def action_masks(self) -> NDArray[np.bool_]:
        """(R, k), for the latest observations; all True if the envs have no masks, and in rows that do not act."""
        choices = self.rows.group.choices
        if choices is None:
            raise ArgumentError(f"action_masks: expected discrete choices, got {self.rows.group.action_space}")
        return np.ones((self.rows.row_num, choices), np.bool_) if self._mask is None else self._mask.copy()

    def reset(
        self, seed: int | Sequence[int | None] | None = None, options: Any = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Begin new episodes in all envs; return obs (R, …), and one info per row."""
        self.envs.reset_send(seed=seed, options=options)
        result = self.envs.recv()
        self._note(result)
        self.acted, self.lost = np.zeros((2, self.rows.row_num), np.bool_)
        self._sums.clear()
        now, _ = split_infos(result, self.envs.agents)
        self._leaves = self._copy_rows(result.obs_leaves[0])
        return self._tree(), self._merge_infos(now, self._driver_infos())

    def send(self, actions: Any) -> None:
        """Send actions (R, …), or a tree of such arrays; rows that do not act may have any action."""
        self.envs.step_send(self.rows.split(actions))

    def recv(self) -> RowStep:
        """Wait for the step started by `send`."""
        result = self.envs.recv()
        was_alive, self.acted = self.alive, self.acting
        self._note(result)
        terminated, truncated = self.rows.join(result.terminated), self.rows.join(result.truncated)
        rewards, ended = self.rows.join(result.rewards), terminated | truncated
        self.lost = ended & self.rows.spread(result.fault)
        self._sums.add(rewards, was_alive)
        now, first = split_infos(result, self.envs.agents)
        ours, cut = self._driver_infos(), truncated & ~terminated
        for row in np.flatnonzero(cut).tolist():
            ours[row]["TimeLimit.truncated"] = True
        leaves = self._copy_rows(result.obs_leaves[0])
        if ended.any():
            self._end(result, ended, ours)
            leaves = cleared(leaves, ended & ~self.rows.spread(result.done))
        self._leaves = leaves
        blank: list[dict[str, Any]] = [{} for _ in ours]
        return RowStep(
            self._tree(),
            rewards.copy(),
            terminated.copy(),
            truncated.copy(),
            self._merge_infos(now, ours),
            self._merge_infos(first, blank),
        )

    def _note(self, result: VectorStep) -> None:
        self.alive, self.acting = self.rows.join(result.alive).copy(), self.rows.join(result.acting).copy()
        mask = result.action_masks[0]
        self._mask = None if mask is None else self.rows.join(mask).copy()

    def _copy_rows(self, leaves: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return leaves as rows, copied if they belong to the vectorizer."""
        return [self.rows.join(leaf if self.envs.copy else leaf.copy()) for leaf in leaves]

    def _tree(self) -> Any:
        return self.rows.group.observation_tree.unflatten(self._leaves)

    def _merge_infos(self, infos: list[Info], ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not any(infos):  # most envs have no infos in most steps
            return ours
        given = ((info.get(agent, {}), info.get(COMMON, {})) for info in infos for agent in self.envs.agents)
        return [merged(own, common, mine) for (own, common), mine in zip(given, ours, strict=True)]

    def _driver_infos(self) -> list[dict[str, Any]]:
        ours: list[dict[str, Any]] = [
            {"TimeLimit.truncated": False, "alive": alive, "acting": acting}
            for alive, acting in zip(self.alive.tolist(), self.acting.tolist(), strict=True)
        ]
        if self._mask is not None:
            for info, mask in zip(ours, self._mask, strict=True):
                info["action_mask"] = mask
        return ours

    def _end(self, result: VectorStep, ended: NDArray[np.bool_], ours: list[dict[str, Any]]) -> None:
        tree, final = self.rows.group.observation_tree, [self.rows.join(leaf) for leaf in result.final_leaves[0]]
        for row in np.flatnonzero(ended).tolist():
            info, lost = ours[row], bool(self.lost[row])
            info["terminal_observation"] = value_at(tree, self._leaves if lost else final, (row,))
            if lost:
                info["fault"] = True  # its return is unknown
            else:
                info["episode"] = self._sums.at(row)
        self._sums.clear(ended)


_OURS = {key for name in RESERVED - {AGENTS, COMMON} for key in (name, "_" + name)}  # keys that marlvec adds
_ROW = "row"  # placeholder for the agent of a row


@dataclass(frozen=True, slots=True)
class InfoEntry:
    """One key of the infos."""

    level: str  # `AGENTS`, or `COMMON` if the value is the env's, repeated per agent
    key: str
    values: Any  # (R, …), or a dict of arrays with masks for nested dicts
    present: NDArray[np.bool_]  # (R,), the rows that have a value

    def at(self, row: int) -> Any:
        """Return the value in one row, with its type."""
        return _at(self.values, row)


def read_entries(infos: Mapping[str, Any], agent_num: int) -> list[InfoEntry]:
    """Return the entries of a `VectorEnv`'s infos, without keys that marlvec adds."""
    if infos.keys() <= _OURS:
        return []
    found = [(key, infos[key], infos["_" + key]) for key in infos if not key.startswith("_") and key not in RESERVED]
    for level in (AGENTS, COMMON):
        found += [(key, values, mask) for key, (values, mask) in infos.get(level, {}).items()]
    return [_entry(key, values, mask, agent_num) for key, values, mask in found]


def lay_out_infos(entries: Iterable[InfoEntry], taken: Collection[str]) -> dict[str, Any]:
    """Return entries in Gymnasium's form: ``{key: values, _key: present}``.

    Entries whose key is ``taken`` by the view, or by an earlier entry, are in ``"__agents__"`` or ``"__common__"``.
    """
    out: dict[str, Any] = {}
    aside: dict[str, dict[str, Any]] = {}
    for entry in entries:
        names = (entry.key, "_" + entry.key)
        if any(name in out or name.removeprefix("_") in taken or name in (AGENTS, COMMON) for name in names):
            aside.setdefault(entry.level, {})[entry.key] = (entry.values, entry.present)
        else:
            out |= zip(names, (entry.values, entry.present), strict=True)
    return out | aside


def pick_rows(sources: Mapping[int, Sequence[InfoEntry]], row_num: int) -> list[InfoEntry]:
    """Return entries of these rows only, each from its own source."""
    picked: list[dict[str, dict[str, Any]]] = [{} for _ in range(row_num)]
    for row, entries in sources.items():
        for entry in entries:
            if entry.present[row]:
                who = _ROW if entry.level == AGENTS else COMMON
                picked[row].setdefault(who, {})[entry.key] = entry.at(row)
    return read_entries(infos_from_list(picked, (_ROW,)), 1)


def _entry(key: str, values: Any, mask: NDArray[np.bool_], agent_num: int) -> InfoEntry:
    def repeat(array: NDArray[Any]) -> NDArray[Any]:
        return array.repeat(agent_num, axis=0)

    def join(array: NDArray[Any]) -> NDArray[Any]:
        return array.reshape(len(array) * agent_num, *array.shape[2:])

    level, spread = (COMMON, repeat) if mask.ndim == 1 else (AGENTS, join)
    return InfoEntry(level, key, _map(values, spread), spread(mask))


def _map(values: Any, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
    if isinstance(values, dict):
        return {key: _map(part, function) for key, part in values.items()}
    return function(values)


def _at(values: Any, row: int) -> Any:
    if isinstance(values, dict):
        return {
            key: _at(part, row) for key, part in values.items() if not key.startswith("_") and values["_" + key][row]
        }
    return values[row]


def merged(own: Mapping[str, Any], common: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one agent's info with the env's and a view's: the view's wins, then the agent's.

    Values that lose are in ``"__common__"`` and ``"__agents__"``.
    """
    if not own and not common:
        return dict(ours)
    out = {**common, **own, **ours}
    if clash := {key: value for key, value in common.items() if key in own or key in ours}:
        out[COMMON] = clash
    if aside := {key: value for key, value in own.items() if key in ours}:
        out[AGENTS] = aside
    return out


def split_infos(result: VectorStep, agents: Sequence[str]) -> tuple[list[Info], list[Info]]:
    """Return infos of a step, and of the reset after it (empty without one), by env and agent or ``"__common__"``."""
    infos = result.infos
    now = infos_to_list(infos, agents, len(result))
    first: list[Info] = [{} for _ in now]
    if result.done.any():
        last = infos_to_list(infos.get("final_info", {}), agents, len(result))
        for i in np.flatnonzero(result.done).tolist():
            now[i], first[i] = last[i], now[i]
    return now, first


View = TypeVar("View")


class Needs(NamedTuple):
    """The settings that a view supports."""

    why: str  # one clause of the message
    modes: tuple[AutoresetMode, ...]
    num_envs: int | None = None  # None: any
    copies: bool = False  # the view keeps the arrays it receives, so that copy=True is required
    on_fault: tuple[str, ...] = ()  # values; empty: all
    has_make: bool = False  # the view has a `make()` that sets all this


_OF_ROWS = Needs("a new episode's first observation must come with the old one's end", (AutoresetMode.SAME_STEP,))
_OF_ONE_ENV = Needs("it drives one env by itself", (AutoresetMode.DISABLED,), num_envs=1, has_make=True)
_OF_TIANSHOU = Needs(
    "Tianshou resets envs itself and keeps the arrays it receives",
    (AutoresetMode.DISABLED,),
    copies=True,
    has_make=True,
)
NEEDS = {
    "CleanRLVectorEnv": _OF_ROWS,
    "PufferView": _OF_ROWS,
    "SB3VecEnv": _OF_ROWS,
    "SuperSuitVecEnv": _OF_ROWS,
    "ParallelView": _OF_ONE_ENV,
    "RLlibMultiAgentEnv": _OF_ONE_ENV._replace(copies=True),
    "RLlibVectorEnv": Needs(
        "RLlib expects an episode's end and the next one's beginning in two steps, keeps the arrays it receives, "
        "and does not support masked envs",
        (AutoresetMode.NEXT_STEP,),
        copies=True,
        on_fault=("raise", "restart"),
    ),
    "TianshouVectorEnv": _OF_TIANSHOU,
    "TianshouTurnVectorEnv": _OF_TIANSHOU,
    "TorchRLEnv": Needs(
        "TorchRL resets envs itself and keeps the arrays it receives",
        (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED),
        copies=True,
    ),
}
"""Needs of each view, by its class's name; `GymnasiumVectorEnv` supports all settings."""


def check_view(envs: VectorEnv, view: str) -> None:
    """Raise ArgumentError if a view, a key of `NEEDS`, does not support a setting of these envs."""
    why, modes, num_envs, copies, on_fault, has_make = NEEDS[view]
    needs: list[tuple[str, Any, Sequence[Any]]] = []  # setting, its value, supported values
    if num_envs is not None:
        needs.append(("num_envs", envs.num_envs, (num_envs,)))
    needs.append(("autoreset_mode", envs.autoreset_mode, [mode.value for mode in modes]))
    if copies:
        needs.append(("copy", envs.copy, (True,)))
    if on_fault:
        needs.append(("on_fault", envs.on_fault, on_fault))
    if all(got in allowed for _, got, allowed in needs):
        return
    expected = _join([f"{name}={' or '.join(map(repr, allowed))}" for name, _, allowed in needs])
    given = _join([f"{name}={got!r}" for name, got, _ in needs])
    remedy = f"; {view}.make() sets that" if has_make else ""
    raise ArgumentError(f"{view}: {why}: expected {expected}, got {given}{remedy}")


def viewed(view: Callable[..., View], envs: VectorEnv, *args: Any, **kwargs: Any) -> View:
    """Build a view of new envs, ``view(envs, …)``; close the envs if that raises."""
    try:
        return view(envs, *args, **kwargs)
    except BaseException:
        envs.close()
        raise


def one_group(envs: VectorEnv, view: str) -> AgentGroup:
    """Return the single group of all agents, or raise ArgumentError."""
    if len(envs.groups) > 1:
        raise ArgumentError(
            f"{view}: expected envs whose agents have equal spaces, one group; {envs.spec.name} has "
            f"{len(envs.groups)}: {', '.join(envs.groups)}. make(..., pad=True) makes them equal"
        )
    return envs.spec.groups[0]


def value_at(tree: SpaceTree, leaves: list[NDArray[Any]], where: tuple[int, ...]) -> Any:
    """Return one value of a space as a single env would: a copy; a scalar only if the space is Discrete."""
    index: tuple[Any, ...] = (*where, ...)  # with the ellipsis, numpy returns 0-d arrays instead of scalars
    parts = [array[index].copy() for array in leaves]
    return tree.unflatten(
        [
            part[()] if leaf.is_object or isinstance(leaf.space, Discrete) else part
            for leaf, part in zip(tree.leaves, parts, strict=True)
        ]
    )


def ask_envs(envs_of_rows: Sequence[int], ask: Callable[[list[int]], Iterable[Any]]) -> list[Any]:
    """Return one answer per row: each env is asked once, in ascending order, and answers for all of its rows."""
    env_ids = sorted(set(envs_of_rows))
    answers = dict(zip(env_ids, ask(env_ids), strict=True))
    return [answers[i] for i in envs_of_rows]


def metadata_of(envs: VectorEnv) -> dict[str, Any]:
    """Return the envs' metadata, without the autoreset mode."""
    return {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}


def render_mode_of(envs: VectorEnv) -> str | None:
    """Return the render mode of all envs; None if they have none, or different ones."""
    try:
        with missing_is_attribute_error():
            modes = set(envs.get_attr("render_mode"))
    except AttributeError:
        return None
    return modes.pop() if len(modes) == 1 else None


@contextmanager
def missing_is_attribute_error() -> Iterator[None]:
    """Convert the error of a call for a missing attribute to AttributeError, as other libraries expect."""
    try:
        yield
    except EnvRaised as error:
        if isinstance(error.__cause__, ArgumentError):
            raise AttributeError(str(error.__cause__)) from error
        raise


def _join(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def places_of(spec: EnvSpec) -> dict[str, tuple[int, int]]:
    """Return each agent's group, and its index in that group."""
    return {spec.agents[a]: (g, j) for g, group in enumerate(spec.groups) for j, a in enumerate(group.agents)}


def join_actions(envs: VectorEnv, actions: Sequence[Mapping[str, Any]], acting_NA: NDArray[np.bool_]) -> Any:
    """Convert one dict of actions per env to the form of `VectorEnv.step`; the agents ``acting_NA`` must have one.

    ActionError names agent and, if there are several, env. Actions of other agents are ignored.
    """
    names, known = envs.agents, set(envs.agents)
    for i, (own, acting) in enumerate(zip(actions, acting_NA.tolist(), strict=True)):
        where = "actions" if envs.num_envs == 1 else f"actions of env {i}"
        if unknown := [name for name in own if name not in known]:
            raise ActionError(f"{where}: no agent {unknown[0]!r}; the agents are {list(names)}")
        if missing := [name for name in compress(names, acting) if name not in own]:
            raise ActionError(
                f"{where}: expected one for each agent that must act, {[*compress(names, acting)]}; "
                f"missing are {missing}"
            )

    def place(i: int, a: int) -> str:
        return f"action of agent {names[a]!r}" if envs.num_envs == 1 else f"action of env {i}, agent {names[a]!r}"

    return lay_out(envs.spec, envs.grouped, actions, acting_NA, place)
