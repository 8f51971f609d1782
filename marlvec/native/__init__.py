"""Native envs: compiled by numba, many in one call, with their reference's numbers bit for bit.

`native_env` has the contract and how to write a native env; `catalog` lists all. Importing this package does not import
numba: loading a kernel does.
"""

from marlvec.native.catalog import NativeEntry, register_native
from marlvec.native.native_env import NativeEnv, Rows

__all__ = ["NativeEntry", "NativeEnv", "Rows", "register_native"]
