"""A strict streaming reader of ARPA files, whose errors give the line and advice."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from dlm.errors import ArpaError
from dlm.ngram.arpa.header import read_header
from dlm.ngram.arpa.lines import Line, LineReader
from dlm.ngram.arpa.rows import (
    MAX_LINE_BYTES,
    NgramBatch,
    RowBlock,
    RowFault,
    shown,
    split_row,
)
from dlm.ngram.vocab import BEGIN_SENTENCE, END_SENTENCE, UNK_ID, Vocabulary, is_unk_spelling
from dlm.ngram.wordtable import WordTable
from dlm.resources import Closeable

# The most words to make room for, whatever the header promises; untouched memory is free.
_BELIEVED_WORDS = 1 << 20

# Blocks of rows held at a time: one is in use, the others are being parsed or wait.
_BLOCKS = 4
# Threads: one reads and decompresses, the others parse.
_THREADS = 3


class ArpaWarning(UserWarning):
    """An ARPA file is readable, but not entirely correct."""


class ArpaReader(Closeable):
    r"""Reads the n-grams of an ARPA file in batches, in one pass and bounded memory.

    The header is read at once; `batches` reads the rest. Plain, gzip, zstd and xz files are told
    apart by their first bytes. The unknown word has id 0, spelled `<unk>` or `<UNK>`; the other
    unigrams have 1, 2, 3, ... in the order of the file.

    Args    path          an ARPA file, a pipe, or a folder of parts: see lines.py
            batch_ngrams  the most n-grams in a batch; long rows make smaller batches
    Raises  ArpaError  the file is not ARPA, is truncated or is damaged; with section, line, offset
    Guarantees
        every number is the float32 nearest to its decimal text, ties to even, and never -0.0;
        each section has exactly as many n-grams as the header promises;
        an error is raised no later than the end of `batches`, which reads to the end of the file
    Edge cases
        =============================  ==========================================
        no `<unk>` or `<UNK>`          id 0 has no row; vocabulary.unk_in_model is False
        no `<s>` or `</s>`             refused
        a section of no n-grams        its header is optional, and it yields no batch
        no `\\end\\`                     ArpaWarning if all counts are met, else refused
        no line end after a row        refused: the row may be cut short
        backoff at the highest order   refused, except 0
        carriage return in a line      refused, except before the line end
        =============================  ==========================================
    Cost    memory: the vocabulary, twice, and at most 64 MiB of text with the arrays read from it.
            While batches are taken, threads read on and parse; they end with the iterator, or by
            `close`
    """

    def __init__(self, path: str | os.PathLike[str], *, batch_ngrams: int = 65536) -> None:
        if batch_ngrams < 1:
            raise ValueError(f"batch_ngrams must be at least 1, not {batch_ngrams}")
        self.path: str = os.fspath(path)
        self.section_first_line: dict[int, int] = {}
        self._batch_ngrams = batch_ngrams
        self._vocabulary: Vocabulary | None = None
        self._table = WordTable()
        self._unk_row: int | None = None
        self._pending: deque[tuple[RowBlock, Future[None] | None]] = deque()  # blocks, in order
        self._pool: ThreadPoolExecutor | None = None
        self._finished = False
        self._closed = False
        self._started = False
        self._text = LineReader(self.path)
        try:
            head = read_header(self._text)
        except BaseException:
            self._text.close()
            raise
        self.comments, self.counts, self._marker = head
        self.order: int = len(self.counts)

    def close(self) -> None:
        self._closed = True
        self._stop_threads()
        self._text.close()

    @property
    def compression(self) -> str:
        return self._text.compression

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the model; RuntimeError before the 1-gram section has been read."""
        if self._vocabulary is None:
            raise RuntimeError("the vocabulary is known only after the batches of order 1")
        return self._vocabulary

    @property
    def text_bytes(self) -> int:
        """Size of the decompressed text; RuntimeError before the file has been read to its end."""
        self._require_finished()
        return self._text.text_bytes

    @property
    def text_xxh3(self) -> str:
        """XXH3 (128 bits, hex) of the decompressed text; raises what `text_bytes` raises."""
        self._require_finished()
        return self._text.text_xxh3

    @property
    def source_facts(self) -> dict[str, Any]:
        """Size and checksum of the decompressed text, for provenance; known once all is read."""
        return {"text_bytes": self.text_bytes, "text_xxh3_128": self.text_xxh3}

    def batches(self) -> Iterator[NgramBatch]:
        """All n-grams, section by section from order 1 up, each section in the order of the file.

        Raises  ArpaError;  RuntimeError  called a second time;  ValueError  the reader was closed
        """
        if self._started:
            raise RuntimeError("an ArpaReader reads its file once; open another for a second pass")
        self._started = True
        return self._batches()

    def error_at(
        self, message: str, *, order: int, row: int, advice: str | None = None
    ) -> ArpaError:
        """Makes the error for a faulty n-gram that was read earlier, with its place in the file.

        Reads the file again up to `row`, an index in the section; for a pipe, the error has no
        byte offset. Raises ValueError if the section has not been reached.
        """
        if order not in self.section_first_line:
            raise ValueError(f"the {order}-gram section has not been read")
        line = self.section_first_line[order] + row
        return ArpaError(
            message,
            path=self.path,
            order=order,
            line=line,
            byte_offset=self._text.offset_of_line(line),
            advice=advice,
        )

    def _require_finished(self) -> None:
        if not self._finished:
            raise RuntimeError(
                "the text's size and checksum are known only after the last batch has been read"
            )

    def _stop_threads(self) -> None:
        pool, self._pool = self._pool, None
        self._text.read_ahead(None)
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _give_back(self, block: RowBlock, position: int) -> None:
        for _, parsed in self._pending:
            if parsed is not None:
                parsed.cancel()
        self._text.give_back(block, position, [later for later, _ in self._pending])
        self._pending.clear()

    def _fail_truncated(self, order: int, found: int) -> NoReturn:
        self._text.fail_if_damaged(order)
        cut = " in the middle of a row" if self._text.at_hand_bytes else ""
        self._text.fail(
            f"the file ends inside the {order}-gram section{cut}: the header promises "
            f"{self.counts[order - 1]} n-grams, found {found}",
            None,
            order,
            "The file is truncated; copy or build it again",
        )

    # ------------------------------------------------------------------------ sections

    def _batches(self) -> Iterator[NgramBatch]:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dlm-arpa")
        self._text.read_ahead(self._pool)
        try:
            yield from self._sections()
        finally:
            self._stop_threads()

    def _sections(self) -> Iterator[NgramBatch]:
        marker = self._marker
        for order, count in enumerate(self.counts, start=1):
            header = b"\\%d-grams:" % order
            if marker is not None and marker.text == header:
                self.section_first_line[order] = self._text.line
                yield from self._section(order)
                marker = self._next_marker(order)
            elif count == 0:
                if order == 1:
                    self._text.fail(
                        "the model has no 1-grams", marker, 1, "Estimate the model again"
                    )
            elif marker is None:
                self._text.fail(
                    f"the file ends before the {order}-gram section",
                    None,
                    order,
                    "The file is truncated; copy or build it again",
                )
            else:
                self._text.fail(
                    f"expected {header.decode()}, found {shown(marker.text)}",
                    marker,
                    order,
                    f"The header promises {count} {order}-grams",
                )
        if marker is None:
            warnings.warn(
                ArpaWarning(
                    f"{self.path} does not end in \\end\\, but all counts in its header match, so "
                    "it is read as complete"
                ),
                stacklevel=3,
            )
        elif marker.text != b"\\end\\":
            self._text.fail(f"expected \\end\\, found {shown(marker.text)}", marker, None)
        else:
            while (line := self._text.next_line(None)) is not None:
                if line.text:
                    self._text.fail(
                        f"text after \\end\\: {shown(line.text)}",
                        line,
                        None,
                        "Nothing may follow the model; were two files joined?",
                    )
        self._finished = True
        self.close()

    def _next_marker(self, order: int) -> Line | None:
        """Returns the next line that begins with a backslash; only blank lines may precede it."""
        blank_before = False
        while (line := self._text.next_line(order)) is not None:
            if line.text.startswith(b"\\"):
                return line
            if line.text:
                if blank_before:
                    self._text.fail(
                        f"expected the header of a section or \\end\\, found {shown(line.text)}",
                        line,
                        order,
                        f"The header promises {self.counts[order - 1]} {order}-grams",
                    )
                self._fail_too_many(line, order)
            blank_before = True
        return None

    def _fail_too_many(self, first: Line, order: int) -> NoReturn:
        found = self.counts[order - 1] + 1
        try:
            while (line := self._text.next_line(order)) is not None:
                if not line.text or line.text.startswith(b"\\"):
                    break
                found += 1
        except ArpaError:
            pass  # the rows counted so far are already too many
        self._text.fail(
            f"too many n-grams: the header promises {self.counts[order - 1]} "
            f"{order}-grams, found {found}",
            first,
            order,
            "Correct the counts in the header, or build the file again",
        )

    def _fail_too_few(self, at: Line, order: int, found: int) -> NoReturn:
        promised = self.counts[order - 1]
        following: Line | None = at
        try:
            while following is not None and not following.text:
                following = self._text.next_line(order)
        except ArpaError:
            following = None
        if following is not None and not following.text.startswith(b"\\"):
            self._text.fail(
                f"a blank line inside the {order}-gram section, after {found} of {promised} rows",
                at,
                order,
                "Remove it; blank lines are allowed only between sections",
            )
        self._text.fail(
            f"too few n-grams: the header promises {promised} {order}-grams, found {found}",
            at,
            order,
            "The file is incomplete, or its header is from another model; build it again",
        )

    def _section(self, order: int) -> Iterator[NgramBatch]:
        count = self.counts[order - 1]
        done = 0
        if order == 1:
            self._table.reserve(min(count, _BELIEVED_WORDS), 0)
        while done < count:
            block = self._next_block(order, count - done)
            if block is None:
                if self._text.at_hand_bytes > MAX_LINE_BYTES:
                    self._text.fail_long_line(order)
                self._fail_truncated(order, done)
            self._read_block(block, order, done)
            # Rows of previous blocks may not have been counted yet when this one was started.
            rows = min(block.filled, count - done)
            for first in range(0, rows, self._batch_ngrams):
                piece = slice(first, min(first + self._batch_ngrams, rows))
                yield NgramBatch(
                    order,
                    done + first,
                    block.ids[piece],
                    block.log10_prob[piece],
                    block.log10_backoff[piece],
                )
            done += rows
            self._text.line += rows
            if done == count:
                self._give_back(block, block.place_of_row(rows))
        if order == 1:
            self._finish_vocabulary()

    def _next_block(self, order: int, most: int) -> RowBlock | None:
        """Returns the next whole lines, parsed if the order is above 1. None, which comes after all
        blocks that were read ahead, means the same as in `LineReader.take_block`."""
        if self._closed:
            raise ValueError("the reader is closed")
        # A word's id depends on the words before it, so 1-grams are read one block at a time.
        while len(self._pending) < (1 if order == 1 else _BLOCKS):
            try:
                block = self._text.take_block()
            except OSError:
                if not self._pending:
                    raise
                break  # the error is raised again after the previous rows
            if block is None:
                break
            parsed = None
            if order > 1 and self._pool is not None:
                parsed = self._pool.submit(self._parse, block, order, most)
            elif order > 1:
                self._parse(block, order, most)
            else:
                block.start(order, most)
            self._pending.append((block, parsed))
        if not self._pending:
            return None
        block, parsed = self._pending.popleft()
        if parsed is not None:
            parsed.result()
        return block

    def _parse(self, block: RowBlock, order: int, most: int) -> None:
        """In any thread: reads the rows of a block up to the first irregular row."""
        block.start(order, most)
        self._read_on(block, order, 0)

    def _read_on(self, block: RowBlock, order: int, done: int) -> None:
        top = order == self.order
        if order == 1:
            self._unk_row = block.read_words(self._table, top, done, self._unk_row)
        else:
            block.read_ngrams(self._table, top, self.vocabulary.unk_in_model)

    def _read_block(self, block: RowBlock, order: int, done: int) -> None:
        """Reads to the end of the block, or of the section; raises at the first wrong row."""
        most = min(block.rows, self.counts[order - 1] - done)
        if order == 1:
            self._read_on(block, order, done)
        while block.filled < most:
            self._one_by_one(block, order, done)
            self._read_on(block, order, done)

    def _one_by_one(self, block: RowBlock, order: int, done: int) -> None:
        """Reads the row of a block at which bulk reading stopped; raises if it is wrong."""
        line = block.next_line()
        offset = block.offset + block.position
        number = self._text.line + block.filled
        if len(line) > MAX_LINE_BYTES:
            self._text.fail_long_line(order, number, offset)
        bare = line.removesuffix(b"\r").rstrip(b" \t")
        if not bare or bare.startswith(b"\\"):
            # The next line tells whether a blank line is misplaced or the section is short.
            self._text.line = number + 1
            self._give_back(block, block.position + len(line) + 1)
            self._fail_too_few(Line(bare, number, offset), order, done + block.filled)
        try:
            prob, words, backoff = split_row(line, order, order == self.order)
            if order == 1:
                ids = [self._new_word(words[0], done + block.filled)]
            else:
                ids = [self._known_word(word) for word in words]
        except RowFault as fault:
            self._text.fail(fault.message, Line(line, number, offset), order, fault.advice)
        block.put(ids, prob, backoff, len(line) + 1)

    def _new_word(self, word: bytes, row: int) -> int:
        if is_unk_spelling(word):
            if self._unk_row is not None:
                first, spelling = self._unk_row, self._table.word(UNK_ID)
                both = "" if spelling == word else ", which also spells the unknown word,"
                raise RowFault(
                    f"a duplicate word: {shown(word)}; {shown(spelling)}{both} is already on line "
                    f"{self.section_first_line[1] + first}",
                    "The unknown word is spelled <unk> or <UNK>; keep one of the two rows",
                )
            self._unk_row = row
            self._table.spell_unk(word)
            return UNK_ID
        known = self._table.find(word)
        if known is not None:
            first = known - 1
            if self._unk_row is not None and first >= self._unk_row:
                first += 1
            raise RowFault(
                f"a duplicate word: {shown(word)} is already on line "
                f"{self.section_first_line[1] + first}",
                "Keep one of the two rows and correct the count, or build the file again",
            )
        return self._table.add(word)

    def _known_word(self, word: bytes) -> int:
        vocabulary = self.vocabulary
        word_id = vocabulary.ids.get(word)
        if word_id is None or (word_id == 0 and not vocabulary.unk_in_model):
            raise RowFault(
                f"an unknown word: {shown(word)} is not among the 1-grams",
                "The 1-gram section lists every word of the model; add the word there, or build "
                "the file again",
            )
        return word_id

    def _finish_vocabulary(self) -> None:
        missing = [w for w in (BEGIN_SENTENCE, END_SENTENCE) if self._table.find(w) is None]
        if missing:
            names = " and ".join(word.decode() for word in missing)
            self._text.fail(
                f"the 1-grams lack {names}",
                None,
                1,
                "A model of sentences needs both <s> and </s>: estimate it with sentence "
                f"boundaries, or add a row `-99 {missing[0].decode()}` and correct the count",
            )
        self._vocabulary = Vocabulary(self._table.words(), unk_in_model=self._unk_row is not None)
