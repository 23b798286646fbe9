"""`python -m loadtest`: load tests of a dlm cluster. The only file here that prints and exits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dlm.errors import ConfigError, DlmError
from dlm.extras import packages_of, pip_install

if TYPE_CHECKING:
    from loadtest.plan import Load

# Packages of the extra `asr`, which only recording of speech needs.
SPEECH = {"flashlight", "hama", "soundfile", "soxr"}
DEMO_TRACE = Path(__file__).parent / "traces/rescoring.parquet"

app = typer.Typer(
    name="python -m loadtest",
    help="Measure a dlm cluster with recorded requests of speech decoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def run(
    trace: Annotated[
        Path | None, typer.Argument(help="Trace to replay; without one, the one that comes along.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="cluster.toml of the servers; without it, a cluster is started here."),
    ] = None,
    shard_set: Annotated[
        Path | None, typer.Option(help="Shard set to serve here, in place of the packaged model.")
    ] = None,
    shards: Annotated[
        int, typer.Option(min=1, max=64, help="Servers to start here for the packaged model.")
    ] = 2,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second (open loop), sent when they are due.")
    ] = 50.0,
    concurrency: Annotated[
        int,
        typer.Option(min=0, help="Decoders that wait for each answer (closed loop), in its place."),
    ] = 0,
    arrival_pattern: Annotated[
        str, typer.Option(help="How utterances arrive: constant, poisson or gamma.")
    ] = "poisson",
    arrival_smoothness: Annotated[
        float, typer.Option(help="Shape of gamma: 1 is poisson, less is burstier.")
    ] = 1.0,
    ramp_to: Annotated[
        float, typer.Option(help="Rate at the end, reached evenly from --request-rate; 0: none.")
    ] = 0.0,
    steps: Annotated[
        str, typer.Option(help="Rates one after another, for --duration each: 50,100,200.")
    ] = "",
    duration: Annotated[float, typer.Option(help="Seconds that are measured.")] = 100.0,
    warmup: Annotated[float, typer.Option(help="Seconds before that, not measured.")] = 10.0,
    window: Annotated[float, typer.Option(help="Seconds that figures are kept by.")] = 5.0,
    until_stable: Annotated[
        bool,
        typer.Option("--until-stable", help="End once the last three windows agree."),
    ] = False,
    stability_percentage: Annotated[
        float, typer.Option(help="How closely, in answers per second and p99.")
    ] = 10.0,
    processes: Annotated[int, typer.Option(help="Client processes.")] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds that a request has.")] = 2.0,
    partial: Annotated[
        bool, typer.Option("--partial", help="Clients answer from 2-grams where shards fail.")
    ] = False,
    small: Annotated[
        Path | None, typer.Option(help="Shard set that clients go over to while servers fail.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and the order of utterances.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the results; one is named after the time.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the report alone.")] = False,
) -> None:
    """Run a load test and write a report: JSON, CSV, HTML.

    Without options it takes two minutes, on a cluster that it starts on this machine.
    Exit status 1 where nothing could be measured, or the run broke off.

    Example: python -m loadtest run --cluster cluster.toml --request-rate 200
    """
    from dlm.cli.progress import stage_printer
    from loadtest.driver import RunSettings
    from loadtest.local_cluster import local_cluster
    from loadtest.session import measure, results_folder, write_report
    from loadtest.worker import ClientSettings

    load = _load(
        request_rate, concurrency, arrival_pattern, arrival_smoothness, ramp_to, steps, duration,
        warmup,
    )  # fmt: skip
    if cluster is not None and shard_set is not None:
        raise ConfigError("--cluster and --shard-set were both given; one of them is expected")
    tell = stage_printer(quiet=quiet)
    with contextlib.ExitStack() as stack:
        folder = results_folder(output)
        found = cluster or stack.enter_context(local_cluster(shard_set, shards, tell))
        settings = RunSettings(
            found,
            trace or DEMO_TRACE,
            load,
            ClientSettings(deadline, partial, None if small is None else str(small.absolute())),
            processes,
            window,
            seed,
            stability_percentage if until_stable else None,
        )
        report = measure(settings, folder, tell)
    _show(report)
    whole = write_report(report, folder, lambda line: print(line, file=sys.stderr))
    if whole:
        print(f"wrote {folder}/report.html, report.json, report.csv")
    if not (whole and report["complete"]):
        raise typer.Exit(1)


def _load(
    rate: float,
    concurrency: int,
    pattern: str,
    smoothness: float,
    ramp_to: float,
    steps: str,
    duration: float,
    warmup: float,
) -> Load:
    from loadtest.plan import Load, Segment

    if ramp_to and steps:
        raise ConfigError("--ramp-to and --steps were both given; one of them is expected")
    try:
        rates = [float(one) for one in steps.split(",")] if steps else [rate]
    except ValueError:
        raise ConfigError(f"--steps {steps}: rates with commas between are expected") from None
    segments = tuple(Segment(duration, one, ramp_to or one) for one in rates)
    return Load(segments, concurrency, pattern, smoothness, warmup)


def _show(report: dict[str, Any]) -> None:
    """The figures, and what to know before reading them."""
    from rich.console import Console
    from rich.table import Table

    from loadtest.table import rows_of, warnings_of

    table = Table(show_header=False, title="Load test", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows_of(report):
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    for text in warnings_of(report):
        console.print(f"! {text}", markup=False, soft_wrap=True)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder of a run, or its report.json.")],
) -> None:
    """Print a report again, and write its files; also of a run that was killed.

    Example: python -m loadtest report loadtest-results/2026-11-22T10-00-00
    """
    from loadtest.session import read_report, write_report

    found = read_report(results)
    _show(found)
    folder = results if results.is_dir() else results.parent
    if not write_report(found, folder, lambda line: print(line, file=sys.stderr)):
        raise typer.Exit(1)
    print(f"wrote {folder}/report.html, report.json, report.csv")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="report.json, or its folder, to compare with.")],
    after: Annotated[Path, typer.Argument(help="report.json, or its folder, of the change.")],
    threshold: Annotated[
        float, typer.Option(help="Percent by which a figure may get worse.")
    ] = 10.0,
) -> None:
    """Compare two reports; exit status 1 where a figure got worse beyond the threshold.

    A figure counts as worse if its ratio is beyond the threshold and its 95 % interval, from the
    windows of both runs, leaves out 1.

    Example: python -m loadtest compare main/report.json branch/report.json
    """
    from rich.console import Console
    from rich.table import Table

    from loadtest.compare import compare as ratios
    from loadtest.compare import differences
    from loadtest.session import read_report
    from loadtest.table import number

    first, second = read_report(before), read_report(after)
    for text in differences(first, second):
        print(f"! {text}", file=sys.stderr)
    found = ratios(first, second, threshold / 100)
    table = Table()
    for name in ("", "before", "after", "ratio", "95 % interval", ""):
        table.add_column(name, justify="left" if not name else "right")
    for one in found:
        interval = "-" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        mark = "worse" if one.is_worse else ""
        table.add_row(one.name, number(one.before), number(one.after), ratio, interval, mark)
    Console(highlight=False).print(table)
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
    output: Annotated[Path, typer.Option(help="Trace to write.")],
    contexts: Annotated[int, typer.Option(min=1, max=1000, help="Hypotheses; of text alone.")] = 10,
    words: Annotated[
        int, typer.Option(min=1, max=1000, help="Candidates of a position; of text alone.")
    ] = 20,
    lm_scale: Annotated[
        float, typer.Option(help="Weight of the language model; of lattices alone.")
    ] = 12.0,
    spoken: Annotated[
        bool,
        typer.Option("--spoken", help="Lower case, letters and apostrophes alone, of the text."),
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Utterances at most; 0: all.")] = 0,
    audio: Annotated[str, typer.Option(help="Source and licence of the audio, kept inside.")] = "",
) -> None:
    """Record what a decoder asks: of audio word by word, of lattices and text by position.

    Audio is decoded as dlm transcribe does, lattices as dlm rescore does. Of text, candidates are
    the words that are spelled most alike, and times follow the letters.

    Example: python -m loadtest record audio/ --model shards/model --output t.parquet
    """
    from dlm.asr.open import open_model
    from dlm.cli.progress import stage_printer
    from dlm.progress import ProgressReporter
    from loadtest.decoders import files_of, lattices_of, speech_of, transcripts_of
    from loadtest.recorder import Recorder
    from loadtest.trace import write_trace

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
        progress.stage(f"decoding {len(decode.steps)} utterances", len(decode.steps), "utterances")
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
    output: Annotated[Path, typer.Option(help="Trace to write.")],
    utterances: Annotated[int, typer.Option(help="How many; 0: as many as recorded.")] = 0,
    speakers: Annotated[int, typer.Option(help="How many; 0: as many as recorded.")] = 0,
    length: Annotated[float, typer.Option(help="Times the length of an utterance.")] = 1.0,
    contexts: Annotated[float, typer.Option(help="Times the contexts of a request (K).")] = 1.0,
    words: Annotated[float, typer.Option(help="Times the words of a context (W).")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 1,
) -> None:
    """Make a larger or wider trace from a recorded one, and say which statistics it keeps.

    Example: python -m loadtest synth t.parquet --utterances 10000 --contexts 2 --output big.parquet
    """
    from rich.console import Console
    from rich.table import Table

    from loadtest import synth as synthetic
    from loadtest.table import number
    from loadtest.trace import read_trace, trace_of, write_trace

    recorded = read_trace(trace)
    scale = synthetic.Scale(utterances, speakers, length, contexts, words)
    spoken = synthetic.synthesise(recorded, scale, seed)
    statistics = synthetic.compare(recorded, trace_of(spoken))
    write_trace(output, spoken, synthetic.about(recorded, scale, seed, statistics))
    table = Table()
    for name in ("", "recorded", "synthetic", ""):
        table.add_column(name, justify="right" if name else "left")
    for one in statistics:
        kept = "kept" if one.is_kept else "changed"
        name = one.name.replace("_", " ")
        table.add_row(name, number(one.recorded), number(one.synthetic), kept)
    Console(highlight=False).print(table)


@app.command()
def show(trace: Annotated[Path, typer.Argument(help="A trace.")]) -> None:
    """Print what a trace holds.

    Example: python -m loadtest show loadtest/traces/rescoring.parquet
    """
    _describe(trace)


def _describe(path: Path) -> None:
    from loadtest.statistics import describe
    from loadtest.table import number
    from loadtest.trace import read_trace

    for name, value in describe(read_trace(path), path.name).items():
        shown = number(value) if isinstance(value, (int, float)) else value
        print(f"{name.replace('_', ' '):22} {shown}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors as one line on standard error, and exit status 1."""
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
        sys.exit(130)
    print("\n     ".join([f"loadtest: {text}", *notes]), file=sys.stderr)
    sys.exit(1)


def main() -> None:
    """Runs the command.

    SIGTERM ends a run as Ctrl-C does: what was measured until then becomes the report.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    with _told():
        app()
