"""The autoreset modes and what follows from each: against the table, for every mode and every pool's own."""

from __future__ import annotations

from itertools import product

import pytest
from gymnasium.vector import AutoresetMode as GymnasiumMode

import marlvec
from marlvec.envs import AutoresetMode
from marlvec.envs.spec import AutoresetRules
from marlvec.errors import ArgumentError, ContractError
from marlvec.testing.scripted import NoOpEnv

MODES = ["same_step", "next_step", "disabled"]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_one_behaviour(mode: str) -> None:
    rules = AutoresetRules.of(mode)
    assert rules.mode == mode
    assert [rules.begins_at_once, rules.begins_on_next_step, rules.caller_begins] == [mode == other for other in MODES]


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        *((mode, mode) for mode in MODES),
        *((mode.upper(), mode) for mode in MODES),
        *((mode.replace("_", "-"), mode) for mode in MODES),
        *((GymnasiumMode[mode.upper()], mode) for mode in MODES),
        *((GymnasiumMode[mode.upper()].value, mode) for mode in MODES),
        *((AutoresetMode(mode), mode) for mode in MODES),
        ("sometimes", None),
        (True, None),
    ],
)
def test_words_of_others_are_understood(word: object, mode: str | None) -> None:
    assert AutoresetMode.named(word) == mode
    if mode is not None:
        assert AutoresetMode.declared_by({"autoreset_mode": word}, "it") is AutoresetMode(mode)
    else:
        with pytest.raises(ContractError, match="it: metadata: autoreset_mode is .* expected 'same_step' or"):
            AutoresetMode.declared_by({"autoreset_mode": word}, "it")


def test_an_env_without_a_declared_mode_has_none() -> None:
    assert AutoresetMode.declared_by({}, "it") is None
    assert AutoresetMode.declared_by({"autoreset_mode": None}, "it") is None


@pytest.mark.parametrize(("mode", "own", "steps_all"), list(product(MODES, MODES, [False, True])))
def test_which_pools_serve_which_mode(mode: str, own: str, steps_all: bool) -> None:
    """One that begins by itself at once cannot be kept from it; one that steps all or none cannot reset in between."""
    fits = own == mode or own != "same_step"
    if steps_all and own != mode:
        fits = (own, mode) == ("disabled", "same_step")
    rules = AutoresetRules.of(mode)
    if fits:
        rules.check_pool("Pool", AutoresetMode(own), steps_all=steps_all)
    else:
        with pytest.raises(ArgumentError, match=f"autoreset_mode='{mode}': Pool"):
            rules.check_pool("Pool", AutoresetMode(own), steps_all=steps_all)
    asked = rules.next_episode_request(AutoresetMode(own))
    if mode == "disabled" or own == "same_step":
        assert asked is None
    else:
        assert asked == {"next_step": "step", "disabled": "reset"}[own]


@pytest.mark.parametrize(("mode", "resets_itself", "keeps_state"), list(product(MODES, [False, True], [False, True])))
def test_which_envs_serve_which_mode(mode: str, resets_itself: bool, keeps_state: bool) -> None:
    rules = AutoresetRules.of(mode)
    if not resets_itself or (mode == "same_step" and not keeps_state):
        rules.check_env("Env", resets_itself=resets_itself, keeps_state=keeps_state)
    else:
        with pytest.raises(ArgumentError, match="Env resets itself"):
            rules.check_env("Env", resets_itself=resets_itself, keeps_state=keeps_state)


@pytest.mark.parametrize("given", [*MODES, *AutoresetMode])
def test_users_keep_a_plain_string_and_get_the_rules(given: str) -> None:
    with marlvec.make(NoOpEnv, 1, backend="sync", autoreset_mode=given) as envs:
        assert type(envs.autoreset_mode) is str
        assert type(envs.metadata["autoreset_mode"]) is str
        assert envs.autoreset_mode == envs.metadata["autoreset_mode"] == given
        assert envs.autoreset == AutoresetRules.of(given)
        assert f"autoreset_mode='{envs.autoreset_mode}'" in repr(envs)
