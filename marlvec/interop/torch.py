"""`TorchPolicy`: a torch module as a policy; distributions over action spaces; recurrent modules over sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.extras import needs_extra
from marlvec.policies.policy import Policy, PolicyOutput, PolicyState
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.action_masks import OTHER_WIDTH, choice_sizes
from marlvec.trees import Tree, map_tree, to_array, tree_leaves, zip_trees

with needs_extra("torch", "TorchPolicy", "see https://pytorch.org"):
    import torch
    from torch import Tensor


__all__ = ["TorchPolicy"]


class Distribution(Protocol):
    """A distribution over actions, for n rows."""

    def sample(self, generator: torch.Generator) -> Tree:
        """Draw n actions with this generator only: tensors (n, …) in the shape of the action space."""

    def mode(self) -> Tree:
        """Return the most likely actions: tensors (n, …) in the shape of the action space."""

    def logp(self, actions: Tree) -> Tensor:
        """Return log-probabilities of actions: (n,)."""

    def entropy(self) -> Tensor:
        """Return entropies: (n,)."""


MakeDistribution = Callable[[Any, Tensor | None], Distribution]
"""Function of a module's action outputs, (n, k), and the action mask (n, m) bool or None, to a distribution."""


class Categorical:
    """Categorical distributions over k choices, numbered from ``start``; logits (n, k), -inf for masked choices."""

    def __init__(self, logits: Tensor, start: int = 0) -> None:
        self._logp = torch.log_softmax(logits, dim=-1)
        self._start = start

    def sample(self, generator: torch.Generator) -> Tensor:
        # The Gumbel-max trick. The noise is finite, so that masked choices never win.
        u = torch.rand(self._logp.shape, generator=generator, device=self._logp.device, dtype=self._logp.dtype)
        noise = -torch.log(-torch.log(u.clamp_min(torch.finfo(u.dtype).tiny)))
        return (self._logp + noise).argmax(dim=-1) + self._start

    def mode(self) -> Tensor:
        return self._logp.argmax(dim=-1) + self._start

    def logp(self, actions: Tensor) -> Tensor:
        return self._logp.gather(-1, (actions.long() - self._start)[..., None])[..., 0]

    def entropy(self) -> Tensor:
        p = self._logp.exp()
        # Without the -inf of masked choices: 0 * inf would be NaN, also in gradients of unselected branches.
        return -(p * self._logp.masked_fill(p == 0, 0.0)).sum(dim=-1)


class Gaussian:
    """Independent normal distributions of k numbers; inputs (n, 2 k): means, then log standard deviations."""

    def __init__(self, inputs: Tensor, shape: tuple[int, ...]) -> None:
        self._mean, self._log_std = inputs.chunk(2, dim=-1)
        self._shape = shape

    def sample(self, generator: torch.Generator) -> Tensor:
        mean = self._mean
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return (mean + noise * self._log_std.exp()).reshape(-1, *self._shape)

    def mode(self) -> Tensor:
        return self._mean.reshape(-1, *self._shape)

    def logp(self, actions: Tensor) -> Tensor:
        z = (actions.reshape(self._mean.shape) - self._mean) / self._log_std.exp()
        return -(0.5 * z**2 + self._log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def entropy(self) -> Tensor:
        return (self._log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)


class Product:
    """Independent distributions over the parts of one action."""

    def __init__(
        self, parts: list[Any], split: Callable[[Any], list[Tensor]], join: Callable[[list[Tensor]], Any]
    ) -> None:
        self._parts, self._split, self._join = parts, split, join

    def sample(self, generator: torch.Generator) -> Any:
        return self._join([part.sample(generator) for part in self._parts])

    def mode(self) -> Any:
        return self._join([part.mode() for part in self._parts])

    def logp(self, actions: Any) -> Tensor:
        pairs = zip(self._parts, self._split(actions), strict=True)
        return torch.stack([part.logp(action) for part, action in pairs]).sum(dim=0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self._parts]).sum(dim=0)


