"""Traces: decoders' requests to a language model, and their times in seconds of audio.

README.md describes the file format. In memory a trace is flat arrays, so that a driver, a baseline
or a simulation reads a request without touching the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlm.errors import FormatError
from dlm.files import replacing

VERSION = 1
HEADER = b"dlm.trace"  # key of the file's metadata
KINDS = ("frame", "lattice", "nbest")
EXTEND, BLOCKS = "extend", "context_blocks"
CALLS = (EXTEND, BLOCKS)  # methods of an utterance
# Audio time may exceed the end of an utterance by this much: seconds are float32, and decoders
# round.
LATE_S = 0.05
MOST_S = 86_400.0  # longest utterance: a day

Words: TypeAlias = tuple[bytes, ...]

_WORDS = pa.list_(pa.binary())
SCHEMA = pa.schema(
    [
        pa.field("utterance", pa.string(), nullable=False),
        pa.field("speaker", pa.string(), nullable=False),
        pa.field("utterance_s", pa.float32(), nullable=False),
        pa.field("at_s", pa.float32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("call", pa.string(), nullable=False),
        pa.field("contexts", pa.list_(_WORDS), nullable=False),
        pa.field("words", pa.list_(_WORDS), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a decoder: K contexts, and the words requested for them.

    at_s      audio time, in seconds from the beginning of the utterance
    kind      one of `KINDS`
    call      one of `CALLS`; `BLOCKS` requests all that is stored after contexts, with no words
    contexts  words, most recent last, as the recorded model's states kept them
    words     one row that all contexts share, or K rows of equal length; none without contexts
    """

    at_s: float
    kind: str
    contexts: tuple[Words, ...]
    words: tuple[Words, ...]
    call: str = EXTEND

    @property
    def queries(self) -> int:
        """The number of pairs of a context and a word; 0 for blocks."""
        return len(self.contexts) * (len(self.words[0]) if self.words else 0)


