"""The command line: ``marlvec rollout`` and ``marlvec envs``."""

from marlvec.cli.app import app, main

__all__ = ["app", "main"]
