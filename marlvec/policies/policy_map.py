"""`PolicyMap`: many policies, only the recent ones in memory; `PolicyCopy`: policies for a second collector."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from gymnasium.spaces import Space

from marlvec.arguments import count_from, signature_of
from marlvec.connectors import Pipeline, Rows
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, ResourceError
from marlvec.policies.policy import AsyncPolicy, Policy, PolicyLike, PolicyOutput, as_policy
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.values import decode, encode

Make = Callable[[], PolicyLike]
_NAME = 60  # characters of an id in file names


@dataclass(slots=True)
class _Entry:
    """A policy that may be swapped out."""

    make: Make  # builds it in its initial form
    spaces: tuple[Space[Any], Space[Any]] | None = None  # when it was swapped out; None if it had none
    file: Path | None = None  # None if it is in memory or was never built


class PolicyMap(MutableMapping[str, Policy]):
    """Policy id to policy, with a bound on how many are in memory.

    Give a policy, or a function that builds one at the first lookup. If more than ``capacity`` built policies would be
    in memory, the least recently used one is written to a file with its `Policy.state_dict` and version. At the next
    lookup it is built again, set up with the same spaces, and its state is loaded, bit for bit. A policy given as an
    object always stays in memory and does not count, since it cannot be built again. So give policies that learn as
    objects, and the many frozen ones as functions.

    Files hold numbers and texts and are never executed (`marlvec.serialization.archive`). They are no checkpoints: they
    are deleted with the map. If a state cannot be stored, the lookup raises, and the policy stays in memory.

    A policy that the caller still references is not swapped out, since it may change. Lookups take a lock; a policy
    that another thread uses is referenced, and so not swapped out.

        policies = PolicyMap({"main": learner, **{f"old_{i}": make_net for i in range(500)}}, capacity=8)
        policies["old_7"].load_state_dict(learner.state_dict())
        marlvec.Collector(envs, policies, mapping)

    Args:
        policies: Policy id to a policy, or to a function without arguments that builds one. Anything that
            `marlvec.policies.as_policy` converts is a policy.
        capacity: How many built policies may be in memory; at least 1.
        folder: Parent of the new folder for the files; None: the temporary folder.

    Raises:
        ArgumentError: A policy is not one, or ``capacity`` is not positive.
        OSError: The folder cannot be written to.

    Attributes:
        capacity: As given.
        folder: Folder of the files.
    """

    def __init__(
        self, policies: Mapping[str, PolicyLike | Make] | None = None, *, capacity: int, folder: FilePath | None = None
    ) -> None:
        self.capacity = count_from(capacity, f"capacity={capacity!r}")
        self._entries: dict[str, Policy | _Entry] = {}
        self._in_memory: OrderedDict[str, Policy] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self.folder = Path(tempfile.mkdtemp(prefix="marlvec-policies-", dir=folder))
        self._finalizer = weakref.finalize(self, _remove, self.folder, os.getpid())
        for policy_id, policy in (policies or {}).items():
            self[policy_id] = policy

    def __getitem__(self, policy_id: str) -> Policy:
        """Look up a policy; swap it in if it is in a file.

        Raises:
            KeyError: The policy is unknown; the message lists the known ones.
            ResourceError: The policy to swap out cannot be written. Nothing is lost: all stay unchanged.
            SerialisationError: The state of the policy to swap out cannot be stored. Nothing is lost.
            CheckpointError: Its file was damaged or removed since it was written.
            ArgumentError: Its function built something else than a policy, or a policy that cannot load its state.
        """
        with self._lock:
            entry = self._entry(policy_id)
            if isinstance(entry, Policy):
                return entry
            if policy_id in self._in_memory:
                self._in_memory.move_to_end(policy_id)
                return self._in_memory[policy_id]
            self._make_room()
            policy = self._in_memory[policy_id] = self._build(policy_id, entry)
            self._drop_file(entry)
            return policy

    def __setitem__(self, policy_id: str, policy: PolicyLike | Make) -> None:
        """Add or replace a policy; values as in the constructor."""
        if not isinstance(policy_id, str):
            raise ArgumentError(f"a policy id must be a string, got {policy_id!r}")
        given = policy_or_make(policy, policy_id)
        with self._lock:
            if policy_id in self._entries:
                self._forget(policy_id)
            self._entries[policy_id] = given if isinstance(given, Policy) else _Entry(given)

    def __delitem__(self, policy_id: str) -> None:
        with self._lock:
            self._entry(policy_id)
            self._forget(policy_id)
            del self._entries[policy_id]

    def given(self, policy_id: str) -> Policy | None:
        """Return a policy without building it.

        Args:
            policy_id: Its id.

        Returns:
            The policy; None if it was given as a function that builds it.
        """
        entry = self._entry(policy_id)
        return entry if isinstance(entry, Policy) else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self._entries  # the inherited one would swap it in

    @property
    def in_memory(self) -> tuple[str, ...]:
        """Ids of the built policies in memory; the next one to be swapped out first."""
        return tuple(self._in_memory)

    def __repr__(self) -> str:
        return (
            f"<PolicyMap of {len(self)}, {len(self._in_memory)} of at most {self.capacity} built ones in memory, "
            f"others in {str(self.folder)!r}>"
        )

    def _entry(self, policy_id: str) -> Policy | _Entry:
        try:
            return self._entries[policy_id]
        except KeyError:
            raise KeyError(f"no policy {policy_id!r}; the policies are {list(self._entries)}") from None

    def _forget(self, policy_id: str) -> None:
        entry = self._entries[policy_id]
        self._in_memory.pop(policy_id, None)
        if isinstance(entry, _Entry):
            self._drop_file(entry)

    def _drop_file(self, entry: _Entry) -> None:
        if entry.file is not None:
            with contextlib.suppress(OSError):  # the file is overwritten later, or deleted with the folder
                entry.file.unlink()
            entry.file = None

    # --- out

    def _make_room(self) -> None:
        """Swap policies out until one more fits; those that the caller references stay."""
        for policy_id in tuple(self._in_memory):
            if len(self._in_memory) < self.capacity:
                return
            self._swap_out(policy_id)

    def _swap_out(self, policy_id: str) -> None:
        entry = self._entries[policy_id]
        assert isinstance(entry, _Entry)  # `_in_memory` holds only built policies
        file = self.folder / _file_name(policy_id)
        policy = self._in_memory[policy_id]
        try:
            state = encode(dict(policy.state_dict()), f"the state of policy {policy_id!r}")
            write_archive(file, {"version": encode(policy.version, "its version"), "state": state})
        except OSError as error:
            raise ResourceError(
                f"policy {policy_id!r} cannot be swapped out to {file} ({error.strerror or error}); nothing is lost, "
                f"it stays in memory: make room there, or use a PolicyMap of a greater capacity or in another folder"
            ) from error
        except Exception as error:
            error.add_note(f"while policy {policy_id!r} was swapped out; nothing is lost, it stays in memory")
            raise
        entry.file, there = file, weakref.ref(policy)
        obs_space, action_space = policy.observation_space, policy.action_space
        entry.spaces = None if obs_space is None or action_space is None else (obs_space, action_space)
        del policy, self._in_memory[policy_id]
        if there() is not None:
            gc.collect()  # frees a policy with reference cycles
        if (held := there()) is not None:
            self._drop_file(entry)
            self._in_memory[policy_id] = held  # last in order, so that it is not tried again at once

    # --- in

    def _build(self, policy_id: str, entry: _Entry) -> Policy:
        found = None if entry.file is None else read_archive(entry.file)
        policy = as_policy(entry.make(), f"the object that the function of policy {policy_id!r} built")
        if found is None:
            return policy
        if entry.spaces is not None:
            policy.setup(*entry.spaces, seed=0)  # any seed: the state contains the random generator
        try:
            policy.load_state_dict(decode(found["state"]))
            policy.version = decode(found["version"])
        except MarlvecError as error:
            error.add_note(f"while policy {policy_id!r} was swapped in; its state is in {entry.file}")
            raise
        except KeyError as error:
            raise CheckpointError(str(entry.file), f"holds no policy: {error!r}") from error
        return policy


def policy_or_make(given: PolicyLike | Make, policy_id: str) -> Policy | Make:
    """Return a policy as such, and a function without arguments as a builder; refuse anything else."""
    if isinstance(given, type) or (callable(given) and not callable(getattr(given, "act", None))):
        try:
            signature_of(given).bind()
        except TypeError:
            pass  # e.g. a function of rows
        except ValueError:  # written in C: a call will tell
            return given  # type: ignore[return-value]  # it is called without arguments
        else:
            return given  # type: ignore[return-value]  # it is called without arguments
    return as_policy(given, f"policy {policy_id!r}")  # type: ignore[arg-type]  # it checks the type


def _file_name(policy_id: str) -> str:
    """Return a readable file name, unique for each id, also on file systems that ignore case."""
    digest = hashlib.sha256(policy_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{quote(policy_id, safe='', errors='replace')[:_NAME]}-{digest}.npz"


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not delete the parent's files
        shutil.rmtree(folder, ignore_errors=True)


class SharedPolicy(Policy):
    """A policy, the ``host``, that another collector also uses: it is set up only if it never was."""

    def __init__(self, name: str, host: Policy) -> None:
        self._name, self.host, self.version = name, host, host.version

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Set the policy up or, if that was done, check its spaces."""
        if self.host.observation_space is None or self.host.action_space is None:
            self.host.setup(observation_space, action_space, seed=seed)
        for what, own, here in (
            ("observation", self.host.observation_space, observation_space),
            ("action", self.host.action_space, action_space),
        ):
            if own is not None and own != here:
                raise ArgumentError(
                    f"policy {self._name!r}: expected the {what} space {own} of its setup(), got {here}: give it the "
                    f"same connectors"
                )
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        self.host.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.host.act(rows, explore=explore)

    def __repr__(self) -> str:
        return repr(self.host)


