"""`python -m loadtest`: load tests of a dlm cluster. Only cli/ prints and exits."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from dlm.errors import DlmError
from dlm.extras import packages_of, pip_install
from loadtest.cli.capacity import capacity, plan
from loadtest.cli.chaos import chaos
from loadtest.cli.options import TraceOutput
from loadtest.cli.paper import paper
from loadtest.cli.run import CTRL_C, print_table, run, show_report

# Packages of the extra `asr` that are needed only to record speech.
SPEECH = {"flashlight", "hama", "soundfile", "soxr"}

app = typer.Typer(
    name="python -m loadtest",
    help="Measure a dlm cluster with recorded requests of speech decoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.command()(run)
app.command()(paper)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder of a run, or its report.json.")],
) -> None:
    """Print the report of a run again, and write its files.

    This also works for a run that was killed.

    Example: python -m loadtest report loadtest-results/2026-11-22T10-00-00
    """
    from loadtest.report.session import read_report, write_report

    found = read_report(results)
    show_report(found)
    folder = results if results.is_dir() else results.parent
    write_report(found, folder)
    print(f"wrote {folder}/report.html, report.json, report.csv")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="report.json, or its folder, to compare with.")],
    after: Annotated[Path, typer.Argument(help="report.json, or its folder, of the change.")],
    threshold: Annotated[
        float, typer.Option(help="Percent by which a figure may get worse.")
    ] = 10.0,
) -> None:
    """Compare two reports; the exit status is 1 if a figure got worse.

    A figure counts as worse if its ratio is beyond the threshold and its 95 % interval, from the
    windows of both runs, leaves out 1.

    Example: python -m loadtest compare main/report.json branch/report.json
    """
    from loadtest.report.compare import compare as ratios, differences
    from loadtest.report.session import read_report
    from loadtest.report.table import number

    first, second = read_report(before), read_report(after)
    for text in differences(first, second):
        print(f"! {text}", file=sys.stderr)
    found = ratios(first, second, threshold / 100)
    rows = []
    for one in found:
        interval = "-" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        mark = "worse" if one.is_worse else ""
        rows.append((one.name, number(one.before), number(one.after), ratio, interval, mark))
    print_table(("", "before", "after", "ratio", "95 % interval", ""), rows)
    if any(one.is_worse for one in found):
        raise typer.Exit(1)


@app.command()
def record(
    source: Annotated[
        Path,
        typer.Argument(
            help="Audio: a file or a folder. Or lattices: SLF, a file or a folder. Or text: a "
            "sentence per line, or TSV with the columns seconds, speaker and text."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="cluster.toml, folder of a shard set, ARPA file or dlm://HOST:PORT.")
    ],
    output: TraceOutput,
    contexts: Annotated[int, typer.Option(min=1, max=1000, help="Hypotheses; for text only.")] = 10,
    words: Annotated[
        int, typer.Option(min=1, max=1000, help="Candidates per position; for text only.")
    ] = 20,
    lm_scale: Annotated[
        float, typer.Option(help="Weight of the language model; for lattices only.")
    ] = 12.0,
    spoken: Annotated[
        bool,
        typer.Option("--spoken", help="Reduce the text to lower-case letters and apostrophes."),
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of utterances; 0: all.")] = 0,
    audio: Annotated[
        str, typer.Option(help="Source and licence of the audio, to store in the trace.")
    ] = "",
) -> None:
    """Record a decoder's requests to a model.

    Requests are word by word for audio, and by position for lattices and text. Audio is decoded as
    dlm transcribe does, and lattices are rescored as dlm rescore does. For text, candidates are the
    words with the most similar spelling, and all letters take equal time.

    Example: python -m loadtest record audio/ --model shards/model --output t.parquet
    """
    from dlm.asr.open import open_model
    from dlm.cli.output import stage_printer
    from dlm.progress import ProgressReporter
    from dlm.units import counted
    from loadtest.traces.decoders import files_of, lattices_of, speech_of, transcripts_of
    from loadtest.traces.recorder import Recorder
    from loadtest.traces.trace import write_trace

    lattices, speech = files_of(source)
    tell = stage_printer()
    with open_model(model, tell=tell) as client:
        recorder = Recorder(client)
        if lattices:
            decode = lattices_of(recorder, lattices[: limit or None], lm_scale)
        elif speech:
            decode = speech_of(recorder, speech[: limit or None], tell)
        else:
            decode = transcripts_of(recorder, source, spoken, limit, contexts, words)
        progress = ProgressReporter(tell)
        utterances = len(decode.steps)
        progress.stage(f"decoding {counted(utterances, 'utterance')}", utterances, "utterances")
        for step in decode.steps:
            step()
            progress.step(1)
        about = {
            "model": client.manifest.model,
            "order": client.manifest.order,
            "decoder": decode.name,
            "audio": audio,
            "made_by": "python -m loadtest record",
        }
    write_trace(output, recorder.utterances, about)
    _describe(output)


@app.command()
def synth(
    trace: Annotated[Path, typer.Argument(help="A recorded trace.")],
    output: TraceOutput,
    utterances: Annotated[int, typer.Option(help="Number of utterances; 0: as recorded.")] = 0,
    contexts: Annotated[float, typer.Option(help="Factor for contexts per request (K).")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 1,
) -> None:
    """Make a larger or wider trace from a recorded one.

    Example: python -m loadtest synth t.parquet --utterances 10000 --contexts 2 --output big.parquet
    """
    from loadtest.traces.synth import write_synthetic
    from loadtest.traces.trace import read_trace

    write_synthetic(output, read_trace(trace), utterances, contexts, seed)
    _describe(output)


@app.command()
def show(trace: Annotated[Path, typer.Argument(help="A trace.")]) -> None:
    """Print the contents of a trace.

    Example: python -m loadtest show loadtest/traces/rescoring.parquet
    """
    _describe(trace)


def _describe(path: Path) -> None:
    from loadtest.report.table import number
    from loadtest.traces.trace import describe, read_trace

    for name, value in describe(read_trace(path), path.name).items():
        if isinstance(value, dict):
            shown = ", ".join(f"{number(count)} {what}" for what, count in value.items())
        else:
            shown = number(value) if isinstance(value, (int, float)) else value or "not stated"
        print(f"{name.replace('_', ' '):22} {shown}")


app.command()(capacity)
app.command()(plan)
app.command()(chaos)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Prints errors as one line on standard error, and exits with 1."""
    try:
        yield
        return
    except DlmError as exc:
        text, notes = str(exc), getattr(exc, "__notes__", [])
    except OSError as exc:
        text = exc.strerror or str(exc)
        text, notes = (text if exc.filename is None else f"{exc.filename}: {text}"), []
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] not in SPEECH:
            raise
        command = pip_install(packages_of("asr"))
        text, notes = f"decoding needs {exc.name}, which is not installed; run", [command]
    except KeyboardInterrupt:
        sys.exit(CTRL_C)
    print("\n     ".join([f"loadtest: {text}", *notes]), file=sys.stderr)
    sys.exit(1)


def main() -> None:
    """Runs the command. SIGTERM ends a run like Ctrl-C: the report has everything measured until
    then."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    with _told():
        app()
