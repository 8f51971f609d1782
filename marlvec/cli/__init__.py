"""The command line: ``marlvec`` and its commands, one module each in `marlvec.cli.commands`."""

from marlvec.cli.app import app, main

__all__ = ["app", "main"]
