"""Native envs: compiled by numba, many in one call, with their reference's numbers bit for bit.

docs/tutorials/native_env.md shows how to write one. Importing this package does not import numba: loading a kernel
does.
"""

from marlvec.native.catalog import NativeEntry, register_native
from marlvec.native.native_env import NativeEnv, Rows

__all__ = ["NativeEntry", "NativeEnv", "Rows", "register_native"]
