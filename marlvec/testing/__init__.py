"""Checks of envs and vectorizers, and scripted envs for your own tests: their data say where they come from."""

from marlvec.testing import scripted
from marlvec.testing.check_connector import check_connector
from marlvec.testing.check_env import check_env
from marlvec.testing.check_native_env import NativeMatch, check_native_env
from marlvec.testing.check_vector_env import check_vector_env
from marlvec.testing.env_checks.findings import Finding
from marlvec.testing.scripted import *  # noqa: F403  # they are listed there, and once is enough

__all__ = [  # noqa: PLE0604  # all of these are strings
    "Finding",
    "NativeMatch",
    "check_connector",
    "check_env",
    "check_native_env",
    "check_vector_env",
    *scripted.__all__,
]
