"""The settings of a vectorizer: the arguments of `make()`, checked once; seeds, random actions and restart limits."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_choice, whole_number
from marlvec.envs.spec import AgentGroup, AutoresetMode, EnvSpec
from marlvec.errors import (
    ArgumentError,
    MissingExtraError,
    NotResetError,
    ResourceError,
    SerialisationError,
    UnsupportedSpaceError,
)
from marlvec.sampling import SpaceSampler

# A Ctrl-C between Python's last check for signals and a wait does not end that wait, so no wait may be unbounded.
LONGEST_WAIT = 0.1  # seconds

SPACES = ("equal", "compatible")
ENV_STATES = ("deepcopy",)


class SettingsArguments(TypedDict, total=False):
    """`Settings` as keyword arguments."""

    autoreset_mode: str
    done_on: str
    copy: bool
    grouped: bool
    validate: str
    state: bool
    spaces: str
    env_state: str | None
    on_fault: str
    max_restarts: int | RestartLimit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all backends share, checked; `marlvec.make` describes each."""

    autoreset_mode: str = "same_step"
    done_on: str = "all"
    copy: bool = True
    grouped: bool = False
    validate: str = "sample"
    state: bool = False
    spaces: str = "equal"
    env_state: str | None = None
    on_fault: str = "raise"
    max_restarts: int | RestartLimit = 10
    limit: RestartLimit = field(init=False)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                check_choice(name, getattr(self, name), choices)
        if self.env_state is not None:
            check_choice("env_state", self.env_state, ENV_STATES)
        given = self.max_restarts
        object.__setattr__(self, "limit", given if isinstance(given, RestartLimit) else RestartLimit(given))


AUTORESET_MODES = tuple(mode.value for mode in AutoresetMode)
DONE_ON = ("all", "any")
VALIDATE_MODES = ("strict", "sample", "warn", "off")
ON_FAULT = ("raise", "restart", "mask")
_CHOICES = {
    "autoreset_mode": AUTORESET_MODES,
    "done_on": DONE_ON,
    "validate": VALIDATE_MODES,
    "spaces": SPACES,
    "on_fault": ON_FAULT,
}


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """Spread one seed over ``num_envs`` envs.

    Env ``i`` gets the upper 31 bits of the first word of ``numpy.random.SeedSequence(seed, spawn_key=(i,))``: a
    function of the seed and the env's index alone, so that neither the number of envs nor of workers matters, and
    seeds 0 and 1 share no stream.

    Args:
        seed: 0 to 2**64 - 1; numpy integers count.
        num_envs: N.

    Returns:
        N ints from 0 to 2**31 - 1: also envs that keep their seed in a C int accept these.

    Raises:
        ArgumentError: The seed is not such an integer.
    """
    root = check_seed(seed)
    return [int(np.random.SeedSequence(root, spawn_key=(i,)).generate_state(1)[0]) >> 1 for i in range(num_envs)]


def restart_seed(seed: int, incarnation: int) -> int:
    """Return the seed of a restarted env, from its last seed and the number of restarts since, from 1."""
    # The upper 31 bits of the first word of numpy.random.SeedSequence(seed, spawn_key=(incarnation,)).
    return int(np.random.SeedSequence(seed, spawn_key=(incarnation,)).generate_state(1)[0]) >> 1


def entropy_of(seed: int | None) -> int:
    """Return the seed; if it is None, one from the operating system."""
    if seed is not None:
        return seed
    fresh = np.random.SeedSequence().entropy
    assert isinstance(fresh, int)  # a sequence only if one was passed in
    return fresh


def check_seed(seed: Any, where: str = "seed") -> int:
    """Return the seed as an int, from 0 to 2**64 - 1."""
    value = whole_number(seed)
    if value is not None and 0 <= value < 2**64:
        return value
    raise ArgumentError(f"{where} must be an integer from 0 to 2**64 - 1, got {seed!r} ({type(seed).__name__})")


def spread_seeds(seed: int | Sequence[int | None] | None, env_ids: Sequence[int], num_envs: int) -> list[int | None]:
    """Return one seed per env in ``env_ids``; a sequence of seeds is used unchanged."""
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, (list, tuple)) or (isinstance(seed, np.ndarray) and seed.ndim):
        if len(seed) != len(env_ids):
            raise ArgumentError(f"seed is a list of {len(seed)} for {len(env_ids)} envs; give one seed, or one per env")
        return [None if s is None else check_seed(s, f"seed[{k}]") for k, s in enumerate(seed)]
    seeds = env_seeds(seed, num_envs)  # type: ignore[arg-type]  # which raises if it is not an integer
    return [seeds[i] for i in env_ids]


def random_stream(seed: int | None) -> np.random.Generator:
    """Return a random stream from the seed of all envs, independent of the envs' own; None: fresh entropy."""
    return np.random.default_rng(None if seed is None else np.random.SeedSequence(check_seed(seed), spawn_key=(0, 1)))


