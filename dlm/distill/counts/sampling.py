"""Selects the sentences to count, in blocks: drawn from a source, or taken from a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.distill.counts import work
from dlm.errors import ConfigError
from dlm.ngram.vocab import Vocabulary
from dlm.ngram.wordtable import WordTable

# Sentences per block. DRAWN is large, since a network takes as long for the last few of a block as
# for a whole batch. ASKED is for a source that is queried for each prefix, and may be slow. GIVEN
# is for sentences that come whole, such as a text's; `visits.followed` sorts a block by length.
DRAWN, ASKED, GIVEN = 20_000, 1_000, 1024


@dataclass(frozen=True)
class GivenText:
    """A text whose histories are visited instead of sampled ones; `sha256` is the text's digest.

    `blocks` returns the same lines at every call: one sentence each, joined by line feeds.
    `record` is the line of the text's privacy record, stored with the counts, or "" without one.
    """

    name: str
    sha256: str
    blocks: Callable[[], Iterable[bytes]]
    record: str = ""


@dataclass(frozen=True)
class Sampling:
    """Which sentences are counted: either `samples` sentences over all parts, drawn with `seed`,
    or the sentences of a text. `part` is (i, n): a worker counts part i of n, from 1 up."""

    samples: int = 0
    seed: int = 0
    part: tuple[int, int] = (1, 1)
    text: GivenText | None = None

    def __post_init__(self) -> None:
        place, parts = self.part
        if not 1 <= place <= parts:
            most = max(parts, 1)
            raise ConfigError(
                f"part {place}/{parts} is not valid; expected 1/{most} to {most}/{most}"
            )
        if self.text is not None:
            if self.samples:
                raise ConfigError("both samples and a text were given; give only one")
        elif self.own_samples < 1:
            raise ConfigError(
                f"{self.samples} samples were requested for {self.part[1]} parts; expected at "
                "least 1 per part"
            )
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}; expected 0 or more")

    @property
    def own_samples(self) -> int:
        place, parts = self.part
        return self.samples // parts + (place <= self.samples % parts)

    def drawn(self, most: int | None = None) -> Iterator[tuple[int, np.random.SeedSequence]]:
        """Yields the number of sentences in each block to draw, and the block's seed. A block has
        at most `most` sentences, by default `DRAWN`."""
        size = most or DRAWN
        for number, first in enumerate(range(0, self.own_samples, size)):
            entropy = [self.seed, *self.part, number]
            yield min(size, self.own_samples - first), np.random.SeedSequence(entropy)

    def given(self, vocabulary: Vocabulary) -> Iterator[list[NDArray[np.uint32]]]:
        """Returns the sentences of the text as ids, in blocks; a part takes every n-th block. Words
        outside the vocabulary become `<unk>`; `<s>` and `</s>` in a line are left out."""
        assert self.text is not None
        rest = _lines(self.text, vocabulary)
        blocks = iter(lambda: list(islice(rest, GIVEN)), [])
        return islice(blocks, self.part[0] - 1, None, self.part[1])

    def settings(self) -> dict[str, Any]:
        """Returns the settings that `work` stores: the common ones, and those of this part."""
        place, parts = self.part
        if self.text is not None:
            record = {"text_record": self.text.record} if self.text.record else {}
            own = {"text": self.text.sha256, "parts": parts, work.SHARE: {"part": place}}
            return own | record
        share = {"seed": self.seed, "part": f"{place}/{parts}", "samples": self.own_samples}
        return {work.SHARE: share}


def _lines(text: GivenText, vocabulary: Vocabulary) -> Iterator[NDArray[np.uint32]]:
    table = WordTable.from_vocabulary(vocabulary)
    for block in text.blocks():
        ids, begins = table.ids_of_text(block)
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            line = ids[begin:end]
            yield line[(line != vocabulary.begin_id) & (line != vocabulary.end_id)]
