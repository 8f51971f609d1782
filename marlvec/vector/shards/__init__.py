"""Shards, which run a contiguous slice of the envs: one by one, in kernels, or in a pool."""
