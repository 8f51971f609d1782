"""A random program of calls on a vectorizer, each held against a plain loop over the same envs, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from marlvec import PerEnv, VectorEnv, VectorStep, env_seeds
from marlvec.errors import BusyError, FetchTimeout, NothingPendingError, NotResetError
from tests.properties.setups import Setup
from tests.properties.worlds import Matter
from tests.vector.support.reference import (
    Frame,
    Reference,
    assert_same,
    assert_trees_equal,
    check_infos,
    check_leaves,
    check_row_step,
    flatten,
    leaves_of,
    pick,
    public,
    stack,
)

__all__ = ["Program", "check"]

MOST_CALLS = 500  # a program that makes so many does not end


def check(setup: Setup) -> None:
    """Run the program of this setup."""
    with setup.make() as envs:
        Program(setup, envs).run()


class Program:
    """The calls, and what is known of the vectorizer while they are made.

    Attributes:
        pending: The public call that is under way, or None.
        asked: What each env in flight was asked, as a step of the reference.
        homeless: Envs without a running episode.
        held: Arrays that were handed out by the last call, and their bytes then.
    """

    def __init__(self, setup: Setup, envs: VectorEnv) -> None:
        self.setup, self.envs = setup, envs
        self.reference: Reference = setup.reference()
        self.rng = np.random.default_rng(setup.seed)
        self.everyone = list(range(setup.n))
        self.pending: str | None = None
        self.asked: dict[int, Callable[[], Any]] = {}
        self.answers: tuple[Any, ...] = ()
        self.homeless = set(self.everyone)
        self.held: list[tuple[NDArray[Any], bytes]] = []
        self.history: list[str] = []

    def run(self) -> None:
        """Make calls until every env has ended its episodes, in the middle of which anything may happen."""
        try:
            self.reset(self.everyone)
            while len(self.history) < self.setup.calls or self.pending:
                self.any_call()
            while min(world.episodes for world in self.reference.worlds) < self.setup.episodes:
                assert len(self.history) < MOST_CALLS
                self.reset_homeless() if self.homeless else self.step()
        except BaseException as error:
            error.add_note("calls: " + "; ".join(self.history))
            raise
        finally:
            for world in self.reference.worlds:
                world.driver.env.close()

    # --- which call is next

    def any_call(self) -> None:
        moves: list[Callable[[], Any]]
        if self.pending is None:
            moves = [self.step, self.step, self.step_send, self.stream, self.stream, self.control, self.look]
            moves += [self.control_send, self.wrong_call, self.empty_reset]
            if any(world.over for world in self.reference.worlds):
                moves += [self.reset_over] * 3
            if self.chance(self.setup.restless):
                moves = [self.reset_some, self.reset_some, self.reset_all, self.reset_send]
            elif self.homeless and self.chance(0.7):
                moves = [self.reset_homeless, self.async_reset]
        elif self.pending in ("call", "exec_func"):
            moves = [self.control_fetch, self.control_fetch, self.refused]
        elif self.pending in ("step", "reset"):
            moves = [self.fetch, self.fetch, self.recv, self.drain, self.refused]
        else:
            moves = [self.stream, self.stream, self.recv, self.recv, self.async_reset, self.drain, self.refused]
        self.pick(moves)()

    # --- steps and resets of all

    def step(self) -> None:
        ids = self.everyone
        if self.homeless:
            self.note("step", "without episode")
            with pytest.raises(NotResetError, match=rf"envs \[{', '.join(map(str, sorted(self.homeless)))}\]"):
                self.envs.step(public(self.envs, self.draw(ids)))
            return
        actions = self.random_actions() if self.chance(0.2) else self.draw(ids)
        self.note("step")
        self.ask("step", ids, actions)
        self.take_rows(self.envs.step(self.said(ids, actions)))

    def step_send(self) -> None:
        if self.homeless:
            return
        actions = self.draw(self.everyone)
        self.note("step_send")
        self.envs.step_send(self.said(self.everyone, actions))
        self.ask("step", self.everyone, deepcopy(actions))
        spoil(actions)

    def fetch(self) -> None:
        """Fetch a step or a reset, patiently or not; what was not there in time is still to come."""
        assert self.pending is not None
        fetch = self.envs.step_fetch if self.pending == "step" else self.envs.reset_fetch
        timeout = self.pick([None, None, 0.0, 0.0003])
        self.note(f"{self.pending}_fetch", timeout)
        try:
            result = fetch(timeout)
        except FetchTimeout:
            assert timeout is not None
            return
        self.take_rows(result)

    def reset(self, ids: list[int], *, whole: bool = True) -> None:
        seed, seeds = self.seeds(ids)
        options, each = self.options(ids)
        before = deepcopy(options)
        self.note("reset", ids if not whole else "")
        result = self.envs.reset(seed=seed, options=options, env_ids=None if whole else self.chosen(ids))
        assert options == before, "the caller's options are the caller's"
        self.ask_reset("reset", ids, seeds, each)
        self.take_rows(result)

    def reset_all(self) -> None:
        self.reset(self.everyone)

    def reset_some(self) -> None:
        self.reset(self.some(self.everyone), whole=False)

    def reset_homeless(self) -> None:
        self.reset(sorted(self.homeless), whole=False)

    def reset_over(self) -> None:
        """Reset envs that would have reset themselves in the next step."""
        self.reset([i for i in self.everyone if self.reference.worlds[i].over], whole=False)

    def empty_reset(self) -> None:
        self.reset([], whole=False)

    def reset_send(self) -> None:
        ids = self.some(self.everyone)
        seed, seeds = self.seeds(ids)
        options, each = self.options(ids)
        self.note("reset_send", ids)
        self.envs.reset_send(seed=seed, options=options, env_ids=self.chosen(ids))
        self.ask_reset("reset", ids, seeds, each)

    # --- envs as they become ready

    def stream(self) -> None:
        """Send to some envs that are free, in any order."""
        free = [i for i in self.everyone if i not in self.asked]
        ids = self.some([i for i in free if i not in self.homeless])
        if lost := [i for i in free if i in self.homeless]:
            with pytest.raises(NotResetError):
                self.envs.send(public(self.envs, self.draw(lost)), lost)
        actions = self.draw(ids)
        self.note("send", ids)
        everyone = ids == self.everyone and self.chance(0.3)
        self.envs.send(self.said(ids, actions), None if everyone else self.chosen(ids))
        if ids:
            self.ask("send", ids, deepcopy(actions))
        spoil(actions)

    def async_reset(self) -> None:
        free = [i for i in self.everyone if i not in self.asked]
        ids = self.some(free)
        seed, seeds = self.seeds(ids)
        options, each = self.options(ids)
        self.note("async_reset", ids)
        self.envs.async_reset(seed=seed, options=options, env_ids=self.chosen(ids))
        if ids:
            self.ask_reset("async_reset", ids, seeds, each)

    def recv(self) -> None:
        least = int(self.rng.integers(1, len(self.asked) + 1)) if self.asked else None  # it may be a reset of nobody
        timeout = self.pick([None, None, 0.0])
        self.note("recv", least)
        try:
            step = self.envs.recv(least, timeout)
        except FetchTimeout:
            assert timeout is not None
            return
        assert len(step) >= (least or 0)
        self.take_step(step)

    def drain(self) -> None:
        self.note("drain")
        step = self.envs.drain()
        assert sorted(step.env_ids.tolist()) == sorted(self.asked)
        self.take_step(step)

    # --- calls that change nothing

    def refused(self) -> None:
        """While something is under way, all else is refused by name, says what to do first, and costs nothing."""
        envs = self.envs
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: envs.step(None),
            "step_send": lambda: envs.step_send(None),
            "reset": lambda: envs.reset(),
            "reset_send": lambda: envs.reset_send(env_ids=[0]),
            "call": lambda: envs.call("clock"),
            "call_send": lambda: envs.call_send("clock"),
            "get_attr": lambda: envs.get_attr("note"),
            "set_attr": lambda: envs.set_attr("note", 13),
            "exec_func": lambda: envs.exec_func(id),
            "render": lambda: envs.render(),
            "env_is_wrapped": lambda: envs.env_is_wrapped(gymnasium.Wrapper),
        }
        name = self.pick(list(calls))
        self.note("refused", name)
        streams = self.pending in ("send", "async_reset")
        first = r"recv\(\) or drain\(\) the rest" if streams else rf"{self.pending}_fetch\(\)"
        told = rf"({name}|{name.removesuffix('_send')})\(\) while {self.pending}\(\) is pending; {first} first"
        with pytest.raises(BusyError, match=told):
            calls[name]()
        busy = list(self.asked) or self.everyone
        of_some = [lambda: envs.send(None, busy[:1]), lambda: envs.async_reset(env_ids=busy[-1:])]
        of_some += [lambda: envs.agents_at(busy[0]), lambda: envs.random_action(env_ids=busy[:1])]
        with pytest.raises(BusyError):
            self.pick(of_some)()
        fetches = {"step": envs.step_fetch, "reset": envs.reset_fetch, "call": envs.call_fetch}
        other = self.pick([call for call in fetches if call != self.pending])
        with pytest.raises(NothingPendingError, match=rf"{other}_fetch\(\): {self.pending}\(\) is pending"):
            fetches[other]()

    def wrong_call(self) -> None:
        self.note("wrong call")
        envs = self.envs
        fetches = [envs.step_fetch, envs.reset_fetch, envs.recv, envs.call_fetch, envs.exec_func_fetch]
        with pytest.raises(NothingPendingError, match="nothing"):
            self.pick(fetches)()
        self.take_step(envs.drain())

    def look(self) -> None:
        """What can be read without asking an env, and the global state."""
        self.note("look")
        for space in (self.envs.observation_space, self.envs.single_action_space, self.envs.agent_action_space(0)):
            try:
                space.sample()  # of the caller's own, which no env draws from
            except ValueError as error:  # Gymnasium's, for a Box up to int64's largest: it adds 1
                assert "high - low < 0" in str(error)  # noqa: PT017  (most samples raise nothing)
        i = self.pick(self.everyone)
        alive = self.reference.worlds[i].alive
        assert self.envs.agents_at(i) == tuple(self.envs.agents[a] for a in sorted(alive))
        frame = self.reference.frame(self.everyone)
        if frame.state is not None and not self.homeless:
            assert_same(self.envs.state(), frame.state, "state()")
            for world, state in zip(self.reference.worlds, frame.state, strict=True):
                world.state = state  # told with the next result, if this env is not asked again before

    # --- control

    def control(self) -> None:
        """Ask some envs something."""
        ids = self.some(self.everyone)
        k = int(self.rng.integers(100))
        ask, same = self.pick(
            [
                (lambda who: self.envs.call("clock", indices=who), lambda env, j: env.clock()),
                (lambda who: self.envs.call("nudge", k, indices=who), lambda env, j: env.nudge(k)),
                (lambda who: self.envs.exec_func(lambda env: env.nudge(k), who), lambda env, j: env.nudge(k)),
                (lambda who: self.envs.exec_func(nudged, who, by=k), lambda env, j: nudged(env, by=k)),
                (lambda who: self.envs.get_attr("note", who), lambda env, j: env.note),
                (lambda who: self.envs.set_attr("note", [k], who), lambda env, j: setattr(env, "note", [k])),
                (
                    lambda who: self.envs.set_attr("note", PerEnv([k + i for i in ids]), who),
                    lambda env, j: setattr(env, "note", k + ids[j]),
                ),
                (lambda who: self.envs.env_is_wrapped(gymnasium.Wrapper, who), lambda env, j: False),
            ]
        )
        self.note("control", ids)
        answers = ask(self.chosen(ids))
        expected = tuple(same(self.reference.worlds[i].driver.env, j) for j, i in enumerate(ids))
        assert_trees_equal(answers if answers is not None else (None,) * len(ids), expected, "answers")

    def control_send(self) -> None:
        ids = self.some(self.everyone)
        if not ids:
            return
        k = int(self.rng.integers(100))
        self.pending = self.pick(["call", "exec_func"])
        self.note(f"{self.pending}_send", ids)
        if self.pending == "call":
            self.envs.call_send("nudge", k, indices=ids)
        else:
            self.envs.exec_func_send(nudged, ids, by=k)
        self.answers = tuple(self.reference.worlds[i].driver.env.nudge(k) for i in ids)

    def control_fetch(self) -> None:
        fetch = self.envs.call_fetch if self.pending == "call" else self.envs.exec_func_fetch
        timeout = self.pick([None, 0.0])
        self.note(f"{self.pending}_fetch", timeout)
        try:
            answers = fetch(timeout)
        except FetchTimeout:
            assert timeout is not None
            return
        self.pending = None
        assert_trees_equal(answers, self.answers, "answers")

    # --- what is asked

    def ask(self, call: str, ids: Sequence[int], actions: list[Any]) -> None:
        self.pending = call
        for k, i in enumerate(ids):
            own = deepcopy([sliced(part, slice(k, k + 1)) for part in actions])
            self.asked[i] = lambda i=i, own=own: self.reference.step([i], own)

    def ask_reset(self, call: str, ids: Sequence[int], seeds: Sequence[int | None], options: Sequence[Any]) -> None:
        self.pending = call
        self.homeless |= set(ids)
        for i, seed, option in zip(ids, seeds, options, strict=True):
            self.asked[i] = lambda i=i, seed=seed, option=option: self.reference.reset([i], [seed], option)

    def draw(self, ids: Sequence[int]) -> list[Any]:
        """Actions that the envs allow, per group; whoever does not act says anything."""
        seats, out = self.setup.design.seats, []
        for group in self.reference.groups:
            matter = Matter(int(self.rng.integers(2**62)), wild=False)
            rows = [[self.legal(i, a, matter) for a in group.agents] for i in ids or [0]]
            actions = sliced(stack(seats[group.agents[0]].action, rows), slice(len(ids)))
            idle = np.array(
                [[a not in self.reference.worlds[i].acting for a in group.agents] for i in ids], bool
            ).reshape(len(ids), len(group.agents))
            for leaf in flatten(actions):
                leaf[idle] = "nonsense" if leaf.dtype == object else matter.array(leaf.dtype, leaf[idle].shape)
            out.append(actions)
        return out

    def said(self, ids: Sequence[int], actions: list[Any]) -> Any:
        """Actions in one of the forms that a vectorizer takes: as arrays, by agent, or by env those of who acts."""
        form, names = self.pick(["arrays", "arrays", "by agent", "by env"] if ids else ["arrays"]), self.envs.agents
        if form == "arrays":
            return public(self.envs, actions)
        if form == "by agent":
            groups = zip(self.reference.groups, actions, strict=True)
            return {names[a]: column(part, j) for group, part in groups for j, a in enumerate(group.agents)}
        said: list[dict[str, Any]] = [{} for _ in ids]
        for group, part in zip(self.reference.groups, actions, strict=True):
            for k, i in enumerate(ids):
                for j, a in enumerate(group.agents):
                    if a in self.reference.worlds[i].acting:
                        said[k][names[a]] = pick(self.setup.design.seats[a].action, part, k, j)
                    elif self.chance(0.5):
                        said[k][names[a]] = None
        return said

    def legal(self, i: int, a: int, matter: Matter) -> Any:
        seat, world = self.setup.design.seats[a], self.reference.worlds[i]
        mask = world.masks.get(a)
        if mask is None or a not in world.acting:
            return matter.member(seat.action)
        action: Any = seat.action
        if isinstance(action, gymnasium.spaces.Discrete):
            return action.start + self.rng.choice(np.flatnonzero(mask))
        bounds = np.cumsum(action.nvec.ravel())[:-1]
        choices = [self.rng.choice(np.flatnonzero(part)) for part in np.split(mask, bounds)]
        return (np.reshape(choices, action.shape) + action.start).astype(action.dtype)

    def random_actions(self) -> list[Any]:
        """The vectorizer's own, which must be legal; the envs see to that."""
        seed = int(self.rng.integers(2**32))
        actions, again = self.envs.random_action(seed), self.envs.random_action(seed)
        assert_trees_equal(actions, again, "random actions of one seed")
        return [actions[group.name] if self.envs.grouped else actions for group in self.envs.spec.groups]

    def seeds(self, ids: list[int]) -> tuple[Any, list[int | None]]:
        """Seeds as they are given, and what they come to."""
        match self.rng.integers(4):
            case 0:
                return None, [None] * len(ids)
            case 1:
                seed = int(self.rng.integers(2**63))
                return self.pick([seed, np.uint64(seed)]), [env_seeds(seed, self.setup.n)[i] for i in ids]
            case _:
                each = [None if self.chance(0.4) else int(self.rng.integers(2**32)) for _ in ids]
                return self.pick([each, tuple(each)]), each

    def options(self, ids: list[int]) -> tuple[Any, list[Any]]:
        """Options as they are given, and what they come to."""
        one = {"salt": int(self.rng.integers(9)), "deep": [1]}
        match self.rng.integers(4):
            case 0:
                return one, [deepcopy(one) for _ in ids]
            case 1:
                each = [None if self.chance(0.5) else {"salt": i + 1, "deep": []} for i in ids]
                return each, deepcopy(each)
            case _:
                return None, [None] * len(ids)

    def some(self, ids: list[int]) -> list[int]:
        """Some of these, in any order."""
        return self.rng.permutation(ids)[: int(self.rng.integers(len(ids) + 1))].tolist() if ids else []

    def chosen(self, ids: list[int]) -> Any:
        """These envs in one of the forms in which they may be named; a mask names them in ascending order."""
        if ids == sorted(ids) and self.chance(0.5):
            return np.isin(self.everyone, ids)
        return self.pick([ids, tuple(ids), np.array(ids, np.int32)])

    # --- what comes back

    def take_rows(self, result: tuple[Any, ...]) -> None:
        """The result of a reset or step: rows of all envs, whoever was asked."""
        for world in self.reference.worlds:
            world.infos, world.final_infos = {}, {}  # those of envs that were not asked are not told again
        frame = self.answered(list(self.asked), self.everyone)
        obs, *numbers, infos = result
        if numbers:
            rewards, terminated, truncated = numbers
            assert_same(rewards, frame.rewards, "rewards")
            assert_same(terminated, frame.flags["terminated"], "terminated")
            assert_same(truncated, frame.flags["truncated"], "truncated")
        check_leaves(leaves_of(self.envs, obs), frame.obs, "obs")
        check_infos(self.envs, infos, frame, "infos", stepped=True)
        self.hold(result)

    def take_step(self, step: VectorStep) -> None:
        """Rows of some envs."""
        ids = step.env_ids.tolist()
        if len(ids) == self.setup.n:
            assert ids == self.everyone, "all come in order"
        check_row_step(self.envs, step, self.answered(ids, ids), f"envs {ids}")
        self.hold((step.obs_leaves, step.rewards, step.terminated, step.alive, step.infos))

    def answered(self, asked: list[int], ids: list[int]) -> Frame:
        """Let the reference do what these envs were asked."""
        for i in asked:
            assert i in self.asked, f"env {i} was asked nothing"
            self.asked.pop(i)()
            over = self.reference.mode == "disabled" and self.reference.worlds[i].over
            (self.homeless.add if over else self.homeless.discard)(i)
        self.pending = self.pending if self.asked else None
        return self.reference.frame(ids)

    def hold(self, result: Any) -> None:
        """What was handed out before must still be as it was; keep this, or overwrite it, which nobody must notice."""
        for array, data in self.held:
            assert array.tobytes() == data, "what was handed out has changed"
        self.held = []
        if self.setup.copy:
            arrays = arrays_in(result)
            assert all(array.flags.writeable for array in arrays), "copies are the caller's own"
            if self.chance(0.7):
                self.held = [(array, array.tobytes()) for array in arrays]
            else:
                for array in arrays:
                    array.fill(1)

    # --- small things

    def note(self, *words: Any) -> None:
        """Write down the next call."""
        self.history.append(" ".join(str(word) for word in words if word != ""))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]


def nudged(env: Any, *, by: int) -> Any:
    return env.nudge(by)


def sliced(actions: Any, rows: slice) -> Any:
    """Copies of some rows of a tree of actions."""
    if isinstance(actions, dict):
        return {key: sliced(part, rows) for key, part in actions.items()}
    return tuple(sliced(part, rows) for part in actions) if isinstance(actions, tuple) else actions[rows].copy()


def column(actions: Any, j: int) -> Any:
    """One agent's actions in a tree of a group's."""
    if isinstance(actions, dict):
        return {key: column(part, j) for key, part in actions.items()}
    return tuple(column(part, j) for part in actions) if isinstance(actions, tuple) else actions[:, j]


def spoil(actions: list[Any]) -> None:
    """Overwrite actions that were sent: they are the caller's."""
    for part in actions:
        for leaf in flatten(part):
            leaf.fill(0)


def arrays_in(value: Any) -> list[NDArray[Any]]:
    """All arrays in nested dicts, lists and tuples, and in arrays of objects."""
    if isinstance(value, np.ndarray):
        return [value] if value.dtype != object else arrays_in(list(value.flat))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [array for part in parts for array in arrays_in(part)]
