"""A shard: phases of its envs, the three autoreset modes, and when an episode is over."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec import AsyncVectorEnv, SyncVectorEnv, VectorEnv, infos_to_list
from marlvec.envs import MultiAgentEnv, Slot
from marlvec.errors import ArgumentError, ContractError, EnvRaised, NotResetError
from marlvec.testing import CounterEnv, Script, ScriptedParallelEnv, decode, decode_reward
from marlvec.vector.buffers import Buffers
from marlvec.vector.settings import Settings
from marlvec.vector.shard import TRANSITIONS, BatchedPhases, EnvEvent, EnvPhase, EnvPhases, Shard
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, acts, hooked, vectorize
from tests.vector.support.reference import MODES, refused

# The phases of a shard's envs: the table under random events, and a shard that is driven at random against a model.


N = 3


@given(st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from(EnvEvent)), max_size=60))
def test_phases_follow_the_table_and_nothing_else(events: list[tuple[int, EnvEvent]]) -> None:
    phases, model = EnvPhases(N), [EnvPhase.UNREADY] * N
    for i, event in events:
        if (after := TRANSITIONS[event].get(model[i])) is None:
            refused(KeyError, "", phases.on, i, event)
        else:
            phases.on(i, event)
            model[i] = after
        assert [phases[k] for k in range(N)] == model
        assert phases.special == {k for k in range(N) if model[k] is not EnvPhase.RUNNING}


@pytest.mark.slow("plays whole episodes in worker processes")
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.tuples(st.lists(st.integers(0, n - 1), unique=True).map(sorted), st.sampled_from(EnvEvent)), max_size=40
        ).map(lambda events: (n, events))
    )
)
def test_phases_of_a_batch_follow_the_table_all_or_none(given_: tuple[int, list[tuple[list[int], EnvEvent]]]) -> None:
    n, events = given_
    phases, model = BatchedPhases(n), [EnvPhase.UNREADY] * n
    for ids, event in events:
        rows = slice(None) if len(ids) == n else np.array(ids, np.int64)
        table = TRANSITIONS[event]
        if wrong := {model[i].name for i in ids if model[i] not in table}:
            refused(KeyError, f"{event.name} of envs that are {', '.join(sorted(wrong))}", phases.on, rows, event)
        else:
            phases.on(rows, event)
            for i in ids:
                model[i] = table[model[i]]
        assert phases.values.tolist() == model
        for phase in EnvPhase:
            assert phases.are_all(rows, phase) == all(model[i] is phase for i in ids)
            assert phases.where(rows, phase).tolist() == [model[i] is phase for i in ids]


def test_every_phase_is_reached_and_left() -> None:
    reached = {after for row in TRANSITIONS.values() for after in row.values()}
    left = {before for row in TRANSITIONS.values() for before, after in row.items() if before is not after}
    assert reached | {EnvPhase.UNREADY} == left == set(EnvPhase)
    assert set(TRANSITIONS) == set(EnvEvent)


class Puppet(MultiAgentEnv):
    """Does in its next call what it is told to: ``"go on"``, ``"end"``, ``"raise"`` or ``"follow"`` (by itself)."""

    name = "puppet"
    agents = ("a",)
    observation_spaces = (Box(-1, 1, (1,)),)
    action_spaces = (Discrete(2),)
    state_space = None

    def __init__(self, orders: dict[str, str], *, resets_itself: bool) -> None:
        if orders["build"] == "raise":
            raise RuntimeError("not built")
        self.orders, self.resets_itself = orders, resets_itself

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if self.orders["reset"] == "raise":
            raise RuntimeError("not reset")
        if self.orders["reset"] == "end":
            return  # nobody is alive
        slot.write_obs(0, np.ones(1, np.float32))
        slot.alive[0] = slot.acting[0] = True

    def step(self, slot: Slot) -> None:
        order = self.orders["step"]
        if order == "raise":
            raise RuntimeError("not stepped")
        if order == "end":
            slot.terminated[0] = True
            slot.done = True
            slot.alive[0] = slot.acting[0] = False
        if order == "end" and self.resets_itself:
            slot.write_final(0, np.zeros(1, np.float32))
            slot.begun = True
            slot.alive[0] = slot.acting[0] = True


OPERATIONS = st.sampled_from(["reset", "step", "step", "step", "restart", "wait", "rebuild"])
ORDERS = st.fixed_dictionaries(
    {
        "build": st.sampled_from(["go on", "go on", "raise"]),
        "reset": st.sampled_from(["go on", "go on", "raise", "end"]),
        "step": st.sampled_from(["go on", "go on", "end", "raise"]),
    }
)


def expected(phase: EnvPhase, operation: str, orders: dict[str, str], mode: str, *, resets_itself: bool) -> EnvPhase:
    """The table of transitions as prose has it, for one operation from beginning to end."""
    begun = EnvPhase.BEGUN if orders["reset"] == "go on" else EnvPhase.UNREADY
    if operation == "rebuild":  # with the next episode
        return begun if orders["build"] == "go on" else EnvPhase.ABSENT
    if operation in ("reset", "restart"):
        return EnvPhase.ABSENT if phase is EnvPhase.ABSENT and orders["build"] != "go on" else begun
    if operation == "wait":  # without one
        return EnvPhase.OVER if orders["build"] == "go on" else EnvPhase.ABSENT
    if phase is EnvPhase.ABSENT:
        return phase
    if phase is EnvPhase.OVER and mode == "next_step":
        return begun
    if phase in (EnvPhase.OVER, EnvPhase.UNREADY) or orders["step"] == "raise":
        return EnvPhase.UNREADY
    if orders["step"] == "go on":
        return EnvPhase.RUNNING
    if resets_itself:
        return EnvPhase.BEGUN
    return begun if mode == "same_step" else EnvPhase.OVER


@pytest.mark.slow("plays whole episodes in worker processes")
@given(
    mode=st.sampled_from(MODES),
    resets_itself=st.booleans(),
    calls=st.lists(st.tuples(OPERATIONS, st.lists(ORDERS, min_size=N, max_size=N)), max_size=20),
)
def test_a_shard_goes_where_the_table_says(
    mode: str, resets_itself: bool, calls: list[tuple[str, list[dict[str, str]]]]
) -> None:
    resets_itself = resets_itself and mode == "same_step"
    orders = [{"build": "go on", "reset": "go on", "step": "go on"} for _ in range(N)]
    factories = [lambda own=own: Puppet(own, resets_itself=resets_itself) for own in orders]
    shard = Shard(factories, 0, Settings(autoreset_mode=mode))
    buffers = Buffers(shard.spec, N)
    shard.attach(buffers)
    nothing, ids = [None] * N, range(N)
    model = [EnvPhase.UNREADY] * N
    for operation, given_orders in calls:
        for own, new in zip(orders, given_orders, strict=True):
            own.update(new)
        had_finals = buffers.final_obs[0][0].any(axis=(1, 2))
        before = list(model)
        model = [
            expected(phase, operation, own, mode, resets_itself=resets_itself)
            for phase, own in zip(model, orders, strict=True)
        ]
        if operation == "step":
            report = shard.step(ids)
        elif operation == "reset":
            report = shard.reset(ids, nothing, nothing)
        else:
            anew, begin = operation in ("rebuild", "wait"), operation != "wait"
            # As `Recovery` has it: what is to be built anew is; what is there is only begun anew.
            build = [anew or phase is EnvPhase.ABSENT for phase in before]
            report = shard.restart(ids, nothing, nothing, build, [begin] * N, [False] * N)
        assert [shard._phases[i] for i in ids] == model
        failed = {failure.env_id for failure in report.failures}
        assert failed == {i for i in ids if model[i] in (EnvPhase.UNREADY, EnvPhase.ABSENT)}
        for i in ids:
            there = model[i] in (EnvPhase.BEGUN, EnvPhase.RUNNING)
            assert not there or buffers.alive[i, 0]
            if operation == "step" and before[i] is EnvPhase.BEGUN and not buffers.done[i]:
                assert not buffers.final_obs[0][0][i].any(), "final observations go with the first step of the next"
            if operation == "step" and before[i] is EnvPhase.RUNNING and not buffers.done[i]:
                assert buffers.final_obs[0][0][i].any() == had_finals[i]
    assert shard.close() == []


# The three autoreset modes, read off the stamps in the data; final observations; masks; who is in the episode.


A = 2
LENGTHS = (2, 3, 5)  # of env 0, 1, 2


def scripted(backend: str, mode: str, **options: Any) -> VectorEnv:
    """Three envs whose episodes have different lengths, and which say in every info when it was."""
    factories = []
    for i, length in enumerate(LENGTHS):
        infos = {(t, a): {"t": t} for t in range(length + 1) for a in range(A)}
        script = Script([0] * A, [length] * A, ["terminated", "truncated"], infos)
        factories.append(partial(ScriptedParallelEnv, script, agent_num=A, env_index=i, **options))
    return vectorize(backend, factories, autoreset_mode=mode)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(43)
def test_the_mode_is_the_instances_and_nothing_else_is_one() -> None:
    for backend in BACKENDS:
        vectorizers = [vectorize(backend, [CounterEnv], autoreset_mode=mode) for mode in MODES]
        for mode, envs in zip(MODES, vectorizers, strict=True):
            with envs:
                assert envs.metadata["autoreset_mode"] == envs.autoreset_mode == mode
                assert envs.metadata["name"] == "scripted_parallel", "the envs' own stays"
        for cls in (VectorEnv, SyncVectorEnv, AsyncVectorEnv):
            assert "autoreset_mode" not in getattr(cls, "metadata", {})
        with vectorize(backend, [CounterEnv]) as envs:
            assert envs.autoreset_mode == "same_step"
        with pytest.raises(ArgumentError, match="autoreset_mode must be one of"):
            vectorize(backend, [CounterEnv], autoreset_mode="later")


@pytest.mark.checklist(45)
@pytest.mark.checklist(46)
@pytest.mark.fault("C13")
@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_same_step(backend: str, reuse_buffer: bool) -> None:
    with scripted(backend, "same_step", reuse_buffer=reuse_buffer) as envs:
        _, infos = envs.reset(seed=1)
        assert "final_info" not in infos
        assert "final_observation" not in infos
        for step in range(1, 31):
            obs, rewards, terminated, truncated, infos = envs.step(acts(envs))
            over = [step % length == 0 for length in LENGTHS]
            assert terminated.tolist() == [[end, False] for end in over]
            assert truncated.tolist() == [[False, end] for end in over]
            assert infos["alive"].all(), "the next episode runs already"
            assert ("final_observation" in infos) == ("final_info" in infos) == any(over)
            own = infos_to_list(infos, envs.agents, N)
            if any(over):
                assert infos["final_observation"].shape == (N, A, 7)
                assert infos["_final_observation"].tolist() == infos["_final_info"].tolist() == over
                final_own = infos_to_list(infos["final_info"], envs.agents, N)
            for i, length in enumerate(LENGTHS):
                episode, t = (step - 1) // length, (step - 1) % length + 1
                for a in range(A):
                    assert decode_reward(rewards[i, a]) == (episode, t, a, 1)
                    if over[i]:
                        assert decode(infos["final_observation"][i, a]) == (i, 0, episode, t, a)
                        assert decode(obs[i, a]) == (i, 0, episode + 1, 0, a)
                    else:
                        assert decode(obs[i, a]) == (i, 0, episode, t, a)
                told = {f"agent_{a}": {"t": 0 if over[i] else t} for a in range(A)}
                assert own[i] == told, "of the reset, where there was one"
                if any(over):
                    assert final_own[i] == ({f"agent_{a}": {"t": length} for a in range(A)} if over[i] else {})


@pytest.mark.checklist(46)
@pytest.mark.checklist(49)
@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_next_step(backend: str, reuse_buffer: bool) -> None:
    """The vectorizer's half of line 49; that the collector drops the row is shown in tests/collect."""
    with scripted(backend, "next_step", reuse_buffer=reuse_buffer) as envs:
        envs.reset(seed=1)
        for step in range(1, 37):
            places = [(step % (length + 1), step // (length + 1)) for length in LENGTHS]  # 0: the autoreset
            wild = acts(envs)
            wild[[t == 0 for t, _ in places]] = 99  # is ignored, so may be anything
            obs, rewards, terminated, truncated, infos = envs.step(wild)
            assert infos["reset_mask"].tolist() == [t == 0 for t, _ in places]
            for i, (t, episode) in enumerate(places):
                over = t == LENGTHS[i]
                assert terminated[i].tolist() == [over, False]
                assert truncated[i].tolist() == [False, over]
                assert infos["alive"][i].all() == infos["acting"][i].all() == (not over)
                assert infos["alive"][i].any() == infos["acting"][i].any() == (not over)
                for a in range(A):
                    assert decode(obs[i, a]) == (i, 0, episode, t, a)
                    if t == 0:
                        assert rewards[i, a] == 0
                    else:
                        assert decode_reward(rewards[i, a]) == (episode, t, a, 1)
                    if over:
                        assert decode(infos["final_observation"][i, a]) == (i, 0, episode, t, a)


@pytest.mark.checklist(46)
@pytest.mark.checklist(50)
@pytest.mark.fault("B9")
@pytest.mark.parametrize("reuse_buffer", [False, True])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_disabled(backend: str, reuse_buffer: bool) -> None:
    with scripted(backend, "disabled", reuse_buffer=reuse_buffer) as envs:
        envs.reset(seed=1)
        t, episodes = [0] * N, [0] * N
        ended: list[int] = []
        while min(episodes) < 3:
            if ended:
                for call in (envs.step, envs.step_send, envs.send):
                    refused(NotResetError, rf"envs \[{', '.join(map(str, ended))}\]", call, acts(envs))
                refused(NotResetError, rf"envs \[{ended[0]}\]", envs.send, acts(envs)[:1], ended[:1])
                obs, infos = envs.reset(env_ids=ended)
                for i in ended:
                    t[i], episodes[i] = 0, episodes[i] + 1
                assert infos["alive"].all()
                assert [decode(row[0])[2:4] for row in obs] == list(zip(episodes, t, strict=True))
            obs, _, terminated, truncated, infos = envs.step(acts(envs))
            t = [x + 1 for x in t]
            ended = [i for i, length in enumerate(LENGTHS) if t[i] == length]
            for i in range(N):
                assert [decode(row) for row in obs[i]] == [(i, 0, episodes[i], t[i], a) for a in range(A)]
                assert (terminated | truncated)[i].all() == (i in ended)
                assert infos["alive"][i].any() == (i not in ended)
            if ended:
                assert infos["_final_observation"].tolist() == [i in ended for i in range(N)]
                assert infos["final_observation"][ended].tobytes() == obs[ended].tobytes()


def empty_second_reset(env: Any, reset: Any, *args: Any, **options: Any) -> Any:
    result = reset(*args, **options)
    if env.world.episode == 1 and env.world.env_index == 1:
        env.agents = []
        return {}, {}
    return result


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.checklist(53)
@pytest.mark.fault("D5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_env_that_is_over_right_after_its_reset(backend: str, mode: str) -> None:
    factories = [
        partial(hooked, CounterEnv, 2, agent_num=A, env_index=i, hooks={"reset": empty_second_reset}) for i in range(N)
    ]
    with vectorize(backend, factories, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        with pytest.raises(ContractError, match="env 1.*at least one live agent") as caught:
            envs.step(acts(envs))
            envs.step(acts(envs)) if mode == "next_step" else envs.reset(env_ids=[0, 1, 2])
        assert isinstance(caught.value, EnvRaised)
        assert caught.value.env_ids == (1,)
        refused(NotResetError, r"envs \[1\]", envs.step, acts(envs))
        envs.reset(env_ids=[1])
        for _ in range(6 if mode != "disabled" else 1):
            envs.step(acts(envs))


# When an episode is over: when all agents have ended, in any mixture, or when the first has.


# Agent 0 is terminated in step 2, agent 1 truncated in step 4, agent 2 both in step 5.
MIXED = Script(births=[0, 0, 0], deaths=[2, 4, 5], ends=["terminated", "truncated", "both"])


def run(backend: str, done_on: str, script: Script, steps: int) -> list[tuple]:
    rows = []
    with marlvec.make(lambda: ScriptedParallelEnv(script), num_envs=2, backend=backend, done_on=done_on) as envs:
        envs.reset(seed=3)
        for _ in range(steps):
            envs.send(np.ones((2, 3), np.int64))
            rows.append(envs.recv())
    return rows


@pytest.mark.checklist(44)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_episode_is_over_when_every_agent_has_ended_in_any_mixture(backend: str) -> None:
    steps = run(backend, "all", MIXED, 16)
    assert [bool(step.done.all()) for step in steps] == [t % 5 == 0 for t in range(1, 17)]
    for t, step in enumerate(steps, start=1):
        k = (t - 1) % 5 + 1
        assert step.terminated.tolist() == [[k == 2, False, k == 5]] * 2
        assert step.truncated.tolist() == [[False, k == 4, k == 5]] * 2
        # After the last step of an episode these are the next one's.
        assert step.alive.tolist() == [[k < 2 or k == 5, k < 4 or k == 5, True]] * 2


@pytest.mark.checklist(44)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_with_done_on_any_the_first_end_is_the_end_of_all(backend: str) -> None:
    steps = run(backend, "any", MIXED, 10)
    for t, step in enumerate(steps, start=1):
        over = t % 2 == 0
        assert step.done.tolist() == [over] * 2
        assert step.terminated.tolist() == [[over, False, False]] * 2
        assert step.truncated.tolist() == [[False, over, over]] * 2  # the others were still alive: their time is up
        assert step.alive.all()
        if over:  # everybody's final observation is of step 2 of the episode that ended
            stamps = [[decode(row) for row in rows] for rows in step.final_leaves[0][0]]
            assert {stamp.t for rows in stamps for stamp in rows} == {2}
            assert {stamp.episode for rows in stamps for stamp in rows} == {t // 2 - 1}


def test_an_unknown_done_on_is_refused() -> None:
    with pytest.raises(marlvec.errors.ArgumentError, match="done_on must be one of 'all', 'any', got 'some'"):
        marlvec.make(ScriptedParallelEnv, num_envs=2, done_on="some")
