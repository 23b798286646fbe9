"""All that is stored after some states, held here: any word is scored without a message.

A decoder asks many words of few states, one after the other. It fetches a block for each state
once; from then on the block and the low orders answer, with the bits that servers would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.client.deliver.asks import BlockPart
from dlm.client.deliver.call import UNKNOWN
from dlm.errors import ProtocolError
from dlm.index.search.blocks import ContextBlock
from dlm.index.search.shard import LowOrders
from dlm.ngram.query import FULL, PARTIAL, Answers

# Where a server was found not to know the call, it is not asked again for so long, in seconds.
UNKNOWN_S = 60.0


def joined(answers: Sequence[Answers]) -> Answers:
    """Several as one."""
    if len(answers) == 1:
        return answers[0]
    return Answers(
        np.concatenate([a.log10_prob for a in answers]),
        np.concatenate([a.matched_order for a in answers]),
        np.concatenate([a.ngram_length for a in answers]),
        np.concatenate([a.state_length for a in answers]),
    )


def blocks_asked(lengths: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Which contexts may have something stored after them that the low orders do not say."""
    return np.flatnonzero(lengths >= 2)


@dataclass(slots=True)
class _Fetched:
    """What came of one context so far; `total` words in all, None before the first came."""

    parts: list[BlockPart]
    source: int
    total: int | None = None

    @property
    def words(self) -> int:
        """How many came."""
        return sum(len(part.words) for part in self.parts)


class BlockFetch:
    """The blocks of some contexts, as they come: what is to be asked next, until all is there.

    Shapes  contexts (K, order - 1) uint32, right-aligned; lengths (K,) uint8
    Args
        source  of what the low orders say
    """

    def __init__(
        self, contexts: NDArray[np.uint32], lengths: NDArray[np.uint8], source: int
    ) -> None:
        self.contexts = contexts
        self.lengths = lengths
        self._fetched = [_Fetched([], source) for _ in range(len(lengths))]
        self._wanted = blocks_asked(lengths)

    @property
    def wanted(self) -> NDArray[np.int64]:
        """Rows that are to be asked, from `skips` on."""
        return self._wanted

    @property
    def skips(self) -> NDArray[np.uint32]:
        """Words that are there already, of each of these."""
        return np.array([self._fetched[row].words for row in self._wanted], np.uint32)

    def take(self, answered: tuple[list[BlockPart | None], NDArray[np.uint8]]) -> None:
        """What came of the wanted rows.

        Raises  ProtocolError  a part that cannot follow those before it
        """
        left = []
        for row, part, source in zip(
            self._wanted.tolist(), answered[0], answered[1].tolist(), strict=True
        ):
            fetched = self._fetched[row]
            if part is None:
                fetched.parts, fetched.source = [], source
                continue
            before = fetched.parts[-1].words[-1:] if fetched.parts else part.words[:0]
            if fetched.total not in (None, part.total) or (
                len(before) and len(part.words) and part.words[0] <= before[0]
            ):
                raise ProtocolError(
                    "the words that are stored after a context changed while they were read. The "
                    "server is faulty; ask another"
                )
            fetched.total, fetched.source = part.total, source
            fetched.parts.append(part)
            if fetched.words < part.total:
                left.append(row)
        self._wanted = np.array(left, np.int64)

    def skip_all(self) -> None:
        """Nothing is asked: servers do not know the call."""
        for row in self._wanted.tolist():
            self._fetched[row].source = UNKNOWN
        self._wanted = self._wanted[:0]

    def unknown(self) -> list[int]:
        """Rows whose servers do not know the call."""
        return [row for row, f in enumerate(self._fetched) if f.source == UNKNOWN]

    def blocks(self, low: LowOrders, instead: dict[int, Answers]) -> list[ContextBlock]:
        """The block of each row.

        Args
            instead  by row of `unknown`: the answers to all words of the vocabulary
        """
        made = []
        width = self.contexts.shape[1]
        for row, fetched in enumerate(self._fetched):
            context = np.ascontiguousarray(self.contexts[row, width - int(self.lengths[row]) :])
            whole = instead.get(row)
            if whole is not None and whole.source is not None and whole.source.any():
                block = ContextBlock.low_only(low, context, PARTIAL)  # no shard told it all in time
            elif whole is not None:
                every = np.arange(low.manifest.vocabulary_size, dtype=np.uint32)
                block = ContextBlock.low_only(low, context)
                block = ContextBlock(low, context, block.sums, every, whole)
            elif not fetched.parts:
                block = ContextBlock.low_only(low, context, fetched.source)
            else:
                parts = fetched.parts
                words = (
                    parts[0].words
                    if len(parts) == 1
                    else np.concatenate([part.words for part in parts])
                )
                answers = joined([part.answers for part in parts])
                block = ContextBlock.make(low, context, parts[0].log10_backoffs, words, answers)
                if fetched.source != FULL:
                    block = ContextBlock(low, context, block.sums, words, answers, fetched.source)
            made.append(block)
        return made
