"""The settings of a vectorizer: the arguments of `make()`, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from marlvec.arguments import check_choice
from marlvec.envs.autoreset import AutoresetMode
from marlvec.vector.faults.restarts import RestartLimit

__all__ = ["Settings", "SettingsArguments", "AUTORESET_MODES", "DONE_ON", "VALIDATE_MODES", "ON_FAULT", "LONGEST_WAIT"]

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
