"""Checks of envs and vectorizers, and scripted envs for your own tests: every number names its origin."""

from marlvec.testing import scripted
from marlvec.testing.check_connector import check_connector
from marlvec.testing.check_env import check_env
from marlvec.testing.check_native_env import NativeMatch, check_native_env
from marlvec.testing.check_vector_env import check_vector_env
from marlvec.testing.findings import Finding
from marlvec.testing.scripted import *  # noqa: F403  # its __all__ is the list

__all__ = [  # noqa: PLE0604  # all are strings
    "Finding",
    "NativeMatch",
    "check_connector",
    "check_env",
    "check_native_env",
    "check_vector_env",
    *scripted.__all__,
]
