"""`dlm rescore`: lattices and n-best lists scored anew by a model of any size."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.progress import stage_printer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlm.asr.nbest import Hypotheses
    from dlm.asr.rescore_many import RescoredUtterance
    from dlm.errors import LatticeError

# A call is a position of an utterance; what no shard answers by then is scored by shorter n-grams.
DEADLINE_S = 2.0


def rescore(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Lattices or n-best lists: a file, plain, .gz, .zst, .xz or .bz2; a folder of "
            "them; or - for standard input.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write; a folder where IN is a folder of SLF. N-best lists are JSON lines "
            "where its name ends in .jsonl.",
        ),
    ],
    lm: Annotated[
        str,
        typer.Option(help="The model: cluster.toml, a shard set's folder, or an ARPA file."),
    ] = "cluster.toml",
    model: Annotated[
        str | None,
        typer.Option(help="Which model of the servers: the first 6 digits of its id, or more."),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="Of IN: slf, kaldi or nbest; found if not given.")
    ] = None,
    words: Annotated[
        Path | None, typer.Option(help="words.txt of Kaldi's lattices, if labels are numbers.")
    ] = None,
    non_word: Annotated[
        list[str] | None,
        typer.Option(help="A label that is not a word, beside <eps>, <sil>, !NULL... Repeat it."),
    ] = None,
    nbest: Annotated[
        int | None, typer.Option(help="Write so many sentences of each lattice, best first.")
    ] = None,
    acoustic_scale: Annotated[float | None, typer.Option(help="1 if the file has none.")] = None,
    lm_scale: Annotated[float | None, typer.Option(help="1 if the file has none.")] = None,
    word_penalty: Annotated[
        float | None, typer.Option(help="Added for each word; 0 if the file has none.")
    ] = None,
    new_weight: Annotated[float, typer.Option(help="Of the model's scores.")] = 1.0,
    old_weight: Annotated[float, typer.Option(help="Of the lm scores that IN has.")] = 0.0,
    beam: Annotated[
        float,
        typer.Option(help="How far behind a hypothesis may fall, in lm scores; inf is exact."),
    ] = 10.0,
    hypotheses: Annotated[
        int | None, typer.Option(help="At most so many at a position; any number if not given.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Utterances under way at once.")] = 8,
    deadline: Annotated[float, typer.Option(help="Seconds a position may take.")] = DEADLINE_S,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out, and report, malformed utterances.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what is in the folder --output already.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object an utterance, then one object `summary`.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not tell the stages.")] = False,
) -> None:
    """Score lattices and n-best lists with a model.

    A row for each utterance goes to standard output, without its words. Where servers fail, scores
    come from shorter n-grams, or a small model, and the row counts them (partial, small). --output
    appears when all is done; in a folder, each lattice when it is done.

    Example: dlm rescore lattices/ --lm cluster.toml --lm-scale 12 --output rescored/
    """
    from dlm.asr.kaldi import SymbolTable
    from dlm.asr.lattice_files import SLF, FileWriter, FolderWriter, LatticeFiles
    from dlm.asr.open import open_model
    from dlm.asr.rescore import Search
    from dlm.asr.rescore_many import rescore_many
    from dlm.cli.compiling import compile_kernels
    from dlm.cli.paths import check_reads, check_writes
    from dlm.client import ClientConfig
    from dlm.client.warm import KERNELS
    from dlm.errors import ConfigError
    from dlm.progress import ProgressReporter

    for name, value in (("jobs", jobs), ("nbest", nbest), ("hypotheses", hypotheses)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: give 1 or more")
    search = Search(None, new_weight, old_weight, beam, hypotheses)
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
    check_reads("IN", source, folders=True)
    check_reads("--words", words)
    table = None if words is None else SymbolTable.read(words)
    files = LatticeFiles.find(source, format_, table, frozenset(non_word or ()))
    in_folder = files.format == SLF and nbest is None and source.is_dir()
    if resume and not in_folder:
        raise ConfigError("--resume is for a folder of SLF; a file appears whole, or not at all")
    check_writes("--output", output, folder=in_folder)
    totals = _Totals(as_json)
    with ExitStack() as stack:
        writer = (
            stack.enter_context(FolderWriter(output, resume=resume))
            if in_folder
            else stack.enter_context(FileWriter(output, files.format, table))
        )
        compile_kernels(KERNELS)
        config = ClientConfig(deadline_s=deadline, partial=True)
        client = stack.enter_context(open_model(lm, config=config, model=model, tell=tell))
        done = writer.has if resume and isinstance(writer, FolderWriter) else None
        given = totals.given(files.read(totals.skipping(tell) if skip else None), scales, done)
        progress = ProgressReporter(tell)
        progress.stage("rescoring", len(files.paths) if files.format == SLF else 0, "utterances")
        totals.begin()
        for one in rescore_many(client, given, search, nbest=nbest, jobs=jobs):
            writer.write(one.found, _remark(one))
            totals.add(one)
            progress.step(1)
    totals.end(client.stats.messages)


def _remark(one: RescoredUtterance) -> str:
    """What a lattice's file says of scores that are not the model's own."""
    parts = []
    if one.partial:
        parts.append(f"{one.partial} of {one.queries} scores come from shorter n-grams")
    if one.small:
        parts.append(f"{one.small} of {one.queries} scores come from the small model")
    return ", ".join(parts)


@dataclass
class _Totals:
    """What standard output says: a row for each utterance, and at the end how many there were."""

    as_json: bool
    utterances: int = 0
    skipped: int = 0
    resumed: int = 0
    audio_s: float = 0.0
    positions: int = 0
    queries: int = 0
    partial: int = 0
    small: int = 0
    degraded: int = 0

    def skipping(self, tell: Callable[[str], None]) -> Callable[[LatticeError], None]:
        """Counts malformed utterances, and tells where they are."""

        def skip(error: LatticeError) -> None:
            self.skipped += 1
            tell(f"left out: {error}")

        return skip

    def given(
        self,
        found: Iterable[Hypotheses],
        scales: dict[str, float],
        done: Callable[[str], bool] | None,
    ) -> Iterator[Hypotheses]:
        """What is to be rescored, with the scales that were given."""
        for one in found:
            if done is not None and done(one.id):
                self.resumed += 1
            else:
                yield replace(one, scales=replace(one.scales, **scales))

    def begin(self) -> None:
        """The head of the rows."""
        if not self.as_json:
            print("utterance\tpositions\tqueries\tpartial\tsmall", flush=True)

    def add(self, one: RescoredUtterance) -> None:
        """The row of an utterance."""
        self.utterances += 1
        self.audio_s += one.audio_s
        self.degraded += bool(one.partial or one.small)
        row = {name: getattr(one, name) for name in ("positions", "queries", "partial", "small")}
        for name, value in row.items():
            setattr(self, name, getattr(self, name) + value)
        if self.as_json:
            print(json.dumps({"id": one.found.id, **row}), flush=True)
        else:
            print("\t".join([one.found.id, *map(str, row.values())]), flush=True)

    def end(self, messages: int) -> None:
        """The totals."""
        facts: dict[str, Any] = {
            "utterances": self.utterances,
            "degraded": self.degraded,
            "left out": self.skipped,
            "done before": self.resumed,
            "audio seconds": round(self.audio_s, 2),
            "positions": self.positions,
            "queries": self.queries,
            "partial": self.partial,
            "small": self.small,
            "messages": messages,
        }
        if self.as_json:
            named = {name.replace(" ", "_"): value for name, value in facts.items()}
            print(json.dumps({"summary": named}))
        else:
            for name, value in facts.items():
                print(f"{name[0].upper()}{name[1:]}:\t{value}")
