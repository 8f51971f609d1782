"""Where the next episodes have begun already, TorchRL's view resets at once; TorchRL's own way gives the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.interop.envs import archers

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from tensordict import TensorDictBase  # noqa: E402
from torchrl.envs import EnvBase  # noqa: E402

from marlvec.interop.torchrl import TorchRLEnv  # noqa: E402


class Counting(TorchRLEnv):
    """Counts how often TorchRL's own way was taken."""

    asked = 0

    def reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        self.asked += 1
        return super().reset(*args, **kwargs)


class Slow(Counting):
    """Resets as TorchRL does it for everybody."""

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return EnvBase.maybe_reset(self, tensordict)


def played(view: TorchRLEnv, steps: int, seed_at: int = -1) -> list[TensorDictBase]:
    """All that a view says in so many steps at random, with a column of somebody else's."""
    view.set_seed(3)
    torch.manual_seed(0)
    said = []
    td = view.reset()
    for t in range(steps):
        if t == seed_at:
            view.set_seed(11)
        td = view.rand_action(td)
        td["mine"] = torch.full((view.envs.num_envs, 2), float(t + 1))
        before, td = view.step_and_maybe_reset(td)
        said += [before.clone(), td.clone()]
    return said


@pytest.mark.mostly_slow("steps or trains with another library", quick=6)
@pytest.mark.checklist(125)
@pytest.mark.parametrize("mode", ["same_step", "disabled"])
@pytest.mark.parametrize(
    ("env", "steps", "seed_at"),
    [
        ("simple_spread", 60, -1),
        ("simple_tag", 60, 30),
        ("connect_four", 120, -1),
        (partial(archers, 60), 130, -1),
        ("CartPole-v1", 120, 40),
    ],
)
def test_both_ways_say_the_same(env: Any, steps: int, seed_at: int, mode: str) -> None:
    fast, slow = (kind.make(env, 3, autoreset_mode=mode, backend="sync") for kind in (Counting, Slow))
    try:
        pairs = list(zip(played(fast, steps, seed_at), played(slow, steps, seed_at), strict=True))
        assert sum(int(before["next", "done"].any()) for before, _ in pairs[::2]) > 1
        for ours, theirs in pairs:
            keys = set(ours.keys(True, True))
            assert keys == set(theirs.keys(True, True))
            assert [key for key in keys if not torch.equal(ours[key], theirs[key])] == []
        assert (fast.asked < slow.asked) == (mode == "same_step")
    finally:
        fast.close()
        slow.close()