@dataclass(frozen=True, slots=True)
class Spoken:
    name: str
    speaker: str
    seconds: float
    requests: tuple[Request, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded requests: U utterances, R requests, C contexts, N rows of words.

    names, speakers, seconds  (U,)
    utterance, at_s          (R,)  of each request; not descending
    kind, call               (R,)  index in `KINDS`, in `CALLS`
    context_begin, row_begin (R + 1,)  where the contexts and rows of a request begin
    context_word_begin       (C + 1,);  row_word_begin  (N + 1,)
    context_words, row_words (...,)  indices in `table`, the distinct words; most recent last
    """

    about: Mapping[str, Any]
    names: Sequence[str]
    speakers: Sequence[str]
    seconds: NDArray[np.float32]
    utterance: NDArray[np.int32]
    at_s: NDArray[np.float32]
    kind: NDArray[np.uint8]
    call: NDArray[np.uint8]
    context_begin: NDArray[np.int64]
    context_word_begin: NDArray[np.int64]
    context_words: NDArray[np.int32]
    row_begin: NDArray[np.int64]
    row_word_begin: NDArray[np.int64]
    row_words: NDArray[np.int32]
    table: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.utterance)

    @property
    def audio_s(self) -> float:
        return float(self.seconds.sum(dtype=np.float64))

    @cached_property
    def context_counts(self) -> NDArray[np.int64]:
        """(R,) number of contexts of each request."""
        return np.diff(self.context_begin)

    @cached_property
    def word_counts(self) -> NDArray[np.int64]:
        """(R,) number of words requested for each context of a request."""
        counts = np.zeros(len(self), np.int64)
        has = np.diff(self.row_begin) > 0
        first = self.row_begin[:-1][has]
        counts[has] = self.row_word_begin[first + 1] - self.row_word_begin[first]
        return counts

    @cached_property
    def queries(self) -> NDArray[np.int64]:
        """(R,) number of pairs of a context and a word in each request."""
        return self.context_counts * self.word_counts

    @cached_property
    def asks(self) -> NDArray[np.bool_]:
        """(R,) whether a request has contexts; an empty one marks audio that needed no scores."""
        return self.context_counts > 0

    @cached_property
    def first_request(self) -> NDArray[np.int64]:
        """(U + 1,) where the requests of each utterance begin."""
        return np.searchsorted(self.utterance, np.arange(len(self.names) + 1)).astype(np.int64)

    @cached_property
    def audio_share_s(self) -> NDArray[np.float64]:
        """(R,) seconds of audio that each request stands for, an equal part of its utterance."""
        counts = np.diff(self.first_request)
        return (self.seconds.astype(np.float64) / counts)[self.utterance]

    def request(self, number: int) -> Request:
        return Request(
            float(self.at_s[number]),
            KINDS[self.kind[number]],
            self._lists(number, self.context_begin, self.context_word_begin, self.context_words),
            self._lists(number, self.row_begin, self.row_word_begin, self.row_words),
            CALLS[self.call[number]],
        )

    def _lists(
        self,
        number: int,
        begin: NDArray[np.int64],
        word_begin: NDArray[np.int64],
        words: NDArray[np.int32],
    ) -> tuple[Words, ...]:
        first, last = int(begin[number]), int(begin[number + 1])
        ends = word_begin[first : last + 1].tolist()
        flat = words[ends[0] : ends[-1]].tolist() if ends else []
        base = ends[0] if ends else 0
        return tuple(
            tuple(self.table[w] for w in flat[a - base : b - base]) for a, b in pairwise(ends)
        )

    def utterances(self) -> Iterator[Spoken]:
        for number, (name, speaker, seconds) in enumerate(
            zip(self.names, self.speakers, self.seconds.tolist(), strict=True)
        ):
            first, last = self.first_request[number : number + 2].tolist()
            requests = tuple(self.request(at) for at in range(first, last))
            yield Spoken(name, speaker, seconds, requests)


def write_trace(path: Path, spoken: Sequence[Spoken], about: Mapping[str, Any]) -> None:
    """Writes a complete trace or nothing; FormatError if README.md does not allow it.

    Args  about  facts for the reader: the model, the decoder, the licence of the audio
    """
    table = _table_of(spoken, about)
    _trace_of(table, "the trace to be written")
    with replacing(path) as file:
        pq.write_table(
            table, file, compression="zstd", compression_level=12, write_page_checksum=True
        )


def trace_of(spoken: Sequence[Spoken]) -> Trace:
    """The trace in memory; raises `FormatError` like `write_trace`."""
    return _trace_of(_table_of(spoken, {}), "the trace")


def _table_of(spoken: Sequence[Spoken], about: Mapping[str, Any]) -> pa.Table:
    rows = [(one, request) for one in spoken for request in one.requests]
    columns = [
        [one.name for one, _ in rows],
        [one.speaker for one, _ in rows],
        [one.seconds for one, _ in rows],
        [request.at_s for _, request in rows],
        [request.kind for _, request in rows],
        [request.call for _, request in rows],
        [request.contexts for _, request in rows],
        [request.words for _, request in rows],
    ]
    header = json.dumps({**about, "version": VERSION}, sort_keys=True, ensure_ascii=False)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({HEADER: header.encode()}))


def read_trace(path: Path) -> Trace:
    """Reads a trace and checks it against README.md.

    Raises  FormatError  it is no trace, has another version, is damaged, or contradicts itself
    """
    # Arrow opens the file: if its threads freed a Python file late, Python would abort at exit.
    with path.open("rb"), pa.OSFile(str(path)) as file:  # `path.open` reports a fault in one line
        try:
            table = pq.ParquetFile(file, page_checksum_verification=True).read()
        except (pa.ArrowException, UnicodeDecodeError, OSError) as exc:
            why = str(exc).rstrip(".")
            raise FormatError(
                f"{path} is not a trace: {why}. Create one with `python -m loadtest record`"
            ) from exc
    return _trace_of(table, str(path))


def _trace_of(table: pa.Table, where: str) -> Trace:
    about = _about(table, where)
    for field in SCHEMA:
        names = table.schema.names
        is_there = names.count(field.name) == 1
        if not is_there or table.field(field.name).type != field.type:
            what = f"has {table.field(field.name)}" if is_there else f"has columns {names}"
            raise FormatError(f"{where} {what}; expected one column {field.name}: {field.type}")
    if table.num_rows == 0:
        raise FormatError(f"{where} has no requests; record at least one utterance")
    one = table.combine_chunks()
    columns = {name: one.column(name).combine_chunks() for name in SCHEMA.names}
    for name, column in columns.items():
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as exc:
            raise FormatError(f"{where}, column {name}: {exc}. Record the trace again") from exc
        if column.null_count:
            raise FormatError(
                f"{where} has {column.null_count} nulls in column {name}; record the trace again"
            )
    names, begins = _runs(columns["utterance"])
    if len(set(names)) != len(names):
        raise FormatError(
            f"{where}: the rows of an utterance are not consecutive; record the trace again"
        )
    contexts, rows = _Nested(columns["contexts"], where), _Nested(columns["words"], where)
    words = pc.dictionary_encode(pa.concat_arrays([contexts.words, rows.words]))
    places = words.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    counts = np.diff([*begins, table.num_rows])
    trace = Trace(
        about,
        names,
        columns["speaker"].take(begins).to_pylist(),
        columns["utterance_s"].take(begins).to_numpy(zero_copy_only=False),
        np.repeat(np.arange(len(names), dtype=np.int32), counts),
        columns["at_s"].to_numpy(zero_copy_only=False),
        _places(columns["kind"], KINDS, "kind", where),
        _places(columns["call"], CALLS, "call", where),
        contexts.begin,
        contexts.word_begin,
        places[: len(contexts.words)],
        rows.begin,
        rows.word_begin,
        places[len(contexts.words) :],
        words.dictionary.to_pylist(),
    )
    _check(trace, columns, where)
    return trace


def _about(table: pa.Table, where: str) -> dict[str, Any]:
    text = (table.schema.metadata or {}).get(HEADER)
    if text is None:
        raise FormatError(
            f"{where} is a Parquet file without the metadata {HEADER.decode()!r}, so it is not a "
            "trace; create a trace with `python -m loadtest record`"
        )
    try:
        about = json.loads(text)
        version = about["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FormatError(
            f"{where}: the trace's header {text[:80]!r} has no version. Record the trace again, or "
            "use the loadtest that wrote it"
        ) from exc
    if version != VERSION:
        raise FormatError(
            f"{where} is a trace of version {version!r}; this loadtest reads {VERSION}. Record "
            "the trace again, or use the loadtest that wrote it"
        )
    return dict(about)


def _runs(column: pa.Array) -> tuple[list[str], list[int]]:
    """Returns the value of each run of equal values in a column, and the row where it begins."""
    values = column.to_pylist()
    begins = [at for at, value in enumerate(values) if at == 0 or value != values[at - 1]]
    return [values[at] for at in begins], begins


class _Nested:
    """Flat arrays of a column whose values are lists of contexts or of rows of words."""

    def __init__(self, column: pa.Array, where: str) -> None:
        inner = column.flatten()
        self.words = inner.flatten()
        if inner.null_count or self.words.null_count:
            raise FormatError(
                f"{where} has nulls within its contexts or words; record the trace again"
            )
        self.begin = _begins(column)
        self.word_begin = _begins(inner)


def _begins(column: pa.Array) -> NDArray[np.int64]:
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _places(column: pa.Array, names: Sequence[str], what: str, where: str) -> NDArray[np.uint8]:
    found = pc.index_in(column, value_set=pa.array(names))
    if found.null_count:
        other = sorted(set(column.to_pylist()) - set(names))
        raise FormatError(f"{where}: a request's {what} is {other[0]!r}; expected {list(names)}")
    places: NDArray[np.uint8] = found.to_numpy(zero_copy_only=False).astype(np.uint8)
    return places


def _check(trace: Trace, columns: Mapping[str, pa.Array], where: str) -> None:
    """Checks the rows beyond their types; raises `FormatError` with the first faulty row."""
    seconds = columns["utterance_s"].to_numpy(zero_copy_only=False)
    rows = np.diff(trace.row_begin)
    widths = np.diff(trace.row_word_begin)
    row_of = np.repeat(np.arange(len(trace)), rows)
    ragged = np.unique(row_of[widths != trace.word_counts[row_of]])
    same_speaker = np.array(trace.speakers)[trace.utterance] == np.array(
        columns["speaker"].to_pylist()
    )
    is_block = trace.call == CALLS.index(BLOCKS)
    faults = [
        (
            ~((seconds > 0) & (seconds <= MOST_S)),
            f"utterance_s is not a number above 0, up to {MOST_S:.0f}",
        ),
        (seconds != trace.seconds[trace.utterance], "utterance_s differs within an utterance"),
        (~same_speaker, "speaker differs within an utterance"),
        (~((trace.at_s >= 0) & (trace.at_s <= seconds + LATE_S)), "at_s is not in the utterance"),
        ((trace.context_counts == 0) & (rows != 0), "words are requested without a context"),
        (is_block & (rows != 0), "context_blocks is called with words"),
        (
            ~is_block & (rows != 1) & (rows != trace.context_counts),
            "words has neither one row nor a row for each context",
        ),
        (
            ~is_block & (trace.context_counts > 0) & (trace.word_counts == 0),
            "no words are requested",
        ),
        (np.isin(np.arange(len(trace)), ragged), "rows of words differ in length"),
    ]
    for at, why in faults:
        if at.any():
            row = int(np.flatnonzero(at)[0])
            raise FormatError(
                f"{where}, row {row} (utterance {trace.names[trace.utterance[row]]}): {why}"
            )
    if b"" in trace.table:
        raise FormatError(f"{where} has an empty word; record it again without empty words")


def describe(trace: Trace, name: str) -> dict[str, Any]:
    """Describes the contents of a trace in numbers."""
    asks = trace.asks
    gaps = np.diff(trace.at_s)[np.diff(trace.utterance) == 0]
    lengths = np.diff(trace.context_word_begin)
    kinds, calls = trace.kind[asks], trace.call[asks]
    requests = int(asks.sum())
    return {
        "name": name,
        "made_by": trace.about.get("made_by"),
        "utterances": len(trace.names),
        "speakers": len(set(trace.speakers)),
        "audio_s": trace.audio_s,
        "utterance_s": float(trace.seconds.mean()),
        "requests": requests,
        "kinds": _counts(kinds, KINDS),
        "calls": _counts(calls, CALLS),
        "requests_per_audio_s": requests / trace.audio_s,
        "queries_per_audio_s": float(trace.queries.sum()) / trace.audio_s,
        "contexts_per_request": _mean(trace.context_counts[asks]),
        "words_per_context": _mean(trace.word_counts[trace.queries > 0]),
        "context_words": _mean(lengths),
        "gap_s": _mean(gaps),
        "distinct_words": len(trace.table),
    }


def _counts(places: Any, names: Sequence[str]) -> dict[str, int]:
    counts = np.bincount(places, minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def _mean(values: Any) -> float:
    return float(values.mean()) if len(values) else 0.0
