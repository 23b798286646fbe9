"""The questions that every row is asked: made from real text, the same each time.

Two shapes. *Batches* are what a speech decoder sends: contexts of up to four words, twenty words
asked of each. *Sentences* are lines of text, scored from `<s>` to `</s>`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from loadtest.traces.rescoring import spoken

SEED = 20190812
MAGIC = 0x574D4C44  # "DLMW"; DO NOT CHANGE without kenlm_driver.cc

BEGIN, END = b"<s>", b"</s>"


@dataclass(frozen=True)
class Mix:
    """How much is asked, and how the words asked of a context are drawn.

    The words of a context are distinct: a decoder asks for a word once. `follow` of them follow
    the context's last word somewhere in the text, drawn as often as they do; one is the true next
    word; the rest are drawn as often as they stand in the text.
    """

    lines: int = 200_000  # sampled over the whole text; words are drawn from these
    batches: int = 2_000  # 2,000,000 queries, so that caches do not hold what they touch
    places: int = 10  # of a batch, each at random: utterances decoded at once
    consecutive: int = 5  # contexts from each place on
    words: int = 20  # asked of each context
    follow: int = 9
    history: int = 4  # words of a context at most
    sentences: int = 25_000

    @property
    def contexts(self) -> int:
        """Contexts of a batch."""
        return self.places * self.consecutive


@dataclass(frozen=True, eq=False)
class Workload:
    """What is asked, in words of its own table, so that each model looks up its own ids.

    Shapes
        table            W words, bytes
        context_lengths  (C,)                    uint32
        context_words    (sum(context_lengths),) uint32  most recent last
        word_counts      (C,)                    uint32
        words            (Q,)                    uint32
        lengths          (S,)                    uint32  words of each sentence
        tokens           (sum(lengths),)         uint32  without <s> and </s>
    """

    mix: Mix
    table: list[bytes]
    context_lengths: NDArray[np.uint32]
    context_words: NDArray[np.uint32]
    word_counts: NDArray[np.uint32]
    words: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    tokens: NDArray[np.uint32]

    @property
    def scored_tokens(self) -> int:
        """Tokens scored in the sentences, each `</s>` included."""
        return len(self.tokens) + len(self.lengths)

    def sentences(self) -> list[bytes]:
        """The sentences as text."""
        table, tokens = self.table, self.tokens
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return [
            b" ".join([table[t] for t in tokens[end - length : end]])
            for end, length in zip(ends.tolist(), self.lengths.tolist(), strict=True)
        ]

    def write(self, path: Path) -> None:
        """Writes the file that kenlm_driver.cc reads: little-endian uint32 and the words."""
        spelled = b"\n".join(self.table) + b"\n"
        spelled += b"\n" * (-len(spelled) % 4)
        counts = [
            MAGIC,
            *(len(self.table), len(spelled)),
            *(len(self.context_lengths), len(self.context_words), len(self.words)),
            *(len(self.lengths), len(self.tokens)),
        ]
        with path.open("wb") as out:
            out.write(np.array(counts, "<u4").tobytes())
            out.write(spelled)
            for array in (
                *(self.context_lengths, self.context_words, self.word_counts, self.words),
                *(self.lengths, self.tokens),
            ):
                out.write(array.astype("<u4").tobytes())


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a text, plain or compressed (.zst, .gz), as they stand."""
    kind = {".zst": "zstd", ".gz": "gzip"}.get(path.suffix)
    with pa.OSFile(str(path)) as file:
        stream = file if kind is None else pa.CompressedInputStream(file, kind)
        yield from io.TextIOWrapper(io.BufferedReader(stream), "utf-8")


def from_text(path: Path, mix: Mix | None = None) -> Workload:
    """The workload of a text: the same text, mix and seed give the same workload.

    Raises
        ValueError  the text has too few sentences
    """
    mix = mix or Mix()
    rng = np.random.default_rng(SEED)
    lines = list(lines_of(path))
    picked = np.sort(rng.permutation(len(lines))[: mix.lines])
    sentences = [words for i in picked if (words := spoken(lines[i]))]
    if len(sentences) < mix.sentences:
        raise ValueError(f"{path} has {len(sentences)} sentences; {mix.sentences} are needed")
    del lines

    ids: dict[str, int] = {BEGIN.decode(): 0, END.decode(): 1}
    flat: list[int] = []
    begins: list[int] = []
    for words in sentences:
        begins.append(len(flat))
        flat.append(0)
        flat += [ids.setdefault(word, len(ids)) for word in words]
        flat.append(1)
    text = np.array(flat, np.uint32)
    asked = _batches(text, np.array(begins), mix, rng)

    chosen = np.sort(rng.permutation(len(sentences))[: mix.sentences])
    tokens = [ids[word] for i in chosen for word in sentences[i]]
    return Workload(
        mix,
        [word.encode() for word in ids],
        *asked,
        np.array([len(sentences[i]) for i in chosen], np.uint32),
        np.array(tokens, np.uint32),
    )


def _batches(
    text: NDArray[np.uint32], begins: NDArray[np.int64], mix: Mix, rng: np.random.Generator
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Context lengths, context words, word counts and words of the batches."""
    begin_of = begins[np.searchsorted(begins, np.arange(len(text)), side="right") - 1]
    askable = np.flatnonzero(text != 0)  # positions whose word can be asked: all but <s>
    by_word = np.argsort(text, kind="stable")
    edges = np.searchsorted(text[by_word], np.arange(int(text.max()) + 2))

    starts = rng.integers(0, len(askable) - mix.consecutive, mix.batches * mix.places)
    positions = askable[(starts[:, None] + np.arange(mix.consecutive)).ravel()]

    context_lengths = np.minimum(positions - begin_of[positions], mix.history).astype(np.uint32)
    reach = np.arange(-mix.history, 0)
    context_words = text[np.maximum(positions[:, None] + reach, 0)][
        reach >= -context_lengths.astype(np.int64)[:, None]
    ]

    previous = text[positions - 1]
    first, last = edges[previous], edges[previous + 1]
    spare = 3  # times as many are drawn as are wanted, since words drawn twice are asked once
    draw = rng.random((len(positions), mix.follow * spare))
    followers = text[by_word[first[:, None] + (draw * (last - first)[:, None]).astype(int)] + 1]
    frequent = text[askable[rng.integers(0, len(askable), (len(positions), mix.words * spare))]]

    words = np.empty((len(positions), mix.words), np.uint32)
    true_next = text[positions]
    for i, (true, near, far) in enumerate(
        zip(true_next.tolist(), followers.tolist(), frequent.tolist(), strict=True)
    ):
        some = list(dict.fromkeys([true, *near]))[: 1 + mix.follow]
        words[i] = list(dict.fromkeys([*some, *far]))[: mix.words]
    order = rng.permuted(np.tile(np.arange(mix.words), (len(positions), 1)), axis=1)
    words = np.take_along_axis(words, order, axis=1)
    counts = np.full(len(positions), mix.words, np.uint32)
    return context_lengths, context_words, counts, words.ravel()
