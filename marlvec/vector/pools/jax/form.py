"""`WorldForm`: between a world's trees by group and flat lists of leaves; refuses worlds that break the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np

from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ContractError, MarlvecError
from marlvec.extras import import_extra
from marlvec.vector.pools.jax.world import JaxRows, JaxWorld

__all__ = ["WorldForm", "import_jax"]


def import_jax(what: str) -> Any:
    """Import jax, or raise `MissingExtraError`; ``what`` needs it."""
    return import_extra("jax", what, "pip install 'marlvec[jax]'")


class WorldForm:
    """Structure of one world's trees: `reset` and `step` are traced once, without running them.

    Raises `ContractError` with the world's name if it breaks the protocol: another structure, shape or dtype than
    declared, spaces that change. `masked` is per group, whether it has action masks.
    """

    def __init__(self, world: JaxWorld) -> None:
        self._jax = jax = import_jax(world.name)
        self._world, self._name = world, world.name
        is_wide = jax.config.jax_enable_x64
        self._hint = ", or leave JAX_ENABLE_X64 out, which not every suite's envs support" if is_wide else ""
        self.spec = self._read_spec()
        self._groups = self.spec.groups
        self._lone = len(self._groups) == 1
        self.masked = [group.mask_size is not None for group in self._groups]
        key = jax.eval_shape(lambda: jax.random.key(0))
        state, first = self._trace("reset", world.reset, key)
        actions = self.join(
            [
                [
                    jax.ShapeDtypeStruct((len(group.agents), *leaf.shape), self.canonical(leaf.dtype))
                    for leaf in group.action_tree.leaves
                ]
                for group in self._groups
            ]
        )
        after, rows = self._trace("step", world.step, key, state, actions)
        self.has_acting = first.acting is not None
        self.infos, self.agent_infos = sorted(rows.infos), sorted(rows.agent_infos)
        self._check_rows("reset", first, stepped=False)
        self._check_rows("step", rows, stepped=True)
        self._check_state(state, after)
        if self.spec.state_space is not None:
            space = self.spec.state_space
            found = self._run("global_state", lambda: jax.eval_shape(world.global_state, state))
            self._check("global_state", "the global state", found, tuple(space.shape or ()), space.dtype)

    def canonical(self, dtype: Any) -> np.dtype[Any]:
        """Return JAX's dtype in place of this one: 32 bits, unless it is configured for 64."""
        found: np.dtype[Any] = np.dtype(self._jax.dtypes.canonicalize_dtype(dtype))
        return found

    def join(self, leaves: list[list[Any]]) -> Any:
        """Convert leaves of actions by group to the argument of `JaxWorld.step`."""
        trees = [group.action_tree.unflatten(own) for group, own in zip(self._groups, leaves, strict=True)]
        if self._lone:
            return trees[0]
        return {group.name: tree for group, tree in zip(self._groups, trees, strict=True)}

    def obs_leaves(self, rows: JaxRows) -> list[list[Any]]:
        return [list(group.observation_tree.flatten(self._of(group, rows.obs, "obs"))) for group in self._groups]

    def masks(self, rows: JaxRows) -> list[Any]:
        """Return the action masks of the groups that have them."""
        chosen = [group for group, has in zip(self._groups, self.masked, strict=True) if has]
        return [self._of(group, rows.action_masks, "action_masks") for group in chosen]

    def _of(self, group: AgentGroup, tree: Any, what: str) -> Any:
        if self._lone:
            return tree
        if not isinstance(tree, Mapping) or group.name not in tree:
            got = sorted(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            names = [one.name for one in self._groups]
            raise ContractError(f"{self._name}: {what}: expected a dict of the groups {names}, got {got}")
        return tree[group.name]

    def _read_spec(self) -> EnvSpec:
        spec = self._world.spec()
        if (differs := spec.difference(self._world.spec())) is not None:
            self._refuse("spec", "spaces", "the same at every look", f"others at the second one: {differs}")
        for group in spec.groups:
            for what, tree in (("observation", group.observation_tree), ("action", group.action_tree)):
                for leaf in tree.leaves:
                    if leaf.is_object:
                        self._refuse("spec", f"{what} space of {group.name!r}", "arrays of a fixed size", leaf.space)
        return spec

    def _refuse(self, call: str, what: str, expected: str, got: Any) -> NoReturn:
        raise ContractError(
            f"{self._name}.{call}(): {what}: expected {expected}, got {got}; correct the world{self._hint}"
        )

    def _run(self, call: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except MarlvecError:
            raise
        except Exception as error:
            raise ContractError(f"{self._name}.{call}(): raised {type(error).__name__}: {error}{self._hint}") from error

    def _trace(self, call: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, JaxRows]:
        found = self._run(call, lambda: self._jax.eval_shape(function, *arguments))
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], JaxRows):
            got = type(found).__name__ if not isinstance(found, tuple) else [type(part).__name__ for part in found]
            self._refuse(call, "the result", "(state, JaxRows)", got)
        return found

    def _check_rows(self, call: str, rows: JaxRows, *, stepped: bool) -> None:
        agent_num = len(self.spec.agents)
        for group in self._groups:
            leaves = self._run(call, partial(group.observation_tree.flatten, self._of(group, rows.obs, "obs")))
            for leaf, got in zip(group.observation_tree.leaves, leaves, strict=True):
                where = f"observations of {group.name!r}" + (f", leaf {leaf.path!r}" if leaf.path else "")
                self._check(call, where, got, (len(group.agents), *leaf.shape), leaf.dtype)
            if group.mask_size is not None:
                mask = None if rows.action_masks is None else self._of(group, rows.action_masks, "action_masks")
                where = f"action masks of {group.name!r}"
                self._check(call, where, mask, (len(group.agents), group.mask_size), np.bool_)
            elif rows.action_masks is not None and (self._lone or _entry(rows.action_masks, group.name) is not None):
                self._refuse(call, f"action masks of {group.name!r}", "None, since mask_sizes declares none", "masks")
        for what in ("rewards", "terminated", "truncated"):
            got = getattr(rows, what)
            if not stepped:
                if got is not None:
                    self._refuse(call, what, "None after a reset", got)
                continue
            self._check(call, what, got, (agent_num,), None if what == "rewards" else np.bool_)
            if what == "rewards" and np.dtype(got.dtype).kind != "f":
                self._refuse(call, what, "floats", got.dtype)
        if (rows.acting is not None) is not self.has_acting:
            self._refuse(call, "acting", "it in both of reset() and step(), or in none", rows.acting)
        if rows.acting is not None:
            self._check(call, "acting", rows.acting, (agent_num,), np.bool_)
        for what, infos in (("infos", rows.infos), ("agent_infos", rows.agent_infos)):
            if infos and not stepped:
                self._refuse(call, what, "none after a reset", sorted(infos))
            for name, got in infos.items():
                if what == "agent_infos" and tuple(got.shape[:1]) != (agent_num,):
                    self._refuse(call, f"{what}[{name!r}]", f"a first axis of {agent_num} agents", got.shape)

    def _check(self, call: str, what: str, got: Any, shape: tuple[int, ...], dtype: Any) -> None:
        wanted = f"shape {shape}" if dtype is None else f"{self.canonical(dtype)} of shape {shape}"
        if got is None or not hasattr(got, "shape"):
            self._refuse(call, what, wanted, got)
        if tuple(got.shape) != shape or (dtype is not None and np.dtype(got.dtype) != self.canonical(dtype)):
            self._refuse(call, what, f"{wanted}, as declared", f"{got.dtype} of shape {tuple(got.shape)}")

    def _check_state(self, before: Any, after: Any) -> None:
        """Check that a step returns a state of the form that a reset makes."""
        tree = self._jax.tree_util
        (first, form), (second, other) = (tree.tree_flatten_with_path(state) for state in (before, after))
        if form != other:
            self._refuse("step", "state", f"the structure that reset() makes, {form}", other)
        for (path, a), (_, b) in zip(first, second, strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                where = f"state{tree.keystr(path)}"
                wanted = f"{a.dtype} of shape {a.shape}, as reset() makes it"
                self._refuse("step", where, wanted, f"{b.dtype} of shape {b.shape}")


def _entry(tree: Any, name: str) -> Any:
    """Return a group's entry of a dict by group, or all of another object."""
    return tree.get(name) if isinstance(tree, Mapping) else tree
