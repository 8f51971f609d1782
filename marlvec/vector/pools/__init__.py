"""Pools: many envs behind one object of another library. `pool` is the contract; the rest are adapters to it."""