class Head:
    """Default distributions of an action space.

    A row needs ``size`` numbers, leaf by leaf: ``n`` logits for a Discrete; the logits of all dimensions, one after the
    other, for a MultiDiscrete, and two each for a MultiBinary; means, then log standard deviations for a Box of floats.
    Masks apply to a Discrete or MultiDiscrete as a whole, in the same order.
    """

    def __init__(self, tree: SpaceTree) -> None:
        self._tree = tree
        self._sizes = [_size(leaf) for leaf in tree.leaves]
        self.size = sum(self._sizes)
        self._masked = isinstance(tree.space, (Discrete, MultiDiscrete))

    def __call__(self, inputs: Any, mask: Tensor | None) -> Distribution:
        """Return the distributions of n rows, from (n, size) numbers and a mask (n, size)."""
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] != self.size:
            got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ContractError(
                f"module output: expected {self.size} numbers a row for {self._tree.space}, a tensor of shape "
                f"(n, {self.size}), got {got}"
            )
        if mask is not None and self._masked:
            if mask.shape != inputs.shape:
                raise ContractError(
                    f"action mask: expected {self.size} entries, one per choice, got {mask.shape[-1]}: {OTHER_WIDTH}"
                )
            inputs = inputs.masked_fill(~mask, -math.inf)
        pieces = inputs.split(self._sizes, dim=-1)
        parts = [_distribution(leaf, piece) for leaf, piece in zip(self._tree.leaves, pieces, strict=True)]
        if len(parts) == 1 and self._tree.is_leaf:
            only: Distribution = parts[0]
            return only
        return Product(parts, self._tree.flatten, self._tree.unflatten)

    def without_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return positions (k,) of rows for which a mask (n, size) allows no choice in some dimension."""
        if not self._masked or mask.shape[1] != self.size:  # `__call__` raises
            return np.zeros(0, np.int64)
        space: Any = self._tree.space
        starts = np.cumsum([0, *choice_sizes(space)[:-1]])
        return np.flatnonzero(~np.logical_or.reduceat(mask, starts, axis=1).all(axis=1))


def _size(leaf: Leaf) -> int:
    space: Any = leaf.space
    if isinstance(space, (Discrete, MultiDiscrete)):
        return int(choice_sizes(space).sum())
    if isinstance(space, MultiBinary) or (isinstance(space, Box) and leaf.dtype.kind == "f"):
        return 2 * math.prod(leaf.shape)
    raise UnsupportedSpaceError(
        f"no default distribution over {leaf} of the action space, {space}: pass TorchPolicy a distribution, or "
        f"discretize it with connectors"
    )


def _distribution(leaf: Leaf, inputs: Tensor) -> Any:
    space: Any = leaf.space
    if isinstance(space, Discrete):
        return Categorical(inputs, int(space.start))
    if isinstance(space, Box):
        return Gaussian(inputs, leaf.shape)
    binary = isinstance(space, MultiBinary)
    sizes = [2] * math.prod(leaf.shape) if binary else choice_sizes(space).tolist()
    starts = [0] * len(sizes) if binary else [int(k) for k in np.ravel(space.start)]
    parts = [Categorical(p, start) for p, start in zip(inputs.split(sizes, dim=-1), starts, strict=True)]

    def split(actions: Tensor) -> list[Tensor]:
        return list(actions.reshape(len(actions), len(sizes)).unbind(dim=1))

    def join(columns: list[Tensor]) -> Tensor:
        return torch.stack(columns, dim=1).reshape(-1, *leaf.shape)

    return Product(parts, split, join)


class Padding:
    """Marks which of B × T steps are real: ``count`` steps, in the order of the rows before padding.

    ``seq_lens`` (B,) are the numbers of real steps at the start of each sequence, ``length`` is T.
    """

    def __init__(self, seq_lens: Any, length: int, device: torch.device) -> None:
        self._lens: NDArray[np.int64] = np.asarray(seq_lens, np.int64)
        self._length, self._device = length, device
        here = np.arange(length) < self._lens[:, None]
        self.mask = torch.as_tensor(here, device=device)
        self.count = int(here.sum())

    def place(self, i: int) -> str:
        starts = np.cumsum(self._lens) - self._lens
        sequence = int(np.searchsorted(starts + self._lens, i, side="right"))
        return f"step {i - int(starts[sequence])} of sequence {sequence}"

    def take(self, tree: Tree) -> Tree:
        """Return the real steps of tensors (B, T, …): (n, …)."""
        return map_tree(lambda leaf: leaf[self.mask], tree)

    def fill(self, tree: Tree) -> Tree:
        """Return tensors (n, …) as (B, T, …), with zeros in the padding."""

        def filled(leaf: Tensor) -> Tensor:
            whole = leaf.new_zeros((*self.mask.shape, *leaf.shape[1:]))
            whole[self.mask] = leaf
            return whole

        return map_tree(filled, tree)

    def unroll(self, step: Callable[[Any, Any], Mapping[str, Tree]], obs: Tree, state: Tree) -> dict[str, Tree]:
        """Call a recurrent module step by step, for the sequences that have this step; join its dicts to (n, …).

        ``step`` takes obs (k, …) and state (k, …), and returns a dict with ``state_out``; ``obs`` is (B, T, …),
        ``state``, the one before the first step, (B, …).
        """
        starts = np.cumsum(self._lens) - self._lens
        parts, places = [], []
        running = np.flatnonzero(self._lens > 0)
        state = self._rows(state, running)
        for t in range(max(1, int(self._lens.max(initial=0)))):  # at least once, for the columns of no rows
            index = torch.as_tensor(running, device=self._device)
            output = step(_at(obs, index, t), state)
            if "state_out" not in output:
                raise ContractError(f"recurrent module: expected 'state_out', got only {list(output)}")
            parts.append(output)
            places.append(starts[running] + t)
            goes_on = np.flatnonzero(self._lens[running] > t + 1)
            state, running = self._rows(output["state_out"], goes_on), running[goes_on]
        order = torch.as_tensor(np.argsort(np.concatenate(places)), device=self._device)
        return {
            name: zip_trees(lambda leaves: torch.cat(leaves)[order], [part[name] for part in parts])
            for name in parts[0]
        }

    def _rows(self, tree: Tree, rows: NDArray[np.int64]) -> Tree:
        index = torch.as_tensor(rows, device=self._device)
        return map_tree(lambda leaf: leaf if len(leaf) == len(index) else leaf[index], tree)


def _at(tree: Tree, index: Tensor, t: int) -> Tree:
    return map_tree(lambda leaf: leaf[index, t], tree)


class PaddedDistribution:
    """Distributions of actions (B, T, …): one per real step; all results have zeros in the padding."""

    def __init__(self, flat: Distribution, padding: Padding) -> None:
        self._flat, self._padding = flat, padding

    def sample(self, generator: torch.Generator) -> Tree:
        return self._padding.fill(self._flat.sample(generator))

    def mode(self) -> Tree:
        return self._padding.fill(self._flat.mode())

    def logp(self, actions: Tree) -> Tensor:
        filled: Tensor = self._padding.fill(self._flat.logp(self._padding.take(actions)))
        return filled

    def entropy(self) -> Tensor:
        filled: Tensor = self._padding.fill(self._flat.entropy())
        return filled


class TorchPolicy(Policy):
    """A policy that calls a torch module, once per call for all rows.

    The module is called as ``module(obs)``, or as ``module(obs, state_in)`` if the rows have a column ``state_in``: put
    ``RnnState(initial)`` among the agent connectors. ``obs`` is a tensor (n, …), or a tree of tensors; floats have the
    dtype of the module's parameters, other dtypes are unchanged. It returns the parameters of the action distribution,
    a tensor (n, k); or a dict:

    =============  ===========================================================================================
    ``inputs``     (n, k), parameters of the action distribution
    ``values``     (n,) or (n, 1), values of the rows; a column of the batch
    ``state_out``  a tree of (n, …), if there is a state
    other keys     trees of (n, …), columns of the batch under their names
    =============  ===========================================================================================

    `marlvec.interop.torch.Head` lists the number k for each space, and the order. With an action mask,
    masked actions have probability 0. The batch gets a column ``logp`` (n,) of the taken actions under the
    distribution, also if the most likely actions were taken instead of drawn ones.

    `forward`, `values` and `probabilities` also accept padded sequences (B, T, …), as made by `PadSequences` and
    `SampleBatch.right_zero_pad`, and return (B, T, …), with zeros in the padding. A recurrent module is called once per
    step, for the sequences that have this step; it starts with each sequence's ``state_in`` (B, …), and continues from
    its own ``state_out``, through which gradients flow (backpropagation through time). So the same module acts and
    learns, and never receives padding. A module that is faster on whole sequences (`torch.nn.LSTM`) can have a method
    ``forward_sequences(obs, state_in)``, which takes ``obs`` (B, T, …), zeros in the padding, and ``state_in`` (B, …);
    it returns ``inputs`` (B, T, k) and, if any, ``values`` (B, T) or (B, T, 1), and any other columns.

    `act` computes no gradient, the module is in eval mode, and random numbers come from the policy's generator: torch's
    global one is neither read nor changed.

    Args:
        module: The module; moved to ``device``.
        distribution: ``(inputs, mask) -> distribution``, an object with ``sample(generator)``, ``mode()``,
            ``logp(actions)``, ``entropy()``; see `marlvec.interop.torch.Distribution`. None: the action
            space's default.
        device: Device of the module, e.g. ``"cuda"``.
        seed: Seed of its random generator; None: from the collector's seed.

    Raises:
        MissingExtraError: (By the import.) torch is not installed.
        ArgumentError: ``module`` is not a module, or ``distribution`` not a function.

    Attributes:
        module, device: As given.
        version: One more after each `note_update` and `load_state_dict`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        distribution: MakeDistribution | None = None,
        *,
        device: str | torch.device = "cpu",
        seed: int | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(f"TorchPolicy(): expected a torch.nn.Module, got {type(module).__name__}")
        if distribution is not None and not callable(distribution):
            raise ArgumentError(
                f"distribution must be a function (inputs, mask) -> distribution, or None, got {distribution!r}"
            )
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.seed = seed
        self._given = distribution
        self._head: Head | None = None
        self._make: MakeDistribution | None = distribution
        self._tree: SpaceTree | None = None
        self._generator = torch.Generator(self.device)
        self._generator.manual_seed(0 if seed is None else seed)

    def __repr__(self) -> str:
        return f"TorchPolicy({type(self.module).__name__}, device={str(self.device)!r}, version {self.version})"

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self._tree = SpaceTree(action_space)
        if self._given is None:
            self._make = self._head = Head(self._tree)
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        if self.seed is None:
            self._generator.manual_seed(seed)

    def note_update(self) -> None:
        """Count an update of the module's weights, e.g. after an optimizer's step: increases `version` by one."""
        self.version += 1

    # --- acting

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Draw one action per row, or take the most likely one if ``explore`` is False.

        Raises:
            StateError: `setup` was not called.
            ContractError: The module's output has another form, or contains NaN; or a mask allows no action. Names the
                row.
        """
        if self._tree is None:
            raise StateError("this TorchPolicy has no action space yet: call setup() first, or use a Collector")

        def where(i: int) -> str:
            return f"env {int(rows['env_id'][i])}, agent {int(rows['agent_index'][i])}"

        mask = rows.get("action_mask")
        if mask is not None and self._head is not None and len(stuck := self._head.without_choice(mask)):
            raise ContractError(
                f"action mask of {where(int(stuck[0]))}: expected an allowed action for an agent that must act, "
                f"got none"
            )
        with torch.no_grad(), _eval_mode(self.module):
            distribution, columns = self._forward(rows, where)
            actions = distribution.sample(self._generator) if explore else distribution.mode()
            columns = {"logp": distribution.logp(actions), **columns}
        leaves = [_to_numpy(value) for value in self._tree.flatten(actions)]
        for k, leaf in enumerate(self._tree.leaves):
            if np.can_cast(leaves[k].dtype, leaf.dtype, "same_kind"):  # the collector refuses other kinds
                leaves[k] = leaves[k].astype(leaf.dtype, copy=False)
        return self._tree.unflatten(leaves), {name: map_tree(_to_numpy, column) for name, column in columns.items()}

    def forward(self, rows: Rows) -> tuple[Distribution, dict[str, Tree]]:
        """Call the module on rows, with gradients, for a learner's loss; the module's mode is unchanged.

        Args:
            rows: n rows, or a batch: ``policy.forward(batch["main"])``; or sequences (B, T, …) with a column
                ``seq_lens``.

        Returns:
            The distribution of their actions, and the module's other columns, tensors: ``values``, … For sequences the
                distribution's ``logp(actions)`` takes actions (B, T, …), and returns (B, T), as ``entropy()`` does;
                both are 0 in the padding. Multiply losses by ``loss_mask``.

        Raises:
            StateError: `setup` was not called.
            ContractError: The module's output has another form, or contains NaN.
        """
        return self._forward(rows, "row {}".format)

    def values(self, rows: Rows) -> NDArray[Any]:
        """Compute the values of rows: a value function for learner connectors such as GAE.

        Returns:
            (n,) floats; (B, T) for sequences.

        Raises:
            ContractError: The module returns no ``values``.
        """
        with torch.no_grad(), _eval_mode(self.module):
            _, columns = self._forward(rows, "row {}".format)
        if "values" not in columns:
            raise ContractError(f"module of {self!r}: expected 'values', got only {['inputs', *columns]}")
        return _to_numpy(columns["values"])

    def probabilities(self, rows: Rows) -> NDArray[Any]:
        """Compute the probability of each action; masked actions have 0.

        Returns:
            (n, k) floats; (B, T, k) for sequences, meaningless in the padding.

        Raises:
            ArgumentError: The action space is not Discrete.
        """
        if not isinstance(self.action_space, Discrete):
            raise ArgumentError(f"probabilities(): expected a Discrete action space, got {self.action_space}")
        first, k = int(self.action_space.start), int(self.action_space.n)
        with torch.no_grad(), _eval_mode(self.module):
            distribution, _ = self._forward(rows, "row {}".format)
            shape = (len(rows), _length(rows)) if "seq_lens" in rows else (len(rows),)
            every = [torch.full(shape, first + i, device=self.device) for i in range(k)]
            return _to_numpy(torch.stack([distribution.logp(action).exp() for action in every], dim=-1))

    def _forward(self, rows: Rows, where: Callable[[int], str]) -> tuple[Distribution, dict[str, Tree]]:
        if self._make is None:
            raise StateError("this TorchPolicy has no action space yet: call setup() first, or use a Collector")
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

        def tensor(leaf: Any) -> Tensor:
            array = np.asarray(leaf)
            # torch warns of read-only arrays, since it could write into them.
            direct = array.flags.writeable and array.flags.c_contiguous
            found = torch.from_numpy(array if direct else array.copy()).to(self.device)
            return found.to(dtype) if found.is_floating_point() else found

        padding = Padding(rows["seq_lens"], _length(rows), self.device) if "seq_lens" in rows else None
        obs = map_tree(tensor, rows["obs"])
        state = (map_tree(tensor, rows["state_in"]),) if "state_in" in rows else ()
        mask = tensor(rows["action_mask"]) if "action_mask" in rows else None
        if padding is None:
            columns = self._call(self.module, obs, *state)
            return self._distribution(columns, mask, len(rows), where), columns
        if mask is not None:
            mask = padding.take(mask)
        if hasattr(self.module, "forward_sequences"):
            columns = self._call(self.module.forward_sequences, obs, *state)
            flat: dict[str, Tree] = {}
            for name in ("inputs", "values"):
                if name in columns:
                    flat[name] = padding.take(columns[name])
            distribution = self._distribution(flat, mask, padding.count, padding.place)
            del columns["inputs"]
            return PaddedDistribution(distribution, padding), {**columns, **map_tree(padding.fill, flat)}
        if state:
            flat = padding.unroll(lambda *given: self._call(self.module, *given), obs, *state)
        else:
            flat = self._call(self.module, padding.take(obs))
        distribution = self._distribution(flat, mask, padding.count, padding.place)
        return PaddedDistribution(distribution, padding), {name: padding.fill(column) for name, column in flat.items()}

    def _call(self, module: Callable[..., Any], *given: Tree) -> dict[str, Tree]:
        """Call the module, or its `forward_sequences`, and return its columns, ``inputs`` among them."""
        output = module(*given)
        columns = dict(output) if isinstance(output, Mapping) else {"inputs": output}
        if "inputs" not in columns:
            raise ContractError(f"module of {self!r}: expected a dict with 'inputs', got keys {list(columns)}")
        if "logp" in columns:
            raise ContractError(f"module of {self!r}: expected no 'logp', which the policy computes; use another key")
        return columns

    def _distribution(
        self, columns: dict[str, Tree], mask: Tensor | None, n: int, where: Callable[[int], str]
    ) -> Distribution:
        """Take ``inputs`` out of n rows' columns, check ``values``, and make the distribution."""
        inputs = columns.pop("inputs")
        if isinstance(inputs, torch.Tensor) and bool((bad := torch.isnan(inputs)).any()):
            row = int(bad.nonzero()[0, 0])
            raise ContractError(f"module of {self!r}: expected finite 'inputs', got NaN, first for {where(row)}")
        if "values" in columns:
            columns["values"] = self._one_number(columns["values"], n)
        assert self._make is not None  # `_forward` refuses otherwise
        return self._make(inputs, mask)

    def _one_number(self, values: Any, n: int) -> Any:
        shape = tuple(values.shape)
        if shape not in ((n,), (n, 1)):
            raise ContractError(f"module of {self!r}: expected 'values' of shape ({n},) or ({n}, 1), got {shape}")
        return values.reshape(n)

    # --- state

    def state_dict(self) -> PolicyState:
        """Return weights and random generator as arrays; dtypes that numpy lacks (bfloat16) as their bits."""
        return {"module": self.get_weights(), "generator": self._generator.get_state().numpy().copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"module", "generator"}:
            raise ArgumentError(f"expected the state of a TorchPolicy, got {list(state)}")
        weights = self._module_weights(state["module"])
        generator = torch.Generator(self.device)
        try:
            generator.set_state(torch.from_numpy(np.array(state["generator"], np.uint8)))
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"state: expected a random generator of the device {str(self.device)!r}: {error}"
            ) from error
        self.module.load_state_dict(weights)
        self._generator = generator
        self.version += 1

    def get_weights(self) -> PolicyState:
        """Return the module's weights and buffers as arrays; dtypes that numpy lacks (bfloat16) as their bits."""
        return {
            name: _bits(value) if isinstance(value, torch.Tensor) else value
            for name, value in self.module.state_dict().items()
        }

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        self.module.load_state_dict(self._module_weights(weights))

    def _module_weights(self, given: Mapping[str, Any]) -> dict[str, Any]:
        own = self.module.state_dict()
        if own.keys() != given.keys():
            missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
            raise ArgumentError(f"weights: expected those of this module; {missing} are missing, {extra} unknown")
        return {name: self._like(name, given[name], own[name]) for name in own}

    def _like(self, name: str, value: Any, own: Any) -> Any:
        """Return a tensor of the module's dtype from an array of its bits."""
        if not isinstance(own, torch.Tensor):
            return value
        array = np.array(value)
        mine = _bits(own)
        if array.shape != mine.shape or array.dtype != mine.dtype:
            raise ArgumentError(
                f"weight {name!r}: expected {mine.dtype} of shape {mine.shape}, got {array.dtype} of {array.shape}"
            )
        return (
            torch.from_numpy(array).view(own.dtype) if array.ndim else torch.from_numpy(array[None]).view(own.dtype)[0]
        )


def _length(rows: Rows) -> int:
    """Return T of sequences (B, T, …)."""
    _, leaf = next(tree_leaves(rows["obs"]))
    return int(to_array(leaf).shape[1])


@contextmanager
def _eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Set a module and all its parts to eval mode, and restore each part's mode at exit."""
    if not any(part.training for part in module.modules()):
        yield
        return
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def _bits(tensor: Tensor) -> NDArray[Any]:
    """Copy a tensor to an array; if numpy lacks the dtype, as integers of its size."""
    tensor = tensor.detach().cpu().contiguous()
    try:
        array: NDArray[Any] = tensor.numpy().copy()
        return array
    except TypeError:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        flat: NDArray[Any] = tensor.reshape(-1).view(kind).numpy().copy()
        return flat.reshape(tuple(tensor.shape))


def _to_numpy(value: Any) -> NDArray[Any]:
    """Convert a tensor to an array; bfloat16, which numpy lacks, to float32, without loss."""
    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array
