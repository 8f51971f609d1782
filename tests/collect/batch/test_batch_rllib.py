"""Batches as RLlib's. (Nothing of ray runs; its module with the two classes is all that is imported.)"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, MissingExtraError
from tests.collect.helpers.players import EchoPolicy, sync

MODULE = "ray.rllib.policy.sample_batch"


@pytest.fixture(params=["stand-in", "ray"])
def rllib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """RLlib's module, or one with classes that take what RLlib's take."""
    if request.param == "ray":
        return pytest.importorskip(MODULE)

    class TheirMultiAgentBatch:
        def __init__(self, policy_batches: dict[str, Any], env_steps: int) -> None:
            self.policy_batches, self.count = policy_batches, env_steps

    module = ModuleType(MODULE)
    module.SampleBatch = type("TheirSampleBatch", (dict,), {})  # type: ignore[attr-defined]  # a stand-in
    module.MultiAgentBatch = TheirMultiAgentBatch  # type: ignore[attr-defined]  # a stand-in
    for name in ("ray", "ray.rllib", "ray.rllib.policy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for batch in (SampleBatch({"x": np.zeros(2)}), MultiAgentBatch({}, env_steps=0)):
        with pytest.raises(MissingExtraError, match=r'to_rllib\(\) needs ray.*pip install "ray\[rllib\]"'):
            batch.to_rllib()


def test_columns_get_rllibs_names_and_are_not_copied(rllib: Any) -> None:
    with sync("masked", 2, 2) as envs:
        batch = Collector(envs, {"main": EchoPolicy()}, seed=0).collect(env_steps=12)
    theirs = batch.to_rllib()
    assert type(theirs) is rllib.MultiAgentBatch
    assert theirs.count == 12
    (own,) = theirs.policy_batches.values()
    assert type(own) is rllib.SampleBatch
    renamed = {"next_obs": "new_obs", "terminated": "terminateds", "truncated": "truncateds"}
    assert list(own) == [renamed.get(name, name) for name, _ in batch["main"].items()]
    for name, column in batch["main"].items():
        assert own[renamed.get(name, name)] is column
    extra = SampleBatch({"logp": np.zeros(3), "values": np.ones(3), "infos": [{}] * 3, "obs": {"a": np.zeros(3)}})
    assert list(extra.to_rllib()) == ["action_logp", "vf_preds", "infos", "obs"]


def test_what_rllib_would_take_wrongly_is_refused(rllib: Any) -> None:
    batch = SampleBatch({"obs": np.zeros(3), "t": np.arange(3), "unroll_id": np.zeros(3, np.int64)})
    with pytest.raises(ArgumentError, match=r"sequences.*unpad\(\)"):
        batch.right_zero_pad(2).to_rllib()
    with pytest.raises(ArgumentError, match=r"\['vf_preds'\] exist already as columns"):
        batch.replace(values=np.zeros(3), vf_preds=np.zeros(3)).to_rllib()
