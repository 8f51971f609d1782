"""Pools: many envs behind one object of somebody else's making. `pool` is the contract, the rest are its adapters."""
