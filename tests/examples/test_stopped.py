"""Scripts that are stopped at some checkpoint and go on from it come to the numbers of one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import marlvec
from tests.examples.scripts import checkpoint, run

pytest.importorskip("torch", reason="torch is not installed, and `run` looks after its seed")
pytest.importorskip("matplotlib", reason="scripts draw what they have learned")

SCRIPTS: dict[str, tuple[str, tuple[object, ...]]] = {
    "cleanrl_ppo": ("native", ("--total-timesteps", 4_800, "--num-envs", 8)),
    "cleanrl_ppo, Python envs": ("sync", ("--total-timesteps", 2_400, "--num-envs", 4)),
    "gymnasium_wrappers": ("native", ("--total-timesteps", 1_600, "--num-envs", 16)),
    "selfplay_connect_four": (
        "native",
        ("--total-timesteps", 8_500, "--num-envs", 64, "--snapshot-every", 3_000, "--games", 2),
    ),
    "selfplay_kuhn": (
        "native",
        ("--total-timesteps", 2_048, "--num-envs", 32, "--batch", 256, "--snapshots", 6, "--games", 2),
    ),
    "pettingzoo_q_learning": ("", ("--total-timesteps", 480, "--test-games", 4)),
}


def run_until(number: int, monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    """Run a script that is stopped right after it has written so many checkpoints."""
    save, left = marlvec.save_checkpoint, number

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        path = save(*args, **kwargs)
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return path

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(marlvec, "save_checkpoint", stopping)
        run(name, *arguments)


@pytest.mark.slow("trains")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_script_goes_on_bit_by_bit(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, arguments = SCRIPTS[script]
    name = script.partition(",")[0]
    if backend:
        arguments = (*arguments, "--backend", backend)
    if backend == "native":
        pytest.importorskip("numba", reason="compiled envs need it")
    if name == "pettingzoo_q_learning":
        pytest.importorskip("pygame", exc_type=ImportError)
    through, parts = tmp_path / "through", tmp_path / "parts"
    run(name, *arguments, "--checkpoint", through)
    run_until(2, monkeypatch, name, *arguments, "--checkpoint", parts)
    assert checkpoint(parts) != checkpoint(through)
    run(name, *arguments, "--checkpoint", parts, "--resume")
    assert checkpoint(parts) == checkpoint(through)
