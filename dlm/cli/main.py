"""Entry point of the command `dlm`."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm import __version__
from dlm.cli.checks import remove_empty_folders
from dlm.cli.help import Group, GroupHelp, add_command
from dlm.cli.output import begin_waiting, stop_waiting
from dlm.errors import ConfigError, DlmError
from dlm.files import NO_ROOM
from dlm.resources import MORE_FILES, check_open_files
from dlm.signals import end_signals

# Command -> its module in dlm.cli, and the function's name. Only the command that runs is imported:
# importing all commands takes as long as scoring 100,000 words.
COMMANDS = {
    "demo": ("demo", "demo"),
    "compile": ("compile", "compile_"),
    "explain": ("reference", "explain"),
    "shard": ("shard", "shard"),
    "reshard": ("reshard", "reshard"),
    "push": ("push", "push"),
    "fetch": ("push", "fetch"),
    "serve": ("serve", "serve"),
    "cluster": ("cluster", "cluster"),
    "gateway": ("gateway", "gateway"),
    "status": ("status", "status"),
    "rollout": ("rollout", "rollout"),
    "token": ("token", "token"),
    "score": ("score", "score"),
    "perplexity": ("score", "perplexity"),
    "rescore": ("rescore", "rescore"),
    "transcribe": ("transcribe", "transcribe"),
    "wer": ("wer", "wer"),
    "estimate": ("estimate", "estimate"),
    "prune": ("prune", "prune"),
    "reduce": ("prune", "reduce"),
    "merge": ("merge", "merge"),
    "filter": ("prune", "filter_"),
    "distill": ("distill", "distill"),
    "evaluate": ("evaluate", "evaluate"),
    "info": ("inspect", "info"),
    "verify": ("inspect", "verify"),
    "export": ("inspect", "export"),
    "pipeline": ("pipeline", "pipeline"),
    "unigrams": ("unigrams", "unigrams"),
    "pieces": ("unigrams", "pieces"),
    "federate": ("federate", "federate"),
    "devices": ("devices", "GROUP"),
    "privacy": ("privacy", "GROUP"),
}

# The first command under each heading of `dlm --help`; the next ones in `COMMANDS` follow it.
HEADINGS = {
    "demo": "Start here",
    "shard": "Serve a model",
    "score": "Score and decode",
    "estimate": "Make a model",
    "info": "Inspect shards",
    "pipeline": "Train privately",
}

# `begin_waiting` is skipped for commands that answer at once or run until stopped, and for `MUTE`.
OWN_WORDS = {
    *("cluster", "compile", "demo", "devices", "explain", "gateway", "info", "rollout", "score"),
    *("serve", "status", "token"),
}
MUTE = {"-q", "--quiet", "--help"}

SUMMARY = "Serve n-gram language models too big for one machine, over gRPC, and build them."
FIRST_STEPS = f"""\
{SUMMARY}

See it work:    dlm demo
Serve a model:  dlm shard MODEL.arpa --shards 2 --output shards, then dlm cluster shards
All commands:   dlm --help"""
EXAMPLES = """\
dlm demo
dlm shard model.arpa.zst --shards 2 --output shards/model
dlm cluster shards/model
echo "the man went home" | dlm score --cluster cluster.toml"""


class RootHelp(GroupHelp):
    """Help for `dlm` itself."""

    FIRST_STEPS = FIRST_STEPS


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dlm {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `dlm` itself."""
    check_open_files(may_raise=True)


def program(names: Iterable[str] = COMMANDS, *, titles: bool = False) -> typer.Typer:
    """Makes `dlm` with these commands; `titles` omits their options, which take time to make."""
    out = typer.Typer(
        name="dlm",
        cls=RootHelp,
        help=SUMMARY,
        epilog=EXAMPLES,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    out.callback()(options)
    heading, headings = "", {}
    for name in COMMANDS:
        headings[name] = heading = HEADINGS.get(name, heading)
    for name in names:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(f"dlm.cli.{module}"), attribute)
        if titles:
            add_command(out, name, headings[name], _title(command))
        elif isinstance(command, Group):
            out.add_typer(command.app(), name=name, rich_help_panel=headings[name])
        else:
            add_command(out, name, headings[name], command)
    return out


def _title(command: Any) -> Callable[[], None]:
    def title() -> None: ...

    title.__doc__ = command.help if isinstance(command, Group) else command.__doc__
    return title


def _program_for(arguments: list[str]) -> typer.Typer:
    """Makes `dlm` with the command that the arguments name, or with all commands' titles."""
    if "_DLM_COMPLETE" in os.environ:  # a shell asks for completions
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        arguments = line.split()[1:]
    elif not arguments:
        return program(())
    if arguments and arguments[0] in COMMANDS:
        return program(arguments[:1])
    return program(titles=True)


def __getattr__(name: str) -> Any:
    """The attribute `app`: `dlm` with all of its commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("app", program())


# Extra -> its packages; a command that needs one imports it when it runs.
EXTRAS = {
    "train": {"cryptography", "dp_accounting", "jax", "optax", "scipy", "sentencepiece"},
    "asr": {"flashlight", "hama", "pocketsphinx", "soundfile", "soxr"},
}


def main() -> None:
    """Runs the command. Exit statuses are in README.md of this folder."""
    end_signals.install()
    if sys.argv[1:] and sys.argv[1] in COMMANDS.keys() - OWN_WORDS and not MUTE & {*sys.argv[2:]}:
        begin_waiting()
    try:
        _program_for(sys.argv[1:])(prog_name="dlm")  # also if run as python -m dlm
    except (DlmError, OSError) as exc:
        _complain(exc)
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").split(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if missing in packages), None)
        if extra is None:
            raise
        from dlm.extras import packages_of, pip_install  # loads importlib.metadata, so only here

        command = pip_install(packages_of(extra))
        _complain(
            ConfigError(f"this command needs {missing}, which is not installed; run\n  {command}")
        )
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        stop_waiting()
        remove_empty_folders()


def _free(path: str | None) -> str:
    if path is None:
        return ""
    try:
        free = shutil.disk_usage(Path(path).absolute().parent).free
    except OSError:
        return ""
    return f" ({free:,} bytes are free now)"


def _complain(exc: BaseException) -> None:
    text = str(exc)
    if isinstance(exc, OSError) and exc.strerror:
        text = exc.strerror if exc.filename is None else f"{exc.filename}: {exc.strerror}"
        if exc.errno in NO_ROOM:
            if "Free space" not in text:
                text += f"; free some space on that disk{_free(exc.filename)}, or write to another"
            # Part of the output may already have been written.
            text += ". " + ("No partial output is left; existing" if exc.filename else "Existing")
            text += " files are unchanged"
        elif exc.errno == errno.EMFILE:
            text += f". {MORE_FILES}"
    print(f"dlm: {text}", file=sys.stderr)
    for note in getattr(exc, "__notes__", []):
        print(f"     {note}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
