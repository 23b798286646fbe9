"""`dlm rescore`: rescores lattices and n-best lists with a model of any size."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.asr.settings import SearchSettings
from dlm.cli.checks import READ, READ_ANY, check_writes, within
from dlm.cli.options import Options, PhraseList, Quiet, ServedModel
from dlm.cli.output import compile_kernels, print_json_line, stage_printer
from dlm.errors import ConfigError, LatticeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlm.asr.rescoring.nbest import Hypotheses
    from dlm.asr.rescoring.rescore import RescoredUtterance

# Seconds per position of an utterance; queries that take longer are scored by shorter n-grams.
DEADLINE_S = 2.0


def rescore(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Lattices or n-best lists: a file (plain, .gz, .zst, .xz or .bz2), a folder of "
            "files, or - for standard input.",
        ),
        READ_ANY,
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="File to write; a folder if IN is a folder of SLF. N-best lists are written as "
            "JSON lines if the name ends in .jsonl.",
        ),
    ],
    *,
    lm: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Model: cluster.toml, the folder of a shard set, an ARPA or KenLM binary file.",
        ),
    ] = "cluster.toml",
    model: ServedModel = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="Format of IN: slf, kaldi or nbest.  [default: detected]"),
    ] = None,
    symbols: Annotated[
        Path | None,
        typer.Option(
            "--symbol-table",
            metavar="FILE",
            help="words.txt of Kaldi lattices whose labels are numbers.",
        ),
        READ,
    ] = None,
    non_word: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="Label that is not a word, in addition to <eps>, <sil>, !NULL... May be repeated.",
        ),
    ] = None,
    phrases: PhraseList = None,
    nbest: Annotated[
        int | None,
        typer.Option(metavar="N", help="Write the N best sentences of each lattice instead."),
        within(low=1),
    ] = None,
    acoustic_scale: Annotated[
        float | None, typer.Option(help="Acoustic scale.  [default: the file's, else 1]")
    ] = None,
    lm_scale: Annotated[
        float | None, typer.Option(help="LM scale.  [default: the file's, else 1]")
    ] = None,
    word_penalty: Annotated[
        float | None,
        typer.Option(help="Score added per word.  [default: the file's, else 0]"),
    ] = None,
    searching: Annotated[SearchSettings, Options()],
    jobs: Annotated[
        int, typer.Option(help="Utterances to rescore at the same time."), within(low=1)
    ] = 8,
    deadline: Annotated[
        float, typer.Option(help="Time limit per position, in seconds.")
    ] = DEADLINE_S,
    skip: Annotated[
        bool, typer.Option("--skip", help="Skip and report malformed utterances.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Skip lattices that are already in the folder --output."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per utterance, then one `summary`."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Rescore lattices and n-best lists with a model.

    Prints one row per utterance, without its words, then totals on standard error. When servers
    fail, scores come from shorter n-grams or from a local fallback, and the row counts them
    (bigram_fallback, local_fallback). An output file appears once all is done; in an output
    folder, each lattice appears once it is done.

    With --phrases, names and topics become more probable, as in `dlm transcribe`. A bonus is added
    outside of the LM scale: the LM scores of OUT include it, divided by that scale.

    Examples:
        dlm rescore lattices/ --lm cluster.toml --lm-scale 12 --output rescored/
        dlm rescore nbest.jsonl --lm shards/model --output rescored.jsonl
        dlm rescore nbest.jsonl --lm shards/model --phrases names.tsv -o r.jsonl
    """
    from dlm.asr.open import open_model
    from dlm.asr.phrase_file import known_words, read_phrases
    from dlm.asr.rescoring.kaldi import SymbolTable
    from dlm.asr.rescoring.lattice_files import SLF, FileWriter, FolderWriter, LatticeFiles
    from dlm.asr.rescoring.rescore import Search, rescore_many
    from dlm.client import ClientConfig
    from dlm.client.table import KERNELS
    from dlm.progress import ProgressReporter

    search = Search(**vars(searching))
    scales = {
        name: value
        for name, value in (
            ("acoustic", acoustic_scale),
            ("lm", lm_scale),
            ("word_penalty", word_penalty),
        )
        if value is not None
    }
    tell = stage_printer(quiet=quiet)
    table = None if symbols is None else SymbolTable.read(symbols)
    biased = None if phrases is None else read_phrases(phrases).phrases
    files = LatticeFiles.find(source, format_, table, frozenset(non_word or ()))
    in_folder = files.format == SLF and nbest is None and source.is_dir()
    if resume and not in_folder:
        raise ConfigError(
            "--resume applies only if IN is a folder of SLF files and --nbest is not given; leave "
            "--resume out"
        )
    check_writes("--output", output, folder=in_folder)
    totals = _Totals(as_json)
    with ExitStack() as stack:
        writer = (
            stack.enter_context(FolderWriter(output, resume=resume))
            if in_folder
            else stack.enter_context(FileWriter(output, files.format, table))
        )
        compile_kernels(KERNELS)
        config = ClientConfig(deadline_s=deadline, bigram_fallback=True)
        client = stack.enter_context(open_model(lm, config=config, model=model, tell=tell))
        if biased is not None:
            tell(known_words(biased, client))
        done = writer.has if resume and isinstance(writer, FolderWriter) else None
        given = totals.given(files.read(totals.skipping(tell) if skip else None), scales, done)
        progress = ProgressReporter(tell)
        progress.stage("rescoring", len(files.paths) if files.format == SLF else 0, "utterances")
        totals.begin()
        for one in rescore_many(client, given, search, nbest=nbest, jobs=jobs, phrases=biased):
            writer.write(one.found, _remark(one))
            totals.add(one)
            progress.step(1)
    totals.end(client.stats.messages)


