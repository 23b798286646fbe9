"""Checks that a shard set follows every rule of shards/FORMAT.md, and holds a given model.

Opening a set checks what kernels rely on; this module also checks what right answers need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, ShardFormatError
from dlm.index import layout
from dlm.index.check.decode import decode_tables, spell
from dlm.index.coding import coding_of_set
from dlm.index.layout import Manifest, read_manifest
from dlm.index.making.builder import rebuild
from dlm.index.making.files import pieces
from dlm.index.ngrams import NgramTables, read_raw, sorted_tables, with_prefixes
from dlm.index.search.shard import LowOrders, Shard, ShardSet, open_vocabulary
from dlm.kenlm.open import open_ngrams
from dlm.ngram.arpa import NgramBatch
from dlm.ngram.partition import slots_of
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, MISSING_UNK_LOG10_PROB, UNK_ID, Vocabulary
from dlm.progress import Tell
from dlm.units import counted

Mask = NDArray[np.bool_]

BATCH_ROWS = 1 << 16
NAMED = 3  # n-grams that a message names; the rest are counted


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a file breaks. `rule` is a short name, the same in every release."""

    rule: str
    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message} [{self.rule}]"


@dataclass
class VerifyReport:
    """The result of `verify`.

    manifest    None if it cannot be read
    violations  the first violation of each rule and file
    warnings    oddities that break no rule
    complete    False if a violation kept some rules from being checked
    """

    directory: Path
    manifest: Manifest | None = None
    violations: list[Violation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def ok(self) -> bool:
        return self.complete and not self.violations

    def add(self, rule: str, file: str, message: str) -> None:
        if not any((v.rule, v.file) == (rule, file) for v in self.violations):
            self.violations.append(Violation(rule, file, message))


def verify(
    directory: str | os.PathLike[str],
    *,
    arpa: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Checks every rule of shards/FORMAT.md on all files of the shard set in `directory`.

    Args    arpa      the ARPA file that the set should hold, compared n-gram for n-gram
            progress  called with a line for each stage
    Raises  ArpaError  the file given as `arpa` is malformed
            OSError    an existing file cannot be read; a damaged set raises nothing
    Cost    memory: some 100 bytes per n-gram
    """
    say = progress or (lambda line: None)
    report = VerifyReport(Path(directory))
    try:
        report.manifest = read_manifest(report.directory)
    except ShardFormatError as exc:
        report.add("manifest", layout.MANIFEST, str(exc))
        return report
    _note_other_files(report, report.manifest)
    say(f"reading {counted(len(report.manifest.files), 'file')}")
    opened = _open(report, report.manifest)
    if opened is None:
        return report
    say("decoding the files")
    model = decode_tables(opened, report.add).model
    say("checking every n-gram")
    _Rules(report, opened, model).check()
    if report.complete and not report.violations:
        say("comparing the files with what the builder makes of these n-grams")
        _compare_with_rebuilt(report, opened, model)
    if arpa is not None:
        say(f"comparing with {os.fspath(arpa)}")
        _compare_with_arpa(report, opened, model, arpa, say)
    return report


def verify_files(
    directory: str | os.PathLike[str],
    shards: Collection[int],
    *,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Checks the files that a server of these shards reads; other files may be absent.

    It checks the manifest, the checksum of each file, and what kernels rely on. Rules between
    n-grams need all shards; see `verify`.

    Raises  ConfigError  the set lacks one of the shards
            OSError      an existing file cannot be read
    """
    report = VerifyReport(Path(directory))
    try:
        report.manifest = read_manifest(report.directory)
    except ShardFormatError as exc:
        report.add("manifest", layout.MANIFEST, str(exc))
        return report
    for shard in sorted(shards):
        if not 0 <= shard < report.manifest.shards:
            raise ConfigError(
                f"{report.directory} has no shard {shard}; its shards are 0 to "
                f"{report.manifest.shards - 1}"
            )
    _note_other_files(report, report.manifest)
    if progress is not None:
        progress(f"reading {2 + len(set(shards))} of {counted(len(report.manifest.files), 'file')}")
    _open(report, report.manifest, shards)
    report.complete = not report.violations
    return report


def _note_other_files(report: VerifyReport, manifest: Manifest) -> None:
    signature = f"{layout.MANIFEST}.signature.json"  # read by `dlm privacy verify`
    ours = {layout.MANIFEST, signature, *(entry.name for entry in manifest.files)}
    for path in sorted(report.directory.iterdir()):
        if path.name not in ours:
            report.warnings.append(f"{path} is not a file of this shard set; dlm does not read it")


def _open(
    report: VerifyReport, manifest: Manifest, only: Collection[int] | None = None
) -> ShardSet | None:
    directory = report.directory
    vocabulary = low = None
    try:
        vocabulary = open_vocabulary(directory, manifest)
    except ShardFormatError as exc:
        report.add("file", layout.file_name("vocabulary"), str(exc))
    try:
        low = LowOrders.open(directory, manifest)
    except ShardFormatError as exc:
        report.add("file", layout.file_name("low_orders"), str(exc))
    shards = []
    for entry in manifest.files[2:]:
        if only is not None and entry.index not in only:
            continue
        try:
            shards.append(Shard.open(directory, entry.index or 0, manifest=manifest))
        except ShardFormatError as exc:
            report.add("file", entry.name, str(exc))
    if vocabulary is None or low is None or len(shards) != manifest.shards:
        return None
    return ShardSet(directory, manifest, vocabulary, low, shards)


class _Rules:
    """Rules that the later comparison of the columns with the n-grams does not check; `bad` notes a
    violation if any row of a mask is true."""

    def __init__(self, report: VerifyReport, opened: ShardSet, model: NgramTables) -> None:
        self.report = report
        self.opened = opened
        self.manifest = opened.manifest
        self.model = model
        self.order = opened.manifest.order

    def check(self) -> None:
        self.vocabulary()
        self.counts()
        self.values()
        self.blanks()
        self.model_id()
        # A node or n-gram left out of the tables causes more faults, so the report is not complete.
        lost = {"node", "twice"} & {v.rule for v in self.report.violations}
        self.report.complete = not lost

    # ------------------------------------------------------------------ helpers

    def file_of(self, k: int, row: int) -> str:
        if k < 3:
            return layout.file_name("low_orders")
        u, v = self.model.tables[k - 1].rows[row, -3:-1]
        return layout.file_name("shard", int(self.manifest.slots[slots_of(u, v)]))

    def bad(self, rule: str, k: int, broken: Mask, message: str) -> None:
        rows = np.flatnonzero(broken)
        if len(rows):
            ids = self.model.tables[k - 1].rows[rows[0]]
            self.report.add(
                rule,
                self.file_of(k, int(rows[0])),
                f"the {k}-gram {spell(self.opened.vocabulary, ids)} {message} ({len(rows)} such)",
            )

    # ------------------------------------------------------------------ rules

    def vocabulary(self) -> None:
        """Checks that the words could be in an ARPA file, and include the sentence marks."""
        file = layout.file_name("vocabulary")
        words = self.opened.vocabulary.words
        for i, word in enumerate(words):
            if not word or any(separator in word for separator in (b" ", b"\t", b"\n", b"\r")):
                self.report.add("word", file, f"word {i}, {word!r}, is empty or holds a space")
                break
        for mark in (BEGIN_SENTENCE, END_SENTENCE):
            if self.opened.vocabulary.ids.get(mark, UNK_ID) == UNK_ID:
                self.report.add("word", file, f"the vocabulary lacks {mark.decode()}")

    def counts(self) -> None:
        for k, (table, count, blanks) in enumerate(
            zip(self.model.tables, self.manifest.counts, self.manifest.blanks, strict=True), 1
        ):
            blank = int(table.blank.sum())
            if (len(table) - blank, blank) != (count, blanks):
                self.report.add(
                    "counts",
                    layout.MANIFEST,
                    f"the manifest says {count} {k}-grams and {blanks} blanks; "
                    f"the files hold {len(table) - blank} and {blank}",
                )
        for shard, entry in zip(self.opened.shards, self.manifest.files[2:], strict=True):
            blank = sum(int(level.blank.sum()) for level in shard.plain())
            if blank != entry.blanks:
                self.report.add(
                    "counts", entry.name, f"the manifest says {entry.blanks} blanks; found {blank}"
                )

    def values(self) -> None:
        """Checks that the highest order has no weights; `packed.check` reports invalid numbers."""
        weighted = self.model.tables[-1].log10_backoff != 0
        self.bad("backoff", self.order, weighted, "has a back-off weight at the highest order")

    def blanks(self) -> None:
        """Checks that blanks have no values, and that a missing <unk> is the only blank 1-gram."""
        unk = self.manifest.unk_in_model
        for k, table in enumerate(self.model.tables, 1):
            none = MISSING_UNK_LOG10_PROB if k == 1 else np.float32(0)
            valued = (table.log10_prob != none) | (table.log10_backoff != 0)
            self.bad("blank-value", k, table.blank & valued, "is a blank with a value")
            if k == 1:
                wrong = table.blank.copy()
                wrong[UNK_ID] ^= not unk
                self.bad("blank-word", k, wrong, "is a blank, or should be one")
            elif not unk:
                holds = (table.rows == UNK_ID).any(axis=1)
                self.bad(
                    "blank-word", k, holds, "contains the unknown word, which is not in the model"
                )
            if k > 1:
                shorter = self.model.tables[k - 2].blank[table.prefix]
                self.bad("prefix", k, shorter & ~table.blank, "has a blank as its prefix")

    def model_id(self) -> None:
        found = self.model.model_id()
        if found != self.manifest.model:
            self.report.add(
                "model-id",
                layout.MANIFEST,
                f"the manifest says model {self.manifest.model}; the files hold model {found}",
            )


def _bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


@dataclass(frozen=True, eq=False)
class _Ngrams:
    """The n-grams of a model without blanks, as a reader gives them: a `stages.NgramSource`."""

    model: NgramTables

    @property
    def order(self) -> int:
        return self.model.order

    @property
    def counts(self) -> tuple[int, ...]:
        return self.model.counts()

    @property
    def vocabulary(self) -> Vocabulary:
        return self.model.vocabulary

    def batches(self) -> Iterator[NgramBatch]:
        for k, table in enumerate(self.model.tables, 1):
            for first in range(0, len(table), BATCH_ROWS):
                some = slice(first, first + BATCH_ROWS)
                keep = ~table.blank[some]
                yield NgramBatch(
                    k,
                    first,
                    table.rows[some][keep],
                    table.log10_prob[some][keep],
                    table.log10_backoff[some][keep],
                )


def _compare_with_rebuilt(report: VerifyReport, opened: ShardSet, model: NgramTables) -> None:
    """Compares the columns with those computed again from the n-grams and the slot table."""
    manifest = opened.manifest
    rebuilt = rebuild(
        _Ngrams(model), manifest.slots, manifest.shards, coding_of_set(manifest.encoding)
    )
    for entry, (file, columns) in zip(manifest.files, rebuilt, strict=True):
        found = layout.map_columns(opened.directory / entry.name, entry, verify=False)
        for name, (_, parts) in columns.items():
            if not _is_made_of(found[name], pieces(parts)):
                report.add("columns", file, f"column {name} does not match the n-grams")


def _is_made_of(column: NDArray[Any], parts: Iterator[memoryview]) -> bool:
    data, at = column.view(np.uint8), 0
    for part in parts:
        if not np.array_equal(data[at : at + len(part)], np.frombuffer(part, np.uint8)):
            return False
        at += len(part)
    return at == len(data)


def _compare_with_arpa(
    report: VerifyReport,
    opened: ShardSet,
    model: NgramTables,
    arpa: str | os.PathLike[str],
    say: Tell,
) -> None:
    """Checks that the set has every n-gram of the file, with equal values, and no other n-gram.

    Ids are matched by word, since another file of the same model may number its words differently.
    """
    with open_ngrams(arpa, progress=say) as reader:
        raw = read_raw(reader)
        words = reader.vocabulary.words
    repaired = opened.manifest.provenance.get("repaired") is True
    if repaired:
        raw = with_prefixes(reader.vocabulary, raw)
    wanted = sorted_tables(reader.vocabulary, raw, reader)
    place = os.fspath(arpa)
    if wanted.order != model.order:
        report.add(
            "arpa-order",
            layout.MANIFEST,
            f"the set has order {model.order}; {place} has order {wanted.order}",
        )
    ids = _ids_by_word(report, opened.vocabulary, words, place)
    for k, (theirs, ours) in enumerate(zip(wanted.tables, model.tables, strict=False), 1):
        theirs_kept = np.flatnonzero(~theirs.blank)
        rows = ids[theirs.rows[theirs_kept]]
        rank = model.ranks(np.maximum(rows, 0).astype(np.uint32))
        rank[(rows < 0).any(axis=1)] = -1
        rank[(rank >= 0) & np.append(ours.blank, False)[rank]] = -1
        met = rank >= 0
        here = theirs_kept[met]
        differs = (_bits(theirs.log10_prob[here]) != _bits(ours.log10_prob[rank[met]])) | (
            _bits(theirs.log10_backoff[here]) != _bits(ours.log10_backoff[rank[met]])
        )
        extra = ~ours.blank
        extra[rank[met]] = False
        for rule, who, at, what in (
            ("arpa-missing", wanted, theirs_kept[~met], f"of {place} are not in the shards"),
            ("arpa-value", wanted, here[differs], f"differ in value from {place}"),
            ("arpa-extra", model, np.flatnonzero(extra), f"are not in {place}"),
        ):
            if len(at):
                table = who.tables[k - 1]
                named = ", ".join(spell(who.vocabulary, table.rows[i]) for i in at[:NAMED])
                file = layout.file_name("low_orders") if k < 3 else "shards"
                report.add(rule, file, f"{len(at)} {k}-grams {what}: {named}")


def _ids_by_word(
    report: VerifyReport, vocabulary: Vocabulary, words: list[bytes], place: str
) -> NDArray[np.int64]:
    ids = np.array([UNK_ID, *(vocabulary.ids.get(word, -1) for word in words[1:])], np.int64)
    theirs = set(words[1:])
    lost = [words[i] for i in np.flatnonzero(ids < 0)]
    more = [word for word in vocabulary.words[1:] if word not in theirs]
    for found, what in (
        (lost, f"words of {place} are not in the vocabulary"),
        (more, f"words of the vocabulary are not in {place}"),
    ):
        if found:
            named = ", ".join(repr(word.decode("utf-8", "replace")) for word in found[:NAMED])
            report.add(
                "arpa-words", layout.file_name("vocabulary"), f"{len(found)} {what}: {named}"
            )
    return ids
