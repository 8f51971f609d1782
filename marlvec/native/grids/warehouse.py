"""The multi-robot warehouse, exact with rware 2.0's ``Warehouse``, flattened observations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.envs.recipes import EnvEntry
from marlvec.errors import ArgumentError
from marlvec.native.kernels import bounded, end_episode, kernel, sample
from marlvec.native.native_env import Ids, NativeEnv, Rows, own_arguments, refuse
from marlvec.native.rng_streams import as_generator

Whole = NDArray[np.int64]


_LEFT, _RIGHT, _TOGGLE = 2, 3, 4
_UP, _DOWN, _WEST = 0, 1, 2
_LEFT_OF = np.array([2, 3, 1, 0])
_RIGHT_OF = np.array([3, 2, 0, 1])
_REWARDS = ("global", "individual", "two_stage")
_GLOBAL, _INDIVIDUAL, _TWO_STAGE = range(3)
_SELF = 8  # numbers about the robot itself in its observation


class Warehouse(NativeEnv):
    """N warehouses; H rows, W columns, A robots, S shelves, Q of them requested, M bits of a message.

    Arguments are rware's; images and dicts as observations are not supported. Cells are numbered ``W * row + column``,
    robots and shelves from 1; 0: none.
    """

    name = "Warehouse"
    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 10}
    viewer_names = ("renderer",)
    state_names = (
        "place",
        "heading",
        "carried",
        "delivered",
        "message",
        "robots",
        "shelves",
        "queue",
        "requested",
        "steps",
        "idle",
    )

    def __init__(
        self,
        num_envs: int,
        *,
        shelf_columns: int,  # odd
        column_height: int,
        shelf_rows: int,
        n_agents: int,
        msg_bits: int,  # M; above 0, an action also contains a message
        sensor_range: int,  # cells that a robot sees
        request_queue_size: int,  # Q, less than S
        max_inactivity_steps: int | None,  # steps without a delivery that terminate all robots; None or 0: never
        max_steps: int | None,
        reward_type: Any,  # "individual", "global" or "two_stage", or rware's `RewardType`
        layout: str | None = None,  # a drawing instead of numbers: x is a shelf, . free, g a goal
        observation_type: Any = "flattened",  # or rware's `ObservationType.FLATTENED`
        image_observation_layers: Any = None,  # ignored, as the next: options of images
        image_observation_directional: bool = True,
        normalised_coordinates: bool = False,  # divide a robot's position by the warehouse's size
    ) -> None:
        self._kwargs = own_arguments(locals())
        del self._kwargs["image_observation_layers"]
        super().__init__(num_envs)
        if _word("observation_type", observation_type, ("dict", "flattened", "image", "image_dict")) != "flattened":
            raise refuse(self.name, f"observation_type={observation_type!r} (but 'flattened')")
        if layout:
            self._free, goals = _drawn(layout)
        else:
            self._free, goals = _regular(
                check_int("shelf_columns", shelf_columns, 1),
                check_int("shelf_rows", shelf_rows, 1),
                check_int("column_height", column_height, 1),
            )
        self._size = height, width = self._free.shape
        self._goals = np.array([width * row + column for row, column in goals], np.int64)
        self._standing = np.flatnonzero(~self._free.ravel())
        self._highway = self._free.ravel()
        a, s = check_int("n_agents", n_agents, 1), len(self._standing)
        m, q = check_int("msg_bits", msg_bits, 0), check_int("request_queue_size", request_queue_size, 0)
        if a > height * width:
            raise ArgumentError(f"n_agents: expected no more than the {height * width} cells, got {n_agents}")
        if q >= s:
            raise refuse(self.name, f"request_queue_size={q} of {s} shelves (all of them)")
        self._normalised = bool(normalised_coordinates)
        if self._normalised and 1 in self._size:
            raise refuse(self.name, f"normalised_coordinates=True on {height} × {width} cells")
        self._range = check_int("sensor_range", sensor_range, 0)
        self._limits = _limit("max_inactivity_steps", max_inactivity_steps), _limit("max_steps", max_steps)
        self._reward = _REWARDS.index(_word("reward_type", reward_type, _REWARDS))
        self.agents = tuple(f"agent_{k}" for k in range(a))
        numbers = _SELF + (2 * self._range + 1) ** 2 * (7 + m)
        self.observation_spaces = (Box(-np.inf, np.inf, (numbers,), np.float32),) * a
        self.action_spaces = (MultiDiscrete([5, *m * [2]]) if m else Discrete(5),) * a
        self.place, self.heading, self.carried = np.zeros((3, num_envs, a), np.int64)
        self.delivered = np.zeros((num_envs, a), np.bool_)  # the carried shelf was delivered; two-stage rewards only
        self.message = np.zeros((num_envs, a, m), np.int64)  # each robot's last message
        self.robots, self.shelves = np.zeros((2, num_envs, height * width), np.int64)
        self.queue = np.ones((num_envs, q), np.int64)  # requested shelves
        self.requested = np.zeros((num_envs, s + 1), np.bool_)  # by shelf
        self.steps, self.idle = np.zeros((2, num_envs), np.int64)
        self._hashes = _hashes(height, width)
        robots = self.place, self.heading, self.carried, self.delivered, self.message
        self._state = *robots, self.robots, self.shelves, self.queue, self.requested, self.steps, self.idle

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        self._actions = rows.actions[0][0].reshape(self.num_envs, len(self.agents), -1)
        assert np.shares_memory(self._actions, rows.actions[0][0])

    def reset(self, ids: Ids) -> None:
        _reset(ids, self.rng, self._standing, *self._state)
        self._observe(ids)
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        r, rules = self.rows, (self._size, self._highway, self._goals, self._hashes, self._reward, self._limits)
        before, ends = (*rules, *self._state), (r.terminated, r.alive, r.acting, r.done)
        _step(ids, self.rng, *before, self._actions, r.reward, *ends)
        self._observe(ids)

    def _observe(self, ids: Ids) -> None:
        rules = self._size, self._range, self._normalised, self._highway
        robots = self.place, self.heading, self.carried, self.message, self.robots
        _observe(ids, *rules, *robots, self.shelves, self.requested, self.rows.obs[0][0])

    def state_limits(self) -> dict[str, tuple[int, int]]:
        a, s = len(self.agents), len(self._standing)
        cells = self._size[0] * self._size[1]
        return {
            "place": (0, cells - 1),
            "heading": (0, 3),
            "carried": (0, s),
            "robots": (0, a),
            "shelves": (0, s),
            "queue": (1, s),
        }

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        build = EnvEntry("rware", "marlvec.envs.grids.warehouse:Warehouse", family="rware", extra="rware").load()
        env = build(**self._kwargs, render_mode=render_mode)
        env.reset(seed=0)
        env._np_random = as_generator(self.rng[i])
        if not self.requested[i].any() and not self.shelves[i].any():
            return env  # there has been no episode
        width = self._size[1]
        for cell in np.flatnonzero(self.shelves[i]).tolist():
            shelf = env.shelfs[self.shelves[i, cell] - 1]
            shelf.y, shelf.x = divmod(cell, width)
        for a, agent in enumerate(env.agents):
            agent.y, agent.x = divmod(int(self.place[i, a]), width)
            agent.dir = type(agent.dir)(int(self.heading[i, a]))
            held = int(self.carried[i, a])
            agent.carrying_shelf = env.shelfs[held - 1] if held else None
            agent.has_delivered = bool(self.delivered[i, a])
            agent.message[:] = self.message[i, a]
        env.request_queue = [env.shelfs[shelf - 1] for shelf in self.queue[i].tolist()]
        env._cur_steps, env._cur_inactive_steps = int(self.steps[i]), int(self.idle[i])
        env._recalc_grid()
        return env


def _limit(name: str, value: int | None) -> int:
    return 0 if value is None else check_int(name, value)


def _word(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Read an option: a string, or a member of rware's enum."""
    word = str(getattr(value, "name", value)).lower()
    if word not in known:
        raise ArgumentError(f"{name}: expected one of {known}, got {value!r}")
    return word


