"""Words as spelled by pieces: a tree of their characters, with pieces as the arcs.

A node is the part of a word spelled so far; all segmentations of it lead there. With the end of a
word as a symbol of its own, this is the transducer M of FNG 6: it is deterministic, and each word
is said at one node by one symbol, its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm.distill.sources import mass_kernels as kernels
from dlm.errors import ConfigError
from dlm.federated.pieces.inventory import BEGIN, END, SPACE, UNKNOWN, Inventory
from dlm.ngram.vocab import MARKS, Vocabulary, is_mark


@dataclass(frozen=True, eq=False)
class Lexicon:
    """The words that wordpieces spell.

    Shapes, v pieces, n nodes (node 0 is the root, before a word), a arcs
        kind       (v,)      uint8  what a piece does to a word: `mass_kernels.GOES_ON` and so on
        enters     (v,)      int64  the node after a piece that begins a word, or OUTSIDE
        begin      (n + 1,)  int64  arcs of node i are begin[i]:begin[i + 1]
        arc_piece  (a,)      int64  increasing within a node
        arc_node   (a,)      int64  the node after the arc
        word_at    (n,)      int64  the word that ends at a node; 0 (<unk>) if none does
        base       (w,)      float64  half a uniform share, half the unigram probability of the
                             word's pieces (Kudo 2018), which makes rare words nearly impossible;
                             sums to 1 over words, marks have 0
    """

    vocabulary: Vocabulary
    kind: NDArray[np.uint8]
    enters: NDArray[np.int64]
    begin: NDArray[np.int64]
    arc_piece: NDArray[np.int64]
    arc_node: NDArray[np.int64]
    word_at: NDArray[np.int64]
    base: NDArray[np.float64]

    @classmethod
    def of(cls, inventory: Inventory, words: Iterable[bytes]) -> Lexicon:
        """The words that an inventory can spell; ConfigError if there are none."""
        ln_piece = inventory.log_probabilities()
        spelled: list[str] = []
        ln_words: list[float] = []
        for word in words:
            text = _text(word)
            if text is None or is_mark(word):
                continue
            cut = inventory.encode_word(text)
            if cut and UNKNOWN not in cut and inventory.decode(cut) == [text]:
                spelled.append(text)
                ln_words.append(float(ln_piece[cut].sum()))
        if not spelled:
            raise ConfigError(
                "the wordpieces spell no word of the topology; give a topology in the language, "
                "spelling and case of the text that the wordpieces were made from"
            )
        vocabulary = Vocabulary([*MARKS, *(w.encode() for w in spelled)], unk_in_model=True)
        likely = np.exp(np.array(ln_words) - max(ln_words))
        shares = (likely / likely.sum() + 1 / len(likely)) / 2
        base = np.concatenate([np.zeros(len(MARKS)), shares])
        return cls(vocabulary, *_tree(inventory.pieces(), spelled), base)

    @property
    def begins_word(self) -> NDArray[np.bool_]:
        """(v,) bool: which pieces begin a word."""
        return np.isin(self.kind, (kernels.BEGINS, kernels.BEGINS_UNKNOWN))

    def walk(self, nodes: NDArray[np.int64], pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """The node after each piece, from the node before it; `OUTSIDE` if it is not in a word."""
        arcs = self.begin, self.arc_piece, self.arc_node
        out: NDArray[np.int64] = kernels.walk(nodes, pieces, self.kind, self.enters, *arcs)
        return out

    def split(self, given: NDArray[np.floating], nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        out = np.empty((len(given), 4))
        exact = np.ascontiguousarray(given, np.float64)
        kernels.split_mass(exact, nodes, self.kind, self.begin, self.arc_piece, out)
        return out


def _text(word: bytes) -> str | None:
    try:
        return word.decode()
    except UnicodeDecodeError:
        return None


def _tree(
    pieces: list[str], words: list[str]
) -> tuple[
    NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64],
    NDArray[np.int64],
]:  # fmt: skip
    nodes = {"": 0}
    word_at = {}
    for word, text in enumerate(words, len(MARKS)):
        marked = SPACE + text
        for end in range(1, len(marked) + 1):
            nodes.setdefault(marked[:end], len(nodes))
        word_at[nodes[marked]] = word
    ids = {piece: i for i, piece in enumerate(pieces) if i not in (UNKNOWN, BEGIN, END)}
    longest = max(map(len, ids), default=0)
    enters = np.full(len(pieces), kernels.OUTSIDE, np.int64)
    arcs: list[tuple[int, int, int]] = []
    for text, node in nodes.items():
        for start in range(max(0, len(text) - longest), len(text)):
            piece = ids.get(text[start:])
            if piece is None:
                continue
            if start == 0:
                enters[piece] = node
            else:
                arcs.append((nodes[text[:start]], piece, node))
    kind = np.full(len(pieces), kernels.GOES_ON, np.uint8)
    for name, i in ids.items():
        if name.startswith(SPACE):
            known = enters[i] != kernels.OUTSIDE
            kind[i] = kernels.BEGINS if known else kernels.BEGINS_UNKNOWN
    kind[BEGIN], kind[END] = kernels.NEVER, kernels.ENDS
    table = np.array(sorted(arcs), np.int64).reshape(-1, 3)
    begin = np.searchsorted(table[:, 0], np.arange(len(nodes) + 1))
    ends = np.zeros(len(nodes), np.int64)
    ends[list(word_at)] = list(word_at.values())
    return (
        kind, enters, begin.astype(np.int64), np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]), ends,
    )  # fmt: skip
