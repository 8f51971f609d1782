"""Objects of one process: a fork of it, pickle and copy refuse them with a typed error, at once."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import marlvec
from marlvec import Collector, Recorder, external
from marlvec.errors import SerialisationError
from marlvec.policies import RandomPolicy
from tests.vector.support.kinds import BACKENDS


def in_fork(call: Callable[[], Any]) -> str:
    """Return what a call in a forked process gave: its error's class and text, or "no error"."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of processes with threads
        child = os.fork()
    if not child:
        text = "no error"
        try:
            signal.alarm(60)  # ends a child that hangs
            call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(theirs, text.encode())
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@contextmanager
def made(backend: str) -> Iterator[Any]:
    env = "simple_spread" if backend == "native" else "CartPole-v1"
    with marlvec.make(env, num_envs=2, backend=backend) as envs:
        yield envs


@pytest.mark.parametrize("backend", [*BACKENDS, "native", "pool"])
def test_a_fork_can_neither_collect_nor_wait_for_workers_of_its_parent(backend: str) -> None:
    with made(backend) as envs, made("sync" if backend == "native" else backend) as others:
        collector = Collector(envs, RandomPolicy())
        collector.collect(env_steps=4)
        calls: dict[str, Callable[[], Any]] = {
            "collect()": lambda: collector.collect(env_steps=4),
            "evaluate()": lambda: collector.evaluate(1, others),
            "reset()": collector.reset,
            "background()": lambda: collector.background(env_steps=4),
        }
        for name, call in calls.items():
            assert in_fork(call).startswith(f"StateError: {name} in process"), name
        with collector.background(env_steps=4) as batches:
            next(batches)
            assert in_fork(lambda: next(batches)).startswith("StateError: next() in process")
            assert in_fork(batches.close) == "no error"
            next(batches)
        collector.collect(env_steps=4)
        envs.reset()
        actions = envs.random_action()
        for call in (lambda: envs.step(actions), envs.reset, lambda: envs.render()):
            text = in_fork(call)
            if backend in ("sync", "native"):  # they have all that they need
                assert "fork of process" not in text
            else:
                assert text.startswith("StateError: ")
                assert f"a fork of process {os.getpid()}, which made this {type(envs).__name__}" in text
        assert in_fork(envs.close) == "no error"
        envs.step(actions)


def test_a_fork_leaves_recorders_servers_and_clients_to_its_parent(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with ExitStack() as stack:
        envs = stack.enter_context(made("sync"))
        recorder = stack.enter_context(Recorder(tmp_path / "data"))
        collector = Collector(envs, RandomPolicy(), callbacks=[recorder])
        batch = collector.collect(env_steps=4)
        for call in (lambda: recorder.write(batch), recorder.flush):
            assert in_fork(call).startswith("StateError: Recorder(")
        assert in_fork(recorder.close) == "no error"
        outside = stack.enter_context(external.make("CartPole-v1", num_envs=2))
        driver = external.ExternalEnv(outside)
        server = stack.enter_context(external.Server(outside, token="a" * 32))
        client = stack.enter_context(external.Client(server.url, token="a" * 32, timeout=20))
        texts = {
            "an episode": [client.start_episode, driver.start_episode],
            "publish()": [lambda: server.publish(RandomPolicy())],
            "reset()": [outside.reset],
        }
        for name, calls in texts.items():
            for call in calls:
                assert in_fork(call).startswith(f"StateError: {name} in process"), name
        assert [in_fork(one.close) for one in (client, server)] == ["no error"] * 2
        client.start_episode()  # still connected
        collector.collect(env_steps=4)
    assert marlvec.load_dataset(tmp_path / "data").env_steps == 8


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_pickle_and_copy_say_what_to_do_instead(how: Callable[[Any], Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        every = [stack.enter_context(made(backend)) for backend in [*BACKENDS, "native", "pool"]]
        collector = Collector(every[0], RandomPolicy())
        outside = stack.enter_context(external.make("CartPole-v1", num_envs=2))
        others = [collector, collector.background(env_steps=4), outside, external.ExternalEnv(outside)]
        others += [stack.enter_context(external.Server(outside, token="a" * 32))]
        others += [stack.enter_context(Recorder(tmp_path / "data"))]
        for one in [*every, *others]:
            with pytest.raises(
                SerialisationError, match=f"^{type(one).__name__} cannot be pickled or copied: .*; .* in each"
            ):
                how(one)
