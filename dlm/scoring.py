"""Scores text in blocks of lines, by a local shard set or by servers.

A block is the available text: a piece of a file, or the lines that a pipe has delivered. Its scores
are passed on before the next block is awaited. Imports are local, so that `dlm score` starts fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlm.client import SentenceScore, Utterance
    from dlm.estimate.text import Block
    from dlm.index.search.local import LocalModel
    from dlm.index.search.text.score import Lines
    from dlm.kenlm.model import KenlmFile

BLOCK_BYTES = 1 << 20  # text that a thread scores at once; whole lines, so it may be longer
# Calls of so many sentences fill the messages to servers; blocks this small show progress.
SENTENCES = 512
SERVED_BYTES = 1 << 16


class Scored(Protocol):
    """The sentences of a block, scored."""

    def add_to(self, summary: ScoreSummary) -> None:
        """Adds the sentences to the totals."""

    def rows(self) -> str:
        """A row per sentence: log10 P with six decimals, tokens and OOVs, separated by tabs."""

    def sentences(self, block: Block) -> Iterator[tuple[list[bytes], SentenceScore]]:
        """The words of each sentence, and its score."""


@dataclass
class ScoreSummary:
    """Totals over sentences; perplexities as KenLM's `query -v summary` defines them.

    With OOVs: 10 ** -(log10 P / tokens). Without OOVs: the OOVs' log10 P and number are left out.
    Sentence ends are tokens.

    by_order  tokens by the order of the longest n-gram found, from 1 up
    """

    sentences: int = 0
    tokens: int = 0
    oovs: int = 0
    log10_prob: float = 0.0
    log10_oovs: float = 0.0
    by_order: list[int] = field(default_factory=list)

    def add(self, scores: list[SentenceScore]) -> None:
        import numpy as np

        self.sentences += len(scores)
        self.tokens += sum(score.tokens for score in scores)
        self.oovs += sum(score.oovs for score in scores)
        for score in scores:
            self.log10_prob += score.log10_prob
            self.log10_oovs += score.log10_oovs
        for score in scores:
            self._add_hits(np.bincount(score.token_matched_order))

    def add_lines(self, lines: Lines) -> None:
        self.sentences += len(lines.totals)
        self.tokens += int(lines.counts.tokens.sum())
        self.oovs += int(lines.counts.oovs.sum())
        self.log10_prob = _added(self.log10_prob, lines.totals)
        self.log10_oovs = _added(self.log10_oovs, lines.counts.log10_oovs)
        self._add_hits(lines.counts.hits)

    def _add_hits(self, found: NDArray[np.integer[Any]]) -> None:
        """Adds hits by matched order from 0 up; every token has order 1 or more."""
        self.by_order += [0] * (len(found) - 1 - len(self.by_order))
        for order, count in enumerate(found[1:].tolist()):
            self.by_order[order] += count

    def facts(self) -> dict[str, Any]:
        """The JSON object `summary`; a perplexity over no tokens is null."""
        from dlm.units import finite

        return {
            "sentences": self.sentences,
            "tokens": self.tokens,
            "oovs": self.oovs,
            "log10_prob": finite(self.log10_prob),
            "perplexity": self.perplexity(self.log10_prob, self.tokens),
            "perplexity_without_oovs": self.perplexity(
                self.log10_prob - self.log10_oovs, self.tokens - self.oovs
            ),
        }

    @staticmethod
    def perplexity(log10_total: float, tokens: int) -> float | None:
        """The perplexity; None if there are no tokens or a probability is zero."""
        from dlm.units import perplexity

        return perplexity(log10_total, tokens) if tokens and log10_total > -1e308 else None


def _added(total: float, values: NDArray[np.float64]) -> float:
    """Adds the values to `total` one by one, so that the sum does not depend on the blocks."""
    import numpy as np

    return float(np.cumsum(np.concatenate(([total], values)))[-1])


def scored_here(
    model: LocalModel | KenlmFile, blocks: Iterable[Block], threads: int
) -> Iterator[tuple[Block, Scored]]:
    """Yields blocks in order, scored by threads; an error is raised after the blocks before it."""
    from dlm.errors import DlmError
    from dlm.index.search.local import LocalModel
    from dlm.index.search.text.score import score_lines

    if isinstance(model, LocalModel):
        _ = model.word_table  # made once, before threads ask for it
    waiting: deque[tuple[Block, Future[Lines] | None]] = deque()

    def first() -> tuple[Block, Scored]:
        block, lines = waiting.popleft()
        return block, _Here(model.vocabulary.end_id, None if lines is None else lines.result())

    with ThreadPoolExecutor(threads) as pool:
        try:
            for block in blocks:
                lines = pool.submit(score_lines, model, block.lines) if block.size else None
                waiting.append((block, lines))
                while waiting and (block.waits or len(waiting) > 2 * threads):
                    yield first()
        except DlmError:
            while waiting:
                yield first()
            raise
        while waiting:
            yield first()


@dataclass
class _Here:
    """A block's scores, made in this process; `lines` is None if all lines were left out."""

    end_id: int
    lines: Lines | None

    def add_to(self, summary: ScoreSummary) -> None:
        if self.lines is not None:
            summary.add_lines(self.lines)

    def rows(self) -> str:
        return "" if self.lines is None else self.lines.rows()

    def sentences(self, block: Block) -> Iterator[tuple[list[bytes], SentenceScore]]:
        import numpy as np

        from dlm.client import SentenceScore
        from dlm.client.phrases import split_words
        from dlm.ngram.query import FULL
        from dlm.ngram.vocab import UNK_ID

        if self.lines is None:
            return
        end = 0
        for i, line in enumerate(block.lines.split(b"\n")):
            begin = end + 1  # after <s>
            tokens = int(self.lines.counts.tokens[i])
            end = begin + tokens
            part = slice(begin, end)
            yield (
                split_words(line),
                SentenceScore(
                    float(self.lines.totals[i]),
                    tokens,
                    int(self.lines.counts.oovs[i]),
                    float(self.lines.counts.log10_oovs[i]),
                    self.lines.answers.log10_prob[part],
                    self.lines.answers.matched_order[part],
                    self.lines.words[part] == UNK_ID,
                    np.full(tokens, FULL, np.uint8),
                ),
            )


def scored_by_servers(
    utterance: Utterance, blocks: Iterable[Block]
) -> Iterator[tuple[Block, Scored]]:
    from dlm.client.phrases import split_words

    for block in blocks:
        words = [split_words(line) for line in block.lines.split(b"\n")] if block.size else []
        scores: list[SentenceScore] = []
        for begin in range(0, len(words), SENTENCES):
            scores += utterance.score_sentences(words[begin : begin + SENTENCES])
        yield block, _ByServers(words, scores)


@dataclass
class _ByServers:
    words: list[list[bytes]]
    scores: list[SentenceScore]

    def add_to(self, summary: ScoreSummary) -> None:
        summary.add(self.scores)

    def rows(self) -> str:
        return "".join(f"{s.log10_prob:.6f}\t{s.tokens}\t{s.oovs}\n" for s in self.scores)

    def sentences(self, block: Block) -> Iterator[tuple[list[bytes], SentenceScore]]:
        return zip(self.words, self.scores, strict=True)