def _regular(columns: int, rows: int, column_height: int) -> tuple[NDArray[np.bool_], list[tuple[int, int]]]:
    """Return the cells without shelves, (H, W) bool, and the goals, as ``Warehouse._make_layout_from_params``."""
    if columns % 2 == 0:
        raise ArgumentError(f"shelf_columns: expected an odd number, got {columns}")
    height, width = (column_height + 1) * rows + 2, 3 * columns + 1
    y, x = np.indices((height, width))
    middle = (width // 2 - 1, width // 2)
    free = (x % 3 == 0) | (y % (column_height + 1) == 0) | (y == height - 1)
    free |= (y > height - (column_height + 3)) & np.isin(x, middle)
    return free, [(height - 1, column) for column in middle]


def _drawn(layout: str) -> tuple[NDArray[np.bool_], list[tuple[int, int]]]:
    """Return a drawing's cells without shelves, (H, W) bool, and its goals."""
    lines = layout.strip().replace(" ", "").lower().split("\n")
    cells = [list(line) for line in lines]
    if len(set(map(len, cells))) != 1 or set().union(*cells) - set("gx."):
        raise ArgumentError(f"layout: expected lines of one length of 'x', '.' and 'g', got {layout!r}")
    drawn = np.array(cells)
    goals = [(int(row), int(column)) for row, column in np.argwhere(drawn == "g")]
    if not goals:
        raise ArgumentError(f"layout: expected a goal, 'g', got {layout!r}")
    return drawn != "x", goals


def _hashes(height: int, width: int) -> NDArray[np.uint64]:
    """Return Python's hash of each cell's ``(column, row)``; rware's order of robots depends on it."""
    found = [hash((column, row)) for row in range(height) for column in range(width)]
    return np.array(found, np.int64).view(np.uint64)


@kernel
def _reset(
    ids: Ids,
    rng: NDArray[np.uint64],
    standing: Whole,
    place: Whole,
    heading: Whole,
    carried: Whole,
    delivered: NDArray[np.bool_],
    message: Whole,
    robots: Whole,
    shelves: Whole,
    queue: Whole,
    requested: NDArray[np.bool_],
    steps: Whole,
    idle: Whole,
) -> None:
    a_num, cells = place.shape[1], robots.shape[1]
    for i in ids:
        robots[i] = 0
        shelves[i] = 0
        for k in range(len(standing)):
            shelves[i, standing[k]] = k + 1
        sample(rng, i, cells, place[i])
        for a in range(a_num):
            heading[i, a] = bounded(rng, i, 4)
            robots[i, place[i, a]] = a + 1
        carried[i] = 0
        delivered[i] = False
        message[i] = 0
        sample(rng, i, len(standing), queue[i])
        requested[i] = False
        for k in range(queue.shape[1]):
            queue[i, k] += 1
            requested[i, queue[i, k]] = True
        steps[i] = 0
        idle[i] = 0


@kernel
def _step(
    ids: Ids,
    rng: NDArray[np.uint64],
    size: tuple[int, int],
    highway: NDArray[np.bool_],
    goals: Whole,
    hashes: NDArray[np.uint64],
    reward_type: int,
    limits: tuple[int, int],
    place: Whole,
    heading: Whole,
    carried: Whole,
    delivered: NDArray[np.bool_],
    message: Whole,
    robots: Whole,
    shelves: Whole,
    queue: Whole,
    requested: NDArray[np.bool_],
    steps: Whole,
    idle: Whole,
    actions: Whole,
    reward: NDArray[np.float64],
    terminated: NDArray[np.bool_],
    alive: NDArray[np.bool_],
    acting: NDArray[np.bool_],
    done: NDArray[np.bool_],
) -> None:
    a_num = place.shape[1]
    traffic = make_traffic(a_num)
    goes = np.empty(a_num, np.bool_)
    for i in ids:
        message[i] = actions[i, :, 1:]
        for a in range(a_num):
            traffic.start[a] = place[i, a]
            traffic.target[a] = place[i, a]
            goes[a] = actions[i, a, 0] == FORWARD
            if goes[a]:
                traffic.target[a] = _ahead(size, place[i, a], heading[i, a])
                goes[a] = not _is_blocked(traffic, carried, robots, shelves, i, a)
                if not goes[a]:  # a loaded robot cannot enter another shelf's cell
                    traffic.target[a] = place[i, a]
        commit(traffic, robots[i], hashes)
        for a in range(a_num):
            action = actions[i, a, 0]
            if action == _LEFT:
                heading[i, a] = _LEFT_OF[heading[i, a]]
            elif action == _RIGHT:
                heading[i, a] = _RIGHT_OF[heading[i, a]]
            elif action == _TOGGLE:
                if carried[i, a] == 0:
                    carried[i, a] = shelves[i, place[i, a]]
                elif not highway[place[i, a]]:
                    carried[i, a] = 0
                    if delivered[i, a]:
                        reward[i, a] += 0.5
                    delivered[i, a] = False
        _move(traffic, goes, place, carried, robots, shelves, i)
        if _deliver(rng, goals, reward_type, delivered, robots, shelves, queue, requested, reward, i):
            idle[i] = 0
        else:
            idle[i] += 1
        steps[i] += 1
        if (limits[0] != 0 and idle[i] >= limits[0]) or (limits[1] != 0 and steps[i] >= limits[1]):
            end_episode(i, terminated, alive, acting, done)


@kernel
def _ahead(size: tuple[int, int], place: int, heading: int) -> int:
    """Return the cell in front of a robot; at the wall, its own cell."""
    row, column = place // size[1], place % size[1]
    if heading == _UP:
        row = max(0, row - 1)
    elif heading == _DOWN:
        row = min(size[0] - 1, row + 1)
    elif heading == _WEST:
        column = max(0, column - 1)
    else:
        column = min(size[1] - 1, column + 1)
    return row * size[1] + column


@kernel
def _is_blocked(traffic: Traffic, carried: Whole, robots: Whole, shelves: Whole, i: int, a: int) -> Any:
    """Return whether a loaded robot faces a shelf that no robot carries."""
    to = traffic.target[a]
    if carried[i, a] == 0 or to == traffic.start[a] or shelves[i, to] == 0:
        return False
    other = robots[i, to]
    return other == 0 or carried[i, other - 1] == 0


@kernel
def _move(
    traffic: Traffic, goes: NDArray[np.bool_], place: Whole, carried: Whole, robots: Whole, shelves: Whole, i: int
) -> None:
    """Take all robots off their cells, then put them into their next cells."""
    for a in range(len(goes)):
        goes[a] = goes[a] and traffic.committed[a]
        if goes[a]:
            robots[i, place[i, a]] = 0
            if carried[i, a]:
                shelves[i, place[i, a]] = 0
    for a in range(len(goes)):
        if goes[a]:
            place[i, a] = traffic.target[a]
            robots[i, place[i, a]] = a + 1
            if carried[i, a]:
                shelves[i, place[i, a]] = carried[i, a]


@kernel
def _deliver(
    rng: NDArray[np.uint64],
    goals: Whole,
    reward_type: int,
    delivered: NDArray[np.bool_],
    robots: Whole,
    shelves: Whole,
    queue: Whole,
    requested: NDArray[np.bool_],
    reward: NDArray[np.float64],
    i: int,
) -> bool:
    """Reward each requested shelf at a goal, and replace its request."""
    some = False
    for goal in goals:
        shelf = shelves[i, goal]
        if shelf == 0 or not requested[i, shelf]:
            continue
        some = True
        left = bounded(rng, i, requested.shape[1] - 1 - queue.shape[1])
        other = 1
        while requested[i, other] or left > 0:
            left -= not requested[i, other]
            other += 1
        for k in range(queue.shape[1]):
            if queue[i, k] == shelf:
                queue[i, k] = other
                break
        requested[i, shelf] = False
        requested[i, other] = True
        if reward_type == _GLOBAL:
            for a in range(reward.shape[1]):
                reward[i, a] += 1
        elif reward_type == _INDIVIDUAL:
            reward[i, robots[i, goal] - 1] += 1
        else:
            delivered[i, robots[i, goal] - 1] = True
            reward[i, robots[i, goal] - 1] += 0.5
    return some


@kernel
def _observe(
    ids: Ids,
    size: tuple[int, int],
    sight: int,
    normalised: bool,
    highway: NDArray[np.bool_],
    place: Whole,
    heading: Whole,
    carried: Whole,
    message: Whole,
    robots: Whole,
    shelves: Whole,
    requested: NDArray[np.bool_],
    obs: NDArray[np.float32],
) -> None:
    """Write the robot itself, then each cell around it: robot, heading, message, shelf."""
    m = message.shape[2]
    for i in ids:
        for a in range(place.shape[1]):
            row, column = place[i, a] // size[1], place[i, a] % size[1]
            out = obs[i, a]
            out[:] = 0
            if normalised:
                out[0] = column / (size[1] - 1)
                out[1] = row / (size[0] - 1)
            else:
                out[0] = column
                out[1] = row
            out[2] = carried[i, a] > 0
            out[3 + heading[i, a]] = 1
            out[7] = highway[place[i, a]]
            k = _SELF
            for y in range(row - sight, row + sight + 1):
                for x in range(column - sight, column + sight + 1):
                    robot, shelf = 0, 0
                    if 0 <= y < size[0] and 0 <= x < size[1]:
                        robot, shelf = robots[i, y * size[1] + x], shelves[i, y * size[1] + x]
                    if robot:
                        out[k] = 1
                        out[k + 1 + heading[i, robot - 1]] = 1
                        for b in range(m):
                            out[k + 5 + b] = message[i, robot - 1, b]
                    else:
                        out[k + 1] = 1
                    if shelf:
                        out[k + 5 + m] = 1
                        out[k + 6 + m] = requested[i, shelf]
                    k += 7 + m


FORWARD = 1

_FREE = -1
_PROBES = np.uint64(9)  # neighbouring entries that CPython's sets probe before they jump
_SHIFT = np.uint64(5)
_SMALLEST = 8  # size of a CPython set's smallest table


class Traffic(NamedTuple):
    """Requested moves of A robots, which of them happen, and work arrays."""

    start: Whole  # cells, (A,)
    target: Whole
    committed: NDArray[np.bool_]  # (A,), whether the robot gets its request: it goes, or stays as requested
    ahead: Whole  # (A,), the robot in the target cell, -1: none
    depth: Whole  # (A,), length of the longest line behind the robot
    end: Whole  # (A,), the free cell at the end of the robot's line, -1: none
    nodes: Whole  # (2 * A,), the graph's nodes (cells), in order of insertion
    reached: Whole  # (2 * A,), nodes of one component, in order of the search
    seen: NDArray[np.bool_]  # (2 * A,), whether the search reached a node
    table: Whole  # hash tables of a set: cells, or -1
    spare: Whole


@kernel
def make_traffic(a_num: int) -> Traffic:
    """Allocate the arrays for ``a_num`` robots."""
    size = _SMALLEST
    while size <= 4 * (2 * a_num + 1):
        size *= 2
    return Traffic(
        np.empty(a_num, np.int64),
        np.empty(a_num, np.int64),
        np.empty(a_num, np.bool_),
        np.empty(a_num, np.int64),
        np.empty(a_num, np.int64),
        np.empty(a_num, np.int64),
        np.empty(2 * a_num, np.int64),
        np.empty(2 * a_num, np.int64),
        np.empty(2 * a_num, np.bool_),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )


@kernel
def commit(t: Traffic, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """Decide which robots go, from their starts and targets; ``robots`` are by cell, counted from 1; 0: none."""
    a_num = len(t.start)
    crowded = False
    for a in range(a_num):
        t.ahead[a] = robots[t.target[a]] - 1
        t.committed[a] = t.ahead[a] == a
        t.depth[a] = 0
        crowded |= t.ahead[a] != a
    if not crowded:  # all stay
        return
    for a in range(a_num):
        t.end[a] = _follow(t, a)
    for a in range(a_num):
        if t.end[a] == _FREE:
            continue
        is_first = True  # of the robots whose lines end in this cell
        for b in range(a):
            is_first &= t.end[b] != t.end[a]
        if is_first:
            _commit_line(t, t.end[a], robots, hashes)


@kernel
def _follow(t: Traffic, a: int) -> Any:
    """Return the free cell at the end of robot ``a``'s line, or -1; in a ring of three or more, commit the robot."""
    b, length = t.ahead[a], 1
    last = a
    while b >= 0 and b != last and b != a and length <= len(t.start):
        t.depth[b] = max(t.depth[b], length)
        last = b
        b = t.ahead[b]
        length += 1
    if b == a and length >= 3:
        t.committed[a] = True
    return t.target[last] if b < 0 else _FREE


@kernel
def _commit_line(t: Traffic, end: int, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """Commit the longest line that ends in this free cell, from its head on."""
    place = end
    ordered = False
    while True:
        best, tied = -1, False
        for b in range(len(t.start)):
            if t.target[b] != place or t.start[b] == place:
                continue
            if best < 0 or t.depth[b] > t.depth[best]:
                best, tied = b, False
            elif t.depth[b] == t.depth[best]:
                tied = True
        if best < 0:
            return
        if tied:
            if not ordered:
                _order(t, end, robots, hashes)
                ordered = True
            best = _first(t, place, t.depth[best])
        t.committed[best] = True
        place = t.start[best]


@kernel
def _first(t: Traffic, place: int, depth: int) -> int:
    """Return the robot that is first in ``nodes``, among those with this target and a line of this depth."""
    for k in range(len(t.nodes)):
        for b in range(len(t.start)):
            if t.start[b] == t.nodes[k] and t.target[b] == place and t.depth[b] == depth:
                return b
    return -1


@kernel
def _order(t: Traffic, end: int, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """Write the nodes of ``end``'s component into ``nodes``, in networkx's order."""
    a_num = len(t.start)
    count, members = 0, 1
    for a in range(a_num):
        members += t.end[a] == end
        for place in (t.start[a], t.target[a]):
            is_new = True
            for k in range(count):
                is_new &= t.nodes[k] != place
            if is_new:
                t.nodes[count] = place
                count += 1
    t.nodes[count:] = _FREE
    if 2 * members >= count:
        return
    # networkx' search puts the nodes into one set, and its view of the graph into a second one.
    _search(t, end, count, members, robots)
    mask = _fill(t.table, t.spare, t.reached[:members], hashes)
    found = 0
    for k in range(int(mask) + 1):
        if t.table[k] >= 0:
            t.reached[found] = t.table[k]
            found += 1
    mask = _fill(t.table, t.spare, t.reached[:members], hashes)
    found = 0
    for k in range(int(mask) + 1):
        if t.table[k] >= 0:
            t.nodes[found] = t.table[k]
            found += 1
    t.nodes[found:] = _FREE


@kernel
def _search(t: Traffic, end: int, count: int, members: int, robots: Whole) -> None:
    """Search breadth first from the first node that leads to ``end``; visit a robot's target before its followers."""
    for k in range(count):
        t.seen[k] = False
    for k in range(count):
        a = robots[t.nodes[k]] - 1
        if t.nodes[k] == end or (a >= 0 and t.end[a] == end):
            t.reached[0] = t.nodes[k]
            t.seen[k] = True
            break
    found = 1
    for k in range(members):
        a = robots[t.reached[k]] - 1
        if a >= 0:
            found = _reach(t, t.target[a], found)
        for b in range(len(t.start)):
            if t.target[b] == t.reached[k]:
                found = _reach(t, t.start[b], found)


@kernel
def _reach(t: Traffic, place: int, found: int) -> int:
    for k in range(len(t.nodes)):
        if t.nodes[k] == place:
            if not t.seen[k]:
                t.seen[k] = True
                t.reached[found] = place
                return found + 1
            break
    return found


@kernel
def _fill(table: Whole, spare: Whole, places: Whole, hashes: NDArray[np.uint64]) -> Any:
    """Insert cells into an empty table as CPython's set does; return the table's mask."""
    mask = np.uint64(_SMALLEST - 1)
    table[: int(mask) + 1] = -1
    for k in range(len(places)):
        _put(table, mask, places[k], hashes)
        if (k + 1) * 5 < int(mask) * 3:
            continue
        size = _SMALLEST  # full: move all entries, in table order, into a larger table
        while size <= 4 * (k + 1):
            size *= 2
        before = int(mask) + 1
        spare[:before] = table[:before]
        mask = np.uint64(size - 1)
        table[:size] = -1
        for j in range(before):
            if spare[j] >= 0:
                _put(table, mask, spare[j], hashes)
    return mask


@kernel
def _put(table: Whole, mask: np.uint64, place: int, hashes: NDArray[np.uint64]) -> None:
    """Insert a cell into the first empty entry of CPython's probe order."""
    perturb = hashes[place]
    k = perturb & mask
    while True:
        last = k + _PROBES if k + _PROBES <= mask else k
        for entry in range(k, last + np.uint64(1)):
            if table[entry] < 0:
                table[entry] = place
                return
        perturb >>= _SHIFT
        k = (k * np.uint64(5) + np.uint64(1) + perturb) & mask
