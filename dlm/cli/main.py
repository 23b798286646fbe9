"""Entry point of the command `dlm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dlm import __version__
from dlm.cli import (
    chaos,
    cluster,
    demo,
    estimate,
    federate,
    inspect,
    merge,
    perplexity,
    pieces,
    privacy,
    prune,
    reduce,
    score,
    serve,
    shard,
    status,
    token,
    unigrams,
)
from dlm.cli import filter as filtering
from dlm.errors import ConfigError, DlmError

app = typer.Typer(
    name="dlm",
    help="Serve n-gram language models too large for one machine, exactly, over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dlm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve n-gram language models too large for one machine, exactly, over gRPC."""


app.command("demo")(demo.demo)
app.command("estimate")(estimate.estimate)
app.command("prune")(prune.prune)
app.command("reduce")(reduce.reduce)
app.command("merge")(merge.merge)
app.command("filter")(filtering.filter_)
app.command("perplexity")(perplexity.perplexity)
app.command("shard")(shard.shard)
app.command("verify")(inspect.verify)
app.command("info")(inspect.info)
app.command("export")(inspect.export)
app.command("serve")(serve.serve)
app.command("cluster")(cluster.cluster)
app.command("chaos")(chaos.chaos)
app.command("status")(status.status)
app.command("score")(score.score)
app.command("token")(token.token)
app.command("unigrams")(unigrams.unigrams)
app.command("pieces")(pieces.pieces)
app.command("federate")(federate.federate)
app.add_typer(privacy.app, name="privacy")


# Packages of the extra `train`; what needs them imports them when it is run.
TRAIN = {"dp_accounting", "jax", "optax", "scipy", "sentencepiece"}


def main() -> None:
    """Runs the command; exit status 1 is an error told on standard error, 2 wrong usage."""
    try:
        app()
    except DlmError as exc:
        _complain(exc)
    except OSError as exc:
        _complain(exc)
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").split(".")[0]
        if missing not in TRAIN:
            raise
        _complain(
            ConfigError(f"this needs {missing}, which is not there: pip install 'dlm[train]'")
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(exc: BaseException) -> None:
    text = str(exc)
    if isinstance(exc, OSError) and exc.strerror:
        text = exc.strerror if exc.filename is None else f"{exc.filename}: {exc.strerror}"
    print(f"dlm: {text}", file=sys.stderr)
    for note in getattr(exc, "__notes__", []):
        print(f"     {note}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
