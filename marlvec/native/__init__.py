"""Batched kernels: envs compiled by numba, many in one call, the same numbers as their reference, bit for bit.

`native_env` says what a native env is and how to write one; `catalog` which ones there are. Importing this package
imports no numba: that happens where a kernel is loaded.
"""

from marlvec.native.catalog import NativeEntry, register_native
from marlvec.native.native_env import NativeEnv, Rows

__all__ = ["NativeEntry", "NativeEnv", "Rows", "register_native"]
