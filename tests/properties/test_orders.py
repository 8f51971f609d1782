"""The order of ``env_ids`` in a request changes no row: for every backend and every kind of pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import marlvec
from marlvec import VectorEnv
from marlvec.testing.scripted import SingleEnv
from marlvec.vector.pool_env import PoolVectorEnv
from marlvec.vector.pools.envpool import EnvPoolAdapter, form_of
from tests.vector.support.kinds import factories_of, vectorize, walks
from tests.vector.support.pools import MirrorPool, PoolShop
from tests.vector.support.reference import same

N = 4


def check_orders(make: Callable[[], VectorEnv], *, seeds: bool = True, some: bool = True, states: bool = True) -> None:
    """Play two vectorizers of equal envs; one gets each request in a random order of ``env_ids``.

    Args:
        make: Makes one.
        seeds: Whether resets take a seed per env.
        some: Whether some envs can be reset and stepped.
        states: Whether states can be saved.
    """
    rng = np.random.default_rng(0)
    with make() as envs, make() as model:
        n = envs.num_envs
        everyone = np.arange(n)

        def begin(ids: Any, order: Any, way: int, first: int | None) -> None:
            """Reset the same envs of both, of one in another order."""
            given = {} if first is None else {"seed": [first + int(i) for i in order]}
            sorted_too = {} if first is None else {"seed": [first + int(i) for i in ids]}
            if way == 0:
                same(envs.reset(**given, env_ids=order), model.reset(**sorted_too, env_ids=ids))
                return
            for each, chosen, kwargs in ((envs, order, given), (model, ids, sorted_too)):
                each.async_reset(**kwargs, env_ids=chosen)
            same(received(envs, len(ids)), received(model, len(ids)))

        begin(everyone, everyone[::-1], 0, 100 if seeds else None)
        for t in range(24):
            begin(everyone, rng.permutation(n), t % 2, 100 * t if seeds else None)
            for k in range(3):
                actions = model.random_action(seed=10 * t + k)
                ids = np.sort(rng.permutation(n)[:2]) if some and k == 1 else everyone
                order = rng.permutation(ids)
                envs.send(taken(actions, order), order)
                model.send(taken(actions, ids), ids)
                same(received(envs, len(ids)), received(model, len(ids)))
            if some:
                ids = np.sort(rng.permutation(n)[:3])
                begin(ids, rng.permutation(ids), t % 2, None)
            if states:
                saved = envs.get_state(rng.permutation(n))
                envs.step(envs.random_action(seed=t))
                same(envs.set_state(saved, env_ids=(order := rng.permutation(n)), from_ids=order), shown(model))
                actions = model.random_action(seed=t)
                same(envs.step(actions), model.step(actions))


def received(envs: VectorEnv, count: int) -> list[Any]:
    """Receive ``count`` rows, and return them in the order of the envs."""
    step = envs.recv(min_envs=count)
    assert len(step.env_ids) == count
    by_env = np.argsort(step.env_ids)
    masks = [mask[by_env] for mask in step.action_masks if mask is not None]
    flags = [step.terminated, step.truncated, step.done, step.alive, step.acting, step.reset_mask]
    leaves = [leaf for leaves in step.obs_leaves for leaf in leaves]
    return [part[by_env] for part in (step.env_ids, step.rewards, *flags, *leaves)] + masks


def shown(envs: VectorEnv) -> Any:
    """Return what ``set_state`` of an env's own state shows, without a change."""
    return envs.set_state(envs.get_state())


def taken(actions: Any, ids: Any) -> Any:
    if isinstance(actions, dict):
        return {name: taken(part, ids) for name, part in actions.items()}
    return tuple(taken(part, ids) for part in actions) if isinstance(actions, tuple) else actions[ids]


@pytest.mark.parametrize("kind", ["parallel", "turns", "single"])
@pytest.mark.parametrize("backend", ["sync", "thread", "async", "file"])
def test_the_order_of_a_request_changes_no_row(backend: str, kind: str) -> None:
    check_orders(partial(vectorize, backend, walks(kind, N)))


@pytest.mark.parametrize("env", ["simple_spread", "simple_tag", "tictactoe_v3"])
def test_the_order_changes_no_row_of_native_envs(env: str) -> None:
    check_orders(partial(marlvec.make, env, N, backend="native"))


@pytest.mark.parametrize("gives", [True, False], ids=["gives", "shows"])
@pytest.mark.parametrize("tells", [True, False], ids=["says who is alive", ""])
@pytest.mark.parametrize("kind", ["parallel", "turns, masked"])
def test_the_order_changes_no_row_of_a_pool(kind: str, tells: bool, gives: bool) -> None:
    def make() -> VectorEnv:
        return PoolVectorEnv(MirrorPool(factories_of(kind, N), gives=gives, tells=tells))

    check_orders(make, some=False, states=False)


@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode))
def test_the_order_changes_no_row_of_gymnasiums_vector_envs(mode: Any) -> None:
    def make() -> VectorEnv:
        lengths = [9] if mode.name == "DISABLED" else [3, 1, 5]
        factories = [partial(SingleEnv, lengths, info_every=2, env_index=i) for i in range(N)]
        envs = gymnasium.vector.SyncVectorEnv(factories, autoreset_mode=mode)
        return PoolVectorEnv(envs, autoreset_mode=mode.name.lower())

    check_orders(make, some=False, states=False)


@pytest.mark.parametrize("names_envs", [True, False], ids=["names envs", "does not"])
@pytest.mark.parametrize("private", [True, False], ids=["_reset", "async_reset"])
def test_the_order_changes_no_row_of_envpools_interface(private: bool, names_envs: bool) -> None:
    def make() -> VectorEnv:
        shop = PoolShop([partial(SingleEnv, [3, 1, 5], env_index=i) for i in range(N)], private=private)
        pool = shop(N)
        if not names_envs:
            answer = pool._answer
            pool._answer = lambda ids: without_ids(answer(ids))  # type: ignore[method-assign]
        return PoolVectorEnv(EnvPoolAdapter(form_of(pool), pool=pool))

    check_orders(make, seeds=False, states=False)


def without_ids(answer: Any) -> Any:
    *parts, info = answer
    return *parts, {key: value for key, value in info.items() if key not in ("env_id", "players")}
