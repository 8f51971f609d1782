"""Prints typer's usage errors in one line, as all errors of marlvec."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from marlvec.cli.console import complain, did_you_mean

__all__ = ["CommandGroup"]

# typer may use its own copy of click; its public names lead to the right classes.
_UsageError: Any = typer.BadParameter.__mro__[1]


class CommandGroup(TyperGroup):
    """The commands; usage errors are printed in one line that begins with ``error:``, with exit code 2."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; paragraphs of its help become single lines, which the terminal wraps."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = _unwrapped(command.help)
            _hide_types_of_flags(command.get_params(ctx))
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        options = super().get_params(ctx)
        _hide_types_of_flags(options)
        return options

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run as typer does, but without its frame around errors."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _UsageError as error:
            if not standalone_mode:
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(error.ctx.get_help())
                sys.exit(0)
            complain(_in_a_line(error, prog_name or "marlvec"))
            sys.exit(2)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _hide_types_of_flags(options: Sequence[Any]) -> None:
    """Hide ``<bool>`` in the help of flags, which take no value."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""


def _unwrapped(text: str) -> str:
    """Remove a docstring's line breaks inside paragraphs; indented lines are examples, and stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else " ".join(part.split()) for part in paragraphs)


def _in_a_line(error: Any, program: str) -> str:
    """Return a usage error in one line, with the command that shows the usage."""
    text = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
    if found := re.fullmatch(r"No such command '(.*)'", text):  # older typers have no suggestions
        text += did_you_mean(found[1], error.ctx.command.list_commands(error.ctx))
    command = program if error.ctx is None else error.ctx.command_path
    parameter = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and getattr(parameter, "metavar", None) == "ENV":
        text += f", e.g. `{command} simple_spread`; `{program} envs` lists them"
    end = "" if text.endswith("?") else ";"
    return f"{text[:1].lower()}{text[1:]}{end} `{command} -h` shows what it takes"