P = TypeVar("P", bound=Pipeline[Any])


class PolicyCopy(Policy):
    """A copy of one of the policies: the same weights, with its own random generator and memory."""

    def __init__(self, policies: Mapping[str, Policy], policy_id: str) -> None:
        self._policies, self._policy_id = policies, policy_id
        self._policy: Policy | None = None
        self._setup: tuple[Space[Any], Space[Any], int] | None = None

    @property
    def made(self) -> Policy | None:
        """The copy, once there is one."""
        return self._policy

    def copy(self) -> Policy:
        """Copy the policy at the first call; return the copy."""
        if self._policy is None:
            policy = self._policies[self._policy_id]
            try:
                self._policy = copy.deepcopy(policy)
            except Exception as error:
                error.add_note(f"while policy {self._policy_id!r} was copied, so that evaluate() does not change it")
                raise
            self.version = self._policy.version
            self._set_up()
        return self._policy

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._setup = observation_space, action_space, seed
        self._set_up()

    def _set_up(self) -> None:
        if self._policy is not None and self._setup is not None:
            observation_space, action_space, seed = self._setup
            if self._policy.observation_space is None:
                self._policy.setup(observation_space, action_space, seed=seed)
            else:  # setup() could reset its weights
                self._policy.reseed(seed)

    def reseed(self, seed: int) -> None:
        if self._policy is not None:
            self._policy.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.copy().act(rows, explore=explore)


def copies_of(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return copies of all policies. Policies of a `PolicyMap` are copied at their first call, others now."""
    copies = {policy_id: PolicyCopy(policies, policy_id) for policy_id in policies}
    if not isinstance(policies, PolicyMap):
        for policy_copy in copies.values():
            policy_copy.copy()
    return dict(copies)


def asynchronous(policy: Policy | None) -> AsyncPolicy | None:
    """Return the asynchronous policy that a policy is, or stands for; None: it is another one."""
    if isinstance(policy, PolicyCopy):
        policy = policy.made
    elif isinstance(policy, SharedPolicy):
        policy = policy.host
    return policy if isinstance(policy, AsyncPolicy) else None


def eval_copies(pipelines: Mapping[str, P], num_envs: int) -> dict[str, P]:
    """Return copies of connectors in eval mode, with their learned state, and without memory of the envs' episodes."""
    copies = {policy_id: copy.deepcopy(pipeline) for policy_id, pipeline in pipelines.items()}
    for pipeline in copies.values():
        pipeline.reset(np.arange(num_envs))
        pipeline.eval()
    return copies
