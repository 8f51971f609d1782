"""Objects of one process: a fork of it, pickle and copy refuse them with a typed error, at once."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import marlvec
from marlvec import Collector, Recorder, RecordVideo, external
from marlvec.cli.game import PageServer
from marlvec.collect.loggers import JSONLinesLogger, TensorBoardLogger
from marlvec.distributed import Collectors, Place
from marlvec.envs.video import VideoFile, find_ffmpeg
from marlvec.errors import SerialisationError
from marlvec.policies import RandomPolicy
from tests.painter import SMALLEST, PainterEnv, frames_of
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


def test_a_fork_writes_nothing_into_its_parents_logs(tmp_path: Path) -> None:
    """Both would write into one file, and a fork's close would repeat what its parent has not written yet."""
    pytest.importorskip("tensorboard")
    board, lines = TensorBoardLogger(tmp_path / "board"), JSONLinesLogger(tmp_path / "lines")
    (events,) = (tmp_path / "board").iterdir()
    with board, lines, made("sync") as envs:
        collector = Collector(envs, RandomPolicy(), callbacks=[board, lines], seed=0)
        batch = collector.collect(episodes=2)
        record = collector.metrics.episodes[0]
        lines.on_episode_end(None, record)  # type: ignore[arg-type]  # a line that waits
        before = events.read_bytes(), (tmp_path / "lines").read_bytes()
        calls: dict[str, Callable[[], Any]] = {
            "TensorBoardLogger": lambda: board.on_sample_end(batch, collector.metrics),
            "JSONLinesLogger": lambda: lines.on_episode_end(None, record),  # type: ignore[arg-type]
        }
        for name, call in calls.items():
            assert re.match(rf"StateError: .*, which made this {name}", in_fork(call)), name
        for again in (lines.on_sample_end, lines.state_dict):
            assert in_fork(again).startswith("StateError: ")
        assert [in_fork(one.close) for one in (board, lines)] == ["no error"] * 2
        assert (events.read_bytes(), (tmp_path / "lines").read_bytes()) == before
        collector.collect(episodes=1)
        assert len((tmp_path / "lines").read_text().splitlines()) == collector.metrics.episodes_total + 1


def test_a_fork_leaves_videos_to_its_parent(tmp_path: Path) -> None:
    """It would give its own the same names."""
    pytest.importorskip("imageio_ffmpeg")
    record = RecordVideo(tmp_path)
    with marlvec.make(
        partial(PainterEnv, length=3), 1, backend="sync", render_mode="rgb_array", wrappers=[record]
    ) as envs:
        envs.reset()
        for k in range(2):  # before there is a file, and while there is one
            for name, call in {"step()": lambda: envs.step(envs.random_action()), "reset()": envs.reset}.items():
                text = in_fork(call)
                assert f"StateError: RecordVideo: {name} in process" in text, k
                assert "call make() in each process, with folders of its own" in text
            assert in_fork(envs.close) == "no error"
            envs.step(envs.random_action())
        for _ in range(2):
            envs.step(envs.random_action())
    complete = tmp_path / "painter-env0-episode0.mp4"
    assert len(frames_of(complete)) == 4
    video = VideoFile(tmp_path / "x.mp4", 30, find_ffmpeg())
    video.write(np.zeros((*SMALLEST, 3), np.uint8))
    for name, call in {
        "write()": lambda: video.write(np.zeros((*SMALLEST, 3), np.uint8)),
        "finish()": video.finish,
    }.items():
        assert in_fork(call).startswith(f"StateError: video x.mp4: {name} in process")
    assert in_fork(video.discard) == "no error"
    video.finish()
    assert len(frames_of(tmp_path / "x.mp4")) == 1


def test_a_fork_leaves_the_page_to_its_parent() -> None:
    """Its thread would never answer a fork that waits for its end."""
    with PageServer("random", "ws://127.0.0.1:8765/") as page:
        assert in_fork(page.close) == "no error"
        assert in_fork(page.__enter__).startswith("StateError: with PageServer in process")
        with urlopen(page.url) as answer:
            assert answer.status == 200


def test_a_fork_leaves_many_collectors_to_its_parent() -> None:
    with Collectors(build_collector, 1, "sync", seed=0) as collectors:
        collectors.collect(env_steps=4)
        assert in_fork(lambda: collectors.collect(env_steps=4)).startswith("StateError: ")
        assert "which made this Collectors" in in_fork(lambda: collectors.collect(env_steps=4))
        assert in_fork(collectors.close) == "no error"
        collectors.collect(env_steps=4)


def build_collector(place: Place) -> Collector:
    return Collector(marlvec.make("CartPole-v1", 1, backend="sync"), RandomPolicy(), seed=place.seed)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_pickle_and_copy_say_what_to_do_instead(how: Callable[[Any], Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        every = [stack.enter_context(made(backend)) for backend in [*BACKENDS, "native", "pool"]]
        collector = Collector(every[0], RandomPolicy())
        outside = stack.enter_context(external.make("CartPole-v1", num_envs=2))
        others = [collector, collector.background(env_steps=4), outside, external.ExternalEnv(outside)]
        server = stack.enter_context(external.Server(outside, token="a" * 32))
        others += [server, stack.enter_context(external.Client(server.url, token="a" * 32, timeout=20))]
        others += [stack.enter_context(Collectors(build_collector, 1, "sync", seed=0))]
        others += [stack.enter_context(Recorder(tmp_path / "data"))]
        others += [stack.enter_context(JSONLinesLogger(tmp_path / "lines"))]
        others += [stack.enter_context(TensorBoardLogger(tmp_path / "board"))]
        for one in [*every, *others]:
            with pytest.raises(
                SerialisationError, match=f"^{type(one).__name__} cannot be pickled or copied: .*; .* in each"
            ):
                how(one)
