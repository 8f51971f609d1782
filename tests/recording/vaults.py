"""Vaults of flashbax's own, read and written; in a process of its own, as jax leaves threads behind.

``python -m tests.recording.vaults FOLDER`` writes ``FOLDER/vaults/mpe/theirs.vlt/Random`` with flashbax, and reads
``FOLDER/vaults/mpe/ours.vlt/Random``, which must hold the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["AGENTS", "STEPS", "experience"]

STEPS, AGENTS, EPISODE = 53, 3, 7


def experience() -> dict[str, Any]:
    """OG-MARL's arrays (1, T, …): episodes of 7 time steps, terminated and truncated by turns, and the begin of one."""
    rng = np.random.default_rng(0)
    number = np.arange(STEPS)
    ends = (number % EPISODE == EPISODE - 1)[:, None] & np.ones(AGENTS, np.bool_)
    by_turns = (number // EPISODE % 2 == 0)[:, None]
    arrays = {
        "observations": rng.standard_normal((STEPS, AGENTS, 4)).astype(np.float32),
        "actions": rng.integers(0, 5, (STEPS, AGENTS)).astype(np.int32),
        "rewards": rng.standard_normal((STEPS, AGENTS)).astype(np.float32),
        "terminals": ends & by_turns,
        "truncations": ends & ~by_turns,
    }
    state = rng.standard_normal((STEPS, 12)).astype(np.float32)
    legals = rng.random((STEPS, AGENTS, 5)) < 0.7
    found: dict[str, Any] = {name: array[None] for name, array in arrays.items()}
    return found | {"infos": {"state": state[None], "legals": legals[None].astype(np.float32)}}


def main(folder: Path) -> None:
    """Write one Vault and read another, with flashbax alone."""
    import flashbax
    import jax
    from flashbax.vault import Vault

    os.chdir(folder)
    want = experience()
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=1,
        sample_sequence_length=2,
        period=1,
        min_length_time_axis=2,
        max_length_time_axis=STEPS + 1,
    )
    state = buffer.init(jax.tree.map(lambda array: array[0, 0], want))
    vault = Vault("mpe/theirs.vlt", state.experience, rel_dir="vaults", vault_uid="Random")
    for start, stop in ((0, 20), (20, STEPS)):  # a Vault grows
        state = buffer.add(state, jax.tree.map(lambda array, a=start, b=stop: array[:, a:b], want))
        assert vault.write(state) == stop - start

    got = Vault("mpe/ours.vlt", rel_dir="vaults", vault_uid="Random").read().experience
    acting = got["infos"].pop("acting")
    assert np.asarray(acting).all()
    want["truncations"][0, -1] = True  # where the recording ends
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
