"""Formats help: commands under headings and, at the end, examples that can be pasted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from dlm.cli.options import spread

EXAMPLES = "\n\nExamples:\n"
# Options of KenLM's lmplz -> ours.
OF_LMPLZ = {
    "-S": "--memory",
    "-T": "--tmp",
    "--temp_prefix": "--tmp",
    "--limit_vocab_file": "--vocab",
    "--discount_fallback": "--discount-fallback",
    "--skip_symbols": "--skip",
    "--arpa": "--output",
}


def _write_examples(formatter: Any, examples: str | None) -> None:
    """Writes lines unwrapped: a wrapped command cannot be pasted."""
    if examples:
        formatter.write_paragraph()
        formatter.write_heading("Examples")
        for line in examples.splitlines():
            formatter.write(f"  {line}".rstrip() + "\n")


class CommandHelp(TyperCommand):
    """A command whose help ends with its examples, the `epilog`."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(formatter, self.epilog)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments; rejects a second --output, and lmplz's options."""
        if not ctx.resilient_parsing:
            self._refuse_lmplz(ctx, args)
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            if sum(param.name == "output" for param in order) > 1:
                orders = any(param.name == "order" for param in self.params)
                ctx.fail(
                    "--output (-o) is given more than once; give it once"
                    + ("; the order of the model is -n, --order" if orders else "")
                )
        return super().parse_args(ctx, args)

    def _refuse_lmplz(self, ctx: Any, args: list[str]) -> None:
        """Rejects an option of KenLM's lmplz, and names dlm's option if the command has it."""
        known = {name for param in self.params for name in param.opts}
        for given in args[: args.index("--")] if "--" in args else args:
            name = given.partition("=")[0]
            ours = OF_LMPLZ.get(name if name.startswith("--") else name[:2])
            if ours in known and name not in known:
                ctx.fail(f"No such option: {name}. In dlm, lmplz's {name} is called {ours}")


class GroupHelp(TyperGroup):
    """A group of commands, listed under the headings of `rich_help_panel`. Without arguments, it
    prints `FIRST_STEPS`, or its help, and exits with 0."""

    FIRST_STEPS: ClassVar[str] = ""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {}
        for command in self.commands.values():
            if not command.hidden:
                heading = str(getattr(command, "rich_help_panel", None) or "Commands")
                sections.setdefault(heading, []).append(command)
        width = max((len(str(name)) for name in self.commands), default=0)
        for heading, commands in sections.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (f"{c.name:{width}}", c.get_short_help_str(formatter.width - width - 6))
                        for c in commands
                    ]
                )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(formatter, self.epilog)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments; if there are none, prints the first steps."""
        if not args and not ctx.resilient_parsing:
            print(self.FIRST_STEPS or ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)


def split_examples(text: str) -> tuple[str, str]:
    """Splits a docstring into the text before its section `Examples:`, and the section's lines."""
    before, _, examples = inspect.cleandoc(text).partition(EXAMPLES)
    return before, inspect.cleandoc(examples)


def add_command(app: typer.Typer, name: str, heading: str, function: Callable[..., Any]) -> None:
    """Adds a function as a command: its docstring is the help; `spread` converts its parameters."""
    text, examples = split_examples(function.__doc__ or "")
    command = app.command(
        name, cls=CommandHelp, help=text, epilog=examples, rich_help_panel=heading
    )
    command(spread(function))


class Group(NamedTuple):
    """Commands under one name, each with its heading; `app` makes a Typer app of them."""

    help: str
    examples: str
    commands: dict[str, tuple[str, Callable[..., Any]]]

    def app(self) -> typer.Typer:
        app = typer.Typer(
            cls=GroupHelp, help=self.help, epilog=self.examples, rich_markup_mode=None
        )
        for name, (heading, function) in self.commands.items():
            add_command(app, name, heading, function)
        return app
