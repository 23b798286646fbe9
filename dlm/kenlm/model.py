"""Uses a KenLM file as a model: scores ids, text, and words after contexts, in the file itself."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlm.kenlm import kernels as words_kernels, score_kernels as kernels
from dlm.kenlm.layout import Data, Layout, open_file
from dlm.kenlm.view import find_ids, make_view, words_of
from dlm.memory_options import MAPPED, MemoryOptions
from dlm.ngram.query import FULL, Answers, QueryGroups
from dlm.ngram.vocab import UNK_ID, Vocabulary, as_bytes
from dlm.ngram.wordtable import WordTable

# The kernels that open a file and score with it; see jit.compile_ahead.
KERNELS = (
    kernels.score_tokens,
    kernels.score_groups,
    kernels.find_text,
    kernels.sum_sentences,
    words_kernels.find_words,
)
LINE_SPACES, WHITE_SPACE = b" \t\r", b" \t\r\v\f"  # bytes that separate words, besides the newline
_SAMPLES, _SAMPLE_BYTES = 32, 64  # number of samples hashed for `model_id`, and bytes of each
_KNOWN_WORDS = 1 << 20  # maximum number of ids to remember


class KenlmFile:
    """A KenLM binary file, mapped; make one with `KenlmFile.open`. Any thread may use it.

    Attributes
        view      addresses and sizes of the file's parts, as kernels read them, (places,) int64
        model_id  32 hex digits, a hash of the size and samples of the content, header included;
                  tells the states of different files apart
    Guarantees
        log10 P, `ngram_length` and state lengths are KenLM's, bit for bit in float32. log10 P can
        differ in the last bit from `ngram.backoff.score` of the same n-grams, since KenLM begins
        with the probability, then adds the weights from the shortest context up. `matched_order` is
        `ngram_length`: a file does not say which n-grams are blanks
    """

    def __init__(
        self, data: Data, layout: Layout, vocab: str | os.PathLike[str] | None = None
    ) -> None:
        self.data, self.layout = data, layout
        self._listed = vocab
        self.view = make_view(data, layout)
        self.vocabulary: Vocabulary = FileVocabulary(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        vocab: str | os.PathLike[str] | None = None,
        memory_options: MemoryOptions = MAPPED,
    ) -> KenlmFile:
        """Maps the file at `path`.

        Args    vocab  path of a list of words, one per line, for a file that stores none; read when
                       words are first needed, see `view.words_of`. Scoring text needs no list
        Raises  KenlmFormatError  see `layout.open_file`
                ConfigError       memory cannot be locked
                OSError           the file cannot be read
        """
        data, layout = open_file(path, memory_options=memory_options)
        return cls(data, layout, vocab)

    def __reduce__(self) -> tuple[Any, ...]:
        opened_again = partial(KenlmFile.open, vocab=self._listed)
        return opened_again, (Path(self.layout.path).absolute(),)

    @property
    def order(self) -> int:
        return self.layout.order

    @property
    def vocabulary_size(self) -> int:
        """The number of words, including the unknown word; ids are below it."""
        return self.layout.words

    @cached_property
    def word_table(self) -> WordTable:
        """The words of the model by id; raises what `view.words_of` raises."""
        return words_of(self.data, self.layout, self.view, self._listed)

    @cached_property
    def model_id(self) -> str:
        size = len(self.data)
        digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
        step = max(size // _SAMPLES, _SAMPLE_BYTES)
        for at in range(0, size, step):
            digest.update(self.data[at : at + _SAMPLE_BYTES].tobytes())
        return digest.hexdigest()

    def ids_of(self, words: Iterable[str | bytes]) -> NDArray[np.uint32]:
        """Finds the ids of words by their hashes, (n,) uint32; 0 for words that the model lacks."""
        return find_ids(self.view, [as_bytes(word) for word in words])

    def ids_of_text(
        self, text: bytes, *, spaces: bytes = LINE_SPACES
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        padded = np.frombuffer(b"".join((text, bytes(words_kernels.PAD_BYTES))), np.uint8)
        ids = np.empty((len(text) + 1) // 2, np.uint32)
        sentence_begin = np.empty(text.count(b"\n") + 2, np.int64)
        count = kernels.find_text(
            self.view.ctypes.data, padded, len(text), splits_at(spaces), ids, sentence_begin
        )
        return ids[: int(count)].copy(), sentence_begin

    def score_tokens(
        self, words: NDArray[np.uint32], reach: NDArray[np.uint8], *, bos: bool
    ) -> Answers:
        a = Answers.empty(len(words))
        kernels.score_tokens(
            self.view.ctypes.data, words, reach, bos, a.log10_prob, a.matched_order,
            a.ngram_length, a.state_length,
        )  # fmt: skip
        return a

    def score_groups(self, groups: QueryGroups) -> Answers:
        """Scores each word after the context of its group; each context is looked up once.

        Trusts  ids below the vocabulary's size, lengths below the order, counts that add up
        """
        a = Answers.empty(len(groups.words))
        kernels.score_groups(
            self.view.ctypes.data, groups.context_lengths, groups.context_words,
            groups.word_counts, groups.words, a.log10_prob, a.matched_order, a.ngram_length,
            a.state_length,
        )  # fmt: skip
        return a

    def block(self, context: NDArray[np.uint32]) -> KenlmBlock:
        """Returns a block that scores any word after a context of (L,) ids, most recent last."""
        return KenlmBlock(self, context)


def splits_at(spaces: bytes) -> NDArray[np.uint8]:
    """Returns (256,) uint8 flags: 1 for the newline and for `spaces`."""
    splits = np.zeros(256, np.uint8)
    splits[[ord("\n"), *spaces]] = 1
    return splits


class FileVocabulary(Vocabulary):
    """The vocabulary of a file. Ids are found by hash, as in KenLM; words are read when one is
    looked up by its id, which may raise what `view.words_of` raises."""

    __slots__ = ("_file", "_known")

    def __init__(self, file: KenlmFile) -> None:
        self._file = file
        self._words = self._ids = None
        self._size = file.layout.words
        self.unk_in_model = True  # KenLM's files always have a value for it
        begin = file.view[words_kernels.BEGIN], file.view[words_kernels.END]
        self.begin_id, self.end_id = map(int, begin)
        self._known: dict[bytes, int] = {}

    @property
    def table(self) -> WordTable:  # type: ignore[override]
        return self._file.word_table

    def __contains__(self, word: str | bytes) -> bool:
        return self.id_of(word) != UNK_ID

    def id_of(self, word: str | bytes) -> int:
        text = as_bytes(word)
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _KNOWN_WORDS:
                self._known.clear()
            found = self._known[text] = int(find_ids(self._file.view, [text])[0])
        return found

    def ids_of(self, words: Iterable[str | bytes]) -> NDArray[np.uint32]:
        return self._file.ids_of(words)


@dataclass(frozen=True, slots=True)
class KenlmBlock:
    """One context, with `ContextBlock`'s methods. A KenLM file cannot list what follows a context,
    so a block holds no words, and each word is scored in the file."""

    file: KenlmFile
    context: NDArray[np.uint32]
    source: int = FULL
    words: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    words_before: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words_before", tuple(self.context.tolist()))

    def score(self, asked: NDArray[np.uint32]) -> Answers:
        return self.file.score_groups(
            QueryGroups(
                np.array([len(self.context)], np.uint8),
                self.context,
                np.array([len(asked)], np.uint32),
                np.ascontiguousarray(asked),
            )
        )

    def score_word(self, word: int) -> tuple[float, int]:
        found = self.score(np.array([word], np.uint32))
        return float(found.log10_prob[0]), int(found.state_length[0])

    def score_all(self) -> Answers:
        return self.score(np.arange(self.file.vocabulary_size, dtype=np.uint32))