BoolArray = NDArray[np.bool_]


def random_actions(
    spec: EnvSpec,
    rng: np.random.Generator,
    *,
    acting: BoolArray,
    masks: Sequence[BoolArray | None],
    env_ids: NDArray[np.int64],
    grouped: bool,
) -> Any:
    """Draw one action per agent, uniformly over the actions that its space and its mask allow, as `step` takes them.

    `acting` (n, A) bool, `masks` per group (n, A_g, k) bool or None. Agents that are not acting get a member of their
    space, whatever their mask. The result depends on the arguments alone, so that all backends draw alike.
    """
    drawn = {
        group.name: _draw(spec, group, rng, acting[:, list(group.agents)], mask, env_ids)
        for group, mask in zip(spec.groups, masks, strict=True)
    }
    return drawn if grouped else drawn[spec.groups[0].name]


def _draw(
    spec: EnvSpec,
    group: AgentGroup,
    rng: np.random.Generator,
    acting: BoolArray,
    mask: BoolArray | None,
    env_ids: NDArray[np.int64],
) -> Any:
    """Draw actions of one group: (n, A_g, …) or a tree of such arrays."""
    n, size = acting.shape

    def where(row: int) -> str:
        i, j = divmod(row, size)
        return f"env {env_ids[i]}, agent {spec.agents[group.agents[j]]!r}"

    if mask is not None and mask.all():
        mask = None  # drawing without a mask is much quicker
    if mask is not None:
        own = [spec.allowed[a] for a in group.agents]  # with padding, not all agents have all choices
        free = np.stack([np.ones(mask.shape[2], np.bool_) if part is None else part for part in own])
        mask = np.where(acting[..., None], mask, free).reshape(n * size, mask.shape[2])
    tree = group.action_tree
    rows = SpaceSampler(tree).sample(rng, n * size, mask, where)
    return tree.unflatten([leaf.reshape(n, size, *leaf.shape[1:]) for leaf in tree.flatten(rows)])


NOT_RESTARTABLE = (
    ArgumentError,
    MissingExtraError,
    NotResetError,
    ResourceError,
    SerialisationError,
    UnsupportedSpaceError,
)
"""Errors that a restart cannot cure: the new env would raise them again."""

_LONGEST = 2.0  # seconds between two restarts
_LISTED = 5  # different reasons that a history lists


@dataclass(frozen=True)
class RestartLimit:
    """How often an env, or a worker, may be restarted: at most ``count`` times within ``seconds``.

    The first restart comes at once, the k-th within that time after ``backoff * 2 ** (k - 2)`` seconds, but at most two
    seconds.

    Args:
        count: Maximum number of restarts of one env, or of one worker.
        seconds: Length of the time window, in seconds.
        backoff: Pause before the second restart, in seconds.

    Raises:
        ArgumentError: An argument is negative, or not a number.
    """

    count: int = 10
    seconds: float = 60.0
    backoff: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ArgumentError(f"max_restarts: expected a count of at least 0, got {self.count!r}")
        for name in ("seconds", "backoff"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ArgumentError(f"RestartLimit({name}={value!r}): expected seconds, at least 0")

    def pause(self, k: int) -> float:
        """Return the seconds to wait before the k-th restart, k from 1."""
        return 0.0 if k < 2 else min(_LONGEST, self.backoff * 2.0 ** min(k - 2, 60))


@dataclass
class RestartBudget:
    """Counts restarts, and refuses one that exceeds the limit."""

    limit: RestartLimit
    _spent: dict[Hashable, deque[tuple[float, str]]] = field(default_factory=dict, init=False)

    def try_restart(self, who: Hashable, why: str) -> float | None:
        """Request one more restart; return the seconds to wait before it, or None if the limit is reached."""
        now = time.monotonic()
        spent = self._spent.setdefault(who, deque())
        while spent and now - spent[0][0] > self.limit.seconds:
            spent.popleft()
        if len(spent) >= self.limit.count:
            return None
        spent.append((now, why))
        return self.limit.pause(len(spent))

    def history(self, who: Hashable) -> str:
        """Return in words why the restart limit was reached."""
        spent = self._spent.get(who, ())
        reasons = Counter(why for _, why in spent).most_common()
        listed = "; ".join(f"{count} x {why}" for why, count in reasons[:_LISTED])
        more = f"; and {len(reasons) - _LISTED} other reasons" if len(reasons) > _LISTED else ""
        times = "time" if len(spent) == 1 else "times"
        return (
            f"Gave up: it was restarted {len(spent)} {times} within {self.limit.seconds:g} s, as often as "
            f"max_restarts allows ({listed}{more})."
            if spent
            else "Gave up: max_restarts=0 allows no restart."
        )
