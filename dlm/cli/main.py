"""Entry point of the command `dlm`."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from dlm import __version__
from dlm.errors import ConfigError, DlmError
from dlm.extras import packages_of, pip_install

# By name the module of each command in dlm.cli, and what stands for the command there. Only what is
# run is imported: to import all of them takes as long as to score 100,000 words.
COMMANDS = {
    "demo": ("demo", "demo"),
    "estimate": ("estimate", "estimate"),
    "prune": ("prune", "prune"),
    "reduce": ("reduce", "reduce"),
    "merge": ("merge", "merge"),
    "filter": ("filter", "filter_"),
    "distill": ("distill", "distill"),
    "perplexity": ("perplexity", "perplexity"),
    "evaluate": ("evaluate", "evaluate"),
    "shard": ("shard", "shard"),
    "verify": ("inspect", "verify"),
    "info": ("inspect", "info"),
    "export": ("inspect", "export"),
    "serve": ("serve", "serve"),
    "cluster": ("cluster", "cluster"),
    "chaos": ("chaos", "chaos"),
    "status": ("status", "status"),
    "score": ("score", "score"),
    "rescore": ("rescore", "rescore"),
    "transcribe": ("transcribe", "transcribe"),
    "wer": ("wer", "wer"),
    "token": ("token", "token"),
    "unigrams": ("unigrams", "unigrams"),
    "pieces": ("pieces", "pieces"),
    "federate": ("federate", "federate"),
    "pipeline": ("pipeline", "pipeline"),
    "privacy": ("privacy", "app"),
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dlm {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve n-gram language models too large for one machine, exactly, over gRPC."""
    # gRPC reads it when a command imports it. Its own lines are not JSON and name lines of its
    # source. The command itself reports servers that cannot be reached.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def program(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """`dlm` with these commands."""
    out = typer.Typer(
        name="dlm",
        help="Serve n-gram language models too large for one machine, exactly, over gRPC.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    out.callback()(options)
    for name in names:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(f"dlm.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            out.add_typer(command, name=name)
        else:
            out.command(name)(command)
    return out


def __getattr__(name: str) -> Any:
    """`app`: `dlm` with all of its commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("app", program())


# What extras bring; what needs them imports them when it is run.
EXTRAS = {
    "train": {"cryptography", "dp_accounting", "jax", "optax", "scipy", "sentencepiece"},
    "asr": {"flashlight", "hama", "pocketsphinx", "soundfile", "soxr"},
}


# What ends a command from outside: a service manager or `timeout`, a terminal that closes.
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _ended(number: int, _frame: FrameType | None) -> NoReturn:
    """Ends the command as an error would, so that it removes what it was writing.

    Once: whoever sends the signal twice (`timeout` does) must not interrupt the removal.
    """
    for other in END_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Runs the command.

    Exit status: 1 is an error, shown on standard error; 2 wrong usage; 128 and the number of a
    signal that ended it.
    """
    for number in END_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # not where nohup ignores it
            signal.signal(number, _ended)
    wanted = sys.argv[1:2]
    try:
        program(wanted if wanted and wanted[0] in COMMANDS else COMMANDS)()
    except DlmError as exc:
        _complain(exc)
    except OSError as exc:
        _complain(exc)
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").split(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if missing in packages), None)
        if extra is None:
            raise
        command = pip_install(packages_of(extra))
        _complain(
            ConfigError(f"this command needs {missing}, which is not installed; run\n  {command}")
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(exc: BaseException) -> None:
    text = str(exc)
    if isinstance(exc, OSError) and exc.strerror:
        text = exc.strerror if exc.filename is None else f"{exc.filename}: {exc.strerror}"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            text += "; free room on that disk, or write to another. What was there is as it was"
    print(f"dlm: {text}", file=sys.stderr)
    for note in getattr(exc, "__notes__", []):
        print(f"     {note}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
