"""A worker process: one shard behind a channel.

It is started with three file descriptors (requests in, replies out, shared memory) and lives until it is told to close
or the channel ends, which means that the parent is gone.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from marlvec.vector import channel as ch
from marlvec.vector.buffers import Buffers
from marlvec.vector.channel import Channel, ChannelClosed, Patience
from marlvec.vector.faults import capture, pack_failure, picklable
from marlvec.vector.memory import map_memory
from marlvec.vector.shard import Report, Shard, ShardFailed

__all__ = ["Plan", "pack_report", "run_worker", "unpack_report"]

Plan = dict[str, Any]
"""What a worker is told at first: ``factories`` (pickled), ``first`` (index of its first env), ``autoreset_mode``,
``done_on``, ``shared`` (whether rows are in shared memory).
"""


def run_worker(read_fd: int, write_fd: int, memory_fd: int) -> NoReturn:
    """Serve one shard, then end this process."""
    # Ctrl-C goes to the whole terminal; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    np.random.seed()  # noqa: NPY002  (envs that draw from the global stream would repeat their siblings')
    channel = Channel(read_fd, write_fd)
    # A process that an env starts must not hold the channel: its closed end is how the parent learns of our death.
    for fd in (read_fd, write_fd, memory_fd):
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=channel.close)
    code = 0
    try:
        _serve(channel, memory_fd)
    except ChannelClosed:
        pass
    except SystemExit as ending:  # an env called sys.exit(): the parent is told its code
        code = 0 if ending.code is None else ending.code & 0xFF if isinstance(ending.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the terminal may be gone, or was never there
            continue
    os._exit(code)  # a forked process must not run its parent's exit handlers


def _serve(channel: Channel, memory_fd: int) -> None:
    _, number, payload = channel.recv()
    plan: Plan = pickle.loads(payload)
    first = plan["first"]
    try:
        shard = Shard(cloudpickle.loads(plan["factories"]), first, plan["autoreset_mode"], plan["done_on"])
    except ShardFailed as error:
        channel.send(ch.FAILED, number, pickle.dumps([pack_failure(failure) for failure in error.failures]))
        return
    except Exception as error:  # the factories themselves could not be loaded here
        channel.send(ch.FAILED, number, pickle.dumps([pack_failure(capture(first, "__init__", error))]))
        return
    channel.send(ch.OK, number, cloudpickle.dumps(shard.spec))
    try:
        _serve_shard(channel, memory_fd, shard, plan)
    finally:
        shard.close()


def _serve_shard(channel: Channel, memory_fd: int, shard: Shard, plan: Plan) -> None:
    n, first, shared = len(shard.envs), plan["first"], plan["shared"]
    code, number, payload = channel.recv()  # ATTACH: every worker's spec fits, and the memory has its size
    if code == ch.CLOSE:  # another worker's envs could not be built, or differ
        _close(channel, number, shard)
        return
    num_envs, size = pickle.loads(payload)
    if shared:
        buffers = Buffers(shard.spec, num_envs, map_memory(memory_fd, size)).rows(first, first + n)
    else:
        buffers = Buffers(shard.spec, n)
    os.close(memory_fd)
    shard.attach(buffers)
    # What lives now (libraries, envs) lives as long as this process: the collector need not look at it ever again.
    gc.collect()
    gc.freeze()
    channel.send(ch.OK, number)
    poll, patience = select.poll(), Patience()
    poll.register(channel.read_fd, select.POLLIN)
    while True:
        patience.wait(poll)
        code, number, payload = channel.recv()
        if code == ch.STEP:
            if shared:
                ids = np.frombuffer(payload, np.int32).tolist() if payload else shard.everyone
            else:
                ids, packed = pickle.loads(payload)
                buffers.unpack_actions(np.array(ids), packed)
            report = shard.step(ids)
        elif code == ch.RESET:
            ids, seeds, options = pickle.loads(payload)
            report = shard.reset(ids, seeds, options)
        elif code == ch.STATE:
            ids = pickle.loads(payload)
            report = shard.write_state(ids)
        else:  # CLOSE
            _close(channel, number, shard)
            return
        if shared:
            channel.send(ch.OK, number, pack_report(report, first) if report else b"")
        else:
            rows = buffers.pack_results(np.array(ids))
            channel.send(ch.OK, number, pickle.dumps((rows, pack_report(report, first)), protocol=5))


def _close(channel: Channel, number: int, shard: Shard) -> None:
    failures = shard.close()
    channel.send(ch.OK, number, pickle.dumps([pack_failure(failure) for failure in failures]))


def pack_report(report: Report, first: int) -> bytes:
    """Pickle a report. Infos that cannot be pickled become failures of their env."""
    infos, final_infos = report.infos, report.final_infos
    failures = [pack_failure(failure) for failure in report.failures]
    try:
        return pickle.dumps((infos, final_infos, failures), protocol=5)
    except Exception:  # something in an info is local, or refuses: find the culprits, keep the rest
        for found in (infos, final_infos):
            for i, info in found.items():
                try:
                    found[i] = _Pickled(picklable(info, f"the info of env {first + i}"))  # type: ignore[assignment]  # unpickles to an Info
                except Exception as error:
                    found[i] = {}
                    failures.append(pack_failure(capture(first + i, "infos", error)))
        return pickle.dumps((infos, final_infos, failures), protocol=5)


class _Pickled:
    """An info that only cloudpickle could pickle; unpickles to itself."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self.data,)


def unpack_report(payload: bytes, first: int) -> Report:
    """Rebuild a report in the parent, with global env indices."""
    from marlvec.vector.faults import unpack_failure

    infos, final_infos, failures = pickle.loads(payload)
    return Report(
        {first + i: info for i, info in infos.items()},
        {first + i: info for i, info in final_infos.items()},
        [unpack_failure(packed) for packed in failures],
    )