def _remark(one: RescoredUtterance) -> str:
    """The comment in a lattice's file about scores that are not the model's own."""
    parts = []
    if one.bigram_fallback:
        parts.append(f"{one.bigram_fallback} of {one.queries} scores come from shorter n-grams")
    if one.local_fallback:
        parts.append(f"{one.local_fallback} of {one.queries} scores come from the local fallback")
    return ", ".join(parts)


COUNTED = ("positions", "queries", "bigram_fallback", "local_fallback")


class _Totals:
    """Prints a row per utterance on standard output, and the totals at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        names = ("utterances", "degraded", "skipped", "done before", "audio seconds", *COUNTED)
        self._sums: dict[str, float] = dict.fromkeys(names, 0)

    def skipping(self, tell: Callable[[str], None]) -> Callable[[LatticeError], None]:
        def skip(error: LatticeError) -> None:
            self._sums["skipped"] += 1
            tell(f"skipped: {error}")

        return skip

    def given(
        self,
        found: Iterable[Hypotheses],
        scales: dict[str, float],
        done: Callable[[str], bool] | None,
    ) -> Iterator[Hypotheses]:
        for one in found:
            if done is not None and done(one.id):
                self._sums["done before"] += 1
            else:
                yield replace(one, scales=replace(one.scales, **scales))

    def begin(self) -> None:
        if not self._as_json:
            print("\t".join(["utterance", *COUNTED]), flush=True)

    def add(self, one: RescoredUtterance) -> None:
        row = {name: getattr(one, name) for name in COUNTED}
        is_degraded = bool(one.bigram_fallback or one.local_fallback)
        more = {"utterances": 1, "audio seconds": one.audio_s, "degraded": is_degraded, **row}
        for name, value in more.items():
            self._sums[name] += value
        if self._as_json:
            print_json_line({"id": one.found.id, **row})
        else:
            print("\t".join([one.found.id, *map(str, row.values())]), flush=True)

    def end(self, messages: int) -> None:
        """Prints the totals on standard error, so that a pipe gets only rows."""
        seconds = round(self._sums["audio seconds"], 2)
        facts = {**self._sums, "audio seconds": seconds, "messages": messages}
        if self._as_json:
            named = {name.replace(" ", "_"): value for name, value in facts.items()}
            print_json_line({"summary": named})
            return
        for name, value in facts.items():
            print(f"{name[0].upper()}{name[1:].replace('_', ' ')}:\t{value}", file=sys.stderr)
